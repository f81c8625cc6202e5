"""Aggregation equals a dense matrix product, its gradient the transposed one, within plain torch's error budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_engine import SparsePattern, aggregate


def random_pattern(num_rows: int, num_cols: int, num_edges: int, seed: int = 0) -> SparsePattern:
    generator = torch.Generator().manual_seed(seed)
    dst = torch.randint(0, max(num_rows, 1), (num_edges,), generator=generator)
    src = torch.randint(0, max(num_cols, 1), (num_edges,), generator=generator).int()
    return SparsePattern.from_edges(dst, src, num_rows, num_cols)


def dense_weights(pattern: SparsePattern, reduce: str, row_scale: Tensor | None) -> Tensor:
    """`[N, M]` float64."""
    counts = torch.zeros(pattern.num_rows, pattern.num_cols, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    counts.index_put_((pattern.row_index, pattern.indices.long()), one, accumulate=True)
    if reduce == "mean":
        counts = counts / pattern.degrees.clamp(min=1)[:, None]
    return counts if row_scale is None else counts * row_scale.double()[:, None]


def plain(x: Tensor, pattern: SparsePattern, reduce: str, row_scale: Tensor) -> Tensor:
    sums = x.new_zeros(pattern.num_rows, x.shape[1]).index_add(0, pattern.row_index, x[pattern.indices.long()])
    if reduce == "mean":
        sums = sums / pattern.degrees.clamp(min=1)[:, None].to(x.dtype)
    return sums * row_scale[:, None]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, 40, 55), (3, 50, 300), (50, 3, 300), (1, 1, 1), (6, 7, 0)])
def test_error_budget(shape: tuple[int, int, int], dtype: torch.dtype, reduce: str) -> None:
    pattern = random_pattern(*shape)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape[1], 13, generator=generator).to(dtype).requires_grad_()
    row_scale = (torch.rand(shape[0], generator=generator) + 0.5).to(dtype).requires_grad_()
    grad = torch.randn(shape[0], 13, generator=generator).to(dtype)
    weights = dense_weights(pattern, reduce, row_scale.detach())
    unscaled = dense_weights(pattern, reduce, None) @ x.detach().double()
    right = [weights @ x.detach().double(), weights.t() @ grad.double(), (unscaled * grad.double()).sum(1)]
    out = aggregate(x, pattern, reduce=reduce, row_scale=row_scale)
    usual = plain(x, pattern, reduce, row_scale)
    ours = [out.detach(), *torch.autograd.grad(out, (x, row_scale), grad)]
    theirs = [usual.detach(), *torch.autograd.grad(usual, (x, row_scale), grad)]
    for budget, our, their, true in zip((2, 3, 3), ours, theirs, right, strict=True):
        assert our.dtype == dtype
        floor = torch.finfo(dtype).eps * float(true.norm())
        assert float((our.double() - true).norm()) <= budget * float((their.double() - true).norm()) + floor


@settings(deadline=None, max_examples=40)
@given(
    num_rows=st.integers(0, 7),
    num_cols=st.integers(0, 7),
    num_edges=st.integers(0, 25),
    width=st.integers(0, 5),
    reduce=st.sampled_from(["sum", "mean"]),
    seed=st.integers(0, 2**31),
)
def test_random_patterns_equal_the_dense_product(
    num_rows: int, num_cols: int, num_edges: int, width: int, reduce: str, seed: int
) -> None:
    pattern = random_pattern(num_rows, num_cols, num_edges if num_rows and num_cols else 0, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_cols, width, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = dense_weights(pattern, reduce, None)
    out = aggregate(x, pattern, reduce=reduce)
    grad = torch.randn(num_rows, width, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(out.detach(), weights @ x.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], weights.t() @ grad, rtol=1e-12, atol=1e-12)


def test_edges_that_weigh_are_counted_so_often() -> None:
    pattern = random_pattern(30, 20, 200)
    x, grad = torch.randn(20, 5, dtype=torch.float64, requires_grad=True), torch.randn(30, 5, dtype=torch.float64)
    weight = torch.rand(200, generator=torch.Generator().manual_seed(1))
    dense = torch.zeros(30, 20, dtype=torch.float64)
    dense.index_put_((pattern.row_index, pattern.indices.long()), weight.double(), accumulate=True)
    for reduce, scale in (("sum", torch.ones(30)), ("mean", pattern.degrees.clamp(min=1))):
        out = aggregate(x, pattern, reduce=reduce, edge_weight=weight)
        torch.testing.assert_close(out.detach(), dense @ x.detach() / scale[:, None], rtol=1e-12, atol=1e-12)
        gradient = dense.t() @ (grad / scale[:, None])
        torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], gradient, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"edge_weight must be \[E=200\] on cpu, got \[30\] on cpu"):
        aggregate(x, pattern, edge_weight=torch.ones(30))


def test_gradcheck_to_second_order() -> None:
    pattern = random_pattern(5, 6, 14)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    row_scale = torch.rand(5, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(14, dtype=torch.float64)
    for reduce in ("sum", "mean"):

        def run(values: Tensor, scale: Tensor, reduce: str = reduce) -> Tensor:
            return aggregate(values, pattern, reduce=reduce, row_scale=scale, edge_weight=weight)

        assert torch.autograd.gradcheck(run, (x, row_scale))
        assert torch.autograd.gradgradcheck(run, (x, row_scale))


def test_any_trailing_shape_and_strides() -> None:
    pattern = random_pattern(9, 12, 50)
    x = torch.randn(12, 4, 5, 2, dtype=torch.float64)[..., 0]  # [12, 4, 5], strided
    flat = aggregate(x.reshape(12, 20), pattern)
    assert torch.equal(aggregate(x, pattern), flat.view(9, 4, 5))
    assert torch.equal(aggregate(x.transpose(1, 2), pattern), flat.view(9, 4, 5).transpose(1, 2))
    assert torch.equal(aggregate(x[:, 0, 0], pattern), flat[:, 0])


def test_rows_without_edges_are_zero_and_columns_without_edges_get_zero_gradients() -> None:
    pattern = SparsePattern(torch.tensor([0, 0, 1, 1]), torch.tensor([2]), 4)
    x = torch.randn(4, 3, requires_grad=True)
    for reduce in ("sum", "mean"):
        out = aggregate(x, pattern, reduce=reduce)
        assert not out[[0, 2]].any()
        assert torch.equal(out[1], x[2])
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.sum(1).tolist() == [0.0, 0.0, 3.0, 0.0]


def test_half_types_add_up_in_float32() -> None:
    pattern = SparsePattern(torch.tensor([0, 2000]), torch.arange(2000), 2000)
    out = aggregate(torch.ones(2000, 1, dtype=torch.bfloat16), pattern)
    assert out.item() == 2000.0  # bfloat16 sums of ones stand still at 256


def test_wrong_arguments_are_refused() -> None:
    pattern = random_pattern(4, 5, 9)
    with pytest.raises(ValueError, match="reduce is 'max'"):
        aggregate(torch.ones(5, 2), pattern, reduce="max")
    with pytest.raises(ValueError, match=r"floating x of \[M=5"):
        aggregate(torch.ones(4, 2), pattern)
    with pytest.raises(ValueError, match="floating x"):
        aggregate(torch.ones(5, 2, dtype=torch.int64), pattern)
    with pytest.raises(ValueError, match=r"row_scale must be \[N=4\]"):
        aggregate(torch.ones(5, 2), pattern, row_scale=torch.ones(5))
    with pytest.raises(ValueError, match="x is on meta"):
        aggregate(torch.ones(5, 2, device="meta"), pattern)
