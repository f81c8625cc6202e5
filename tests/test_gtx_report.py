"""The strategy report: exact figures from hand-made records, a schema that refuses surprises, tables that show them."""

import copy
import io
import json
import math

import numpy as np
import pytest
from made_runs import make_run
from rich.console import Console

from gtx.report import build_report, check_report, load_report, measure, print_report, write_report
from monitor.records import ExchangeRecord, StepRecord

# Seconds of (rowwise, exchange.kv, of it waiting) by step, per rank. The first step is slow, as first steps are.
SECONDS = [
    [(9.0, 1.0, 0.5), (1.0, 0.5, 0.25), (2.0, 0.5, 0.25), (3.0, 0.5, 0.25)],
    [(8.0, 2.0, 1.5), (0.5, 1.0, 0.75), (1.5, 1.0, 0.75), (2.0, 1.5, 1.25)],
]


def records(num_steps=4, world_size=2):
    made = []
    for rank, steps in enumerate(SECONDS[:world_size]):
        for step, (rowwise, kv, wait) in enumerate(steps[:num_steps]):
            made.append(
                StepRecord(
                    step=step,
                    rank=rank,
                    wall_s=rowwise + kv + 0.125,
                    phases={"rowwise": rowwise, "exchange.kv": kv, "other": 0.125},
                    exchanges=(ExchangeRecord("kv", 4096 + rank, 1024, kv, wait, 2),),
                    peak_memory_bytes=(100 - step) * 2**20,
                    rows_computed=10 * (rank + 1),
                    edges_computed=70,
                    loss=2.0 / (step + 1),
                    plan_fingerprint="aaaa" if step < 3 else "bbbb",
                    memory_source="a test",
                )
            )
    return made


def report(**changes):
    parts = {
        "run": {
            "name": "digits_gt",
            "seed": 7,
            "world_size": 2,
            "collectives": "gloo",
            "engine": "deepspeed",
            "zero_stage": 1,
            "offload": "none",
            "precision": "float32",
            "config_hash": "c0ffee",
            "command": "launch.py train configs/digits_gt.yaml",
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
            {"rank": r, "kind": "cpu", "name": "unknown", "host": "node0", "memory_bytes": 2**34} for r in range(2)
        ],
        "graph": {"num_nodes": np.int64(1797), "num_edges": 17970, "directed": True, "mean_in_degree": 10.0},
        "partitioning": {
            "method": "metis",
            "implementation": "pymetis 2025.2.2",
            "cut_fraction": 0.0625,
            "rows": (900, 897),
            "edges": (9000, 8970),
            "halo_rows": (55, 66),
        },
        "partitions": [
            {"mode": "graph", "ranks": (0,), "layer_split": (), "rows": 900, "edges": 9000, "halo_rows": 55},
            {"mode": "pipeline", "ranks": (0, 1), "layer_split": (1, 3), "rows": 897, "edges": 8970, "halo_rows": 66},
        ],
        "plan": {
            "fingerprint": "aaaa",
            "mode": "mixed",
            "num_waves": 1,
            "num_rounds": 1,
            "micro_batches_per_wave": 0,
            "waves_per_round": 0,
            "checkpointing": "none",
        },
        "steps": records(),
        "evaluations": [
            {"step": 1, "val_score": 0.5, "test_score": 0.4},
            {"step": 2, "val_score": 0.75, "test_score": 0.625},
            {"step": 3, "val_score": 0.75, "test_score": 0.9},
        ],
        "exactness": "exact",
        "share_of_edges_attended": 0.9375,
        "model": {"name": "GT", "num_layers": 4, "hidden_dim": 64},
        "losses": [2.0, 1.0, math.nan, 0.5],
        "metric": "accuracy",
    }
    return build_report(**{**parts, **changes})


def test_figures_are_exact():
    first, second = report()["measured"]["ranks"]
    assert first["num_steps"] == 3
    assert first["phases"]["rowwise"] == {"median": 2.0, "p95": pytest.approx(2.9), "total": 6.0}
    assert first["phases"]["exchange.kv"] == {"median": 0.5, "p95": 0.5, "total": 1.5}
    assert first["step_s"] == {"median": 2.625, "p95": pytest.approx(3.525), "total": 7.875}
    assert first["busy_s"]["total"] == 7.125
    assert sum(phase["total"] for phase in first["phases"].values()) == first["step_s"]["total"]
    assert second["exchanges"] == {
        "kv": {"sent_bytes": 3 * 4097, "received_bytes": 3072, "messages": 6, "seconds": 3.5, "wait_s": 2.75}
    }
    assert (second["rows_computed"], second["edges_computed"]) == (60, 210)
    assert first["peak_memory_bytes"] == 100 * 2**20  # of the first step, which the seconds leave out
    assert first["memory_source"] == "a test"
    measured = report()["measured"]
    assert measured["slowest_rank"] == {"rank": 0, "busy_over_mean": 7.125 / ((7.125 + 5.125) / 2)}
    assert measured["plan_fingerprints"] == ["aaaa", "bbbb"]
    assert measured["first_step_left_out"]


def test_a_phase_that_some_steps_lack_counts_as_nothing_there():
    made = [
        StepRecord(s, 0, 1.0, {"evaluate": 1.0} if s == 3 else {"other": 1.0}, (), 0, 0, 0, 1.0, "") for s in range(4)
    ]
    (only,) = measure(made, 1)["ranks"]
    assert only["phases"]["evaluate"] == {"median": 0.0, "p95": pytest.approx(0.9), "total": 1.0}
    assert measure(made[:1], 1)["first_step_left_out"] is False  # the only step is not left out


def test_the_order_of_records_does_not_matter():
    assert report(steps=records()[::-1]) == report()


def test_the_best_evaluation_is_the_first_of_the_highest_validation_scores():
    assert report()["best"] == {"step": 2, "val_score": 0.75, "test_score": 0.625}
    assert report(evaluations=[])["best"] is None
    unscored = [
        {"step": 0, "val_score": math.nan, "test_score": 0.5},
        {"step": 1, "val_score": None, "test_score": None},
    ]
    assert report(evaluations=unscored)["best"] is None


def test_records_of_another_run_are_refused():
    with pytest.raises(ValueError, match="the records hold rank 1, the world has 1 ranks"):
        measure(records(), 1)
    with pytest.raises(ValueError, match="rank 1 has the records of 3 steps, rank 0 of 4"):
        measure(records()[:-1], 2)
    with pytest.raises(ValueError, match="hold step 0 twice"):
        measure(records(world_size=1) * 2, 1)
    with pytest.raises(ValueError, match="at least one step"):
        measure([], 2)


def test_exactness_has_a_class_and_a_reason():
    assert report()["exactness"] == {"class": "exact", "reason": "equal to one rank, sums reordered"}
    assert report(exactness="tolerance: bf16 weights")["exactness"] == {"class": "tolerance", "reason": "bf16 weights"}
    with pytest.raises(ValueError, match="exactness is 'close'; begin with one of exact, tolerance, approximate"):
        report(exactness="close")


def test_it_is_written_whole_and_read_back(tmp_path):
    path = write_report(report(), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["strategy-report.json"]
    assert load_report(tmp_path) == report() == json.loads(path.read_text())
    assert "NaN" not in path.read_text()
    assert load_report(tmp_path)["losses"] == [2.0, 1.0, "nan", 0.5]
    assert "rows" not in load_report(tmp_path)["partitioning"]  # the lists per part are in `partitions`


PLACES = [(), ("run",), ("versions",), ("devices", 0), ("plan",), ("partitions", 1), ("measured",), ("exactness",)]
PLACES += [("measured", "ranks", 0), ("measured", "ranks", 0, "phases", "rowwise"), ("evaluations", 0), ("best",)]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)) or "report")
def test_an_unknown_or_missing_key_fails(place, tmp_path):
    check_report(report())
    for change in (lambda block: block.update(colour="blue"), lambda block: block.popitem()):
        changed = copy.deepcopy(report())
        block = changed
        for key in place:
            block = block[key]
        if place == ("plan",):
            block.pop("waves_per_round")  # optional: the last key left is a required one
        change(block)
        with pytest.raises(ValueError, match=r"does not fit strategy_report.schema.json"):
            write_report(changed, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share_of_edges_attended": 1.5}, r"report.share_of_edges_attended .*1.5 is greater than the maximum"),
        ({"partitions": [{**report()["partitions"][0], "mode": "tensor"}]}, r"report.partitions\[0\].mode .*'tensor'"),
    ],
)
def test_a_value_out_of_range_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        check_report(report(**changes))


def test_a_folder_without_a_report_is_told(tmp_path):
    with pytest.raises(ValueError, match="holds no strategy-report.json; give the folder of a run that has ended"):
        load_report(tmp_path)
    path = tmp_path / "strategy-report.json"
    for text, message in (
        ("{", "is not JSON"),
        ("[1]", "is no strategy report: it has no schema_version"),
        ('{"schema_version": 99}', "has schema_version 99, this gtx reads 3"),
        ('{"schema_version": 3}', "does not fit strategy_report.schema.json"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_report(tmp_path)


def printed(made, width=100):
    stream = io.StringIO()
    print_report(made, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_tables_hold_the_figures_and_fit_100_columns():
    text = printed(report())
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "digits_gt: GT on 2 rank(s), 100.0 s",
        "ZeRO 1, optimizer offload none, float32, collectives gloo",
        "torch 2.13.0",
        "1,797",
        "0.0625",
        "pipeline",
        "8,970",
        "2000.00 / 2900.00",  # rowwise of rank 0
        "2625.00 / 3525.00",  # its step
        "4.00 KiB",  # sent by rank 0 in a step
        "100 MiB",
        "slowest rank      0, busy 1.16x",
        "93.75 %",
        "exact: equal to one rank, sums reordered",
        "2.0000 at first, 0.5000 at last, 4 steps",
        "validation 0.7500 at step 2, test 0.6250 there",
    ):
        assert part in text, part
    assert "dgl" not in text  # not installed


def test_many_ranks_and_partitions_fit_as_well():
    one = records(world_size=1)
    many = [StepRecord.from_dict({**record.as_dict(), "rank": r}) for r in range(48) for record in one]
    base = report()
    made = report(
        run={**base["run"], "world_size": 48},
        devices=[{**base["devices"][0], "rank": r, "name": "a device with a long name " * 3} for r in range(48)],
        partitions=[{**base["partitions"][1], "ranks": list(range(48)), "layer_split": [1] * 48}] * 100,
        steps=many,
        evaluations=[],
        losses=[],
    )
    check_report(made)
    text = printed(made)
    assert max(map(len, text.splitlines())) <= 100
    assert "68 more in strategy-report.json" in text
    assert "on rank" in text


def test_what_was_tried_and_decided_is_shown(tmp_path):
    text = printed(load_report(make_run(tmp_path / "run")))
    assert max(map(len, text.splitlines())) <= 100
    flat = " ".join(text.replace("│", " ").split())
    for part in ("plans tried", "33.5 ms", "31.0 ms", "-7.5 %", "gain 0.0121 s a step (33.1%) over", "45.6 ms"):
        assert part in flat, part
    assert "9 windows; monitor and controller took 4.0% of the run" in flat
    assert "the last plan was +2.0 % off the fastest that ran" in flat
    assert "plans tried" not in printed(report()), "nothing was searched"
