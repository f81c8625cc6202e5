"""A window says of every rank what its middle step took and worked on, and survives JSON."""

from __future__ import annotations

import json

import pytest

from monitor import StepRecord
from monitor.windows import Window, reduce_window

PLAN = "aaaa"


def record(step: int, rank: int, compute_s: float, rows: int, edges: int = 0, plan: str = PLAN) -> StepRecord:
    return StepRecord(step, rank, compute_s, {"rowwise": compute_s}, (), 100 + step, rows, edges, 0.5, plan)


def test_rows_and_edges_are_those_of_the_middle_step_by_compute() -> None:
    """Not the median rows, which may be of a step that took another time."""
    seconds, rows = [3.0, 1.0, 2.0, 9.0, 8.0], [30, 10, 90, 20, 25]
    window = reduce_window([[record(i, 0, s, n, 2 * n)] for i, (s, n) in enumerate(zip(seconds, rows, strict=True))])
    (rank,) = window.ranks
    assert (rank.compute_s, rank.rows, rank.edges) == (3.0, 30, 60)
    assert rank.peak_memory_bytes == 104
    even = reduce_window([[record(i, 0, s, n)] for i, (s, n) in enumerate(zip(seconds[:4], rows[:4], strict=True))])
    assert (even.ranks[0].compute_s, even.ranks[0].rows) == (2.5, 60), "between the two in the middle"


def test_drift_imbalance_and_spread() -> None:
    before = reduce_window([[record(0, 0, 1.0, 1), record(0, 1, 1.0, 1)]])
    window = reduce_window([[record(i, 0, 1.0, 1), record(i, 1, 3.0 + i, 1)] for i in (1, 2, 3)], before)
    assert window.step_s == 5.0 and window.drift == 5.0
    assert window.imbalance == pytest.approx(5.0 / 3.0)
    assert window.step_sigma_s == pytest.approx(1.4826)
    assert (window.first_step, window.last_step) == (1, 3)


def test_a_window_survives_json_and_refuses_another_shape() -> None:
    window = reduce_window([[record(0, 0, 1.0, 5, 7)]])
    data = json.loads(json.dumps(window.as_dict()))
    assert Window.from_dict(data) == window
    with pytest.raises(ValueError, match="'drift' is missing or unknown"):
        Window.from_dict({name: value for name, value in data.items() if name != "drift"})


def test_a_window_is_of_one_plan_and_of_some_steps() -> None:
    with pytest.raises(ValueError, match="begin a new one at a switch"):
        reduce_window([[record(0, 0, 1.0, 1)], [record(1, 0, 1.0, 1, plan="bbbb")]])
    with pytest.raises(ValueError, match="at least one step"):
        reduce_window([])
