"""Writes a run's model as one file that torch alone can load and run, on graphs of any size.

Not here: the module that is written (`plain.py`), and what a model says of its own graph (`predict.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gtx.checkpoint import FOLDER, Progress, read_checkpoint
from gtx.config import Config, load_config
from gtx.engine_state import check_names, fill
from gtx.graphs import training_statistics
from gtx.models import GraphModel, family_named
from gtx.plain import PlainModel
from gtx.session import read_graph

SUFFIX = ".pt2"
FACTS = "gtx.json"  # in the file, for `torch.export.load(path, extra_files={FACTS: ""})`


def run_export(run_dir: Path, overrides: Sequence[str], which: str, to: Path) -> None:
    """Export a run's model, and say how to use the file."""
    if to.suffix != SUFFIX:
        raise ValueError(f"--to is {to}; give a file that ends in {SUFFIX}, as torch.export writes it")
    if not to.parent.is_dir():
        raise ValueError(f"--to is {to}, and there is no folder {to.parent}; make it, or give another file")
    config = load_config(run_dir / "config.yaml", overrides)
    made = plain_model(config, run_dir / FOLDER / f"{which}.safetensors")
    facts = export(made, config, to)
    print(f"{config.model.name} after {made.step} steps: {to}, {to.stat().st_size / 2**20:.1f} MiB")
    for name in ("x", "edge_index", "returns"):
        print(f"{name}: {facts[name]}")
    print(f"torch.export.load({str(to)!r}).module()(x, edge_index)", flush=True)


@dataclass(frozen=True)
class Made:
    """A plain model in evaluation with the weights of a checkpoint. columns: that it takes. classes: their names."""

    model: PlainModel
    columns: int
    classes: tuple[str, ...]
    step: int


def plain_model(config: Config, checkpoint: Path) -> Made:
    """The model of a run as a plain module on the CPU, float32, with the checkpoint's weights, by name.

    Features are taken as `data` gives them before `data.standardize`, which is part of the module.
    Raises ValueError with one line for a checkpoint that is missing, damaged or of another model, for
    `sampling.method random_walk`, whose lists are no edges of the graph, and for models that take more than features,
    encodings and edges: an edge bias, an expander, features of hops.
    """
    model_config = config.model
    if config.sampling.method == "random_walk" and family_named(model_config.name).uses_edges:
        raise ValueError(
            "this run attends to the neighbour lists of sampling.method random_walk, which an exported model cannot "
            "make of edges; train with another sampling.method to export"
        )
    for wanted, what in (
        (model_config.edge_bias, "edge features as a bias (model.edge_bias)"),
        (model_config.added_degree > 0, "an expander's edges, which are made for one graph"),
        (model_config.tokens > 1, "features of its hops, which are made for one graph"),
    ):
        if wanted:
            raise ValueError(f"{model_config.name} takes {what}; an exported model takes features and edges alone")
    progress, state = read_checkpoint(checkpoint)
    num_features, num_classes = (_count(progress, checkpoint, key) for key in ("num_features", "num_classes"))
    model = GraphModel(model_config, num_features, num_classes)
    try:
        check_names(model, state)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--resume: ")) from None
    fill(model, state)
    classes: tuple[str, ...] = tuple(map(str, range(num_classes)))
    scaling = None
    if config.data.name == "table" or config.data.standardize:
        raw = read_graph(config.model_copy(update={"data": config.data.model_copy(update={"standardize": False})}))
        classes = tuple(map(str, raw.names.classes or classes))
        if config.data.standardize:
            mean, deviation = training_statistics(raw)
            scaling = (torch.from_numpy(mean), torch.from_numpy(deviation))
    plain = PlainModel(model.float(), model_config.heads, scaling).eval()
    return Made(plain, num_features + model_config.encodings.columns, classes, progress.step)


def _count(progress: Progress, checkpoint: Path, key: str) -> int:
    if key not in progress.graph:
        raise ValueError(f"the checkpoint {checkpoint} does not tell {key} of its graph; train anew to export")
    return int(progress.graph[key])


def export(made: Made, config: Config, to: Path) -> dict[str, Any]:
    """Trace the model for any number of nodes and edges, and write it whole or not at all. Returns what it takes.

    Raises ValueError with one line if the model cannot be traced or the file cannot be written.
    """
    generator = torch.Generator().manual_seed(0)
    example = (torch.randn(5, made.columns, generator=generator), torch.randint(0, 5, (2, 9), generator=generator))
    nodes, edges = torch.export.Dim("nodes", min=1), torch.export.Dim("edges", min=0)
    try:
        program = torch.export.export(made.model, example, dynamic_shapes={"x": {0: nodes}, "edge_index": {1: edges}})
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{config.model.name} cannot be traced by torch.export ({reason}); use gtx.export.plain_model in Python"
        ) from error
    facts = describe(made, config)
    aside = to.with_name(f".{to.stem}.writing-{os.getpid()}{SUFFIX}")
    try:
        torch.export.save(program, aside, extra_files={FACTS: json.dumps(facts)})
        os.replace(aside, to)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(f"cannot write {to}: {reason}; give another --to") from None
    finally:
        aside.unlink(missing_ok=True)
    return facts


def describe(made: Made, config: Config) -> dict[str, Any]:
    """What an exported model takes and gives, in words; kept in the file."""
    data, kinds = config.data, config.model.encodings.kinds
    columns = f"{made.model.model.num_features} features"
    columns += " before data.standardize, which the model does itself" if data.standardize else ""
    columns += "".join(f", then {number} columns of {kind}" for kind, number in kinds)
    rewrites = [f"self loops {data.self_loops}"]
    rewrites += ["missing reverses added"] if data.undirected else []
    rewrites += ["duplicates dropped"] if data.dedupe else []
    return {
        "model": config.model.model_dump(mode="json"),
        "step": made.step,
        "x": f"float32 [nodes, {made.columns}]: {columns}",
        "edge_index": f"int64 [2, edges], sources and destinations; trained with: {', '.join(rewrites)}",
        "returns": f"float32 [nodes, {len(made.classes)}]: logits of {', '.join(made.classes[:10])}"
        + (", ..." if len(made.classes) > 10 else ""),
        "classes": list(made.classes),
    }
