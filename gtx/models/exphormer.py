"""Exphormer: attention over the graph's edges and those of an expander, beside message passing and virtual nodes.

Legend: `n_src` rows before a layer, `n_dst` after it, `C` width, `H` heads, `d = C / H`, `V` virtual nodes, `Mw`
micro-batches of a wave.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.graphs import NUM_EDGE_TYPES, OWN_EDGE
from gtx.models.family import Family
from gtx.models.layers import FeedForward, LocalMean, mean_outer, times_own, widened
from gtx.parallel.context import LayerContext

_LARGEST_LOGIT = 5.0  # as the authors' code has it; a softmax over all rows needs no maximum then


class VirtualNodes(nn.Module):
    """V nodes that attend to all rows of the micro-batch, and to which all rows attend.

    `u_v = sum_j softmax_j(s_v(x_j)) W x_j`, then `sum_v softmax_v(t_v(x_i)) u_v` per head, s and t linear. No node is
    added to the graph: in a sampled or clustered micro-batch it would be somewhere, or not be there. They are sums over
    the micro-batch instead, which are the same on any number of ranks.
    """

    def __init__(self, width: int, heads: int, count: int):
        super().__init__()
        self.heads = heads
        self.gathering = nn.Linear(width, heads * count)
        self.values = nn.Linear(width, width)
        self.reading = nn.Linear(width, heads * count)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        logits = widened(self.gathering(x).unflatten(1, (self.heads, -1)))  # [n_src, H, V]
        values = widened(self.values(x).unflatten(1, (self.heads, -1)))  # [n_src, H, d]
        values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)
        totals = mean_outer(logits.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT).exp(), values, context)  # [Mw, H, V, d + 1]
        nodes = totals[..., :-1] / totals[..., -1:].clamp(min=1e-6)  # 0 where a micro-batch has no rows
        shares = widened(self.reading(context.destinations(x)).unflatten(1, (self.heads, -1))).softmax(-1)
        return self.output(times_own(shares, nodes, context).flatten(1).to(x.dtype))


class ExphormerLayer(nn.Module):
    """`x + O attention(norm(x)) + local(norm(x)) + virtual(norm(x))`, then `x + FFN(norm(x))`.

    Shirzad et al. 2023 (Exphormer, arXiv 2303.06147, section 3) in pre-norm form. The attention is over the graph's
    edges and the expander's (`gtx/expander.py`), an edge's logit `q_i . k_j / sqrt(d) + b(x_i)` with b linear, for each
    head and type of edge; the paper multiplies `k_j` by an embedding of the edge instead. Message passing is over the
    graph's own edges only, as in GraphGPS (arXiv 2205.12454). The paper has one softmax over edges and virtual nodes;
    here these have their own, see `VirtualNodes`.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm = nn.LayerNorm(width)
        self.key_value = nn.Linear(width, 2 * width)
        self.query = nn.Linear(width, width)
        self.type_logits = nn.Linear(width, config.heads * NUM_EDGE_TYPES)
        self.output = nn.Linear(width, width)
        self.local = LocalMean(width, OWN_EDGE)
        self.virtual = VirtualNodes(width, config.heads, config.virtual_nodes)
        self.norm_ffn = nn.LayerNorm(width)
        self.ffn = FeedForward(width, config.ffn_width or 2 * width, config.dropout)
        self.dropout = config.dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        normed = self.norm(x)
        sources = context.start_sources(self.key_value(normed).unflatten(1, (2, self.heads, -1)))
        own = context.destinations(normed)
        queries, types = (each.unflatten(1, (self.heads, -1)) for each in (self.query(own), self.type_logits(own)))
        attended = self.output(context.attention(queries, sources, type_logits=types).flatten(1))
        mixed = attended + self.local(normed, context) + self.virtual(normed, context)
        x = context.destinations(x) + context.dropout(mixed, self.dropout)
        return x + self.ffn(self.norm_ffn(x), context)


FAMILY = Family(
    lambda config, num_features, num_classes: [ExphormerLayer(config) for _ in range(config.layers)],
    costs="Exphormer",
)
