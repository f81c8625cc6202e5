"""A sample is a function of key, degree and neighbour list; it is uniform, without repetition, and knows its odds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sparse_engine import METHODS, PURPOSE_SAMPLING, Method, Sample, keys, sample_neighbors, torch_sampler
from sparse_engine import sampler as sampler_module


def row_keys(rows: torch.Tensor, step: int = 0) -> torch.Tensor:
    return keys(11, PURPOSE_SAMPLING, step, 0, rows)


def graph(degrees: list[int] | torch.Tensor, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """Every edge has a source of its own, so that equal sources mean the same edge."""
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.as_tensor(degrees, dtype=torch.int64).cumsum(0)])
    return indptr, torch.arange(int(indptr[-1]), dtype=dtype) * 3 + 1


def rows_of(sample: Sample) -> list[list[int]]:
    ends = sample.indptr.tolist()
    return [sample.indices[begin:end].tolist() for begin, end in itertools.pairwise(ends)]


@settings(deadline=None, max_examples=60)
@given(
    degrees=st.lists(st.integers(0, 70), max_size=12),
    fanout=st.integers(1, 60),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_rows_hold_min_of_degree_and_fanout_different_own_edges_in_graph_order(
    degrees: list[int], fanout: int, dtype: torch.dtype
) -> None:
    indptr, indices = graph(degrees, dtype)
    sample = sample_neighbors(indptr, indices, None, fanout, row_keys(torch.arange(len(degrees))))
    assert sample.indices.dtype == dtype
    assert sample.indptr.dtype == torch.int64
    drawn = rows_of(sample)
    for row, degree in enumerate(degrees):
        own = indices[indptr[row] : indptr[row + 1]].tolist()
        assert len(drawn[row]) == min(degree, fanout)
        assert set(drawn[row]) <= set(own)
        assert drawn[row] == sorted(set(drawn[row]))
        if degree <= fanout:
            assert drawn[row] == own
        assert float(sample.inclusion[row]) == (1.0 if degree <= fanout else fanout / degree)


@settings(deadline=None, max_examples=40)
@given(degrees=st.lists(st.integers(0, 12), min_size=1, max_size=20), fanout=st.integers(1, 8), data=st.data())
def test_a_row_draws_alike_in_any_batch_order_and_graph(degrees: list[int], fanout: int, data: st.DataObject) -> None:
    indptr, indices = graph(degrees)
    every = torch.arange(len(degrees))
    whole = rows_of(sample_neighbors(indptr, indices, None, fanout, row_keys(every)))
    asked = torch.tensor(data.draw(st.lists(st.integers(0, len(degrees) - 1), max_size=10)), dtype=torch.int64)
    part = sample_neighbors(indptr, indices, asked, fanout, row_keys(asked))
    assert rows_of(part) == [whole[row] for row in asked.tolist()]
    for row in asked.tolist():  # alone in a graph of its own, under another number
        own = indices[indptr[row] : indptr[row + 1]]
        lone = sample_neighbors(torch.tensor([0, own.numel()]), own, None, fanout, row_keys(torch.tensor([row])))
        assert rows_of(lone) == [whole[row]]


def assert_same(left: Sample, right: Sample) -> None:
    """Bit for bit."""
    assert left.indices.dtype == right.indices.dtype
    for ours, others in zip(astuple(left), astuple(right), strict=True):
        assert (ours is None) == (others is None)
        assert ours is None or torch.equal(ours, others)


def by_torch(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], Sample]) -> Sample:
    """What `draw` gives without compiled code."""
    with monkeypatch.context() as patch:
        patch.setattr(sampler_module.cpu_sampler, "suits", lambda request: False)
        return draw()


def assert_compiled(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], Sample]) -> None:
    """That no torch operations draw, as the comparisons would then compare them with themselves."""
    with monkeypatch.context() as patch:
        patch.setattr(torch_sampler, "draw", None)
        draw()


def numbers(count: int, kinds: int, seed: int = 0) -> torch.Tensor:
    """Random weights of which many are equal and some are 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, kinds, (count,), generator=generator).float() ** 2 / 3.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fanout", [1, 7, 33, 65, 300])
@pytest.mark.parametrize("method", METHODS)
def test_compiled_code_threads_and_blocks_change_nothing(
    method: Method, fanout: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_rows = 3000 if fanout < 50 else 300
    degrees = torch.randint(0, 3 * fanout + 30, (num_rows,), generator=generator)
    degrees[::7] = 0
    indptr, indices = graph(degrees, dtype)
    rows = torch.randint(0, num_rows, (num_rows + 13,), generator=generator)
    given: dict[str, Any] = {"weights": numbers(indices.numel(), 9)}
    given["source_keys"] = keys(5, PURPOSE_SAMPLING, 0, 0, torch.arange(int(indices.max()) + 1))

    def draw() -> Sample:
        return sample_neighbors(indptr, indices, rows, fanout, row_keys(rows), method=method, **given)

    expected = by_torch(monkeypatch, draw)
    assert_compiled(monkeypatch, draw)
    threads = torch.get_num_threads()
    try:
        for num_threads, block in ((1, 100), (2, 1000), (3, 2**14)):
            torch.set_num_threads(num_threads)
            assert_same(draw(), expected)
            monkeypatch.setattr(torch_sampler, "_BLOCK", block)
            assert_same(by_torch(monkeypatch, draw), expected)
    finally:
        torch.set_num_threads(threads)


@settings(deadline=None, max_examples=60)
@given(
    degrees=st.lists(st.integers(0, 20), max_size=9),
    fanout=st.one_of(st.none(), st.integers(1, 25)),
    method=st.sampled_from(METHODS),
    kinds=st.integers(1, 50),
    whole=st.booleans(),
)
def test_compiled_code_draws_the_same_edges_of_any_graph(
    degrees: list[int], fanout: int | None, method: Method, kinds: int, whole: bool
) -> None:
    indptr, indices = graph(degrees)
    rows = None if whole else torch.arange(len(degrees)).flip(0)
    given: dict[str, Any] = {"weights": numbers(indices.numel(), kinds, seed=kinds)}
    given["source_keys"] = keys(5, PURPOSE_SAMPLING, 0, 0, torch.arange(3 * len(indices) + 2))

    def draw() -> Sample:
        every = row_keys(torch.arange(len(degrees)))
        return sample_neighbors(indptr, indices, rows, fanout, every, method=method, **given)

    with pytest.MonkeyPatch.context() as patch:
        assert_same(draw(), by_torch(patch, draw))


# By weight and shared -------------------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([1.0, 2.0, 4.0, 0.0, 30.0, 3.0, 2.0, 5.0])


def many_draws(method: Method, fanout: int, weights: torch.Tensor, count: int) -> Sample:
    """`count` rows with the same edges, drawn by keys of their own; indices are the positions in the row."""
    degree = weights.numel()
    indptr = torch.arange(count + 1) * degree
    every = row_keys(torch.arange(count))
    return sample_neighbors(
        indptr, torch.arange(degree).repeat(count), None, fanout, every, method=method, weights=weights.repeat(count)
    )


@pytest.mark.parametrize("method", ["weighted", "multinomial"])
def test_edges_enter_as_often_as_they_are_said_to(method: Method) -> None:
    count, fanout = 40_000, 3
    sample = many_draws(method, fanout, WEIGHTS, count)
    assert sample.indices.numel() == count * fanout and sample.edge_inclusion is not None
    seen = torch.bincount(sample.indices, minlength=8).double() / count
    said = torch.zeros(8, dtype=torch.float64)
    said[sample.indices] = sample.edge_inclusion  # each edge of a list has one probability
    assert torch.equal(said[sample.indices], sample.edge_inclusion)
    assert float((seen - said)[seen > 0].abs().max()) < 0.01
    if method == "multinomial":
        theory = fanout * WEIGHTS / WEIGHTS.sum()
    else:  # 30 would exceed 1: it is taken for sure, the others share two
        theory = torch.where(WEIGHTS == 30.0, 1.0, (fanout - 1) * WEIGHTS / (WEIGHTS.sum() - 30.0))
    assert float((seen - theory).abs().max()) < 0.01


@pytest.mark.parametrize("method", ["weighted", "multinomial"])
def test_weighing_by_what_is_said_estimates_the_full_sum(method: Method) -> None:
    count = 20_000
    weights = WEIGHTS + 0.5
    values = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sample = many_draws(method, 4, weights, count)
    assert sample.edge_inclusion is not None
    sums = (values[sample.indices] / sample.edge_inclusion).view(count, 4).sum(1)
    assert abs(float(sums.mean() - values.sum())) < 4.5 * float(sums.std()) / count**0.5
    wrong = values[sample.indices].view(count, 4).sum(1).mean() * 8 / 4
    assert abs(float(wrong - values.sum())) > 0.1, "without the weights it is another number"


def test_weights_that_are_all_zero_or_alike_draw_uniformly() -> None:
    for weights in (torch.zeros(6), torch.full((6,), 7.0)):
        sample = many_draws("weighted", 2, weights, 30_000)
        assert sample.edge_inclusion is not None
        torch.testing.assert_close(sample.edge_inclusion, torch.full_like(sample.edge_inclusion, 1 / 3))
        seen = torch.bincount(sample.indices, minlength=6) / 30_000
        assert float((seen - 1 / 3).abs().max()) < 0.01


def test_the_largest_are_taken_and_of_equal_ones_the_first() -> None:
    weights = torch.tensor([3.0, -1.0, 3.0, 5.0, 3.0])
    sample = sample_neighbors(torch.tensor([0, 5]), torch.arange(5) + 10, None, 3, None, method="top", weights=weights)
    assert sample.indices.tolist() == [10, 12, 13]
    assert (sample.inclusion.tolist(), sample.edge_inclusion) == ([1.0], None)


def test_rows_that_share_sources_draw_common_ones() -> None:
    """400 rows with the same 50 sources: as many edges each as by themselves, of far fewer sources."""
    indptr, indices = torch.arange(401) * 50, torch.arange(50).repeat(400)
    kept, sources = [], []
    for step in range(200):
        source_keys = keys(3, PURPOSE_SAMPLING, step, 0, torch.arange(50))
        sample = sample_neighbors(indptr, indices, None, 5, None, method="shared", source_keys=source_keys)
        assert sample.inclusion.tolist() == [0.1] * 400
        assert len(sample.indices.unique()) == len(sample.indices) // 400, "all rows have the same"
        kept.append(len(sample.indices) / 400)
        sources.append(len(sample.indices.unique()))
    assert sum(kept) / 200 == pytest.approx(5.0, abs=0.6)
    own = sample_neighbors(indptr, indices, None, 5, row_keys(torch.arange(400)))
    assert len(own.indices.unique()) == 50 and max(sources) < 20


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (9, 4), (6, 5), (8, 1)])
def test_positions_and_sets_are_uniform(degree: int, fanout: int) -> None:
    num_rows = 12_000
    indptr, _ = graph([degree] * num_rows)
    indices = torch.arange(degree).repeat(num_rows)
    sample = sample_neighbors(indptr, indices, None, fanout, row_keys(torch.arange(num_rows)))
    counts = torch.bincount(sample.indices, minlength=degree).double()
    # counts of a draw without replacement vary less than multinomial ones: scale the statistic to chi-square
    share = fanout / degree
    statistic = ((counts - num_rows * share) ** 2).sum() / (num_rows * share * (1 - share)) * (degree - 1) / degree
    assert stats.chi2.sf(float(statistic), degree - 1) > 1e-3
    sets = (2 ** sample.indices.view(num_rows, fanout)).sum(1)
    observed = torch.bincount(sets)[[sum(2**i for i in c) for c in itertools.combinations(range(degree), fanout)]]
    assert int(observed.sum()) == num_rows
    assert stats.chisquare(observed.numpy()).pvalue > 1e-3


def test_inverse_inclusion_weights_estimate_the_full_sum() -> None:
    degrees = torch.tensor([3, 10, 25, 100])
    indptr, _ = graph(degrees)
    values = torch.rand(int(indptr[-1]), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    full = torch.stack([values[b:e].sum() for b, e in itertools.pairwise(indptr.tolist())])
    num_draws = 3000
    rows = torch.arange(4).repeat(num_draws)
    keys_of_draws = row_keys(torch.arange(4 * num_draws))
    sample = sample_neighbors(indptr, torch.arange(values.numel()), rows, 5, keys_of_draws)
    drawn = torch.repeat_interleave(torch.arange(rows.numel()), sample.indptr.diff())
    estimates = torch.zeros(rows.numel(), dtype=torch.float64).index_add(0, drawn, values[sample.indices])
    estimates = (estimates / sample.inclusion).view(num_draws, 4)
    error = (estimates.mean(0) - full).abs() / (estimates.std(0) / num_draws**0.5 + 1e-12)
    assert float(error[0]) == pytest.approx(0.0, abs=1e-3)
    assert float(error.max()) < 4.5


def test_steps_draw_afresh() -> None:
    indptr, indices = graph([20] * 50)
    first, second = (sample_neighbors(indptr, indices, None, 5, row_keys(torch.arange(50), step)) for step in (0, 1))
    assert (first.indices == second.indices).double().mean() < 0.2


@pytest.mark.parametrize("fanout", [1, 2, 3, 10, 15, 31, 48, 49])
def test_the_sorting_network_sorts(fanout: int) -> None:
    values = torch.randint(0, 50, (fanout, 200), generator=torch.Generator().manual_seed(fanout))
    assert torch.equal(torch_sampler._sort_columns(values.clone()), values.sort(0).values)


def test_the_full_neighbourhood_of_all_rows_is_the_graph_itself() -> None:
    indptr, indices = graph([2, 0, 3])
    sample = sample_neighbors(indptr, indices, None, None, None)
    assert sample.indptr is indptr
    assert sample.indices is indices
    assert sample.inclusion.tolist() == [1.0, 1.0, 1.0]


def test_the_full_neighbourhood_of_some_rows_equals_a_large_fanout() -> None:
    indptr, indices = graph([2, 0, 3, 7])
    rows = torch.tensor([3, 1, 0, 3])
    full = sample_neighbors(indptr, indices, rows, None, None)
    assert rows_of(full) == [indices[5:].tolist(), [], indices[:2].tolist(), indices[5:].tolist()]
    assert rows_of(full) == rows_of(sample_neighbors(indptr, indices, rows, 7, row_keys(rows)))


def test_nothing_asked_or_nothing_there() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    indptr, indices = graph([2, 5])
    for fanout in (None, 3):
        sample = sample_neighbors(indptr, indices, none, fanout, none)
        assert (sample.indptr.tolist(), sample.indices.numel(), sample.inclusion.numel()) == ([0], 0, 0)
        empty = sample_neighbors(torch.zeros(4, dtype=torch.int64), none, None, fanout, row_keys(torch.arange(3)))
        assert (empty.indptr.tolist(), empty.inclusion.tolist()) == ([0, 0, 0, 0], [1.0, 1.0, 1.0])


def test_wrong_arguments_are_refused() -> None:
    indptr, indices = graph([2, 5])
    with pytest.raises(ValueError, match="fanout is 0"):
        sample_neighbors(indptr, indices, None, 0, row_keys(torch.arange(2)))
    with pytest.raises(ValueError, match="needs row_keys"):
        sample_neighbors(indptr, indices, None, 2, None)
    with pytest.raises(ValueError, match=r"row_keys must be int64 \[2\]"):
        sample_neighbors(indptr, indices, None, 2, row_keys(torch.arange(3)))
    with pytest.raises(ValueError, match="rows span 0..2"):
        sample_neighbors(indptr, indices, torch.tensor([0, 2]), None, None)
    every = row_keys(torch.arange(2))
    with pytest.raises(ValueError, match="'best' is unknown; use one of uniform, weighted, multinomial, top, shared"):
        sample_neighbors(indptr, indices, None, 2, every, method="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'weighted' needs weights float32 \[7\]"):
        sample_neighbors(indptr, indices, None, 2, every, method="weighted")
    with pytest.raises(ValueError, match=r"weights must be float32 \[7\], got torch.float32 \[6\]"):
        sample_neighbors(indptr, indices, None, 2, every, method="top", weights=torch.ones(6))
    for wrong in (-1.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match="make them finite and at least 0"):
            sample_neighbors(indptr, indices, None, 2, every, method="weighted", weights=torch.full((7,), wrong))
    with pytest.raises(ValueError, match="needs source_keys int64"):
        sample_neighbors(indptr, indices, None, 2, None, method="shared")
    few = row_keys(torch.arange(int(indices.max())))  # one too few

    def draw() -> Sample:
        return sample_neighbors(indptr, indices, None, 2, None, method="shared", source_keys=few)

    with pytest.raises(ValueError, match="source_keys has 19 keys and an edge another source; give one for each"):
        draw()
    with pytest.raises(ValueError, match="source_keys has 19 keys and an edge another source; give one for each"):
        by_torch(pytest.MonkeyPatch(), draw)
