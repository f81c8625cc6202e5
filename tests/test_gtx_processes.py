"""Ranks that gtx starts itself: what they see, who speaks when one fails, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from gtx.processes import run_ranks


def run_code(code: str, folder: Path, *, world_size: int = 2, cores: list[int] | None = None) -> str | None:
    return run_ranks([sys.executable, "-c", code], world_size, folder, cores)


def test_ranks_see_what_a_launcher_sets_and_are_pinned_in_turn(tmp_path: Path) -> None:
    code = "import json, os; print(json.dumps([dict(os.environ), sorted(os.sched_getaffinity(0))]))"
    cores = sorted(os.sched_getaffinity(0))
    assert run_code(code, tmp_path / "run", world_size=3, cores=cores) is None
    told = [json.loads((tmp_path / "run" / f"rank-{rank}.out").read_text(encoding="utf-8")) for rank in range(3)]
    for rank, (env, own) in enumerate(told):
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (
            *[str(rank)] * 2,
            "3",
            "3",
        )
        assert env["MASTER_ADDR"] == "127.0.0.1" and env["MASTER_PORT"] == told[0][0]["MASTER_PORT"]
        assert own == [cores[rank % len(cores)]]
    assert sorted(os.sched_getaffinity(0)) == cores


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_first_rank_that_fails_speaks_and_takes_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gtx.processes._GRACE_S", 0.2)
    begin = "import os, sys, time; print(os.getpid(), flush=True); "
    begin += "time.sleep(60) if os.environ['RANK'] == '0' else "
    began = time.monotonic()
    assert run_code(begin + "sys.exit('first\\nthe last line')", tmp_path / "a") == "the last line"
    assert time.monotonic() - began < 30
    assert ended(int((tmp_path / "a" / "rank-0.out").read_text(encoding="utf-8")))
    assert run_code(begin + "os.kill(os.getpid(), 9)", tmp_path / "b") == "rank 1 was ended by SIGKILL"
    assert run_code(begin + "sys.exit(3)", tmp_path / "c") == "rank 1 ended with status 3 and said nothing"


def test_an_interrupt_leaves_no_rank_behind(tmp_path: Path) -> None:
    files = [tmp_path / "run" / f"rank-{rank}.out" for rank in range(2)]

    def interrupt() -> None:
        deadline_s = time.monotonic() + 30
        while not all(file.exists() and file.read_bytes().endswith(b"\n") for file in files):
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_code("import os, time; print(os.getpid(), flush=True); time.sleep(40)", tmp_path / "run")
    watcher.join()
    assert all(ended(int(file.read_text(encoding="utf-8"))) for file in files)
    assert signal.getsignal(signal.SIGTERM) == before
