"""A run that was cut off goes on as if it had not been: on other ranks, under another plan, engine and ZeRO stage.

Runs are ended by SIGKILL at a random step. Not here: the file itself (`test_gtx_checkpoint.py`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from cases import awkward_graph, even_homes, partitioned, plan_of
from ranks import end_ranks
from ranks import run_ranks as on_ranks

from gtx.batches import BatchPlanner
from gtx.checkpoint import LATEST, Progress, read_checkpoint, write_checkpoint
from gtx.config import parse_config
from gtx.engine import make_engine
from gtx.models import GraphModel
from gtx.parallel.compiler import Compiler
from gtx.parallel.executor import Executor
from gtx.parallel.world import World, solo
from gtx.processes import run_ranks
from gtx.report import load_report
from monitor import PhaseTimer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent

# Engines --------------------------------------------------------------------------------------------------------------

CUT, STEPS = 3, 6
NO_PERSISTENCE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
PLAIN: dict[str, Any] = {"name": "torch"}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_stage": stage, **({"deepspeed": NO_PERSISTENCE} if stage == 3 else {}), **more}


@dataclass(frozen=True)
class Case:
    """Two engines' settings, before and after the cut, and what both have."""

    before: dict[str, Any]
    after: dict[str, Any]
    both: dict[str, Any] = field(default_factory=dict)
    model: str = "GT"


SGD = {"optimizer": "sgd", "momentum": 0.9}
CASES = {
    "plain, then ZeRO 3": Case(PLAIN, zero(3)),
    "ZeRO 3, then ZeRO 1": Case(zero(3), zero(1)),
    "ZeRO 1, then plain": Case(zero(1), PLAIN),
    "ZeRO 0, then ZeRO 2 offloaded": Case(zero(0), zero(2, offload_optimizer="cpu")),
    "ZeRO 2 offloaded, then ZeRO 0": Case(zero(2, offload_optimizer="cpu"), zero(0)),
    "GPS, ZeRO 2, then ZeRO 3": Case(zero(2), zero(3), model="GPS"),
    "SGD, ZeRO 0, then plain": Case(zero(0), PLAIN, SGD),
    "SGD, plain, then ZeRO 2": Case(PLAIN, zero(2), SGD),
}
BF16 = {f"bf16, ZeRO {stage}": Case(zero(stage), zero(stage), {"precision": "bf16"}) for stage in (0, 1, 2, 3)}


def losses_of(world: World, case: Case, legs: list[tuple[dict[str, Any], int]], path: Path) -> list[float]:
    """The losses of the legs, each an engine's settings and the step it ends before, with a checkpoint in between."""
    graph = partitioned(awkward_graph())
    losses, state = [], None
    for settings, end in legs:
        config = parse_config(
            {
                "model": {"name": case.model, "width": 6, "heads": 3, "layers": 2, "dropout": 0.3},
                "sampling": {"fanout": 4},
                "batch": {"kind": "cluster", "parts": 2, "micro_batches": 3},
                "engine": {"lr": 1e-2, "lr_schedule": "cosine", "warmup_steps": 2, **case.both, **settings},
            }
        )
        torch.manual_seed(len(losses))
        model = GraphModel(config.model, graph.graph.num_features, graph.graph.num_classes)
        engine = make_engine(model, config.engine, world, STEPS, lambda line: None, state)
        executor = Executor(engine, graph, world, PhaseTimer(), seed=0, num_heads=3, backend="torch")
        batches = BatchPlanner(graph, config.batch, config.sampling, 2, 0)
        for step in range(len(losses), end):
            plan = plan_of(("graph", "model", "data")[step % 3], graph, world.size, 2)
            compiled = Compiler(graph, plan, world, 2 + 1, even_homes(graph, world.size)).compile(batches.step(step))
            losses.append(executor.train_step(compiled, plan, step, fixed=False).loss)
        found = engine.state()
        if world.rank == 0:
            write_checkpoint(path, Progress(end, world.size, config.as_dict(), {}, ""), found)
        world.barrier()
        state = read_checkpoint(path)[1]
        world.barrier()
        assert state.optimizer_steps == end
    return losses


def all_losses(world: World, folder: str) -> dict[str, list[float]]:
    path = Path(folder) / LATEST
    found = {}
    for name, case in {**CASES, **BF16}.items():
        try:
            found[name] = losses_of(world, case, [(case.before, CUT), (case.after, STEPS)], path)
            if name in BF16:
                found[f"{name} uncut"] = losses_of(world, case, [(case.before, STEPS)], path)
        except Exception as error:
            raise RuntimeError(f"in the case {name}") from error
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[float]]]:
    """The losses of every case on two ranks; the same on both."""
    end_ranks()
    first, second = on_ranks(all_losses, 2, str(tmp_path_factory.mktemp("resumed")), hang_s=500, timeout_s=550)
    assert first == second
    yield first
    end_ranks()


@pytest.mark.parametrize("name", CASES)
def test_an_engine_goes_on_where_another_left(name: str, resumed: dict[str, list[float]], tmp_path: Path) -> None:
    """Two ranks, cut in the middle, give the losses of plain torch on one rank, uncut."""
    uncut = losses_of(solo(), CASES[name], [(PLAIN, STEPS)], tmp_path / LATEST)
    assert resumed[name] == pytest.approx(uncut, rel=2e-5)
    assert len(set(uncut)) == STEPS


@pytest.mark.parametrize("name", BF16)
def test_bf16_goes_on_from_its_full_precision(name: str, resumed: dict[str, list[float]]) -> None:
    """Had weights been kept as bf16 rounds them, or moments been lost, losses would part at once."""
    assert resumed[name] == pytest.approx(resumed[f"{name} uncut"], rel=1e-6)


def test_a_checkpoint_of_other_layers_names_the_parameter(tmp_path: Path) -> None:
    losses_of(solo(), Case(PLAIN, PLAIN), [(PLAIN, 1)], tmp_path / LATEST)
    state = read_checkpoint(tmp_path / LATEST)[1]
    config = parse_config({"model": {"name": "GT", "width": 6, "heads": 3, "layers": 3}})
    graph = partitioned(awkward_graph()).graph
    model = GraphModel(config.model, graph.num_features, graph.num_classes)
    with pytest.raises(ValueError, match=r"--resume: the parameter layers\.2\.\S+ is not there in the checkpoint and"):
        make_engine(model, parse_config({}, ["engine.name=torch"]).engine, solo(), 1, lambda line: None, state)


# Runs -----------------------------------------------------------------------------------------------------------------

SETTINGS = [
    "engine.name=torch",
    "engine.zero_stage=0",
    "engine.threads=1",
    "engine.precision=float64",
    "model.layers=2",
    "model.width=32",
    "monitor.progress=false",
    "train.steps=14",
    "train.eval_every=5",
    "batch.kind=neighbor",
    "batch.seeds=64",
    "batch.micro_batches=2",
]


def command(folder: Path, *more: str) -> list[str]:
    start = [sys.executable, str(ROOT / "launch.py"), "train", str(ROOT / "configs/digits_gt.yaml"), *SETTINGS]
    return [*start, f"partition.cache={folder / 'cut'}", *more]


def finished(folder: Path, name: str, ranks: int, *more: str) -> None:
    error = run_ranks(command(folder, *more), ranks, folder / name, sorted(os.sched_getaffinity(0)))
    assert error is None, error


def metrics(run_dir: Path) -> pd.DataFrame:
    return pd.read_csv(run_dir / "metrics.csv")


def killed(folder: Path, run_dir: Path, steps: int) -> None:
    """Start a run on one rank and SIGKILL it once it has recorded as many steps."""
    path = run_dir / "metrics.csv"
    arguments = command(folder, "train.checkpoint_every=1", "plan.mode=graph", "--run-dir", str(run_dir))
    with open(folder / "killed.out", "wb") as out:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text(encoding="utf-8").count("\n") > steps):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "killed.out").read_text()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (run_dir / "strategy-report.json").exists()


def predictions(folder: Path, run_dir: Path, ranks: int) -> pd.DataFrame:
    arguments = [sys.executable, str(ROOT / "launch.py"), "predict", str(run_dir)]
    error = run_ranks(arguments, ranks, folder / f"predicts on {ranks}", None)
    assert error is None, error
    return pd.read_parquet(run_dir / "predictions.parquet")


def test_a_killed_run_goes_on_with_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    """One rank is killed, two go on in another mode, and one again from their checkpoint, into a folder of its own."""
    finished(tmp_path, "uncut", 1, "--run-dir", str(tmp_path / "whole"))
    whole = metrics(tmp_path / "whole")
    run_dir = tmp_path / "run"
    recorded = random.randrange(2, 9)
    killed(tmp_path, run_dir, recorded)
    at = read_checkpoint(run_dir / "checkpoints" / LATEST)[0].step
    assert recorded - 1 <= at < 14  # a step's checkpoint comes after its record
    finished(tmp_path, "on two", 2, "plan.mode=pipeline", "--resume", str(run_dir))
    resumed = metrics(run_dir)
    assert resumed.step.tolist() == list(range(14))
    assert resumed.loss.tolist() == pytest.approx(whole.loss.tolist(), rel=1e-9)
    assert resumed.val_score.dropna().tolist() == whole.val_score.dropna().tolist()
    report = load_report(run_dir)
    assert report["run"]["resumed"] == {"step": at, "world_size": 1}
    assert report["losses"] == pytest.approx(whole.loss.tolist(), rel=1e-9)
    assert report["best"] == load_report(tmp_path / "whole")["best"]
    assert report["scheduler"]["plans"][0]["from_step"] == at
    best = read_checkpoint(run_dir / "checkpoints" / "best.safetensors")[0]
    assert best.step == report["best"]["step"] + 1

    again = tmp_path / "again"
    more = ["train.steps=16", "--resume", str(run_dir), "--run-dir", str(again)]
    finished(tmp_path, "on one", 1, *more)
    assert len(load_report(again)["losses"]) == 16 and metrics(again).step.tolist() == [14, 15]

    predicted = predictions(tmp_path, run_dir, 2)
    assert predicted.id.tolist() == list(range(len(predicted)))
    test = predicted[predicted.split == "test"]
    assert (test.label == test.predicted).mean() * 100 == pytest.approx(report["best"]["test_score"])
    probabilities = predicted.filter(like="probability_")
    assert probabilities.shape[1] == 10 and probabilities.sum(axis=1).tolist() == pytest.approx([1.0] * len(predicted))
    assert predicted.embedding.map(len).unique().tolist() == [32]

    error = run_ranks(command(tmp_path, "--resume", str(run_dir)), 2, tmp_path / "nothing left", None)
    assert error is not None and "nothing is left, raise train.steps or train.epochs" in error


def test_training_ends_when_patience_does_on_every_rank(tmp_path: Path) -> None:
    """A learning rate too small to change a prediction: the first evaluation stays the best, three more end it."""
    more = ["engine.lr=1e-12", "train.eval_every=2", "train.patience=3", "--run-dir", str(tmp_path / "run")]
    finished(tmp_path, "patient", 2, *more)
    report = load_report(tmp_path / "run")
    assert len(report["losses"]) == 8 and report["best"]["step"] == 1
    told = (tmp_path / "patient" / "rank-0.out").read_text(encoding="utf-8")
    assert "stopped at step 7: no better validation score than " in told
    (classes,) = (e["per_class"] for e in report["evaluations"] if "per_class" in e)
    right = sum(entry["nodes"] * entry["recall"] for entry in classes) / sum(entry["nodes"] for entry in classes)
    assert len(classes) == 10 and right == pytest.approx(report["best"]["test_score"])
