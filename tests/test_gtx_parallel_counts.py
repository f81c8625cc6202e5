"""Ranks really share the work: rows, edges, bytes and held activations, counted and compared with paper.

Formulas are those of the cost model; `h` (halo rows) and owners are counted here by brute force. Nothing is timed. Not
here: that the result is right (`test_gtx_parallel_equal.py`).

Legend: `n` rows of a rank, `C` width, `L` layers, `b` 8 bytes an element, `u` ranks of a group, `F` features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from cases import awkward_graph, loss_and_gradient, partitioned, plan_of, rig
from ranks import run_ranks

from gtx.datasets import load_graph
from gtx.parallel.exchange import Flight
from gtx.parallel.world import World, solo
from gtx.partition import PartitionedGraph
from scheduler.plan import Placement, Plan

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("graph", "model", "pipeline", "data", "mixed")
B = 8  # float64
L, HEADS = 3, 4
C = 2 * HEADS


class Counted(NamedTuple):
    """One rank in one step. sent, received: bytes by kind of exchange. held: peak bytes kept for backward."""

    sent: dict[str, int]
    received: dict[str, int]
    held: int


class _Held:
    """Bytes of tensors that autograd (or recomputation) keeps at once, each storage once, parameters left out."""

    def __init__(self, parameters: Sequence[torch.Tensor]):
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self.kept: list[torch.Tensor] = []  # all until the step ends, so that no storage is met again under its address
        self.storages: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters and storage.nbytes():
            self.kept.append(tensor)
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self.storages.values())


def _keeping(held: _Held, wait: Callable[[Flight], Any]) -> Callable[[Flight], Any]:
    """A `Flight.wait_*` whose kept rows are counted as well."""

    def counted(flight: Flight) -> Any:
        result = wait(flight)
        for tensor in flight.kept:
            held.keep(tensor)
        return result

    return counted


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    graph: PartitionedGraph
    settings: dict[str, Any]
    plan: Plan
    homes: np.ndarray | None = None  # where features are stored; like the rows of graph mode unless given


def count(world: World, case: Case) -> Counted:
    """One step, on every rank. All its waves are one round, so that what the forward keeps is the peak."""
    assert case.plan.waves_per_round == 0
    run = rig(world, case.graph, case.plan, case.settings, case.homes)
    held = _Held(run.engine.parameters)
    backward = run.engine.backward
    at_backward: list[int] = []

    def note_and_go(loss: torch.Tensor, *, last: bool) -> None:
        at_backward.append(held.num_bytes)
        backward(loss, last=last)

    with ExitStack() as stack:
        for name in ("wait_gather", "wait_scatter"):
            stack.enter_context(mock.patch.object(Flight, name, _keeping(held, getattr(Flight, name))))
        stack.enter_context(mock.patch.object(run.engine, "backward", note_and_go))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(held.keep, lambda tensor: tensor))
        loss_and_gradient(run)
    run.timer.finish_step()
    exchanges = run.timer.exchanges
    return Counted(
        {e.kind: e.sent_bytes for e in exchanges},
        {e.kind: e.received_bytes for e in exchanges},
        at_backward[0],
    )


def count_all(world: World, cases: Sequence[Case]) -> list[Counted]:
    return [count(world, case) for case in cases]


def count_alone(world: World, cases: Sequence[Case]) -> list[Counted]:
    """Full replication: every rank does everything by itself."""
    return [count(solo(), on_one_rank(case)) for case in cases]


def on_one_rank(case: Case) -> Case:
    plan = plan_of("graph", case.graph, 1, case.plan.num_layers, checkpointing=case.plan.checkpointing)
    return Case(case.name, case.graph, case.settings, plan)


def by_case(world_size: int, cases: Sequence[Case], fn: Callable[..., list[Any]] = count_all) -> list[list[Any]]:
    """`[cases][ranks]`."""
    return [list(ranks) for ranks in zip(*run_ranks(fn, world_size, cases), strict=True)]


@cache
def awkward() -> PartitionedGraph:
    return partitioned(awkward_graph())


@cache
def blocks() -> PartitionedGraph:
    """640 nodes in 16 clusters with few edges between them, every node with a self loop."""
    options = {"num_nodes": 640, "num_edges": 6400, "num_blocks": 16, "homophily": 0.95, "num_features": 5}
    graph = load_graph("sbm", root=None, seed=0, undirected=True, self_loops="add", options=options)
    return partitioned(graph, parts=16, method="metis")


def settings_of(model: str = "GT", fanout: int | None = None, heads: int = HEADS, **batch: Any) -> dict[str, Any]:
    return {
        "model": {"name": model, "width": 2 * heads, "heads": heads, "layers": L, "dropout": 0.1},
        "sampling": {"fanout": fanout},
        "batch": {"kind": "full", **batch},
    }


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "cluster": {"kind": "cluster", "parts": 2, "micro_batches": 3},
    "neighbor": {"kind": "neighbor", "seeds": 5, "micro_batches": 4},
}

# Rows and edges -------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """rows, edges: that one rank computes in one step."""

    rows: int
    edges: float


def share(world: World, case: Case) -> Work:
    run = rig(world, case.graph, case.plan, case.settings)
    compiled = run.compiler.compile(run.batches.step(0))
    return Work(compiled.rows, compiled.edges)


def share_all(world: World, cases: Sequence[Case]) -> list[Work]:
    return [share(world, case) for case in cases]


def share_alone(world: World, cases: Sequence[Case]) -> list[Work]:
    """Full replication: every rank does everything by itself."""
    return [share(solo(), on_one_rank(case)) for case in cases]


def shared_out(found: Sequence[Work], want: Work) -> bool:
    """Whether rows and edges of the ranks sum to one rank's: nothing is computed twice."""
    edges = sum(own.edges for own in found)
    return sum(own.rows for own in found) == want.rows and abs(edges - want.edges) <= 1e-9 * want.edges


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_and_edges_sum_to_those_of_one_rank(world_size: int) -> None:
    """In every mode and micro-batch, also where 3 heads meet a group of 2. Replication is seen."""
    cases = [
        Case(
            f"{kind} {mode}",
            awkward(),
            settings_of(fanout=4, heads=3, **batch),
            plan_of(mode, awkward(), world_size, L),
        )
        for kind, batch in KINDS.items()
        for mode in MODES
    ]
    wanted = share_alone(solo(), cases)
    for case, want, found in zip(cases, wanted, by_case(world_size, cases, share_all), strict=True):
        assert shared_out(found, want), case.name
        if case.name != "full data":  # the one micro-batch runs on one rank
            assert max(own.rows for own in found) < want.rows, f"{case.name}: one rank does it all"
    for want, found in zip(wanted, by_case(world_size, cases, share_alone), strict=True):
        assert not shared_out(found, want)


def test_edges_are_shared_by_heads() -> None:
    """A group of 4 with 4 heads: every rank attends every edge with a quarter of the heads."""
    case = Case("model", blocks(), settings_of(), plan_of("model", blocks(), 4, L))
    (found,) = by_case(4, [case], share_all)
    assert [own.edges for own in found] == pytest.approx([blocks().graph.num_edges * L / 4] * 4)


# Bytes ----------------------------------------------------------------------------------------------------------------


def rows_passed(graph: PartitionedGraph, owner: np.ndarray, world_size: int) -> np.ndarray:
    """`[P, P]`: distinct rows that the first rank owns and the second needs for its in-edges, by brute force."""
    needed = set()
    for node in range(graph.graph.num_nodes):
        for edge in range(graph.graph.indptr[node], graph.graph.indptr[node + 1]):
            source = int(graph.graph.indices[edge])
            if owner[source] != owner[node]:
                needed.add((source, int(owner[node])))
    passed = np.zeros((world_size, world_size), dtype=np.int64)
    for source, reader in needed:
        passed[owner[source], reader] += 1
    return passed


def nothing_but(counted: Counted, *kinds: str) -> bool:
    """Whether no other kind of exchange passed a byte."""
    return not any(
        size for passed in (counted.sent, counted.received) for kind, size in passed.items() if kind not in kinds
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_graph_mode_passes_two_halos_a_layer(world_size: int) -> None:
    """K and V of each halo row forward, their gradients backward: `2 h C b` a layer and way. Nothing else."""
    graph = blocks()
    plan = plan_of("graph", graph, world_size, L)
    passed = rows_passed(graph, np.array([place.ranks[0] for place in plan.partitions])[graph.part_of], world_size)
    (found,) = by_case(world_size, [Case("graph", graph, settings_of(), plan)])
    assert passed.sum() > 0
    for rank, own in enumerate(found):
        h_out, h_in = passed[rank].sum(), passed[:, rank].sum()
        assert own.sent["kv"] == own.received["kv"] == 2 * (h_out + h_in) * C * B * L
        assert nothing_but(own, "kv")


@pytest.mark.parametrize("world_size", [2, 4])
def test_model_mode_passes_four_shares_of_its_rows_a_layer(world_size: int) -> None:
    """Q, K, V and O: `4 (u-1)/u n C b` a layer and way, where rows and heads split evenly and every row is a source."""
    graph = partitioned(
        load_graph(
            "sbm",
            root=None,
            seed=0,
            undirected=True,
            self_loops="add",
            options={"num_nodes": 64, "num_edges": 400, "num_blocks": 4},
        ),
        parts=4,
    )
    assert graph.facts.rows == (16, 16, 16, 16)
    homes = np.zeros(4, dtype=np.int64)  # all features are on rank 0
    case = Case("model", graph, settings_of(), plan_of("model", graph, world_size, L), homes)
    (found,) = by_case(world_size, [case])
    n, u = 64 // world_size, world_size
    for rank, own in enumerate(found):
        share = (u - 1) * n * C // u * B
        for kind, tensors in (("q", 1), ("kv", 2), ("o", 1)):
            assert own.sent[kind] == own.received[kind] == 2 * tensors * share * L, kind
        fetched = n * graph.graph.num_features * B  # features travel once, and no gradient returns
        assert own.received.get("fetch", 0) == (0 if rank == 0 else fetched)
        assert own.sent.get("fetch", 0) == (fetched * (u - 1) if rank == 0 else 0)
        assert nothing_but(own, "q", "kv", "o", "fetch")


def test_pipeline_mode_passes_all_rows_once_a_border_and_wave() -> None:
    """3 stages for 3 layers, and a split whose middle stage is empty: one border, not two."""
    graph, world_size = blocks(), 3
    n = graph.graph.num_nodes
    for split, borders in (((1, 1, 1), [(0, 1), (1, 2)]), ((2, 0, 1), [(0, 2)])):
        place = Placement("pipeline", tuple(range(world_size)), split)
        homes = np.zeros(graph.num_parts, dtype=np.int64)
        case = Case("pipeline", graph, settings_of(), Plan(world_size, L, (place,) * graph.num_parts), homes)
        (found,) = by_case(world_size, [case])
        for rank, own in enumerate(found):
            # As the sender of rows it receives their gradients, and the other way round.
            touched = sum(rank in border for border in borders)
            assert own.sent.get("move", 0) == own.received.get("move", 0) == touched * n * C * B
            assert nothing_but(own, "move")


def test_pipeline_bytes_do_not_depend_on_waves() -> None:
    """3 clusters in one wave or in three pass the same rows."""
    graph = awkward()
    cases = [
        Case(
            str(waves),
            graph,
            settings_of(**KINDS["cluster"]),
            plan_of("pipeline", graph, 2, L, micro_batches_per_wave=waves),
        )
        for waves in (1, 0)
    ]
    split, whole = by_case(2, cases)
    assert [own.sent["move"] for own in split] == [own.sent["move"] for own in whole] == [60 * C * B] * 2


def test_data_mode_passes_features_only() -> None:
    """Each micro-batch on one rank: feature rows that are stored elsewhere travel once, and nothing else does."""
    graph = blocks()
    homes = np.arange(16) % 2
    batch = {"kind": "cluster", "parts": 8, "micro_batches": 2}
    case = Case("data", graph, settings_of(**batch), plan_of("data", graph, 2, L), homes)
    micro_batches = rig(solo(), graph, on_one_rank(case).plan, case.settings).batches.step(0).micro_batches
    away = [int((homes[graph.part_of[m.nodes]] != rank).sum()) for rank, m in enumerate(micro_batches)]
    (found,) = by_case(2, [case])
    assert min(away) > 0
    for rank, own in enumerate(found):
        assert own.received["fetch"] == away[rank] * graph.graph.num_features * B
        assert own.sent["fetch"] == away[1 - rank] * graph.graph.num_features * B
        assert nothing_but(own, "fetch")


def test_reductions_pass_sums_and_no_rows() -> None:
    """GPS on one micro-batch: two vectors for each of three norms, an `[H, d, d + 1]` for the attention, per peer."""
    graph, world_size = blocks(), 3
    (found,) = by_case(world_size, [Case("GPS", graph, settings_of("GPS"), plan_of("graph", graph, world_size, L))])
    d = C // HEADS
    numbers = 3 * 2 * C + HEADS * d * (d + 1)
    for own in found:
        assert own.sent["reduce"] == own.received["reduce"] == 2 * (world_size - 1) * numbers * B * L
        assert nothing_but(own, "reduce", "kv")


def test_who_owns_nothing_passes_nothing() -> None:
    """Rank 2 of 3 holds no row, in every mode; the others pass the same bytes as in a world of two."""
    graph = awkward()
    places = {
        "graph": [Placement("graph", (p % 2,)) for p in range(6)],
        "model": [Placement("model", (0, 1))] * 6,
        "pipeline": [Placement("pipeline", (0, 1), (2, 1))] * 6,
        "data": [Placement("data", (0, 1))] * 6,
    }
    homes = np.arange(6) % 2
    batches = {"graph": {}, "model": {}, "pipeline": {}, "data": KINDS["cluster"]}
    cases = {
        size: [
            Case(mode, graph, settings_of("GPS", **batches[mode]), Plan(size, L, tuple(places[mode])), homes)
            for mode in places
        ]
        for size in (2, 3)
    }
    for case, two, three in zip(cases[2], by_case(2, cases[2]), by_case(3, cases[3]), strict=True):
        idle = three[2]
        assert nothing_but(idle), case.name
        assert [own.sent for own in two] == [own.sent for own in three[:2]], case.name
        assert sum(sum(own.sent.values()) for own in two) > 0, case.name


def test_recomputation_sends_nothing_again() -> None:
    """Every mode with `edges` and `layer` passes the bytes that it passes without checkpointing."""
    graph = awkward()
    cases = [
        Case(
            mode,
            graph,
            settings_of("GPS" if mode == "mixed" else "GT", 4),
            plan_of(mode, graph, 3, L, checkpointing=level),
        )
        for mode in MODES
        for level in ("none", "edges", "layer")
    ]
    found = by_case(3, cases)
    for i in range(0, len(cases), 3):
        plain = [(own.sent, own.received) for own in found[i]]
        for again in found[i + 1 : i + 3]:
            assert [(own.sent, own.received) for own in again] == plain, cases[i].name


# Activations ----------------------------------------------------------------------------------------------------------

SHARE = 0.4  # of one rank's, at most, on each of four


def test_four_ranks_hold_four_tenths_of_the_activations_at_most() -> None:
    """The largest rank, in graph mode (with its halo) and in data mode. Replication fails this, and so does a rank
    that is given everything."""
    graph = blocks()
    one_each = {"kind": "cluster", "parts": 4, "micro_batches": 4}
    cases = [
        Case("graph", graph, settings_of(), plan_of("graph", graph, 4, L)),
        Case("data", graph, settings_of(**one_each), plan_of("data", graph, 4, L)),
    ]
    lopsided = Case("all on one", graph, settings_of(), Plan(4, L, (Placement("graph", (0,)),) * 16))
    wanted = [count(solo(), on_one_rank(case)).held for case in cases]
    for case, want, found in zip(cases, wanted, by_case(4, cases), strict=True):
        assert max(own.held for own in found) <= SHARE * want, case.name
    for found in by_case(4, cases, count_alone) + by_case(4, [lopsided]):
        assert max(own.held for own in found) > SHARE * max(wanted)


@pytest.mark.parametrize("world_size", [1, 3])
def test_checkpointing_holds_less(world_size: int) -> None:
    """`layer` keeps `b (n + 2 h) C` a layer: rows, and the halo it received; `edges` lies between."""
    graph = blocks()
    cases = [
        Case(level, graph, settings_of(), plan_of("graph", graph, world_size, L, checkpointing=level))
        for level in ("none", "edges", "layer")
    ]
    found = by_case(world_size, cases) if world_size > 1 else [[count(solo(), case)] for case in cases]
    plan = cases[0].plan
    owner = np.array([place.ranks[0] for place in plan.partitions])[graph.part_of]
    passed = rows_passed(graph, owner, world_size)
    for rank in range(world_size):
        none, edges, layer = (ranks[rank].held for ranks in found)
        assert layer < edges < none
        n, h = int((owner == rank).sum()), int(passed[:, rank].sum())
        outside = n * graph.graph.num_features * B + 8 * n * C * B  # encoder and classifier are not checkpointed
        assert layer <= B * (n + 2 * h) * C * L + outside
        assert layer < 0.5 * none
