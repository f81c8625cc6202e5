"""A row's list depends on its key and the graph alone; visits follow personalised PageRank."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_engine import PURPOSE_WALKS, Visited, keys, most_visited
from sparse_engine import walks as walks_module

Edges = tuple[torch.Tensor, torch.Tensor]


def graph(num_nodes: int, degrees: torch.Tensor, dtype: torch.dtype, seed: int = 0) -> Edges:
    generator = torch.Generator().manual_seed(seed)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return indptr, torch.randint(0, max(num_nodes, 1), (int(indptr[-1]),), generator=generator).to(dtype)


def walk(edges: Edges, rows: torch.Tensor | None, k: int, **given: object) -> Visited:
    every = torch.arange(edges[0].numel() - 1)
    row_keys = keys(3, PURPOSE_WALKS, 0, -1, every if rows is None else rows)
    return most_visited(*edges, rows, k, row_keys, **{"order": every, **given})  # type: ignore[arg-type]


def by_torch(edges: Edges, rows: torch.Tensor | None, k: int, **given: object) -> Visited:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walks_module, "_walk_compiled", lambda code, *rest: walks_module._walk_torch(*rest))
        return walk(edges, rows, k, **given)


def lists_of(found: Visited) -> list[list[tuple[int, int]]]:
    pairs = list(zip(found.indices.tolist(), found.visits.tolist(), strict=True))
    return [pairs[begin:end] for begin, end in itertools.pairwise(found.indptr.tolist())]


def assert_same(left: Visited, right: Visited) -> None:
    for name in ("indptr", "indices", "visits"):
        ours, others = getattr(left, name), getattr(right, name)
        assert ours.dtype == others.dtype and torch.equal(ours, others), name


@settings(deadline=None, max_examples=60)
@given(
    degrees=st.lists(st.integers(0, 9), max_size=12),
    k=st.integers(1, 8),
    walks=st.integers(1, 40),
    restart=st.sampled_from([0.01, 0.25, 1.0]),
    wide=st.booleans(),
    whole=st.booleans(),
)
def test_compiled_code_finds_the_lists_of_torch_operations(
    degrees: list[int], k: int, walks: int, restart: float, wide: bool, whole: bool
) -> None:
    dtype = torch.int64 if wide else torch.int32
    edges = graph(len(degrees), torch.tensor(degrees, dtype=torch.int64), dtype, seed=len(degrees))
    rows = None if whole else torch.arange(len(degrees)).flip(0)
    found = walk(edges, rows, k, walks=walks, restart=restart)
    assert_same(found, by_torch(edges, rows, k, walks=walks, restart=restart))
    for row, entries in zip(
        range(len(degrees)) if whole else reversed(range(len(degrees))), lists_of(found), strict=True
    ):
        assert (len(entries) > 0) == (degrees[row] > 0)
        assert len(entries) <= k and len({node for node, _ in entries}) == len(entries)
        assert entries == sorted(entries, key=lambda entry: (-entry[1], entry[0]))


def test_threads_blocks_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    degrees = torch.randint(0, 15, (2000,), generator=torch.Generator().manual_seed(1))
    degrees[5] = 900
    edges = graph(2000, degrees, torch.int32)
    want = walk(edges, None, 7, walks=20, restart=0.3)
    lists = lists_of(want)
    threads = torch.get_num_threads()
    try:
        for num_threads, block in ((2, 100), (3, 3000)):
            torch.set_num_threads(num_threads)
            monkeypatch.setattr(walks_module, "_BLOCK", block)
            assert_same(walk(edges, None, 7, walks=20, restart=0.3), want)
            assert_same(by_torch(edges, None, 7, walks=20, restart=0.3), want)
    finally:
        torch.set_num_threads(threads)
    rows = torch.tensor([1999, 3, 3, 700])
    assert lists_of(walk(edges, rows, 7, walks=20, restart=0.3)) == [lists[row] for row in rows.tolist()]


def test_other_numbers_for_the_nodes_find_the_same_lists() -> None:
    """Keys, ties and the order within a row are told by the old numbers, as a partitioned graph does."""
    num_nodes = 300
    generator = torch.Generator().manual_seed(4)
    indptr, indices = graph(num_nodes, torch.randint(0, 8, (num_nodes,), generator=generator), torch.int64)
    old = torch.randperm(num_nodes, generator=generator)  # the old number of each new one
    new = torch.argsort(old)
    rows = [new[indices[indptr[i] : indptr[i + 1]]] for i in old.tolist()]
    moved = (torch.tensor([0, *(len(row) for row in rows)]).cumsum(0), torch.cat(rows))
    row_keys = keys(3, PURPOSE_WALKS, 0, -1, old)
    found = most_visited(*moved, None, 6, row_keys, walks=16, restart=0.2, order=old)
    want = lists_of(walk((indptr, indices), None, 6, walks=16, restart=0.2))
    for at, entries in enumerate(lists_of(found)):
        assert [(int(old[node]), visits) for node, visits in entries] == want[int(old[at])]


def test_visits_are_those_of_personalised_pagerank() -> None:
    """Expected visits of a walk that restarts with probability a: sum over s of (1 - a)^s P^(s + 1)."""
    edges = graph(6, torch.tensor([2, 3, 1, 4, 2, 2]), torch.int64, seed=7)
    walks, restart = 40_000, 0.3
    step = torch.zeros(6, 6, dtype=torch.float64)
    row = torch.repeat_interleave(torch.arange(6), edges[0].diff())
    step.index_put_((row, edges[1]), 1.0 / edges[0].diff()[row].double(), accumulate=True)
    expected, power = torch.zeros_like(step), torch.eye(6, dtype=torch.float64)
    for s in range(32):
        power = power @ step
        expected += (1 - restart) ** s * power
    found = walk(edges, None, 6, walks=walks, restart=restart)
    seen = torch.zeros_like(step)
    seen[torch.repeat_interleave(torch.arange(6), found.indptr.diff()), found.indices] = found.visits.double() / walks
    assert float((seen - expected).abs().max()) < 0.03
    assert float(expected.sum(1).mean()) == pytest.approx(1 / restart, rel=1e-3)


def test_a_walk_ends_where_nothing_leads_on() -> None:
    path = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1])  # 0 -> 1 -> 2
    found = walk(path, None, 5, walks=10, restart=1e-9)
    assert lists_of(found) == [[], [(0, 10)], [(0, 10), (1, 10)]]
    nothing = walk(
        (torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)), None, 3, walks=2, restart=0.5
    )
    assert (nothing.indptr.tolist(), nothing.indices.dtype) == ([0, 0, 0, 0], torch.int32)


def test_wrong_arguments_are_refused() -> None:
    edges = graph(3, torch.tensor([1, 1, 1]), torch.int64)
    for wrong, line in (
        ({"walks": 0, "restart": 0.5}, "fanout is 2 and walks 0; use at least 1 of each"),
        ({"walks": 2, "restart": 0.0}, r"restart is 0.0; choose it in \(0, 1\]"),
        ({"walks": 2, "restart": 0.5, "order": torch.arange(2)}, r"order must be int64 \[3\], got torch.int64 \[2\]"),
    ):
        with pytest.raises(ValueError, match=line):
            walk(edges, None, 2, **wrong)
    with pytest.raises(ValueError, match=r"row_keys must be int64 \[3\]"):
        most_visited(*edges, None, 2, torch.arange(2), walks=2, restart=0.5, order=torch.arange(3))
