"""Sparse attention from torch operators, on any device, without ever holding `[E, H, d]`.

Two products do the work: dot products on edges (sampled dense-dense, over chunks of edges, so that a hub is cut like
anything else) and weighted sums over the edges of a row (sparse-dense, as embedding bags: one writer a row, no
atomics). Per-edge numbers are `[H, E]` and live only within a pass. Input checks are in `attention.py`, fused kernels
are not here. Shape letters: `N` queries, `M` keys, `E` edges, `H` heads, `d` head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sparse_engine.pattern import SparsePattern

# Elements of a gathered chunk, of which two are held. On the CPU a thread's share stays in its core's cache; elsewhere
# a launch must be worth its while.
_CPU_CHUNK_ELEMENTS_PER_THREAD = 2**18
_CHUNK_ELEMENTS = 2**22


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern, edge_bias: Tensor | None, scale: float
) -> Tensor:
    """See `attention.sparse_attention`, which checks the inputs. Half types are computed in float32."""
    out: Tensor = _SparseAttention.apply(q, k, v, edge_bias, pattern, scale)  # type: ignore[no-untyped-call]
    return out


class _SparseAttention(torch.autograd.Function):
    """Keeps q, k, v and two numbers per row and head; backward recomputes the probabilities (Dao et al. 2022).

    The log-sum-exp is kept as its two parts, maximum and sum: added up, it loses digits that every probability of the
    row then lacks, and a row of one edge is no longer exactly 1.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, edge_bias: Tensor | None, pattern: SparsePattern, scale: float
    ) -> Tensor:
        work_dtype = _work_dtype(q)
        weights = _logits(q, k, edge_bias, pattern, scale)  # [H, E]
        peak = _reduce_rows(weights, pattern, "max")  # [H, N]
        peak = peak.masked_fill_(peak == -torch.inf, 0.0)  # rows that nothing reaches
        weights.sub_(_spread(peak, pattern)).exp_()
        total = _reduce_rows(weights, pattern, "sum")  # [H, N]
        total.masked_fill_(total == 0, 1.0)
        out = _sum_rows(weights, v.to(work_dtype), pattern)  # [N, H, d]
        out = out.div_(total.t()[:, :, None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, edge_bias, peak, total)
        ctx.pattern, ctx.scale = pattern, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, edge_bias, peak, total = ctx.saved_tensors
        need_q, need_k, need_v, need_bias = ctx.needs_input_grad[:4]
        pattern, scale, work_dtype = ctx.pattern, ctx.scale, _work_dtype(q)
        grad_q = grad_k = grad_v = grad_bias = None
        weights = _logits(q, k, edge_bias, pattern, scale).sub_(_spread(peak, pattern)).exp_()  # [H, E], probs * total
        grad_out = grad_out.to(work_dtype) / total.t()[:, :, None]  # [N, H, d], so that nothing is divided per edge
        transposed, perm = pattern.transpose() if need_k or need_v else (pattern, pattern.indices)
        if need_v:
            grad_v = _sum_rows(weights.index_select(1, perm), grad_out, transposed).to(v.dtype)
        if need_q or need_k or need_bias:
            grad_logits = _edge_dots(grad_out, v.to(work_dtype), pattern)  # [H, E], so far of probs, over total
            # The mean under the probabilities, from the edges. As grad_out . out, the usual shortcut, it fails to
            # cancel in a row of one edge: beside a hub of 20,000, grad_q and grad_k had 6 to 8 times the plain error.
            mean = _reduce_rows(weights * grad_logits, pattern, "sum").div_(total)  # [H, N]
            grad_logits.sub_(_spread(mean, pattern)).mul_(weights)
            del weights
            if need_q:
                grad_q = _sum_rows(grad_logits, k.to(work_dtype), pattern).mul_(scale).to(q.dtype)
            if need_k:
                grad_k = _sum_rows(grad_logits.index_select(1, perm), q.to(work_dtype), transposed)
                grad_k = grad_k.mul_(scale).to(k.dtype)
            if need_bias:
                grad_bias = (grad_logits.sum(0) if edge_bias.dim() == 1 else grad_logits.t()).to(edge_bias.dtype)
        return grad_q, grad_k, grad_v, grad_bias, None, None


def _work_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logits(q: Tensor, k: Tensor, edge_bias: Tensor | None, pattern: SparsePattern, scale: float) -> Tensor:
    """`[H, E]` in the work dtype."""
    work_dtype = _work_dtype(q)
    logits = _edge_dots(q.to(work_dtype), k.to(work_dtype), pattern).mul_(scale)
    return logits if edge_bias is None else logits.add_(edge_bias.t())  # [E, H] -> [H, E]; [E] broadcasts


def _edge_dots(row_values: Tensor, col_values: Tensor, pattern: SparsePattern) -> Tensor:
    """`row_values[dst(e), h] . col_values[src(e), h]` for every edge and head, `[H, E]`."""
    _, num_heads, head_dim = row_values.shape
    left = row_values.transpose(1, 2).reshape(-1, head_dim * num_heads)  # [N, d * H]: heads side by side in a vector
    right = col_values.transpose(1, 2).reshape(-1, head_dim * num_heads)  # [M, d * H]
    dots = left.new_empty(num_heads, pattern.num_edges)
    step = max(1, _chunk_elements(left) // (num_heads * head_dim))
    gathered = left.new_empty(2, min(step, pattern.num_edges), num_heads * head_dim)
    for start in range(0, pattern.num_edges, step):
        chunk = slice(start, start + step)
        products, factors = gathered[:, : pattern.num_edges - start]  # [step, d * H] each
        torch.index_select(right, 0, pattern.indices[chunk], out=products)
        products *= torch.index_select(left, 0, pattern.row_index[chunk], out=factors)
        dots[:, chunk] = products.view(-1, head_dim, num_heads).sum(1).t()
    return dots


def _chunk_elements(tensor: Tensor) -> int:
    if tensor.device.type == "cpu":
        return _CPU_CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads()
    return _CHUNK_ELEMENTS


def _sum_rows(weights: Tensor, values: Tensor, pattern: SparsePattern) -> Tensor:
    """`sum over the edges e of row i of weights[h, e] * values[src(e), h]`, `[N, H, d]`."""
    sums = values.new_empty(pattern.num_rows, *values.shape[1:])
    for head in range(values.shape[1]):
        sums[:, head] = weighted_bag(values[:, head], pattern, weights[head])
    return sums


def weighted_bag(values: Tensor, pattern: SparsePattern, weights: Tensor | None) -> Tensor:
    """Weighted sum of source rows over the edges of every row: sparse `[N, M]` times dense.

    An embedding bag, as its CPU kernel prefetches and works in registers: at 2 M edges, 8 heads of 16, it took 0.4x
    the time of a CSR matrix product, and it is not a beta feature that warns.

    Args:
        values: `[M, C]`, float32 or float64; rows may be strided.
        weights: `[E]` contiguous in the dtype of `values`, or `None` for ones.

    Returns:
        `[N, C]`. Not differentiable: call it inside an autograd function.
    """
    if pattern.num_edges == 0 or values.shape[1] == 0:
        return values.new_zeros(pattern.num_rows, values.shape[1])
    return functional.embedding_bag(
        pattern.indices,
        values,
        pattern.indptr.to(pattern.indices.dtype),
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )


def _reduce_rows(values: Tensor, pattern: SparsePattern, reduce: str) -> Tensor:
    """Reduce `[H, E]` over the edges of each row, `[H, N]`; an empty row gives `-inf` for "max", 0 for "sum"."""
    reduced = values.new_empty(values.shape[0], pattern.num_rows)
    for head in range(values.shape[0]):
        reduced[head] = torch.segment_reduce(values[head], reduce, offsets=pattern.indptr, unsafe=True)
    return reduced


def _spread(row_values: Tensor, pattern: SparsePattern) -> Tensor:
    """Repeat `[H, N]` on the edges of each row, `[H, E]`."""
    return row_values.index_select(1, pattern.row_index)
