"""A trained model as a plain torch module over an edge list: one device, no ranks, no plan, nothing compiled.

Made of the model's own layers; what they ask of their context is plain tensor code here, which `torch.export` can trace
for any number of nodes and edges. It holds `[E, H, d]`, which the sparse engine never does. Not here: files and the
command (`export.py`).

Legend: `N` nodes, `E` edges, `C` columns, `H` heads, `d` head width.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtx.models import GraphModel
from gtx.parallel.compiled import EdgeSlot
from gtx.parallel.context import EdgeFunction, WaveContext
from sparse_engine import SparsePattern


class PlainModel(nn.Module):
    """A model as `forward(x, edge_index, edge_weight=None)`; weights have the names of the model's below `model.`.

    scaling: `(mean, deviation)` of the features, float64 `[F]` each, that are taken off the first F columns of x; a
    deviation of 0 makes the column 0.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: GraphModel, num_heads: int, scaling: tuple[Tensor, Tensor] | None = None):
        super().__init__()
        self.model, self.num_heads, self.scales = model, num_heads, scaling is not None
        mean, deviation = scaling or (torch.zeros(0), torch.zeros(0))
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Logits `[N, classes]`.

        x: `[N, columns]`, features and then encodings where the model has any. edge_index: int64 `[2, E]`, sources and
        destinations. edge_weight: `[E]`, positive; an edge of weight 2 counts as two edges; None: 1 each.
        """
        if self.scales:
            features, rest = x[:, : self.model.num_features], x[:, self.model.num_features :]
            known = self.deviation > 0
            scaled = (features.double() - self.mean) / torch.where(known, self.deviation, 1.0)
            x = torch.cat([torch.where(known, scaled, 0.0).to(x.dtype), rest], dim=1)
        wave = _PlainWave(PlainContext(x, edge_index, edge_weight, self.num_heads, self.training))
        logits, _ = self.model(x, x.new_zeros(()), cast(WaveContext, wave))
        return cast(Tensor, logits)


class _PlainWave:
    """What `GraphModel` sees of a wave: the same context for every layer."""

    def __init__(self, context: PlainContext):
        self.input = context

    def run(
        self, layer: nn.Module, index: int, x: Tensor, token: Tensor, edge_bias: nn.Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        assert edge_bias is None, "the module takes no edge features"
        return layer(x, self.input), token


class PlainContext:
    """What a layer may ask of `parallel.context.LayerContext`, where all rows are here and all edges are attended."""

    replaying = False

    def __init__(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None, num_heads: int, training: bool):
        """x: `[N, columns]`; its rows are the nodes."""
        self.num_heads, self.training = num_heads, training
        self._source, self._destination = edge_index[0], edge_index[1]
        self._weight, self._x = edge_weight, x

    @property
    def num_src(self) -> int:
        return self._x.shape[0]

    @property
    def num_dst(self) -> int:
        return self._x.shape[0]

    @property
    def nodes_after(self) -> Tensor:
        return torch.arange(self._x.shape[0], device=self._x.device)

    def destinations(self, x: Tensor) -> Tensor:
        return x

    def dropout(self, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p, self.training)

    # Edges ------------------------------------------------------------------------------------------------------------

    def start_sources(self, x: Tensor) -> Tensor:
        return x

    def _sum_by_destination(self, values: Tensor) -> Tensor:
        """The sums `[N, ...]` of edge values `[E, ...]`."""
        return values.new_zeros(self._x.shape[0], *values.shape[1:]).index_add(0, self._destination, values)

    def _attend(self, logits: Tensor, values: Tensor) -> Tensor:
        """Softmax of `logits [E, H]` over each row's edges, times `values [N, H, d]`: `[N, H, d]`, 0 without edges."""
        if self._weight is not None:
            logits = logits + self._weight.log().to(logits.dtype)[:, None]
        index = self._destination[:, None].expand_as(logits)
        highest = logits.new_full((self._x.shape[0], logits.shape[1]), -torch.inf)
        highest = highest.scatter_reduce(0, index, logits, "amax").detach()
        shares = (logits - highest.index_select(0, self._destination)).exp()
        total = self._sum_by_destination(shares)
        total = torch.where(total > 0, total, 1.0)
        weighted = self._sum_by_destination(shares[..., None] * values.index_select(0, self._source))
        return weighted / total[..., None]

    def attention(self, q: Tensor, kv: Tensor, *, scale: float | None = None) -> Tensor:
        keys, values = kv[:, 0], kv[:, 1]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        products = q.index_select(0, self._destination) * keys.index_select(0, self._source)
        return self._attend(products.sum(-1) * scale, values)

    def additive_attention(self, own: Tensor, sources: Tensor, values: Tensor, *, slope: float = 0.2) -> Tensor:
        scores = own.index_select(0, self._destination) + sources.index_select(0, self._source)
        return self._attend(F.leaky_relu(scores, slope), values)

    def aggregate(self, x: Tensor, reduce: str = "mean", *, edge_type: int | None = None) -> Tensor:
        """edge_type: all edges here are the graph's own."""
        values = x.index_select(0, self._source)
        if self._weight is not None:
            values = values * self._weight.to(values.dtype)[:, None]
        total = self._sum_by_destination(values)
        if reduce == "sum":
            return total
        degrees = self.in_degrees(before=False).to(total.dtype)[:, None]
        return total / torch.where(degrees > 0, degrees, 1.0)

    def in_degrees(self, before: bool) -> Tensor:
        ones = (
            torch.ones_like(self._destination, dtype=torch.float64) if self._weight is None else self._weight.double()
        )
        return self._sum_by_destination(ones)

    def edgewise(
        self, fn: EdgeFunction, queries: Tensor | None, sources: Tensor, *, out_dim: int | None = None
    ) -> Tensor:
        """Edge-wise work of a layer's own. It sees a `SparsePattern`, which only runs, and cannot be traced."""
        count = self._x.shape[0]
        pattern = SparsePattern.from_edges(self._destination, self._source, count, count)
        odds = None
        if self._weight is not None:
            order = torch.argsort(self._destination, stable=True)
            odds = self._weight.double().reciprocal().index_select(0, order)
        ones = torch.ones(count, dtype=torch.float64, device=self._x.device)
        slot = EdgeSlot((0, self.num_heads), pattern, self.in_degrees(before=False), ones, odds)
        return fn(slot, queries, sources)

    # Sums over all rows -----------------------------------------------------------------------------------------------

    def splits(self, x: Tensor) -> tuple[int, ...]:
        return (x.shape[0],)

    def counts(self, x: Tensor, *, before: bool | None = None) -> Tensor:
        return torch.ones_like(x.reshape(x.shape[0], -1)[:, 0], dtype=torch.float64).sum().reshape(1)

    def micro_batch_sum(self, x: Tensor) -> Tensor:
        return x.sum(0)[None]

    def add_up(self, partial: Tensor) -> Tensor:
        return partial

    def spread(self, totals: Tensor, like: Tensor) -> Tensor:
        return totals.expand(like.shape[0], *totals.shape[1:])

    def report_statistics(self, norm: int, mean: Tensor, variance: Tensor) -> None:
        """Running statistics stay those of the training run."""

    def move(self, x: Tensor) -> Tensor:
        return x
