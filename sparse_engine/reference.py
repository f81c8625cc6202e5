"""Dense attention over a pattern: the definition of right, in the dtype of its inputs, by plain autograd.

It holds `[H, N, M]` and is for tests and small graphs; `torch_backend.py` is for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_engine.pattern import SparsePattern


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern, edge_bias: Tensor | None, scale: float
) -> Tensor:
    """`softmax(scale * q k^T + log_weight) v`, see `attention.sparse_attention`, which checks the inputs."""
    num_heads = q.shape[1]
    if edge_bias is None:
        edge_bias = q.new_zeros(pattern.num_edges)
    if edge_bias.dim() == 1:
        edge_bias = edge_bias[:, None].expand(-1, num_heads)
    log_weight = _pair_log_weight(edge_bias.to(q.dtype), pattern)  # [H, N, M]
    logits = torch.einsum("nhd,mhd->hnm", q, k) * scale + log_weight
    silent = (log_weight == -torch.inf).all(dim=-1, keepdim=True)  # [H, N, 1], rows that nothing reaches
    weights = torch.softmax(logits.masked_fill(silent, 0.0), dim=-1).masked_fill(silent, 0.0)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def _pair_log_weight(edge_bias: Tensor, pattern: SparsePattern) -> Tensor:
    """`log(sum over the edges of a pair of exp(bias))`, `[H, N, M]`, so that repeated edges add; -inf without one."""
    shape = (edge_bias.shape[1], pattern.num_rows, pattern.num_cols)
    bias = edge_bias.t()  # [H, E]
    pair = (pattern.row_index * pattern.num_cols + pattern.indices).expand(shape[0], -1)  # [H, E]
    none = bias.new_full((shape[0], shape[1] * shape[2]), -torch.inf)
    peak = none.scatter_reduce(1, pair, bias.detach(), "amax")
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight = torch.zeros_like(none).scatter_add(1, pair, torch.exp(bias - peak.gather(1, pair)))
    reached = weight > 0
    return torch.where(reached, torch.log(torch.where(reached, weight, 1.0)) + peak, -torch.inf).view(shape)
