"""Folds a run's recorded windows anew, under its own thresholds or others: what would the controller have decided?

Not here: the folding (`scheduler/controller.py`) and what a run recorded (`report.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtx.adapt import watching
from gtx.budget import with_footprints
from gtx.config import load_config
from gtx.report import load_report
from gtx.session import load_partitioned
from gtx.words import seconds_text
from gtx.workload import workload_of
from scheduler.controller import Decision, replay
from scheduler.plan import from_json
from scheduler.topology import FORMAT, topology_from_json


def replay_run(run_dir: Path, overrides: Sequence[str] = (), console: Console | None = None) -> list[Decision]:
    """Replay an adaptive run, print its decisions beside the recorded ones, and return them.

    overrides: settings that replace the run's, such as `scheduler.delta=0.02`. The windows that follow another decision
    than the recorded one are of a plan that would not have run, so the replay ends there.
    Raises ValueError with one line if the run did not watch, or its folder lacks a file.
    """
    console = console or Console()
    block = load_report(run_dir)["scheduler"] or {}
    watch = block.get("watch")
    if watch is None:
        raise ValueError(f"{run_dir} has no windows to replay: give a run of plan.mode=adaptive")
    config = load_config(run_dir / "config.yaml", overrides)
    topology = topology_from_json(json.dumps({**block["topology"], "format": FORMAT}))
    workload, _ = workload_of(config, load_partitioned(config).partitioned)
    workload = with_footprints(config, workload, topology.smallest_memory, topology.world_size)
    plans = [from_json(path.read_text(encoding="utf-8")) for path in sorted(run_dir.glob("plan-*.json"))]
    begun = [plan for plan in plans if plan.fingerprint == watch["plan"]]
    if not begun:
        raise ValueError(f"{run_dir} lacks the file of plan {watch['plan']}, under which watching began")
    controller = watching(config, workload, topology, begun[0], watch)
    table = Table("step", "recorded", "now", "because", "measured", "promised")
    same = 0
    for entry, then in zip(block["windows"], block["decisions"], strict=True):
        replay(controller, [entry])
        now = controller.decisions[-1]
        same += (now.verdict, now.chosen_fingerprint) == (then["verdict"], then["chosen_fingerprint"])
        times = (seconds_text(now.measured_s), seconds_text(now.promised_s))
        table.add_row(str(now.step), then["verdict"], now.verdict, Text(now.rule), *times)
        if now.chosen_fingerprint != then["chosen_fingerprint"]:
            break
    console.print(table)
    ended = f"; ends after step {now.step}, where another plan was chosen" if same < len(controller.decisions) else ""
    console.print(f"{same} of {len(controller.decisions)} decisions as recorded{ended}", highlight=False)
    return controller.decisions
