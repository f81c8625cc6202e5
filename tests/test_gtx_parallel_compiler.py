"""What the compiler finds, put together again from all ranks and compared with brute force.

The routes of all ranks are followed by hand here, with node ids as rows: who attends to which edges with which heads?
Not here: that running it equals one rank (`test_gtx_parallel_equal.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import awkward_graph, even_homes, partitioned, plan_of, rig
from ranks import run_ranks

from gtx.batches import Batch
from gtx.parallel.compiled import CompiledBatch
from gtx.parallel.compiler import Compiler
from gtx.parallel.exchange import Route
from gtx.parallel.prefetch import Prefetcher
from gtx.parallel.world import World, solo
from gtx.partition import PartitionedGraph
from scheduler.plan import Placement, Plan
from sparse_engine import sample_neighbors
from sparse_engine.keyed import PURPOSE_SAMPLING, keys

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("graph", "model", "pipeline", "data", "mixed")
L, HEADS = 3, 3
STEP = 2
FANOUT = (4, 2, 3)  # of each layer
Edges = Counter[tuple[int, int, int]]  # (micro-batch, original destination, original source): how often
Rows = set[tuple[int, int]]  # (micro-batch, original node)

KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "cluster": {"kind": "cluster", "parts": 2, "micro_batches": 3},
    "neighbor": {"kind": "neighbor", "seeds": 5, "micro_batches": 4},
}


@cache
def awkward() -> PartitionedGraph:
    return partitioned(awkward_graph())


def settings_of(kind: str, fanout: Any = FANOUT) -> dict[str, Any]:
    model = {"name": "GT", "width": 2 * HEADS, "heads": HEADS, "layers": L}
    return {"model": model, "sampling": {"fanout": fanout}, "batch": KINDS[kind]}


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    graph: PartitionedGraph
    settings: dict[str, Any]
    plan: Plan


# What crosses process borders -----------------------------------------------------------------------------------------


class Path(NamedTuple):
    """A route as plain numbers: sends (peer, heads, rows), slots (heads, blocks, order)."""

    num_rows: int
    sends: list[tuple[int, Any, list[int]]]
    slots: list[tuple[Any, tuple[tuple[int, int], ...], list[int] | None]]


class Layer(NamedTuple):
    """sources, destinations: (micro-batch, original id) of the rows before and after. edges: an entry a slot."""

    sources: list[tuple[int, int]]
    destinations: list[tuple[int, int]]
    q: Path
    kv: Path
    o: Path
    move: Path | None
    edges: list[tuple[Any, list[int], list[int], list[float], list[float]]]


class Wave(NamedTuple):
    """stored: original ids of the features that this rank holds. targets: (micro-batch, original id)."""

    stored: list[int]
    fetch: Path
    targets: list[tuple[int, int]]
    layers: list[Layer]


def path(route: Route) -> Path:
    sends = [(b.peer, b.heads, list(range(route.num_rows)) if b.rows is None else b.rows.tolist()) for b in route.sends]
    for block, (_, _, rows) in zip(route.sends, sends, strict=True):
        assert block.num_rows == len(rows) == len(set(rows))
    slots = [(s.heads, s.blocks, None if s.order is None else s.order.tolist()) for s in route.slots]
    return Path(route.num_rows, sends, slots)


def describe(compiled: CompiledBatch, graph: PartitionedGraph) -> list[Wave]:
    original = np.asarray(graph.original_id)
    degree_of = dict(zip(original.tolist(), graph.in_degrees.tolist(), strict=True))
    waves = []
    for wave in compiled.waves:
        layers = []
        for layer in wave.layers:
            nodes = layer.sources.tolist()
            numbers = [m for m, count in zip(wave.micro_batches, layer.src_splits, strict=True) for _ in range(count)]
            sources = list(zip(numbers, nodes, strict=True))
            assert layer.degrees.tolist() == [degree_of[node] for node in nodes]
            after = range(len(sources)) if layer.destinations is None else layer.destinations.tolist()
            destinations = [sources[i] for i in after]
            assert [sum(m == n for m, _ in destinations) for n in wave.micro_batches] == list(layer.dst_splits)
            edges = [
                (
                    e.heads,
                    e.pattern.indptr.tolist(),
                    e.pattern.indices.tolist(),
                    e.degrees.tolist(),
                    e.inclusion.tolist(),
                )
                for e in layer.edges
            ]
            move = None if layer.move is None else path(layer.move)
            layers.append(Layer(sources, destinations, path(layer.q), path(layer.kv), path(layer.o), move, edges))
        last = layers[-1].destinations if layers[-1].move is None else []
        targets = [last[i] for i in wave.target_rows.tolist()]
        assert [node for _, node in targets] == original[wave.target_nodes].tolist()
        waves.append(Wave(original[wave.stored].tolist(), path(wave.fetch), targets, layers))
    return waves


def compile_here(world: World, case: Case) -> list[Wave]:
    run = rig(world, case.graph, case.plan, case.settings)
    return describe(run.compiler.compile(run.batches.step(STEP)), case.graph)


def compile_all(world: World, cases: Sequence[Case]) -> list[list[Wave]]:
    return [compile_here(world, case) for case in cases]


def by_case(world_size: int, cases: Sequence[Case]) -> list[list[list[Wave]]]:
    """`[cases][ranks][waves]`."""
    if world_size == 1:
        return [[waves] for waves in compile_all(solo(), cases)]
    return [list(ranks) for ranks in zip(*run_ranks(compile_all, world_size, cases), strict=True)]


# Following the routes -------------------------------------------------------------------------------------------------


def follow(paths: Sequence[Path], rows: Sequence[Sequence[Any]], rank: int) -> list[tuple[Any, list[Any]]]:
    """What a gather brings to `rank`, per slot, if rank r's rows are `rows[r]`."""
    found = []
    for heads, blocks, order in paths[rank].slots:
        arrived: list[Any] = []
        for peer, count in blocks:
            (sent,) = [r for to, h, r in paths[peer].sends if to == rank and h == heads]
            assert len(sent) == count
            arrived += [rows[peer][i] for i in sent]
        found.append((heads, arrived if order is None else [arrived[i] for i in order]))
    sent_here = sum(len(r) for p in paths for to, _, r in p.sends if to == rank)
    assert sent_here == sum(len(arrived) for _, arrived in found), "what is sent is also received"
    return found


def attended(ranks: Sequence[Sequence[Wave]], layer: int) -> list[Edges]:
    """The edges of a layer that each head attends to, over all waves and ranks `[H]`."""
    counts: list[Edges] = [Counter() for _ in range(HEADS)]
    for waves in zip(*ranks, strict=True):
        layers = [wave.layers[layer] for wave in waves]
        assert [part.o for part in layers] == [part.q for part in layers]
        for rank, own in enumerate(layers):
            queries = follow([part.q for part in layers], [part.destinations for part in layers], rank)
            sources = follow([part.kv for part in layers], [part.sources for part in layers], rank)
            assert [heads for heads, _ in queries] == [edges[0] for edges in own.edges]
            for (heads, indptr, indices, degrees, inclusion), (_, rows), (_, columns) in zip(
                own.edges, queries, sources, strict=True
            ):
                assert len(indptr) == len(rows) + 1
                for i, (number, node) in enumerate(rows):
                    row = indices[indptr[i] : indptr[i + 1]]
                    assert all(columns[j][0] == number for j in row), "an edge between micro-batches"
                    for head in range(*heads):
                        counts[head].update((number, node, columns[j][1]) for j in row)
                    # What the sample says of the whole neighbourhood.
                    assert degrees[i] == awkward_degree(node)
                    assert inclusion[i] == (len(row) / degrees[i] if degrees[i] else 1.0)
    return counts


def owned(ranks: Sequence[Sequence[Wave]], layer: int) -> tuple[Rows, Rows]:
    """All rows before and after a layer. Every row has exactly one owner."""
    before = [row for waves in ranks for wave in waves for row in wave.layers[layer].sources]
    after = [row for waves in ranks for wave in waves for row in wave.layers[layer].destinations]
    assert len(set(before)) == len(before) and len(set(after)) == len(after)
    return set(before), set(after)


# Brute force ----------------------------------------------------------------------------------------------------------


@cache
def neighbours() -> list[list[int]]:
    """In-neighbours of every original node, with repetitions, in the order in which the graph lists them."""
    graph = awkward_graph()
    return [graph.indices[graph.indptr[i] : graph.indptr[i + 1]].tolist() for i in range(graph.num_nodes)]


def awkward_degree(node: int) -> int:
    return len(neighbours()[node])


def drawn(batch: Batch, layer: int, node: int, among: set[int] | None) -> list[int]:
    """The sampled sources of one node, by itself: its neighbour list (cut to a cluster) and its key say it all."""
    sources = [s for s in neighbours()[node] if among is None or s in among]
    row_key = keys(batch.seed, PURPOSE_SAMPLING, batch.step, layer, torch.tensor([node]))
    fanout = batch.fanout[layer]
    indptr = torch.tensor([0, len(sources)])
    return sample_neighbors(indptr, torch.tensor(sources), None, fanout, row_key).indices.tolist()


class Expected(NamedTuple):
    """edges: of each layer. before: rows at the input of each layer. targets: of the step."""

    edges: list[Edges]
    before: list[Rows]
    targets: Rows


@cache
def brute_force(kind: str, fanout: tuple[int, ...] | None, step: int = STEP) -> Expected:
    """Micro-batch by micro-batch and node by node, in original ids."""
    graph = awkward()
    batch = rig(solo(), graph, plan_of("graph", graph, 1, L), settings_of(kind, fanout)).batches.step(step)
    edges: list[Edges] = [Counter() for _ in range(L)]
    before: list[Rows] = [set() for _ in range(L)]
    targets: Rows = set()
    for number, micro_batch in enumerate(batch.micro_batches):
        nodes = set(graph.original_id[micro_batch.nodes].tolist())
        targets |= {(number, node) for node in graph.original_id[micro_batch.targets].tolist()}
        for layer in reversed(range(L)):
            found = {node: drawn(batch, layer, node, nodes if kind == "cluster" else None) for node in nodes}
            edges[layer].update((number, node, source) for node, sources in found.items() for source in sources)
            if kind == "neighbor":
                nodes = nodes | {source for sources in found.values() for source in sources}
            before[layer] |= {(number, node) for node in nodes}
    return Expected(edges, before, targets)


PERMUTED = (
    Placement("model", (2, 0)),
    Placement("pipeline", (1, 2, 0), (1, 0, 2)),
    Placement("data", (2, 1)),
    Placement("graph", (1,)),
    Placement("model", (1, 2, 0)),
    Placement("pipeline", (0, 2), (2, 1)),
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_attend_the_edges_of_brute_force_with_every_head(world_size: int) -> None:
    """Any plan, world and layout draws the same edges; clusters keep to themselves, seeds have their surroundings."""
    graph = awkward()
    cases = [
        Case(
            f"{kind} {fanout} {mode}",
            graph,
            settings_of(kind, fanout),
            plan_of(mode, graph, world_size, L, micro_batches_per_wave=(None, 2, 1)[i % 3]),
        )
        for kind in KINDS
        for fanout in (FANOUT, None)
        for i, mode in enumerate(MODES)
    ]
    if world_size == 3:
        cases += [Case(f"{kind} permuted", graph, settings_of(kind), Plan(3, L, PERMUTED, 2)) for kind in KINDS]
    for case, ranks in zip(cases, by_case(world_size, cases), strict=True):
        want = brute_force(case.settings["batch"]["kind"], case.settings["sampling"]["fanout"])
        for layer in range(L):
            for head, edges in enumerate(attended(ranks, layer)):
                assert edges == want.edges[layer], f"{case.name}: layer {layer}, head {head}"
            before, after = owned(ranks, layer)
            assert before == want.before[layer], f"{case.name}: rows of layer {layer}"
            assert after == (want.before[layer + 1] if layer + 1 < L else after), case.name
        found = [row for waves in ranks for wave in waves for row in wave.targets]
        assert len(found) == len(set(found)) and set(found) == want.targets, case.name


def test_other_steps_and_layers_draw_other_edges() -> None:
    """The equality above is not one of constants."""
    draws = [edges for step in (0, 1) for edges in brute_force("full", FANOUT, step).edges]
    assert len({frozenset(edges.items()) for edges in draws}) == len(draws)


def test_rows_are_handed_on_from_owner_to_owner() -> None:
    """Features reach the first owners in order; `move` brings each layer's rows to the next one's owners."""
    graph = awkward()
    cases = [
        Case(f"{kind} {mode}", graph, settings_of(kind), plan_of(mode, graph, 3, L))
        for kind in KINDS
        for mode in ("pipeline", "data", "mixed")
    ] + [Case("permuted", graph, settings_of("neighbor"), Plan(3, L, PERMUTED, 1))]
    moves = 0
    for case, ranks in zip(cases, by_case(3, cases), strict=True):
        for waves in zip(*ranks, strict=True):
            for rank, wave in enumerate(waves):
                ((_, nodes),) = follow([w.fetch for w in waves], [w.stored for w in waves], rank)
                assert nodes == [node for _, node in wave.layers[0].sources], case.name
                for layer in range(1, L):
                    before = [w.layers[layer - 1] for w in waves]
                    wanted = wave.layers[layer].sources
                    if before[rank].move is None:
                        assert before[rank].destinations == wanted, case.name
                    else:
                        paths = [part.move for part in before if part.move is not None]
                        ((_, rows),) = follow(paths, [part.destinations for part in before], rank)
                        assert rows == wanted, case.name
                        moves += 1
    assert moves > 0


# The same again -------------------------------------------------------------------------------------------------------


def compile_twice(world: World, cases: Sequence[Case]) -> list[bool]:
    """Whether the second compilation of a batch, after others, gives what the first did."""
    same = []
    for case in cases:
        run = rig(world, case.graph, case.plan, case.settings)
        first = describe(run.compiler.compile(run.batches.step(STEP)), case.graph)
        run.compiler.compile(run.batches.step(STEP + 1))
        same.append(describe(run.compiler.compile(run.batches.step(STEP)), case.graph) == first)
    return same


def test_a_batch_compiles_to_the_same_again() -> None:
    """Tables that the compiler keeps between calls leave no trace."""
    graph = awkward()
    cases = [Case(k, graph, settings_of(k), plan_of(mode, graph, 2, L)) for k in KINDS for mode in ("mixed", "data")]
    assert run_ranks(compile_twice, 2, cases) == [[True] * len(cases)] * 2


def prefetched(world: World, case: Case, steps: int) -> list[bool]:
    """Whether the batches of a background thread are those compiled here; an evaluation comes between."""
    run = rig(world, case.graph, case.plan, case.settings)
    direct = [describe(run.compiler.compile(run.batches.step(step)), case.graph) for step in range(steps)]
    evaluated = describe(run.compiler.compile(run.batches.evaluation(0)), case.graph)
    prefetcher = Prefetcher(run.compiler, run.batches)
    same = []
    kept = []
    for step in range(steps):
        batch, compiled = prefetcher.step(step)
        assert batch.num_targets == run.batches.step(step).num_targets
        kept.append(compiled)
        same.append(describe(compiled, case.graph) == direct[step])
        if step == 1:
            evaluation = prefetcher.evaluation(run.batches.evaluation(step))
            same.append(describe(evaluation, case.graph) == evaluated)
    prefetcher.close()
    same.append((len(set(map(id, kept))) == 1) == batch.fixed)  # a fixed batch is compiled once
    return same


@pytest.mark.parametrize(("kind", "fanout"), [("neighbor", 4), ("cluster", None), ("full", None)])
def test_batches_compiled_ahead_are_the_same(kind: str, fanout: int | None) -> None:
    graph = awkward()
    case = Case(kind, graph, settings_of(kind, fanout), plan_of("mixed", graph, 2, L))
    for same in run_ranks(prefetched, 2, case, 4):
        assert same == [True] * 6


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_plan_for_another_world_or_partitioning_is_refused() -> None:
    graph, homes = awkward(), even_homes(awkward(), 1)
    with pytest.raises(ValueError, match="^the plan is for 2 ranks, 1 were launched; launch as many$"):
        Compiler(graph, plan_of("graph", graph, 2, L), solo(), HEADS, homes)
    plan = Plan(1, L, (Placement("graph", (0,)),) * 5)
    with pytest.raises(ValueError, match="^the plan places 5 partitions, the graph has 6; set partition.parts or edit"):
        Compiler(graph, plan, solo(), HEADS, homes)
