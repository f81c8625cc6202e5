"""The one source of truth of a run: YAML plus `a.b=c` overrides, checked once at the border, plain values inside.

Not here: the DeepSpeed dict that is derived from it (`gtx/engine.py`) and the plan (`scheduler/plan.py`).
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """name: a known graph. root: folder of the `.npz` sets. split: which of a set's splits. options: per graph."""

    name: str = "digits"
    root: Path | None = None
    split: NonNegative = 0
    undirected: bool = True
    self_loops: Literal["keep", "add", "remove"] = "add"
    options: dict[str, Any] = {}


class PartitionConfig(_Section):
    """parts: part of the mathematics of `cluster` batches, so never derived from the world size."""

    method: Literal["metis", "random", "bfs"] = "metis"
    parts: Positive = 16
    cache: Path = Path("runs/partitions")


class ModelConfig(_Section):
    """width: C. ffn_width: F, twice C unless given. backend: which attention code runs."""

    name: Literal["GT", "GPS", "GCN", "MLP"] = "GT"
    width: Positive = 64
    heads: Positive = 4
    layers: Positive = 3
    ffn_width: Positive | None = None
    dropout: Probability = 0.0
    input_dropout: Probability = 0.0
    backend: Literal["auto", "reference", "torch"] = "auto"

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelConfig:
        if self.width % self.heads and self.name in ("GT", "GPS"):
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}; choose width {self.heads} * k"
            )
        return self


class BatchConfig(_Section):
    """kind: `full` graph, `cluster` (parts partitions each) or `neighbor` (seeds training nodes each).

    micro_batches: micro-batches in one optimizer step. accumulation: multiplies them.
    """

    kind: Literal["full", "cluster", "neighbor"] = "full"
    micro_batches: Positive = 1
    accumulation: Positive = 1
    parts: Positive = 4
    seeds: Positive = 256


class SamplingConfig(_Section):
    """fanout: in-edges drawn per destination: one number, one per layer, or null for all edges.

    redraw: draw anew at every `step`, or `once`, the same edges all along.
    """

    fanout: Positive | tuple[Positive | None, ...] | None = None
    redraw: Literal["step", "once"] = "step"

    def per_layer(self, num_layers: int) -> tuple[int | None, ...]:
        """The fan-out of each layer. Raises ValueError when the list has another length."""
        if self.fanout is None or isinstance(self.fanout, int):
            return (self.fanout,) * num_layers
        if len(self.fanout) != num_layers:
            raise ValueError(
                f"sampling.fanout has {len(self.fanout)} entries, model.layers is {num_layers}; give one a layer"
            )
        return self.fanout


class PlanConfig(_Section):
    """mode: one family for all partitions, or `mixed`. file: a plan in JSON instead."""

    mode: Literal["graph", "model", "pipeline", "data", "mixed"] = "graph"
    file: Path | None = None
    micro_batches_per_wave: NonNegative | None = None
    waves_per_round: NonNegative = 0
    checkpointing: Literal["none", "edges", "layer"] = "none"


class EngineConfig(_Section):
    """Everything of the optimizer and of DeepSpeed; `deepspeed` passes further keys of its JSON through."""

    name: Literal["deepspeed", "torch"] = "deepspeed"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float64", "float32", "bf16", "fp16"] = "float32"
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    offload_optimizer: Literal["none", "cpu"] = "none"
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: Probability = 0.0
    gradient_clipping: Annotated[float, Field(ge=0.0)] = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    loss_scale: Annotated[float, Field(ge=0.0)] = 0.0
    deepspeed: dict[str, Any] = {}
    timeout_s: Annotated[float, Field(gt=0.0)] = 300.0
    threads: NonNegative = 0

    @model_validator(mode="after")
    def _plain_engine_is_plain(self) -> EngineConfig:
        if self.name == "torch":
            for key, plain in (("zero_stage", 0), ("offload_optimizer", "none"), ("deepspeed", {})):
                if getattr(self, key) != plain:
                    raise ValueError(f"{key} {getattr(self, key)!r} has no effect with name torch; use name deepspeed")
            if self.precision in ("bf16", "fp16"):
                raise ValueError(f"precision {self.precision!r} needs name deepspeed; use float32 or float64")
        elif self.precision == "float64":
            raise ValueError("precision float64 needs name torch; DeepSpeed trains in float32, bf16 or fp16")
        if self.offload_optimizer == "cpu" and self.zero_stage == 0:
            raise ValueError("offload_optimizer cpu needs zero_stage 1, 2 or 3; it is 0")
        if self.loss_scale and self.precision != "fp16":
            raise ValueError(f"loss_scale {self.loss_scale:g} has no effect with precision {self.precision}; remove it")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum {self.momentum:g} has no effect with optimizer {self.optimizer}; use sgd")
        return self


class TrainConfig(_Section):
    """steps or epochs (one of them). eval_every: steps between evaluations, 0 for one at the end only."""

    steps: Positive | None = None
    epochs: Positive | None = None
    eval_every: NonNegative = 0

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give steps or epochs, one of the two")
        return self


class MonitorConfig(_Section):
    """progress: the bar. tensorboard: event files in the run folder. records: phases of every step and rank."""

    progress: bool = True
    tensorboard: bool = False
    records: bool = True


class Config(_Section):
    """One run."""

    name: str = "run"
    seed: NonNegative = 0
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    model: ModelConfig = ModelConfig()
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig = SamplingConfig()
    plan: PlanConfig = PlanConfig()
    engine: EngineConfig = EngineConfig()
    train: TrainConfig = TrainConfig(steps=100)
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        fanouts = self.sampling.per_layer(self.model.layers)
        if self.sampling.redraw == "once" and all(fanout is None for fanout in fanouts):
            raise ValueError("sampling.redraw once has no effect without sampling.fanout; set a fanout")
        if self.batch.kind == "full" and self.batch.micro_batches * self.batch.accumulation > 1:
            raise ValueError(
                f"batch.micro_batches {self.batch.micro_batches} times batch.accumulation {self.batch.accumulation} "
                "has no effect with batch.kind full, which is one micro-batch; use cluster or neighbor"
            )
        if self.batch.kind == "cluster" and self.batch.parts > self.partition.parts:
            raise ValueError(
                f"batch.parts {self.batch.parts} exceeds partition.parts {self.partition.parts}; lower the first"
            )
        return self

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """16 hex digits of the resolved config."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]


def parse_config(data: object, overrides: Sequence[str] = (), *, source: str = "config") -> Config:
    """Check a parsed YAML document and `a.b=c` overrides.

    Raises:
        ValueError: one line with the key, the value, and what would be right.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ValueError(f"{source} is a YAML {type(data).__name__}; it must be a mapping of sections")
    data = copy.deepcopy(data)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ValueError(f"the override {override!r} is not of the form a.b=c")
        try:
            value = yaml.safe_load(text) if text else None
        except yaml.YAMLError:
            raise ValueError(f"the override {override!r} has a value that is not YAML") from None
        *path, last = key.split(".")
        node = data
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"the override {override!r} goes through {part!r}, which holds a value")
        node[last] = value
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{source}: {_first_line(error)}") from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file. Raises ValueError with one line when it is missing, not YAML, or wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"cannot read the config {path}: {reason}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path} is not YAML{where}: {getattr(error, 'problem', error)}") from None
    return parse_config(data, overrides, source=str(path))


def _first_line(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line in the config's words."""
    problems = error.errors(include_url=False)
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("constrained", "tuple", "function")))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = ", ".join(_known_keys([str(part) for part in first["loc"][:-1]]))
        return f"unknown key {key!r}; known here: {known}{more}"
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key + ': ' if key else ''}{message}{more}"
    return f"{key} is {first['input']!r}: {message[0].lower() + message[1:]}{more}"


def _known_keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return sorted(model.model_fields)
