"""The sparsity pattern that attention and aggregation run over: a CSR of in-edges.

Numbers on edges live outside it (in `attention.py`, `aggregate.py`); drawing edges is in `sampler.py`.
Shape letters: `N` rows (destinations, queries), `M` columns (sources, keys), `E` edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakValueDictionary

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class SparsePattern:
    """Which sources each destination attends to. Two patterns are equal only if they are one object.

    Rows may be empty, edges may repeat, and there may be no rows or no edges at all. The order of edges within a row
    carries no meaning, but it is kept: edge `e` of every per-edge tensor is `indices[e]`. The tensors may be read-only
    memory maps and are never written to.

    Args:
        indptr: int64 `[N + 1]`, row `i` owns the edges `indptr[i]:indptr[i + 1]`.
        indices: int64 or int32 `[E]`, the source of each edge, in `[0, num_cols)`.
        num_cols: number of sources `M`.

    Raises:
        ValueError: for a wrong shape, dtype or device. The constructor does not look at the values, `validate` does.

    Example: node 0 has in-edges from 1 and 2, node 1 has none, node 2 has one from itself.

        >>> pattern = SparsePattern(torch.tensor([0, 2, 2, 3]), torch.tensor([1, 2, 2]), num_cols=3)
        >>> pattern.degrees.tolist(), pattern.row_index.tolist()
        ([2, 0, 1], [0, 0, 2])
    """

    indptr: Tensor
    indices: Tensor
    num_cols: int

    def __post_init__(self) -> None:
        if self.indptr.dim() != 1 or self.indptr.numel() < 1 or self.indptr.dtype != torch.int64:
            raise ValueError(
                f"SparsePattern.indptr must be int64 [N + 1], got {self.indptr.dtype} {list(self.indptr.shape)}; "
                "a pattern without rows has indptr [0]"
            )
        if self.indices.dim() != 1 or self.indices.dtype not in _INDEX_DTYPES:
            raise ValueError(
                f"SparsePattern.indices must be int64 or int32 [E], got {self.indices.dtype} "
                f"{list(self.indices.shape)}; convert it with .to(torch.int64)"
            )
        if self.indptr.device != self.indices.device:
            raise ValueError(
                f"SparsePattern.indptr is on {self.indptr.device} and indices on {self.indices.device}; use one device"
            )
        if self.num_cols < 0:
            raise ValueError(f"SparsePattern.num_cols is {self.num_cols}; give the number of source rows, at least 0")

    @classmethod
    def from_edges(cls, dst: Tensor, src: Tensor, num_rows: int, num_cols: int) -> SparsePattern:
        """Sort an edge list by destination, keeping the given order of edges within a row.

        Args:
            dst: integer `[E]`, destinations in `[0, num_rows)`.
            src: int64 or int32 `[E]`, sources in `[0, num_cols)`; the pattern keeps this dtype.

        Raises:
            ValueError: if the lists differ in shape or hold an id out of range.

        Example:

            >>> pattern = SparsePattern.from_edges(torch.tensor([2, 0, 0]), torch.tensor([2, 2, 1]), 3, 3)
            >>> pattern.indptr.tolist(), pattern.indices.tolist()
            ([0, 2, 2, 3], [2, 1, 2])
        """
        if dst.dim() != 1 or dst.shape != src.shape:
            raise ValueError(f"from_edges needs dst and src of one shape [E], got {list(dst.shape)}, {list(src.shape)}")
        if num_rows < 0:
            raise ValueError(f"from_edges.num_rows is {num_rows}; give the number of destinations, at least 0")
        _check_ids("from_edges.dst", dst, num_rows, "num_rows")
        indptr = _indptr_of(dst.long(), num_rows)
        pattern = cls(indptr, src.index_select(0, torch.argsort(dst, stable=True)), num_cols)
        _check_ids("from_edges.src", src, num_cols, "num_cols")
        return pattern

    @property
    def num_rows(self) -> int:
        """Number of destinations `N`."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of edges `E`, duplicates counted."""
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        """Where the pattern lives."""
        return self.indices.device

    @cached_property
    def degrees(self) -> Tensor:
        """In-degree of every row, int64 `[N]`."""
        return self.indptr[1:] - self.indptr[:-1]

    @cached_property
    def row_index(self) -> Tensor:
        """Destination of every edge, int64 `[E]`; computed once."""
        rows = torch.arange(self.num_rows, device=self.device)
        return torch.repeat_interleave(rows, self.degrees, output_size=self.num_edges)

    def transpose(self) -> tuple[SparsePattern, Tensor]:
        """The `M x N` pattern of out-edges and the edge permutation, int64 `[E]`; computed once.

        `edge_values.index_select(0, perm)` are the edge values in the order of the transposed pattern. Linear in
        `N + M + E` on the CPU, a stable sort elsewhere.

        Example: edges 1->0 and 2->0 and 2->2.

            >>> pattern = SparsePattern(torch.tensor([0, 2, 2, 3]), torch.tensor([2, 1, 2]), num_cols=3)
            >>> transposed, perm = pattern.transpose()
            >>> transposed.indptr.tolist(), transposed.indices.tolist(), perm.tolist()
            ([0, 0, 1, 3], [0, 0, 2], [1, 0, 2])
        """
        return self._transposed

    @cached_property
    def _transposed(self) -> tuple[SparsePattern, Tensor]:
        if self.device.type == "cpu" and self.num_edges > 0:
            edge_ids = np.arange(self.num_edges, dtype=np.int32 if self.num_edges < 2**31 else np.int64)
            csr = csr_array((edge_ids, self.indices.numpy(), self.indptr.numpy()), shape=(self.num_rows, self.num_cols))
            csc = csr.tocsc()  # a counting sort over columns: stable, and duplicates stay apart
            indptr = torch.from_numpy(csc.indptr.astype(np.int64, copy=False))
            indices = torch.from_numpy(csc.indices).to(self.indices.dtype)
            perm = torch.from_numpy(csc.data).long()
        else:
            perm = torch.argsort(self.indices, stable=True)
            indptr = _indptr_of(self.indices.long(), self.num_cols)
            indices = self.row_index.index_select(0, perm).to(self.indices.dtype)
        return SparsePattern(indptr, indices, self.num_rows), perm

    def to(self, device: torch.device | str) -> SparsePattern:
        """The same pattern on `device`; itself if it is there already."""
        if torch.empty(0, device=device).device == self.device:  # "cuda" means the current CUDA device
            return self
        return SparsePattern(self.indptr.to(device), self.indices.to(device), self.num_cols)

    def validate(self) -> None:
        """Look at every value. Costs a pass over the edges, so it is for borders and tests, not for every step.

        Raises:
            ValueError: if `indptr` does not start at 0, decreases, or does not end at `E`, or an index is out of range.
        """
        first, last = int(self.indptr[0]), int(self.indptr[-1])
        if first != 0:
            raise ValueError(f"SparsePattern.indptr[0] is {first}, must be 0; subtract indptr[0] from a slice of rows")
        if last != self.num_edges:
            raise ValueError(
                f"SparsePattern.indptr[-1] is {last} but indices has {self.num_edges} edges; make them agree"
            )
        falling = torch.nonzero(self.degrees < 0)
        if falling.numel():
            row = int(falling[0])
            raise ValueError(
                f"SparsePattern.indptr decreases at row {row}, from {int(self.indptr[row])} to "
                f"{int(self.indptr[row + 1])}; it must be a running sum of degrees"
            )
        _check_ids("SparsePattern.indices", self.indices, self.num_cols, "num_cols")


_known: WeakValueDictionary[tuple[int, int], SparsePattern] = WeakValueDictionary()
"""Patterns in use by where their indices lie."""


def remember(pattern: SparsePattern) -> None:
    """Let `recall` find a pattern while it lives, and with it what was computed for it once.

    Operators of `torch.library` take tensors only. Not to be called while a graph is traced: nothing lies anywhere.
    """
    _known[(pattern.indices.data_ptr(), pattern.num_edges)] = pattern


def recall(indptr: Tensor, indices: Tensor, num_cols: int) -> SparsePattern:
    """The remembered pattern of these very tensors, or a new one of them."""
    known = _known.get((indices.data_ptr(), indices.numel()))
    if known is None or known.num_cols != num_cols or known.indptr.data_ptr() != indptr.data_ptr():
        known = SparsePattern(indptr, indices, num_cols)
    return known


def _indptr_of(ids: Tensor, num_ids: int) -> Tensor:
    indptr = torch.zeros(num_ids + 1, dtype=torch.int64, device=ids.device)
    torch.cumsum(torch.bincount(ids, minlength=num_ids), 0, out=indptr[1:])
    return indptr


def _check_ids(name: str, ids: Tensor, bound: int, bound_name: str) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(ids))
    if low < 0 or high >= bound:
        value = low if low < 0 else high
        edge = int(torch.nonzero(ids == value)[0])
        raise ValueError(
            f"{name}[{edge}] is {value}, outside [0, {bound}); raise {bound_name} to at least {high + 1} or fix the ids"
            if low >= 0
            else f"{name}[{edge}] is {value}, outside [0, {bound}); ids are counted from 0"
        )
