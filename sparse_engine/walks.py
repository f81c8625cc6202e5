"""Random walks with restart over in-edges, and the nodes they visit most: a neighbour list that may reach further.

Visit counts estimate personalised PageRank, as PinSage uses it (Ying et al. 2018, arXiv 1806.01973). Drawing among the
in-edges themselves is in `sampler.py`. Shape letters: `N` rows and `E` edges of the graph, `n` rows asked for, `e`
entries of the lists, `k` the most entries of a list.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_engine.keyed import subkeys, uniform
from sparse_engine.native import NativeError, library

_LONGEST = 32  # steps of a walk; `csrc/walks.cpp` has the same
_BLOCK = 2**17  # walks that take their steps together


@dataclass(frozen=True)
class Visited:
    """Neighbour lists as a CSR over the asked rows, the most visited first.

    Args:
        indptr: int64 `[n + 1]`. A row is empty only if it has no in-edge.
        indices: `[e]`, in the graph's index dtype.
        visits: int32 `[e]`, how often the row's walks came there, at least 1.
    """

    indptr: Tensor
    indices: Tensor
    visits: Tensor


def most_visited(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    fanout: int,
    row_keys: Tensor,
    *,
    walks: int,
    restart: float,
    order: Tensor,
) -> Visited:
    """The `fanout` nodes that `walks` walks from each row visit most.

    A walk takes a random in-edge, then ends with probability `restart`, else goes on from there; it also ends where
    there is no in-edge, and after 32 steps. Every step is a visit, so a row lists itself if a walk came back to it. A
    row's list depends on its key and the graph alone, and is the same from compiled code and from torch operations.

    Args:
        indptr: int64 `[N + 1]`.
        indices: int64 or int32 `[E]`, in `[0, N)`.
        rows: int64 `[n]` in `[0, N)`, or `None` for all rows.
        fanout: `k`, at least 1.
        row_keys: int64 `[n]`, from `keyed.keys`.
        walks: walks from each row, at least 1.
        restart: in `(0, 1]`; 1 stays among the in-neighbours.
        order: int64 `[N]`, distinct: of two nodes visited as often the one with the lower number comes first.

    Raises:
        ValueError: for a number out of its range, or keys or order that do not match.

    Example: walks over the path 0 -> 1 -> 2 reach node 0 from node 2 only by way of node 1.

        >>> from sparse_engine.keyed import PURPOSE_WALKS, keys
        >>> row_keys = keys(7, PURPOSE_WALKS, 0, -1, torch.arange(3))
        >>> path = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1])
        >>> lists = most_visited(*path, None, 2, row_keys, walks=8, restart=0.5, order=torch.arange(3))
        >>> lists.indptr.tolist(), lists.indices.tolist(), lists.visits.tolist()[:2]
        ([0, 0, 1, 3], [0, 1, 0], [8, 8])
    """
    num_rows = indptr.numel() - 1 if rows is None else rows.numel()
    if fanout < 1 or walks < 1:
        raise ValueError(f"fanout is {fanout} and walks {walks}; use at least 1 of each")
    if not 0.0 < restart <= 1.0:
        raise ValueError(f"restart is {restart}; choose it in (0, 1]")
    for name, tensor, size in (("row_keys", row_keys, num_rows), ("order", order, indptr.numel() - 1)):
        if tensor.dtype != torch.int64 or list(tensor.shape) != [size]:
            raise ValueError(f"{name} must be int64 [{size}], got {tensor.dtype} {list(tensor.shape)}")
    if indptr.device.type == "cpu":
        try:
            code = library()
        except NativeError:
            pass
        else:
            return _walk_compiled(code, indptr, indices, rows, fanout, row_keys, walks, restart, order)
    return _walk_torch(indptr, indices, rows, fanout, row_keys, walks, restart, order)


def _walk_torch(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    fanout: int,
    row_keys: Tensor,
    walks: int,
    restart: float,
    order: Tensor,
) -> Visited:
    """Any device: the definition of right."""
    starts = torch.arange(indptr.numel() - 1, device=indptr.device) if rows is None else rows
    block = max(1, _BLOCK // walks)
    lengths, nodes, visits = [], [], []
    for begin in range(0, starts.numel(), block):
        part = slice(begin, begin + block)
        found = _visits(indptr, indices, starts[part], row_keys[part], walks, restart)
        rows_of, nodes_of, counts = found
        by_rank = torch.argsort(order[nodes_of])
        by_rank = by_rank[torch.argsort(counts[by_rank], descending=True, stable=True)]
        by_rank = by_rank[torch.argsort(rows_of[by_rank], stable=True)]
        sizes = torch.bincount(rows_of, minlength=starts[part].numel())
        place = torch.arange(by_rank.numel(), device=by_rank.device)
        place -= (sizes.cumsum(0) - sizes)[rows_of[by_rank]]
        kept = by_rank[place < fanout]
        lengths.append(sizes.clamp(max=fanout))
        nodes.append(nodes_of[kept])
        visits.append(counts[kept])
    out_indptr = indptr.new_zeros(starts.numel() + 1)
    if not lengths:
        return Visited(out_indptr, indices.new_empty(0), indices.new_empty(0, dtype=torch.int32))
    torch.cumsum(torch.cat(lengths), 0, out=out_indptr[1:])
    return Visited(out_indptr, torch.cat(nodes).to(indices.dtype), torch.cat(visits).int())


def _visits(
    indptr: Tensor, indices: Tensor, starts: Tensor, row_keys: Tensor, walks: int, restart: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct (row, node) pairs that walks made, and how often; rows count from 0."""
    num_nodes = indptr.numel() - 1
    row = torch.repeat_interleave(torch.arange(starts.numel(), device=starts.device), walks)
    keys = subkeys(row_keys[:, None], torch.arange(walks, device=starts.device)).flatten()
    at = starts[row]
    pairs = []
    for step in range(_LONGEST):
        first = indptr[at]
        degrees = indptr[at + 1] - first
        going = degrees > 0
        row, keys, first, degrees = row[going], keys[going], first[going], degrees[going]
        at = indices[first + uniform(subkeys(keys, 2 * step)).mul_(degrees).long()].long()
        pairs.append(row * num_nodes + at)
        going = uniform(subkeys(keys, 2 * step + 1)) >= restart
        row, keys, at = row[going], keys[going], at[going]
        if not at.numel():
            break
    found, counts = torch.unique(torch.cat(pairs), return_counts=True)
    return torch.div(found, max(num_nodes, 1), rounding_mode="floor"), found % max(num_nodes, 1), counts


class _Request(ctypes.Structure):
    """`WalkRequest` of `csrc/walks.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "rows", "order", "row_keys")),
        *((name, ctypes.c_int64) for name in ("num_rows", "fanout", "walks")),
        ("restart", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("wide", "threads")),
    ]


def _walk_compiled(
    code: ctypes.CDLL,
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    fanout: int,
    row_keys: Tensor,
    walks: int,
    restart: float,
    order: Tensor,
) -> Visited:
    given = [None if x is None else x.contiguous() for x in (indptr, indices, rows, order, row_keys)]
    num_rows = row_keys.numel()
    nodes = indices.new_empty(num_rows, fanout)
    visits = torch.empty(num_rows, fanout, dtype=torch.int32)
    out_indptr = torch.zeros(num_rows + 1, dtype=torch.int64)
    lengths = out_indptr[1:]
    asked = _Request(
        *(None if x is None else x.data_ptr() for x in given),
        num_rows,
        fanout,
        walks,
        restart,
        indices.dtype == torch.int64,
        torch.get_num_threads(),
    )
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (nodes, visits, lengths))
    code.gtx_walk(ctypes.byref(asked), *pointers)
    used = torch.arange(fanout) < lengths[:, None]  # [n, k]
    torch.cumsum(lengths, 0, out=lengths)
    return Visited(out_indptr, nodes[used], visits[used])
