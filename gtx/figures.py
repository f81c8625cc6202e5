"""The figures of a run as inline SVG: text stays text, ink takes the page's colour, nothing is fetched.

Not here: which figures a page holds and what is said beside them (`page.py`), and how figures were measured
(`monitor/`). Every function returns one `<svg>` element with a title and a description for those who cannot see it.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from gtx.run_folder import Span
from gtx.words import bytes_text
from monitor import PHASES, Window

MAX_POINTS = 500  # of a line
SHORT_SPAN = 1e-3  # of a step: shorter spans of a trace are merged
MAX_RANKS = 32  # drawn one by one; more would not be legible
VERDICTS = ("stay", "switch", "return", "stopped")

_WIDTH_IN = 9.0
_INK = "#010203"  # stands for the page's text colour until the SVG is done
_COLOURS = dict(
    zip(
        PHASES,
        (
            *("#b08d57", "#d4b13f", "#3d85d8", "#24a3a3"),  # sampling, compiling, rowwise, edgewise
            *("#f4b860", "#f08a3c", "#de5a2b", "#c73e5c", "#e57fb0", "#a4343a"),  # exchanges
            *("#7a5fd0", "#4ca35a", "#96a53a", "#9aa0a6"),  # backward, optimizer, evaluate, other
        ),
        strict=True,
    )
)
_RANK_COLOURS = ("#3d85d8", "#f08a3c", "#4ca35a", "#c73e5c", "#7a5fd0", "#24a3a3", "#d4b13f", "#e57fb0")
_HEAT = LinearSegmentedColormap.from_list("heat", ["#dfeaf7", "#3d85d8", "#12305c"], N=32)  # no bitmap
_MARKERS = {"stay": ("o", 3.0), "switch": ("^", 8.0), "return": ("v", 8.0), "stopped": ("s", 4.0)}
_VERDICT_COLOURS = dict(zip(VERDICTS, ("#9aa0a6", "#4ca35a", "#c73e5c", "#b08d57"), strict=True))

Values = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Words:
    """What a reader who cannot see the figure is told. name: unique in the page, of letters, digits and dashes."""

    name: str
    title: str
    description: str


@dataclass(frozen=True)
class Ran:
    """A plan that ran from step `first` up to and without `end`."""

    plan: str
    first: int
    end: int


@dataclass(frozen=True)
class Mark:
    """A decision after a step, on the line of the plan that ran. number: of the switch it led to, or None."""

    step: int
    plan: str
    verdict: str
    number: int | None


# One figure each ------------------------------------------------------------------------------------------------------


def gantt(words: Words, traces: Mapping[int, Sequence[Span]]) -> str:
    """The spans of one step, a line a rank. Short spans are merged, see `merge_short`."""
    ranks = sorted(traces)[:MAX_RANKS]
    length_s = max((span.end_s for rank in ranks for span in traces[rank]), default=0.0)
    merged = {rank: merge_short(traces[rank], SHORT_SPAN * length_s) for rank in ranks}
    phases = [phase for phase in PHASES if any(span.phase == phase for spans in merged.values() for span in spans)]
    with _style(words):
        figure = _figure(1.15 + 0.34 * len(ranks))
        axes = figure.add_subplot()
        for phase in phases:
            ends = [
                (1e3 * seconds, rank)
                for rank, spans in merged.items()
                for span in spans
                if span.phase == phase
                for seconds in (span.begin_s, span.end_s)
            ]
            outline = Outline(np.array(ends), [Outline.MOVETO, Outline.LINETO] * (len(ends) // 2))
            axes.add_patch(
                PathPatch(outline, fill=False, edgecolor=_COLOURS[phase], linewidth=17, capstyle="butt", label=phase)
            )
        axes.set(xlim=(0, 1e3 * length_s or 1.0), ylim=(max(ranks, default=0) + 0.6, -0.6), xlabel="milliseconds")
        axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axes.tick_params(axis="y", length=0)
        _legend(figure, [Line2D([], [], color=_COLOURS[phase], linewidth=7, label=phase) for phase in phases])
        return _svg(figure, words)


def plans(words: Words, ran: Sequence[Ran], marks: Sequence[Mark], costs_s: Mapping[int, float]) -> str:
    """Which plan ran when, what was decided, and the seconds of each switch by the step it came before."""
    names = list(dict.fromkeys(entry.plan for entry in ran))
    with _style(words):
        figure = _figure(1.3 + 0.4 * len(names) + (1.1 if costs_s else 0.0))
        upper: Axes
        if costs_s:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(0.5 + 0.4 * len(names), 1.1))
            lower.vlines(list(costs_s), 0, list(costs_s.values()), colors=_COLOURS["exchange.kv"], linewidth=3)
            lower.set(ylabel="seconds of\nthe switch", ylim=(0, 1.15 * max(costs_s.values()) or 1.0))
        else:
            upper = figure.add_subplot()
            lower = upper
        for entry in ran:
            y = names.index(entry.plan)
            upper.hlines(y, entry.first, entry.end, colors=_RANK_COLOURS[y % len(_RANK_COLOURS)], linewidth=11)
        handles = []
        for verdict in VERDICTS:
            found = [mark for mark in marks if mark.verdict == verdict and mark.plan in names]
            if not found:
                continue
            marker, size = _MARKERS[verdict]
            handles += upper.plot(
                [mark.step + 0.5 for mark in found],
                [names.index(mark.plan) - 0.38 for mark in found],
                linestyle="none",
                marker=marker,
                markersize=size,
                color=_VERDICT_COLOURS[verdict],
                label=verdict,
            )
            for mark in found:
                if mark.number is not None:
                    upper.annotate(
                        str(mark.number),
                        (mark.step + 0.5, names.index(mark.plan) - 0.38),
                        xytext=(6, -3),
                        textcoords="offset points",
                    )
        upper.set_yticks(range(len(names)), names)
        upper.tick_params(axis="y", length=0)
        upper.set(ylim=(len(names) - 0.6, -0.8), xlim=(0, max((entry.end for entry in ran), default=1)))
        lower.set_xlabel("step")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, handles)
        return _svg(figure, words)


def predictions(words: Words, points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Predicted against measured seconds of a step by kind of prediction; on the line they agree."""
    with _style(words):
        figure = _figure(3.6)
        axes = figure.add_subplot()
        every = [1e3 * value for pairs in points.values() for pair in pairs for value in pair]
        ends = (min(every) / 1.2, max(every) * 1.2)
        axes.plot(ends, ends, color=_INK, alpha=0.4, linewidth=1)
        handles = []
        for index, (kind, pairs) in enumerate(points.items()):
            handles += axes.plot(
                [1e3 * predicted for predicted, _ in pairs],
                [1e3 * measured for _, measured in pairs],
                linestyle="none",
                marker="o^sD"[index % 4],
                alpha=0.8,
                color=_RANK_COLOURS[index],
                label=kind,
            )
        if ends[1] > 10 * ends[0]:
            axes.set(xscale="log", yscale="log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlim=ends, ylim=ends, aspect="equal", anchor="W")
        axes.set(xlabel="predicted milliseconds", ylabel="measured milliseconds")
        _legend(figure, handles)
        return _svg(figure, words)


def step_times(words: Words, steps: Values, step_s: Values, windows: Sequence[Window]) -> str:
    """Step time of the slowest rank and imbalance, by step and by window. The line breaks where the plan changes."""
    points: list[tuple[float, float, float, float]] = []
    for before, window in zip([None, *windows], windows, strict=False):
        if before is not None and before.plan_fingerprint != window.plan_fingerprint:
            points.append((math.nan,) * 4)
        middle = (window.first_step + window.last_step) / 2
        points.append((middle, window.step_s, window.step_sigma_s, window.imbalance))
    with _style(words):
        figure = _figure(3.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        if len(steps):
            x, y = downsample(steps, step_s)
            upper.plot(x, 1e3 * y, color=_COLOURS["other"], linewidth=0.9, label="a step")
        x, seconds, sigma, imbalance = np.array(points).T
        marker = "o-" if len(windows) <= 60 else "-"
        upper.errorbar(
            x, 1e3 * seconds, 1e3 * sigma, fmt=marker, markersize=3, linewidth=1.3, color=_COLOURS["rowwise"],
            label="a window's median, and its spread",
        )  # fmt: skip
        highest = 1e3 * float(np.nanmax(seconds + sigma))
        longest = 1e3 * float(np.max(step_s)) if len(steps) else highest
        upper.set(ylabel="milliseconds", ylim=(0, min(1.1 * max(longest, highest), 3.0 * highest) or 1.0))
        lower.plot(x, imbalance, marker, markersize=3, linewidth=1.3, color=_COLOURS["backward"])
        lower.axhline(1.0, color=_INK, alpha=0.4, linewidth=1)
        lower.set(ylabel="busiest rank\nover the mean", xlabel="step", ylim=(0.95, None))
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, upper.get_legend_handles_labels()[0])
        return _svg(figure, words)


def phases_by_rank(words: Words, ranks: Sequence[Mapping[str, float]]) -> str:
    """Mean seconds of a step by phase, a stacked bar a rank."""
    shown = ranks[:MAX_RANKS]
    phases = [phase for phase in PHASES if any(rank.get(phase, 0.0) > 0 for rank in shown)]
    with _style(words):
        figure = _figure(1.15 + 0.34 * len(shown))
        axes = figure.add_subplot()
        left = np.zeros(len(shown))
        for phase in phases:
            width = 1e3 * np.array([rank.get(phase, 0.0) for rank in shown])
            axes.barh(range(len(shown)), width, left=left, height=0.72, color=_COLOURS[phase], label=phase)
            left += width
        axes.set(xlabel="milliseconds a step", ylim=(len(shown) - 0.4, -0.6))
        axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in range(len(shown))])
        axes.tick_params(axis="y", length=0)
        _legend(figure, [Line2D([], [], color=_COLOURS[phase], linewidth=7, label=phase) for phase in phases])
        return _svg(figure, words)


def memory(words: Words, steps: Values, by_rank: Sequence[Values]) -> str:
    """Peak memory of each rank over steps; of many ranks the highest, the median and the lowest."""
    lines = {f"rank {rank}": np.asarray(values, np.float64) for rank, values in enumerate(by_rank)}
    if len(lines) > len(_RANK_COLOURS):
        every = np.array(list(lines.values()))  # [P, steps]
        lines = {"highest": every.max(0), "median": np.median(every, axis=0), "lowest": every.min(0)}
    unit, scale = ("GiB", 2**30) if max(line.max() for line in lines.values()) >= 2**30 else ("MiB", 2**20)
    with _style(words):
        figure = _figure(2.6)
        axes = figure.add_subplot()
        for colour, (name, values) in zip(_RANK_COLOURS, lines.items(), strict=False):
            x, y = downsample(steps, values, np.max)
            axes.plot(x, y / scale, color=colour, linewidth=1.3, label=name)
        axes.set(xlabel="step", ylabel=unit, ylim=(0, 1.1 * max(line.max() for line in lines.values()) / scale or 1.0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, axes.get_legend_handles_labels()[0])
        return _svg(figure, words)


def pairs(words: Words, sent_bytes: npt.NDArray[np.float64]) -> str:
    """Bytes of a step from each rank (line) to each rank (column). sent_bytes: [P, P]."""
    size = len(sent_bytes)
    highest = float(sent_bytes.max()) or 1.0
    with _style(words):
        figure = _figure(1.3 + min(5.0, 0.45 * size))
        axes = figure.add_subplot()
        drawn = np.ma.masked_equal(sent_bytes, 0.0)
        mesh = axes.pcolormesh(drawn, cmap=_HEAT, vmin=0, vmax=highest, linewidth=0.5, edgecolors=_INK)
        bar = figure.colorbar(mesh, ax=axes, format=lambda value, _: bytes_text(value), shrink=0.9)
        bar.set_ticks([0.0, highest / 2, highest])
        bar.outline.set_visible(False)  # type: ignore[operator]
        if size <= 12:
            for i, j in np.ndindex(size, size):
                if sent_bytes[i, j]:
                    colour = "#101820" if sent_bytes[i, j] < 0.45 * highest else "#ffffff"
                    text = bytes_text(sent_bytes[i, j])
                    axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", color=colour, fontsize=8)
        every = max(1, size // 16)
        axes.set_xticks(np.arange(0, size, every) + 0.5, [str(rank) for rank in range(0, size, every)])
        axes.set_yticks(np.arange(0, size, every) + 0.5, [str(rank) for rank in range(0, size, every)])
        axes.set(xlabel="to rank", ylabel="from rank", ylim=(size, 0))
        axes.tick_params(length=0)
        axes.grid(visible=False)
        return _svg(figure, words)


def losses(words: Words, loss: Values, scores: Mapping[str, tuple[Values, Values]], metric: str) -> str:
    """Loss over steps and, where there are any, scores by name over steps. What is not finite is left out."""
    with _style(words):
        scored = any(len(steps) for steps, _ in scores.values())
        figure = _figure(3.8 if scored else 2.4)
        upper: Axes
        if scored:
            upper, lower = figure.subplots(2, 1, sharex=True)
            for colour, (name, (steps, values)) in zip(_RANK_COLOURS[2:], scores.items(), strict=False):
                x, y = downsample(steps, values)
                lower.plot(x, y, "o-", markersize=3, linewidth=1.3, color=colour, label=name)
            lower.set(ylabel=metric)
        else:
            upper = figure.add_subplot()
            lower = upper
        x, y = downsample(np.arange(len(loss), dtype=np.float64), loss)
        upper.plot(x, y, color=_COLOURS["rowwise"], linewidth=1.3, label="loss")
        upper.set(ylabel="loss")
        lower.set(xlabel="step")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, lower.get_legend_handles_labels()[0])
        return _svg(figure, words)


# Less to draw ---------------------------------------------------------------------------------------------------------


def downsample(
    steps: Values, values: Values, reduce: Callable[[Any], Any] = np.mean
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """At most `MAX_POINTS` points: equal runs of neighbours become their mean, or what `reduce` makes of them.

    Values that are no finite number are left out of a run; a run without any is NaN, a gap in the line.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= MAX_POINTS:
        return x, y
    ends = np.linspace(0, len(x), MAX_POINTS + 1).round().astype(int)
    runs = [y[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
    kept = [run[~np.isnan(run)] for run in runs]
    return (
        np.array([x[begin:end].mean() for begin, end in zip(ends, ends[1:], strict=False)]),
        np.array([reduce(run) if len(run) else np.nan for run in kept]),
    )


def merge_short(spans: Sequence[Span], shortest_s: float) -> list[Span]:
    """Neighbours of one phase become one span; a run of spans too short to see, the phase that ran longest in it.

    No time is lost: whatever a span covered is covered afterwards. A phase that is not known counts as `other`.
    """
    merged: list[Span] = []
    run: dict[str, float] = {}  # seconds by phase of short spans that wait to be merged
    begin_s = end_s = 0.0

    def put(phase: str, begin: float, end: float) -> None:
        if merged and merged[-1].phase == phase and begin - merged[-1].end_s <= shortest_s:
            begin = merged.pop().begin_s
        merged.append(Span(phase, begin, end))

    for span in sorted(spans, key=lambda span: span.begin_s):
        phase = span.phase if span.phase in _COLOURS else "other"
        short = span.end_s - span.begin_s < shortest_s
        if run and (not short or span.begin_s - end_s > shortest_s or end_s - begin_s >= shortest_s):
            put(max(run, key=lambda name: run[name]), begin_s, end_s)
            run = {}
        if not short:
            put(phase, span.begin_s, span.end_s)
            continue
        if not run:
            begin_s = span.begin_s
        run[phase] = run.get(phase, 0.0) + span.end_s - span.begin_s
        end_s = span.end_s
    if run:
        put(max(run, key=lambda name: run[name]), begin_s, end_s)
    return merged


# From matplotlib to the page ------------------------------------------------------------------------------------------


def _style(words: Words) -> AbstractContextManager[None]:
    ink: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    )
    clear: dict[Any, Any] = dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none")
    return matplotlib.rc_context(
        {
            **{key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"},
            **ink,
            **clear,
            "svg.fonttype": "none",
            "svg.hashsalt": words.name,
            "font.size": 9.0,
            "text.parse_math": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": _INK,
            "grid.alpha": 0.15,
            "legend.frameon": False,
        }
    )


def _figure(height_in: float) -> Figure:
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Above the axes, in lines of at most seven, unless there is nothing to tell apart."""
    if handles:
        columns = math.ceil(len(handles) / math.ceil(len(handles) / 7))
        figure.legend(
            handles=list(handles), loc="outside upper left", ncols=columns, handlelength=1.2, columnspacing=1.2
        )


def _svg(figure: Figure, words: Words) -> str:
    """The figure as an `<svg>` that scales, without what only a file of its own needs."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = text[text.index(">", box.end()) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href").replace(_INK, "currentColor")
    body = re.sub(r'\bid="', f'id="{words.name}-', body)
    body = re.sub(r'(url\(|href=")#', rf"\1#{words.name}-", body)
    body = re.sub(r' d="[^"]*"', lambda found: _shorter(found[0]), body)
    body = re.sub(r"font-family: [^;\"]*; ", "", body)  # the page's own
    body = re.sub(r"\s*\n\s*", "\n", body)
    title, described = f"{words.name}-title", f"{words.name}-description"
    return (
        f'<svg {box[0]} role="img" aria-labelledby="{title} {described}">'
        f'<title id="{title}">{html.escape(words.title)}</title>'
        f'<desc id="{described}">{html.escape(words.description)}</desc>{body}</svg>'
    )


def _shorter(path: str) -> str:
    """A path's coordinates to a tenth of a pixel and without line breaks."""
    path = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), path)
    return re.sub(r" ?\n|(?<=[A-Z]) ", "", path)
