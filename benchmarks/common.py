"""Runs the real command line for a benchmark: every rank pinned to a core, step records read back as a frame.

Not here: what is compared; each script beside this one makes one claim.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run(config: str, overrides: Sequence[str], world_size: int, cores: Sequence[int]) -> pd.DataFrame:
    """Train once with rank r pinned to `cores[r]`; one row per rank and step, phases and exchanges as columns."""
    folder = Path(tempfile.mkdtemp(prefix="gtx-benchmark-"))
    env = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "launch.py", "train", config, *overrides, "monitor.progress=false"]
    command += ["engine.threads=1", f"--run-dir={folder}"]
    processes = []
    for rank in range(world_size):
        pinned = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
        local = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
        if world_size == 1:
            local = dict(os.environ)
        processes.append(
            subprocess.Popen(pinned, cwd=ROOT, env=local, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
    errors = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank failed:\n" + "\n".join(errors))
    rows = []
    for line in (folder / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        row = {key: record[key] for key in ("step", "rank", "wall_s", "peak_memory_bytes", "loss")}
        row |= {"rows": record["rows_computed"], "edges": record["edges_computed"]}
        row |= {f"phase.{name}": seconds for name, seconds in record["phases"].items()}
        for exchange in record["exchanges"]:
            row[f"sent.{exchange['kind']}"] = exchange["sent_bytes"]
            row[f"wait.{exchange['kind']}"] = exchange["wait_s"]
        rows.append(row)
    shutil.rmtree(folder)
    return pd.DataFrame(rows)


def step_seconds(frame: pd.DataFrame, skip: int = 1) -> float:
    """The median over steps (after the first `skip`) of the slowest rank's wall time, without evaluation."""
    busy = frame.assign(step_s=frame.wall_s - frame.get("phase.evaluate", 0.0).fillna(0.0))
    return float(busy[busy.step >= skip].groupby("step").step_s.max().median())


def write(name: str, title: str, body: str) -> None:
    """Write `docs/benchmarks/<name>.md` with the command and date."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    command = f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip()
    text = f"# {title}\n\nMade on {stamp} by `{command}`, on {os.cpu_count()} CPU cores.\n\n{body.rstrip()}\n"
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


# Two ranks while something happens ------------------------------------------------------------------------------------

PLAIN = ["engine.name=torch", "engine.zero_stage=0", "engine.threads=1", "train.eval_every=0", "monitor.progress=false"]
SPACES = ("gtx-a", "gtx-b")


def train(
    overrides: Sequence[str], folder: Path, happen: Callable[[], None], event: int = 0, *, spaces: bool = False
) -> Path:
    """Train `configs/digits_gt.yaml`, changed, on two ranks with a core each; the run folder.

    happen: called once `event` steps are done, at the start if 0. spaces: run in the namespaces of `throttled_link`.
    """
    run_dir = folder / "run"
    folder.mkdir(parents=True)
    command = [sys.executable, str(ROOT / "launch.py"), "train", str(ROOT / "configs/digits_gt.yaml"), *PLAIN]
    command += [*overrides, "--run-dir", str(run_dir)]
    port = free_port()
    happened = event == 0
    if happened:
        happen()
    ranks = [_start(command, rank, port, spaces, folder) for rank in (0, 1)]
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
        if not happened and steps_done(run_dir / "metrics.csv") >= event:
            happen()
            happened = True
        if any(rank.poll() for rank in ranks):
            time.sleep(5)
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join((folder / f"rank-{rank}.log").read_text()[-2000:] for rank in (0, 1)))
    return run_dir


def _start(command: Sequence[str], rank: int, port: int, spaces: bool, folder: Path) -> subprocess.Popen[bytes]:
    """One rank, pinned to its core, in its namespace if there are any."""
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    env |= {"MASTER_ADDR": "10.77.0.1" if spaces else "127.0.0.1", "MASTER_PORT": str(port)}
    prefix = ["taskset", "-c", str(rank)]
    if spaces:
        env["GLOO_SOCKET_IFNAME"] = f"veth{rank}"
        prefix = ["ip", "netns", "exec", SPACES[rank], *prefix]
    with (folder / f"rank-{rank}.log").open("wb") as out:
        return subprocess.Popen([*prefix, *command], env=os.environ | env, stdout=out, stderr=subprocess.STDOUT)


def steps_done(metrics: Path) -> int:
    """Steps that a `metrics.csv` has a line of."""
    return max(metrics.read_text().count("\n") - 1, 0) if metrics.exists() else 0


def steps_of(run_dir: Path) -> pd.Series[float]:
    """Seconds of each step, of its slowest rank, without evaluation."""
    rows = [json.loads(line) for line in (run_dir / "records.jsonl").read_text().splitlines()]
    frame = pd.DataFrame({"step": r["step"], "s": r["wall_s"] - r["phases"].get("evaluate", 0.0)} for r in rows)
    return frame.groupby("step").s.max()


@contextmanager
def nothing() -> Iterator[Callable[[], None]]:
    yield lambda: None


@contextmanager
def busy_core() -> Iterator[Callable[[], None]]:
    """A process that never rests, on rank 1's core."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield lambda: started.append(subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", "while True: pass"]))
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def throttled_link(rate: str = "100mbit") -> Iterator[Callable[[], None]]:
    """Two namespaces joined by veth; the event puts a token-bucket filter on both ends. Needs root and iproute2."""

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=not check)

    for space in SPACES:
        ip("netns", "del", space, check=False)
        ip("netns", "add", space)
        ip("-n", space, "link", "set", "lo", "up")
    ip("link", "add", "veth0", "netns", SPACES[0], "type", "veth", "peer", "name", "veth1", "netns", SPACES[1])
    for i, space in enumerate(SPACES):
        ip("-n", space, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"veth{i}")
        ip("-n", space, "link", "set", f"veth{i}", "up")

    def happen() -> None:
        for i, space in enumerate(SPACES):
            bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
            tc = ["tc", "qdisc", "add", "dev", f"veth{i}", "root", *bucket]
            subprocess.run(["ip", "netns", "exec", space, *tc], check=True)

    try:
        yield happen
    finally:
        for space in SPACES:
            ip("netns", "del", space, check=False)
