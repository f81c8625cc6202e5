"""Run folders made by hand, as a run of four ranks would leave them: report, config, records and traces.

Not here: what is asserted about them (`test_gtx_page.py`, `test_gtx_compare.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gtx.report import build_report, write_report
from monitor import ExchangeRecord, JsonlSink, PeerRecord, StepRecord, reduce_window

PLANS = {"graph": "aaaa1111bbbb2222", "pipeline": "cccc3333dddd4444", "mixed": "eeee5555ffff6666"}
WINDOW = 10
RANKS = 4
CONFIG: dict[str, Any] = {
    "name": "digits_gt",
    "seed": 7,
    "partition": {"method": "metis", "parts": 16},
    "model": {"name": "GT", "width": 64},
    "batch": {"kind": "full"},
    "plan": {"mode": "adaptive", "file": None, "allow": ["graph", "model", "pipeline", "data"], "pin": {}},
    "engine": {"name": "torch", "threads": 0, "lr": 0.003},
}


def ran(step: int, num_steps: int) -> str:
    """The family of the plan that a step runs under: two are tried, then a switch at a half."""
    return "graph" if step < 4 else "pipeline" if step < num_steps // 2 else "mixed"


def make_records(num_steps: int, *, num_ranks: int = RANKS, peers: bool = True) -> list[StepRecord]:
    rng = np.random.default_rng(3)
    made = []
    for step in range(num_steps):
        family = ran(step, num_steps)
        slow = 1.6 if family == "pipeline" and step >= num_steps // 3 else 1.0  # rank 2 is disturbed
        noise = rng.uniform(0.97, 1.08)
        for rank in range(num_ranks):
            work = {"graph": 0.030, "pipeline": 0.024, "mixed": 0.021}[family] * noise * (slow if rank == 2 else 1.0)
            wait = 0.002 + (0.024 * (slow - 1.0) if rank != 2 else 0.0)
            phases = {
                "compiling": 0.2 if step == 0 else 0.0004,
                "rowwise": 0.35 * work,
                "edgewise": 0.20 * work,
                "exchange.fetch": 0.0005,
                "exchange.kv": wait + 0.001,
                "backward": 0.45 * work,
                "optimizer": 0.0015,
                "other": 0.0003,
            }
            if (step + 1) % 20 == 0:
                phases["evaluate"] = 0.015
            exchanges = (
                ExchangeRecord("fetch", 4096, 4096, 0.0005, 0.0, 3),
                ExchangeRecord("kv", 3_000_000 + 4096 * rank, 3_000_000, wait + 0.001, wait, 6),
            )
            others = [
                PeerRecord(p, 700_000 * (1 + (p + rank) % 3), 9, 0.1 * wait) for p in range(num_ranks) if p != rank
            ]
            made.append(
                StepRecord(
                    step=step,
                    rank=rank,
                    wall_s=sum(phases.values()),
                    phases=phases,
                    exchanges=exchanges,
                    peak_memory_bytes=int((500 + 40 * rank + 15 * (family == "mixed") + 0.02 * step) * 2**20),
                    rows_computed=1000,
                    edges_computed=9000,
                    loss=2.3 * 0.97**step + 0.02,
                    plan_fingerprint=PLANS[family],
                    memory_source="a test",
                    peers=tuple(others) if peers else (),
                )
            )
    return made


def probe(family: str, measured_s: float, predicted_s: float, held_out_s: float) -> dict[str, Any]:
    """A tried plan of the strategy report."""
    memory = {"measured_memory_bytes": 500 << 20, "predicted_memory_bytes": 480.5e6, "held_out_memory_bytes": 470.5e6}
    times = {"measured_s": measured_s, "predicted_s": predicted_s, "held_out_s": held_out_s}
    return {"plan": PLANS[family], "family": family, **times, **memory}


def make_scheduler(records: list[StepRecord], num_steps: int, num_ranks: int = RANKS) -> dict[str, Any]:
    """What an adaptive run would tell: two tries, a window every ten steps, one switch whose promise was kept."""
    steps = [records[begin : begin + num_ranks] for begin in range(0, len(records), num_ranks)]
    half = num_steps // 2
    candidates = [
        {
            "family": family,
            "fingerprint": PLANS.get(family),
            "predicted": {"step_s": s, "wait_s": s / 5, "sent_bytes": 1e7, "memory_bytes": m} if s else None,
            "verdict": verdict,
            "reason": reason,
        }
        for family, s, m, verdict, reason in (
            ("mixed", 0.0225, 6.0e8, "chosen", "the fastest that fits"),
            ("pipeline", 0.0260, 5.5e8, "slower", "1.16 times the chosen: stages wait for each other"),
            ("graph", 0.0315, 5.1e8, "slower", "1.40 times the chosen"),
            ("model", 0.0290, 4.0e10, "too large", "37.3 GiB on rank 0, 23.5 GiB are there"),
            ("data", 0.0, 0.0, "not allowed", "plan.allow leaves it out"),
        )
    ]  # fmt: skip
    windows: list[dict[str, Any]] = []
    decisions: list[dict[str, Any]] = []
    before = None
    for begin in range(WINDOW, num_steps - WINDOW + 1, WINDOW):
        of_it = steps[begin : begin + WINDOW]
        if ran(begin, num_steps) != ran(begin + WINDOW - 1, num_steps):
            before = None
            continue
        window = reduce_window(of_it, before)
        switch = begin + WINDOW == half
        windows.append({"window": window.as_dict(), "steps_left": num_steps - begin - WINDOW, "switch_s": None})
        triggers = [] if before is not None and window.imbalance < 1.1 else ["straggler"]
        decisions.append({
            "step": window.last_step,
            "triggers": triggers if before is not None else ["first window"],
            "verdict": "switch" if switch else "stay",
            "rule": "gain 0.0121 s a step (33.1%) over 400 steps against 0.35 s" if switch else
                    "no trigger" if not triggers else "the running plan is the best",
            "plan_fingerprint": window.plan_fingerprint,
            "chosen_fingerprint": PLANS["mixed"] if switch else window.plan_fingerprint,
            "measured_s": window.step_s,
            "predicted_s": 0.93 * window.step_s,
            "promised_s": 0.0232 if switch else None,
            "gain_s": 0.0121 if switch else 0.0,
            "steps_left": num_steps - begin - WINDOW,
            "cost_s": 0.35,
            "slowness": [1.0, 1.0, 1.6, 1.0],
            "links": [],
            "candidates": [],
            "outcome_s": 0.0248 if switch else None,
            "kept": True if switch else None,
        })  # fmt: skip
        before = window
    return {
        "setting": "adaptive",
        "topology": None,
        "calibration": None,
        "candidates": candidates,
        "probes": [
            probe("graph", 0.0335, 0.0315, 0.0310),
            probe("pipeline", 0.0277, 0.0260, 0.0251),
        ],
        "watch": {"plan": PLANS["pipeline"], "switch_cost_s": 0.3, "search_cost_s": 0.1},
        "windows": windows,
        "decisions": decisions,
        "switches": [
            {"step": 4, "plan": PLANS["pipeline"], "seconds": 0.21, "sent_bytes": 120_000},
            {"step": half, "plan": PLANS["mixed"], "seconds": 0.35, "sent_bytes": 900_000},
        ],
        "spent_s": {"monitor": 0.05, "controller": 0.11, "start": 1.4},
        "regret": {
            "best_plan": PLANS["mixed"],
            "best_s": 0.0247,
            "kept_plan": PLANS["mixed"],
            "kept_s": 0.0252,
            "share": 0.0202,
        },
        "plans": [
            {"from_step": 0, "fingerprint": PLANS["graph"]},
            {"from_step": 4, "fingerprint": PLANS["pipeline"]},
            {"from_step": half, "fingerprint": PLANS["mixed"]},
        ],
        "seconds": 0.04 * num_steps,
    }


def given(mode: str) -> dict[str, Any]:
    """The block `scheduler` of a run whose plan was given."""
    return {
        "setting": mode,
        "topology": None,
        "calibration": None,
        "watch": None,
        **{key: [] for key in ("candidates", "probes", "windows", "decisions", "switches")},
        "spent_s": {"monitor": 0.01, "controller": 0.0, "start": 0.0},
        "regret": None,
        "plans": [{"from_step": 0, "fingerprint": PLANS["mixed"]}],
        "seconds": 2.0,
    }


def make_trace(folder: Path, step: int, plan: str, *, layers: int = 3, pieces: int = 4) -> None:
    """A trace as `Sinks.keep_trace` writes it: forward, backward and the optimizer, in pieces with short gaps."""
    events = []
    for rank in range(RANKS):
        at = 0.0
        names = [("compiling", 400.0)]
        for _ in range(layers):
            names += [
                ("rowwise", 2600.0 / pieces),
                ("exchange.kv", 700.0 + 300.0 * rank),
                ("edgewise", 1400.0 / pieces),
            ] * pieces
        names += [("backward", 9000.0), ("exchange.reduce", 10.0), ("other", 3.0), ("exchange.reduce", 500.0)]
        for name, length in [*names, ("optimizer", 1500.0)]:
            events.append({"name": name, "ph": "X", "pid": 0, "tid": rank, "ts": round(at, 1), "dur": round(length, 1)})
            at += length
    data = {"traceEvents": events, "otherData": {"step": step, "plan": plan}}
    (folder / f"trace-{step}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


def make_run(
    folder: Path,
    num_steps: int = 100,
    *,
    num_ranks: int = RANKS,
    name: str = "digits_gt",
    peers: bool = True,
    keep: tuple[str, ...] = ("records", "traces", "config"),
    config: Mapping[str, Any] = CONFIG,
    **changes: Any,
) -> Path:
    """Write a run folder. keep: which files besides the report. changes: to what `build_report` is given."""
    folder.mkdir(parents=True, exist_ok=True)
    records = make_records(num_steps, num_ranks=num_ranks, peers=peers)
    parts: dict[str, Any] = {
        "run": {
            "name": name,
            "seed": 7,
            "world_size": num_ranks,
            "collectives": "gloo" if num_ranks > 1 else "none",
            "engine": "deepspeed",
            "zero_stage": 1,
            "offload": "none",
            "precision": "float32",
            "config_hash": "c0ffee",
            "command": f"launch.py train configs/digits_gt.yaml name={name}",
            "started": "2026-01-01T00:00:00+00:00",
            "finished": "2026-01-01T00:01:40+00:00",
            "seconds": 100.0,
        },
        "versions": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "deepspeed": "0.19.8",
            "dgl": None,
            "gtx": "0.1.0",
            "commit": None,
        },
        "devices": [
            {"rank": r, "kind": "cpu", "name": "AMD EPYC", "host": "node0", "memory_bytes": 2**34}
            for r in range(num_ranks)
        ],
        "graph": {"name": "digits", "num_nodes": 1797, "num_edges": 21655, "directed": False, "mean_in_degree": 12.05},
        "partitioning": {"method": "metis", "implementation": "pymetis", "cut_fraction": 0.1146, "rows": (900, 897)},
        "partitions": [
            {"mode": mode, "ranks": ranks, "layer_split": split, "rows": 450, "edges": 4500, "halo_rows": 55}
            for mode, ranks, split in [("graph", (0,), ()), ("graph", (1,), ()), ("pipeline", (2, 3), (1, 2))]
        ],
        "plan": {
            "fingerprint": PLANS["mixed"],
            "mode": "adaptive",
            "num_waves": 4,
            "num_rounds": 1,
            "micro_batches_per_wave": 0,
            "waves_per_round": 0,
            "checkpointing": "none",
        },
        "steps": records,
        "evaluations": [
            {"step": s, "val_score": 0.98 - 0.7 * 0.95**s, "test_score": 0.97 - 0.7 * 0.95**s}
            for s in range(19, num_steps, 20)
        ],
        "exactness": "exact: the plan only reorders sums",
        "share_of_edges_attended": 0.9375,
        "model": {"name": "GT", "layers": 3, "width": 64, "ffn_width": None, "parameters": 105354},
        "losses": [record.loss for record in records[::num_ranks]],
        "metric": "accuracy",
        "scheduler": make_scheduler(records, num_steps, num_ranks),
    }
    write_report(build_report(**{**parts, **changes}), folder)
    if "config" in keep:
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "name": name}), encoding="utf-8")
    if "records" in keep:
        sink = JsonlSink(folder / "records.jsonl")
        for record in records:
            sink.write(record)
        sink.close()
    if "traces" in keep:
        make_trace(folder, 2, PLANS["graph"])
        make_trace(folder, num_steps // 2 + 3, PLANS["mixed"])
    return folder
