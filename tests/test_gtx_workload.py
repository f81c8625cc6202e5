"""What the scheduler is told about a step is what ranks then do: rows and edges exactly, bytes closely."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

from gtx.batches import BatchPlanner
from gtx.calibrate import calibrate
from gtx.config import BatchConfig, ModelConfig, SamplingConfig, parse_config
from gtx.datasets import load_graph
from gtx.models import GraphModel
from gtx.parallel.compiler import Compiler
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph, partition
from gtx.workload import count_workload, model_shape, partition_work
from scheduler.cost import work_of
from scheduler.placing import place
from scheduler.plan import deal, fixed_plan
from scheduler.workload import ModelShape

LAYERS, HEADS, WIDTH = 3, 4, 16
MODES = ("graph", "model", "pipeline", "data", "mixed")
KINDS: dict[str, BatchConfig] = {
    "full": BatchConfig(),
    "cluster": BatchConfig(kind="cluster", parts=4, micro_batches=3),
    "neighbor": BatchConfig(kind="neighbor", seeds=40, micro_batches=4),
}


def cut_graph() -> PartitionedGraph:
    options = {"num_nodes": 2000, "num_edges": 24_000, "num_features": 8, "num_blocks": 12}
    graph = load_graph("sbm", root=None, seed=0, undirected=True, self_loops="add", options=options)
    return partition(graph, "metis", 12, 0)


def shape_of(graph: PartitionedGraph) -> ModelShape:
    config = ModelConfig(width=WIDTH, heads=HEADS, layers=LAYERS)
    return model_shape(config, GraphModel(config, 8, graph.graph.num_classes), graph, 4)


def compiled_counts(world: World, kind: str) -> list[tuple[float, ...]]:
    """Rows, edges and bytes sent of this rank, forward, as compiled: one entry a mode."""
    graph = cut_graph()
    batch = BatchPlanner(graph, KINDS[kind], SamplingConfig(fanout=6), LAYERS, 0).step(0)
    found = []
    for mode in MODES:
        plan = fixed_plan(mode, partition_work(graph), world.size, LAYERS)  # type: ignore[arg-type]
        homes = np.array(deal(partition_work(graph), world.size))
        compiled = Compiler(graph, plan, world, HEADS, homes).compile(batch)
        sent = {"kv": 0.0, "q": 0.0, "move": 0.0}
        for layer in (layer for wave in compiled.waves for layer in wave.layers):
            for route, tensors in ((layer.kv, 2), (layer.q, 1), (layer.move, 1)):
                for block in () if route is None else route.sends:
                    share = 1.0 if block.heads is None else (block.heads[1] - block.heads[0]) / HEADS
                    sent[route.kind] += (block.peer != world.rank) * block.num_rows * share * tensors * WIDTH * 4
        found.append((compiled.rows, compiled.edges, sent["kv"] + sent["q"], sent["move"]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_placed_work_is_what_ranks_compile(kind: str) -> None:
    graph = cut_graph()
    batch = BatchPlanner(graph, KINDS[kind], SamplingConfig(fanout=6), LAYERS, 0).step(0)
    workload = count_workload(graph, batch, shape_of(graph))
    for size in (2, 4):
        real = run_ranks(compiled_counts, size, kind)
        for i, mode in enumerate(MODES):
            placed = place(fixed_plan(mode, partition_work(graph), size, LAYERS), workload)  # type: ignore[arg-type]
            passed = work_of(placed, workload.model)
            rows, edges, sent, moved = (np.array([rank[i][j] for rank in real]) for j in range(4))
            # A group's rows are split evenly by id, and which of them a sample reaches is chance.
            slack = 0.05 if mode in ("model", "mixed") else 1e-9
            assert placed.src_rows.sum((0, 1)) == pytest.approx(rows, rel=slack), (kind, size, mode)
            assert placed.edges.sum((0, 1)) == pytest.approx(edges, rel=slack), (kind, size, mode)
            assert passed.sent.sum((0, 1)).sum(1) == pytest.approx(sent, rel=0.2, abs=1), (kind, size, mode)
            assert passed.moved.sum((0, 1)).sum(1) == pytest.approx(moved, rel=0.05, abs=1), (kind, size, mode)
            assert passed.sent.sum() == pytest.approx(sent.sum(), rel=0.2, abs=1)


def calibrated(world: World) -> Any:
    config = parse_config({"model": {"width": WIDTH, "heads": HEADS, "layers": LAYERS}})
    return calibrate(config, world, shape_of(cut_graph()), "a test")


def test_all_ranks_agree_on_what_was_measured() -> None:
    topologies = run_ranks(calibrated, 2)
    assert topologies[0] == topologies[1]
    assert topologies[0].world_size == 2
    assert {device.host for device in topologies[0].devices} == {0}
    assert "a test" in topologies[0].made
