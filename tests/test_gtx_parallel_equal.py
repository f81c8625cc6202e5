"""Any plan equals one rank: loss and every gradient, in float64, to 1e-10 of the whole gradient's norm.

Not here: what was computed and sent where (`test_gtx_parallel_counts.py`), and DeepSpeed (`test_gtx_engine.py`).
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from cases import (
    Rig,
    awkward_graph,
    even_homes,
    loss_and_gradient,
    partitioned,
    plan_of,
    rig,
    small_graph,
    trained_on,
)
from ranks import run_ranks

from gtx.batches import Batch, MicroBatch
from gtx.expander import with_expander
from gtx.neighbor_lists import walk_lists
from gtx.node_inputs import NodeInputs, make_input
from gtx.parallel.compiler import Compiler
from gtx.parallel.context import LayerContext, Runtime, WaveContext
from gtx.parallel.exchange import Flight
from gtx.parallel.executor import Executor
from gtx.parallel.world import World, solo
from gtx.partition import PartitionedGraph
from scheduler.plan import CHECKPOINTING, Placement, Plan
from sparse_engine import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-10
MODES = ("graph", "model", "pipeline", "data", "mixed")
MODELS = ("GT", "GPS", "GCN", "MLP")
KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "cluster": {"kind": "cluster", "parts": 2, "micro_batches": 3},
    "neighbor": {"kind": "neighbor", "seeds": 5, "micro_batches": 4},
}
# micro-batches a wave, waves a round; the first leaves both to the mode
LAYOUTS = ((None, 0), (1, 1), (2, 1), (1, 0), (1, 2), (3, 1))


@dataclass(frozen=True, eq=False)
class Case:
    """One plan of one piece of mathematics."""

    name: str
    graph: PartitionedGraph
    settings: dict[str, Any]
    plan: Plan


class Outcome(NamedTuple):
    """loss: of one step. gradient: of all parameters, summed over ranks."""

    loss: float
    gradient: np.ndarray


def settings_of(
    kind: str, model: str = "GT", *, noisy: bool = True, layers: int = 3, heads: int = 3, **sections: Any
) -> dict[str, Any]:
    """Config sections; 3 heads of width 2 unless asked otherwise. noisy: dropout and sampling are on."""
    noise = {"dropout": 0.3, "input_dropout": 0.1} if noisy else {}
    return {
        "model": {"name": model, "width": 2 * heads, "heads": heads, "layers": layers, **noise},
        "sampling": {"fanout": 4 if noisy else None},
        "batch": KINDS[kind],
        **sections,
    }


@cache
def awkward() -> PartitionedGraph:
    """60 nodes in 6 parts: a hub, isolated nodes that are targets, duplicate edges, self loops, unlabelled nodes."""
    return partitioned(awkward_graph())


@cache
def walked() -> PartitionedGraph:
    """The same, with neighbour lists by random walks."""
    return replace(awkward(), lists=walk_lists(awkward(), 3, 10, 0.3, 0))


@cache
def seven() -> PartitionedGraph:
    """7 nodes in 10 parts: empty partitions, and partitions smaller than any group. Node 6 is isolated."""
    edges = [(0, 1), (1, 2), (2, 0), (3, 0), (4, 0), (5, 0), (0, 3), (2, 2), (4, 5), (4, 5)]
    graph = partitioned(small_graph(edges, 7, train=[0, 1, 4, 5, 6]), parts=10)
    assert graph.facts.empty_parts >= 3
    return graph


def run_here(world: World, case: Case) -> Outcome:
    loss, gradient, _ = loss_and_gradient(rig(world, case.graph, case.plan, case.settings))
    return Outcome(loss, gradient)


def run_cases(world: World, cases: Sequence[Case]) -> list[Outcome]:
    """On every rank."""
    outcomes = []
    for case in cases:
        try:
            outcomes.append(run_here(world, case))
        except Exception as error:
            raise RuntimeError(f"in the case {case.name}") from error
    return outcomes


def alone(case: Case) -> Case:
    """The same mathematics on one rank, in one wave."""
    plan = plan_of("graph", case.graph, 1, case.plan.num_layers)
    return replace(case, plan=plan)


def expected(cases: Sequence[Case]) -> list[Outcome]:
    """One rank's outcome of each case; each piece of mathematics is run once."""
    known: dict[tuple[int, str], Outcome] = {}
    for case in cases:
        key = (id(case.graph), json.dumps(case.settings, sort_keys=True))
        if key not in known:
            known[key] = run_here(solo(), alone(case))
    return [known[id(case.graph), json.dumps(case.settings, sort_keys=True)] for case in cases]


def differences(cases: Sequence[Case], wanted: Sequence[Outcome], found: Sequence[Outcome]) -> list[str]:
    """What is not equal, a line a case."""
    lines = []
    for case, want, have in zip(cases, wanted, found, strict=True):
        assert have.gradient.shape == want.gradient.shape, case.name
        norm = np.linalg.norm(want.gradient)
        assert np.isfinite(want.loss) and norm > 0, f"{case.name}: nothing to compare"
        loss = abs(have.loss - want.loss) / abs(want.loss)
        gradient = np.linalg.norm(have.gradient - want.gradient) / norm
        if not (loss <= TOLERANCE and gradient <= TOLERANCE):
            lines.append(f"{case.name}: loss off by {loss:.1e}, gradient by {gradient:.1e}")
    return lines


def assert_equal_one_rank(world_size: int, cases: Sequence[Case]) -> None:
    """Every rank of `world_size` finds one rank's loss and gradient in every case."""
    wanted = expected(cases)
    found = [run_cases(solo(), cases)] if world_size == 1 else run_ranks(run_cases, world_size, cases)
    lines = [f"rank {rank}, {line}" for rank, own in enumerate(found) for line in differences(cases, wanted, own)]
    assert not lines, f"{len(lines)} outcomes differ from one rank's:\n" + "\n".join(lines)


# Every mode, micro-batch, checkpointing, model and layout -------------------------------------------------------------


@dataclass(frozen=True)
class Mix:
    """One choice of everything; the sweep over worlds is so made that every two choices meet."""

    kind: str
    mode: str
    checkpointing: str
    model: str
    noisy: bool
    layout: tuple[int | None, int]

    def case(self, world_size: int) -> Case:
        waves, rounds = self.layout
        plan = plan_of(
            self.mode,
            awkward(),
            world_size,
            3,
            micro_batches_per_wave=waves,
            waves_per_round=rounds,
            checkpointing=self.checkpointing,
        )
        return Case(str(self), awkward(), settings_of(self.kind, self.model, noisy=self.noisy), plan)


def sweep(world_size: int) -> list[Mix]:
    """All of kind x mode x checkpointing (on 3 ranks every other one); the rest takes turns, by world differently."""
    mixes = []
    for i, (kind, mode, checkpointing) in enumerate(itertools.product(KINDS, MODES, CHECKPOINTING)):
        turn = i + world_size
        model, layout = MODELS[turn % 4], LAYOUTS[(turn + i // 6) % 6]
        mixes.append(Mix(kind, mode, checkpointing, model, (i // 2 + world_size) % 4 > 0, layout))
    return mixes[::2] if world_size == 3 else mixes


def test_every_two_choices_meet_in_the_sweep() -> None:
    mixes = [mix for world_size in (2, 3, 4) for mix in sweep(world_size)]
    names = list(Mix.__dataclass_fields__)
    for one, other in itertools.combinations(names, 2):
        values = [{getattr(mix, name) for mix in mixes} for name in (one, other)]
        met = {(getattr(mix, one), getattr(mix, other)) for mix in mixes}
        assert met == set(itertools.product(*values)), (one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_plan_gives_the_loss_and_gradient_of_one_rank(world_size: int, kind: str) -> None:
    """3 heads, which 2 and 4 ranks do not divide; 6 parts, a hub, isolated targets, sampling and dropout."""
    assert_equal_one_rank(world_size, [mix.case(world_size) for mix in sweep(world_size) if mix.kind == kind])


@pytest.mark.parametrize("method", [*(method for method in METHODS if method != "uniform"), "random_walk"])
def test_any_way_to_draw_edges_is_the_same_under_any_plan(method: str) -> None:
    cases = []
    for i, (kind, mode) in enumerate(itertools.product(KINDS, MODES)):
        sampling = {"fanout": 3, "method": method, "correct": i % 5 != 4}
        settings = settings_of(kind, ("GT", "GCN", "GPS")[i % 3], sampling=sampling)
        cases.append(Case(f"{kind} {mode}", walked(), settings, plan_of(mode, walked(), 2, 3)))
    assert_equal_one_rank(2, cases)


@pytest.mark.parametrize("model", ["SAGE", "GAT", "SGFormer", "Polynormer", "Exphormer", "NAGphormer"])
def test_a_model_outside_the_sweep_is_the_same_under_any_plan(model: str) -> None:
    """The rest of the registry: every kind of batch under every mode, on three ranks and three heads."""
    cases = [
        Case(
            f"{kind} {mode}",
            awkward(),
            settings_of(kind, model),
            plan_of(mode, awkward(), 3, 3, checkpointing=CHECKPOINTING[i % 3]),
        )
        for i, (kind, mode) in enumerate(itertools.product(KINDS, MODES))
    ]
    assert_equal_one_rank(3, cases)


@pytest.mark.parametrize("world_size", [2, 3])
def test_edges_that_a_model_adds_are_the_same_under_any_plan(world_size: int) -> None:
    """Exphormer on the graph with an expander: each way to draw edges, and all of them."""
    graph = partitioned(with_expander(awkward_graph(), 4, 0))
    cases = []
    for i, (kind, mode) in enumerate(itertools.product(KINDS, MODES)):
        method = (None, *METHODS)[i % (1 + len(METHODS))]
        sampling = {} if method is None else {"fanout": 4, "method": method, "correct": i % 5 != 4}
        settings = settings_of(kind, "Exphormer", sampling=sampling)
        plan = plan_of(mode, graph, world_size, 3, checkpointing=CHECKPOINTING[(i + world_size) % 3])
        cases.append(Case(f"{kind} {mode} {method}", graph, settings, plan))
    assert_equal_one_rank(world_size, cases)


@pytest.mark.parametrize("world_size", [2, 4])
def test_encodings_are_brought_with_the_features(world_size: int) -> None:
    kinds = (("laplacian", 3), ("random_walk", 4), ("degree", 2))
    graph = replace(awkward(), inputs=NodeInputs(tuple(make_input(awkward_graph(), *kind) for kind in kinds)))
    cases = []
    for i, (kind, mode) in enumerate(zip(itertools.cycle(KINDS), MODES, strict=False)):
        settings = settings_of(kind, MODELS[(i + world_size) % 4])
        settings["model"]["encodings"] = {"laplacian": 3, "random_walk": 4, "degree": True}
        cases.append(Case(f"{kind} {mode}", graph, settings, plan_of(mode, graph, world_size, 3)))
    assert_equal_one_rank(world_size, cases)


# Awkward sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_head_two_layers_and_partitions_smaller_than_their_group(world_size: int) -> None:
    """7 nodes in 10 parts, some of them empty; with 4 ranks more of these than layers and heads."""
    cases = []
    for i, (kind, mode) in enumerate(itertools.product(KINDS, MODES)):
        settings = settings_of(kind, MODELS[i % 2], layers=2, heads=1, batch={**KINDS[kind], "seeds": 2})
        if kind == "full":
            settings["batch"] = KINDS["full"]
        plan = plan_of(mode, seven(), world_size, 2, checkpointing=CHECKPOINTING[i % 3])
        cases.append(Case(f"{kind} {mode} {MODELS[i % 2]}", seven(), settings, plan))
    assert_equal_one_rank(world_size, cases)


def stages(world_size: int, *splits: tuple[int, ...]) -> tuple[Placement, ...]:
    return tuple(Placement("pipeline", tuple(range(world_size)), split) for split in splits)


def test_layers_that_stages_do_not_divide() -> None:
    """5 layers on 2 stages, also where stages differ between partitions or hold no layer."""
    graph = awkward()
    splits = (*([(2, 3)] * 2), (5, 0), (0, 5), (1, 4), (3, 2))
    cases = [
        Case(
            f"{kind} {waves}",
            graph,
            settings_of(kind, layers=5),
            Plan(2, 5, stages(2, *splits), micro_batches_per_wave=waves),
        )
        for kind, waves in (("full", 0), ("cluster", 1), ("neighbor", 2))
    ]
    cases += [Case(mode, graph, settings_of("cluster", layers=5), plan_of(mode, graph, 2, 5)) for mode in MODES]
    assert_equal_one_rank(2, cases)


@pytest.mark.parametrize(("world_size", "parts"), [(2, 4), (4, 2), (3, 5)])
def test_parts_and_ranks_need_not_match(world_size: int, parts: int) -> None:
    graph = partitioned(awkward_graph(), parts=parts)
    cases = [
        Case(
            f"{kind} {mode}",
            graph,
            settings_of(kind, MODELS[i % 4]),
            plan_of(mode, graph, world_size, 3, checkpointing=CHECKPOINTING[i % 3]),
        )
        for i, (kind, mode) in enumerate((k, m) for m in MODES for k in ("full", "neighbor"))
    ]
    assert_equal_one_rank(world_size, cases)


def test_rows_split_0_and_3_or_2_and_1() -> None:
    """3 nodes in 3 parts of one node, on 2 ranks of which one has nothing, or nearly."""
    edges = [(a, b) for a in range(3) for b in range(3)]
    graph = next(
        graph
        for seed in range(100)
        if (graph := partitioned(small_graph(edges, 3, [0, 1, 2], seed), parts=3)).facts.rows == (1, 1, 1)
    )
    one_each = {"kind": "cluster", "parts": 1, "micro_batches": 3}
    g0, g1 = Placement("graph", (0,)), Placement("graph", (1,))
    m01, m10 = Placement("model", (0, 1)), Placement("model", (1, 0))  # a single row goes to the second
    d1, d01 = Placement("data", (1,)), Placement("data", (0, 1))
    plans: dict[str, tuple[Placement, ...]] = {
        "graph 0 3": (g1, g1, g1),
        "graph 2 1": (g0, g0, g1),
        "model 0 3": (m01, m01, m01),
        "model 2 1": (m10, m10, m01),
        "pipeline 0 3": stages(2, (0, 3), (0, 3), (0, 3)),
        "pipeline 2 1": stages(2, (2, 1), (2, 1), (2, 1)),
        "data 0 3": (d1, d1, d1),
        "data 2 1": (d01, d01, d01),
        "mixed 0 3": (g1, m01, Placement("pipeline", (0, 1), (0, 3))),
        "mixed 2 1": (g0, m10, Placement("pipeline", (0, 1), (2, 1))),
    }
    cases = [
        Case(f"{name} {kind}", graph, settings_of("full", model, batch=batch), Plan(2, 3, placements, waves))
        for name, placements in plans.items()
        for kind, model, batch, waves in (("full", "GT", KINDS["full"], 0), ("cluster", "GPS", one_each, 1))
    ]
    assert_equal_one_rank(2, cases)


@pytest.mark.parametrize("model", ["SGFormer", "GPS", "Exphormer"])
def test_a_rank_whose_rows_all_live_on_beside_one_whose_rows_do_not(model: str) -> None:
    """Node 0 alone on a rank, the three that it attends to on the other: sums over rows before the layer count 4."""
    graph = partitioned(small_graph([(1, 0), (2, 0), (3, 0)], 4, train=[0]), parts=4)
    ranks = [0 if graph.part_of[i] == graph.part_of[np.argmin(graph.original_id)] else 1 for i in range(4)]
    assert sorted(ranks) == [0, 1, 1, 1]
    plan = Plan(2, 1, tuple(Placement("graph", (rank,)) for rank in ranks))
    batch = {"kind": "neighbor", "seeds": 1, "micro_batches": 1}
    settings = settings_of("full", model, noisy=False, layers=1, batch=batch)
    assert_equal_one_rank(2, [Case(model, graph, settings, plan)])


def test_groups_may_be_permuted_and_overlap() -> None:
    """Every partition by a group of its own, none of them in rank order."""
    placements = (
        Placement("model", (2, 0)),
        Placement("pipeline", (1, 2, 0), (1, 0, 2)),
        Placement("data", (2, 1)),
        Placement("graph", (1,)),
        Placement("model", (1, 2, 0)),
        Placement("pipeline", (0, 2), (2, 1)),
    )
    cases = [
        Case(
            f"{kind} {model} {checkpointing} {layout}",
            awkward(),
            settings_of(kind, model),
            Plan(3, 3, placements, layout[0] or 0, layout[1], checkpointing),
        )
        for kind in KINDS
        for model, checkpointing, layout in zip(MODELS, (*CHECKPOINTING, "layer"), LAYOUTS, strict=False)
    ]
    assert_equal_one_rank(3, cases)


# Training nodes that are few, or unevenly dealt -----------------------------------------------------------------------


def test_one_training_node_on_two_ranks() -> None:
    """Ranks without a target, at either end."""
    graph = awkward()
    cases = [
        Case(f"{kind} {mode} node {node}", trained, settings_of(kind), plan_of(mode, graph, 2, 3))
        for node in (0, graph.graph.num_nodes - 1)
        for trained in [trained_on(graph, [node])]
        for kind in ("full", "neighbor")
        for mode in MODES
    ]
    assert_equal_one_rank(2, cases)


class Epoch(NamedTuple):
    """What one rank saw of one epoch."""

    losses: list[float]
    seeds: list[int]


def run_epoch(world: World, case: Case) -> Epoch:
    run = rig(world, case.graph, case.plan, case.settings)
    losses, seeds = [], []
    for step in range(run.batches.steps_per_epoch):
        compiled = run.compiler.compile(run.batches.step(step))
        seeds += [int(node) for wave in compiled.waves for node in wave.target_nodes]
        losses.append(run.executor.train_step(compiled, case.plan, step, fixed=False).loss)
    return Epoch(losses, seeds)


def run_epochs(world: World, cases: Sequence[Case]) -> list[Epoch]:
    return [run_epoch(world, case) for case in cases]


def test_nine_seeds_on_four_ranks_two_a_batch() -> None:
    """Every seed once an epoch, no rank waits for ever; the last micro-batch is one row and batch norm finite."""
    edges = [(a, a + 1) for a in range(11)] + [(a + 1, a) for a in range(11)]
    # Nodes 12 and up are isolated. One of the nine is alone in the last micro-batch: with all isolated it is one row.
    connected = partitioned(small_graph(edges, 12, train=range(2, 11)), parts=5)
    isolated = partitioned(small_graph(edges, 24, train=range(12, 21)), parts=5)
    batch = {"kind": "neighbor", "seeds": 2, "micro_batches": 4}
    cases = [
        Case(
            f"{model} {mode} {graph.graph.num_nodes}",
            graph,
            settings_of("neighbor", model, layers=2, batch=batch),
            plan_of(mode, graph, 4, 2),
        )
        for model, graph in (("GPS", connected), ("GPS", isolated), ("GT", connected))
        for mode in MODES
    ]
    found = run_ranks(run_epochs, 4, cases)
    for i, case in enumerate(cases):
        want = run_epoch(solo(), alone(case))
        assert len(want.losses) == 2 and np.isfinite(want.losses).all()
        assert sorted(want.seeds) == np.flatnonzero(case.graph.graph.train_mask).tolist()
        assert sorted(seed for rank in found for seed in rank[i].seeds) == sorted(want.seeds), case.name
        for rank in found:
            np.testing.assert_allclose(rank[i].losses, want.losses, rtol=TOLERANCE, err_msg=case.name)


class Trained(NamedTuple):
    """After some steps: losses, all weights, all batch-norm statistics, and the evaluation."""

    losses: np.ndarray
    weights: np.ndarray
    statistics: np.ndarray
    nodes: np.ndarray
    logits: np.ndarray


def flat(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).double().numpy().copy() if tensors else np.zeros(0)


def train(world: World, case: Case, steps: int) -> Trained:
    run = rig(world, case.graph, case.plan, case.settings)
    losses = []
    for step in range(steps):
        batch = run.batches.step(step)
        losses.append(run.executor.train_step(run.compiler.compile(batch), case.plan, step, fixed=batch.fixed).loss)
    return finished(run, losses, steps)


def finished(run: Rig, losses: Sequence[float], steps: int) -> Trained:
    evaluation = run.compiler.compile(run.batches.evaluation(steps))
    nodes, logits = run.executor.predict(evaluation, run.plan, steps)
    buffers = [buffer for _, buffer in sorted(run.engine.model.named_buffers())]
    return Trained(np.array(losses), flat(run.engine.parameters), flat(buffers), nodes, logits)


def train_all(world: World, cases: Sequence[Case], steps: int) -> list[Trained]:
    return [train(world, case, steps) for case in cases]


def assert_trained_alike(want: Trained, have: Trained, name: str) -> None:
    for field in Trained._fields:
        one, other = getattr(want, field), getattr(have, field)
        assert one.shape == other.shape, f"{name}: {field}"
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-10, err_msg=f"{name}: {field}")


SGD = {"optimizer": "sgd", "lr": 0.5}


def test_ranks_with_one_and_three_training_nodes_take_the_step_of_one_rank() -> None:
    """A mean of the ranks' means would weigh the lonely node three times."""
    graph = partitioned(awkward_graph(), parts=2)
    middle = int(graph.starts[1])
    graph = trained_on(graph, [1, middle, middle + 3, middle + 5])
    cases = [
        Case(f"{mode} {kind}", graph, settings_of(kind, noisy=False, engine=SGD), plan_of(mode, graph, 2, 3))
        for mode in MODES
        for kind in ("full", "neighbor")
    ]
    found = run_ranks(train_all, 2, cases, 1)
    for i, case in enumerate(cases):
        want = train(solo(), alone(case), 1)
        for rank in range(2):
            assert_trained_alike(want, found[rank][i], case.name)


@pytest.mark.parametrize("world_size", [2, 4])
def test_clipping_is_by_the_norm_of_one_rank(world_size: int) -> None:
    """Off, the step is -lr * gradient; on, the same direction with the asked length, at any world size and mode."""
    limit = 0.05
    start = flat(rig(solo(), awkward(), plan_of("graph", awkward(), 1, 3), settings_of("full")).engine.parameters)
    cases = [
        Case(
            f"{mode} clipping {clipping}",
            awkward(),
            settings_of("cluster", engine={**SGD, "gradient_clipping": clipping}),
            plan_of(mode, awkward(), world_size, 3, waves_per_round=1),
        )
        for mode in MODES
        for clipping in (0.0, limit)
    ]
    off, on = (train(solo(), alone(case), 1).weights - start for case in cases[:2])
    gradient = run_here(solo(), alone(cases[0])).gradient
    np.testing.assert_allclose(off, -SGD["lr"] * gradient, atol=1e-12)
    norm = np.linalg.norm(gradient)
    assert norm > 2 * limit
    np.testing.assert_allclose(on, off * limit / (norm + 1e-6), rtol=1e-9, atol=1e-12)
    for rank in run_ranks(train_all, world_size, cases, 1):
        for i, case in enumerate(cases):
            np.testing.assert_allclose(rank[i].weights - start, (off, on)[i % 2], atol=1e-12, err_msg=case.name)


# Several steps, evaluation and a switch -------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "kind"), [(2, "cluster"), (3, "neighbor")])
def test_evaluation_and_running_statistics_do_not_depend_on_the_plan(world_size: int, kind: str) -> None:
    """GPS after 3 steps of 3 or 4 micro-batches: running statistics are those of one rank, in micro-batch order."""
    cases = [
        Case(
            f"{mode} {layout}",
            awkward(),
            settings_of(kind, "GPS", engine=SGD),
            plan_of(
                mode,
                awkward(),
                world_size,
                3,
                micro_batches_per_wave=layout[0],
                waves_per_round=layout[1],
                checkpointing=CHECKPOINTING[i % 3],
            ),
        )
        for i, (mode, layout) in enumerate(zip(MODES, LAYOUTS, strict=False))
    ]
    want = train(solo(), alone(cases[0]), 3)
    assert np.array_equal(want.nodes, np.flatnonzero(awkward().graph.labels >= 0))
    assert want.statistics.size > 0
    for rank in run_ranks(train_all, world_size, cases, 3):
        for case, have in zip(cases, rank, strict=True):
            assert_trained_alike(want, have, case.name)


def train_switching(world: World, graph: PartitionedGraph, settings: dict[str, Any], plans: Sequence[Plan]) -> Trained:
    """A step under each plan on one engine and executor."""
    run = rig(world, graph, plans[0], settings)
    losses = []
    for step, plan in enumerate(plans):
        batch = run.batches.step(step)
        compiler = Compiler(graph, plan, world, run.config.model.heads, even_homes(graph, world.size))
        compiled = compiler.compile(batch)
        losses.append(run.executor.train_step(compiled, plan, step, fixed=batch.fixed).loss)
        del compiler, compiled
        gc.collect()  # what was compiled for another plan may now lie at the old address
    return finished(run, losses, len(plans))


@pytest.mark.parametrize("kind", ["full", "neighbor"])
def test_a_switch_of_plan_never_changes_a_result(kind: str) -> None:
    """One engine, another mode at every step; also where one plan's inputs are kept from step to step."""
    graph, settings = awkward(), settings_of(kind, "GPS", noisy=kind != "full", engine=SGD)
    plans = [plan_of(mode, graph, 2, 3) for mode in (*MODES, "graph", "data")]
    found = run_ranks(train_switching, 2, graph, settings, plans)
    want = train_switching(solo(), graph, settings, [plan_of("graph", graph, 1, 3) for _ in plans])
    for have in found:
        assert_trained_alike(want, have, kind)


# Micro-batches are worlds of their own --------------------------------------------------------------------------------


def logits_in_training(run: Rig, batch: Batch) -> list[np.ndarray]:
    """Logits of every row of each micro-batch, with dropout and batch statistics on; on one rank."""
    channel = run.executor.channel
    runtime = Runtime(channel, run.config.model.heads, batch.seed, batch.step, True, "torch", run.plan.checkpointing)
    found: list[np.ndarray] = []
    run.engine.model.train()
    for wave in run.compiler.compile(batch).waves:
        x = torch.from_numpy(run.graph.input_rows(wave.stored)).double()
        token = torch.zeros((), dtype=torch.float64)
        out, _ = run.engine.forward(x, token, WaveContext(runtime, wave))
        found += [rows.detach().numpy() for rows in out.split(wave.layers[-1].dst_splits)]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_micro_batches_of_a_wave_never_meet(model: str) -> None:
    """Two clusters that share a partition: one wave equals two, and what changes in one leaves the other as it is."""
    graph, settings = awkward(), settings_of("cluster", model)
    nodes = [np.flatnonzero(np.isin(graph.part_of, parts)) for parts in ((0, 1), (1, 2))]
    micro_batches = tuple(
        MicroBatch(rows, rows, parts=np.array(parts)) for rows, parts in zip(nodes, ((0, 1), (1, 2)), strict=True)
    )
    batch = Batch(0, micro_batches, (4, 4, 4), 0, False)

    def logits(waves: int, graph: PartitionedGraph) -> list[np.ndarray]:
        return logits_in_training(
            rig(solo(), graph, plan_of("graph", graph, 1, 3, micro_batches_per_wave=waves), settings), batch
        )

    together, apart = logits(2, graph), logits(1, graph)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    features = np.where((graph.part_of == 0)[:, None], 9.0, graph.graph.features).astype(np.float32)
    changed = logits(2, replace(graph, graph=replace(graph.graph, features=features)))
    assert np.abs(changed[0] - together[0]).max() > 1e-3
    np.testing.assert_array_equal(changed[1], together[1])


# These tests can fail -------------------------------------------------------------------------------------------------


def _lose_a_block_of_kv(flight: Flight, received: Sequence[torch.Tensor]) -> torch.Tensor:
    """A `Flight._sum` that forgets what one peer sent back of K and V."""
    if flight.route.kind == "kv":
        remote = [i for i, block in enumerate(flight.route.sends) if block.peer != flight.route.rank]
        received = [torch.zeros_like(r) if remote[:1] == [i] else r for i, r in enumerate(received)]
    return _sum(flight, received)


_sum = Flight._sum


def _dropout_by_position(context: LayerContext, x: torch.Tensor, p: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    kept = torch.rand(x.shape, generator=generator, dtype=x.dtype) >= p
    return x * kept / (1 - p)


def _mean_of_means(executor: Executor, logits: torch.Tensor, wave: Any) -> torch.Tensor:
    """A share of the loss for which ranks count alike, however few their targets are."""
    count = len(wave.target_nodes)
    own = _loss(executor, logits, wave) / max(count, 1)
    return own * (executor.graph.graph.train_mask.sum() / executor.world.size)


_loss = Executor._loss

MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "none": (Flight, "_sum", _sum),
    "a block of kv is lost in backward": (Flight, "_sum", _lose_a_block_of_kv),
    "dropout is keyed by position": (LayerContext, "dropout", _dropout_by_position),
    "the loss is a mean of means": (Executor, "_loss", _mean_of_means),
}


def run_mutated(world: World, cases: Sequence[Case], mutation: str) -> list[str]:
    """The differences under a deliberate mistake, which the one rank makes as well."""
    target, name, replacement = MUTATIONS[mutation]
    with mock.patch.object(target, name, replacement):
        return differences(cases, [run_here(solo(), alone(case)) for case in cases], run_cases(world, cases))


def test_the_comparison_sees_mistakes() -> None:
    for mutation in MUTATIONS:
        cases = [Case(m, awkward(), settings_of("full"), plan_of(m, awkward(), 2, 3)) for m in ("graph", "model")]
        found = run_ranks(run_mutated, 2, cases, mutation)
        wanted = 0 if mutation == "none" else len(cases)
        assert [len(lines) for lines in found] == [wanted, wanted], (mutation, found)
