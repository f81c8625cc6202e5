"""GAT: attention whose scores are sums of one number of each end of an edge."""

from __future__ import annotations

from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import FeedForward
from gtx.parallel.context import LayerContext


class GATLayer(nn.Module):
    """`x + FFN(attention(W norm(x)))`, an edge scoring `leaky_relu(u . W x_j + w . W x_i)` per head.

    Velickovic et al. 2018 (arXiv 1710.10903) in the residual form of Platonov et al. 2023 (arXiv 2302.11640).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm = nn.LayerNorm(width)
        self.values = nn.Linear(width, width)
        self.source_score = nn.Linear(width, config.heads)
        self.own_score = nn.Linear(width, config.heads, bias=False)
        self.ffn = FeedForward(width, config.ffn_width or 2 * width, config.dropout)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        values = self.values(self.norm(x))
        own = self.own_score(context.destinations(values))  # [n_dst, H]
        attended = context.additive_attention(own, self.source_score(values), values.unflatten(1, (self.heads, -1)))
        return context.destinations(x) + self.ffn(attended.flatten(1), context)


FAMILY = Family(lambda config, num_features, num_classes: [GATLayer(config) for _ in range(config.layers)], costs="GAT")
