"""Draws are functions of their keys alone, look uniform, and dropout is unbiased and alike in any slice."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.checkpoint import checkpoint

from sparse_engine import (
    PURPOSE_DROPOUT,
    PURPOSE_SHUFFLE,
    keyed_dropout,
    keyed_permutation,
    keys,
    subkeys,
    uniform,
)
from sparse_engine import keyed as keyed_module

IDS = torch.arange(1000)


def row_keys(n: int, step: int = 0) -> torch.Tensor:
    return keys(7, PURPOSE_DROPOUT, step, 0, torch.arange(n))


def test_every_argument_changes_every_key() -> None:
    base = (3, 1, 5, 2)
    changed = [(4, 1, 5, 2), (3, 2, 5, 2), (3, 1, 6, 2), (3, 1, 5, 3), (3, 1, 5, -1), (1, 3, 5, 2), (3, 1, 2, 5)]
    drawn = [keys(*arguments, IDS) for arguments in [base, *changed]]
    for left, right in itertools.combinations(drawn, 2):
        assert not (left == right).any()
    assert torch.cat(drawn).unique().numel() == 8 * 1000


def test_keys_match_splitmix64_written_in_python_integers() -> None:
    mix = keyed_module._mix_int
    # The first outputs of the published generator for seed 1234567 (Rosetta Code, "Splitmix64").
    state, published = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    assert [mix((state + i * gamma) % 2**64) for i in range(3)] == published
    assert [i % 2**64 for i in subkeys(torch.tensor([state]), torch.arange(3)).tolist()] == published
    chain = 0
    for part in (9, 2, 4, -1 % 2**64):
        chain = mix(chain ^ mix(part))
    expected = [mix(mix(i) ^ chain) for i in (0, 1, 2**40)]
    assert [i % 2**64 for i in keys(9, 2, 4, -1, torch.tensor([0, 1, 2**40])).tolist()] == expected


def test_keys_do_not_depend_on_the_company_of_an_id() -> None:
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keys(1, 1, 0, 0, IDS)[order], keys(1, 1, 0, 0, IDS[order]))


def test_subkeys_of_an_integer_and_of_a_tensor_agree() -> None:
    base = keys(1, 1, 0, 0, IDS)
    table = subkeys(base[:, None], torch.arange(4))
    for index in range(4):
        assert torch.equal(table[:, index], subkeys(base, index))
    assert table.unique().numel() == table.numel()


def test_uniform_is_uniform_and_serially_uncorrelated() -> None:
    draws = uniform(keys(0, 1, 0, 0, torch.arange(20_000)))
    assert draws.dtype == torch.float64
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1])) < 0.03
    assert uniform(torch.tensor([-1])).item() < 1.0


def test_permutation_is_one_and_changes_with_the_step() -> None:
    order = keyed_permutation(3, PURPOSE_SHUFFLE, 0, 500)
    assert torch.equal(order.sort().values, torch.arange(500))
    assert torch.equal(order, keyed_permutation(3, PURPOSE_SHUFFLE, 0, 500))
    assert not torch.equal(order, keyed_permutation(3, PURPOSE_SHUFFLE, 1, 500))
    assert keyed_permutation(3, PURPOSE_SHUFFLE, 0, 0).shape == (0,)


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_dropout_has_its_rate_in_every_row_and_column_and_is_unbiased(p: float) -> None:
    out = keyed_dropout(torch.ones(2000, 64, dtype=torch.float64), p, row_keys(2000))
    dropped = (out == 0).double()
    rate = round(p * 65536) / 65536
    assert torch.equal(out.unique(), torch.tensor([0.0, 1 / (1 - rate)], dtype=torch.float64))
    for shares, count in ((dropped.mean(0), 2000), (dropped.mean(1), 64), (dropped.mean().view(1), 128_000)):
        z = (shares - p) / (p * (1 - p) / count) ** 0.5
        assert float(z.abs().max()) < 5.0
    assert abs(float(out.mean()) - 1) < 5 * (p / (1 - p) / 128_000) ** 0.5


def test_dropout_of_neighbouring_rows_columns_and_lanes_is_independent() -> None:
    dropped = (keyed_dropout(torch.ones(4000, 32), 0.5, row_keys(4000)) == 0).double() - 0.5
    correlations = torch.corrcoef(dropped.t()).fill_diagonal_(0.0)  # of columns, over rows
    assert float(correlations.abs().max()) < 5 / 4000**0.5
    rows = (dropped[:-1] * dropped[1:]).mean() * 4
    assert abs(float(rows)) < 5 / (4000 * 32) ** 0.5


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(0, 6),
    columns=st.integers(1, 9),
    first=st.integers(0, 8),
    offset=st.integers(0, 5),
    seed=st.integers(0),
)
def test_a_slice_of_columns_and_any_rows_drop_as_in_the_whole(
    n: int, columns: int, first: int, offset: int, seed: int
) -> None:
    first = min(first, columns)
    x = torch.rand(n, columns) + 1
    whole = keyed_dropout(x, 0.4, row_keys(n), column_offset=offset)
    assert torch.equal(whole[:, first:], keyed_dropout(x[:, first:], 0.4, row_keys(n), column_offset=offset + first))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed % 2**31))
    assert torch.equal(whole[order], keyed_dropout(x[order], 0.4, row_keys(n)[order], column_offset=offset))


def test_dropout_over_several_dims_counts_columns_in_row_major_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(50, 4, 6) + 1
    out = keyed_dropout(x, 0.3, row_keys(50))
    assert torch.equal(out.view(50, 24), keyed_dropout(x.view(50, 24), 0.3, row_keys(50)))
    heads = keyed_dropout(x[:, 1:3], 0.3, row_keys(50), column_offset=6)  # a slice of heads, non-contiguous
    assert torch.equal(out[:, 1:3], heads)
    monkeypatch.setattr(keyed_module, "_DROPOUT_BLOCK", 40)
    assert torch.equal(out, keyed_dropout(x, 0.3, row_keys(50)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradient_is_the_mask_times_the_scale(dtype: torch.dtype) -> None:
    x = torch.rand(20, 7).add_(1).to(dtype).requires_grad_()
    out = keyed_dropout(x, 0.25, row_keys(20))
    grad = torch.rand(20, 7).to(dtype)
    out.backward(grad)
    mask = out.detach() != 0
    assert out.dtype == dtype
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(mask, grad * (1 / 0.75), 0.0))
    assert torch.equal(out.detach(), torch.where(mask, x.detach() * (1 / 0.75), 0.0))


def test_dropout_saves_only_the_mask_and_is_differentiable_twice() -> None:
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.rand(9, 5, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keyed_dropout(x, 0.5, row_keys(9))
    assert [tensor.dtype for tensor in saved] == [torch.bool]
    dropout = lambda value: keyed_dropout(value, 0.5, row_keys(9))  # noqa: E731
    assert torch.autograd.gradcheck(dropout, (x,))
    assert torch.autograd.gradgradcheck(dropout, (x,))


def test_recomputation_under_checkpointing_drops_alike() -> None:
    x = torch.rand(30, 8, requires_grad=True)

    def layer(value: torch.Tensor) -> torch.Tensor:
        return keyed_dropout(value * value, 0.5, row_keys(30)).sin()

    (plain,) = torch.autograd.grad(layer(x).sum(), x)
    (recomputed,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)
    assert torch.equal(plain, recomputed)


def test_no_dropout_returns_its_input_itself() -> None:
    x = torch.rand(3, 2)
    assert keyed_dropout(x, 0.0, row_keys(3)) is x
    assert keyed_dropout(x, 0.5, row_keys(3), training=False) is x


def test_dropout_of_zero_rows_or_columns() -> None:
    for shape in ((0, 4), (0, 2, 3), (3, 0), (3, 2, 0)):
        x = torch.rand(shape, requires_grad=True)
        out = keyed_dropout(x, 0.5, row_keys(shape[0]))
        assert out.shape == shape
        out.sum().backward()
    assert keyed_dropout(torch.ones(4), 0.5, row_keys(4)).shape == (4,)


def test_extreme_rates_stay_finite() -> None:
    assert torch.isfinite(keyed_dropout(torch.ones(50, 50), 1 - 1e-9, row_keys(50))).all()
    assert torch.equal(keyed_dropout(torch.ones(50, 50), 1e-9, row_keys(50)), torch.ones(50, 50))


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_rates_outside_the_range_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match="choose it in"):
        keyed_dropout(torch.ones(2, 2), p, row_keys(2))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="row_keys int64"):
        keyed_dropout(torch.ones(2, 2), 0.5, row_keys(3))
    with pytest.raises(ValueError, match="floating x"):
        keyed_dropout(torch.ones(2, 2, dtype=torch.int64), 0.5, row_keys(2))
    with pytest.raises(ValueError, match="column_offset=-1"):
        keyed_dropout(torch.ones(2, 2), 0.5, row_keys(2), column_offset=-1)
    with pytest.raises(ValueError, match="ids must be int64"):
        keys(0, 1, 0, 0, torch.arange(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="n=-1"):
        keyed_permutation(0, 1, 0, -1)
