"""A topology survives its file, and a wrong one is one clear line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from scheduler.topology import Device, Link, Topology, topology_from_json

GOOD = Topology(
    (Device(1e9, 2e9, 1e-4, 8e9, host=0), Device(1e9, 2e9, 1e-4, 8e9, host=1)),
    Link(1e-5, 1e9),
    Link(1e-3, 1e8),
    1e10,
    0.01,
)


def test_json_both_ways() -> None:
    assert topology_from_json(GOOD.to_json()) == GOOD


def test_links_by_host() -> None:
    assert GOOD.alpha_s[0, 0] == GOOD.same_host.alpha_s
    assert GOOD.alpha_s[0, 1] == GOOD.between_hosts.alpha_s
    assert GOOD.bytes_per_s[1, 0] == GOOD.between_hosts.bytes_per_s
    assert GOOD.slowest_link == GOOD.between_hosts
    throttled = replace(GOOD, slow_links=((0, 1, 10.0),))
    assert throttled.bytes_per_s[1, 0] == throttled.bytes_per_s[0, 1] == GOOD.between_hosts.bytes_per_s / 10
    assert topology_from_json(throttled.to_json()) == throttled
    assert [d.host for d in GOOD.resized(5, devices_per_host=2).devices] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"format": "x"}, "format is 'x'"),
        ({"devices": []}, "devices is empty"),
        ({"slow_links": [[0, 0, 2.0]]}, r"slow_links\[0\] is \(0, 0\)"),
        ({"slow_links": [[0, 1, 0.5]]}, r"slow_links\[0\] is 0.5"),
        ({"slow_links": [3]}, r"slow_links is \[3\]"),
        ({"same_host": {"alpha_s": -1.0, "bytes_per_s": 1.0}}, "topology.same_host.alpha_s is -1.0"),
        ({"same_host": {"alpha_s": 1.0, "bytes_per_s": 0}}, "topology.same_host.bytes_per_s is 0"),
        ({"same_host": {"alpha_s": 1.0}}, "topology.same_host is incomplete"),
        ({"between_hosts": 3}, "topology.between_hosts is 3"),
        ({"optimizer_bytes_per_s": "fast"}, "topology.optimizer_bytes_per_s is 'fast'; it must be a number"),
        ({"step_s": -1}, "topology.step_s is -1"),
        ({"speed": 1}, "unknown key 'speed'"),
        ({"devices": [{"row_flops_per_s": 0, "edge_bytes_per_s": 1, "visit_s": 0, "memory_bytes": 1}]}, "positive"),
        ({"devices": [{"row_flops_per_s": 1, "edge_bytes_per_s": 1, "visit_s": -1, "memory_bytes": 1}]}, "at least 0"),
    ],
)
def test_refusals(change: dict[str, Any], line: str) -> None:
    data = {**json.loads(GOOD.to_json()), **change}
    with pytest.raises(ValueError, match=line) as error:
        topology_from_json(json.dumps(data))
    assert "\n" not in str(error.value)


def test_what_is_no_json() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        topology_from_json("{")
    with pytest.raises(ValueError, match="format is 'list'"):
        topology_from_json("[]")
