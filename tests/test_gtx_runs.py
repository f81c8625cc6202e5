"""Several runs by one command: seeds one after the other in the same ranks, each equal to a run of its own, and
other models in its place.

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
from gtx.beside import beside_config, parse_beside
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


def launched(folder: Path, ranks: int, *arguments: str) -> str:
    """What rank 0 said, of ranks in processes of their own: DeepSpeed keeps its world as long as a process lives."""
    error = run_ranks([sys.executable, str(ROOT / "launch.py"), *arguments], ranks, folder, [*os.sched_getaffinity(0)])
    assert error is None, error
    return (folder / "rank-0.out").read_text(encoding="utf-8")


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
    launched(folder / "out", 2, *command(folder, *SETTINGS, "--seeds", "1,2", "--run-dir", str(folder / "seeds")))
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


def test_a_finished_seed_is_not_run_again(ran: Path) -> None:
    """On another number of ranks, with one seed more."""
    folder = ran / "seeds"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("seed-[12]/*") if path.is_file()}
    out = launched(ran / "again", 1, *command(ran, *SETTINGS, "--seeds", "1..3", "--run-dir", str(folder)))
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert pd.read_csv(folder / "seeds.csv").seed.tolist() == [1, 2, 3]
    assert "seed 1 (1 of 3) is done" in out


def test_a_folder_with_the_runs_of_another_config_is_one_line_and_stays(ran: Path) -> None:
    before = (ran / "seeds" / "seed-1" / "strategy-report.json").read_bytes()
    arguments = command(ran, *SETTINGS, "model.width=24", "--seeds", "0..1", "--run-dir", str(ran / "seeds"))
    line = one_line(arguments)
    assert "seed-1 holds a run with model.width 16, the config says 24" in line and "--run-dir" in line
    assert (ran / "seeds" / "seed-1" / "strategy-report.json").read_bytes() == before
    assert not (ran / "seeds" / "seed-0").exists(), "nothing was trained before the line"


def test_a_seed_with_models_beside_it_gives_a_row_of_each(ran: Path) -> None:
    """The seed is done: only the models beside it are trained."""
    folder = ran / "seeds"
    before = (folder / "seed-1" / "metrics.csv").stat().st_mtime_ns
    more = ["--seeds", "1", "--beside", "mlp", "--run-dir", str(folder)]
    out = launched(ran / "beside", 2, *command(ran, *SETTINGS, *more))
    assert (folder / "seed-1" / "metrics.csv").stat().st_mtime_ns == before
    assert pd.read_csv(folder / "seeds.csv").model.tolist() == ["GT", "MLP"]
    assert set(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["models"]) == {"GT", "MLP"}
    assert load_report(folder / "seed-1")["evaluation"]["beside"][0]["model"] == "MLP"
    assert "MLP: test accuracy" in out


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


# Beside a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "mlp,", "transformer", "mlp gcn", "gt", "GT,mlp", "own.py"])
def test_what_names_no_models_is_one_line(text):
    with pytest.raises(ValueError, match="^--beside ") as error:
        parse_beside(text, parse_config({}))
    assert "\n" not in str(error.value)


def test_models_are_named_once_in_any_case():
    assert parse_beside("mlp, GCN,MLP", parse_config({})) == ("MLP", "GCN")


def test_another_model_keeps_all_but_what_it_cannot_have():
    config = parse_config(
        {
            "seed": 3,
            "model": {"name": "GCN", "width": 14, "heads": 4, "layers": 2, "encodings": {"degree": True}},
            "train": {"steps": 7},
            "plan": {"mode": "auto", "checkpointing": "layer"},
            "engine": {"zero_stage": "auto", "lr": 0.5},
        }
    )
    gat, told = beside_config(config, "GAT")
    assert (gat.model.name, gat.model.width, gat.model.heads, gat.model.layers) == ("GAT", 14, 2, 2)
    assert not gat.model.encodings.kinds and "without encodings (degree)" in told and "heads 2, not 4" in told
    gt, told = beside_config(config, "GT")
    assert gt.model.encodings == config.model.encodings and "without" not in told
    assert (gt.plan.mode, gt.plan.checkpointing, gt.engine.zero_stage, gt.engine.lr) == ("graph", "layer", 0, 0.5)
    same = ("seed", "data", "partition", "batch", "sampling", "train")
    assert all(getattr(gat, section) == getattr(config, section) for section in same)
    assert gt.without_effect() == [], "nothing is told that the user did not ask for"


def test_models_beside_a_run_are_runs_of_that_model_and_stand_in_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    more = ["model.encodings.degree=true", "--beside", "mlp,gcn", "--run-dir", str(run_dir)]
    assert launch.main(command(tmp_path, *PLAIN, *more)) == 0
    assert launch.main(["report", str(run_dir)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    rows = load_report(run_dir)["evaluation"]["beside"]
    assert [row["model"] for row in rows] == ["MLP", "GCN"]
    for row in rows:
        own = load_report(run_dir / row["folder"])
        assert row["test_score"] == own["best"]["test_score"] and row["parameters"] == own["model"]["parameters"]
        assert own["run"]["seed"] == 0 and len(own["losses"]) == 4 and "without encodings (degree)" in row["told"]
        assert f"{float(row['test_score']):.4f}" in out
    alone = tmp_path / "alone"
    more = ["model.name=MLP", "--run-dir", str(alone)]
    assert launch.main(command(tmp_path, *PLAIN, *more)) == 0
    assert losses(run_dir / "beside-mlp") == losses(alone), "the same data, split, seed, steps and optimizer"
    assert launch.main(["report", str(run_dir), "--html"]) == 0
    page = (run_dir / "strategy-report.html").read_text(encoding="utf-8")
    assert "Beside other models" in page and "transductive" in page


def test_a_wrong_model_beside_is_one_line_before_anything_is_trained(tmp_path: Path) -> None:
    line = one_line(command(tmp_path, *PLAIN, "--beside", "mlp,resnet", "--run-dir", str(tmp_path / "run")))
    assert "--beside has 'resnet'" in line and "mlp" in line
    assert not (tmp_path / "run").exists()
