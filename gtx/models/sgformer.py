"""SGFormer: one linear attention over all rows of a micro-batch beside a GCN.

Legend: `N` rows of a micro-batch, `n_src` rows before a layer, `n_dst` after it, `C` width, `H` heads, `d = C / H`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import linear_attention, normalised_sum, widened
from gtx.parallel.context import LayerContext

_BETA = 0.5  # share of the attention beside its residual


class SimpleAttention(nn.Module):
    """`D^-1 [V + Q (K^T V) / N]` with `D = diag(1 + Q (K^T 1) / N)`, Q and K each over its Frobenius norm.

    Wu et al. 2023 (SGFormer, arXiv 2306.10759, section 4), head by head; heads are put side by side.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        packed = widened(self.query_key_value(x).unflatten(1, (3, self.heads, -1)))  # [n_src, 3, H, d]
        squares = context.micro_batch_sum(packed[:, :2].square().sum(-1))  # [Mw, 2, H]
        scale = squares.clamp(min=torch.finfo(squares.dtype).tiny).rsqrt()
        queries, keys = (packed[:, :2] * context.spread(scale, packed)[..., None]).unbind(1)
        total, weight = linear_attention(context.destinations(queries), keys, packed[:, 2], context)
        attended = (context.destinations(packed[:, 2]) + total) / (1 + weight).clamp(min=1e-6)  # [n_dst, H, d]
        return attended.flatten(1).to(x.dtype)


class SGFormerLayer(nn.Module):
    """One GCN layer of `(1 - a) Z + a GCN(Z0)`; the first one also makes `Z0 = relu(norm(x))` and Z (as there).

    `Z = norm(b attention(Z0) + (1 - b) Z0)` travels with the rows of the GCN, so the layers between take and give `2 C`
    columns; the last one adds the two up. `a` is `model.graph_weight`, b is 1/2. A GCN layer is
    `relu(norm(D^-1/2 A D^-1/2 x W))`, with layer norms where the authors' code has batch norms, and without a residual,
    with which it scored lower on Cora (docs/log.md, 2026-12-07).
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        width = config.width
        self.first, self.last = index == 0, index == config.layers - 1
        self.dropout, self.graph_weight = config.dropout, config.graph_weight
        if self.first:
            self.norm_input = nn.LayerNorm(width)
            self.attention = SimpleAttention(width, config.heads)
            self.norm_attention = nn.LayerNorm(width)
        self.weight = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        if self.first:
            local = context.dropout(F.relu(self.norm_input(x)), self.dropout)
            mixed = _BETA * self.attention(local, context) + (1 - _BETA) * context.destinations(local)
            everywhere = context.dropout(self.norm_attention(mixed), self.dropout)
        else:
            local, everywhere = x.chunk(2, dim=1)
            everywhere = context.destinations(everywhere)
        local = F.relu(self.norm(normalised_sum(self.weight(local), context)))
        local = context.dropout(local, self.dropout)
        if self.last:
            return (1 - self.graph_weight) * everywhere + self.graph_weight * local
        return torch.cat([local, everywhere], dim=1)


FAMILY = Family(
    lambda config, num_features, num_classes: [SGFormerLayer(config, i) for i in range(config.layers)],
    costs="SGFormer",
)
