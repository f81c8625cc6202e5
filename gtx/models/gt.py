"""GT: a transformer whose attention runs over the graph's in-edges.

Legend: `n_src` rows before a layer, `n_dst` after it, `C` width, `H` heads, `d = C / H`.
"""

from __future__ import annotations

from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import FeedForward
from gtx.parallel.context import LayerContext


class GTLayer(nn.Module):
    """Pre-norm transformer layer whose attention runs over the graph's in-edges.

    `x + Wo attention(norm(x))`, then `x + FFN(norm(x))`, as in Platonov et al. 2023 (arXiv 2302.11640).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.key_value = nn.Linear(width, 2 * width)
        self.query = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.norm_ffn = nn.LayerNorm(width)
        self.ffn = FeedForward(width, config.ffn_width or 2 * width, config.dropout)
        self.dropout = config.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        heads, head_dim = self.heads, x.shape[1] // self.heads
        normed = self.norm_attention(x)
        # Keys and values travel while the queries are computed.
        sources = context.start_sources(self.key_value(normed).view(x.shape[0], 2, heads, head_dim))
        queries = self.query(context.destinations(normed)).view(context.num_dst, heads, head_dim)
        attended = context.attention(queries, sources).flatten(1)  # [n_dst, C]
        x = context.destinations(x) + context.dropout(self.output(attended), self.dropout)
        return x + self.ffn(self.norm_ffn(x), context)


FAMILY = Family(lambda config, num_features, num_classes: [GTLayer(config) for _ in range(config.layers)])
