"""What `auto` chooses against the best of the fixed modes, on many small workloads of two ranks.

Steps after the choice are compared, so what trying costs is left out and shown beside. Runs of a workload follow each
other; two workloads have a link of 100 Mbit/s (root and iproute2 needed).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pandas as pd
from common import nothing, steps_of, throttled_link, train, write

from gtx.report import load_report
from scheduler.plan import from_json
from scheduler.search import family_of

SBM = ["data.name=sbm", "data.options={num_nodes: 8000, num_edges: 120000, num_blocks: 16, homophily: 0.9}"]
THIN = ["data.name=sbm", "data.options={num_nodes: 12000, num_edges: 60000, num_blocks: 16, homophily: 0.8}"]
HUBS = ["data.name=rmat", "data.options={num_nodes: 8192, num_edges: 120000}"]
MANY = ["batch.kind=cluster", "batch.parts=4", "batch.micro_batches=4"]
DEEP = ["model.layers=8", "model.width=32"]
WORKLOADS = {
    "digits": [],
    "digits, four micro-batches": MANY,
    "clustered": SBM,
    "clustered, random cut": [*SBM, "partition.method=random"],
    "clustered, four micro-batches": [*SBM, *MANY],
    "clustered, three micro-batches": [*SBM, "batch.kind=cluster", "batch.parts=8", "batch.micro_batches=3"],
    "thin, deep": [*THIN, *DEEP],
    "thin, deep, four micro-batches": [*THIN, *DEEP, *MANY],
    "hubs": HUBS,
    "hubs in four parts": [*HUBS, "partition.parts=4"],
    "hubs, four micro-batches": [*HUBS, *MANY],
    "hubs, GPS": [*HUBS, "model.name=GPS"],
    "throttled: clustered": SBM,
    "throttled: four micro-batches": [*SBM, *MANY],
}
MODES = ("graph", "model", "pipeline", "data")


def late_step(run_dir: Path, count: int) -> float:
    return float(steps_of(run_dir)[-count:].median())


def workload(name: str, repeats: int, steps: int, folder: Path) -> dict[str, object]:
    """The median late step of every mode and of auto."""
    settings = [*WORKLOADS[name], "sampling.fanout=10", f"partition.cache={folder}/cut"]
    throttled = name.startswith("throttled")
    times: dict[str, list[float]] = {mode: [] for mode in (*MODES, "auto")}
    families, trying = [], []
    for repeat in range(repeats):
        for mode in times:
            overrides = [*settings, f"plan.mode={mode}", f"train.steps={steps + 20 if mode == 'auto' else steps}"]
            with throttled_link() if throttled else nothing() as happen:
                run_dir = train(overrides, folder / f"{mode}-{repeat}", happen, spaces=throttled)
            times[mode].append(late_step(run_dir, steps // 2))
            if mode == "auto":
                block = load_report(run_dir)["scheduler"]
                plans = sorted(run_dir.glob("plan-*.json"), key=lambda path: int(path.stem[5:]))
                families.append(family_of(from_json(plans[-1].read_text())))
                trying.append(block["plans"][-1]["from_step"])
    middle = {mode: float(pd.Series(values).median()) for mode, values in times.items()}
    best = min(MODES, key=lambda mode: middle[mode])
    return {
        "workload": name,
        **{f"{mode}, ms": 1e3 * middle[mode] for mode in times},
        "best fixed": best,
        "chosen": " ".join(dict.fromkeys(families)),
        "auto over best": middle["auto"] / middle[best],
        "tried for steps": max(trying),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--workloads", type=int, default=len(WORKLOADS), help="how many of them")
    options = parser.parse_args()
    rows = []
    for name in list(WORKLOADS)[: options.workloads]:
        with tempfile.TemporaryDirectory(prefix="gtx-benchmark-") as folder:
            rows.append(workload(name, options.repeats, options.steps, Path(folder)))
        tell(pd.DataFrame(rows), options.repeats)  # so that what was measured stays if this is stopped


def tell(table: pd.DataFrame, repeats: int) -> None:
    ratio = table["auto over best"]
    write(
        "choice",
        "What `auto` chooses",
        f"GT of 3 layers, width 64, fan-out 10, engine torch, two ranks with a core each; medians of late steps of "
        f"{repeats} run(s) each. Over the best fixed mode, auto took {ratio.median():.3f} times as long in the "
        f"median and {ratio.max():.3f} at worst.\n\n" + table.round(2).to_markdown(index=False),
    )


if __name__ == "__main__":
    main()
