"""After training: what a run's model says of every node, as a Parquet file.

Not here: the forward pass (`parallel/executor.py`, in chunks `layerwise.py`), scores while a run lasts (`loop.py`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from gtx.batches import Batch, BatchPlanner
from gtx.checkpoint import FOLDER
from gtx.config import Config, load_config
from gtx.engine import DTYPES, make_engine
from gtx.graphs import Graph
from gtx.layerwise import Chunks, predict_by_layer
from gtx.models import GraphModel
from gtx.parallel.compiler import Compiler
from gtx.parallel.executor import Executor
from gtx.parallel.prefetch import Prefetcher
from gtx.session import Say, attention_backend, joined, load_partitioned, share_checkpoint, silent
from gtx.workload import partition_work
from monitor import PhaseTimer
from scheduler.plan import deal, fixed_plan

OUT = "predictions.parquet"
CHUNK_ROWS = 65_536  # at 50 in-edges each, some 100 MiB of edges


def run_predict(
    run_dir: Path, overrides: list[str], which: str, out: Path | None, chunk_rows: int = CHUNK_ROWS
) -> None:
    """Predict, and say where the results are. Rank 0 speaks and writes."""
    if chunk_rows < 0:
        raise ValueError(f"--chunk-rows is {chunk_rows}; give rows of a chunk, or 0 for the whole graph at once")
    config = load_config(run_dir / "config.yaml", overrides)
    checkpoint = run_dir / FOLDER / f"{which}.safetensors"
    frame = predict(config, checkpoint, lambda line: print(line, flush=True), chunk_rows)
    if frame is not None:
        out = out or run_dir / OUT
        write_frame(frame, out)
        print(f"{len(frame):,} nodes: {out}", flush=True)


def predict(config: Config, checkpoint: Path, say: Say, chunk_rows: int = CHUNK_ROWS) -> pd.DataFrame | None:
    """What the model of a checkpoint says of every node over its full neighbourhood. On rank 0; None elsewhere.

    The columns: `id` as in the source, `split` (train, val, test or empty), `label` where known, `predicted`,
    `probability_<class>`, and `embedding`, what the classifier was given, as a list of the model's width (for models
    without a classifier of their own: the logits). The rows are those of the source.

    chunk_rows: where a rank has more rows than these, layer by layer in chunks of as many, see `layerwise.py`; 0: all
    layers of the whole graph at once.

    Raises ValueError with one line for a checkpoint that is missing, damaged or of another model, or a model that
    cannot run in chunks.
    """
    with joined(config) as world:
        loud = say if world.rank == 0 else silent
        progress, state = share_checkpoint(world, checkpoint)
        graph = load_partitioned(config, world, inputs=True).partitioned
        plain = config.engine.model_copy(
            update={"name": "torch", "zero_stage": 0, "offload_optimizer": "none", "precision": "float32"}
        )
        backend = attention_backend(config, world, DTYPES[plain.precision], loud, graph)
        torch.manual_seed(config.seed)
        model = GraphModel(config.model, *graph.graph.dims)
        engine = make_engine(model, plain, world, 1, loud, state)
        executor = Executor(
            engine, graph, world, PhaseTimer(), seed=config.seed, num_heads=config.model.heads, backend=backend
        )
        batches = BatchPlanner(graph, config.batch, config.sampling, config.model.layers, config.seed)
        evaluation = _of_all_nodes(batches.evaluation(progress.step))
        work = partition_work(graph)
        one_layer = fixed_plan("graph", work, world.size, 1)
        chunks = Chunks.of(graph, one_layer, chunk_rows or graph.graph.num_nodes)
        loud(
            f"{config.model.name} after {progress.step} steps, on {world.size} rank(s)"
            + (f", layer by layer in {len(chunks)} chunks of {chunk_rows:,} rows a rank" if len(chunks) > 1 else "")
        )
        if len(chunks) > 1:
            runtime = executor.runtime(one_layer, progress.step, training=False)
            predicted = predict_by_layer(model, graph, world, runtime, one_layer, evaluation, chunk_rows)
            return None if predicted is None else _frame(graph.graph, graph.original_id, *predicted)
        plan = fixed_plan("graph", work, world.size, config.model.layers)
        prefetcher = Prefetcher(
            Compiler(graph, plan, world, config.model.heads, np.array(deal(work, world.size))), batches
        )
        try:
            compiled = prefetcher.evaluation(evaluation)
            nodes, logits, hidden = executor.embed(compiled, plan, progress.step, hidden=True)
        finally:
            prefetcher.close()
        return _frame(graph.graph, graph.original_id, nodes, logits, hidden) if world.rank == 0 else None


def _of_all_nodes(evaluation: Batch) -> Batch:
    """An evaluation's batch with every node as a target, labelled or not."""
    (whole,) = evaluation.micro_batches
    return replace(evaluation, micro_batches=(replace(whole, targets=whole.nodes),))


def _frame(
    graph: Graph,
    original_id: npt.NDArray[np.int64],
    nodes: npt.NDArray[np.int64],
    logits: npt.NDArray[np.floating[Any]],
    hidden: npt.NDArray[np.floating[Any]],
) -> pd.DataFrame:
    """The rows in the source's order; nodes are in the partition's."""
    order = np.argsort(original_id[nodes], kind="stable")
    nodes, logits, hidden = nodes[order], logits[order].astype(np.float64), hidden[order].astype(np.float32)
    classes = np.array([str(name) for name in graph.names.classes or range(graph.num_classes)], dtype=object)
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    split = np.full(len(nodes), "", dtype=object)
    for name, mask in (("train", graph.train_mask), ("val", graph.val_mask), ("test", graph.test_mask)):
        split[np.asarray(mask)[nodes]] = name
    labels = np.asarray(graph.labels)[nodes]
    label = np.where(labels >= 0, classes[labels], np.array(None))
    ids = graph.node_ids[nodes]
    mixed = ids.dtype == object and len({type(value) for value in ids}) > 1
    columns = {
        "id": [str(value) for value in ids] if mixed else ids,
        "split": split,
        "label": label,
        "predicted": classes[logits.argmax(1)],
    }
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    columns |= {f"probability_{name}": probabilities[:, c] for c, name in enumerate(classes)}
    return pd.DataFrame({**columns, "embedding": list(hidden)})


def write_frame(frame: pd.DataFrame, out: Path) -> None:
    """Write Parquet in the place of `out`, whole or not at all. Raises ValueError if it cannot be written."""
    aside = out.with_name(f".{out.name}.writing-{os.getpid()}")
    try:
        frame.to_parquet(aside, index=False)
        os.replace(aside, out)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}; give another --out") from None
    finally:
        aside.unlink(missing_ok=True)
