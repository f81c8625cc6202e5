"""Polynormer: attention over edges, gated so that layers multiply up to polynomials, then linear attention to all rows.

Legend: `n_src` rows before a layer, `n_dst` after it, `C` width, `H` heads, `d = C / H`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import linear_attention, widened
from gtx.parallel.context import LayerContext


class Gate(nn.Module):
    """A learned share between 0 and 1 of each column, 1/2 at first: `sigmoid(beta)`."""

    def __init__(self, width: int):
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.beta).to(x.dtype).expand_as(x)


class PolynormerLocalLayer(nn.Module):
    """`y = (1 - b) norm(h * u) + b u` with `u = relu(attention(x) + U x)`, `h = relu(W x)`, `b` a gate.

    Equivariant local attention of Deng et al. 2024 (Polynormer, arXiv 2403.01232, section 3): `A V * (H + 1 b^T)`,
    with ReLU and norm where the authors' code has them; A are the scores of GAT. The sum of all layers' y, normed, goes
    to the global layers, so the layers between take and give `2 C` columns: y and the sum so far.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.first, self.last = index == 0, index == config.layers - config.global_layers - 1
        self.values = nn.Linear(width, width, bias=False)
        self.source_score = nn.Linear(width, config.heads)
        self.own_score = nn.Linear(width, config.heads, bias=False)
        self.own = nn.Linear(width, width)
        self.factor = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.gate = Gate(width)
        self.norm_sum = nn.LayerNorm(width) if self.last else None
        self.dropout = config.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        total = None
        if not self.first:
            x, total = x.chunk(2, dim=1)
        values, own = self.values(x), context.destinations(x)
        score = self.own_score(context.destinations(values))  # [n_dst, H]
        attended = context.additive_attention(score, self.source_score(values), values.unflatten(1, (self.heads, -1)))
        mixed = context.dropout(F.relu(attended.flatten(1) + self.own(own)), self.dropout)
        share = self.gate(mixed)
        out = (1 - share) * self.norm(F.relu(self.factor(own)) * mixed) + share * mixed
        total = out if total is None else context.destinations(total) + out
        return torch.cat([out, total], dim=1) if self.norm_sum is None else self.norm_sum(total)


class PolynormerGlobalLayer(nn.Module):
    """`relu(O [norm(attention(x)) * (W x + b)])`, attention to all rows with the kernel `sigmoid` and Q = K.

    Equivariant global attention of Deng et al. 2024 (section 3), `S V * (H + 1 b^T)`, as in the authors' code.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.key_value = nn.Linear(width, 2 * width)
        self.factor = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.gate = Gate(width)
        self.output = nn.Linear(width, width)
        self.dropout = config.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        packed = widened(self.key_value(x).unflatten(1, (2, self.heads, -1)))  # [n_src, 2, H, d]
        keys = torch.sigmoid(packed[:, 0])
        total, weight = linear_attention(context.destinations(keys), keys, packed[:, 1], context)
        attended = self.norm((total / weight).flatten(1).to(x.dtype))
        factor = self.factor(context.destinations(x))
        return context.dropout(F.relu(self.output(attended * (factor + self.gate(factor)))), self.dropout)


def _layers(config: ModelConfig, num_features: int, num_classes: int) -> list[nn.Module]:
    """Local layers and then `model.global_layers` global ones, always all of them.

    The authors first train the local ones alone for some epochs, with a classifier of their own. That is left out: what
    a step computes would depend on when it runs, and a plan is made and measured for all layers.
    """
    local = config.layers - config.global_layers
    return [
        PolynormerLocalLayer(config, i) if i < local else PolynormerGlobalLayer(config) for i in range(config.layers)
    ]


FAMILY = Family(_layers, costs="Polynormer")
