"""What one rank measured in one step, as frozen dataclasses with JSON both ways, and how ranks share it.

Not here: how it is measured (`timers.py`, `memory.py`) and where it is written (`sinks.py`).

A record that contradicts itself cannot be made: phases sum to wall time, an exchange took the seconds of its phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

EXCHANGE_KINDS = ("fetch", "q", "kv", "o", "move", "reduce")
PHASES = (
    "sampling",
    "compiling",
    "rowwise",
    "edgewise",
    *(f"exchange.{kind}" for kind in EXCHANGE_KINDS),
    "backward",
    "optimizer",
    "evaluate",
    "other",
)

Gather = Callable[[dict[str, Any]], Sequence[dict[str, Any]]]
"""Hands every rank the dict of every rank, in rank order. The room above makes one from its process group."""


@dataclass(frozen=True)
class ExchangeRecord:
    """What one rank passed in one kind of exchange over one step, forward and backward together.

    seconds: of the phase `exchange.<kind>`, of which `wait_s` went by waiting for a peer.
    Raises ValueError for an unknown kind, a negative number or a wait longer than the exchange.
    """

    kind: str
    sent_bytes: int
    received_bytes: int
    seconds: float
    wait_s: float
    messages: int

    def __post_init__(self) -> None:
        if self.kind not in EXCHANGE_KINDS:
            raise ValueError(f"there is no exchange {self.kind!r}; use one of {', '.join(EXCHANGE_KINDS)}")
        for name in ("sent_bytes", "received_bytes", "seconds", "wait_s", "messages"):
            _require_not_negative(f"exchange {self.kind}: {name}", getattr(self, name))
        if self.wait_s > self.seconds + _tolerance_s(self.seconds):
            raise ValueError(
                f"exchange {self.kind} waited {self.wait_s} s of its {self.seconds} s; "
                f"wait inside the phase exchange.{self.kind}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON types; `from_dict` is the inverse."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ExchangeRecord:
        """Raises ValueError with one line on a key too many or too few, or a value of a wrong type."""
        _require_keys("exchange record", data, {entry.name for entry in fields(cls)}, set())
        return cls(
            kind=_string(data, "kind"),
            sent_bytes=_whole(data, "sent_bytes"),
            received_bytes=_whole(data, "received_bytes"),
            seconds=_number(data, "seconds"),
            wait_s=_number(data, "wait_s"),
            messages=_whole(data, "messages"),
        )


@dataclass(frozen=True)
class PeerRecord:
    """What one rank passed to and from one peer in a step, all kinds of exchange together. wait_s: waited for it."""

    peer: int
    sent_bytes: int
    received_bytes: int
    wait_s: float

    def __post_init__(self) -> None:
        for name in ("peer", "sent_bytes", "received_bytes", "wait_s"):
            _require_not_negative(f"peer {self.peer}: {name}", getattr(self, name))

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON types; `from_dict` is the inverse."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PeerRecord:
        """Raises ValueError with one line on a key too many or too few, or a value of a wrong type."""
        _require_keys("peer record", data, {entry.name for entry in fields(cls)}, set())
        return cls(
            _whole(data, "peer"), _whole(data, "sent_bytes"), _whole(data, "received_bytes"), _number(data, "wait_s")
        )


@dataclass(frozen=True)
class StepRecord:
    """What one rank measured in one optimizer step.

    phases: seconds by name of `PHASES`; they sum to `wall_s`.
    exchanges: one entry for each kind that ran.
    peak_memory_bytes: the highest within the step where `memory_source` says it is reset, else since the process began.
    rows_computed, edges_computed: rows and edges of all layers that this rank worked on, forward.
    loss: of the whole step, the same on every rank. It may be infinite or not a number.
    plan_fingerprint: the plan the step ran under.
    peers: one entry for each rank that rows went to or came from. cpu_s: processor time of the process, all threads.
    prepared_s: seconds of sampling and compiling that this step's batch took, ahead of it in the background.
    device_utilisation: of the GPU, 0 to 1, where NVML tells.
    Raises ValueError if phases do not sum to wall time, names are unknown, or a number is negative.
    """

    step: int
    rank: int
    wall_s: float
    phases: Mapping[str, float] = field(hash=False)
    exchanges: tuple[ExchangeRecord, ...]
    peak_memory_bytes: int
    rows_computed: int
    edges_computed: int
    loss: float
    plan_fingerprint: str
    memory_source: str = "unknown"
    peers: tuple[PeerRecord, ...] = ()
    cpu_s: float = 0.0
    prepared_s: tuple[float, float] = (0.0, 0.0)
    device_utilisation: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", dict(self.phases))
        where = f"step {self.step}, rank {self.rank}"
        for name in ("step", "rank", "wall_s", "peak_memory_bytes", "rows_computed", "edges_computed"):
            _require_not_negative(f"{where}: {name}", getattr(self, name))
        for name, seconds in self.phases.items():
            if name not in PHASES:
                raise ValueError(f"{where}: there is no phase {name!r}; use one of {', '.join(PHASES)}")
            _require_not_negative(f"{where}: phase {name}", seconds)
        total_s = math.fsum(self.phases.values())
        if abs(total_s - self.wall_s) > _tolerance_s(self.wall_s):
            raise ValueError(
                f"{where}: phases sum to {total_s} s, the step took {self.wall_s} s; count every phase once"
            )
        kinds = [exchange.kind for exchange in self.exchanges]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"{where}: exchanges are {', '.join(kinds)}; sum those of a kind into one record")
        for exchange in self.exchanges:
            phase_s = self.phases.get(f"exchange.{exchange.kind}", 0.0)
            if abs(phase_s - exchange.seconds) > _tolerance_s(phase_s):
                raise ValueError(
                    f"{where}: exchange {exchange.kind} took {exchange.seconds} s, its phase {phase_s} s; "
                    f"run it inside the phase exchange.{exchange.kind}"
                )

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for peers in all exchanges."""
        return math.fsum(exchange.wait_s for exchange in self.exchanges)

    @property
    def work_s(self) -> float:
        """Wall time less what a plan does not cost: evaluation, and waiting for a batch that was compiled ahead."""
        return self.wall_s - math.fsum(self.phases.get(name, 0.0) for name in ("evaluate", "sampling", "compiling"))

    @property
    def busy_s(self) -> float:
        """Wall time less waiting. Ranks of a step end together, so this and not `wall_s` tells which is slow."""
        return self.wall_s - self.wait_s

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON types, a loss that is no finite number as a string; `from_dict` is the inverse."""
        data = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        data["phases"] = dict(self.phases)
        data["exchanges"] = [exchange.as_dict() for exchange in self.exchanges]
        data["peers"] = [peer.as_dict() for peer in self.peers]
        data["prepared_s"] = list(self.prepared_s)
        data["loss"] = json_number(self.loss)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepRecord:
        """Raises ValueError with one line on a key too many or too few, a value of a wrong type or a contradiction."""
        names = {entry.name for entry in fields(cls)}
        optional = {"memory_source", "peers", "cpu_s", "prepared_s", "device_utilisation"}
        _require_keys("step record", data, names - optional, optional)
        phases, exchanges, peers = data["phases"], data["exchanges"], data.get("peers", [])
        if not isinstance(phases, Mapping) or not isinstance(exchanges, list | tuple):
            raise ValueError("step record: phases must be an object and exchanges a list")
        prepared = data.get("prepared_s", (0.0, 0.0))
        if not isinstance(peers, list | tuple) or not isinstance(prepared, list | tuple) or len(prepared) != 2:
            raise ValueError("step record: peers must be a list and prepared_s two numbers")
        return cls(
            step=_whole(data, "step"),
            rank=_whole(data, "rank"),
            wall_s=_number(data, "wall_s"),
            phases={name: _number(phases, name) for name in phases},
            exchanges=tuple(ExchangeRecord.from_dict(exchange) for exchange in exchanges),
            peak_memory_bytes=_whole(data, "peak_memory_bytes"),
            rows_computed=_whole(data, "rows_computed"),
            edges_computed=_whole(data, "edges_computed"),
            loss=_number(data, "loss", finite=False),
            plan_fingerprint=_string(data, "plan_fingerprint"),
            memory_source=_string(data, "memory_source") if "memory_source" in data else "unknown",
            peers=tuple(PeerRecord.from_dict(peer) for peer in peers),
            cpu_s=_number(data, "cpu_s") if "cpu_s" in data else 0.0,
            prepared_s=(float(prepared[0]), float(prepared[1])),
            device_utilisation=data.get("device_utilisation"),
        )


def gather_steps(record: StepRecord, gather: Gather) -> tuple[StepRecord, ...]:
    """The records of all ranks for one step, in rank order, the same on every rank.

    Raises ValueError if the ranks are not at the same step or do not come in rank order.
    """
    records = tuple(StepRecord.from_dict(data) for data in gather(record.as_dict()))
    steps = [other.step for other in records]
    if set(steps) != {record.step}:
        raise ValueError(
            f"rank {record.rank} is at step {record.step}, the ranks sent steps {steps}; gather every step"
        )
    ranks = [other.rank for other in records]
    if ranks != list(range(len(records))):
        raise ValueError(f"gather returned the ranks {ranks}; it must return one record a rank, in rank order")
    return records


def slowest_rank(records: Sequence[StepRecord]) -> int:
    """The rank that was busy the longest, the lowest of equals. Raises ValueError without records."""
    if not records:
        raise ValueError("slowest_rank needs at least one record")
    return max(records, key=lambda record: (record.busy_s, -record.rank)).rank


def json_number(value: float) -> float | str:
    """A number as JSON has it: `nan`, `inf` and `-inf` become strings, which `float` reads back."""
    return value if math.isfinite(value) else str(float(value))


def _tolerance_s(seconds: float) -> float:
    """Rounding of a sum of clock readings, and of seconds that went through text."""
    return 1e-6 + 1e-6 * abs(seconds)


def _require_not_negative(what: str, value: float) -> None:
    if not value >= 0 or math.isinf(value):
        raise ValueError(f"{what} is {value}; it must be a finite number, at least 0")


def _require_keys(what: str, data: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    missing = sorted(required - set(data))
    if missing:
        raise ValueError(f"the {what} lacks {missing[0]!r}; it has {', '.join(sorted(data))}")
    unknown = sorted(set(data) - required - optional)
    if unknown:
        raise ValueError(
            f"the {what} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(required | optional))}"
        )


def _whole(data: Mapping[str, Any], name: str) -> int:
    value = data[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    return value


def _number(data: Mapping[str, Any], name: str, *, finite: bool = True) -> float:
    value = data[name]
    if not finite and value in ("nan", "inf", "-inf"):
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    return float(value)


def _string(data: Mapping[str, Any], name: str) -> str:
    value = data[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be a string")
    return value


def gathering_s(ranks: Sequence[Sequence[float]]) -> float:
    """Seconds that gathering records cost a run, of every rank's seconds in each step's `gather_steps`.

    The rank that comes last to a gathering waits for nobody, so the least of a step is what gathering itself takes; the
    others wait for a slower rank, as they would at the next exchange.
    """
    return math.fsum(min(step) for step in zip(*ranks, strict=True))
