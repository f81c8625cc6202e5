"""NAGphormer: a transformer over each node's own tokens, one for every hop, so that layers exchange nothing.

Legend: `n` rows, `T = hops + 1` tokens, `C` width, `H` heads, `d = C / H`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import FeedForward
from gtx.parallel.context import LayerContext


class HopReadout(nn.Module):
    """`z_0 + sum_k a_k z_k`, `a = softmax_k(w . [z_0, z_k])` over the hops 1 to K: `[n, T, C]` to `[n, C]`."""

    def __init__(self, width: int):
        super().__init__()
        self.score = nn.Linear(2 * width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        own, hops = tokens[:, 0], tokens[:, 1:]
        shares = self.score(torch.cat([own[:, None].expand_as(hops), hops], dim=2)).softmax(1)  # [n, K, 1]
        return own + (shares * hops).sum(1)


class NAGphormerLayer(nn.Module):
    """`x + O attention(norm(x))`, then `x + FFN(norm(x))`, over the T tokens of a node; the last layer reads them out.

    Chen et al. 2023 (NAGphormer, arXiv 2206.04910, section 3). Token k is row k of Hop2Token, `A^k X` with A normalised
    as in GCN (`gtx.encodings.hop_features`), made once for the whole graph: also where a micro-batch holds a part of
    it. All tokens go through one encoder; positional encodings, which the paper propagates with the features, are added
    to each as they are. A layer takes and gives `T C` columns, the last one gives C.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm_ffn = nn.LayerNorm(width)
        self.ffn = FeedForward(width, config.ffn_width or 2 * width, config.dropout)
        self.readout = HopReadout(width) if index == config.layers - 1 else None
        self.tokens, self.dropout = config.tokens, config.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        x = context.destinations(x).unflatten(1, (self.tokens, -1))  # [n, T, C]
        packed = self.query_key_value(self.norm(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = packed.permute(2, 0, 3, 1, 4)  # [n, H, T, d] each
        weights = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).softmax(-1)
        attended = (weights @ v).transpose(1, 2).flatten(2)  # [n, T, C]
        x = x + context.dropout(self.output(attended), self.dropout)
        x = x + self.ffn(self.norm_ffn(x), context)
        return x.flatten(1) if self.readout is None else self.readout(x)


FAMILY = Family(
    lambda config, num_features, num_classes: [NAGphormerLayer(config, i) for i in range(config.layers)],
    uses_edges=False,
    costs="NAGphormer",
)
