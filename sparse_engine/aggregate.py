"""Sum or mean of source rows over the in-edges of each destination: graph convolution, SAGE and pooling are made of it.

Weighing edges by attention is in `attention.py`. Shape letters: `N` destinations, `M` sources, `E` edges, `C` columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_engine.pattern import SparsePattern
from sparse_engine.torch_backend import weighted_bag


def aggregate(
    x: Tensor,
    pattern: SparsePattern,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Tensor:
    """`out[i] = row_scale[i] * sum over the edges e of row i of edge_weight[e] * x[src(e)]`.

    `"mean"` divides by the row's number of edges, whatever they weigh.

    A repeated edge counts as often as it is there; an empty row gives zeros.

    Args:
        x: `[M, ...]`, float64, float32, bfloat16 or float16; half types are added up in float32.
        pattern: `N x M`.
        reduce: `"sum"` or `"mean"`.
        row_scale: floating `[N]`, multiplies the result; differentiable.
        edge_weight: floating `[E]`, 1 unless given; not differentiable.

    Returns:
        `[N, ...]` in the dtype of `x`.

    Raises:
        ValueError: for an unknown `reduce`, or shapes, dtypes or devices that do not match.

    Example: node 0 has in-edges from 1 and 2, node 1 has none.

        >>> pattern = SparsePattern(torch.tensor([0, 2, 2]), torch.tensor([1, 2]), num_cols=3)
        >>> aggregate(torch.tensor([[1.0], [2.0], [4.0]]), pattern, reduce="mean").flatten().tolist()
        [3.0, 0.0]
    """
    _check_inputs(x, pattern, reduce, row_scale, edge_weight)
    flat = x.reshape(x.shape[0], x.shape[1:].numel())  # [M, C]
    sums: Tensor = _SumOverEdges.apply(flat, pattern, edge_weight)  # type: ignore[no-untyped-call]
    factor = None if row_scale is None else row_scale.to(sums.dtype)
    if reduce == "mean":
        degrees = pattern.degrees.clamp(min=1).to(sums.dtype)
        factor = 1.0 / degrees if factor is None else factor / degrees
    if factor is not None:
        sums = sums * factor[:, None]
    return sums.to(x.dtype).reshape(pattern.num_rows, *x.shape[1:])


class _SumOverEdges(torch.autograd.Function):
    """`[M, C]` to `[N, C]` in the work dtype; its backward is itself over the transposed pattern."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pattern: SparsePattern, weights: Tensor | None) -> Tensor:
        ctx.pattern, ctx.dtype, ctx.weights = pattern, x.dtype, weights
        x = x if x.dtype == torch.float64 else x.float()
        return weighted_bag(x, pattern, None if weights is None else weights.to(x.dtype).contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        transposed, order = ctx.pattern.transpose()
        weights = None if ctx.weights is None else ctx.weights.index_select(0, order)
        grad_x: Tensor = _SumOverEdges.apply(grad, transposed, weights)  # type: ignore[no-untyped-call]
        return grad_x.to(ctx.dtype), None, None


def _check_inputs(
    x: Tensor, pattern: SparsePattern, reduce: str, row_scale: Tensor | None, edge_weight: Tensor | None
) -> None:
    if reduce not in ("sum", "mean"):
        raise ValueError(f"reduce is {reduce!r}; use 'sum' or 'mean'")
    if not x.is_floating_point() or x.dim() < 1 or x.shape[0] != pattern.num_cols:
        raise ValueError(f"aggregate needs a floating x of [M={pattern.num_cols}, ...], got {x.dtype} {list(x.shape)}")
    if x.device != pattern.device:
        raise ValueError(f"x is on {x.device} and the pattern on {pattern.device}; move both to one")
    if row_scale is not None and (row_scale.shape != (pattern.num_rows,) or row_scale.device != x.device):
        raise ValueError(
            f"row_scale must be [N={pattern.num_rows}] on {x.device}, got {list(row_scale.shape)} on {row_scale.device}"
        )
    if edge_weight is not None and (edge_weight.shape != (pattern.num_edges,) or edge_weight.device != x.device):
        raise ValueError(
            f"edge_weight must be [E={pattern.num_edges}] on {x.device}, got {list(edge_weight.shape)} on "
            f"{edge_weight.device}"
        )
