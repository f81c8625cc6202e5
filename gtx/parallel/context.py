"""What a layer sees of the plan: three kinds of work, named by the layer and placed by the plan.

A layer does row-wise work on its rows as plain tensor code, edge-wise work through `edgewise` (or `attention`,
`aggregate`), and sums over all rows of a micro-batch through `micro_batch_sum`. So a model knows nothing of ranks. Not
here: the messages (`exchange.py`) and what was compiled (`compiler.py`).

Legend: `n_src` rows this rank owns before the layer, `n_dst` after it, `H` heads, `d` head width, `C` columns, `T`
tensors packed side by side, `Mw` micro-batches of the wave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtx.parallel.compiled import CompiledLayer, CompiledWave, EdgeSlot
from gtx.parallel.exchange import Channel, Flight, Route, gather_finish, gather_start, scatter
from scheduler.plan import Checkpointing
from sparse_engine import aggregate, keyed_dropout, sparse_attention
from sparse_engine.keyed import PURPOSE_DROPOUT, keys, subkeys

EdgeFunction = Callable[[EdgeSlot, Tensor | None, Tensor], Tensor]


@dataclass
class Statistics:
    """Batch-norm statistics of a step, reported once per micro-batch: (norm, micro-batch) -> (mean, variance)."""

    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass
class Runtime:
    """What all layers of one step share.

    step, seed: key the dropout. training: dropout and batch statistics are on. backend: of the attention.
    """

    channel: Channel
    num_heads: int
    seed: int
    step: int
    training: bool
    backend: str
    checkpointing: Checkpointing
    statistics: Statistics = field(default_factory=Statistics)


@dataclass
class Sources:
    """Rows on their way to whoever needs them."""

    flight: Flight
    slots: list[Tensor] | None = None


class LayerContext:
    """One layer of one wave on this rank, as the layer sees it."""

    def __init__(self, runtime: Runtime, compiled: CompiledLayer, micro_batches: range, layer: int, wave: int):
        self._runtime, self._compiled = runtime, compiled
        self._micro_batches = micro_batches
        self._layer = layer
        self._where = f"layer {layer}, wave {wave}, step {runtime.step}"
        self._keys: dict[bool, Tensor] = {}
        self._draws = 0
        self._kept: list[Flight] = []  # what was received, for recomputation
        self._replayed = 0
        self._keeping = False
        self.replaying = False
        self.token = torch.empty(0)
        self.edge_bias: nn.Linear | None = None  # edge features [E, Fe] to a bias [E, H]
        self.has_biased = False

    # Facts ------------------------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        return self._runtime.training

    @property
    def num_heads(self) -> int:
        return self._runtime.num_heads

    @property
    def num_src(self) -> int:
        """Rows this rank owns before the layer."""
        return self._compiled.num_src

    @property
    def num_dst(self) -> int:
        """Rows this rank owns after the layer."""
        return self._compiled.num_dst

    @property
    def nodes_after(self) -> Tensor:
        """The nodes, int64 `[n_dst]`, whose rows this rank owns after the layer."""
        return self.destinations(self._compiled.sources)

    def destinations(self, x: Tensor) -> Tensor:
        """The rows of `x [n_src, ...]` that live on after the layer, `[n_dst, ...]`."""
        rows = self._compiled.destinations
        return x if rows is None else x.index_select(0, rows)

    # Row-wise work that is not plain tensor code ----------------------------------------------------------------------

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Dropout of `x [n_src or n_dst, ...]`, keyed by node, column and the call's place in the layer.

        Dims after the first count as columns.
        """
        draw, self._draws = self._draws, self._draws + 1
        if p == 0.0 or not self.training:
            return x
        after = x.shape[0] == self.num_dst
        if after not in self._keys:
            nodes = self._compiled.sources
            nodes = self.destinations(nodes) if after else nodes
            self._keys[after] = keys(self._runtime.seed, PURPOSE_DROPOUT, self._runtime.step, self._layer, nodes)
        return keyed_dropout(x, p, subkeys(self._keys[after], draw))

    # Edge-wise work ---------------------------------------------------------------------------------------------------

    def start_sources(self, x: Tensor) -> Sources:
        """Start to pass source rows `x [n_src, T, H, d]` on; row-wise work may go on until `edgewise` needs them."""
        return self._start(self._compiled.kv, x)

    def edgewise(
        self, fn: EdgeFunction, queries: Tensor | None, sources: Sources | Tensor, *, out_dim: int | None = None
    ) -> Tensor:
        """Run edge-wise work where the plan says, for all heads of this rank's destinations.

        fn: called once per distinct head range as `fn(edges, queries [rows, Tq, h, d] or None, sources [cols, T, h,
            d])`, returns `[rows, h, out_dim]`. It must treat every head alike and by itself.
        queries: `[n_dst, Tq, H, d]`, or None where destinations bring nothing.
        sources: `[n_src, T, H, d]`, perhaps started before. out_dim: default d.

        Returns `[n_dst, H, out_dim]`.
        """
        if isinstance(sources, Tensor):
            sources = self.start_sources(sources)
        if queries is not None:
            query_slots = self._finish(self._start(self._compiled.q, queries))
        source_slots = self._finish(sources)
        results = []
        with self._phase("edgewise"):
            for i, edges in enumerate(self._compiled.edges):
                query = None if queries is None else query_slots[i]
                if self._runtime.checkpointing == "edges" and torch.is_grad_enabled():
                    result = checkpoint(
                        fn, edges, query, source_slots[i], use_reentrant=False, preserve_rng_state=False
                    )
                else:
                    result = fn(edges, query, source_slots[i])
                results.append(result.unsqueeze(1))  # [rows, 1, h, out_dim]
        out_dim = sources.flight.width[2] if out_dim is None else out_dim
        return self._scatter(results, (1, self.num_heads, out_dim), sources.flight.like).squeeze(1)

    def attention(
        self, q: Tensor, kv: Sources | Tensor, *, scale: float | None = None, type_logits: Tensor | None = None
    ) -> Tensor:
        """Softmax attention of `q [n_dst, H, d]` over in-edges; `kv [n_src, 2, H, d]` packs keys and values.

        Where the model has an edge bias, it is added to the logits. A drawn edge's logit grows by `-log(pi)`, so that
        the row's sums estimate those over its full neighbourhood.
        Where all edges of a row are as likely, softmax ignores that, and nothing is added.

        type_logits: `[n_dst, H, types]`, what else is added to the logits of a row's edges of each type.
        """
        backend, head_dim = self._runtime.backend, q.shape[2]
        of_edges, q = self._edge_biases(q)
        packed = q if type_logits is None else torch.cat([q, type_logits], dim=2)

        def attend(edges: EdgeSlot, query: Tensor | None, source: Tensor) -> Tensor:
            assert query is not None
            odds, bias = edges.edge_inclusion, of_edges(edges)
            own, logits = query[:, 0, :, :head_dim], query[:, 0, :, head_dim:]
            if type_logits is not None:
                by_type = logits.transpose(1, 2).flatten(0, 1)  # [rows * types, h]
                at = edges.pattern.row_index * logits.shape[2]
                added = by_type.index_select(0, at if edges.types is None else at + edges.types)  # [E, h]
                bias = added if bias is None else added + bias
            if odds is not None:
                corrected = odds.log().neg_().to(query.dtype)
                bias = corrected if bias is None else bias + corrected[:, None]
            return sparse_attention(
                own, source[:, 0], source[:, 1], edges.pattern, edge_bias=bias, scale=scale, backend=backend
            )

        return self.edgewise(attend, packed.unsqueeze(1), kv)

    def additive_attention(self, own: Tensor, sources: Tensor, values: Tensor, *, slope: float = 0.2) -> Tensor:
        """Attention over in-edges with the logits `leaky_relu(own[i] + sources[j] + edge bias)`, as in GAT.

        own: `[n_dst, H]`. sources: `[n_src, H]`. values: `[n_src, H, d]`. Drawn edges are corrected for as in
        `attention`. The fused attention runs with queries of 0 and the logits as its bias: no `[E, H, d]` is made, at
        the price of a product per edge that adds nothing. Returns `[n_dst, H, d]`.
        """
        backend, head_dim = self._runtime.backend, values.shape[2]
        of_edges, own = self._edge_biases(own)

        def attend(edges: EdgeSlot, query: Tensor | None, source: Tensor) -> Tensor:
            assert query is not None
            pattern, packed = edges.pattern, source[:, 0]  # [cols, h, d + 1]
            v, score = packed[..., :head_dim], packed[..., head_dim]
            logits = query[:, 0, :, 0].index_select(0, pattern.row_index) + score.index_select(0, pattern.indices)
            learned = of_edges(edges)
            bias = F.leaky_relu(logits if learned is None else logits + learned, slope)  # [E, h]
            if edges.edge_inclusion is not None:
                bias = bias - edges.edge_inclusion.log().to(bias.dtype)[:, None]
            return sparse_attention(
                v.new_zeros(pattern.num_rows, *v.shape[1:]), v, v, pattern, edge_bias=bias, backend=backend
            )

        packed = torch.cat([values, sources[..., None]], dim=2).unsqueeze(1)
        return self.edgewise(attend, own[:, None, :, None], packed, out_dim=head_dim)

    def _edge_biases(self, queries: Tensor) -> tuple[Callable[[EdgeSlot], Tensor | None], Tensor]:
        """A function from a slot to the bias `[E, h]` of its edges, or to None, and the queries.

        The bias is computed once for all slots, since ranks differ in how many they have and its weights must be used
        alike on all; the queries take the (empty) sum of nothing of it along, so that a rank without edges has a
        gradient for them, of zeros, and every backward runs in the same order.
        """
        if self.edge_bias is None:
            return lambda edges: None, queries
        self.has_biased = True
        slots = self._compiled.edges
        given = [edges.features for edges in slots if edges.features is not None]
        assert len(given) == len(slots), "a model with an edge bias runs on a graph with edge features"
        features = torch.cat(given) if given else queries.new_zeros(0, self.edge_bias.in_features)
        biases: Tensor = self.edge_bias(features.to(queries.dtype))  # [E of all slots, H]
        pieces = biases.split([edges.pattern.num_edges for edges in slots]) if slots else ()
        found = {
            id(edges): piece[:, edges.heads[0] : edges.heads[1]] for edges, piece in zip(slots, pieces, strict=True)
        }
        return lambda edges: found[id(edges)], queries + biases[:0].sum()

    def aggregate(self, x: Tensor, reduce: str = "mean", *, edge_type: int | None = None) -> Tensor:
        """Sum or mean of `x [n_src, C]` over the in-edges of each destination, `[n_dst, C]`.

        Sampled or cut neighbourhoods are scaled up, so that a sum estimates the full one; a mean needs that only where
        a row's edges are not equally likely. Columns are split over a head-parallel group like heads are.

        edge_type: take a mean over the edges of this type only, those that were drawn.
        """
        assert edge_type is None or reduce == "mean"
        columns, heads = x.shape[1], self.num_heads
        padded = F.pad(x, (0, -columns % heads))
        packed = padded.view(x.shape[0], 1, heads, padded.shape[1] // heads)

        def add_up(edges: EdgeSlot, query: Tensor | None, source: Tensor) -> Tensor:
            values, odds = source[:, 0], edges.edge_inclusion  # [cols, h, d]
            if edge_type is not None and edges.types is not None:
                chosen = (edges.types == edge_type).to(torch.float64)
                chosen = chosen if odds is None else chosen / odds
                total = torch.zeros_like(edges.degrees).index_add_(0, edges.pattern.row_index, chosen)
                scale = torch.where(total > 0, 1.0 / total, 0.0)
                return aggregate(values, edges.pattern, row_scale=scale.to(values.dtype), edge_weight=chosen)
            if reduce == "mean" and odds is None:
                return aggregate(values, edges.pattern, reduce="mean")
            weight = None if odds is None else odds.reciprocal()
            scale = torch.where(edges.inclusion > 0, 1.0 / edges.inclusion, 0.0)
            if reduce == "mean":
                scale = scale / edges.degrees.clamp(min=1.0)
            return aggregate(values, edges.pattern, row_scale=scale.to(values.dtype), edge_weight=weight)

        return self.edgewise(add_up, None, packed).flatten(1)[:, :columns]

    def in_degrees(self, before: bool) -> Tensor:
        """In-degrees in the whole graph of the rows before (`[n_src]`) or after (`[n_dst]`) the layer, float64."""
        degrees = self._compiled.degrees
        return degrees if before else self.destinations(degrees)

    # Global reductions ------------------------------------------------------------------------------------------------

    def splits(self, x: Tensor) -> tuple[int, ...]:
        """Rows of each micro-batch among the rows of `x` (`n_src` or `n_dst` of them)."""
        return self._compiled.dst_splits if x.shape[0] == self.num_dst else self._compiled.src_splits

    def counts(self, x: Tensor, *, before: bool | None = None) -> Tensor:
        """Rows of each micro-batch over all ranks, float64 `[Mw]`, for rows like those of `x`.

        before: whether `x` holds the rows before the layer. If not told, they are those after it where this rank owns
        as many before as after, which other ranks need not.
        """
        assert self._compiled.reduction is not None
        reduction = self._compiled.reduction
        if before is None:
            before = x.shape[0] != self.num_dst
        return reduction.src_totals if before else reduction.dst_totals

    def micro_batch_sum(self, x: Tensor) -> Tensor:
        """The sum `[Mw, ...]` over all rows of each micro-batch, right where this rank owns some of them.

        x: `[n_src or n_dst, ...]`. Partial sums are added in rank order: the same bits on every rank.
        """
        return self.add_up(torch.stack([part.sum(0) for part in x.split(self.splits(x))]))

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum over ranks of partial sums `[Mw, ...]`, where this rank owns rows of the micro-batch."""
        reduction = self._compiled.reduction
        assert reduction is not None
        flat = partial.reshape(partial.shape[0], 1, 1, -1)
        (arrived,) = self._finish(self._start(reduction.route, flat))
        total = torch.zeros_like(flat).index_add(0, reduction.rows, arrived)
        return total.view_as(partial)

    def spread(self, totals: Tensor, like: Tensor) -> Tensor:
        """Per-micro-batch values `[Mw, ...]` repeated for each row of `like`."""
        splits = self.splits(like)
        if len(splits) == 1:
            return totals.expand(splits[0], *totals.shape[1:])
        repeats = torch.tensor(splits, device=totals.device)
        return totals.repeat_interleave(repeats, dim=0, output_size=sum(splits))

    def report_statistics(self, norm: int, mean: Tensor, variance: Tensor) -> None:
        """Report batch-norm statistics `[Mw, C]` of this step for the running ones; not in recomputation."""
        assert self._compiled.reduction is not None
        if self.replaying or not self.training:
            return
        for i, mine in enumerate(self._compiled.reduction.reporters):
            if mine:
                key = (norm, self._micro_batches[i])
                self._runtime.statistics.found[key] = (mean[i].detach(), variance[i].detach())

    # Moving on --------------------------------------------------------------------------------------------------------

    def move(self, x: Tensor) -> Tensor:
        """Hand rows `[n_dst, C]` to the owners of the next layer, where the plan changes them."""
        if self._compiled.move is None:
            return x
        (rows,) = self._finish(self._start(self._compiled.move, x[:, None, None, :]))
        return rows.flatten(1)

    # Exchanges, and their replay in recomputation ---------------------------------------------------------------------

    @contextmanager
    def keep(self) -> Iterator[None]:
        """While a checkpointed layer runs for the first time: what is received is kept."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False

    @contextmanager
    def replay(self) -> Iterator[None]:
        """While a checkpointed layer is recomputed: no message is sent, what was received is taken again."""
        self.replaying, self._draws, self._replayed = True, 0, 0
        try:
            yield
        finally:
            self.replaying = False

    def _phase(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.replaying else self._runtime.channel.timer.phase(name)

    def _flight(self, route: Route, like: Tensor, width: tuple[int, int, int]) -> Flight:
        label = f"{route.kind} of {self._where}"
        flight = Flight(self._runtime.channel, route, label, like, width, keep=self._keeping)
        if self._keeping:
            self._kept.append(flight)
        return flight

    def _take(self) -> Flight:
        flight, self._replayed = self._kept[self._replayed], self._replayed + 1
        return flight

    def _start(self, route: Route, x: Tensor) -> Sources:
        if self.replaying:
            flight = self._take()
            with torch.no_grad():
                slots = flight.replay_gather(x, flight.kept)
            return Sources(flight, [s.detach().requires_grad_() for s in slots])
        flight = self._flight(route, x, (x.shape[1], x.shape[2], x.shape[3]))
        self.token = gather_start(self.token, x, flight)
        return Sources(flight)

    def _finish(self, sources: Sources) -> list[Tensor]:
        if sources.slots is None:
            self.token, sources.slots = gather_finish(self.token, sources.flight)
        return sources.slots

    def _scatter(self, slots: Sequence[Tensor], width: tuple[int, int, int], like: Tensor) -> Tensor:
        if self.replaying:
            flight = self._take()
            with torch.no_grad():
                rows = flight.replay_scatter(slots, flight.kept)
            return rows.detach().requires_grad_()
        flight = self._flight(self._compiled.o, like, width)
        self.token, rows = scatter(self.token, slots, flight)
        return rows


class WaveContext:
    """One wave on this rank: a context per layer, and how a layer is run."""

    def __init__(self, runtime: Runtime, compiled: CompiledWave):
        layers = [
            LayerContext(runtime, layer, compiled.micro_batches, i, compiled.index)
            for i, layer in enumerate(compiled.layers)
        ]
        self.layers: tuple[LayerContext, ...] = tuple(layers)
        self.input = LayerContext(runtime, compiled.layers[0], compiled.micro_batches, -1, compiled.index)
        self._layerwise = runtime.checkpointing == "layer"

    def run(
        self, layer: nn.Module, index: int, x: Tensor, token: Tensor, edge_bias: nn.Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run layer `index` on rows `x [n_src, C]`: the rows of the next layer's owners, and the token.

        edge_bias: from edge features `[E, Fe]` to what attention adds to its logits, `[E, H]`.
        Raises ValueError if there is one and the layer has no attention.
        """
        context = self.layers[index]
        context.edge_bias = edge_bias

        def forward(x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            context.token = token
            out = layer(x, context)
            return out, context.token

        if self._layerwise and torch.is_grad_enabled():
            x, context.token = checkpoint(
                forward,
                x,
                token,
                use_reentrant=False,
                preserve_rng_state=False,
                early_stop=False,
                context_fn=lambda: (context.keep(), context.replay()),
            )
        else:
            x, context.token = forward(x, token)
        if edge_bias is not None and not context.has_biased:
            raise ValueError(
                "model.edge_bias has no effect: the model's layer has no attention over edges; set it to false"
            )
        return context.move(x), context.token
