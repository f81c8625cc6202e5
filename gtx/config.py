"""The one source of truth of a run: YAML plus `a.b=c` overrides, checked once at the border, plain values inside.

Not here: the DeepSpeed dict that is derived from it (`gtx/engine.py`) and the plan (`scheduler/plan.py`).
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from scheduler.controller import Rules

_RULES = Rules()

# Strict: neither `true` nor `"4"` is a number.
Positive = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
PositiveNumber = Annotated[float, Field(gt=0.0, strict=True, allow_inf_nan=False)]
NonNegativeNumber = Annotated[float, Field(ge=0.0, strict=True, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
Share = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """name: a known graph; `table`: one's own, see docs/your_graph.md; or a set of DGL, PyG or OGB, as
    `dgl:CoraGraphDataset`, `pyg:Planetoid/Cora`, `ogb:ogbn-arxiv`; or `dgl-partition`: what
    `dgl.distributed.partition_graph` wrote. root: folder of the `.npz` sets, of a library's, or of that.

    nodes, edges: the files of `table`. split: which of a set's splits. options: per graph.
    The graph is then changed in this order: dedupe: of edges with the same ends keep the first; undirected: add missing
    reverses; self_loops; standardize: features to mean 0 and deviation 1 over the training nodes.
    order: how the nodes of a partition lie in memory (`gtx/orders.py`); ids, draws and results stay the same.
    """

    name: str = "digits"
    root: Path | None = None
    nodes: Path | None = None
    edges: Path | None = None
    split: NonNegative = 0
    dedupe: bool = False
    undirected: bool = True
    self_loops: Literal["keep", "add", "remove"] = "add"
    standardize: bool = False
    order: Literal["none", "bfs", "degree", "rcm", "metis"] = "none"
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _tables_have_files(self) -> DataConfig:
        for key in ("nodes", "edges"):
            file = getattr(self, key)
            if self.name == "table" and file is None:
                raise ValueError(f"name table needs {key}; give a .csv, .tsv or .parquet file, see docs/your_graph.md")
            if self.name != "table" and file is not None:
                raise ValueError(f"{key} {file} has no effect with name {self.name}; use name table")
        if self.name == "table" and self.root is not None:
            raise ValueError(f"root {self.root} has no effect with name table; write it into nodes and edges")
        return self


class PartitionConfig(_Section):
    """parts: part of the mathematics of `cluster` batches, so never derived from the world size.

    method: how nodes are assigned to parts, as `gtx.partition.assign` says; with data.name dgl-partition it is `given`
    unless set. seed: of the assignment, the run's if null.
    """

    method: Literal["metis", "ldg", "bfs", "hash", "random", "given"] = "metis"
    parts: Positive = 16
    seed: NonNegative | None = None
    cache: Path = Path("runs/partitions")


class EncodingsConfig(_Section):
    """Positional encodings, added to the encoded features by a learned projection; none where all are 0 and false.

    laplacian: eigenvectors of the graph's Laplacian. random_walk: steps of a walk's return probabilities; 1 is never
    back. degree: in- and out-degrees.
    """

    laplacian: NonNegative = 0
    random_walk: NonNegative = 0
    degree: bool = False

    @field_validator("random_walk")
    @classmethod
    def _one_step_never_returns(cls, steps: int) -> int:
        if steps == 1:
            raise ValueError("1 step never leads back: the encoding would be 0; give 2 or more, or 0 for none")
        return steps

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """(kind, columns) of each encoding."""
        asked = (("laplacian", self.laplacian), ("random_walk", self.random_walk), ("degree", 2 * self.degree))
        return tuple((kind, columns) for kind, columns in asked if columns)

    @property
    def columns(self) -> int:
        return sum(columns for _, columns in self.kinds)


MODELS = ("GT", "GPS", "GCN", "SAGE", "GAT", "MLP", "SGFormer", "Polynormer", "Exphormer", "NAGphormer")
_READ_BY = {
    "graph_weight": "SGFormer",
    "global_layers": "Polynormer",
    "expander_degree": "Exphormer",
    "virtual_nodes": "Exphormer",
    "hops": "NAGphormer",
}  # settings that one model alone reads


_NO_EDGE_ATTENTION = ("GPS", "GCN", "SAGE", "MLP", "SGFormer", "Polynormer", "NAGphormer")


class ModelConfig(_Section):
    """name: one of `MODELS`, or a Python file of one's own (docs/own_layer.md). width: C. ffn_width: F, twice C unless
    given. backend: which attention code runs; `auto`: the fused one on a CPU, on a GPU the one measured to be fastest.
    edge_bias: whether edge features, standardized, enter the attention by a learned bias per layer and head. options:
    for a model of one's own to read.

    graph_weight: what the GCN of SGFormer counts beside the attention, which counts the rest of 1.
    global_layers: how many of Polynormer's layers, the last ones, attend to all nodes instead of neighbours.
    expander_degree: how many random nodes each node of Exphormer attends to beside its neighbours, the same all along.
    virtual_nodes: of Exphormer; they attend to all nodes and all nodes to them.
    hops: how far NAGphormer propagates features; each hop is a token of its node.
    """

    name: str = "GT"
    width: Positive = 64
    heads: Positive = 4
    layers: Positive = 3
    ffn_width: Positive | None = None
    dropout: Probability = 0.0
    input_dropout: Probability = 0.0
    backend: Literal["auto", "reference", "torch", "cpu", "triton"] = "auto"
    edge_bias: Annotated[bool, Field(strict=True)] = False
    encodings: EncodingsConfig = EncodingsConfig()
    graph_weight: Share = 0.5
    global_layers: Positive = 1
    expander_degree: Annotated[int, Field(ge=0, multiple_of=2, strict=True)] = 4
    virtual_nodes: Positive = 4
    hops: Positive = 3
    options: dict[str, Any] = {}

    @property
    def added_degree(self) -> int:
        """Random edges a node that the model has beside the graph's own."""
        return self.expander_degree if self.name == "Exphormer" else 0

    @property
    def tokens(self) -> int:
        """Rows of features that a node has: its own and, for NAGphormer, one for each hop."""
        return 1 + self.hops if self.name == "NAGphormer" else 1

    @property
    def input_kinds(self) -> tuple[tuple[str, int], ...]:
        """(kind, size) of what the model takes of a node beside its features, in this order."""
        hops = (("hops", self.hops),) if self.tokens > 1 else ()
        return (*hops, *self.encodings.kinds)

    @field_validator("name")
    @classmethod
    def _known_or_a_file(cls, name: str) -> str:
        if name not in MODELS and not name.endswith(".py"):
            known = ", ".join(repr(known) for known in MODELS)
            raise ValueError(f"{name!r} is neither one of {known} nor a Python file of your own")
        return name

    @model_validator(mode="after")
    def _options_are_read(self) -> ModelConfig:
        if self.options and self.name in MODELS:
            raise ValueError(f"options are for models of your own; {self.name} reads none")
        return self

    @model_validator(mode="after")
    def _some_layers_are_local(self) -> ModelConfig:
        if self.name == "Polynormer" and self.global_layers >= self.layers:
            raise ValueError(
                f"layers is {self.layers} and global_layers {self.global_layers}; Polynormer needs a local layer, set "
                f"layers to {self.global_layers + 1} or more"
            )
        return self

    @model_validator(mode="after")
    def _a_bias_needs_attention(self) -> ModelConfig:
        if self.edge_bias and self.name in _NO_EDGE_ATTENTION:
            raise ValueError(f"edge_bias has no effect with {self.name}, whose layers do not read it; use GT or GAT")
        return self

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelConfig:
        if self.width % self.heads and self.name not in ("GCN", "SAGE", "MLP"):
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

    redraw: draw anew at every `step`, or `once`, the same edges all along. method: how, as
        `sparse_engine.sample_neighbors` says; an edge weighs one more than its source's in-degree. correct: whether
        attention and sums are corrected for how likely each edge was drawn, so that they estimate the full
        neighbourhood. `random_walk` is no draw: each node attends to the `fanout` nodes that `walks` random walks from
        it visit most, each ended after a step with probability `restart`, in training and in evaluation; `correct`
        then counts a node as often as it was visited.
    """

    fanout: Positive | tuple[Positive | None, ...] | None = None
    redraw: Literal["step", "once"] = "step"
    method: Literal["uniform", "weighted", "multinomial", "top", "shared", "random_walk"] = "uniform"
    correct: bool = True
    walks: Positive = 64
    restart: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] = 0.25

    @field_validator("fanout", mode="before")
    @classmethod
    def _fanout_counts_edges(cls, fanout: object) -> object:
        for entry in fanout if isinstance(fanout, list | tuple) else [fanout]:
            if entry is not None and (type(entry) is not int or entry < 1):
                raise ValueError(f"{fanout!r} is neither a whole number of at least 1, nor null, nor a list of these")
        return fanout

    def per_layer(self, num_layers: int) -> tuple[int | None, ...]:
        """The fan-out of each layer. Raises ValueError when the list has another length."""
        if self.fanout is None or isinstance(self.fanout, int):
            return (self.fanout,) * num_layers
        if len(self.fanout) != num_layers:
            raise ValueError(
                f"sampling.fanout has {len(self.fanout)} entries, model.layers is {num_layers}; give one a layer"
            )
        return self.fanout


PlanMode = Literal["graph", "model", "pipeline", "data"]


class PlanConfig(_Section):
    """mode: one family for all partitions, `mixed`, `auto` (searched once) or `adaptive` (watched all along).

    file: a plan in JSON instead; with adaptive the one to start under.
    memory_limit_gib: what a rank may use, the device's memory if null. For auto and adaptive:
    allow: modes that may be used. pin: partition -> mode. topology: a file of `launch.py calibrate`;
    measured at the start if null. groups: sizes of groups, any divisor of the world size if null.
    """

    mode: Literal["graph", "model", "pipeline", "data", "mixed", "auto", "adaptive"] = "graph"
    file: Path | None = None
    micro_batches_per_wave: NonNegative | None = None
    waves_per_round: NonNegative = 0
    checkpointing: Literal["none", "edges", "layer"] = "none"
    allow: tuple[PlanMode, ...] = ("graph", "model", "pipeline", "data")
    pin: dict[NonNegative, PlanMode] = {}
    memory_limit_gib: PositiveNumber | None = None
    topology: Path | None = None
    groups: tuple[Positive, ...] | None = None

    @model_validator(mode="after")
    def _constraints_agree(self) -> PlanConfig:
        if not self.allow:
            raise ValueError("allow is empty; name at least one of graph, model, pipeline, data")
        for part, mode in self.pin.items():
            if mode not in self.allow:
                raise ValueError(f"pin puts partition {part} into mode {mode!r}, which allow does not name; add it")
        return self

    @property
    def searched(self) -> bool:
        """Whether the scheduler makes the plan."""
        return self.mode == "adaptive" or (self.mode == "auto" and self.file is None)


class SchedulerConfig(_Section):
    """How plans are chosen (`auto`, `adaptive`) and when they are changed (`adaptive`).

    setting: `cost_model`, `greedy` (the family that the formulas of one layer prefer, nothing searched) or `oracle`
        (the best plan of every family is run and the fastest kept).
    probe_steps: steps under each of the best `probe_plans` plans at the start, ordinary training steps, from which
        rates are fitted and the fastest is kept; 0 trusts the prediction. without: cost terms left out.
    window: steps between decisions. modes: whether a switch may change modes. The rest are the thresholds of the switch
        rule, as `scheduler.controller.Rules` describes them.
    """

    setting: Literal["cost_model", "greedy", "oracle"] = "cost_model"
    probe_steps: NonNegative = 3
    probe_plans: Positive = 3
    without: tuple[Literal["rowwise", "edgewise", "visits", "exchange", "reduction", "optimizer"], ...] = ()
    window: Annotated[int, Field(ge=2, strict=True)] = 10
    delta: Probability = _RULES.delta
    kappa: NonNegativeNumber = _RULES.kappa
    z: NonNegativeNumber = _RULES.z
    hold: Positive = _RULES.hold
    cooldown: NonNegative = _RULES.cooldown
    hotspot: PositiveNumber = _RULES.hotspot
    straggler: PositiveNumber = _RULES.straggler
    exchange: PositiveNumber = _RULES.exchange
    memory: PositiveNumber = _RULES.memory
    drift: PositiveNumber = _RULES.drift
    review: Positive = _RULES.review
    snap: PositiveNumber = _RULES.snap
    max_failures: Positive = _RULES.max_failures
    hysteresis: bool = _RULES.hysteresis
    modes: bool = True


class EngineConfig(_Section):
    """Everything of the optimizer and of DeepSpeed; `deepspeed` passes further keys of its JSON through.

    zero_stage, offload_optimizer: `auto` where the scheduler makes the plan: the cheapest that fits.
    """

    name: Literal["deepspeed", "torch"] = "deepspeed"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float64", "float32", "bf16", "fp16"] = "float32"
    zero_stage: Literal[0, 1, 2, 3, "auto"] = 0
    offload_optimizer: Literal["none", "cpu", "auto"] = "none"
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: PositiveNumber = 1e-3
    weight_decay: NonNegativeNumber = 0.0
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    momentum: Probability = 0.0
    gradient_clipping: NonNegativeNumber = 0.0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    loss_scale: NonNegativeNumber = 0.0
    deepspeed: dict[str, Any] = {}
    timeout_s: PositiveNumber = 300.0
    threads: NonNegative = 0

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _a_stage_is_no_switch(cls, stage: object) -> object:
        if isinstance(stage, bool):  # else True would pass for 1
            raise ValueError(f"{stage} is none of 0, 1, 2, 3 and auto")
        return stage

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
        if self.betas != (0.9, 0.999) and self.optimizer == "sgd":
            raise ValueError(f"betas {list(self.betas)} have no effect with optimizer sgd; use adam or adamw")
        return self


class TrainConfig(_Section):
    """steps or epochs (one of them). eval_every: steps between evaluations, 0 for one at the end only.

    checkpoint_every: steps between checkpoints beside those that every evaluation leaves; 0 for those only.
    patience: evaluations without a better validation score after which training ends; 0 for never.
    """

    steps: Positive | None = None
    epochs: Positive | None = None
    eval_every: NonNegative = 0
    checkpoint_every: NonNegative = 0
    patience: NonNegative = 0

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            given = "neither is given" if self.steps is None else f"steps is {self.steps} and epochs is {self.epochs}"
            raise ValueError(f"{given}; give one of steps and epochs, and leave the other out or null")
        if self.patience and not self.eval_every:
            raise ValueError(
                f"patience is {self.patience} and eval_every 0: the only evaluation is at the end; set eval_every"
            )
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
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    train: TrainConfig = TrainConfig(steps=100)
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="before")
    @classmethod
    def _a_partition_that_comes_is_taken(cls, sections: Any) -> Any:
        if not isinstance(sections, dict):
            return sections
        data, partition = sections.get("data"), sections.get("partition", {})
        if isinstance(data, dict) and data.get("name") == "dgl-partition" and isinstance(partition, dict):
            return {**sections, "partition": {"method": "given", **partition}}
        return sections

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.partition.method == "given" and self.data.name != "dgl-partition":
            raise ValueError(
                f"partition.method given needs a graph that comes with a partition, data.name dgl-partition; it is "
                f"{self.data.name}"
            )
        fanouts = self.sampling.per_layer(self.model.layers)
        if all(fanout is None for fanout in fanouts):
            for key in ("redraw", "method", "correct"):
                value = getattr(self.sampling, key)
                if value != SamplingConfig.model_fields[key].default:
                    raise ValueError(f"sampling.{key} {value} has no effect without sampling.fanout; set a fanout")
        if self.model.edge_bias and self.sampling.method == "random_walk":
            raise ValueError(
                "model.edge_bias has no effect with sampling.method random_walk, whose lists are no edges; use another"
            )
        if self.batch.kind == "full" and self.batch.micro_batches * self.batch.accumulation > 1:
            raise ValueError(
                f"batch.micro_batches {self.batch.micro_batches} times batch.accumulation {self.batch.accumulation} "
                "has no effect with batch.kind full, which is one micro-batch; use cluster or neighbor"
            )
        for part in self.plan.pin:
            if part >= self.partition.parts:
                raise ValueError(
                    f"plan.pin names partition {part}, partition.parts is {self.partition.parts} (0 to "
                    f"{self.partition.parts - 1}); pin one of these"
                )
        if self.batch.kind == "cluster" and self.batch.parts > self.partition.parts:
            raise ValueError(
                f"batch.parts {self.batch.parts} exceeds partition.parts {self.partition.parts}; lower the first"
            )
        return self

    @model_validator(mode="after")
    def _only_a_search_picks_the_engine(self) -> Config:
        for key in ("zero_stage", "offload_optimizer"):
            if getattr(self.engine, key) == "auto" and not self.plan.searched:
                raise ValueError(
                    f"engine.{key} is auto and plan.mode {self.plan.mode}: nothing is searched; use plan.mode auto or "
                    "adaptive, or give a value"
                )
        return self

    def without_effect(self) -> list[str]:
        """A line for every setting that was given and does nothing beside the others."""
        lines = []
        if self.plan.file is not None and not self.plan.searched:
            given = sorted(self.plan.model_fields_set - {"file", "memory_limit_gib"})
            lines += [f"plan.{key} has no effect: plan.file {self.plan.file} decides" for key in given]
        elif not self.plan.searched:
            given = sorted(self.plan.model_fields_set & {"allow", "pin", "topology", "groups"})
            lines += [f"plan.{key} has no effect: plan.mode is {self.plan.mode}, not auto or adaptive" for key in given]
        if not self.plan.searched:
            given = sorted(self.scheduler.model_fields_set)
            lines += [f"scheduler.{key} has no effect: nothing is searched" for key in given]
        if self.sampling.method == "random_walk":
            if "redraw" in self.sampling.model_fields_set:
                lines.append("sampling.redraw has no effect: the lists of sampling.method random_walk are made once")
        else:
            given = sorted(self.sampling.model_fields_set & {"walks", "restart"})
            lines += [f"sampling.{key} has no effect: sampling.method is {self.sampling.method}" for key in given]
        for key, model in _READ_BY.items():
            if key in self.model.model_fields_set and self.model.name in set(MODELS) - {model}:
                lines.append(f"model.{key} has no effect: model.name is {self.model.name}, only {model} reads it")
        for key, kind in (("parts", "cluster"), ("seeds", "neighbor")):
            if key in self.batch.model_fields_set and self.batch.kind != kind:
                lines.append(f"batch.{key} has no effect: batch.kind is {self.batch.kind}, not {kind}")
        return lines

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
        if not separator or not all(key.split(".")):
            raise ValueError(f"the override {override!r} is not of the form a.b=c")
        try:
            value = _parse_yaml(text)
        except ValueError as error:
            raise ValueError(f"the override {override!r} has a value that is not YAML: {error}") from None
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
        data = _parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    return parse_config(data, overrides, source=str(path))


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-3` is a number (YAML 1.1 insists on `1.0e-3`) and no key comes twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} comes twice; keep one", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse_yaml(text: str) -> Any:
    """The YAML document, None if empty. Raises ValueError with one line that says where and why."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{where}{error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character, or a date that is none
        raise ValueError(" ".join(str(error).split())) from None


def _first_line(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line in the config's words."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path = [str(part) for part in first["loc"]]
    key, kind, value = ".".join(path), first["type"], repr(first["input"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    message = str(first["msg"]).removeprefix("Value error, ")
    match kind:
        case "extra_forbidden" | "invalid_key":
            return f"unknown key {key!r}; known here: {', '.join(_known_keys(path[:-1]))}{more}"
        case "model_type":
            return f"{key} is {value}: a section of keys is wanted here, of {', '.join(_known_keys(path))}{more}"
        case "missing":
            return f"{key} is missing, there is only {value}{more}"
        case "value_error":
            return f"{key + ': ' if key else ''}{message}{more}"
        case "path_type":
            message = "input should be a path"
    return f"{key} is {value}: {message[0].lower() + message[1:]}{more}"


def _known_keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        annotation = model.model_fields[part].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = annotation
    return sorted(model.model_fields)
