"""GPS: message passing and linear attention over all rows of a micro-batch, side by side."""

from __future__ import annotations

from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import FeedForward, LinearAttention, LocalMean, MicroBatchNorm
from gtx.parallel.context import LayerContext


class GPSLayer(nn.Module):
    """A local branch and a global one side by side, then an FFN, with batch norms (GraphGPS, arXiv 2205.12454)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        width = config.width
        self.local = LocalMean(width)
        self.attention = LinearAttention(width, config.heads)
        self.norm_local = MicroBatchNorm(width, 3 * index)
        self.norm_attention = MicroBatchNorm(width, 3 * index + 1)
        self.ffn = FeedForward(width, config.ffn_width or 2 * width, config.dropout)
        self.norm_ffn = MicroBatchNorm(width, 3 * index + 2)
        self.dropout = config.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        own = context.destinations(x)
        local = self.norm_local(own + context.dropout(self.local(x, context), self.dropout), context)
        everywhere = self.norm_attention(own + context.dropout(self.attention(x, context), self.dropout), context)
        both = local + everywhere
        return self.norm_ffn(both + self.ffn(both, context), context)


FAMILY = Family(
    lambda config, num_features, num_classes: [GPSLayer(config, i) for i in range(config.layers)], costs="GPS"
)
