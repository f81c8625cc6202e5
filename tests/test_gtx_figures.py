"""What figures leave out: fewer points, merged spans, and no time lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtx.figures import MAX_POINTS, Words, downsample, gantt, merge_short
from gtx.run_folder import Span
from monitor import PHASES

LENGTHS = st.lists(st.tuples(st.sampled_from(PHASES), st.floats(1e-6, 0.1)), min_size=1, max_size=60)


def spans_of(lengths: list[tuple[str, float]]) -> list[Span]:
    ends = np.cumsum([0.0, *(length for _, length in lengths)])
    return [Span(phase, ends[i], ends[i + 1]) for i, (phase, _) in enumerate(lengths)]


@given(st.integers(1, 3000))
def test_a_line_has_few_points_and_keeps_its_ends_and_its_mean(num_points: int) -> None:
    x = np.arange(num_points, dtype=float)
    steps, values = downsample(x, 2.0 * x)
    assert len(steps) == len(values) == min(num_points, MAX_POINTS)
    np.testing.assert_allclose(values, 2.0 * steps)  # the mean of a straight line is on it
    assert (np.diff(steps) > 0).all()
    assert downsample(x, x, np.max)[1][-1] == num_points - 1


def test_what_is_no_number_is_a_gap_and_does_not_spread() -> None:
    values = np.ones(1000)
    values[10], values[20:22] = math.inf, math.nan  # points of two: one of a half, one of none
    _, shown = downsample(np.arange(1000.0), values)
    assert np.isnan(shown).sum() == 1 and np.nansum(shown) == MAX_POINTS - 1


@given(LENGTHS, st.floats(1e-6, 0.05))
def test_merged_spans_cover_the_same_time_in_order(lengths: list[tuple[str, float]], shortest_s: float) -> None:
    spans = spans_of(lengths)
    merged = merge_short(spans, shortest_s)
    assert (merged[0].begin_s, merged[-1].end_s) == (spans[0].begin_s, spans[-1].end_s)
    for before, after in zip(merged, merged[1:], strict=False):
        assert before.end_s == after.begin_s and before.phase != after.phase
    assert merge_short(spans, 0.0) == merge_short(merge_short(spans, 0.0), 0.0)
    whole_s = spans[-1].end_s
    # Every second span at least is as long as asked for; what is left over at the end of a run may be shorter.
    assert len(merged) <= 2 * whole_s / shortest_s + 3


def test_a_run_of_short_spans_becomes_what_ran_longest_in_it() -> None:
    short = [("rowwise", 0.003), ("edgewise", 0.002), ("rowwise", 0.003)]
    spans = spans_of([("backward", 1.0), *short, ("unheard of", 1.0)])
    merged = merge_short(spans, 0.01)
    assert [span.phase for span in merged] == ["backward", "rowwise", "other"]
    assert merged[1].end_s - merged[1].begin_s == pytest.approx(0.008)


def test_a_trace_with_gaps_keeps_them() -> None:
    spans = [Span("rowwise", 0.0, 1.0), Span("rowwise", 2.0, 3.0)]
    assert merge_short(spans, 0.5) == spans


def test_two_figures_share_no_ids_and_the_same_one_is_drawn_the_same() -> None:
    traces = {0: spans_of([("rowwise", 0.1), ("backward", 0.2)])}
    one, other = (gantt(Words(name, "a title", "a <description>"), traces) for name in ("one", "other"))
    assert one == gantt(Words("one", "a title", "a <description>"), traces)
    assert one.replace('"one-', '"other-').count('id="other-') == other.count('id="other-') > 10
    assert "a &lt;description&gt;" in one and "currentColor" in one
