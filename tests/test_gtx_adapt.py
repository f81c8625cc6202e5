"""Real runs that choose and change their plan: the losses stay one rank's, all ranks agree, and the report explains."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import launch
from gtx.adapt import limits_of, pick_engine, rules_of
from gtx.config import SchedulerConfig, parse_config
from gtx.processes import run_ranks
from gtx.replay import replay_run
from gtx.report import load_report
from scheduler.controller import Rules
from scheduler.plan import Placement, Plan, from_json
from scheduler.topology import FREE, Device, Link, Topology
from scheduler.workload import ModelShape, uniform_workload

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = [
    "engine.name=torch",
    "engine.zero_stage=0",
    "engine.threads=1",
    "engine.precision=float64",
    "engine.lr_schedule=constant",
    "model.layers=2",
    "model.width=32",
    "monitor.progress=false",
    "train.eval_every=0",
]
CLUSTERS = ["batch.kind=cluster", "batch.parts=2", "batch.micro_batches=4"]


def train(folder: Path, ranks: int, *overrides: str) -> tuple[dict[str, Any], list[float]]:
    """The report and the losses of a run on real ranks."""
    command = [sys.executable, str(ROOT / "launch.py"), "train", str(ROOT / "configs/digits_gt.yaml"), *SETTINGS]
    command += [f"partition.cache={folder.parent / 'cut'}", *overrides, "--run-dir", str(folder / "run")]
    error = run_ranks(command, ranks, folder, sorted(os.sched_getaffinity(0)))
    assert error is None, error
    report = load_report(folder / "run")
    losses = pd.read_csv(folder / "run" / "metrics.csv").loss.tolist()
    return report, losses


def test_trying_every_family_changes_no_loss(tmp_path: Path) -> None:
    """Under `oracle` the plan changes at least four times in the first steps, with dropout and fresh samples on."""
    steps = ["train.steps=26", *CLUSTERS]
    _, alone = train(tmp_path / "one", 1, "plan.mode=graph", *steps)
    oracle = ["plan.mode=auto", "scheduler.setting=oracle", "scheduler.probe_steps=2", "scheduler.probe_plans=4"]
    report, losses = train(tmp_path / "two", 2, *oracle, *steps)
    assert losses == pytest.approx(alone, rel=1e-9)
    told = report["scheduler"]
    assert len(told["plans"]) >= 4 and len(told["probes"]) >= 4
    assert {probe["family"] for probe in told["probes"]} >= {"graph", "model", "pipeline", "data"}
    fastest = min(told["probes"], key=lambda probe: probe["measured_s"])
    assert report["plan"]["fingerprint"] == fastest["plan"] == told["plans"][-1]["fingerprint"]
    assert told["calibration"]["held_out_error_median"] is not None
    assert len(told["switches"]) == len(told["plans"]) - 1
    assert all(switch["seconds"] > 0 for switch in told["switches"])
    kept = [from_json((tmp_path / "two" / "run" / f"plan-{n}.json").read_text()) for n in range(len(told["plans"]))]
    assert [plan.fingerprint for plan in kept] == [entry["fingerprint"] for entry in told["plans"]]
    assert told["regret"]["share"] >= 0


def test_a_wrong_belief_is_found_out_while_the_run_lasts(tmp_path: Path) -> None:
    """By the topology file rank 1 is six times slower than it is; the first window's fit says that it is not.

    Whether a switch then pays depends on what else runs on the machine; `test_scheduler_controller.py` is exact.
    """
    fast = Device(2e10, 2e9, 1e-3, 8e9, row_bytes_per_s=2e9, packed_bytes_per_s=2e9, message_s=1e-4)
    machine = Topology((fast, fast.slowed(6.0)), Link(2e-4, 2e9), Link(2e-4, 2e9), 1e10, 0.0)
    (tmp_path / "machine.json").write_text(machine.to_json())
    steps = ["train.steps=36", "data.name=sbm", "data.options={num_nodes: 8000, num_edges: 120000}"]
    settings = [f"plan.topology={tmp_path / 'machine.json'}", "scheduler.probe_steps=0", "scheduler.window=4"]
    settings += [
        "plan.allow=[graph]",
        "scheduler.cooldown=0",
        "scheduler.z=0",
        "scheduler.kappa=0",
        "scheduler.delta=0.02",
    ]
    _, alone = train(tmp_path / "one", 1, "plan.mode=graph", *steps)
    report, losses = train(tmp_path / "two", 2, "plan.mode=adaptive", *settings, *steps)
    assert losses == pytest.approx(alone, rel=1e-9)
    told = report["scheduler"]
    first = from_json((tmp_path / "two" / "run" / "plan-0.json").read_text())
    rows = [0, 0]
    for place, entry in zip(first.partitions, report["partitions"], strict=True):
        rows[place.ranks[0]] += entry["rows"]
    assert 0 < rows[1] < 0.4 * rows[0], "by the file rank 1 gets little"
    for decision in told["decisions"]:
        if decision["verdict"] == "switch":
            assert decision["promised_s"] < decision["measured_s"]
    one, two = (device["row_flops_per_s"] for device in told["topology"]["devices"])
    assert one / two < 4.0, "the first window told that they are less unlike than six to one"
    assert len(told["windows"]) == len(told["decisions"])
    assert told["spent_s"]["controller"] > 0 and 0 < told["spent_s"]["monitor"] < told["seconds"]
    again = [decision.as_dict() for decision in replay_run(tmp_path / "two" / "run")]
    assert json.loads(json.dumps(again)) == told["decisions"], "the report's records give the same decisions"
    assert launch.main(["replay", str(tmp_path / "two" / "run")]) == 0
    other = replay_run(tmp_path / "two" / "run", ["scheduler.delta=0.9"])
    assert all(decision.verdict == "stay" for decision in other)


def test_an_adaptive_run_starts_under_its_plan_file_and_leaves_it_if_it_is_bad(tmp_path: Path) -> None:
    """Everything on rank 0: rank 1 is shown no work, so what is believed of it stands, and half of all goes there."""
    idle = Plan(2, 2, (Placement("graph", (0,)),) * 16)
    (tmp_path / "bad.json").write_text(idle.to_json())
    given = [f"plan.file={tmp_path / 'bad.json'}", "scheduler.window=3", "scheduler.cooldown=0", "scheduler.z=0"]
    steps = ["train.steps=40", "sampling.fanout=16"]
    _, alone = train(tmp_path / "one", 1, "plan.mode=graph", *steps)
    report, losses = train(tmp_path / "two", 2, "plan.mode=adaptive", *given, *steps)
    assert losses == pytest.approx(alone, rel=1e-9)
    told = report["scheduler"]
    assert told["plans"][0]["fingerprint"] == idle.fingerprint and told["probes"] == []
    assert told["windows"][0]["window"]["imbalance"] > 1.5
    assert {rank for place in report["partitions"] for rank in place["ranks"]} == {0, 1}


def test_a_plan_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch.py"), "train", str(ROOT / "configs/digits_gt.yaml"), *SETTINGS]
    command += [f"partition.cache={tmp_path / 'cut'}", "plan.mode=auto", "plan.memory_limit_gib=0.01"]
    error = run_ranks([*command, "--run-dir", str(tmp_path / "run")], 2, tmp_path / "ranks", None)
    assert error is not None and error.startswith("gtx: none of the ") and "what would help: 1. " in error
    assert not (tmp_path / "run").exists()


# The engine -----------------------------------------------------------------------------------------------------------


def picked(limit_gib: float, host_bytes_per_s: float = FREE, **engine: Any) -> tuple[Any, Any]:
    """ZeRO stage and offload for 100 million parameters on four ranks: 1.5 GiB of states a rank under stage 0."""
    model = ModelShape("GT", 32, 64, 4, 3, 16, 4, 100_000_000)
    device = Device(2e9, 1e9, 1e-4, 8e9, row_bytes_per_s=1e9)
    topology = Topology((device,) * 4, Link(1e-4, 1e9), Link(1e-4, 1e9), 1e10, 0.0, host_bytes_per_s)
    plan = {"mode": "auto", "memory_limit_gib": limit_gib}
    chosen = {"zero_stage": "auto", "offload_optimizer": "auto", **engine}
    config = parse_config({"plan": plan, "engine": chosen, "model": {"layers": 3, "width": 32}})
    found = pick_engine(config, uniform_workload(model, [200.0] * 16, [3e4] * 16, 0.5), topology).engine
    return found.zero_stage, found.offload_optimizer


def test_the_engine_that_is_picked_is_the_cheapest_that_fits() -> None:
    assert picked(8.0) == (1, "none"), "a quarter of the optimizer's work each"
    assert picked(0.55) == (2, "none") and picked(0.5) == (3, "none")
    assert picked(8.0, zero_stage=0) == (0, "none"), "what is given stays"
    assert picked(8.0, 1e10, zero_stage=2, offload_optimizer="cpu") == (2, "cpu")
    assert picked(0.42, 1e10)[1] == "cpu" and picked(0.42)[1] == "none", "on CPU ranks offload frees nothing"
    assert picked(0.01) == (3, "none"), "nothing fits: the one that holds least"


# The config -----------------------------------------------------------------------------------------------------------


def test_the_configs_thresholds_are_the_rules() -> None:
    assert rules_of(parse_config({})) == Rules()
    changed = parse_config({"scheduler": {"delta": 0.2, "hold": 5, "hysteresis": False}})
    assert rules_of(changed) == Rules(delta=0.2, hold=5, hysteresis=False)
    assert set(Rules.__dataclass_fields__) <= set(SchedulerConfig.model_fields)


def test_limits_come_from_the_config() -> None:
    plan = {"mode": "auto", "allow": ["graph", "model"], "pin": {2: "model"}, "memory_limit_gib": 2.0, "groups": [2]}
    limits = limits_of(parse_config({"plan": {**plan, "checkpointing": "edges", "micro_batches_per_wave": 3}}))
    assert limits.allow == ("graph", "model") and limits.pin == {2: "model"} and limits.groups == (2,)
    assert limits.memory_bytes == 2 * 2**30
    assert limits.checkpointing == ("edges", "layer"), "no less than was asked for"
    assert limits.fixed_waves == (3, 0)


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ({"mode": "auto", "allow": []}, "allow is empty"),
        ({"mode": "auto", "allow": ["graph"], "pin": {1: "model"}}, "pin puts partition 1 into mode 'model'"),
        ({"mode": "auto", "pin": {16: "model"}}, "plan.pin names partition 16, partition.parts is 16 (0 to 15)"),
    ],
)
def test_limits_that_contradict_are_one_line(plan: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_config({"plan": plan})
    assert line in str(error.value) and "\n" not in str(error.value)


def test_what_has_no_effect_is_told() -> None:
    config = parse_config({"plan": {"mode": "graph", "allow": ["graph"]}, "scheduler": {"window": 5}})
    assert config.without_effect() == [
        "plan.allow has no effect: plan.mode is graph, not auto or adaptive",
        "scheduler.window has no effect: nothing is searched",
    ]
