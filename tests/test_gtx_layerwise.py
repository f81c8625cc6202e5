"""Prediction layer by layer in chunks equals the whole graph at once, on any number of ranks, within its memory.

Not here: the Parquet file (`test_gtx_resume.py`) and the forward at once (`test_gtx_parallel_equal.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cases import awkward_graph, partitioned, plan_of, rig
from ranks import run_ranks
from torch import Tensor, nn

import launch
from gtx.layerwise import Chunks, UnchunkableError, predict_by_layer
from gtx.neighbor_lists import load_or_walk
from gtx.parallel.compiler import Compiler
from gtx.parallel.context import LayerContext
from gtx.parallel.world import World, solo
from gtx.partition import PartitionedGraph
from gtx.predict import _of_all_nodes
from scheduler.plan import fixed_plan

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent
MODELS = ("GT", "GPS", "GCN", "SAGE", "GAT", "MLP", "SGFormer", "Polynormer", "Exphormer")


class SumsTwice(nn.Module):
    """Whitens rows: a mean over all of them, then a variance that depends on it; then a mean over edges."""

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        counts = context.counts(x).to(x.dtype)[:, None]
        centred = x - context.spread(context.micro_batch_sum(x) / counts, x)
        variance = context.micro_batch_sum(centred.square()) / counts
        white = centred / context.spread(variance + 1e-3, x).sqrt()
        return context.destinations(x) + context.aggregate(white, "mean")


class SumsWhatItGathered(nn.Module):
    """A mean over all rows of a mean over edges."""

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        mean = context.aggregate(x, "mean")
        total = context.micro_batch_sum(mean) / context.counts(mean).to(x.dtype)[:, None]
        return context.destinations(x) + context.spread(total, mean)


def settings_of(model: str) -> dict[str, Any]:
    return {"model": {"name": model, "width": 6, "heads": 3, "layers": 3, "dropout": 0.3, "backend": "torch"}}


def both(
    world: World,
    graph: PartitionedGraph,
    settings: dict[str, Any],
    chunk_rows: int,
    layer: type[nn.Module] | None = None,
) -> tuple[Any, Any]:
    """(nodes, logits, hidden) of the whole graph at once and of chunks, on this rank."""
    layers = settings["model"]["layers"]
    run = rig(world, graph, plan_of("graph", graph, world.size, layers), settings)
    model = run.engine.model
    if layer is not None:
        model.layers[1] = layer()
    for norm in model.norms:  # as after training
        generator = torch.Generator().manual_seed(norm.number)
        norm.running_mean.copy_(torch.randn(norm.running_mean.shape, generator=generator))
        norm.running_var.copy_(torch.rand(norm.running_var.shape, generator=generator) + 0.5)
    batch = _of_all_nodes(run.batches.evaluation(3))
    whole = run.executor.embed(run.compiler.compile(batch), run.plan, 3, hidden=True)
    one_layer = plan_of("graph", graph, world.size, 1)
    runtime = run.executor.runtime(one_layer, 3, training=False)
    return whole, predict_by_layer(model, graph, world, runtime, one_layer, batch, chunk_rows)


def assert_equal(whole: Any, chunked: Any, what: str) -> None:
    nodes, logits, hidden = chunked
    np.testing.assert_array_equal(nodes, whole[0], err_msg=what)
    assert nodes.tolist() == list(range(60)), "every node, also those without a label and without an edge"
    np.testing.assert_allclose(logits, whole[1], rtol=2e-6, atol=2e-6, err_msg=what)
    np.testing.assert_allclose(hidden, whole[2], rtol=2e-6, atol=2e-6, err_msg=what)


def compare(world: World) -> None:
    graph = partitioned(awkward_graph())
    for model in MODELS:
        for chunk_rows in (7, 16):
            whole, chunked = both(world, graph, settings_of(model), chunk_rows)
            assert (chunked is None) == (world.rank != 0)
            if chunked is not None:
                assert_equal(whole, chunked, f"{model}, chunks of {chunk_rows}")
    whole, chunked = both(world, graph, settings_of("GT"), 7, SumsTwice)
    if chunked is not None:
        assert_equal(whole, chunked, "two sums, the second of the first")
    with pytest.raises(UnchunkableError, match="layer 1 .SumsWhatItGathered. sums over all rows .* --chunk-rows 0"):
        both(world, graph, settings_of("GT"), 7, SumsWhatItGathered)


@pytest.mark.parametrize("size", [2, 3])
def test_chunks_equal_the_whole_graph_on_ranks(size: int) -> None:
    run_ranks(compare, size)


def test_chunks_equal_the_whole_graph_on_one_rank() -> None:
    compare(solo())


def test_a_single_row_a_chunk_and_more_rows_than_there_are(tmp_path: Path) -> None:
    graph = partitioned(awkward_graph())
    for chunk_rows in (1, 1000):
        for model in ("GT", "GPS"):
            assert_equal(*both(solo(), graph, settings_of(model), chunk_rows), f"{model}, {chunk_rows}")


def test_neighbour_lists_are_attended_in_chunks_too(tmp_path: Path) -> None:
    graph = partitioned(awkward_graph())
    graph = replace(graph, lists=load_or_walk(graph, 3, 16, 0.3, 0, tmp_path))
    settings = {**settings_of("GT"), "sampling": {"method": "random_walk", "fanout": 3}}
    assert_equal(*both(solo(), graph, settings, 7), "lists")


def test_memory_holds_the_edges_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled at a time is a chunk of one layer: never more edges than the chunk with most of them has."""
    graph = partitioned(awkward_graph())
    compiled: list[tuple[int, int]] = []
    compile_ = Compiler.compile

    def watched(self: Compiler, batch: Any) -> Any:
        made = compile_(self, batch)
        (wave,) = made.waves
        edges = sum(edges.pattern.num_edges for edges in wave.layers[0].edges)
        compiled.append((sum(len(m.nodes) for m in batch.micro_batches), edges))
        assert len(wave.layers) == 1 or len(compiled) == 1  # the first is the whole graph, to compare with
        return made

    monkeypatch.setattr(Compiler, "compile", watched)
    both(solo(), graph, settings_of("GT"), 10)
    degrees = graph.graph.in_degrees
    most = max(int(degrees[start : start + 10].sum()) for start in range(0, 60, 10))
    assert len(compiled) == 1 + 3 * 6 and compiled[0][0] == 60
    assert all(rows == 10 and edges <= most for rows, edges in compiled[1:])
    assert sum(edges for _, edges in compiled[1:]) == 3 * graph.graph.num_edges, "each edge once a layer"


def test_chunks_share_all_rows_out_once() -> None:
    graph = partitioned(awkward_graph())
    chunks = Chunks.of(graph, fixed_plan("graph", np.diff(graph.starts).tolist(), 3, 1), 8)
    assert np.concatenate([chunks.nodes(chunk) for chunk in chunks]).size == 60
    assert sorted(np.concatenate(list(chunks.rows)).tolist()) == list(range(60))


def test_predict_in_chunks_writes_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["engine.name=torch", "engine.zero_stage=0", "engine.threads=1", "monitor.progress=false"]
    settings += ["train.steps=3", "model.width=16", "model.name=GPS", f"partition.cache={tmp_path / 'cut'}"]
    run_dir = tmp_path / "run"
    assert launch.main(["train", str(ROOT / "configs/digits_gt.yaml"), *settings, "--run-dir", str(run_dir)]) == 0
    frames = []
    for rows in ("0", "500"):
        assert launch.main(["predict", str(run_dir), "--chunk-rows", rows]) == 0
        frames.append(pd.read_parquet(run_dir / "predictions.parquet"))
    assert "layer by layer in 4 chunks of 500 rows a rank" in capsys.readouterr().out
    whole, chunked = frames
    for column in ("id", "split", "label", "predicted"):
        assert whole[column].tolist() == chunked[column].tolist(), column
    for column in whole.filter(like="probability_"):
        np.testing.assert_allclose(whole[column], chunked[column], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.stack(whole.embedding), np.stack(chunked.embedding), rtol=1e-4, atol=1e-4)
