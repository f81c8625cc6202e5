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
from collections.abc import Sequence
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
