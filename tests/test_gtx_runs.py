"""Several runs by one command: seeds one after the other in the same ranks, each equal to a run of its own.

Not here: a run itself and its launchers (`test_launch.py`), going on from a checkpoint (`test_gtx_resume.py`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import launch
from gtx.config import load_config, parse_config
from gtx.partition import load_or_partition
from gtx.processes import run_ranks
from gtx.report import load_report
from gtx.runs import MAX_SEEDS, parse_seeds, seed_config, summarise
from gtx.session import read_graph, silent
from gtx.train import train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "configs" / "digits_gt.yaml")
SETTINGS = [
    "engine.threads=1",
    "model.layers=2",
    "model.width=16",
    "monitor.progress=false",
    "train.steps=4",
    "train.eval_every=2",
]
PLAIN = [*SETTINGS, "engine.name=torch", "engine.zero_stage=0"]


def command(folder: Path, *more: str) -> list[str]:
    return ["train", CONFIG, *more, f"partition.cache={folder / 'cut'}"]


def losses(run_dir: Path) -> list[float]:
    return pd.read_csv(run_dir / "metrics.csv").loss.tolist()


def one_line(arguments: list[str]) -> str:
    """What is said of a command that the user can mend, run in a process of its own."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and line.startswith("gtx: ")
    return line


# Which seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0..4", (0, 1, 2, 3, 4)), ("0,3,7", (0, 3, 7)), (" 2..3, 9,3 ", (2, 3, 9)), ("5", (5,)), ("4..4", (4,))],
)
def test_seeds_are_named_by_ranges_and_lists(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,,2", "a", "-1", "1..", "..3", "1...3", "4..0", "1.5", "1e3", "0..1000", "0..999999999999999", "²"],
)
def test_what_names_no_seeds_is_one_line(text):
    with pytest.raises(ValueError, match="^--seeds ") as error:
        parse_seeds(text)
    assert "\n" not in str(error.value)
    assert len(parse_seeds(f"0..{MAX_SEEDS - 1}")) == MAX_SEEDS


def test_the_deviation_is_that_of_a_sample_and_a_missing_score_is_left_out():
    scores = [80.0, 83.0, 85.0, float("nan")]
    frame = pd.DataFrame({"model": "GT", "seed": [0, 1, 2, 3], "test_score": scores, "val_score": [1.0, 1.0, 1.0, 1.0]})
    entry = summarise(frame, "accuracy")["models"]["GT"]
    assert entry["num_seeds"] == 3 and entry["seeds"] == [0, 1, 2, 3]
    assert entry["test_score_mean"] == pytest.approx(statistics.mean(scores[:3]))
    assert entry["test_score_std"] == pytest.approx(statistics.stdev(scores[:3]))
    alone = summarise(frame[:1], "accuracy")["models"]["GT"]
    assert alone["test_score_std"] is None, "one run has no deviation"


# Running them ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of seeds 1 and 2 on two DeepSpeed ranks."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = command(folder, *SETTINGS, "--seeds", "1,2", "--run-dir", str(folder / "seeds"))
    error = run_ranks(
        [sys.executable, str(ROOT / "launch.py"), *arguments], 2, folder / "out", [*os.sched_getaffinity(0)]
    )
    assert error is None, error
    return folder


def test_a_seed_has_the_losses_of_a_run_of_its_own(ran: Path, tmp_path: Path) -> None:
    """Two DeepSpeed ranks that have run seed 1 before, against one plain process that runs seed 2 alone."""
    own = ["engine.name=torch", "engine.zero_stage=0", f"partition.cache={tmp_path / 'cut'}"]
    config = load_config(ran / "seeds" / "seed-2" / "config.yaml", own)  # is enough to repeat the run
    assert config.seed == 2 and config.partition.seed == 0
    train(config, tmp_path / "alone", silent, "test")
    np.testing.assert_allclose(losses(ran / "seeds" / "seed-2"), losses(tmp_path / "alone"), rtol=1e-5)
    assert losses(ran / "seeds" / "seed-1") != losses(ran / "seeds" / "seed-2")


def test_the_frame_and_the_summary_say_what_the_reports_say(ran: Path) -> None:
    frame = pd.read_csv(ran / "seeds" / "seeds.csv")
    assert frame.columns.tolist() == [
        "model",
        "seed",
        "best_step",
        "val_score",
        "test_score",
        "loss",
        "step_s",
        "seconds",
    ]
    reports = [load_report(ran / "seeds" / f"seed-{seed}") for seed in (1, 2)]
    assert frame.seed.tolist() == [1, 2] and frame.model.tolist() == ["GT", "GT"]
    assert frame.test_score.tolist() == pytest.approx([report["best"]["test_score"] for report in reports])
    assert frame.loss.tolist() == pytest.approx([report["losses"][-1] for report in reports])
    summary = json.loads((ran / "seeds" / "summary.json").read_text(encoding="utf-8"))
    entry = summary["models"]["GT"]
    assert entry["test_score_mean"] == pytest.approx(statistics.mean(frame.test_score))
    assert entry["test_score_std"] == pytest.approx(statistics.stdev(frame.test_score))
    out = (ran / "out" / "rank-0.out").read_text(encoding="utf-8")
    assert f"{entry['test_score_mean']:.2f} +- {entry['test_score_std']:.2f} over 2 seed(s)" in out
    assert not (ran / "out" / "rank-1.out").read_text(encoding="utf-8").count("seed")


def test_a_finished_seed_is_not_run_again(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On another number of ranks, with one seed more."""
    folder = ran / "seeds"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("seed-[12]/*") if path.is_file()}
    assert launch.main(command(ran, *SETTINGS, "--seeds", "1..3", "--run-dir", str(folder))) == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert pd.read_csv(folder / "seeds.csv").seed.tolist() == [1, 2, 3]
    assert "seed 1 (1 of 3) is done" in capsys.readouterr().out


def test_a_folder_with_the_runs_of_another_config_is_one_line_and_stays(ran: Path) -> None:
    before = (ran / "seeds" / "seed-1" / "strategy-report.json").read_bytes()
    arguments = command(ran, *SETTINGS, "model.width=24", "--seeds", "0..1", "--run-dir", str(ran / "seeds"))
    line = one_line(arguments)
    assert "seed-1 holds a run with model.width 16, the config says 24" in line and "--run-dir" in line
    assert (ran / "seeds" / "seed-1" / "strategy-report.json").read_bytes() == before
    assert not (ran / "seeds" / "seed-0").exists(), "nothing was trained before the line"


def test_seeds_and_resume_do_not_go_together(ran: Path) -> None:
    line = one_line(command(ran, *PLAIN, "--seeds", "1", "--resume", str(ran / "seeds" / "seed-1")))
    assert "--seeds and --resume do not go together" in line


def test_one_assignment_serves_all_seeds_whatever_their_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is cut once; each seed's split is its own."""
    base = parse_config({"data": {"name": "digits"}, "seed": 5})
    graphs = [read_graph(seed_config(base, seed)) for seed in (0, 1)]
    assert not np.array_equal(graphs[0].train_mask, graphs[1].train_mask)
    seed = seed_config(base, 1).partition.seed
    assert seed == 5
    first, _ = load_or_partition(graphs[0], "metis", 8, seed, tmp_path)

    def cut_again(*arguments: object) -> None:
        raise AssertionError("the graph is cut a second time")

    monkeypatch.setattr("gtx.partition._assign_metis", cut_again)
    second, reused = load_or_partition(graphs[1], "metis", 8, seed, tmp_path)
    assert not reused, "the graphs differ by their splits"
    np.testing.assert_array_equal(first.original_id, second.original_id)
    np.testing.assert_array_equal(second.graph.train_mask, graphs[1].train_mask[second.original_id])
