"""Small graphs and runs that several tests share: every awkward thing at once. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from gtx.batches import BatchPlanner
from gtx.config import Config, parse_config
from gtx.engine import TorchEngine
from gtx.graphs import Graph, from_edges
from gtx.models import GraphModel
from gtx.node_inputs import NodeInputs, make_input
from gtx.parallel.compiler import CompiledBatch, Compiler
from gtx.parallel.executor import Executor
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph, partition
from monitor import PhaseTimer
from scheduler.plan import Plan, deal, fixed_plan


def awkward_graph(num_nodes: int = 60, num_edges: int = 300, seed: int = 0) -> Graph:
    """Directed, with a hub, duplicate edges, self loops, isolated nodes (also as targets) and unlabelled nodes."""
    rng = np.random.default_rng(seed)
    src = rng.integers(0, num_nodes - 4, num_edges)
    dst = rng.integers(0, num_nodes - 4, num_edges)
    dst[: num_edges // 4] = 3  # a hub
    src, dst = np.concatenate([src, src[:9], [5, 6]]), np.concatenate([dst, dst[:9], [5, 6]])
    labels = rng.integers(0, 3, num_nodes)
    labels[7] = -1
    kind = rng.integers(0, 3, num_nodes)
    kind[-4:] = 0  # isolated targets
    train, val, test = kind == 0, kind == 1, kind == 2
    for mask in (train, val, test):
        mask[7] = False
    features = rng.standard_normal((num_nodes, 5)).astype(np.float32)
    return from_edges("awkward", src, dst, num_nodes, features, labels, train, val, test, num_classes=3)


def small_graph(edges: Sequence[tuple[int, int]], num_nodes: int, train: Sequence[int], seed: int = 0) -> Graph:
    """Nodes 0, 1, ... with the given edges `(source, destination)`, three classes and four random features."""
    rng = np.random.default_rng(seed)
    mask = np.isin(np.arange(num_nodes), train)
    src, dst = (np.array([edge[i] for edge in edges], dtype=np.int64) for i in (0, 1))
    features = rng.standard_normal((num_nodes, 4)).astype(np.float32)
    labels = rng.integers(0, 3, num_nodes)
    return from_edges(
        "small", src, dst, num_nodes, features, labels, mask, np.zeros_like(mask), np.zeros_like(mask), num_classes=3
    )


def trained_on(graph: PartitionedGraph, nodes: Sequence[int]) -> PartitionedGraph:
    """The same graph with these nodes, in partition order, as its training split."""
    mask = np.isin(np.arange(graph.graph.num_nodes), nodes)
    labels = np.where(mask, np.maximum(graph.graph.labels, 0), graph.graph.labels)
    return replace(graph, graph=replace(graph.graph, train_mask=mask, labels=labels))


def partitioned(graph: Graph, parts: int = 6, method: str = "random") -> PartitionedGraph:
    return partition(graph, method, parts, 0)  # type: ignore[arg-type]


@dataclass
class Rig:
    """Everything one rank needs to run steps."""

    config: Config
    graph: PartitionedGraph
    world: World
    plan: Plan
    engine: TorchEngine
    executor: Executor
    compiler: Compiler
    batches: BatchPlanner
    timer: PhaseTimer = field(default_factory=PhaseTimer)


def even_homes(graph: PartitionedGraph, world_size: int) -> np.ndarray:
    """The rank `[K]` that stores the features of each partition: about equally many rows a rank."""
    return np.array(deal(np.diff(graph.starts).tolist(), world_size))


def plan_of(mode: Any, graph: PartitionedGraph, world_size: int, num_layers: int, **layout: Any) -> Plan:
    """`fixed_plan` balanced by rows, so that in graph mode every partition runs where its features are."""
    return fixed_plan(mode, np.diff(graph.starts).tolist(), world_size, num_layers, **layout)


def inputs_of(graph: PartitionedGraph, kinds: Sequence[tuple[str, int]]) -> NodeInputs:
    """What a model takes beside the features, rows in original ids."""
    found = []
    for kind, size in kinds:
        made = make_input(graph.graph, kind, size)
        found.append(replace(made, array=made.array[np.argsort(graph.original_id)]))
    return NodeInputs(tuple(found))


def rig(
    world: World, graph: PartitionedGraph, plan: Plan, settings: dict[str, Any], homes: np.ndarray | None = None
) -> Rig:
    """Build a float64 torch run of `settings` (config sections) under `plan` on this rank."""
    engine_settings = {"name": "torch", "precision": "float64", **settings.get("engine", {})}
    config = parse_config({**settings, "engine": engine_settings})
    torch.manual_seed(config.seed)
    model = GraphModel(config.model, *graph.graph.dims)
    engine = TorchEngine(model, config.engine, world, 10)
    timer = PhaseTimer()
    timer.start_step()
    executor = Executor(
        engine,
        graph,
        world,
        timer,
        seed=config.seed,
        num_heads=config.model.heads,
        backend=config.model.backend,
    )
    if config.model.input_kinds and graph.inputs is None:
        executor.graph = replace(graph, inputs=inputs_of(graph, config.model.input_kinds))
    if homes is None:
        homes = even_homes(graph, world.size)
    compiler = Compiler(graph, plan, world, config.model.heads, homes)
    batches = BatchPlanner(graph, config.batch, config.sampling, config.model.layers, config.seed)
    return Rig(config, graph, world, plan, engine, executor, compiler, batches, timer)


def loss_and_gradient(run: Rig, step: int = 0) -> tuple[float, np.ndarray, CompiledBatch]:
    """The loss and the summed gradient of one step, without taking it."""
    batch = run.batches.step(step)
    compiled = run.compiler.compile(batch)
    found: list[np.ndarray] = []

    def keep_gradient() -> None:
        run.engine.reduce()
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in run.engine.parameters]
        found.append(torch.cat([g.reshape(-1) for g in grads]).numpy().copy())
        run.engine.optimizer.zero_grad(set_to_none=True)

    run.engine.step = keep_gradient  # type: ignore[method-assign]
    result = run.executor.train_step(compiled, run.plan, step, fixed=batch.fixed)
    return result.loss, found[0], compiled
