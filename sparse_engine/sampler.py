"""Draws in-neighbours uniformly and without replacement, and says with what probability.

A row's draw depends only on its key, its degree and its neighbour list, so any split of rows into batches gives the
same edges. Making keys is in `keyed.py`, turning samples into micro-batches is not here. Shape letters: `n` rows asked
for, `e` edges drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_engine.keyed import subkeys, uniform

_BLOCK = 2**15  # rows drawn at a time, so that the rounds run in a core's cache
_NETWORK_LIMIT = 48  # fan-outs up to this are sorted by a network of column minima and maxima


@dataclass(frozen=True)
class Sample:
    """Drawn edges as a CSR over the asked rows.

    Args:
        indptr: int64 `[n + 1]`.
        indices: `[e]`, sources in the graph's index dtype.
        inclusion: float64 `[n]`, the probability `pi` with which each edge of the row entered the sample: 1 if the
            row has at most `fanout` edges, else `fanout / degree`. Attention adds `-log(pi)` to a logit and a mean
            weighs with `1 / pi` to estimate the full neighbourhood (Horvitz and Thompson 1952).
    """

    indptr: Tensor
    indices: Tensor
    inclusion: Tensor


def sample_neighbors(
    indptr: Tensor, indices: Tensor, rows: Tensor | None, fanout: int | None, row_keys: Tensor | None
) -> Sample:
    """Sample up to `fanout` in-edges of each row, in the order in which the graph lists them.

    Floyd's method (Bentley and Floyd 1987), `fanout` rounds over all rows at once. Inputs are only read, so they may
    be read-only memory maps.

    Args:
        indptr: int64 `[N + 1]`.
        indices: int64 or int32 `[E]`.
        rows: int64 `[n]` in `[0, N)`, or `None` for all rows.
        fanout: at least 1, or `None` for the full neighbourhood; with `rows=None` too, nothing is copied.
        row_keys: int64 `[n]`, from `keyed.keys`; may be `None` where `fanout` is.

    Raises:
        ValueError: for a fan-out below 1, missing or mismatched keys, or a row out of range.

    Example: the only row with more than two neighbours loses one.

        >>> row_keys = keys(7, PURPOSE_SAMPLING, 0, 0, torch.arange(2))
        >>> sample = sample_neighbors(torch.tensor([0, 3, 4]), torch.tensor([5, 6, 7, 5]), None, 2, row_keys)
        >>> sample.indptr.tolist(), [round(pi, 3) for pi in sample.inclusion.tolist()]
        ([0, 2, 3], [0.667, 1.0])
    """
    num_rows = indptr.numel() - 1 if rows is None else rows.numel()
    if fanout is not None:
        _check_draw(fanout, row_keys, num_rows)
    if rows is None:
        starts, ends = indptr[:-1], indptr[1:]
    else:
        _check_rows(rows, indptr.numel() - 1)
        starts, ends = indptr.index_select(0, rows), indptr.index_select(0, rows + 1)
    degrees = ends - starts
    if fanout is None:
        inclusion = torch.ones(num_rows, dtype=torch.float64, device=indptr.device)
        if rows is None:
            return Sample(indptr, indices, inclusion)
        out_indptr = _running_sum(degrees)
        return Sample(out_indptr, indices.index_select(0, _expand(starts, degrees, out_indptr)), inclusion)

    assert row_keys is not None
    counts = degrees.clamp(max=fanout)
    out_indptr = _running_sum(counts)
    inclusion = counts.double().div_(degrees.clamp(min=1)).masked_fill_(degrees == 0, 1.0)
    sampled = torch.nonzero(degrees > fanout).squeeze(1)
    if sampled.numel() < num_rows:
        edges = _expand(starts, counts, out_indptr)  # [e], right for the rows that keep all their edges
    else:
        edges = out_indptr.new_empty(num_rows * fanout)
    for begin in range(0, sampled.numel(), _BLOCK):
        block = sampled[begin : begin + _BLOCK]
        chosen = _floyd(degrees[block], row_keys[block], fanout)  # [fanout, rows]
        slots = out_indptr[block] + torch.arange(fanout, device=block.device)[:, None]
        edges[slots] = starts[block] + chosen
    return Sample(out_indptr, indices.index_select(0, edges), inclusion)


def _floyd(degrees: Tensor, row_keys: Tensor, fanout: int) -> Tensor:
    """`fanout` different positions below each degree, `[fanout, rows]`, ascending. Needs `degrees > fanout`."""
    if int(degrees.max()) < 2**31:
        degrees = degrees.int()  # the same positions in half the memory
    chosen = degrees.new_empty(fanout, degrees.numel())
    for round_ in range(fanout):
        last = degrees - (fanout - round_)
        draw = uniform(subkeys(row_keys, round_)).mul_(last + 1).to(last.dtype)  # uniform on 0..last
        taken = torch.zeros_like(draw, dtype=torch.bool)
        for earlier in range(round_):
            taken |= chosen[earlier] == draw
        torch.where(taken, last, draw, out=chosen[round_])  # `last` is free: earlier rounds drew below it
    return _sort_columns(chosen)


def _sort_columns(values: Tensor) -> Tensor:
    """Sort a small number of values along dim 0, ascending; Batcher's odd-even merge (Knuth 5.2.2, algorithm M)."""
    size = values.shape[0]
    if size > _NETWORK_LIMIT:
        return torch.sort(values, dim=0).values
    lanes = list(values)
    top = 1 << max((size - 1).bit_length() - 1, 0)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            for i in range(size - d):
                if i & p == r:
                    low, high = lanes[i], lanes[i + d]
                    lanes[i], lanes[i + d] = torch.minimum(low, high), torch.maximum(low, high)
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return torch.stack(lanes)


def _expand(starts: Tensor, counts: Tensor, out_indptr: Tensor) -> Tensor:
    """Positions `starts[i], starts[i] + 1, ...`, `counts[i]` of them for each row, int64 `[e]`."""
    num_edges = int(out_indptr[-1])
    shifts = torch.repeat_interleave(starts - out_indptr[:-1], counts, output_size=num_edges)
    return shifts.add_(torch.arange(num_edges, device=starts.device))


def _running_sum(counts: Tensor) -> Tensor:
    indptr = counts.new_zeros(counts.numel() + 1)
    torch.cumsum(counts, 0, out=indptr[1:])
    return indptr


def _check_draw(fanout: int, row_keys: Tensor | None, num_rows: int) -> None:
    if fanout < 1:
        raise ValueError(f"fanout is {fanout}; use at least 1, or None for the full neighbourhood")
    if row_keys is None:
        raise ValueError(f"sampling with fanout={fanout} needs row_keys int64 [{num_rows}]; make them with keyed.keys")
    if row_keys.dtype != torch.int64 or list(row_keys.shape) != [num_rows]:
        raise ValueError(f"row_keys must be int64 [{num_rows}], got {row_keys.dtype} {list(row_keys.shape)}")


def _check_rows(rows: Tensor, num_rows: int) -> None:
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows must be int64 [n], got {rows.dtype} {list(rows.shape)}")
    if rows.numel():
        low, high = (int(value) for value in torch.aminmax(rows))
        if low < 0 or high >= num_rows:
            raise ValueError(f"rows span {low}..{high}, the graph has rows 0..{num_rows - 1}; give local row numbers")
