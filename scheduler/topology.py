"""The topology: what each device and link can do, measured by a short calibration or written by hand.

Not here: the measuring (`gtx/calibrate.py`), and what a plan would cost on it (`cost.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FORMAT = "gtx-topology/1"
FREE = 1e18  # per second: what costs nothing

T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """One rank's device. Quantities are counted as `cost.py` counts them.

    row_flops_per_s: of row-wise products, forward. row_bytes_per_s: of row-wise memory traffic. edge_bytes_per_s: of
    edge-wise work. packed_bytes_per_s: of rows that are packed, sent, received or added up. message_s: of a message.
    visit_s: one layer of one wave, forward and backward, that holds no row. row_backward, edge_backward: backward over
    forward. memory_bytes: what a rank may use, of which resident_bytes are taken before a step.
    """

    row_flops_per_s: float
    edge_bytes_per_s: float
    visit_s: float
    memory_bytes: float
    host: int = 0
    row_bytes_per_s: float = FREE
    packed_bytes_per_s: float = FREE
    message_s: float = 0.0
    row_backward: float = 2.0
    edge_backward: float = 2.0
    resident_bytes: float = 0.0

    def slowed(self, times: float) -> Device:
        """This device when everything it computes takes `times` as long."""
        return replace(
            self,
            row_flops_per_s=self.row_flops_per_s / times,
            row_bytes_per_s=self.row_bytes_per_s / times,
            edge_bytes_per_s=self.edge_bytes_per_s / times,
            packed_bytes_per_s=self.packed_bytes_per_s / times,
            message_s=self.message_s * times,
            visit_s=self.visit_s * times,
        )


@dataclass(frozen=True, eq=False)
class Rates:
    """The devices' figures as arrays `[P]`."""

    row_flops_per_s: Array
    row_bytes_per_s: Array
    edge_bytes_per_s: Array
    packed_bytes_per_s: Array
    message_s: Array
    visit_s: Array
    row_backward: Array
    edge_backward: Array


@dataclass(frozen=True)
class Link:
    """One kind of link: a message of n bytes takes `alpha_s + n / bytes_per_s`."""

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Topology:
    """devices: one a rank. same_host, between_hosts: links. optimizer_bytes_per_s: of an optimizer step's memory
    traffic. step_s: what a step costs beside all that. host_bytes_per_s: between device and host, for offload.
    slow_links: (rank, rank, times slower) of links that are slower than their kind. held: bytes that activations take
    over what the formula counts. contention: share by which ranks slow each other down when all compute at once, as
    ranks that share a memory do. made: date and command, or "by hand".
    """

    devices: tuple[Device, ...]
    same_host: Link
    between_hosts: Link
    optimizer_bytes_per_s: float
    step_s: float
    host_bytes_per_s: float = FREE
    slow_links: tuple[tuple[int, int, float], ...] = ()
    held: float = 1.0
    contention: float = 0.0
    made: str = "by hand"

    def __post_init__(self) -> None:
        check_topology(self)

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def smallest_memory(self) -> float:
        """Bytes that every device has."""
        return min(device.memory_bytes for device in self.devices)

    @cached_property
    def rates(self) -> Rates:
        return Rates(**{f.name: np.array([getattr(d, f.name) for d in self.devices]) for f in fields(Rates)})

    @cached_property
    def slowness(self) -> Array:
        """How many times slower than its kind each link is, `[P, P]`, symmetric."""
        times = np.ones((self.world_size, self.world_size))
        for a, b, factor in self.slow_links:
            times[a, b] = times[b, a] = factor
        return times

    @cached_property
    def alpha_s(self) -> Array:
        """Seconds of an empty message from rank to rank, `[P, P]`."""
        return np.where(self._near, self.same_host.alpha_s, self.between_hosts.alpha_s)

    @cached_property
    def bytes_per_s(self) -> Array:
        """Bytes per second from rank to rank, `[P, P]`."""
        found: Array = np.where(self._near, self.same_host.bytes_per_s, self.between_hosts.bytes_per_s) / self.slowness
        return found

    @property
    def slowest_link(self) -> Link:
        """The link that a collective over all ranks waits for."""
        kind = self.same_host if self._near.all() else self.between_hosts
        return Link(kind.alpha_s, kind.bytes_per_s / float(self.slowness.max()))

    @cached_property
    def _near(self) -> npt.NDArray[np.bool_]:
        host = np.array([device.host for device in self.devices])
        found: npt.NDArray[np.bool_] = host[:, None] == host[None, :]
        return found

    def with_speeds(self, times_slower: Sequence[float]) -> Topology:
        """The same machine with each device's computing slowed down by a factor."""
        devices = tuple(d.slowed(t) for d, t in zip(self.devices, times_slower, strict=True))
        return replace(self, devices=devices)

    def resized(self, world_size: int, devices_per_host: int | None = None) -> Topology:
        """The same kind of machine with another number of devices, all like the first one, and no slow link."""
        first = self.devices[0]
        per_host = devices_per_host or world_size
        return replace(
            self, devices=tuple(replace(first, host=rank // per_host) for rank in range(world_size)), slow_links=()
        )

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def check_topology(topology: Topology) -> None:
    """Raise ValueError with one line for a device or link that cannot be."""
    if not topology.devices:
        raise ValueError("topology.devices is empty; describe at least one device")
    rates = ("row_flops_per_s", "row_bytes_per_s", "edge_bytes_per_s", "packed_bytes_per_s", "memory_bytes")
    times = ("visit_s", "message_s", "row_backward", "edge_backward", "resident_bytes")
    for rank, device in enumerate(topology.devices):
        for name in rates:
            _require(getattr(device, name) > 0, f"topology.devices[{rank}].{name}", getattr(device, name), "positive")
        for name in times:
            _require(
                getattr(device, name) >= 0, f"topology.devices[{rank}].{name}", getattr(device, name), "at least 0"
            )
    for where in ("same_host", "between_hosts"):
        link = getattr(topology, where)
        _require(link.alpha_s >= 0, f"topology.{where}.alpha_s", link.alpha_s, "at least 0")
        _require(link.bytes_per_s > 0, f"topology.{where}.bytes_per_s", link.bytes_per_s, "positive")
    for name in ("optimizer_bytes_per_s", "host_bytes_per_s"):
        _require(getattr(topology, name) > 0, f"topology.{name}", getattr(topology, name), "positive")
    _require(topology.contention >= 0, "topology.contention", topology.contention, "at least 0")
    _require(topology.held > 0, "topology.held", topology.held, "positive")
    _require(topology.step_s >= 0, "topology.step_s", topology.step_s, "at least 0")
    size = len(topology.devices)
    for i, (a, b, times_slower) in enumerate(topology.slow_links):
        where = f"topology.slow_links[{i}]"
        _require(0 <= a < size and 0 <= b < size and a != b, where, (a, b), f"two different ranks below {size}")
        _require(times_slower >= 1, where, times_slower, "at least 1 times slower")


def topology_from_json(text: str) -> Topology:
    """Parse a topology file. Raises ValueError with one line on anything missing, unknown or impossible."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the topology is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"the topology's format is {found!r}, this version reads {FORMAT!r}")
    data = {key: value for key, value in data.items() if key != "format"}
    if isinstance(data.get("devices"), list):
        data["devices"] = tuple(_build(Device, d, f"topology.devices[{i}]") for i, d in enumerate(data["devices"]))
    for where in ("same_host", "between_hosts"):
        if where in data:
            data[where] = _build(Link, data[where], f"topology.{where}")
    if "slow_links" in data:
        data["slow_links"] = _links(data["slow_links"])
    return _build(Topology, data, "topology")


def _links(data: Any) -> tuple[tuple[int, int, float], ...]:
    if not isinstance(data, list) or any(not isinstance(entry, list) or len(entry) != 3 for entry in data):
        raise ValueError(f"topology.slow_links is {data!r}; it must be a list of [rank, rank, times slower]")
    return tuple((int(a), int(b), float(factor)) for a, b, factor in data)


def _build(kind: type[T], data: Any, where: str) -> T:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {data!r}; it must be an object")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key, value in data.items():
        if key not in known:
            raise ValueError(f"{where} has the unknown key {key!r}; known keys are {', '.join(known)}")
        wants_number = str(known[key].type) in ("float", "int")
        if wants_number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{where}.{key} is {value!r}; it must be a number")
    try:
        return kind(**data)
    except TypeError as error:
        raise ValueError(f"{where} is incomplete: {error}") from None


def _require(holds: bool, where: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{where} is {value!r}; it must be {wanted}")
