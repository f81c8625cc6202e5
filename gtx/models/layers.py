"""What layers of several models are made of: a feed-forward block, batch norm and linear attention over a micro-batch.

Row-wise, or sums over a micro-batch. Not here: the models' own layers (a file per family), the attention over edges
(`sparse_engine/`).

Legend: `n_src` rows before a layer, `n_dst` after it, `C` width, `H` heads, `d = C / H`, `Mw` micro-batches of a wave.
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
