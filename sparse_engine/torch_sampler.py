"""Drawing in-neighbours by torch operations over all rows at once, on any device: what `cpu_sampler.py` must equal.

Weights become integers and their sums stay integers, so no order of summation changes a draw. Inputs are checked in
`sampler.py`, which says what each method means; shape letters as there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparse_engine.keyed import subkeys, uniform

_WEIGHT_ONE = 2**24  # what a row's largest weight counts as
_BLOCK = 2**15  # rows drawn at a time, so that the rounds run in a core's cache
_NETWORK_LIMIT = 48  # fan-outs up to this are sorted by a network of column minima and maxima

Drawn = tuple[Tensor, Tensor, Tensor, Tensor | None]  # the fields of `sampler.Sample`


class Request(NamedTuple):
    """The arguments of `sampler.sample_neighbors`, checked."""

    indptr: Tensor
    indices: Tensor
    rows: Tensor | None
    fanout: int | None
    row_keys: Tensor | None
    method: str
    weights: Tensor | None
    source_keys: Tensor | None


def unknown_source(request: Request) -> ValueError:
    """Of a request whose edges have sources without a key."""
    given = 0 if request.source_keys is None else request.source_keys.numel()
    return ValueError(f"source_keys has {given} keys and an edge another source; give one for each source of the graph")


def draw(request: Request) -> Drawn:
    """See `sampler.sample_neighbors`."""
    indptr, indices, rows, fanout, row_keys, method, weights, source_keys = request
    if rows is None:
        starts, ends = indptr[:-1], indptr[1:]
    else:
        starts, ends = indptr.index_select(0, rows), indptr.index_select(0, rows + 1)
    degrees = ends - starts
    if fanout is None:
        out_indptr = _running_sum(degrees)
        edges = _expand(starts, degrees, out_indptr)
        return out_indptr, indices.index_select(0, edges), torch.ones_like(degrees, dtype=torch.float64), None

    counts = degrees.clamp(max=fanout)
    inclusion = counts.double().div_(degrees.clamp(min=1)).masked_fill_(degrees == 0, 1.0)
    if method == "shared":
        assert source_keys is not None
        bounds = _running_sum(degrees)
        sources = indices.index_select(0, _expand(starts, degrees, bounds))
        if sources.numel() and not (int(sources.min()) >= 0 and int(sources.max()) < source_keys.numel()):
            raise unknown_source(request)
        kept = uniform(source_keys.index_select(0, sources)) < torch.repeat_interleave(inclusion, degrees)
        return _running_sum(kept.long()).index_select(0, bounds), sources[kept], inclusion, None

    out_indptr = _running_sum(counts)
    sampled = torch.nonzero(degrees > fanout).squeeze(1)
    if sampled.numel() < degrees.numel():
        edges = _expand(starts, counts, out_indptr)  # [e], right for the rows that keep all their edges
    else:
        edges = out_indptr.new_empty(degrees.numel() * fanout)
    edge_inclusion = (
        None if method == "uniform" else torch.ones(edges.numel(), dtype=torch.float64, device=edges.device)
    )
    for begin in range(0, sampled.numel(), _BLOCK):
        block = sampled[begin : begin + _BLOCK]
        block_keys = None if row_keys is None else row_keys[block]
        slots = out_indptr[block] + torch.arange(fanout, device=block.device)[:, None]  # [k, rows]
        if method == "uniform":
            assert block_keys is not None
            edges[slots] = starts[block] + _floyd(degrees[block], block_keys, fanout)
            continue
        assert weights is not None and edge_inclusion is not None
        flat = _Flat(starts[block], degrees[block])
        block_weights = weights.index_select(0, flat.edges)
        if method == "top":
            chosen, odds = _top(flat, block_weights, fanout), None
        else:
            assert block_keys is not None
            method_of = _systematic if method == "weighted" else _multinomial
            chosen, odds = method_of(flat, _whole(flat, block_weights), block_keys, fanout)
        edges[slots.T] = flat.edges[chosen].view(-1, fanout)
        if odds is not None:
            edge_inclusion[slots.T] = odds.view(-1, fanout)
    if method == "top":
        return out_indptr, indices.index_select(0, edges), torch.ones_like(inclusion), None
    return out_indptr, indices.index_select(0, edges), inclusion, edge_inclusion


# Uniform --------------------------------------------------------------------------------------------------------------


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


# By weight ------------------------------------------------------------------------------------------------------------


class _Flat:
    """All edges of some rows, one after the other: numbers in the graph `[f]`, rows `[f]`, bounds `[r + 1]`."""

    def __init__(self, starts: Tensor, degrees: Tensor) -> None:
        self.bounds = _running_sum(degrees)
        self.edges = _expand(starts, degrees, self.bounds)
        self.row = torch.repeat_interleave(torch.arange(degrees.numel(), device=degrees.device), degrees)

    def sums(self, values: Tensor) -> Tensor:
        """Sums of int64 `[f]` over each row, `[r]`; rows are not empty."""
        before = _running_sum(values)
        return before[self.bounds[1:]] - before[self.bounds[:-1]]

    def running(self, values: Tensor) -> Tensor:
        """Sums of int64 `[f]` from the start of the row to each edge, it included."""
        before = _running_sum(values)
        return before[1:] - before[self.bounds[:-1]][self.row]


def _whole(flat: _Flat, weights: Tensor) -> Tensor:
    """Weights `[f]` as multiples of the row's largest over `_WEIGHT_ONE`, int64, at least 1."""
    largest = torch.segment_reduce(weights.double(), "max", offsets=flat.bounds)
    shares = weights.double() / largest.masked_fill(largest == 0.0, 1.0)[flat.row]
    return (shares * _WEIGHT_ONE).long().clamp_(min=1)


def _systematic(flat: _Flat, weights: Tensor, row_keys: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    """Positions in `flat` of `fanout` different edges a row `[r * k]`, and their probabilities.

    Edges whose probability would exceed 1 are taken for sure; for the others `k'` points lie at equal distances on the
    line of their weights, moved together by one draw.
    """
    sure = torch.zeros_like(weights, dtype=torch.bool)
    rest = weights
    while True:
        total = flat.sums(rest)  # [r]
        left = fanout - flat.sums(sure.long())  # k', [r]
        over = (rest > 0) & (left[flat.row] * rest >= total[flat.row])
        if not bool(over.any()):
            break
        sure |= over
        rest = rest.masked_fill(over, 0)
    span = total.clamp(min=1)
    shift = (uniform(subkeys(row_keys, 0)) * span).long()  # [r], in [0, span)
    reach = left[flat.row] * flat.running(rest)
    span_at = span[flat.row]
    hits = torch.div(reach - shift[flat.row] + span_at - 1, span_at, rounding_mode="floor")  # points before the end
    before = torch.cat([hits.new_zeros(1), hits[:-1]])
    before[flat.bounds[:-1]] = 0
    chosen = torch.nonzero(sure | (hits > before)).squeeze(1)
    odds = (left[flat.row] * rest).double() / span_at
    return chosen, torch.where(sure, 1.0, odds)[chosen]


def _multinomial(flat: _Flat, weights: Tensor, row_keys: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
    """Positions in `flat` of `fanout` draws a row `[r * k]`, ascending, and how often each is expected."""
    before = _running_sum(weights)
    bases = before[flat.bounds[:-1]]
    totals = before[flat.bounds[1:]] - bases
    draws = uniform(subkeys(row_keys[:, None], torch.arange(fanout, device=row_keys.device)))
    points = bases[:, None] + (draws * totals[:, None]).long()  # [r, k]
    chosen = torch.searchsorted(before[1:], points.sort(1).values.flatten(), right=True)
    return chosen, (fanout * weights[chosen]).double() / totals[flat.row[chosen]]


def _top(flat: _Flat, weights: Tensor, fanout: int) -> Tensor:
    """Positions in `flat` of the `fanout` largest weights a row `[r * k]`, ascending."""
    order = torch.argsort(weights, descending=True, stable=True)
    order = order[torch.argsort(flat.row[order], stable=True)]  # by row, then by weight, then as listed
    first = flat.bounds[:-1, None] + torch.arange(fanout, device=order.device)
    return order[first].sort(1).values.flatten()


# CSR ------------------------------------------------------------------------------------------------------------------


def _running_sum(counts: Tensor) -> Tensor:
    """`[n + 1]`: the sum of all before each place."""
    indptr = counts.new_zeros(counts.numel() + 1)
    torch.cumsum(counts, 0, out=indptr[1:])
    return indptr


def _expand(starts: Tensor, counts: Tensor, out_indptr: Tensor) -> Tensor:
    """Positions `starts[i], starts[i] + 1, ...`, `counts[i]` of them for each row, int64 `[e]`."""
    num_edges = int(out_indptr[-1])
    shifts = torch.repeat_interleave(starts - out_indptr[:-1], counts, output_size=num_edges)
    return shifts.add_(torch.arange(num_edges, device=starts.device))
