"""Compiles a plan and the micro-batches of a step into what this rank does: rows, patterns and routes per layer.

Each rank draws the edges of the rows it attends to, finds which source rows it does not own, and tells their owners in
one small id exchange per layer. Layers are compiled last to first, since sampled micro-batches grow backwards. Not
here: running what was compiled (`executor.py`, `context.py`) and the plan's meaning (`scheduler/plan.py`).

Legend: `K` partitions, `P` ranks, `W` waves, `S` head ranges of the plan, `L` layers. A *key* is `m * N + node` for
micro-batch `m` of a wave, so that a wave is one disjoint graph; key arrays are sorted unless said otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from gtx.batches import Batch
from gtx.parallel.compiled import CompiledBatch, CompiledLayer, CompiledWave, EdgeSlot, Ids, Reduction
from gtx.parallel.exchange import Block, Route, Slot
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph
from scheduler.plan import HeadRange, Plan, head_ranges, head_slices, moves_between, owner_table, split_evenly
from sparse_engine import (
    PURPOSE_SAMPLING,
    PURPOSE_SHARED,
    WEIGHTED_METHODS,
    Method,
    SparsePattern,
    keys,
    sample_neighbors,
)

_SCRATCH_LIMIT = 1 << 27  # keys; beyond it positions are found by search instead of by table


@dataclass
class _WaveState:
    """Keys of one wave while its layers are compiled, last to first."""

    numbers: range
    dst: Ids  # rows that this rank owns after the layer
    move_after: Route | None = None


class Compiler:
    """Compiles batches for one plan on one rank. Every rank must compile the same batches in the same order."""

    def __init__(self, graph: PartitionedGraph, plan: Plan, world: World, num_heads: int, homes: npt.NDArray[np.int64]):
        """homes: the rank `[K]` that stores the features of each partition."""
        if plan.world_size != world.size:
            raise ValueError(f"the plan is for {plan.world_size} ranks, {world.size} were launched; launch as many")
        if plan.num_partitions != graph.num_parts:
            raise ValueError(
                f"the plan places {plan.num_partitions} partitions, the graph has {graph.num_parts}; "
                "set partition.parts or edit the plan"
            )
        self.graph, self.plan, self.world, self.homes = graph, plan, world, homes
        self.num_heads = num_heads
        self.ranges: list[HeadRange] = head_ranges(plan, num_heads)
        self.whole = self.ranges.index((0, num_heads)) if (0, num_heads) in self.ranges else -1
        self.num_nodes = graph.graph.num_nodes
        self.indptr = torch.from_numpy(np.asarray(graph.graph.indptr))
        self.indices = torch.from_numpy(np.asarray(graph.graph.indices))
        features, types = graph.graph.edge_features, graph.graph.edge_types
        self.edge_features = None if features is None else torch.from_numpy(np.asarray(features))
        self.edge_types = None if types is None else torch.from_numpy(np.asarray(types)).long()
        # Edges that bring something along are drawn by their place, others by their source: the same draws.
        self._edge_places: torch.Tensor | None = None
        if features is not None or types is not None:
            self._edge_places = torch.arange(len(self.indices), dtype=self.indices.dtype)
        self.part_of = np.asarray(graph.part_of)
        self.original_id = np.asarray(graph.original_id)
        self.degrees = np.diff(np.asarray(graph.graph.indptr))
        self.has_model = any(place.mode == "model" for place in plan.partitions)
        self._tables: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._positions = np.empty(0, dtype=np.int32)
        self._columns = np.empty(0, dtype=np.int32)
        self._shared: tuple[tuple[int, int, int] | None, torch.Tensor] = (None, torch.empty(0))

    # Ownership --------------------------------------------------------------------------------------------------------

    @cached_property
    def _split_owner(self) -> npt.NDArray[np.int64]:
        """The owner `[N]` of each row of a model-parallel partition (its rows are split evenly); -1 elsewhere."""
        owner = np.full(self.num_nodes, -1, dtype=np.int64)
        for p, place in enumerate(self.plan.partitions):
            if place.mode == "model":
                start, end = int(self.graph.starts[p]), int(self.graph.starts[p + 1])
                bounds = split_evenly(end - start, len(place.ranks))
                for i, rank in enumerate(place.ranks):
                    owner[start + bounds[i] : start + bounds[i + 1]] = rank
        return owner

    def _table(self, micro_batch: int, layer: int) -> npt.NDArray[np.int64]:
        key = (micro_batch, layer)
        if key not in self._tables:
            self._tables[key] = owner_table(self.plan, micro_batch, layer)
        return self._tables[key]

    def _owner(self, state: _WaveState, rows: Ids, layer: int) -> npt.NDArray[np.int64]:
        """The owner of each key at a layer."""
        nodes, local = self._split(state, rows)
        table = np.stack([self._table(m, layer) for m in state.numbers])
        owner: npt.NDArray[np.int64] = (
            table[0][self.part_of[nodes]] if local is None else table[local, self.part_of[nodes]]
        )
        if self.has_model:
            owner = np.where(owner < 0, self._split_owner[nodes], owner)
        return owner

    def _split(self, state: _WaveState, rows: Ids) -> tuple[Ids, Ids | None]:
        """Keys as (node, micro-batch of the wave); None where the wave holds one micro-batch."""
        if len(state.numbers) == 1:
            return rows, None
        return rows % self.num_nodes, rows // self.num_nodes

    def _splits(self, state: _WaveState, rows: Ids) -> npt.NDArray[np.int64]:
        """Rows per micro-batch of the wave, given sorted keys."""
        bounds = np.arange(len(state.numbers) + 1, dtype=np.int64) * self.num_nodes
        return np.diff(np.searchsorted(rows, bounds))

    # Compiling --------------------------------------------------------------------------------------------------------

    def compile(self, batch: Batch) -> CompiledBatch:
        """Compile one batch; a collective over all ranks."""
        with self.world.meeting(f"the id exchange of step {batch.step}"):
            return self._compile(batch)

    def _compile(self, batch: Batch) -> CompiledBatch:
        begin = time.perf_counter()
        self._sampling_s = 0.0
        num_layers = self.plan.num_layers
        states = []
        for numbers in self.plan.waves(len(batch.micro_batches)):
            nodes = [batch.micro_batches[m].nodes + i * self.num_nodes for i, m in enumerate(numbers)]
            state = _WaveState(numbers, np.concatenate(nodes))
            state.dst = state.dst[self._owner(state, state.dst, num_layers - 1) == self.world.rank]
            states.append(state)
        targets = [self._targets(batch, state) for state in states]

        layers: list[list[CompiledLayer]] = [[] for _ in states]
        edges = edges_whole = 0.0
        for layer in reversed(range(num_layers)):
            if not self._repeats(batch, layer):
                drafts, counted, whole = self._layer(batch, states, layer)
            edges += counted
            edges_whole += whole
            for compiled, draft in zip(layers, drafts, strict=True):
                compiled.insert(0, draft)
        stored, fetches = self._fetch(states)
        rows = sum(layer.num_src for wave in layers for layer in wave)
        layers = self._with_reductions(states, layers)
        waves = tuple(
            CompiledWave(i, state.numbers, tuple(wave), home, fetch, *target).to(self.world.device)
            for i, (state, wave, home, fetch, target) in enumerate(
                zip(states, layers, stored, fetches, targets, strict=True)
            )
        )
        total_s = time.perf_counter() - begin
        return CompiledBatch(
            batch.step,
            waves,
            len(batch.micro_batches),
            batch.num_targets,
            rows,
            edges / self.num_heads,
            edges_whole / self.num_heads,
            self._sampling_s,
            total_s - self._sampling_s,
        )

    def _repeats(self, batch: Batch, layer: int) -> bool:
        """Whether a layer has the rows, edges and owners of the one after it, so that nothing is found anew."""
        return (
            layer + 1 < self.plan.num_layers
            and batch.fanout[layer] == batch.fanout[layer + 1]
            and (batch.fanout[layer] is None or batch.method == "random_walk")
            and not any(micro_batch.grows for micro_batch in batch.micro_batches)
            and not any(place.mode == "pipeline" for place in self.plan.partitions)
        )

    def _targets(self, batch: Batch, state: _WaveState) -> tuple[torch.Tensor, Ids]:
        wanted = np.concatenate(
            [batch.micro_batches[m].targets + i * self.num_nodes for i, m in enumerate(state.numbers)]
        )
        positions = np.flatnonzero(np.isin(state.dst, wanted, assume_unique=True))
        return torch.from_numpy(positions), state.dst[positions] % self.num_nodes

    def _layer(
        self, batch: Batch, states: Sequence[_WaveState], layer: int
    ) -> tuple[list[CompiledLayer], float, float]:
        size = self.world.size
        num_slots = len(self.ranges)

        # 1. Which rows each rank attends to: its own, except that groups share theirs by heads.
        offers, positions = [], []
        for state in states:
            offer, position = self._attend(state, layer)
            offers.append(offer)
            positions.append(position)
        attended = self._exchange_ids(offers, num_slots) if self.has_model else offers

        # 2. Draw their edges, and 3. ask the owners for the source rows.
        begin = time.perf_counter()
        drawn = [
            [self._draw(batch, state, attended[w][s], layer) for s in range(num_slots)]
            for w, state in enumerate(states)
        ]
        self._sampling_s += time.perf_counter() - begin
        needs = [[self._needs(state, drawn[w][s], layer) for s in range(num_slots)] for w, state in enumerate(states)]
        asked = self._exchange_ids(needs, num_slots)

        # 4. The rows of this layer's input boundary, and the routes among them.
        compiled: list[CompiledLayer] = []
        counted = whole = 0.0
        inputs = []
        for w, state in enumerate(states):
            rows = self._input_rows(batch, state, asked[w])
            nodes = rows % self.num_nodes
            inputs.append(rows)
            table = self._table_of(rows, len(state.numbers))
            dst = None if len(rows) == len(state.dst) else table(state.dst)
            q = self._route("q", len(state.dst), positions[w], attended[w])
            kv, edge_slots = self._edges(state, rows, table, needs[w], asked[w], drawn[w])
            for slot, edge in zip(drawn[w], self.ranges, strict=True):
                counted += slot.num_edges * (edge[1] - edge[0])
                whole += slot.num_edges_whole * (edge[1] - edge[0])
            compiled.append(
                CompiledLayer(
                    torch.from_numpy(self.original_id[nodes]),
                    torch.from_numpy(self.degrees[nodes].astype(np.float64)),
                    None if dst is None else torch.from_numpy(dst),
                    q,
                    kv,
                    replace(q, kind="o"),
                    state.move_after,
                    edge_slots,
                    tuple(self._splits(state, rows).tolist()),
                    tuple(self._splits(state, state.dst).tolist()),
                )
            )

        # 5. The boundary before: who made these rows?
        if layer > 0 and moves_between(self.plan, layer):
            asks: list[list[list[Ids]]] = []
            for state, rows in zip(states, inputs, strict=True):
                maker = self._owner(state, rows, layer - 1)
                asks.append([[rows[maker == peer] for peer in range(size)]])
            made = self._exchange_ids(asks, 1)
            for w, (state, rows) in enumerate(zip(states, inputs, strict=True)):
                state.dst = np.sort(np.concatenate(made[w][0]))
                table = self._table_of(state.dst, len(state.numbers))
                sends = [[table(keys_) for keys_ in made[w][0]]]
                state.move_after = self._route("move", len(state.dst), sends, asks[w], order_like=rows)
        else:
            for state, rows in zip(states, inputs, strict=True):
                state.dst, state.move_after = rows, None
        return compiled, counted, whole

    def _attend(self, state: _WaveState, layer: int) -> tuple[list[list[Ids]], list[list[Ids | None]]]:
        """For each head range and peer: the rows it attends to for this rank, as keys and as positions."""
        size = self.world.size
        if not self.has_model:
            offer = [[np.empty(0, np.int64) for _ in range(size)]]
            offer[0][self.world.rank] = state.dst
            position: list[list[Ids | None]] = [[None] * size]
            return offer, position
        nothing = np.empty(0, dtype=np.int64)
        found: list[list[list[Ids]]] = [[[] for _ in range(size)] for _ in self.ranges]
        places = self.plan.partitions
        kinds = [None, *sorted({place.ranks for place in places if place.mode == "model"})]
        kind_of = np.array([kinds.index(place.ranks) if place.mode == "model" else 0 for place in places])
        kind = kind_of[self.part_of[state.dst % self.num_nodes]]
        for k, ranks in enumerate(kinds):
            rows = np.flatnonzero(kind == k)
            if not len(rows):
                continue
            if ranks is None:
                found[self.whole][self.world.rank].append(rows)
                continue
            for peer, heads in zip(ranks, head_slices(self.num_heads, len(ranks)), strict=True):
                if heads[1] > heads[0]:
                    found[self.ranges.index(heads)][peer].append(rows)
        rows_of = [[np.sort(np.concatenate(r)) if r else nothing for r in slot] for slot in found]
        offer = [[state.dst[r] for r in slot] for slot in rows_of]
        return offer, [list(slot) for slot in rows_of]

    def _draw(self, batch: Batch, state: _WaveState, arrived: Sequence[Ids], layer: int) -> _Drawn:
        """In-edges of the attended rows, own block first, then in rank order."""
        rows = np.concatenate([arrived[peer] for peer in self._arrival_order()])
        nodes, local = self._split(state, rows)
        indptr, at = self.indptr, torch.from_numpy(nodes)
        indices = self.indices if self._edge_places is None else self._edge_places
        original = torch.from_numpy(self.original_id[nodes])
        # The whole graph in order needs no copy; a head-parallel group's rows arrive in blocks, out of order.
        everything = local is None and len(nodes) == self.num_nodes and (not self.has_model or self.world.size == 1)
        fanout = batch.fanout[layer]
        if batch.method == "random_walk" and fanout is not None:
            return self._listed(batch, state, nodes, local, fanout)
        draws = keys(batch.seed, PURPOSE_SAMPLING, batch.step, layer, original) if fanout is not None else None
        parts = [batch.micro_batches[m].parts for m in state.numbers]
        rows_at: torch.Tensor | None = None if everything else at
        method: Method = "uniform" if fanout is None or batch.method == "random_walk" else batch.method
        weighted = method in WEIGHTED_METHODS
        if parts[0] is not None or weighted:  # both need the whole list of each row
            neighbours = sample_neighbors(indptr, indices, rows_at, None, None)
            indptr, indices, rows_at = neighbours.indptr, neighbours.indices, None
        if parts[0] is not None:
            kept = self._within(parts, local, np.diff(indptr.numpy()), self._sources(indices).numpy())
            kept_before = np.concatenate([[0], np.cumsum(kept)])
            indptr = torch.from_numpy(kept_before[indptr.numpy()])
            indices = indices[torch.from_numpy(kept)]
        sample = sample_neighbors(
            indptr,
            indices,
            rows_at,
            fanout,
            draws,
            method=method,
            weights=self._importance.index_select(0, self._sources(indices)) if weighted else None,
            source_keys=self._source_keys(batch, layer) if method == "shared" else None,
        )
        sources: Ids = self._sources(sample.indices).numpy()

        if local is not None:
            sources = sources + np.repeat(local, np.diff(sample.indptr.numpy())) * self.num_nodes
        degrees = torch.from_numpy(self.degrees[nodes].astype(np.float64))
        exact = batch.correct and method == "uniform"  # each edge of a row is as likely, and the number drawn is fixed
        counts = sample.indptr.diff() if exact else degrees if rows_at is not None else indptr.diff()
        inclusion = torch.where(degrees > 0, counts / degrees.clamp(min=1.0), 1.0)
        edge_inclusion = sample.edge_inclusion if batch.correct else None
        if batch.correct and method == "shared":
            inclusion = inclusion * sample.inclusion
        features = None if self.edge_features is None else self.edge_features.index_select(0, sample.indices)
        types = None if self.edge_types is None else self.edge_types.index_select(0, sample.indices)
        whole = float(degrees.sum())
        return _Drawn(sample.indptr, sources, degrees, inclusion, edge_inclusion, whole, features, types)

    def _sources(self, indices: torch.Tensor) -> torch.Tensor:
        """The sources of edges that are given by their places, or by their sources already."""
        return indices if self._edge_places is None else self.indices.index_select(0, indices)

    def _within(
        self, parts: Sequence[Ids | None], local: Ids | None, counts: Ids, sources: npt.NDArray[Any]
    ) -> npt.NDArray[np.bool_]:
        """Which edges have their source in the partitions of their row's micro-batch; counts: edges of each row."""
        active = np.zeros((len(parts), self.plan.num_partitions), dtype=bool)
        for i, chosen in enumerate(parts):
            active[i, chosen] = True
        owner = 0 if local is None else np.repeat(local, counts)
        kept: npt.NDArray[np.bool_] = active[owner, self.part_of[sources]]
        return kept

    def _listed(self, batch: Batch, state: _WaveState, nodes: Ids, local: Ids | None, fanout: int) -> _Drawn:
        """The first `fanout` entries of each row's list; where corrected, each counts as often as it was visited."""
        lists = self.graph.lists
        assert lists is not None
        starts, lengths = lists.indptr[nodes], lists.indptr[nodes + 1] - lists.indptr[nodes]
        parts = [batch.micro_batches[m].parts for m in state.numbers]
        counts = lengths if parts[0] is not None else np.minimum(lengths, fanout)
        entries = _places(starts, counts)
        if parts[0] is not None:
            kept = self._within(parts, local, counts, lists.indices[entries])
            order: Ids = np.cumsum(kept) - kept  # among all that are kept
            before = np.concatenate([[0], np.cumsum(kept)])[np.cumsum(counts) - counts]
            kept &= order - np.repeat(before, counts) < fanout
            row = np.repeat(np.arange(len(nodes)), counts)
            entries, counts = entries[kept], np.bincount(row[kept], minlength=len(nodes))
        sources: Ids = lists.indices[entries].astype(np.int64)
        if local is not None:
            sources += np.repeat(local, counts) * self.num_nodes
        indptr = np.concatenate([[0], np.cumsum(counts)])
        degrees = self.degrees[nodes].astype(np.float64)
        inclusion, odds = np.ones(len(nodes)), None
        if batch.correct:
            inclusion = np.where(degrees > 0, counts / np.maximum(degrees, 1.0), 1.0)
            visits = lists.visits[entries].astype(np.float64)
            total = np.diff(np.concatenate([[0.0], np.cumsum(visits)])[indptr])
            odds = torch.from_numpy(np.repeat(total / np.maximum(counts, 1), counts) / visits)
        whole = float(np.minimum(lengths, fanout).sum())
        rows = (torch.from_numpy(degrees), torch.from_numpy(inclusion))
        return _Drawn(torch.from_numpy(indptr), sources, *rows, odds, whole)

    @cached_property
    def _importance(self) -> torch.Tensor:
        """What edges are weighed by: one more than the in-degree of their source, float32 `[N]`."""
        return torch.from_numpy((self.degrees + 1).astype(np.float32))

    def _source_keys(self, batch: Batch, layer: int) -> torch.Tensor:
        """What all rows of a layer draw a source by, int64 `[N]`, or `[E]` where edges are given by their places."""
        asked = (batch.seed, batch.step, layer)
        if self._shared[0] != asked:
            original = torch.from_numpy(self.original_id)
            self._shared = (asked, keys(batch.seed, PURPOSE_SHARED, batch.step, layer, original))
            if self._edge_places is not None:
                self._shared = (asked, self._shared[1].index_select(0, self.indices))
        return self._shared[1]

    def _arrival_order(self) -> list[int]:
        return [self.world.rank, *(peer for peer in range(self.world.size) if peer != self.world.rank)]

    def _needs(self, state: _WaveState, drawn: _Drawn, layer: int) -> list[Ids]:
        """The distinct sources of the drawn edges by owner `[P]`, each sorted."""
        universe = len(state.numbers) * self.num_nodes
        if universe <= 4 * len(drawn.sources) + 1024:
            mark = np.zeros(universe, dtype=bool)
            mark[drawn.sources] = True
            needed = np.flatnonzero(mark)
        else:
            needed = np.unique(drawn.sources).astype(np.int64)
        if self.world.size == 1:
            return [needed]
        owner = self._owner(state, needed, layer)
        return [needed[owner == peer] for peer in range(self.world.size)]

    def _input_rows(self, batch: Batch, state: _WaveState, asked: Sequence[Sequence[Ids]]) -> Ids:
        """Rows this rank owns before the layer: those after it and, in growing micro-batches, the asked ones."""
        if not batch.micro_batches[state.numbers[0]].grows:
            return state.dst
        return np.unique(np.concatenate([state.dst, *(rows for slot in asked for rows in slot)]))

    def _edges(
        self,
        state: _WaveState,
        rows: Ids,
        table: Callable[[Ids], Ids],
        needs: Sequence[Sequence[Ids]],
        asked: Sequence[Sequence[Ids]],
        drawn: Sequence[_Drawn],
    ) -> tuple[Route, tuple[EdgeSlot, ...]]:
        """The `kv` route and, per head range with edges, the pattern over what arrives by it."""
        rank = self.world.rank
        sends: list[list[Ids | None]] = []
        arrive: list[list[Ids]] = []
        for own, wanted in zip(needs, asked, strict=True):
            own_rows = own[rank]
            # Own rows are passed whole when most are needed: no copy on one rank, one instead of two on several.
            take_all = 2 * len(own_rows) >= len(rows) and len(own_rows) > 0
            send = [table(keys_) if len(keys_) else keys_ for keys_ in wanted]
            sends.append([None if take_all and peer == rank else s for peer, s in enumerate(send)])
            arrive.append([rows if take_all and peer == rank else keys_ for peer, keys_ in enumerate(own)])
        kv = self._route("kv", len(rows), sends, arrive, present=[found.num_rows > 0 for found in drawn])
        slots = []
        for heads, slot, found in zip(self.ranges, arrive, drawn, strict=True):
            if found.num_rows == 0:
                continue
            arrived = np.concatenate([slot[peer] for peer in self._arrival_order()])
            columns = self._columns_of(arrived, len(state.numbers))
            pattern = SparsePattern(found.indptr, torch.from_numpy(columns(found.sources)), len(arrived))
            facts = (found.degrees, found.inclusion, found.edge_inclusion, found.features, found.types)
            slots.append(EdgeSlot(heads, pattern, *facts))
        return kv, tuple(slots)

    def _route(
        self,
        kind: str,
        num_rows: int,
        sends: Sequence[Sequence[Ids | None]],
        arrive: Sequence[Sequence[Ids]],
        order_like: Ids | None = None,
        present: Sequence[bool] | None = None,
    ) -> Route:
        """A route from positions to send and keys that arrive, both `[slots][P]`; slots where nothing arrives vanish.

        order_like: the sorted keys in whose order the single slot is wanted.
        present: which slots to keep even where nothing arrives (destinations without any edge).
        """
        rank = self.world.rank
        whole_rows = kind in ("move", "fetch")
        ranges: Sequence[HeadRange | None] = [None] if whole_rows else self.ranges
        blocks = []
        for peer in range(self.world.size):
            for heads, slot in zip(ranges, sends, strict=True):
                rows = slot[peer]
                if rows is None and (peer == rank or self.world.size == 1):
                    if num_rows:
                        blocks.append(Block(peer, num_rows, None, heads))
                elif rows is not None and len(rows):
                    every = len(rows) == num_rows and peer == rank
                    blocks.append(Block(peer, len(rows), None if every else torch.from_numpy(rows), heads))
        slots = []
        for i, (heads, arriving) in enumerate(zip(ranges, arrive, strict=True)):
            counts = tuple((peer, len(arriving[peer])) for peer in self._arrival_order() if len(arriving[peer]))
            order = None
            if order_like is not None:
                arrived = np.concatenate([arriving[peer] for peer in self._arrival_order()])
                if not np.array_equal(arrived, order_like):
                    order = torch.from_numpy(np.argsort(arrived, kind="stable"))
            if counts or whole_rows or (present is not None and present[i]):
                slots.append(Slot(heads, counts, order))
        return Route(kind, rank, num_rows, tuple(blocks), tuple(slots))

    def _fetch(self, states: Sequence[_WaveState]) -> tuple[list[Ids], list[Route]]:
        """Input rows from where their features are stored to their first owner."""
        size = self.world.size
        asks = []
        for state in states:
            home = self.homes[self.part_of[state.dst % self.num_nodes]]
            asks.append([[state.dst[home == peer] for peer in range(size)]])
        wanted = self._exchange_ids(asks, 1)
        stored, routes = [], []
        for w, state in enumerate(states):
            lists = wanted[w][0]
            stored.append(np.concatenate(lists) % self.num_nodes)
            bounds = np.concatenate([[0], np.cumsum([len(x) for x in lists])])
            sends: list[Ids | None] = [np.arange(bounds[i], bounds[i + 1]) for i in range(size)]
            route = self._route("fetch", int(bounds[-1]), [sends], asks[w], order_like=state.dst)
            routes.append(route)
        return stored, routes

    def _with_reductions(
        self, states: Sequence[_WaveState], layers: list[list[CompiledLayer]]
    ) -> list[list[CompiledLayer]]:
        """Fill in the reductions: who owns rows of each micro-batch at each layer, and how many."""
        counts = [splits for wave in layers for layer in wave for splits in (layer.src_splits, layer.dst_splits)]
        flat = np.concatenate([np.asarray(c, dtype=np.int64) for c in counts])
        everyone = self._gather_counts(flat)  # [P, all splits]
        result = []
        start = 0
        for state, wave in zip(states, layers, strict=True):
            count = len(state.numbers)
            done = []
            for layer in wave:
                src = everyone[:, start : start + count]
                dst = everyone[:, start + count : start + 2 * count]
                start += 2 * count
                done.append(self._with_reduction(layer, src, dst))
            result.append(done)
        return result

    def _with_reduction(self, layer: CompiledLayer, src: Ids, dst: Ids) -> CompiledLayer:
        rank, size = self.world.rank, self.world.size
        owns = src > 0  # [P, Mw]
        mine = np.flatnonzero(owns[rank])
        sends, counts, arrived = [], [], []
        for peer in self._arrival_order():
            shared = mine[owns[peer][mine]]
            if len(shared):
                counts.append((peer, len(shared)))
                arrived.append((peer, shared))
        for peer in range(size):
            shared = mine[owns[peer][mine]]
            if len(shared):
                every = len(shared) == owns.shape[1]
                sends.append(Block(peer, len(shared), None if every else torch.from_numpy(shared), None))
        # Partial sums are added in rank order, so every owner gets the same bits.
        peers = np.concatenate([np.full(len(s), p) for p, s in arrived]) if arrived else np.empty(0, np.int64)
        order = np.argsort(peers, kind="stable")
        rows = np.concatenate([s for _, s in arrived])[order] if arrived else np.empty(0, np.int64)
        in_order = np.array_equal(order, np.arange(len(order)))
        slot = Slot(None, tuple(counts), None if in_order else torch.from_numpy(order))
        first_owner = np.argmax(owns, axis=0)
        reduction = Reduction(
            Route("reduce", rank, owns.shape[1], tuple(sends), (slot,)),
            torch.from_numpy(rows),
            torch.from_numpy(src.sum(0).astype(np.float64)),
            torch.from_numpy(dst.sum(0).astype(np.float64)),
            tuple(bool(owns[rank, m] and first_owner[m] == rank) for m in range(owns.shape[1])),
        )
        return replace(layer, reduction=reduction)

    # Tables and ids ---------------------------------------------------------------------------------------------------

    def _table_of(self, rows: Ids, num_micro_batches: int) -> Callable[[Ids], Ids]:
        """A function from keys to their positions in `rows`; every key asked for must be there."""
        universe = num_micro_batches * self.num_nodes
        if universe > _SCRATCH_LIMIT:
            return lambda wanted: np.searchsorted(rows, wanted)
        if len(self._positions) < universe:
            self._positions = np.empty(universe, dtype=np.int32)
        table = self._positions
        table[rows] = np.arange(len(rows), dtype=np.int32)
        return lambda wanted: table[wanted].astype(np.int64)

    def _columns_of(self, arrived: Ids, num_micro_batches: int) -> Callable[[Ids], npt.NDArray[np.int32]]:
        """A function from source keys to columns of what arrived (in any order), int32."""
        universe = num_micro_batches * self.num_nodes
        if universe > _SCRATCH_LIMIT:
            order = np.argsort(arrived, kind="stable")
            ordered = arrived[order]
            return lambda wanted: order[np.searchsorted(ordered, wanted)].astype(np.int32)
        if len(self._columns) < universe:
            self._columns = np.empty(universe, dtype=np.int32)
        table = self._columns
        table[arrived] = np.arange(len(arrived), dtype=np.int32)
        return lambda wanted: table[wanted]

    def _exchange_ids(self, lists: Sequence[Sequence[Sequence[Ids]]], num_slots: int) -> list[list[list[Ids]]]:
        """Send `lists[wave][slot][peer]` to the peers; returns what they sent here, in the same layout."""
        size = self.world.size
        if size == 1:
            return [[[slot[0]] for slot in wave] for wave in lists]
        num_waves = len(lists)
        counts = np.array([[[len(slot[p]) for slot in wave] for wave in lists] for p in range(size)], dtype=np.int64)
        sent = torch.from_numpy(counts.reshape(size, -1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.world.ids_group)
        payload = [lists[w][s][p] for p in range(size) for w in range(num_waves) for s in range(num_slots)]
        outgoing = torch.from_numpy(np.concatenate(payload)) if payload else torch.empty(0, dtype=torch.int64)
        out_sizes, in_sizes = sent.sum(1).tolist(), received.sum(1).tolist()
        incoming = torch.empty(sum(in_sizes), dtype=torch.int64)
        dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, group=self.world.ids_group)
        pieces = np.split(incoming.numpy(), np.cumsum(received.numpy().reshape(-1))[:-1])
        return [
            [[pieces[(p * num_waves + w) * num_slots + s] for p in range(size)] for s in range(num_slots)]
            for w in range(num_waves)
        ]

    def _gather_counts(self, counts: Ids) -> Ids:
        """Every rank's counts, `[P, n]`."""
        if self.world.size == 1:
            return counts[None]
        parts = [torch.empty(len(counts), dtype=torch.int64) for _ in range(self.world.size)]
        dist.all_gather(parts, torch.from_numpy(counts), group=self.world.ids_group)
        return torch.stack(parts).numpy()


def _places(starts: Ids, counts: Ids) -> Ids:
    """`starts[i], starts[i] + 1, ...`, `counts[i]` of them for each `i`."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Edges of one head range: CSR over attended rows with sources as keys."""

    indptr: torch.Tensor
    sources: Ids
    degrees: torch.Tensor
    inclusion: torch.Tensor
    edge_inclusion: torch.Tensor | None
    num_edges_whole: float
    features: torch.Tensor | None = None
    types: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return int(self.indptr.numel()) - 1

    @property
    def num_edges(self) -> int:
        return len(self.sources)
