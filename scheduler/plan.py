"""The plan: which rank owns which rows and attends with which heads, as a frozen dataclass with JSON both ways.

Not here: what is computed (the config decides that) and how a plan becomes exchanges (`gtx/parallel/compiler.py`).

Legend: `K` partitions, `P` ranks, `L` layers, `H` heads, `m` micro-batch index, `p` partition, `l` layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

Mode = Literal["graph", "model", "pipeline", "data"]
Checkpointing = Literal["none", "edges", "layer"]
MODES: tuple[Mode, ...] = get_args(Mode)
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
FORMAT = "gtx-plan/1"

HeadRange = tuple[int, int]


@dataclass(frozen=True)
class Placement:
    """Where one partition runs.

    mode: `graph` (one rank does all), `model` (rows split evenly over `ranks`, head slice s attended by `ranks[s]`),
        `pipeline` (`ranks[stage(l)]` owns all rows at layer l), `data` (micro-batch m runs on `ranks[m % len(ranks)]`).
    ranks: distinct ranks; exactly one for `graph`.
    layer_split: layers per stage, one entry a rank (an entry may be 0); empty unless the mode is `pipeline`.
    """

    mode: Mode
    ranks: tuple[int, ...]
    layer_split: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A placement of every partition, and how micro-batches are grouped.

    micro_batches_per_wave: micro-batches that run together as one disjoint graph.
    waves_per_round: waves that share one backward pass. 0 means "all of the step" for both.
    checkpointing: `none`, `edges` (the edge-wise part is recomputed in backward) or `layer` (the whole layer is).
    """

    world_size: int
    num_layers: int
    partitions: tuple[Placement, ...]
    micro_batches_per_wave: int = 0
    waves_per_round: int = 0
    checkpointing: Checkpointing = "none"

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def num_partitions(self) -> int:
        return len(self.partitions)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON types; `from_dict` is the inverse."""
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1) + "\n"

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ between plans that differ."""
        canonical = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def waves(self, num_micro_batches: int) -> list[range]:
        """Micro-batch indices of each wave of a step, in order."""
        size = self.micro_batches_per_wave or max(num_micro_batches, 1)
        return [range(i, min(i + size, num_micro_batches)) for i in range(0, num_micro_batches, size)]

    def rounds(self, num_waves: int) -> list[range]:
        """Wave indices of each round of a step, in order."""
        size = self.waves_per_round or max(num_waves, 1)
        return [range(i, min(i + size, num_waves)) for i in range(0, num_waves, size)]


def check_plan(plan: Plan) -> None:
    """Raise ValueError with one line if the plan contradicts itself."""
    if plan.world_size < 1:
        raise ValueError(f"plan.world_size is {plan.world_size}; a plan needs at least one rank")
    if plan.num_layers < 1:
        raise ValueError(f"plan.num_layers is {plan.num_layers}; a plan needs at least one layer")
    if not plan.partitions:
        raise ValueError("plan.partitions is empty; name a placement for every partition")
    if plan.checkpointing not in CHECKPOINTING:
        raise ValueError(f"plan.checkpointing is {plan.checkpointing!r}; use one of {', '.join(CHECKPOINTING)}")
    for name in ("micro_batches_per_wave", "waves_per_round"):
        if getattr(plan, name) < 0:
            raise ValueError(f"plan.{name} is {getattr(plan, name)}; use 0 (all of the step) or a positive number")
    first = {place: p for p, place in reversed(list(enumerate(plan.partitions)))}
    for place, p in sorted(first.items(), key=lambda entry: entry[1]):  # those that are alike once
        where = f"plan.partitions[{p}]"
        if place.mode not in MODES:
            raise ValueError(f"{where}.mode is {place.mode!r}; use one of {', '.join(MODES)}")
        if not place.ranks:
            raise ValueError(f"{where}.ranks is empty; name at least one rank")
        for rank in place.ranks:
            if not 0 <= rank < plan.world_size:
                raise ValueError(
                    f"{where} names rank {rank}, the plan has {plan.world_size} ranks (0 to {plan.world_size - 1}); "
                    "launch more ranks or edit the plan"
                )
        if len(set(place.ranks)) != len(place.ranks):
            raise ValueError(f"{where}.ranks {list(place.ranks)} names a rank twice; name each once")
        if place.mode == "graph" and len(place.ranks) != 1:
            raise ValueError(f"{where}.ranks {list(place.ranks)}: graph mode runs a partition on exactly one rank")
        if place.mode == "pipeline":
            if len(place.layer_split) != len(place.ranks):
                raise ValueError(
                    f"{where}.layer_split {list(place.layer_split)} has {len(place.layer_split)} stages for "
                    f"{len(place.ranks)} ranks; give one number of layers a rank"
                )
            if min(place.layer_split) < 0 or sum(place.layer_split) != plan.num_layers:
                raise ValueError(
                    f"{where}.layer_split {list(place.layer_split)} must be non-negative and sum to the model's "
                    f"{plan.num_layers} layers"
                )
        elif place.layer_split:
            raise ValueError(f"{where}.layer_split has no effect in mode {place.mode!r}; remove it")


def from_dict(data: Mapping[str, Any]) -> Plan:
    """Build a plan from JSON types. Raises ValueError with one line on anything unknown, missing or of a wrong type."""
    known = {"format", "world_size", "num_layers", "partitions", "micro_batches_per_wave", "waves_per_round"}
    known |= {"checkpointing"}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"the plan has the unknown key {unknown[0]!r}; known keys are {', '.join(sorted(known))}")
    if data.get("format") != FORMAT:
        raise ValueError(f"the plan's format is {data.get('format')!r}, this version reads {FORMAT!r}")
    placements = []
    raw = data.get("partitions")
    if not isinstance(raw, list | tuple):
        raise ValueError(f"plan.partitions is {type(raw).__name__}; it must be a list, one entry a partition")
    for p, entry in enumerate(raw):
        where = f"plan.partitions[{p}]"
        if not isinstance(entry, Mapping) or set(entry) - {"mode", "ranks", "layer_split"} or "mode" not in entry:
            raise ValueError(f"{where} is {entry!r}; it must hold mode, ranks and, for pipeline, layer_split")
        if entry["mode"] not in MODES:
            raise ValueError(f"{where}.mode is {entry['mode']!r}; use one of {', '.join(MODES)}")
        placements.append(
            Placement(
                mode=entry["mode"],
                ranks=_int_tuple(entry.get("ranks"), f"{where}.ranks"),
                layer_split=_int_tuple(entry.get("layer_split", []), f"{where}.layer_split"),
            )
        )
    numbers = {}
    for name, default in (("world_size", None), ("num_layers", None), ("micro_batches_per_wave", 0)) + (
        ("waves_per_round", 0),
    ):
        value = data.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"plan.{name} is {value!r}; it must be a whole number")
        numbers[name] = value
    return Plan(partitions=tuple(placements), checkpointing=data.get("checkpointing", "none"), **numbers)


def from_json(text: str) -> Plan:
    """Parse a plan file's text. Raises ValueError with one line."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the plan is not JSON: {error}; mend it there, or have launch.py plan --out write one anew"
        ) from None
    if not isinstance(data, dict):
        raise ValueError(f"the plan is a JSON {type(data).__name__}; it must be an object")
    return from_dict(data)


def _int_tuple(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or any(not isinstance(v, int) or isinstance(v, bool) for v in value):
        raise ValueError(f"{where} is {value!r}; it must be a list of whole numbers")
    return tuple(cast(Sequence[int], value))


# What a plan means ----------------------------------------------------------------------------------------------------


def split_evenly(size: int, group: int) -> list[int]:
    """Bounds `[group + 1]` that cut `size` items into `group` runs whose lengths differ by at most one.

    Serves rows and heads alike: `split_evenly(7, 4) == [0, 1, 3, 5, 7]`.
    """
    return [size * i // group for i in range(group + 1)]


def head_slices(num_heads: int, group: int) -> list[HeadRange]:
    """Heads `[h0, h1)` that each rank of a model-parallel group attends with; empty (h0 == h1) for surplus ranks.

    `head_slices(3, 2) == [(0, 1), (1, 3)]`.
    """
    bounds = split_evenly(num_heads, group)
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def head_ranges(plan: Plan, num_heads: int) -> list[HeadRange]:
    """Every distinct non-empty head range that some rank attends with under this plan, sorted: the same everywhere."""
    ranges = set()
    for place in set(plan.partitions):
        group = len(place.ranks) if place.mode == "model" else 1
        ranges |= {(h0, h1) for h0, h1 in head_slices(num_heads, group) if h1 > h0}
    return sorted(ranges)


def stage_of(place: Placement, layer: int) -> int:
    """The pipeline stage that holds `layer`. Raises ValueError outside the split."""
    end = 0
    for stage, layers in enumerate(place.layer_split):
        end += layers
        if 0 <= layer < end:
            return stage
    raise ValueError(f"layer {layer} lies outside layer_split {list(place.layer_split)}")


def owner_table(plan: Plan, micro_batch: int, layer: int) -> npt.NDArray[np.int64]:
    """`owner(m, p, l)` for all partitions `[K]`; -1 where the rows are split over a group (`model`)."""
    owners = np.empty(plan.num_partitions, dtype=np.int64)
    for p, place in enumerate(plan.partitions):
        match place.mode:
            case "graph":
                owners[p] = place.ranks[0]
            case "model":
                owners[p] = -1
            case "pipeline":
                owners[p] = place.ranks[stage_of(place, layer)]
            case "data":
                owners[p] = place.ranks[micro_batch % len(place.ranks)]
    return owners


def moves_between(plan: Plan, layer: int) -> bool:
    """Whether rows of any partition change owner between `layer - 1` and `layer`."""
    return any(
        place.mode == "pipeline" and stage_of(place, layer) != stage_of(place, layer - 1) for place in plan.partitions
    )


# Plans of one family --------------------------------------------------------------------------------------------------


def deal(work: Sequence[float], world_size: int) -> list[int]:
    """A rank for each partition: contiguous runs of about equal work, so that neighbouring partitions stay together.

    Partition p goes to the rank in whose share of the total its middle falls. More ranks than partitions leave ranks
    without any; partitions without work follow their neighbours.
    """
    loads = np.asarray(work, dtype=np.float64)
    total = loads.sum()
    if total <= 0:
        loads, total = np.ones_like(loads), float(len(loads))
    middle = np.cumsum(loads) - loads / 2
    return [int(r) for r in np.minimum(middle / total * world_size, world_size - 1).astype(np.int64)]


def fixed_plan(
    mode: Mode | Literal["mixed"],
    work: Sequence[float],
    world_size: int,
    num_layers: int,
    *,
    micro_batches_per_wave: int | None = None,
    waves_per_round: int = 0,
    checkpointing: Checkpointing = "none",
) -> Plan:
    """The plan that runs every partition in one mode over all ranks; `mixed` deals the four modes in turn.

    work: relative work of each partition `[K]`, balanced over ranks in graph mode.
    micro_batches_per_wave: default by mode: one per wave for `pipeline` (stages overlap), one per rank for `data`, all
        of the step in one wave otherwise.
    """
    if mode != "mixed" and mode not in MODES:
        raise ValueError(f"plan.mode is {mode!r}; use one of {', '.join(MODES)}, mixed")
    ranks = tuple(range(world_size))
    homes = deal(work, world_size)
    bounds = split_evenly(num_layers, world_size)
    split = tuple(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True))
    placements = []
    for p, home in enumerate(homes):
        chosen: Mode = MODES[p % len(MODES)] if mode == "mixed" else mode
        match chosen:
            case "graph":
                placements.append(Placement("graph", (home,)))
            case "pipeline":
                placements.append(Placement("pipeline", ranks, split))
            case _:
                placements.append(Placement(chosen, ranks))
    if micro_batches_per_wave is None:
        micro_batches_per_wave = {"pipeline": 1, "data": world_size}.get(mode, 0)
    return Plan(world_size, num_layers, tuple(placements), micro_batches_per_wave, waves_per_round, checkpointing)
