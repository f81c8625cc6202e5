"""A trained model layer by layer over chunks of rows, so that memory holds a layer's rows and the edges of one chunk.

For graphs whose layers, all rows and edges at once, do not fit. Every rank owns the rows of its partitions; a chunk is
compiled and run like a micro-batch of one layer, its halo passed among ranks. So a chunk also holds the rows of its
sources, and computes on them anew: few where chunks follow the partition, up to all of them in a graph without cuts.
Not here: the forward at once (`parallel/executor.py`), and what is done with the outcome (`predict.py`).

Legend: `N` nodes, `n` rows of this rank, `C` columns of a layer, `H` heads, `d` head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gtx.batches import Batch, MicroBatch
from gtx.models import GraphModel
from gtx.parallel.compiler import Compiler
from gtx.parallel.context import EdgeFunction, LayerContext, Runtime, Sources
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph
from scheduler.plan import Plan, deal

Ids = npt.NDArray[np.int64]
Predicted = tuple[Ids, npt.NDArray[np.float32], npt.NDArray[np.float32]]


class UnchunkableError(ValueError):
    """A layer sums, over all rows, what it has gathered over edges: it has to see the whole graph at once."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """Which rows each rank computes when. rows: of each rank, sorted ids in partition order. size: rows of a chunk."""

    rows: Sequence[Ids]
    size: int

    @classmethod
    def of(cls, graph: PartitionedGraph, plan: Plan, size: int) -> Chunks:
        """The chunks of a plan that puts every partition on one rank."""
        spans = [np.arange(graph.starts[p], graph.starts[p + 1], dtype=np.int64) for p in range(graph.num_parts)]
        owned: list[list[Ids]] = [[] for _ in range(plan.world_size)]
        for place, span in zip(plan.partitions, spans, strict=True):
            owned[place.ranks[0]].append(span)
        return cls([np.concatenate([np.empty(0, np.int64), *spans]) for spans in owned], size)

    def __len__(self) -> int:
        return -(-max(len(rows) for rows in self.rows) // self.size)

    def __iter__(self) -> Iterator[slice]:
        return (slice(c * self.size, (c + 1) * self.size) for c in range(len(self)))

    def nodes(self, chunk: slice) -> Ids:
        """All ranks' rows of a chunk, sorted."""
        return np.sort(np.concatenate([rows[chunk] for rows in self.rows]))


@torch.no_grad()
def predict_by_layer(
    model: GraphModel,
    graph: PartitionedGraph,
    world: World,
    runtime: Runtime,
    plan: Plan,
    evaluation: Batch,
    chunk_rows: int,
) -> Predicted | None:
    """What a model in evaluation says of all nodes: `(nodes [N], logits [N, classes], what the classifier was given)`.

    plan: graph parallel, of one layer. evaluation: the full-graph batch whose edges are attended. chunk_rows: rows that
    a rank computes at a time. The nodes are in partition order; only rank 0 gets them, the others None.

    Raises UnchunkableError with one line, on every rank, for a model that needs the whole graph at once.
    """
    model.eval()
    chunks = Chunks.of(graph, plan, chunk_rows)
    own = chunks.rows[world.rank]
    homes = np.array(deal(np.diff(graph.starts).tolist(), world.size))
    compiler = Compiler(graph, plan, world, runtime.num_heads, homes)
    dtype = next(model.parameters()).dtype
    at = np.full(graph.graph.num_nodes, -1, dtype=np.int64)  # where the row of an original id is among this rank's
    at[np.asarray(graph.original_id)[own]] = np.arange(len(own))
    rows = _filled(
        len(own),
        chunks,
        lambda chunk: model.encode(
            torch.from_numpy(graph.input_rows(own[chunk])).to(world.device, dtype),
            _RowsContext(runtime, graph, own[chunk], -1, []),
        ),
    )
    for index, layer in enumerate(model.layers):
        totals = _totals(layer, index, rows, chunks, graph, world, runtime)
        before, fanout = rows, evaluation.fanout[index]

        def run(
            chunk: slice,
            layer: nn.Module = layer,
            index: int = index,
            before: Tensor = before,
            fanout: int | None = fanout,
            totals: Sequence[Tensor] = totals,
        ) -> Tensor:
            nodes = chunks.nodes(chunk)
            batch = replace(
                evaluation,
                micro_batches=(MicroBatch(nodes, nodes, grows=True),),
                fanout=(fanout,),
                fixed=False,
            )
            (compiled,) = compiler.compile(batch).waves[0].layers
            context = _ChunkContext(runtime, compiled, range(1), index, 0)
            context.totals, context.num_nodes = totals, graph.graph.num_nodes
            context.token = torch.zeros((), dtype=dtype, device=world.device)
            context.edge_bias = cast(nn.Linear, model.edge_biases[index]) if model.edge_biases else None
            x = before[torch.from_numpy(at[compiled.sources.cpu().numpy()])].to(world.device)
            out: Tensor = layer(x, context)
            runtime.channel.drain()
            return out

        rows = _filled(len(own), chunks, run)
    return _gathered(model, rows, chunks, own, world)


def _filled(num_rows: int, chunks: Chunks, make: Callable[[slice], Tensor]) -> Tensor:
    """The rows `[n, C]` that `make(chunk)` gives, on the host."""
    made: Tensor | None = None
    for chunk in chunks:
        out = make(chunk)
        if made is None:
            made = torch.empty(num_rows, out.shape[1], dtype=out.dtype)
        made[chunk] = out.cpu()
    assert made is not None  # a graph has a node
    return made


def _gathered(model: GraphModel, rows: Tensor, chunks: Chunks, own: Ids, world: World) -> Predicted | None:
    """Classify all rows and bring them to rank 0, a chunk at a time."""
    num_nodes = sum(len(rows) for rows in chunks.rows)
    found: tuple[npt.NDArray[np.float32], ...] = ()
    for chunk in chunks:
        logits = model.classifier(rows[chunk].to(world.device)).float().cpu().numpy()
        for nodes, *arrays in world.gather_facts((own[chunk], logits, rows[chunk].float().numpy())):
            if world.rank != 0:
                continue
            found = found or tuple(np.empty((num_nodes, array.shape[1]), dtype=np.float32) for array in arrays)
            for whole, array in zip(found, arrays, strict=True):
                whole[nodes] = array
    return (np.arange(num_nodes), found[0], found[1]) if world.rank == 0 else None


# Sums over all rows ---------------------------------------------------------------------------------------------------


class _FoundSum(Exception):  # noqa: N818 (no error: it ends a forward whose rest is not needed)
    """A layer came to a sum over all rows that is not known yet. partial: of the rows it had."""

    def __init__(self, partial: Tensor):
        self.partial = partial


class _ChunkContext(LayerContext):
    """A layer on a chunk: sums over the micro-batch are those of all rows, found before."""

    totals: Sequence[Tensor] = ()
    num_nodes: int = 0
    _taken = 0

    def counts(self, x: Tensor, *, before: bool | None = None) -> Tensor:
        return torch.tensor([self.num_nodes], dtype=torch.float64, device=x.device)

    def add_up(self, partial: Tensor) -> Tensor:
        total = self.totals[self._taken]
        self._taken += 1
        return total.to(partial.device, partial.dtype)


class _RowsContext(LayerContext):
    """A layer on rows without their edges, as far as its first sum that is not known.

    What it gathers over edges is NaN, so that a sum which depends on it shows.
    """

    def __init__(self, runtime: Runtime, graph: PartitionedGraph, nodes: Ids, layer: int, totals: Sequence[Tensor]):
        self._runtime, self._layer, self._draws = runtime, layer, 0
        self._graph, self._nodes, self._totals, self._taken = graph, nodes, totals, 0
        self.replaying = False
        self.token = torch.empty(0)
        self.edge_bias = None  # of edges, which are not there

    @property
    def num_src(self) -> int:
        return len(self._nodes)

    @property
    def num_dst(self) -> int:
        return len(self._nodes)

    @property
    def nodes_after(self) -> Tensor:
        return torch.from_numpy(np.asarray(self._graph.original_id)[self._nodes])

    def destinations(self, x: Tensor) -> Tensor:
        return x

    def in_degrees(self, before: bool) -> Tensor:
        indptr = np.asarray(self._graph.graph.indptr)
        return torch.from_numpy((indptr[self._nodes + 1] - indptr[self._nodes]).astype(np.float64))

    def start_sources(self, x: Tensor) -> Sources:
        return x  # type: ignore[return-value]  # nothing travels

    def edgewise(
        self, fn: EdgeFunction, queries: Tensor | None, sources: Sources | Tensor, *, out_dim: int | None = None
    ) -> Tensor:
        assert isinstance(sources, Tensor)
        shape = (len(self._nodes), self.num_heads, sources.shape[3] if out_dim is None else out_dim)
        return sources.new_full(shape, torch.nan)

    def splits(self, x: Tensor) -> tuple[int, ...]:
        return (x.shape[0],)

    def counts(self, x: Tensor, *, before: bool | None = None) -> Tensor:
        return torch.tensor([self._graph.graph.num_nodes], dtype=torch.float64, device=x.device)

    def add_up(self, partial: Tensor) -> Tensor:
        if self._taken == len(self._totals):
            raise _FoundSum(partial)
        self._taken += 1
        return self._totals[self._taken - 1].to(partial.device, partial.dtype)


def _totals(
    layer: nn.Module,
    index: int,
    rows: Tensor,
    chunks: Chunks,
    graph: PartitionedGraph,
    world: World,
    runtime: Runtime,
) -> list[Tensor]:
    """The sums over all rows that a layer asks for, in the order in which it does: linear attention has one.

    One pass over the rows for each of them, without edges. Raises UnchunkableError where edges would be needed.
    """
    own = chunks.rows[world.rank]
    totals: list[Tensor] = []
    while True:
        total: Tensor | None = None
        for chunk in chunks:
            context = _RowsContext(runtime, graph, own[chunk], index, totals)
            try:
                layer(rows[chunk].to(world.device), context)
            except _FoundSum as found:
                partial = found.partial.double().cpu()
                total = partial if total is None else total + partial
                continue
            return totals  # it needs no further sum: so it is on every rank
        assert total is not None
        total = world.sum_facts(total)
        if torch.isnan(total).any() and not bool(world.sum_facts(rows.isnan().any().double().reshape(1))):
            raise UnchunkableError(
                f"layer {index} ({type(layer).__name__}) sums over all rows what it has gathered over edges, which "
                "cannot be known chunk by chunk; give --chunk-rows 0, the whole graph at once"
            )
        totals.append(total)
