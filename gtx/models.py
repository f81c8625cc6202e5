"""The models: GT, GPS, GCN and MLP, as layers whose parts are row-wise, edge-wise or sums over a micro-batch.

Models know nothing of ranks: every layer takes rows and a `LayerContext`. Not here: the attention itself
(`sparse_engine/`), losses and scores (`tasks.py`).

Legend: `n_src` rows before a layer, `n_dst` after it, `C` width, `H` heads, `d = C / H`, `Mw` micro-batches of a wave.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.parallel.context import LayerContext, WaveContext


class FeedForward(nn.Module):
    """`C -> F -> C` with GELU and dropout, row-wise."""

    def __init__(self, width: int, hidden: int, dropout: float):
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.dropout = dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        hidden = context.dropout(F.gelu(self.expand(x)), self.dropout)
        return context.dropout(self.contract(hidden), self.dropout)


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


class MicroBatchNorm(nn.Module):
    """Batch norm whose statistics are those of the whole micro-batch, on whichever ranks its rows are.

    A micro-batch of one row has variance 0 and gives the bias. Running statistics are updated by the executor, once per
    micro-batch and in their order. number: place of this norm in the model.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, number: int, momentum: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.number, self.momentum, self.eps = number, momentum, eps

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        if context.training:
            counts = context.counts(x).clamp(min=1).to(wide.dtype)[:, None]  # [Mw, 1]
            mean = context.micro_batch_sum(wide) / counts
            centred = wide - context.spread(mean, x)
            variance = context.micro_batch_sum(centred.square()) / counts
            unbiased = variance * (counts / (counts - 1).clamp(min=1))
            context.report_statistics(self.number, mean, unbiased)
            normed = centred * context.spread((variance + self.eps).rsqrt(), x)
        else:
            normed = (wide - self.running_mean) * (self.running_var + self.eps).rsqrt()
        return (normed * self.weight + self.bias).to(x.dtype)

    @torch.no_grad()
    def update(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics `[C]` towards those of one more micro-batch."""
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)


class LinearAttention(nn.Module):
    """Attention of every row to every row of its micro-batch with the kernel `elu + 1`, in linear time.

    `out_i = phi(q_i) S / (phi(q_i) z)`, `S = sum_j phi(k_j) v_j^T`, `z = sum_j phi(k_j)` (Katharopoulos et al. 2020,
    arXiv 2006.16236). S and z are sums over the micro-batch, divided by its rows to keep them of order one.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.key_value = nn.Linear(width, 2 * width)
        self.query = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        heads, head_dim = self.heads, x.shape[1] // self.heads
        packed = self.key_value(x).view(x.shape[0], 2, heads, head_dim)
        wide = packed if packed.dtype == torch.float64 else packed.float()
        keys = F.elu(wide[:, 0]) + 1
        values = torch.cat([wide[:, 1], torch.ones_like(wide[:, 1, :, :1])], dim=-1)  # [n_src, H, d + 1]
        partial = [
            torch.einsum("nhd,nhe->hde", k, v)
            for k, v in zip(keys.split(context.splits(x)), values.split(context.splits(x)), strict=True)
        ]
        counts = context.counts(x).clamp(min=1).to(wide.dtype)
        totals = context.add_up(torch.stack(partial)) / counts[:, None, None, None]  # [Mw, H, d, d + 1]
        target = context.destinations(x)
        queries = self.query(target).view(target.shape[0], heads, head_dim)
        queries = F.elu(queries.to(wide.dtype)) + 1
        mixed = torch.cat(
            [
                torch.einsum("nhd,hde->nhe", q, total)
                for q, total in zip(queries.split(context.splits(target)), totals, strict=True)
            ]
        )
        attended = mixed[..., :-1] / mixed[..., -1:]
        return self.output(attended.flatten(1).to(x.dtype))


class LocalMean(nn.Module):
    """Message passing by the mean over in-neighbours beside the row itself (SAGE, Hamilton et al. 2017)."""

    def __init__(self, width: int):
        super().__init__()
        self.neighbours = nn.Linear(width, width)
        self.own = nn.Linear(width, width)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        mean = context.aggregate(x, "mean")
        return F.gelu(self.neighbours(mean) + self.own(context.destinations(x)))


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


class GCNLayer(nn.Module):
    """`D^-1/2 A D^-1/2 X W + b` (Kipf and Welling 2017), degrees those of the whole graph."""

    def __init__(self, in_dim: int, out_dim: int, dropout: float, last: bool):
        super().__init__()
        self.weight = nn.Linear(in_dim, out_dim, bias=False)
        nn.init.xavier_uniform_(self.weight.weight)
        self.bias = _Bias(out_dim)
        self.dropout, self.last = dropout, last

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        projected = self.weight(context.dropout(x, self.dropout))
        before = context.in_degrees(before=True).clamp(min=1).rsqrt().to(projected.dtype)
        after = context.in_degrees(before=False).clamp(min=1).rsqrt().to(projected.dtype)
        total = context.aggregate(projected * before[:, None], "sum") * after[:, None]
        out: Tensor = self.bias(total)
        return out if self.last else F.relu(out)


class _Bias(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class MLPLayer(nn.Module):
    """`x + FFN(norm(x))`: a GT layer without its attention, to show what the graph is worth."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.ffn = FeedForward(config.width, config.ffn_width or 2 * config.width, config.dropout)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        x = context.destinations(x)
        return x + self.ffn(self.norm(x), context)


class GraphModel(nn.Module):
    """An encoder, layers and a classifier; the encoder and classifier are plain rows and, for GCN, absent."""

    def __init__(self, config: ModelConfig, num_features: int, num_classes: int):
        super().__init__()
        width, count = config.width, config.layers
        self.uses_edges = config.name != "MLP"
        self.input_dropout = config.input_dropout
        self.encoder: nn.Module = nn.Linear(num_features, width)
        self.classifier: nn.Module = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))
        layers: list[nn.Module]
        match config.name:
            case "GT":
                layers = [GTLayer(config) for _ in range(count)]
            case "GPS":
                layers = [GPSLayer(config, i) for i in range(count)]
            case "MLP":
                layers = [MLPLayer(config) for _ in range(count)]
            case "GCN":
                self.encoder, self.classifier = nn.Identity(), nn.Identity()
                dims = [num_features, *[width] * (count - 1), num_classes]
                layers = [GCNLayer(dims[i], dims[i + 1], config.dropout, i == count - 1) for i in range(count)]
        self.layers = nn.ModuleList(layers)

    @property
    def norms(self) -> list[MicroBatchNorm]:
        """Batch norms by their number."""
        found = [m for m in self.modules() if isinstance(m, MicroBatchNorm)]
        return sorted(found, key=lambda norm: norm.number)

    def forward(self, x: Tensor, token: Tensor, wave: WaveContext) -> tuple[Tensor, Tensor]:
        """x: features `[n, F]` of this rank's rows. token: scalar that threads through all exchanges.

        Returns logits `[rows after the last layer, classes]` and the token.
        """
        x = self.encoder(wave.input.dropout(x, self.input_dropout))
        for index, layer in enumerate(self.layers):
            x, token = wave.run(layer, index, x, token)
        return cast(Tensor, self.classifier(x)), token
