"""SAGE: an FFN over each row beside the mean of its in-neighbours."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import FeedForward
from gtx.parallel.context import LayerContext


class SAGELayer(nn.Module):
    """`x + FFN([norm(x), mean of norm(x) over in-neighbours])`.

    GraphSAGE's mean aggregator (Hamilton et al. 2017, arXiv 1706.02216) in the residual form of Platonov et al. 2023
    (arXiv 2302.11640), which baselines of graph transformers use.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.ffn = FeedForward(config.width, config.ffn_width or 2 * config.width, config.dropout, 2 * config.width)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        normed = self.norm(x)
        both = torch.cat([context.destinations(normed), context.aggregate(normed, "mean")], dim=1)  # [n_dst, 2 C]
        return context.destinations(x) + self.ffn(both, context)


FAMILY = Family(
    lambda config, num_features, num_classes: [SAGELayer(config) for _ in range(config.layers)], costs="SAGE"
)
