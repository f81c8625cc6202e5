"""The topology: what each device and link can do, measured by a short calibration or written by hand.

Not here: the measuring (`gtx/calibrate.py`), and what a plan would cost on it (`cost.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

FORMAT = "gtx-topology/1"

T = TypeVar("T")


@dataclass(frozen=True)
class Device:
    """One rank's device.

    row_flops_per_s: of row-wise work (dense products). edge_bytes_per_s: of edge-wise work, counted as `cost.py` counts
    bytes. visit_s: one layer of one wave, forward and backward, that holds no row. memory_bytes: what a rank may use.
    """

    row_flops_per_s: float
    edge_bytes_per_s: float
    visit_s: float
    memory_bytes: float
    host: int = 0


@dataclass(frozen=True)
class Link:
    """One kind of link: a message of n bytes takes `alpha_s + n / bytes_per_s`."""

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Topology:
    """devices: one a rank. same_host, between_hosts: links. optimizer_bytes_per_s: of an optimizer step's memory
    traffic. step_s: what a step costs beside all that. made: date and command, or "by hand".
    """

    devices: tuple[Device, ...]
    same_host: Link
    between_hosts: Link
    optimizer_bytes_per_s: float
    step_s: float
    made: str = "by hand"

    def __post_init__(self) -> None:
        check_topology(self)

    @property
    def world_size(self) -> int:
        return len(self.devices)

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks."""
        return self.same_host if self.devices[a].host == self.devices[b].host else self.between_hosts

    def resized(self, world_size: int, devices_per_host: int | None = None) -> Topology:
        """The same kind of machine with another number of devices, all like the first one."""
        first = self.devices[0]
        per_host = devices_per_host or world_size
        return replace(self, devices=tuple(replace(first, host=rank // per_host) for rank in range(world_size)))

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def check_topology(topology: Topology) -> None:
    """Raise ValueError with one line for a device or link that cannot be."""
    if not topology.devices:
        raise ValueError("topology.devices is empty; describe at least one device")
    for rank, device in enumerate(topology.devices):
        for name in ("row_flops_per_s", "edge_bytes_per_s", "memory_bytes"):
            _require(getattr(device, name) > 0, f"topology.devices[{rank}].{name}", getattr(device, name), "positive")
        _require(device.visit_s >= 0, f"topology.devices[{rank}].visit_s", device.visit_s, "at least 0")
    for where in ("same_host", "between_hosts"):
        link = getattr(topology, where)
        _require(link.alpha_s >= 0, f"topology.{where}.alpha_s", link.alpha_s, "at least 0")
        _require(link.bytes_per_s > 0, f"topology.{where}.bytes_per_s", link.bytes_per_s, "positive")
    _require(
        topology.optimizer_bytes_per_s > 0, "topology.optimizer_bytes_per_s", topology.optimizer_bytes_per_s, "positive"
    )
    _require(topology.step_s >= 0, "topology.step_s", topology.step_s, "at least 0")


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
    return _build(Topology, data, "topology")


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
