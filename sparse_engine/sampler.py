"""Draws in-neighbours, and says with what probability: one signature, two ways to compute. Checks what goes in.

A row's draw depends only on its key, its neighbour list and its weights, so any split of rows into batches gives the
same edges. The drawing is in `torch_sampler.py` (any device, the definition of right) and `cpu_sampler.py` (compiled),
which draw the same edges; making keys is in `keyed.py`, turning samples into micro-batches is not here. Shape letters:
`N` rows and `E` edges of the graph, `n` rows asked for, `e` edges drawn, `k` the fan-out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sparse_engine import cpu_sampler, torch_sampler

Method = Literal["uniform", "weighted", "multinomial", "top", "shared"]
METHODS: tuple[Method, ...] = get_args(Method)
WEIGHTED_METHODS: tuple[Method, ...] = ("weighted", "multinomial", "top")


@dataclass(frozen=True)
class Sample:
    """Drawn edges as a CSR over the asked rows.

    Args:
        indptr: int64 `[n + 1]`.
        indices: `[e]`, sources in the graph's index dtype, in the order in which the graph lists them.
        inclusion: float64 `[n]`, the probability `pi` with which each edge of the row enters the sample: 1 if the row
            has at most `k` edges or its edges are not drawn by chance, else `k / degree` (for methods that tell edges
            apart, their mean).
        edge_inclusion: float64 `[e]`, `pi` of each drawn edge where a row's edges differ, else None. With
            replacement (`multinomial`) it is the expected number of times, which may exceed 1. Attention adds
            `-log(pi)` to a logit and a sum weighs with `1 / pi`: so both estimate the full neighbourhood (Horvitz and
            Thompson 1952; Hansen and Hurwitz 1943 with replacement).
    """

    indptr: Tensor
    indices: Tensor
    inclusion: Tensor
    edge_inclusion: Tensor | None = None


def sample_neighbors(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor | None,
    fanout: int | None,
    row_keys: Tensor | None,
    *,
    method: Method = "uniform",
    weights: Tensor | None = None,
    source_keys: Tensor | None = None,
) -> Sample:
    """Sample `fanout` in-edges of each row; a row that has no more keeps all of them, whatever the method.

    * `uniform`: every set of `k` edges is as likely (Floyd's method, Bentley and Floyd 1987).
    * `weighted`: `k` different edges, each with `pi = min(1, c w)`, `c` such that the `pi` of a row add up to `k`
      (systematic sampling, Madow 1949). `numpy.random.choice` without replacement has other probabilities.
    * `multinomial`: `k` draws with replacement by weight; an edge may be there several times.
    * `top`: the `k` largest weights, of equal ones those listed first. Nothing is drawn and nothing estimated.
    * `shared`: an edge enters if its source's number, the same for all rows, is below `k / degree`, so rows with common
      neighbours draw common ones and a layer needs fewer distinct sources (LABOR-0, Balin and Catalyurek 2023). A row
      gets `k` edges on average, perhaps none.

    Weights are read as multiples of a 2^24th of the row's largest, at least one, so every edge has a chance and sums
    are exact: that is what makes any device draw alike. Inputs are only read, so they may be read-only memory maps.

    Args:
        indptr: int64 `[N + 1]`.
        indices: int64 or int32 `[E]`.
        rows: int64 `[n]` in `[0, N)`, or `None` for all rows.
        fanout: `k`, at least 1, or `None` for the full neighbourhood; with `rows=None` too, nothing is copied.
        row_keys: int64 `[n]`, from `keyed.keys`; may be `None` where `fanout` is, and for `top` and `shared`.
        method: one of `METHODS`.
        weights: float32 `[E]`, finite, not negative except for `top`; for `weighted`, `multinomial` and `top`.
        source_keys: int64, one for each value that `indices` may have; for `shared`.

    Raises:
        ValueError: for a fan-out below 1, an unknown method, missing or mismatched keys or weights, or a row out of
            range.

    Example: the only row with more than two neighbours loses one.

        >>> row_keys = keys(7, PURPOSE_SAMPLING, 0, 0, torch.arange(2))
        >>> sample = sample_neighbors(torch.tensor([0, 3, 4]), torch.tensor([5, 6, 7, 5]), None, 2, row_keys)
        >>> sample.indptr.tolist(), [round(pi, 3) for pi in sample.inclusion.tolist()]
        ([0, 2, 3], [0.667, 1.0])
    """
    num_rows = indptr.numel() - 1 if rows is None else rows.numel()
    if method not in METHODS:
        raise ValueError(f"sampling method {method!r} is unknown; use one of {', '.join(METHODS)}")
    if rows is not None:
        _check_rows(rows, indptr.numel() - 1)
    if fanout is None:
        method, weights, source_keys, row_keys = "uniform", None, None, None
        if rows is None:
            return Sample(indptr, indices, torch.ones(num_rows, dtype=torch.float64, device=indptr.device))
    else:
        _check_draw(fanout, method, row_keys, num_rows, weights, indices, source_keys)
    request = torch_sampler.Request(indptr, indices, rows, fanout, row_keys, method, weights, source_keys)
    draw = cpu_sampler.draw if cpu_sampler.suits(request) else torch_sampler.draw
    return Sample(*draw(request))


def _check_draw(
    fanout: int,
    method: Method,
    row_keys: Tensor | None,
    num_rows: int,
    weights: Tensor | None,
    indices: Tensor,
    source_keys: Tensor | None,
) -> None:
    if fanout < 1:
        raise ValueError(f"fanout is {fanout}; use at least 1, or None for the full neighbourhood")
    if method in ("uniform", "weighted", "multinomial"):
        if row_keys is None:
            raise ValueError(
                f"sampling with fanout={fanout} needs row_keys int64 [{num_rows}]; make them with keyed.keys"
            )
        if row_keys.dtype != torch.int64 or list(row_keys.shape) != [num_rows]:
            raise ValueError(f"row_keys must be int64 [{num_rows}], got {row_keys.dtype} {list(row_keys.shape)}")
    if method in WEIGHTED_METHODS:
        num_edges = indices.numel()
        if weights is None:
            raise ValueError(f"method {method!r} needs weights float32 [{num_edges}], one for each edge")
        if weights.dtype != torch.float32 or list(weights.shape) != [num_edges]:
            raise ValueError(f"weights must be float32 [{num_edges}], got {weights.dtype} {list(weights.shape)}")
        if num_edges:
            low, high = (float(value) for value in torch.aminmax(weights))  # nan if there is one
            if not (low > -torch.inf and high < torch.inf) or (low < 0.0 and method != "top"):
                raise ValueError(f"weights span {low}..{high}; make them finite{' and at least 0' * (method != 'top')}")
    if method == "shared" and (source_keys is None or source_keys.dtype != torch.int64 or source_keys.dim() != 1):
        raise ValueError("method 'shared' needs source_keys int64 [M], one for each source; make them with keyed.keys")


def _check_rows(rows: Tensor, num_rows: int) -> None:
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows must be int64 [n], got {rows.dtype} {list(rows.shape)}")
    if rows.numel():
        low, high = (int(value) for value in torch.aminmax(rows))
        if low < 0 or high >= num_rows:
            raise ValueError(f"rows span {low}..{high}, the graph has rows 0..{num_rows - 1}; give local row numbers")
