"""Counts the workload of a real graph and batch, by partition, for the scheduler to place.

Not here: what placing it costs (`scheduler/cost.py`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gtx.batches import Batch, BatchPlanner
from gtx.config import Config, ModelConfig
from gtx.engine import DTYPES
from gtx.models import GraphModel, family_named
from gtx.parallel.compiled import CompiledLayer
from gtx.parallel.compiler import Compiler
from gtx.parallel.world import solo
from gtx.partition import PartitionedGraph
from scheduler.plan import fixed_plan
from scheduler.workload import ROW_WORK, LayerWork, ModelShape, Workload


def model_shape(config: ModelConfig, model: GraphModel, graph: PartitionedGraph, bytes_per_element: int) -> ModelShape:
    """What the cost formulas need of a model."""
    return ModelShape(
        kind=family_named(config.name).costs,
        width=config.width,
        ffn_width=config.ffn_width or 2 * config.width,
        heads=config.heads,
        layers=config.layers,
        num_features=graph.graph.num_features,
        num_classes=graph.graph.num_classes,
        parameters=sum(p.numel() for p in model.parameters()),
        bytes_per_element=bytes_per_element,
        extra_inputs=config.encodings.columns + (config.tokens - 1) * graph.graph.num_features,
        global_layers=config.global_layers if config.name == "Polynormer" else 0,
        hops=config.tokens - 1,
    )


def workload_of(config: Config, graph: PartitionedGraph) -> tuple[Workload, ModelShape]:
    """The first step's workload of a config, and its model's shape, without ranks."""
    model = GraphModel(config.model, *graph.graph.dims)
    shape = model_shape(config.model, model, graph, DTYPES[config.engine.precision].itemsize)
    batches = BatchPlanner(graph, config.batch, config.sampling, config.model.layers, config.seed)
    return count_workload(graph, batches.step(0), shape), shape


def count_workload(graph: PartitionedGraph, batch: Batch, shape: ModelShape) -> Workload:
    """Compile the batch as one rank would, micro-batch by micro-batch, and count rows, edges and needs by partition."""
    parts = graph.num_parts
    plan = fixed_plan("graph", [1.0] * parts, 1, shape.layers, micro_batches_per_wave=1)
    compiler = Compiler(graph, plan, solo(), shape.heads, np.zeros(parts, dtype=np.int64))
    node_of = np.empty(graph.graph.num_nodes, dtype=np.int64)
    node_of[np.asarray(graph.original_id)] = np.arange(graph.graph.num_nodes)
    part_of = np.asarray(graph.part_of)
    counted: dict[int, LayerWork] = {}  # layers that are one object are counted once

    def count(layer: CompiledLayer) -> LayerWork:
        key = id(layer.edges)
        if key not in counted:
            counted[key] = _count(layer, node_of, part_of, parts)
        return counted[key]

    waves = compiler.compile(batch).waves
    layers = tuple(tuple(count(layer) for layer in wave.layers) for wave in waves)
    return Workload(shape, layers, batch.fixed, tuple(partition_work(graph)))


def partition_work(graph: PartitionedGraph) -> list[float]:
    """Relative work of each partition `[K]`, by which partitions are dealt to ranks."""
    rows = np.diff(graph.starts)
    return [float(r * ROW_WORK + e) for r, e in zip(rows, graph.facts.edges, strict=True)]


def _count(
    layer: CompiledLayer, node_of: npt.NDArray[np.int64], part_of: npt.NDArray[np.int32], parts: int
) -> LayerWork:
    rows = node_of[layer.sources.numpy()]
    after = rows if layer.destinations is None else rows[layer.destinations.numpy()]
    src_part, dst_part = part_of[rows].astype(np.int64), part_of[after].astype(np.int64)
    edges: npt.NDArray[np.float64] = np.zeros(parts)
    empty = np.empty(0, dtype=np.int64)
    needs = (empty, empty, np.empty(0))
    if layer.edges:
        (slot,) = layer.edges
        (block,) = layer.kv.sends or (None,)
        columns = np.arange(len(rows)) if block is None or block.rows is None else block.rows.numpy()
        degrees = np.diff(slot.pattern.indptr.numpy())
        edges = np.bincount(dst_part, weights=degrees, minlength=parts).astype(np.float64)
        source = columns[slot.pattern.indices.numpy()]
        pairs = np.unique(source * parts + np.repeat(dst_part, degrees))  # distinct (source row, destination part)
        of, to = src_part[pairs // parts], pairs % parts
        cut = of != to
        between, counts = np.unique(of[cut] * parts + to[cut], return_counts=True)
        needs = (between // parts, between % parts, counts.astype(np.float64))
    return LayerWork(
        np.bincount(src_part, minlength=parts).astype(np.float64),
        np.bincount(dst_part, minlength=parts).astype(np.float64),
        edges,
        *needs,
    )
