"""A sample is a function of key, degree and neighbour list; it is uniform, without repetition, and knows its odds."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sparse_engine import PURPOSE_SAMPLING, Sample, keys, sample_neighbors
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


def test_blocks_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    indptr, indices = graph(torch.randint(0, 40, (3000,), generator=generator))
    drawn = sample_neighbors(indptr, indices, None, 7, row_keys(torch.arange(3000)))
    threads = torch.get_num_threads()
    try:
        for num_threads, block in ((1, 100), (2, 1000), (2, 2**14)):
            torch.set_num_threads(num_threads)
            monkeypatch.setattr(sampler_module, "_BLOCK", block)
            again = sample_neighbors(indptr, indices, None, 7, row_keys(torch.arange(3000)))
            assert torch.equal(drawn.indices, again.indices)
            assert torch.equal(drawn.indptr, again.indptr)
    finally:
        torch.set_num_threads(threads)


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
    assert torch.equal(sampler_module._sort_columns(values.clone()), values.sort(0).values)


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
