"""Plays a config's workload on a machine one does not have, under fixed plans and an adaptive one, as a table.

Not here: the playing (`scheduler/simulator.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from gtx.adapt import engine_of, find_plan, limits_of, pick_engine, read_topology, rules_of
from gtx.budget import with_footprints
from gtx.config import Config
from gtx.session import load_partitioned, tell_graph
from gtx.workload import workload_of
from scheduler.controller import Controller
from scheduler.search import family_of
from scheduler.simulator import Event, Played, machine_at, parse_event, play


def simulate(
    config: Config,
    devices: int,
    topology_file: Path,
    *,
    steps: int,
    events: Sequence[str] = (),
    switch_s: float = 1.0,
    noise: float = 0.0,
    devices_per_host: int | None = None,
    out: Path | None = None,
    console: Console | None = None,
) -> list[Played]:
    """Play the best plan of each family and an adaptive run, and print what each took.

    devices: how many; the file's own devices if it has as many, else as many like its first one. events: as
    `scheduler.simulator.parse_event` reads them. switch_s: what a switch takes. noise: relative, of each step.
    Raises ValueError with one line for what the user can mend.
    """
    if devices < 1 or steps < 1:
        raise ValueError(f"--devices is {devices} and --steps {steps}; give at least 1 of each")
    console = console or Console()
    script = [parse_event(text) for text in events]
    topology = read_topology(topology_file, devices)
    if devices_per_host is not None:
        topology = topology.resized(devices, devices_per_host)
    machine_at(topology, [Event(0, e.ranks, e.times) for e in script], 0)  # a wrong rank is told before anything runs
    loaded = load_partitioned(config)
    tell_graph(loaded, lambda line: console.print(line, soft_wrap=True, highlight=False))
    graph = loaded.partitioned
    workload, _ = workload_of(config, graph)
    workload = with_footprints(config, workload, topology.smallest_memory, devices)
    config = pick_engine(config, workload, topology)
    engine, limits = engine_of(config), limits_of(config)
    found = find_plan(config, workload, topology, engine, limits)
    runs = []
    for candidate in found.candidates:
        if candidate.plan is not None and candidate.estimate is not None and candidate.estimate.fits:
            runs.append(
                play(
                    candidate.family,
                    workload,
                    topology,
                    candidate.plan,
                    steps,
                    script,
                    engine=engine,
                    noise=noise,
                    seed=config.seed,
                )
            )
    controller = Controller(rules_of(config), workload, topology, found.plan, engine, limits, switch_cost_s=switch_s)
    runs.append(
        play(
            "adaptive",
            workload,
            topology,
            found.plan,
            steps,
            script,
            engine=engine,
            controller=controller,
            window=config.scheduler.window,
            switch_s=switch_s,
            noise=noise,
            seed=config.seed,
        )
    )
    console.print(f"{devices} devices, {steps} steps, {graph.num_parts} partitions; machine: {topology.made}")
    console.print(_table(runs, script, steps))
    for decision in runs[-1].decisions:
        if decision.verdict != "stay":
            text = (
                f"step {decision.step}: {decision.verdict} because of {', '.join(decision.triggers)}: {decision.rule}"
            )
            console.print(text, soft_wrap=True, highlight=False)
    if out is not None:
        out.write_text(json.dumps([_facts(run) for run in runs], indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {out}", soft_wrap=True)
    return runs


def _table(runs: Sequence[Played], script: Sequence[Event], steps: int) -> Table:
    borders = sorted({0, steps, *(e.step for e in script), *(e.until for e in script if e.until is not None)})
    spans = [(a, b) for a, b in zip(borders[:-1], borders[1:], strict=True) if a < steps and b > a]
    table = Table(
        "plan", "total, s", "over the fastest", *(f"ms a step, {a} to {min(b, steps)}" for a, b in spans), "runs as"
    )
    fastest = min(run.total_s for run in runs)
    for run in runs:
        medians = [f"{1e3 * float(np.median(run.steps_s[a : min(b, steps)])):.2f}" for a, b in spans]
        families = " then ".join(family_of(plan) for _, plan in run.plans)
        table.add_row(run.name, f"{run.total_s:.2f}", f"{run.total_s / fastest - 1:.1%}", *medians, families)
    return table


def _facts(run: Played) -> dict[str, Any]:
    return {
        "name": run.name,
        "total_s": run.total_s,
        "switch_s": run.switch_s,
        "steps_s": run.steps_s,
        "plans": [{"from_step": step, "plan": plan.as_dict()} for step, plan in run.plans],
        "decisions": [decision.as_dict() for decision in run.decisions],
    }
