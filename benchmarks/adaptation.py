"""What adapting is worth: a rank slows, a link fills, or the start is bad, while a real run trains on two ranks.

`rank`: another process is pinned to rank 1's core from a step on. `link`: the ranks sit in network namespaces joined by
veth, and a token-bucket filter throttles it from a step on (needs root and iproute2). `hub`: a power-law graph cut in
two starts under a graph plan, and one part has nine tenths of the edges. Each is run adaptively, adaptively without
changes of mode, under every fixed mode and under the plan that is searched for the machine after the event; all runs of
a scenario see the same event at the same step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from common import PLAIN, RESULTS, ROOT, busy_core, nothing, steps_of, throttled_link, train, write

from gtx.config import load_config
from gtx.report import load_report
from gtx.session import load_partitioned
from gtx.workload import workload_of
from scheduler.cost import estimate
from scheduler.plan import from_json
from scheduler.search import family_of
from scheduler.topology import FORMAT, topology_from_json

LINK = "100mbit"  # of the throttled link
LINK_BYTES_PER_S = 100e6 / 8
WINDOW = 5
ADAPTIVE = ["plan.mode=adaptive", f"scheduler.window={WINDOW}"]
FIXED = ("graph", "model", "pipeline", "data")


@dataclass(frozen=True)
class Scenario:
    """settings: of the job. event: step at which it happens, 0 for a bad start. slowed: times slower, for the search of
    the plan that is best afterwards.
    """

    settings: tuple[str, ...]
    steps: int
    event: int
    slowed: float = 1.0


SBM = "data.options={num_nodes: 20000, num_edges: 200000, num_blocks: 16, homophily: 0.9}"
WIDE = "data.options={num_nodes: 20000, num_edges: 200000, num_blocks: 16, homophily: 0.6}"  # much to exchange
ONE = ("partition.parts=12", "batch.kind=cluster", "batch.parts=4")  # of three micro-batches a step: data idles a rank
HUBS = "data.options={num_nodes: 8192, num_edges: 2000000}"  # one of two parts gets nine tenths of the edges
SCENARIOS = {
    "rank": Scenario(("data.name=sbm", SBM, "sampling.fanout=10"), 200, 80, 2.0),
    "link": Scenario(("data.name=sbm", WIDE, "sampling.fanout=10", *ONE), 200, 100),
    "hub": Scenario(("data.name=rmat", HUBS, "partition.parts=2", "sampling.fanout=null"), 60, 0),
}


EVENTS = {"rank": busy_core, "link": partial(throttled_link, LINK), "hub": nothing}


def run(name: str, overrides: Sequence[str], folder: Path) -> Path:
    """Run once; the event happens at its step. Returns the run folder."""
    scenario = SCENARIOS[name]
    settings = [*scenario.settings, f"train.steps={scenario.steps}", f"partition.cache={folder.parent}/cut"]
    with EVENTS[name]() as happen:
        return train([*settings, *overrides], folder, happen, scenario.event, spaces=name == "link")


# Comparing ------------------------------------------------------------------------------------------------------------


def machine_after(name: str, report: dict[str, Any], out: Path) -> None:
    """Write the topology that a run fitted before the event, as it is afterwards."""
    topology = topology_from_json(json.dumps({"format": FORMAT, **report["scheduler"]["topology"]}))
    if name == "rank":
        topology = topology.with_speeds([1.0, SCENARIOS[name].slowed])
    if name == "link":
        slower = max(topology.same_host.bytes_per_s / LINK_BYTES_PER_S, 1.0)
        topology = replace(topology, slow_links=((0, 1, slower),))
    out.write_text(topology.to_json())


def best_after(scenario: Scenario, machine: Path, out: Path) -> None:
    """Write the plan that a search finds for the machine after the event."""
    command = [sys.executable, str(ROOT / "launch.py"), "plan", str(ROOT / "configs/digits_gt.yaml"), *PLAIN]
    command += [*scenario.settings, f"partition.cache={out.parent}/cut", "plan.mode=auto", "--world-size", "2"]
    subprocess.run([*command, "--topology", str(machine), "--out", str(out)], check=True, stdout=subprocess.DEVNULL)


def simulated(run_dir: Path, machine: Path) -> float:
    """What the cost model, and so the simulator, says of a run's last plan on the machine after the event."""
    config = load_config(run_dir / "config.yaml")
    workload, _ = workload_of(config, load_partitioned(config).partitioned)
    plan = from_json(last_plan(run_dir).read_text())
    return estimate(plan, workload, topology_from_json(machine.read_text())).step_s


def last_plan(run_dir: Path) -> Path:
    return max(run_dir.glob("plan-*.json"), key=lambda path: int(path.stem.removeprefix("plan-")))


def outcome(name: str, label: str, run_dir: Path, machine: Path) -> dict[str, object]:
    scenario = SCENARIOS[name]
    seconds = steps_of(run_dir)
    block = load_report(run_dir)["scheduler"]
    later = [entry for entry in block["decisions"] if entry["verdict"] in ("switch", "return")]
    settled = scenario.event + 3 * WINDOW + 1
    spent = block["spent_s"]
    end = float(seconds[-4 * WINDOW :].median())
    return {
        "scenario": name,
        "plan": label,
        "before, s": float(seconds[2 : max(scenario.event, 3)].median()) if scenario.event else float("nan"),
        "three windows later, s": float(seconds[settled : settled + 2 * WINDOW].median()),
        "at the end, s": end,
        "simulated over that": simulated(run_dir, machine) / end,
        "all steps, s": float(seconds[1:].sum()),
        "from the event, s": float(seconds[max(scenario.event, 1) :].sum()),
        "switches": len(later),
        "first switch at": later[0]["step"] + 1 if later else "-",
        "last plan": family_of(from_json(last_plan(run_dir).read_text())),
        "own cost, %": 100 * (spent["controller"] + spent["monitor"]) / max(block["seconds"], 1e-9),
    }


def compare(name: str, repeats: int, folder: Path) -> pd.DataFrame:
    scenario = SCENARIOS[name]
    rows = []
    base = list(ADAPTIVE)
    bad = folder / "bad.json"
    if name == "hub":  # the plan of the mode graph is the bad start
        command = [sys.executable, str(ROOT / "launch.py"), "plan", str(ROOT / "configs/digits_gt.yaml"), *PLAIN]
        command += [*scenario.settings, f"partition.cache={folder}/cut", "--world-size", "2", "--out", str(bad)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        base.append(f"plan.file={bad}")
    machine, best = folder / "after.json", folder / "best.json"
    for repeat in range(repeats):
        cases = {"adaptive": base, "adaptive, modes fixed": [*base, "scheduler.modes=false"]}
        cases |= {mode: [f"plan.mode={mode}"] for mode in FIXED}
        cases["best afterwards"] = [f"plan.file={best}"]
        for label, overrides in cases.items():
            kept = folder / f"{label.replace(', ', '-')}-{repeat}"
            if not (kept / "run" / "strategy-report.json").exists():
                shutil.rmtree(kept, ignore_errors=True)  # of a run that was interrupted
                run(name, overrides, kept)
            run_dir = kept / "run"
            if not best.exists():
                machine_after(name, load_report(run_dir), machine)
                best_after(scenario, machine, best)
            rows.append(outcome(name, label, run_dir, machine))
            print(pd.DataFrame(rows).round(3).to_string(), flush=True)
    return pd.DataFrame(rows)


def verdict(table: pd.DataFrame) -> str:
    """How much of the gap to the best plan was closed, and how it ended beside the fixed plans."""
    middle = table.groupby("plan")[["three windows later, s", "at the end, s", "all steps, s"]].median()
    adaptive = middle.loc["adaptive"]
    kept = middle.loc["graph"] if "graph" in middle.index else adaptive
    fixed = middle.drop(index=[i for i in middle.index if i.startswith("adaptive")])
    best = fixed["at the end, s"].min()
    gap = kept["at the end, s"] - best
    closed = (kept["at the end, s"] - adaptive["three windows later, s"]) / gap
    still = (kept["at the end, s"] - middle.loc["adaptive, modes fixed"]["at the end, s"]) / gap
    ends = fixed["at the end, s"].min() / adaptive["at the end, s"]
    ahead = fixed["all steps, s"].min() / adaptive["all steps, s"]
    wrong = (table["simulated over that"] - 1.0).abs()
    return (
        f"Of the gap between the graph plan and the best fixed plan after the event, adaptive closed {closed:.0%} "
        f"three windows later, {still:.0%} at the end with modes fixed. At the end a step of the best fixed plan took "
        f"{ends:.2f} times as long as adaptive's; over all steps the fastest fixed run "
        f"({fixed['all steps, s'].idxmin()}) took {ahead:.2f} times as long. What the simulator says of the last plans "
        f"is {wrong.median():.0%} off in the median, {wrong.max():.0%} at worst."
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenarios", default="rank,link,hub")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the runs; those that are there are not run again")
    options = parser.parse_args()
    parts, tables = [], []
    for name in options.scenarios.split(","):
        folder = (options.keep or Path(tempfile.mkdtemp(prefix="gtx-benchmark-"))) / name
        asked = folder / "asked.txt"  # what the kept runs are of
        wanted = repr((SCENARIOS[name], ADAPTIVE, LINK))
        if not asked.exists() or asked.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            asked.write_text(wanted)
        table = compare(name, options.repeats, folder)
        tables.append(table)
        told = verdict(table)
        print(told, flush=True)
        parts.append(f"## {name}\n\n{told}\n\n" + table.drop(columns="scenario").round(3).to_markdown(index=False))
        if options.keep is None:
            shutil.rmtree(folder.parent)
    pd.concat(tables).to_csv(RESULTS / "adaptation.csv", index=False)
    write(
        "adaptation",
        "Adapting while a run lasts",
        f"Two ranks, a core each; windows of {WINDOW} steps, other thresholds as they come. Medians over steps, of the "
        f"slowest rank; {options.repeats} run(s) each, one after the other.\n\n" + "\n\n".join(parts),
    )


if __name__ == "__main__":
    main()
