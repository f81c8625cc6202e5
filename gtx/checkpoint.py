"""Checkpoints: what a run needs to go on, in one file by parameter name, whatever the plan, ZeRO stage or world size.

A file is safetensors: full weights, running statistics and optimizer moments, with the rest as JSON in its header. It
is written aside, flushed and renamed, so that a run cut off while it writes leaves the one before whole. No random
state is kept: every draw is keyed by seed, step and place. Not here: how an engine gathers and takes its state
(`engine.py`), and when one is written (`loop.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT, VERSION = "gtx checkpoint", 1
FOLDER, LATEST, BEST = "checkpoints", "latest.safetensors", "best.safetensors"
_HEADER = "gtx"
_MUST_AGREE = ("seed", "model.name", "model.layers", "model.width", "model.heads", "engine.optimizer")
_MAY_DIFFER = (
    *("run", "name", "plan", "scheduler", "monitor", "train", "data.root", "model.backend", "partition.cache"),
    *("engine.name", "engine.zero_stage", "engine.offload_optimizer", "engine.deepspeed"),
    *("engine.device", "engine.threads", "engine.timeout_s"),
)


@dataclass(frozen=True)
class EngineState:
    """What an engine knows, in full, by parameter name, on the CPU.

    weights: parameters as the optimizer keeps them, in at least float32. buffers: running statistics.
    moments: per kind (`exp_avg`, `exp_avg_sq`, `momentum_buffer`) a tensor of each parameter's shape.
    optimizer_steps: updates so far, which the learning rate and the bias correction of Adam count.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    optimizer_steps: int


@dataclass(frozen=True)
class Progress:
    """What a run has seen before its step `step`.

    config: of the run, as `Config.as_dict`. graph: the graph's summary. fingerprint: of graph and partition.
    """

    step: int
    world_size: int
    config: Mapping[str, Any]
    graph: Mapping[str, Any]
    fingerprint: str
    losses: Sequence[float] = field(default_factory=list)
    evaluations: Sequence[Mapping[str, Any]] = field(default_factory=list)


def write_checkpoint(path: Path, progress: Progress, state: EngineState) -> None:
    """Write a checkpoint in the place of `path`: whole, or what was there before stays."""
    tensors = {f"weights/{name}": tensor for name, tensor in state.weights.items()}
    tensors |= {f"buffers/{name}": tensor for name, tensor in state.buffers.items()}
    for kind, by_name in state.moments.items():
        tensors |= {f"{kind}/{name}": tensor for name, tensor in by_name.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": _digest(tensors),
        "optimizer_steps": state.optimizer_steps,
        **{name: getattr(progress, name) for name in Progress.__dataclass_fields__},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(save(tensors, metadata={_HEADER: json.dumps(header)}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name as well
    finally:
        os.close(folder)


def find_checkpoint(place: Path) -> Path:
    """The file that `place` means: a checkpoint, or the latest one of a run folder.

    Raises ValueError with one line if there is none.
    """
    if place.is_file():
        return place
    latest = place / FOLDER / LATEST
    if latest.is_file():
        return latest
    if not place.exists():
        raise ValueError(f"there is no checkpoint {place}; give a run folder that holds {FOLDER}/{LATEST}")
    raise ValueError(
        f"the folder {place} holds no {FOLDER}/{LATEST}; give that of a run that reached its first checkpoint (see "
        "train.checkpoint_every)"
    )


def read_checkpoint(path: Path) -> tuple[Progress, EngineState]:
    """Read a checkpoint whole. Raises ValueError with one line if it is damaged or not one of gtx's."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            if header is None:
                raise ValueError("it is a safetensors file of another program")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        data = json.loads(header)
        if data.pop("format") != FORMAT:
            raise ValueError("it is a safetensors file of another program")
        if (version := data.pop("version")) != VERSION:
            raise ValueError(f"its format is version {version!r}, this program reads version {VERSION}")
        if data.pop("sha256") != _digest(tensors):
            raise ValueError("its content does not fit its checksum")
        groups: dict[str, dict[str, Tensor]] = {"weights": {}, "buffers": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            groups.setdefault(kind, {})[name] = tensor
        state = EngineState(groups.pop("weights"), groups.pop("buffers"), groups, int(data.pop("optimizer_steps")))
        return Progress(**data), state
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(
            f"the checkpoint {path} cannot be resumed: {reason}; give another one, such as {BEST}, or start anew"
        ) from None


def check_fits(progress: Progress, config: Mapping[str, Any], graph: Mapping[str, Any], num_steps: int) -> None:
    """Raises ValueError with one line if the checkpoint is of another job, or there is nothing left to train."""
    for key in _MUST_AGREE:
        before, now = _value(progress.config, key), _value(config, key)
        if before != now:
            raise ValueError(f"--resume: the checkpoint is of {key} {before}, the config says {now}; make them agree")
    for key, value in graph.items():
        if key in progress.graph and progress.graph[key] != value:
            raise ValueError(
                f"--resume: the checkpoint is of a graph with {key} {progress.graph[key]}, this one has {value}; give "
                "the same data"
            )
    if progress.step >= num_steps:
        raise ValueError(
            f"--resume: the checkpoint is of {progress.step} steps and the config asks for {num_steps} in all; nothing "
            "is left, raise train.steps or train.epochs"
        )


def changes(progress: Progress, config: Mapping[str, Any]) -> list[str]:
    """A line for every setting that differs from the checkpoint's and changes what is computed from here on."""
    before, now = _flat(progress.config), _flat(config)
    lines = []
    for key in sorted(before.keys() | now.keys()):
        stays = any(key == name or key.startswith(f"{name}.") for name in _MAY_DIFFER)
        if not stays and before.get(key) != now.get(key):
            lines.append(f"{key} is {now.get(key)} from here on, the checkpoint had {before.get(key)}")
    return lines


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _value(config: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = config.get(part, {})
    return config


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
