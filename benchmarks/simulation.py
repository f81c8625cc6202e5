"""What the simulator says of a run against what the run took, then machines that are not here.

For each workload and number of ranks: one run tries the best plan of every family, and so fits the machine; the
simulator plays those families on it; then each plan is a run of its own, in its own processes, that knows nothing of
the fit. Afterwards the fitted machine is made 8, 64 and 1,024 devices large, a rank slows and a link drops in it, and
fixed plans are played beside an adaptive one. Two ranks have a core each; four share two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
from common import PLAIN, ROOT, steps_of, write
from rich.console import Console

from gtx.config import load_config
from gtx.processes import run_ranks
from gtx.report import load_report
from gtx.simulate import simulate
from scheduler.search import family_of
from scheduler.topology import FORMAT

CONFIG = ROOT / "configs/digits_gt.yaml"
WORKLOADS = {
    "sbm, 20k nodes": ["data.name=sbm", "data.options={num_nodes: 20000, num_edges: 200000, num_blocks: 16}"],
    "sbm, clusters": [
        "data.name=sbm",
        "data.options={num_nodes: 20000, num_edges: 200000, num_blocks: 16}",
        *("partition.parts=12", "batch.kind=cluster", "batch.parts=4", "batch.micro_batches=3"),
    ],
    "rmat, 8k nodes": ["data.name=rmat", "data.options={num_nodes: 8192, num_edges: 400000}"],
}
LARGE = {8: (64, 50_000), 64: (256, 100_000), 1024: (1024, 200_000)}  # devices: partitions, nodes
EVENTS = ("200:rank 3:2", "400:link 0-1:10")
LARGE_STEPS = 600


def against_runs(name: str, world: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """A row per family: simulated and measured seconds of a step."""
    settings = [*WORKLOADS[name], "sampling.fanout=10", *PLAIN, f"partition.cache={folder}/cut"]
    launch = [sys.executable, str(ROOT / "launch.py"), "train", str(CONFIG), *settings]
    cores = [0, 1]
    tried = [*launch, "plan.mode=auto", "scheduler.setting=oracle", "scheduler.probe_steps=8", "train.steps=60"]
    _must(run_ranks([*tried, "--run-dir", str(folder / "tried")], world, folder / "t", cores))
    machine = folder / "machine.json"
    machine.write_text(json.dumps({"format": FORMAT, **load_report(folder / "tried")["scheduler"]["topology"]}))
    played = simulate(
        load_config(CONFIG, settings),
        world,
        machine,
        steps=steps,
        out=folder / "played.json",
        console=Console(quiet=True),
    )
    rows = []
    for run in played:
        if run.name == "adaptive":
            continue
        plan = folder / f"{run.name}.json"
        plan.write_text(run.plans[0][1].to_json())
        out = folder / f"run-{run.name}"
        asked = [*launch, f"plan.file={plan}", f"train.steps={steps}", "--run-dir", str(out)]
        _must(run_ranks(asked, world, folder / f"r-{run.name}", cores))
        measured = float(steps_of(out)[2:].median())
        simulated = float(pd.Series(run.steps_s).median())
        row = {"workload": name, "ranks": world, "plan": run.name, "simulated, ms": 1e3 * simulated}
        rows.append(row | {"measured, ms": 1e3 * measured, "error, %": 100 * (simulated / measured - 1.0)})
    return rows


def _must(error: str | None) -> None:
    if error is not None:
        raise RuntimeError(error)


def large(devices: int, machine: Path, folder: Path) -> list[dict[str, Any]]:
    """A row per plan: what `LARGE_STEPS` steps take on that many devices like the fitted ones, eight to a host."""
    parts, nodes = LARGE[devices]
    settings = ["data.name=sbm", f"data.options={{num_nodes: {nodes}, num_edges: {10 * nodes}, num_blocks: 64}}"]
    settings += [f"partition.parts={parts}", f"partition.cache={folder}/cut", "sampling.fanout=10", *PLAIN]
    began = time.perf_counter()
    played = simulate(
        load_config(CONFIG, settings),
        devices,
        machine,
        steps=LARGE_STEPS,
        events=EVENTS,
        devices_per_host=8,
        noise=0.03,
        console=Console(quiet=True),
    )
    took = time.perf_counter() - began
    rows = []
    for run in played:
        steps = pd.Series(run.steps_s)
        row = {"devices": devices, "partitions": parts, "plan": run.name}
        row |= {
            f"ms a step, {a} to {b}": 1e3 * float(steps[a:b].median()) for a, b in ((0, 200), (200, 400), (400, 600))
        }
        changes = [f"{family_of(plan)} from {step}" for step, plan in run.plans]
        rows.append(row | {"total, s": run.total_s, "plans": ", ".join(changes), "all of this took, s": took})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--devices", default="8,64,1024")
    options = parser.parse_args()
    real: list[dict[str, Any]] = []
    simulated: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gtx-benchmark-") as place:
        folder = Path(place)
        machine = folder / "fitted.json"
        for world in map(int, options.worlds.split(",")):
            for number, name in enumerate(WORKLOADS):
                own = folder / f"{world}-{number}"
                own.mkdir()
                real += against_runs(name, world, options.steps, own)
                if not machine.exists():
                    machine.write_text((own / "machine.json").read_text())
                print(pd.DataFrame(real).round(1).to_string(), flush=True)
        for devices in map(int, options.devices.split(",")):
            simulated += large(devices, machine, folder)
            print(pd.DataFrame(simulated).round(2).to_string(), flush=True)
    table = pd.DataFrame(real)
    off = table["error, %"].abs()
    classes = ", ".join(
        f"{world} ranks {part.abs().median():.0f} % in the median and {part.abs().max():.0f} % at worst"
        for world, part in table.groupby("ranks")["error, %"]
    )
    write(
        "simulation",
        "The simulator against real runs, and machines that are not here",
        f"Every plan is a run of its own; the machine was fitted in another one. Off: {classes}; "
        f"{(off <= 15).mean():.0%} of the {len(off)} runs within 15 %.\n\n{table.round(1).to_markdown(index=False)}\n\n"
        f"## Larger machines\n\nThe machine of the first workload, made larger, eight devices to a host. Events: "
        f"{'; '.join(EVENTS)}. Nothing of this was run.\n\n{pd.DataFrame(simulated).round(2).to_markdown(index=False)}",
    )


if __name__ == "__main__":
    main()
