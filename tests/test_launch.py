"""The command line as a user runs it: in processes of its own, under python, deepspeed and torchrun.

Each start costs seconds, so that every run here serves several questions. Not here: what a config may say
(`test_gtx_config.py`).
"""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

import launch
from gtx.report import check_report
from scheduler.plan import from_json

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
STEPS = 3
LIMIT_S = 150.0  # for one command on a busy machine
CONFIG = "configs/digits_gt.yaml"
PLAIN = ("engine.name=torch", "engine.zero_stage=0")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str
    seconds: float


def command(*arguments: str | Path, cwd: Path = ROOT) -> Ended:
    """Run a command as from a shell with the environment activated, without input, and wait for it."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    start = time.monotonic()
    ended = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - start)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launched(launcher: str, script: str | Path = "launch.py") -> list[str | Path]:
    """The start of a command line; two ranks but for python, and a port that nobody uses."""
    port = free_port()
    return {
        "python": [sys.executable, script],
        "deepspeed": [BIN / "deepspeed", "--num_gpus", "2", "--master_port", port, script],
        "torchrun": [BIN / "torchrun", "--nproc_per_node", "2", "--master_port", port, script],
    }[launcher]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this file's runs and partitions are."""
    return tmp_path_factory.mktemp("launch")


def settings(folder: Path) -> list[str]:
    return [f"train.steps={STEPS}", f"partition.cache={folder / 'partitions'}", "engine.threads=1"]


def train(folder: Path, launcher: str, run_dir: str, *overrides: str, script: str | Path = "launch.py") -> Ended:
    more = [*settings(folder), *overrides, "--run-dir", folder / run_dir]
    return command(*launched(launcher, script), "train", CONFIG, *more)


def written(folder: Path, name: str, text: str, **values: object) -> Path:
    """A script that stands in for `launch.py`."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text).format(root=str(ROOT), **values), encoding="utf-8")
    return path


def losses(run_dir: Path) -> np.ndarray:
    with open(run_dir / "metrics.csv", encoding="utf-8", newline="") as file:
        return np.array([float(row["loss"]) for row in csv.DictReader(file)])


@pytest.fixture(scope="module")
def plain(folder: Path) -> Ended:
    """The plain run: one process, plain torch."""
    ended = train(folder, "python", "plain", *PLAIN)
    assert ended.status == 0, ended.err
    return ended


# A run and what it leaves ---------------------------------------------------------------------------------------------


def test_a_run_leaves_its_folder(plain: Ended, folder: Path) -> None:
    run_dir = folder / "plain"
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {"config.yaml", "env.json", "plan-0.json", "records.jsonl", "metrics.csv", "strategy-report.json"}
    config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    assert config["train"]["steps"] == STEPS and config["model"]["name"] == "GT"  # resolved, with the overrides
    env = json.loads((run_dir / "env.json").read_text(encoding="utf-8"))
    assert env["python"] and env["torch"]
    plan = from_json((run_dir / "plan-0.json").read_text(encoding="utf-8"))
    assert (plan.world_size, plan.num_partitions) == (1, config["partition"]["parts"])
    assert f"run folder: {run_dir}" in plain.out


def test_the_report_follows_its_schema_and_names_the_plan(plain: Ended, folder: Path) -> None:
    report = json.loads((folder / "plain" / "strategy-report.json").read_text(encoding="utf-8"))
    check_report(report)
    plan = from_json((folder / "plain" / "plan-0.json").read_text(encoding="utf-8"))
    assert report["plan"]["fingerprint"] == plan.fingerprint
    assert report["run"]["world_size"] == 1


def test_phases_of_every_record_sum_to_its_wall_time(plain: Ended, folder: Path) -> None:
    lines = (folder / "plain" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(STEPS))
    for record in records:
        assert sum(record["phases"].values()) == pytest.approx(record["wall_s"], abs=1e-6)
        assert record["rows_computed"] > 0 and record["edges_computed"] > 0


def test_a_report_prints_as_tables(plain: Ended, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["report", str(folder / "plain")]) == 0
    out = capsys.readouterr().out
    assert "rowwise" in out and "fingerprint" in out


# The same losses under every launcher and mode ------------------------------------------------------------------------

EVERY_MODE = """
    import os, sys

    sys.path.insert(0, {root!r})
    import launch
    import gtx.train
    from gtx.engine import import_deepspeed
    from gtx.parallel.world import solo

    # What takes long, once for all modes: imports that would else come later, in every fork.
    import_deepspeed(solo())
    import sklearn.datasets, sklearn.metrics, sklearn.neighbors, torch._inductor.compile_fx

    if __name__ == "__main__":
        for mode, port in {ports!r}.items():
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                os.environ["MASTER_PORT"] = port
                status = launch.main([*sys.argv[1:], "plan.mode=" + mode, "--run-dir", {runs!r} + "/" + mode])
                sys.stdout.flush()
                os._exit(status)
            if os.waitpid(child, 0)[1]:
                sys.exit("mode " + mode + " failed")
"""


def assert_losses_of_the_plain_run(folder: Path, mode: str) -> None:
    np.testing.assert_allclose(losses(folder / mode), losses(folder / "plain"), rtol=1e-5, err_msg=mode)
    report = json.loads((folder / mode / "strategy-report.json").read_text(encoding="utf-8"))
    check_report(report)
    assert report["run"]["world_size"] == 2
    if mode != "mixed":
        assert {partition["mode"] for partition in report["partitions"]} == {mode}


def test_the_command_of_the_readme_gives_the_losses_of_the_plain_run(plain: Ended, folder: Path) -> None:
    """`deepspeed --num_gpus 2 launch.py train configs/digits_gt.yaml plan.mode=model`"""
    ended = train(folder, "deepspeed", "model", "plan.mode=model")
    assert ended.status == 0, ended.out + ended.err
    assert_losses_of_the_plain_run(folder, "model")


def test_deepspeed_gives_the_losses_of_the_plain_run_in_every_mode(plain: Ended, folder: Path) -> None:
    """Like the command above for the other modes, each in a fork of two ranks that have imported everything."""
    modes = ("graph", "pipeline", "data", "mixed")
    ports = {mode: free_port() for mode in modes}
    script = written(folder, "every_mode", EVERY_MODE, ports=ports, runs=str(folder))
    ended = command(*launched("deepspeed", script), "train", CONFIG, *settings(folder))
    assert ended.status == 0, ended.out + ended.err
    for mode in modes:
        assert_losses_of_the_plain_run(folder, mode)


def test_a_written_plan_runs_under_torchrun(plain: Ended, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --out` writes the mix of modes; the run that is given the file runs it, with the plain run's losses."""
    file = folder / "mixed.json"
    wanted = ["plan.mode=mixed", "plan.checkpointing=layer", "--world-size", "2", "--out", str(file)]
    assert launch.main(["plan", str(ROOT / CONFIG), *settings(folder), *wanted]) == 0
    plan = from_json(file.read_text(encoding="utf-8"))
    assert {place.mode for place in plan.partitions} == {"graph", "model", "pipeline", "data"}
    assert plan.fingerprint in capsys.readouterr().out
    ended = train(folder, "torchrun", "from-file", f"plan.file={file}", *PLAIN)
    assert ended.status == 0, ended.out + ended.err
    np.testing.assert_allclose(losses(folder / "from-file"), losses(folder / "plain"), rtol=1e-5)
    assert (folder / "from-file" / "plan-0.json").read_text(encoding="utf-8") == file.read_text(encoding="utf-8")


def test_a_measured_machine_is_planned_for_and_played(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`calibrate` under torchrun writes what `plan --topology` and `simulate` read."""
    machine = folder / "machine.json"
    ended = command(*launched("torchrun"), "calibrate", CONFIG, *settings(folder), "--out", machine)
    assert ended.status == 0 and "2 rank(s) measured" in ended.out, ended.out + ended.err
    asked = [str(ROOT / CONFIG), *settings(folder), "--topology", str(machine)]
    assert launch.main(["plan", *asked, "plan.mode=auto", "engine.zero_stage=auto"]) == 0
    out = capsys.readouterr().out
    assert "plans priced; ZeRO stage " in out and out.count("│") > 50
    for word in ("graph", "model", "pipeline", "data", "chosen"):
        assert word in out, word
    played = folder / "played.json"
    event = ["--event", "20:rank 1:3", "--steps", "120", "--out", str(played)]
    assert launch.main(["simulate", *asked, "plan.mode=adaptive", "--devices", "4", *event]) == 0
    runs = {run["name"]: run for run in json.loads(played.read_text(encoding="utf-8"))}
    assert set(runs) >= {"graph", "adaptive"}
    assert runs["adaptive"]["total_s"] <= runs["graph"]["total_s"] * 1.001


def test_partition_shows_every_part(plain: Ended, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["partition", str(ROOT / CONFIG), *settings(folder)]) == 0
    out = capsys.readouterr().out
    assert "reused" in out  # what the plain run has cut
    first_words = [line.strip(" │|").split(" ")[0] for line in out.splitlines() if line.startswith(("│", "|"))]
    assert first_words == [str(part) for part in range(16)]


# When something is wrong ----------------------------------------------------------------------------------------------


def test_a_missing_package_is_one_line(folder: Path) -> None:
    text = """
    import sys
    sys.path.insert(0, {root!r})
    sys.modules["deepspeed"] = None
    import launch
    sys.exit(launch.main(sys.argv[1:]))
    """
    script = written(folder, "without", text.replace("{root!r}", "'{root}'"))
    ended = train(folder, "python", "without", script=script)
    assert ended.status == 2
    assert ended.err.splitlines()[-1].startswith("gtx: the package deepspeed is not installed; run make setup")
    assert "Traceback" not in ended.err


def test_without_a_compiler_attention_is_slower_and_one_line_says_so(
    plain: Ended, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("GTX_CACHE", str(tmp_path))
    ended = train(folder, "torchrun", "no-compiler", *PLAIN)
    assert ended.status == 0, ended.err
    said = [line for line in (ended.out + ended.err).splitlines() if "no-such-compiler" in line]
    assert said == [
        "note: there is no C++ compiler 'no-such-compiler'; install g++ or set CXX; attention runs by torch operators, "
        "several times slower"
    ]
    np.testing.assert_allclose(losses(folder / "no-compiler"), losses(folder / "plain"), rtol=1e-5)


def assert_one_line(ended: Ended, *parts: str) -> None:
    """Status 2 and one line for the user."""
    assert ended.status == 2, ended.err
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("gtx: ")
    for part in parts:
        assert part in lines[0]


def test_a_wrong_config_is_one_line_before_anything_starts(folder: Path) -> None:
    run_dir = folder / "wrong"
    for arguments, part in (
        (("configs/no_such_file.yaml",), "cannot read the config configs/no_such_file.yaml: No such file"),
        ((CONFIG, "model.widht=64"), "unknown key 'model.widht'; known here: "),
        ((CONFIG, "plan.mode=tensor"), "plan.mode is 'tensor'"),
    ):
        ended = command(*launched("python"), "train", *arguments, "--run-dir", run_dir)
        assert_one_line(ended, part)
        assert ended.out == ""
    assert not run_dir.exists()


def test_a_wrong_plan_file_is_one_line_on_every_rank(folder: Path) -> None:
    file = folder / "broken.json"
    file.write_text('{"format": "gtx-plan/1", "world_size": 2', encoding="utf-8")
    ended = train(folder, "torchrun", "broken", f"plan.file={file}", *PLAIN)
    assert ended.status != 0
    lines = [line for line in ended.err.splitlines() if "gtx: " in line]
    assert 1 <= len(lines) <= 2  # the launcher may end the other rank before it has spoken
    assert all(f"plan.file {file}: the plan is not JSON" in line for line in lines)
    assert not (folder / "broken").exists()


def test_a_missing_run_folder_is_one_line(folder: Path) -> None:
    ended = command(*launched("python"), "report", folder / "nowhere")
    assert_one_line(ended, str(folder / "nowhere"))
    assert not (folder / "nowhere").exists()


# Something befalls rank 1 at step 2.
DRIVER = """
    import sys, time

    sys.path.insert(0, {root!r})
    import launch
    from gtx.parallel.executor import Executor

    healthy = Executor.train_step

    def train_step(self, batch, plan, step, *, fixed):
        if self.world.rank == 1 and step == 2:
            {mishap}
        return healthy(self, batch, plan, step, fixed=fixed)

    Executor.train_step = train_step
    if __name__ == "__main__":
        sys.exit(launch.main(sys.argv[1:]))
"""


def test_an_exception_on_one_rank_ends_the_run_with_its_traceback(folder: Path) -> None:
    script = written(folder, "raises", DRIVER, mishap="raise KeyError('a mishap on rank 1')")
    ended = train(folder, "deepspeed", "raises", "train.steps=1000", *PLAIN, script=script)
    assert ended.status != 0
    assert ended.seconds < 60
    text = ended.out + ended.err
    assert "gtx: rank 1 failed" in text
    assert "Traceback (most recent call last)" in text
    assert "KeyError: 'a mishap on rank 1'" in text


def test_a_hang_ends_with_the_place_and_the_rank_that_did_not_arrive(folder: Path) -> None:
    script = written(folder, "hangs", DRIVER, mishap="time.sleep(1000)")
    ended = train(
        folder, "torchrun", "hangs", "train.steps=1000", "engine.timeout_s=4", "plan.mode=model", *PLAIN, script=script
    )
    assert ended.status != 0
    assert ended.seconds < 60
    line = next(line for line in ended.err.splitlines() if "gtx: rank 0: " in line)
    assert "exchange fetch of wave 0" in line
    assert "rank(s) that did not arrive: 1" in line
