"""Reads what a run left in its folder: the strategy report, the records of every step, and the traces.

Not here: who writes them (`train.py`, `monitor/sinks.py`, `report.py`), and how they are shown (`page.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtx.report import load_report
from monitor import StepRecord, Window, read_steps, reduce_window

MAX_TRACES = 8  # that are read; the last ones


@dataclass(frozen=True)
class Span:
    """A phase that ran from `begin_s` to `end_s` of a step."""

    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """The spans of every rank in one step. plan: the fingerprint of the plan it ran under."""

    step: int
    plan: str
    spans: Mapping[int, Sequence[Span]]


@dataclass(frozen=True)
class Run:
    """What a run left.

    records: of every step that all ranks recorded, in rank order. steps: each of them as a window of its own.
    records_note: why there are no records. traces_note: what is to be said of traces that are not here.
    families: the mode, or `mixed`, of the plans it is known of, by fingerprint.
    """

    report: Mapping[str, Any]
    records: Sequence[Sequence[StepRecord]]
    steps: Sequence[Window]
    traces: Sequence[Trace]
    records_note: str
    traces_note: str
    families: Mapping[str, str]

    @property
    def scheduler(self) -> Mapping[str, Any]:
        """The report's block of that name, empty where there is none."""
        return self.report["scheduler"] or {}

    @property
    def num_steps(self) -> int:
        return len(self.report["losses"])

    @property
    def setting(self) -> str:
        """As the config asked: a mode, mixed, file, auto or adaptive."""
        return str(self.scheduler.get("setting", self.report["plan"]["mode"]))

    def plan(self, fingerprint: str) -> str:
        """A plan as a reader tells it from others."""
        return f"{self.families.get(fingerprint, 'plan')} {fingerprint[:8]}"


def read_run(run_dir: Path) -> Run:
    """Read a run folder. Raises ValueError with one line without a report; records and traces may be missing."""
    report = load_report(run_dir)
    records, records_note = _read_records(run_dir / "records.jsonl", int(report["run"]["world_size"]))
    traces, traces_note = _read_traces(run_dir)
    steps = [reduce_window([ranks]) for ranks in records]
    return Run(report, records, steps, traces, records_note, traces_note, _families(report))


def _read_records(path: Path, world_size: int) -> tuple[list[tuple[StepRecord, ...]], str]:
    """The steps that every rank recorded, in order; or why there are none. A step recorded anew replaces the old."""
    try:
        found = {(record.step, record.rank): record for record in read_steps(path)}
    except FileNotFoundError:
        return [], f"the run folder holds no {path.name}, as with monitor.records false"
    except (OSError, ValueError) as error:
        return [], f"{path.name} cannot be read: {error}"
    ranks = range(world_size)
    steps = sorted({step for step, _ in found})
    whole = [tuple(found[step, r] for r in ranks) for step in steps if all((step, r) in found for r in ranks)]
    return whole, "" if whole else f"{path.name} holds no step of all {world_size} ranks"


def _read_traces(run_dir: Path) -> tuple[list[Trace], str]:
    """The last traces in order of their steps, and what is to be said of the others."""
    traces, notes = [], []
    for path in sorted(run_dir.glob("trace-*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            spans: dict[int, list[Span]] = {}
            for event in data["traceEvents"]:
                if event.get("ph") == "X":
                    begin_s = float(event["ts"]) / 1e6
                    span = Span(str(event["name"]), begin_s, begin_s + float(event["dur"]) / 1e6)
                    spans.setdefault(int(event["tid"]), []).append(span)
            step, plan = int(data["otherData"]["step"]), str(data["otherData"]["plan"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            notes.append(f"{path.name} cannot be read as a trace ({type(error).__name__}: {error}).")
            continue
        if any(spans.values()):
            traces.append(Trace(step, plan, spans))
        else:
            notes.append(f"{path.name} holds no spans.")
    traces.sort(key=lambda trace: trace.step)
    if len(traces) > MAX_TRACES:
        notes.append(f"{len(traces)} steps were traced, the last {MAX_TRACES} are shown.")
    return traces[-MAX_TRACES:], " ".join(notes)


def _families(report: Mapping[str, Any]) -> dict[str, str]:
    """The mode, or `mixed`, of every plan of which the report tells it."""
    modes = {partition["mode"] for partition in report["partitions"]}
    known = {report["plan"]["fingerprint"]: modes.pop() if len(modes) == 1 else "mixed"}
    scheduler = report["scheduler"] or {}
    considered = [*scheduler.get("candidates", [])]
    for decision in scheduler.get("decisions", []):
        considered += decision["candidates"]
    known |= {entry["fingerprint"]: entry["family"] for entry in considered if entry["fingerprint"]}
    known |= {probe["plan"]: probe["family"] for probe in scheduler.get("probes", [])}
    return known
