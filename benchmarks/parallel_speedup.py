"""Two ranks pinned to a core each against one pinned rank, on 100,000 nodes and 2 million edges.

Runs alternate, each in fresh processes; the ratio is that of medians over repeats of the median step.
"""

from __future__ import annotations

import argparse
from statistics import median

import pandas as pd
from common import run, step_seconds, write

CASES = {
    "graph": ["plan.mode=graph"],
    "model": ["plan.mode=model"],
    "data": ["plan.mode=data", "batch.kind=cluster", "batch.parts=4", "batch.micro_batches=4"],
    "pipeline": ["plan.mode=pipeline", "batch.kind=cluster", "batch.parts=2", "batch.micro_batches=8"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--modes", default="graph,data,model,pipeline")
    options = parser.parse_args()
    rows = []
    for mode in options.modes.split(","):
        overrides = [*CASES[mode], f"train.steps={options.steps}"]
        times: dict[int, list[float]] = {1: [], 2: []}
        frames = {}
        for _ in range(options.repeats):
            for world in (1, 2):
                frames[world] = run("configs/sbm_gt.yaml", overrides, world, (0, 1))
                times[world].append(step_seconds(frames[world]))
        two = frames[2]
        late = two[two.step >= 1]
        sent = late[[c for c in late if c.startswith("sent.")]].sum(axis=1).groupby(late.step).sum().median()
        waits = late[[c for c in late if c.startswith("wait.")]].sum(axis=1).groupby(late.step).max().median()
        rows.append(
            {
                "mode": mode,
                "batch": "full" if mode in ("graph", "model") else "cluster",
                "1 rank, s": median(times[1]),
                "2 ranks, s": median(times[2]),
                "ratio": median(times[1]) / median(times[2]),
                "lowest": min(times[1]) / max(times[2]),
                "highest": max(times[1]) / min(times[2]),
                "sent, MiB a step": sent / 2**20,
                "longest wait, s": waits,
            }
        )
        print(pd.DataFrame(rows).round(2).to_string(), flush=True)
    table = pd.DataFrame(rows).round(2).to_markdown(index=False)
    write(
        "parallel_speedup",
        "Two ranks against one",
        f"GT, 3 layers, width 64, 4 heads, float32, engine torch, {options.repeats} repeats of {options.steps} steps, "
        "the first step left out. Ratios are 1 rank over 2 ranks; lowest and highest over all pairs of repeats. "
        "Each rank has one thread and one core of the same machine, so memory bandwidth and cache are shared.\n\n"
        + table,
    )


if __name__ == "__main__":
    main()
