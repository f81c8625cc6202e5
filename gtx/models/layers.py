"""What layers of several models are made of: a feed-forward block, GCN's propagation, batch norm, linear attention.

Row-wise, or sums over edges or a micro-batch. Not here: the models' own layers (a file per family), the attention over
edges (`sparse_engine/`).

Legend: `n_src` rows before a layer, `n_dst` after it, `C` width, `H` heads, `d = C / H`, `r` columns of a
kernel's features, `Mw` micro-batches of a wave.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtx.parallel.context import LayerContext


class FeedForward(nn.Module):
    """`C -> F -> C` with GELU and dropout, row-wise. inputs: columns that come in, if they are not C."""

    def __init__(self, width: int, hidden: int, dropout: float, inputs: int | None = None):
        super().__init__()
        self.expand = nn.Linear(inputs or width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.dropout = dropout

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        hidden = context.dropout(F.gelu(self.expand(x)), self.dropout)
        return context.dropout(self.contract(hidden), self.dropout)


class LocalMean(nn.Module):
    """Message passing by the mean over in-neighbours beside the row itself (SAGE, Hamilton et al. 2017).

    edge_type: which edges count, if not all.
    """

    def __init__(self, width: int, edge_type: int | None = None):
        super().__init__()
        self.neighbours = nn.Linear(width, width)
        self.own = nn.Linear(width, width)
        self.edge_type = edge_type

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        mean = context.aggregate(x, "mean", edge_type=self.edge_type)
        return F.gelu(self.neighbours(mean) + self.own(context.destinations(x)))


class MicroBatchNorm(nn.Module):
    """Batch norm whose statistics are those of the whole micro-batch, on whichever ranks its rows are.

    A micro-batch of one row has variance 0 and gives the bias. Running statistics are updated by the executor, once per
    micro-batch and in their order. number: place of this norm in the model. before: whether it norms the rows before a
    layer; by their number unless told, as `LayerContext.counts` does.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, width: int, number: int, momentum: float = 0.1, eps: float = 1e-5, *, before: bool | None = None
    ):
        super().__init__()
        self.before = before
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.number, self.momentum, self.eps = number, momentum, eps

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        wide = widened(x)
        if context.training:
            counts = context.counts(x, before=self.before).clamp(min=1).to(wide.dtype)[:, None]  # [Mw, 1]
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


def normalised_sum(x: Tensor, context: LayerContext) -> Tensor:
    """`D^-1/2 A D^-1/2 X` of `x [n_src, C]`, `[n_dst, C]`: GCN's propagation (Kipf and Welling 2017, arXiv 1609.02907).

    Degrees are in-degrees in the whole graph.
    """
    before = context.in_degrees(before=True).clamp(min=1).rsqrt().to(x.dtype)
    after = context.in_degrees(before=False).clamp(min=1).rsqrt().to(x.dtype)
    return context.aggregate(x * before[:, None], "sum") * after[:, None]


def widened(x: Tensor) -> Tensor:
    """In float32 at least, in which sums over a micro-batch are made."""
    return x if x.dtype == torch.float64 else x.float()


def mean_outer(keys: Tensor, values: Tensor, context: LayerContext) -> Tensor:
    """The mean of `keys_j values_j^T` over the rows j of each micro-batch, per head.

    keys: `[n_src, H, r]`. values: `[n_src, H, d]`. Returns `[Mw, H, r, d]`, a sum over ranks; 0 without any row.
    """
    sizes = context.splits(keys)
    partial = [torch.einsum("nhr,nhd->hrd", k, v) for k, v in zip(keys.split(sizes), values.split(sizes), strict=True)]
    counts = context.counts(keys, before=True).clamp(min=1).to(keys.dtype)
    return context.add_up(torch.stack(partial)) / counts[:, None, None, None]


def times_own(queries: Tensor, totals: Tensor, context: LayerContext) -> Tensor:
    """Each row's `queries [n_dst, H, r]` times the matrix `[Mw, H, r, d]` of its micro-batch, `[n_dst, H, d]`."""
    parts = queries.split(context.splits(queries))
    return torch.cat([torch.einsum("nhr,hrd->nhd", q, total) for q, total in zip(parts, totals, strict=True)])


def linear_attention(queries: Tensor, keys: Tensor, values: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
    """Means over the rows j of a row's micro-batch: of `(q_i . k_j) v_j`, `[n_dst, H, d]`, and of `q_i . k_j`.

    queries: `[n_dst, H, r]`. keys: `[n_src, H, r]`. values: `[n_src, H, d]`. Linear in the rows, as the matrix
    `K^T V` is made first. The second has shape `[n_dst, H, 1]`.
    """
    values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)  # [n_src, H, d + 1]
    mixed = times_own(queries, mean_outer(keys, values, context), context)
    return mixed[..., :-1], mixed[..., -1:]


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
        packed = widened(self.key_value(x).unflatten(1, (2, self.heads, -1)))
        queries = widened(self.query(context.destinations(x)).unflatten(1, (self.heads, -1)))
        total, weight = linear_attention(F.elu(queries) + 1, F.elu(packed[:, 0]) + 1, packed[:, 1], context)
        return self.output((total / weight).flatten(1).to(x.dtype))
