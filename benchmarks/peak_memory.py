"""The peak memory that is predicted before a run starts against what its steps take, in processes of their own.

Measured is the highest resident set of a rank within a step, steps with an evaluation and the first left out. With
`MALLOC_MMAP_THRESHOLD_` at 4 MiB glibc gives freed tensors back at once: what is then resident is alive.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from common import ROOT, write

from gtx.budget import GIVES_BACK, KEEPS, MALLOC
from gtx.processes import run_ranks
from gtx.report import load_report

SBM = ["data.name=sbm", "data.options={num_nodes: 60000, num_edges: 600000, num_blocks: 16, homophily: 0.9}"]
CLUSTERS = ["batch.kind=cluster", "batch.parts=2", "batch.micro_batches=4"]
NEIGHBORS = ["batch.kind=neighbor", "batch.seeds=2000", "batch.micro_batches=4"]
ROUNDS = ["plan.micro_batches_per_wave=1", "plan.waves_per_round=1"]
MODELS = ("GT", "GPS", "GCN", "SAGE", "GAT", "MLP")
WORKLOADS: dict[str, tuple[int, Sequence[str]]] = {
    **{f"{name}, one rank": (1, [f"model.name={name}"]) for name in MODELS},
    "GT, checkpointing edges": (1, ["plan.checkpointing=edges"]),
    "GT, checkpointing layer": (1, ["plan.checkpointing=layer"]),
    "GT of 8 layers": (1, ["model.layers=8"]),
    "GT of 8 layers, checkpointing layer": (1, ["model.layers=8", "plan.checkpointing=layer"]),
    "GT, clusters": (1, CLUSTERS),
    "GT, clusters, round by round": (1, [*CLUSTERS, *ROUNDS]),
    "GT, neighbors": (1, [*NEIGHBORS, "sampling.fanout=10"]),
    "GT, graph, two ranks": (2, []),
    "GT, model, two ranks": (2, ["plan.mode=model"]),
    "GT, pipeline, two ranks": (2, ["plan.mode=pipeline"]),
    "GT, data, clusters, two ranks": (2, [*CLUSTERS, "plan.mode=data"]),
    "GPS, graph, two ranks": (2, ["model.name=GPS"]),
}


def measure(name: str, folder: Path, threshold: int | None) -> dict[str, object]:
    """Predicted and measured of the fullest rank."""
    world, settings = WORKLOADS[name]
    if threshold is None:
        os.environ.pop(MALLOC[0], None)
    else:
        os.environ[MALLOC[0]] = str(threshold)
    run_dir = folder / f"{name}-{threshold}"
    command = [sys.executable, str(ROOT / "launch.py"), "train", str(ROOT / "configs/digits_gt.yaml"), *SBM]
    command += ["model.width=64", "model.heads=4", "model.layers=3", "engine.name=torch", "engine.zero_stage=0"]
    command += ["engine.threads=1", "train.steps=5", "train.eval_every=0", "monitor.progress=false", *settings]
    command += [f"partition.cache={folder}/cut", "--run-dir", str(run_dir)]
    error = run_ranks(command, world, run_dir.with_suffix(".ranks"), sorted(os.sched_getaffinity(0)))
    if error is not None:
        raise RuntimeError(f"{name}: {error}")
    memory = load_report(run_dir)["plan"]["memory"]
    records = [json.loads(line) for line in (run_dir / "records.jsonl").read_text().splitlines()]
    last = max(r["step"] for r in records)
    seen = [r for r in records if 0 < r["step"] < last]
    peak = [max(r["peak_memory_bytes"] for r in seen if r["rank"] == k) for k in range(world)]
    rank = max(range(world), key=peak.__getitem__)
    before = memory["resident_bytes"][rank] + memory["states_bytes"]
    live = (memory["predicted_bytes"][rank] - before) / (KEEPS if threshold is None else GIVES_BACK)
    return {
        "malloc": "as it comes" if threshold is None else "gives back",
        "workload": name,
        "activations": memory["activations"],
        "predicted, MiB": memory["predicted_bytes"][rank] / 2**20,
        "measured, MiB": peak[rank] / 2**20,
        "predicted / measured": memory["predicted_bytes"][rank] / peak[rank],
        "taken / alive": (peak[rank] - before) / live,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default=",".join(map(str, range(len(WORKLOADS)))), help="numbers, in order")
    options = parser.parse_args()
    names = [list(WORKLOADS)[int(number)] for number in options.workloads.split(",")]
    rows = []
    with tempfile.TemporaryDirectory(prefix="gtx-memory-") as folder:
        for threshold in (None, MALLOC[1]):
            for name in names:
                rows.append(measure(name, Path(folder), threshold))
                print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    told = []
    for malloc, group in table.groupby("malloc", sort=False):
        off = (group["predicted / measured"] - 1.0).abs()
        under = (1.0 - group["predicted / measured"]).max()
        told.append(
            f"malloc {malloc}: off by {off.median():.0%} in the median, {off.quantile(0.9):.0%} at the 90th "
            f"percentile, {off.max():.0%} at worst; {max(under, 0.0):.0%} too low at worst."
        )
    body = (
        "60,000 nodes, 600,000 edges, width 64, 4 heads, 3 layers. `taken / alive`: what a step took beyond what was "
        f"there before over the predicted bytes alive; {KEEPS} of it is assumed as malloc comes, {GIVES_BACK} where it "
        "gives back.\n\n" + "\n".join(f"* {line}" for line in told)
    )
    body += "\n\n" + table.to_markdown(index=False, floatfmt=".2f")
    write("peak_memory", "Predicted and measured peak memory", body)


if __name__ == "__main__":
    main()
