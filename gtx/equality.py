"""Whether a model computes the same under any plan as on one rank: loss, rows after every layer, all gradients.

For models of one's own (`docs/own_layer.md`). Not here: what a layer may use (`parallel/context.py`), and the plans
(`scheduler/plan.py`).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gtx.batches import BatchPlanner
from gtx.config import BatchConfig, Config, EngineConfig, ModelConfig, SamplingConfig
from gtx.engine import TorchEngine
from gtx.expander import with_expander
from gtx.graphs import Graph
from gtx.models import GraphModel, family_named
from gtx.node_inputs import NodeInputs, make_input
from gtx.parallel.compiler import Compiler
from gtx.parallel.context import LayerContext
from gtx.parallel.executor import Executor
from gtx.parallel.world import World, join_world, leave_world, solo
from gtx.partition import PartitionedGraph, partition
from gtx.session import read_graph
from monitor import PhaseTimer
from scheduler.plan import CHECKPOINTING, MODES, Plan, deal, fixed_plan

TOLERANCE = 1e-9  # of float64, relative to the largest entry; sums in another order stay far below
_PARTS = 6
_FANOUT = 4
_TIMEOUT_S = 60.0
_BATCHES = (
    ("the full graph", BatchConfig()),
    ("3 micro-batches", BatchConfig(kind="cluster", parts=2, micro_batches=3)),
)


class UnequalPlansError(ValueError):
    """A model depends on the plan: a line for each plan that differs, with the place where it differs first."""


@dataclass(frozen=True)
class _Case:
    """One plan of one batch. batch: index into `_BATCHES`."""

    batch: int
    plan: Plan
    world_size: int
    name: str


@dataclass
class _Outcome:
    """rows: of each layer, `[C]` after it by micro-batch and node; of one rank only those that it owns."""

    loss: float
    gradients: dict[str, npt.NDArray[np.float64]]
    rows: list[dict[int, npt.NDArray[np.float64]]]


def check_any_plan_equals_one_rank(
    model: str | ModelConfig,
    graph: Graph,
    *,
    worlds: Sequence[int] = (1, 2, 3),
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = print,
) -> int:
    """Train a step under plans of every mode, and compare it with one rank's, in float64.

    The graph is cut into partitions at random, so that most edges cross; a step is the full graph or three
    micro-batches, edges are sampled, dropout is on as `model` says, and checkpointing takes turns. Ranks are processes
    on this machine's CPU; a script that calls this guards its main code by `if __name__ == "__main__"`.

    Args:
        model: a built-in name, the path of a Python file with a `FAMILY`, or a config with either as its name.
        graph: some hundred nodes with training nodes among them; see `gtx.convert` for those of networkx, DGL and PyG.
        worlds: numbers of ranks.
        tolerance: largest relative deviation of rows, loss and gradients.
        say: told what is run.

    Returns how many plans were compared.

    Raises:
        UnequalPlansError: which plans differ, the first layer and node whose row differs, or the parameters whose
            gradients do.
        ValueError: if the model cannot be built, or fails on one rank or under a plan; one line says where.
    """
    config = ModelConfig(name=model) if isinstance(model, str) else model
    if config.name.endswith(".py"):
        config = config.model_copy(update={"name": str(Path(config.name).resolve())})  # ranks may start elsewhere
    family_named(config.name)
    if not graph.train_mask.any():
        raise ValueError(f"the graph {graph.name} has no training nodes; nothing would be compared")
    cut = partition(with_expander(graph, config.added_degree, 0), "random", min(_PARTS, graph.num_nodes), 0)
    if config.input_kinds:
        cut = replace(cut, inputs=NodeInputs(tuple(make_input(graph, *kind) for kind in config.input_kinds)))
    cases = [case for world_size in worlds for case in _cases(cut, config.layers, world_size)]
    wanted = []
    for index, (what, _) in enumerate(_BATCHES):
        alone = _Case(index, _plan("graph", cut, config.layers, 1), 1, what)
        outcomes = []
        for draw in range(2):
            torch.manual_seed(draw)
            try:
                outcomes.append(_run(solo(), config, cut, alone))
            except Exception as error:
                raise ValueError(f"{config.name} fails on one rank: {type(error).__name__}: {error}") from error
        again = _difference(outcomes[0], outcomes[1:], tolerance)
        if again:
            raise UnequalPlansError(
                f"{config.name} gives something else each time, on one rank, with the same seed and step: {again}; "
                "draw through context.dropout"
            )
        wanted.append(outcomes[0])
    lines = []
    for world_size, group in itertools.groupby(cases, lambda case: case.world_size):
        say(f"comparing {config.name} on {world_size} rank(s) with one rank")
        ran = list(group)
        for case, found in zip(ran, _outcomes(world_size, config, cut, ran), strict=True):
            difference = _difference(wanted[case.batch], found, tolerance)
            if difference:
                lines.append(f"{case.name}: {difference}")
    if lines:
        told = "\n".join(f"  {line}" for line in lines)
        raise UnequalPlansError(
            f"{config.name} differs from one rank under {len(lines)} of {len(cases)} plans:\n{told}"
        )
    return len(cases)


def check_config(config: Config, worlds: str) -> None:
    """`check_any_plan_equals_one_rank` of a config's model and graph. worlds: such as `1,2,3`."""
    sizes = [int(size) if size.isdecimal() else 0 for size in worlds.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"--worlds is {worlds!r}; give numbers of ranks, such as 1,2,3")
    compared = check_any_plan_equals_one_rank(config.model, read_graph(config), worlds=sizes)
    print(f"{config.model.name} equals one rank under all {compared} plans")


def _plan(mode: Any, graph: PartitionedGraph, layers: int, world_size: int, **layout: Any) -> Plan:
    return fixed_plan(mode, np.diff(graph.starts).tolist(), world_size, layers, **layout)


def _cases(graph: PartitionedGraph, layers: int, world_size: int) -> list[_Case]:
    """Every mode with every kind of batch; on one rank the ways to lay micro-batches out."""
    cases = []
    modes = ("graph",) * len(CHECKPOINTING) if world_size == 1 else (*MODES, "mixed")
    for i, (mode, (index, (what, _))) in enumerate(itertools.product(modes, enumerate(_BATCHES))):
        kept = CHECKPOINTING[(i // 2 + i % 2) % len(CHECKPOINTING)]
        waves = 1 if world_size == 1 else None
        plan = _plan(mode, graph, layers, world_size, micro_batches_per_wave=waves, checkpointing=kept)
        name = f"{mode} on {world_size} rank(s), {what}, checkpointing {kept}"
        cases.append(_Case(index, plan, world_size, name))
    return cases


# On a rank ------------------------------------------------------------------------------------------------------------


@dataclass
class _Watched:
    """Keeps the rows after each layer, wherever they are computed."""

    rows: list[dict[int, npt.NDArray[np.float64]]] = field(default_factory=list)

    def watch(self, layers: nn.ModuleList) -> None:
        for layer in layers:
            kept: dict[int, npt.NDArray[np.float64]] = {}
            self.rows.append(kept)

            def hook(_: nn.Module, args: Any, out: Tensor, kept: dict[int, Any] = kept) -> None:
                context: LayerContext = args[1]
                if not context.replaying:
                    kept.update(zip(context.nodes_after.tolist(), out.detach().numpy().copy(), strict=True))

            layer.register_forward_hook(hook)


class _GradientsOnly(TorchEngine):
    """Adds gradients up, and takes no step."""

    gradients: dict[str, npt.NDArray[np.float64]]

    def step(self) -> None:
        self.reduce()
        self.gradients = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy().copy()
            for name, p in self.model.named_parameters()
        }


def _run(world: World, config: ModelConfig, graph: PartitionedGraph, case: _Case) -> _Outcome:
    """One step's outcome on this rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GraphModel(config, *graph.graph.dims)
    engine = _GradientsOnly(model, EngineConfig(name="torch", precision="float64"), world, 1)
    watched = _Watched()
    watched.watch(model.layers)
    timer = PhaseTimer()
    timer.start_step()
    executor = Executor(engine, graph, world, timer, seed=0, num_heads=config.heads, backend="torch")
    homes = np.array(deal(np.diff(graph.starts).tolist(), world.size))
    sampling = SamplingConfig(fanout=_FANOUT)
    batches = BatchPlanner(graph, _BATCHES[case.batch][1], sampling, config.layers, seed=0)
    batch = batches.step(0)
    compiled = Compiler(graph, case.plan, world, config.heads, homes).compile(batch)
    loss = executor.train_step(compiled, case.plan, 0, fixed=batch.fixed).loss
    return _Outcome(loss, engine.gradients, watched.rows)


def _serve(
    rank: int, size: int, meeting: str, config: ModelConfig, graph: PartitionedGraph, cases: Sequence[_Case]
) -> list[_Outcome] | str:
    """A rank's outcomes, or what went wrong in which case."""
    torch.set_num_threads(1)
    world = join_world(timeout_s=_TIMEOUT_S, device="cpu", store=dist.FileStore(meeting, size), ranks=(rank, size))
    outcomes = []
    for case in cases:
        try:
            outcomes.append(_run(world, config, graph, case))
        except Exception as error:
            leave_world()  # peers notice, and do not wait
            return f"{case.name}: {type(error).__name__}: {error}"
    world.barrier()
    leave_world()
    return outcomes


def _outcomes(
    world_size: int, config: ModelConfig, graph: PartitionedGraph, cases: Sequence[_Case]
) -> list[list[_Outcome]]:
    """Of each case, every rank's outcome."""
    if world_size == 1:
        return [[_run(solo(), config, graph, case)] for case in cases]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gtx-check-") as folder:
        pool = ProcessPoolExecutor(world_size, mp_context=context)
        try:
            # A rank waits for the others at its first exchange, so that each lands in a process of its own.
            meeting = str(Path(folder) / "meeting")
            asked = [pool.submit(_serve, r, world_size, meeting, config, graph, cases) for r in range(world_size)]
            found = [future.result() for future in asked]
        except BrokenProcessPool:
            raise ValueError(f"{config.name}: a process of {world_size} died while it trained") from None
        finally:
            pool.shutdown(cancel_futures=True)
    failed = [each for each in found if isinstance(each, str)]
    if failed:
        own = [line for line in failed if "ExchangeError" not in line]  # the others only lost the one that failed
        raise ValueError(f"{config.name} fails under {(own or failed)[0]}")
    return [list(ranks) for ranks in zip(*(each for each in found if not isinstance(each, str)), strict=True)]


# Comparing ------------------------------------------------------------------------------------------------------------


def _difference(want: _Outcome, found: Sequence[_Outcome], tolerance: float) -> str | None:
    """Where the ranks' outcome first leaves that of one rank, in the order in which it is computed."""
    for layer, rows in enumerate(want.rows):
        nodes = np.array(sorted(rows))
        together: dict[int, npt.NDArray[np.float64]] = {}
        for outcome in found:
            together |= outcome.rows[layer]
        if sorted(together) != nodes.tolist():
            missing = set(rows) ^ set(together)
            return f"after layers.{layer} the rows of {len(missing)} node(s) are missing or too many"
        expected = np.stack([rows[node] for node in nodes.tolist()])
        have = np.stack([together[node] for node in nodes.tolist()])
        if have.shape != expected.shape:
            return f"after layers.{layer} rows have {have.shape[1]} columns instead of {expected.shape[1]}"
        off = np.abs(have - expected).max(1) / max(np.abs(expected).max(), np.finfo(float).tiny)
        if not (off <= tolerance).all():
            worst = int(np.nanargmax(np.where(np.isnan(off), np.inf, off)))
            return (
                f"forward, in layers.{layer}: the rows of {int((~(off <= tolerance)).sum())} of {len(nodes)} nodes are "
                f"off, by {off[worst]:.0e} that of node {nodes[worst]}"
            )
    for outcome in found:
        if not abs(outcome.loss - want.loss) <= tolerance * abs(want.loss):
            return f"after the layers: the loss is {outcome.loss:.6g} instead of {want.loss:.6g}"
    wrong = []
    largest = max(float(np.abs(gradient).max(initial=0.0)) for gradient in want.gradients.values())
    for name, gradient in want.gradients.items():
        for outcome in found:
            off_by = float(np.abs(outcome.gradients[name] - gradient).max(initial=0.0)) / max(largest, 1e-300)
            if not off_by <= tolerance:
                wrong.append(f"{name} by {off_by:.0e}")
                break
    return f"backward: rows are right, gradients are off: {', '.join(wrong)}" if wrong else None
