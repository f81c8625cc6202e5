"""A pattern keeps edges where they were given, and its transpose is the same set of edges seen from the sources."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_engine import SparsePattern


@st.composite
def patterns(draw: st.DrawFn) -> SparsePattern:
    num_rows, num_cols = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    most = 30 if num_rows and num_cols else 0
    num_edges = draw(st.integers(0, most))
    dst = [draw(st.integers(0, num_rows - 1)) for _ in range(num_edges)]
    src = [draw(st.integers(0, num_cols - 1)) for _ in range(num_edges)]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return SparsePattern.from_edges(
        torch.tensor(dst, dtype=torch.int64), torch.tensor(src, dtype=dtype), num_rows, num_cols
    )


def dense(pattern: SparsePattern) -> torch.Tensor:
    counts = torch.zeros(pattern.num_rows, pattern.num_cols, dtype=torch.int64)
    return counts.index_put_((pattern.row_index, pattern.indices.long()), torch.tensor(1), accumulate=True)


@settings(deadline=None, max_examples=80)
@given(patterns())
def test_transpose_is_the_dense_transpose_and_perm_carries_edge_values(pattern: SparsePattern) -> None:
    pattern.validate()
    transposed, perm = pattern.transpose()
    transposed.validate()
    assert (transposed.num_rows, transposed.num_cols) == (pattern.num_cols, pattern.num_rows)
    assert transposed.indices.dtype == pattern.indices.dtype
    assert perm.dtype == torch.int64
    assert torch.equal(dense(transposed), dense(pattern).t())
    assert torch.equal(perm.sort().values, torch.arange(pattern.num_edges))
    assert torch.equal(transposed.indices.long(), pattern.row_index[perm])
    assert torch.equal(transposed.row_index, pattern.indices.long()[perm])


@settings(deadline=None, max_examples=30)
@given(patterns())
def test_the_counting_sort_of_the_cpu_equals_the_stable_sort_of_other_devices(pattern: SparsePattern) -> None:
    _, perm = pattern.transpose()
    assert torch.equal(perm, torch.argsort(pattern.indices, stable=True))


def test_from_edges_keeps_the_given_order_within_a_row() -> None:
    pattern = SparsePattern.from_edges(torch.tensor([1, 0, 1, 1]), torch.tensor([5, 3, 2, 5]), 3, 6)
    assert pattern.indptr.tolist() == [0, 1, 4, 4]
    assert pattern.indices.tolist() == [3, 5, 2, 5]
    assert pattern.degrees.tolist() == [1, 3, 0]
    assert pattern.row_index.tolist() == [0, 1, 1, 1]


def test_derived_tensors_are_computed_once() -> None:
    pattern = SparsePattern(torch.tensor([0, 1]), torch.tensor([0]), 1)
    assert pattern.row_index is pattern.row_index
    assert pattern.degrees is pattern.degrees
    assert pattern.transpose()[0] is pattern.transpose()[0]
    assert pattern.to("cpu") is pattern


def test_read_only_memory_is_enough() -> None:
    indptr, indices = np.array([0, 2, 3]), np.array([1, 0, 1], dtype=np.int32)
    indptr.flags.writeable = indices.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that such a tensor must not be written to; that is the point
        pattern = SparsePattern(torch.from_numpy(indptr), torch.from_numpy(indices), 2)
    pattern.validate()
    assert pattern.transpose()[0].indices.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("indptr", "indices", "num_cols", "message"),
    [
        (torch.tensor([[0]]), torch.tensor([0]), 1, "indptr must be int64"),
        (torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0]), 1, "indptr must be int64"),
        (torch.tensor([0, 1]), torch.tensor([0.0]), 1, "indices must be int64 or int32"),
        (torch.tensor([0, 1]), torch.tensor([0]), -1, "num_cols is -1"),
    ],
)
def test_the_constructor_refuses_wrong_shapes_and_dtypes(
    indptr: torch.Tensor, indices: torch.Tensor, num_cols: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SparsePattern(indptr, indices, num_cols)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([1, 2], [0, 0], r"indptr\[0\] is 1"),
        ([0, 1], [0, 0], r"indptr\[-1\] is 1 but indices has 2"),
        ([0, 2, 1, 2], [0, 0], "decreases at row 1, from 2 to 1"),
        ([0, 2], [0, 3], r"indices\[1\] is 3, outside \[0, 3\); raise num_cols to at least 4"),
        ([0, 2], [0, -1], r"indices\[1\] is -1"),
    ],
)
def test_validate_says_where_and_what(indptr: list[int], indices: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparsePattern(torch.tensor(indptr), torch.tensor(indices), 3).validate()


@pytest.mark.parametrize(
    ("dst", "src", "message"),
    [([0], [0, 1], "one shape"), ([2], [0], r"from_edges.dst\[0\] is 2"), ([0], [-1], r"from_edges.src\[0\] is -1")],
)
def test_from_edges_refuses_what_is_out_of_range(dst: list[int], src: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparsePattern.from_edges(torch.tensor(dst), torch.tensor(src), 2, 2)
