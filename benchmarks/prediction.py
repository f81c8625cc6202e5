"""What the cost model predicts against what steps take, for plans that its fit never saw.

For each workload: a calibration, then twice a run that tries the best plan of every family for some steps. Each plan is
predicted with rates fitted to the other plans of that run. The second run repeats the first: its difference is the
noise that no prediction can beat. Two ranks have a core each; four ranks share two cores, a class of their own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pandas as pd
from common import ROOT, write

from gtx.processes import run_ranks
from gtx.report import load_report

SBM = "data.name=sbm"
CLUSTERS = ["batch.kind=cluster", "batch.parts=2", "batch.micro_batches=4"]
WORKLOADS = {
    "digits, GT": ["data.name=digits"],
    "digits, GT, clusters": ["data.name=digits", *CLUSTERS],
    "digits, GPS": ["data.name=digits", "model.name=GPS"],
    "sbm 8k, GT": [SBM, "data.options={num_nodes: 8000, num_edges: 120000, num_blocks: 16, homophily: 0.9}"],
    "sbm 8k, GT, random cut": [
        SBM,
        "data.options={num_nodes: 8000, num_edges: 120000, num_blocks: 16, homophily: 0.9}",
        "partition.method=random",
    ],
    "sbm 8k, GT, clusters": [
        SBM,
        "data.options={num_nodes: 8000, num_edges: 120000, num_blocks: 16, homophily: 0.9}",
        *CLUSTERS,
    ],
    "sbm 12k, GT of 6 layers": [
        SBM,
        "data.options={num_nodes: 12000, num_edges: 60000, num_blocks: 16, homophily: 0.8}",
        "model.layers=6",
        "model.width=32",
    ],
    "sbm 12k, GPS, clusters": [
        SBM,
        "data.options={num_nodes: 12000, num_edges: 60000, num_blocks: 16, homophily: 0.8}",
        "model.name=GPS",
        *CLUSTERS,
    ],
    "rmat 8k, GT": ["data.name=rmat", "data.options={num_nodes: 8192, num_edges: 80000}"],
    "rmat 8k, GCN": ["data.name=rmat", "data.options={num_nodes: 8192, num_edges: 160000}", "model.name=GCN"],
    "rmat 8k, GT, clusters": ["data.name=rmat", "data.options={num_nodes: 8192, num_edges: 80000}", *CLUSTERS],
}


def probes(name: str, world: int, probe_steps: int, folder: Path) -> list[pd.DataFrame]:
    """Two frames of tried plans, of one workload and one calibration."""
    steps = 6 * (probe_steps + 1)
    common = [*WORKLOADS[name], "sampling.fanout=10", "engine.name=torch", "engine.zero_stage=0", "engine.threads=1"]
    common += [f"train.steps={steps}", "train.eval_every=0", "monitor.progress=false", f"partition.cache={folder}/cut"]
    launch = [sys.executable, str(ROOT / "launch.py")]
    config = str(ROOT / "configs/digits_gt.yaml")
    machine = folder / "machine.json"
    _must(run_ranks([*launch, "calibrate", config, "--out", str(machine), *common], world, folder / "c", [0, 1], 1))
    frames = []
    for repeat in range(2):
        choose = [f"plan.topology={machine}", "plan.mode=auto", "scheduler.setting=oracle"]
        choose += [f"scheduler.probe_steps={probe_steps}", "--run-dir", str(folder / f"run{repeat}")]
        _must(run_ranks([*launch, "train", config, *common, *choose], world, folder / f"r{repeat}", [0, 1], 1))
        frame = pd.DataFrame(load_report(folder / f"run{repeat}")["scheduler"]["probes"])
        frames.append(frame.assign(workload=name, world=world, repeat=repeat))
    return frames


def _must(error: str | None) -> None:
    if error is not None:
        raise RuntimeError(error)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Errors of each class of worlds, in percent."""
    rows = []
    for world, part in table.groupby("world"):
        first, second = part[part.repeat == 0], part[part.repeat == 1]
        pairs = first.merge(second, on=["workload", "plan"], suffixes=("", "_again"))
        noise = (pairs.measured_s / pairs.measured_s_again - 1.0).abs()
        rows.append(
            {
                "ranks": world,
                "combinations": len(first),
                "step, median": 100 * first.step_error.median(),
                "step, 90th": 100 * first.step_error.quantile(0.9),
                "repeating, median": 100 * noise.median(),
                "repeating, 90th": 100 * noise.quantile(0.9),
                "memory, median": 100 * first.memory_error.median(),
                "memory, 90th": 100 * first.memory_error.quantile(0.9),
                "rank correlation": first.groupby("workload")[["held_out_s", "measured_s"]]
                .apply(lambda g: g.held_out_s.corr(g.measured_s, method="spearman"))
                .median(),
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--probe-steps", type=int, default=8)
    parser.add_argument("--workloads", type=int, default=len(WORKLOADS), help="how many of them")
    options = parser.parse_args()
    frames = []
    for world in map(int, options.worlds.split(",")):
        for name in list(WORKLOADS)[: options.workloads]:
            with tempfile.TemporaryDirectory(prefix="gtx-benchmark-") as folder:
                frames += probes(name, world, options.probe_steps, Path(folder))
            table = pd.concat(frames, ignore_index=True)
            table["step_error"] = (table.held_out_s / table.measured_s - 1.0).abs()
            table["memory_error"] = (table.held_out_memory_bytes / table.measured_memory_bytes - 1.0).abs()
            print(summary(table).round(2).to_string(), flush=True)
            tell(table)  # so that what was measured stays if this is stopped


def tell(table: pd.DataFrame) -> None:
    first = table[table.repeat == 0]
    shown = pd.DataFrame(
        {
            "workload": first.workload,
            "ranks": first.world,
            "plan": first.family,
            "measured, ms": 1e3 * first.measured_s,
            "predicted unseen, ms": 1e3 * first.held_out_s,
            "error, %": 100 * (first.held_out_s / first.measured_s - 1.0),
            "memory, MiB": first.measured_memory_bytes / 2**20,
            "predicted unseen, MiB": first.held_out_memory_bytes / 2**20,
        }
    )
    body = (
        "Engine torch, float32, one thread a rank, fan-out 10. Each plan is predicted with rates fitted to the other "
        "plans of its run. Errors in percent; repeating: how far a second run of the same plans was from the first.\n\n"
        + summary(table).round(2).to_markdown(index=False)
        + "\n\n"
        + shown.round(1).to_markdown(index=False)
    )
    write("prediction", "Predicted against measured steps", body)


if __name__ == "__main__":
    main()
