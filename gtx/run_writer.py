"""What rank 0 writes into the run folder while a run lasts: config, plans, records, metrics, traces, checkpoints.

Not here: the sinks themselves (`monitor/sinks.py`), the report (`report.py`), who reads it all (`run_folder.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from gtx.checkpoint import BEST, FOLDER, LATEST, EngineState, Progress, write_checkpoint
from gtx.config import Config
from gtx.environment import versions
from monitor import CsvSink, JsonlSink, ProgressBar, StepRecord, TensorBoardSink
from scheduler.plan import Plan


class Sinks:
    """Where rank 0 writes while the run lasts."""

    def __init__(self, config: Config, run_dir: Path, num_steps: int, resumed: Progress | None = None):
        """resumed: what the run goes on from: what the folder holds of later steps is dropped, to be written anew."""
        run_dir.mkdir(parents=True, exist_ok=True)
        if resumed is not None:
            keep_until(run_dir, resumed.step)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config.as_dict(), sort_keys=False), encoding="utf-8")
        (run_dir / "env.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")
        self._metrics = CsvSink(run_dir / "metrics.csv")
        self._records = JsonlSink(run_dir / "records.jsonl") if config.monitor.records else None
        self._board = TensorBoardSink(run_dir / "tensorboard") if config.monitor.tensorboard else None
        self._bar = (
            ProgressBar(num_steps, first_step=resumed.step if resumed else 0) if config.monitor.progress else None
        )
        self._run_dir, self._plans = run_dir, len(list(run_dir.glob("plan-*.json"))) if resumed else 0

    def keep_plan(self, plan: Plan) -> None:
        """Write the plan that the next steps run under as `plan-<n>.json`."""
        (self._run_dir / f"plan-{self._plans}.json").write_text(plan.to_json(), encoding="utf-8")
        self._plans += 1

    def keep_trace(self, step: int, plan: Plan, traces: Sequence[Sequence[tuple[str, float, float]]]) -> None:
        """Write the spans of one step as a Chrome trace, a thread a rank; chrome://tracing and Perfetto read it."""
        events = [
            {"name": name, "ph": "X", "pid": 0, "tid": rank, "ts": round(begin * 1e6, 1), "dur": round(s * 1e6, 1)}
            for rank, spans in enumerate(traces)
            for name, begin, s in ((name, begin, end - begin) for name, begin, end in spans)
        ]
        data = {"traceEvents": events, "otherData": {"step": step, "plan": plan.fingerprint}}
        (self._run_dir / f"trace-{step}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")

    def write(self, records: Sequence[StepRecord], scores: dict[str, float | None]) -> None:
        """One step: the records of all ranks, and scores where it ended with an evaluation."""
        first = records[0]
        slowest_s = max(record.wall_s for record in records)
        self._metrics.write_step(first.step, first.loss, slowest_s, **scores)
        if self._records is not None:
            for record in records:
                self._records.write(record)
        if self._board is not None:
            self._board.write_steps(records)
            if scores:
                self._board.write_evaluation(first.step, **scores)
        if self._bar is not None:
            val = scores.get("val_score")
            if val is not None:
                self._bar.show_score(val)
            self._bar.update(records)

    def keep_checkpoint(self, progress: Progress, state: EngineState, *, is_best: bool) -> None:
        """Write the latest checkpoint, and the best one if this is it."""
        folder = self._run_dir / FOLDER
        if is_best:
            write_checkpoint(folder / BEST, progress, state)
        write_checkpoint(folder / LATEST, progress, state)

    def close(self) -> None:
        for sink in (self._metrics, self._records, self._board, self._bar):
            if sink is not None:
                sink.close()


def keep_until(run_dir: Path, step: int) -> None:
    """Drop the metrics of `step` and later; the records, perhaps of other ranks, move to `records-to-<step>.jsonl`."""
    metrics, records = run_dir / "metrics.csv", run_dir / "records.jsonl"
    if metrics.exists():
        header, *rows = metrics.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
        kept = [row for row in rows if row.endswith("\n") and int(row.partition(",")[0]) < step]
        aside = metrics.with_name(".metrics.csv.writing")
        aside.write_text(header + "".join(kept), encoding="utf-8")
        os.replace(aside, metrics)
    if records.exists():
        os.replace(records, run_dir / f"records-to-{step}.jsonl")
