"""What the scheduler costs: seconds of a switch at 100,000 nodes, and its own share of runs in which nothing happens.

Switches: a run tries the best plan of every family in turn, so each change of plan is one. Own cost: seconds in the
monitor, its reduction and the controller over all seconds of the run's steps, as the report counts them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pandas as pd
from common import nothing, train, write

from gtx.report import load_report

LARGE = ["data.name=sbm", "data.options={num_nodes: 100000, num_edges: 2000000, num_blocks: 50, homophily: 0.9}"]
SBM = ["data.name=sbm", "data.options={num_nodes: 20000, num_edges: 200000, num_blocks: 16, homophily: 0.9}"]
STEADY = {
    "clustered": SBM,
    "clustered, four micro-batches": [*SBM, "batch.kind=cluster", "batch.parts=4", "batch.micro_batches=4"],
    "hubs": ["data.name=rmat", "data.options={num_nodes: 16384, num_edges: 300000}"],
}


def switches(folder: Path) -> pd.DataFrame:
    """One row for every change of plan of a run that tries all families."""
    overrides = [*LARGE, "sampling.fanout=10", "plan.mode=auto", "scheduler.setting=oracle"]
    overrides += ["scheduler.probe_steps=2", "scheduler.probe_plans=6", "train.steps=40"]
    with nothing() as happen:
        report = load_report(train(overrides, folder / "switches", happen))
    names = {p["plan"]: p["family"] for p in report["scheduler"]["probes"]}
    rows, before = [], report["scheduler"]["probes"][0]["family"]
    for switch in report["scheduler"]["switches"]:
        family = names.get(switch["plan"], "chosen")
        row = {"from": before, "to": family, "seconds": switch["seconds"], "MiB sent": switch["sent_bytes"] / 2**20}
        rows.append(row)
        before = family
    return pd.DataFrame(rows)


def steady(name: str, steps: int, folder: Path) -> dict[str, object]:
    """An adaptive run in which nothing happens."""
    overrides = [*STEADY[name], "sampling.fanout=10", "plan.mode=adaptive", f"train.steps={steps}"]
    with nothing() as happen:
        block = load_report(train(overrides, folder / name.replace(", ", "-"), happen))["scheduler"]
    changes = [d for d in block["decisions"] if d["verdict"] in ("switch", "return")]
    left = [d["plan_fingerprint"] for d in changes]
    spent = block["spent_s"]
    return {
        "workload": name,
        "steps": steps,
        "windows": len(block["decisions"]),
        "searches": sum(bool(d["candidates"]) for d in block["decisions"]),
        "switches": len(changes),
        "back to a plan it left": sum(d["chosen_fingerprint"] in left[: i + 1] for i, d in enumerate(changes)),
        "monitor, %": 100 * spent["monitor"] / block["seconds"],
        "controller, %": 100 * spent["controller"] / block["seconds"],
        "both, %": 100 * (spent["monitor"] + spent["controller"]) / block["seconds"],
        "search at the start, s": spent["start"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gtx-benchmark-") as folder:
        moved = switches(Path(folder))
        print(moved.round(2).to_string(), flush=True)
        rows = []
        for name in STEADY:
            rows.append(steady(name, options.steps, Path(folder)))
            print(pd.DataFrame(rows).round(2).to_string(), flush=True)
    write(
        "steadiness",
        "What the scheduler costs",
        "Two ranks, a core each, GT of 3 layers, width 64, fan-out 10, engine torch.\n\n"
        "## A switch at 100,000 nodes and 2 million edges\n\n"
        f"Median {moved.seconds.median():.2f} s, longest {moved.seconds.max():.2f} s.\n\n"
        f"{moved.round(2).to_markdown(index=False)}\n\n"
        "## Adaptive runs in which nothing happens\n\n" + pd.DataFrame(rows).round(2).to_markdown(index=False),
    )


if __name__ == "__main__":
    main()
