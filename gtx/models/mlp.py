"""MLP: GT without its attention, to show what the graph is worth."""

from __future__ import annotations

from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import FeedForward
from gtx.parallel.context import LayerContext


class MLPLayer(nn.Module):
    """`x + FFN(norm(x))`: a GT layer without its attention, to show what the graph is worth."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.ffn = FeedForward(config.width, config.ffn_width or 2 * config.width, config.dropout)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        x = context.destinations(x)
        return x + self.ffn(self.norm(x), context)


FAMILY = Family(
    lambda config, num_features, num_classes: [MLPLayer(config) for _ in range(config.layers)],
    uses_edges=False,
    costs="MLP",
)
