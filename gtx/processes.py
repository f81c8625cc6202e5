"""Starts a command as ranks of its own, with the environment that a launcher would give them, and ends them together.

The only file that starts processes. Not here: what is run and what for (`ablate.py`).
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_GRACE_S = 5.0  # for the other ranks to end by themselves, once one has failed
_POLL_S = 0.05


def run_ranks(
    command: Sequence[str], size: int, folder: Path, cores: Sequence[int] | None, threads: int = 1
) -> str | None:
    """Run a command as every rank, with `rank-<r>.out` and `.err` in the folder; what went wrong, or None.

    cores: each rank is pinned to as many as it has threads, in turn; None: to none. No rank outlives the call.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    folder.mkdir(parents=True)
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.enter_context(_signals_interrupt())
        stack.callback(_end, ranks)
        for rank in range(size):
            env = os.environ | {key: str(value) for key, value in {**world, "RANK": rank, "LOCAL_RANK": rank}.items()}
            out = stack.enter_context(open(folder / f"rank-{rank}.out", "wb"))
            err = stack.enter_context(open(folder / f"rank-{rank}.err", "wb"))
            own = {cores[(rank * threads + i) % len(cores)] for i in range(threads)} if cores else None
            with _pinned(own):
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,  # a process group each: what a rank starts ends with it
                    )
                )
        failed = _wait(ranks)
    if failed is None:
        return None
    status = ranks[failed].returncode
    if status < 0:
        return f"rank {failed} was ended by {signal.Signals(-status).name}"
    lines = (folder / f"rank-{failed}.err").read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    if status == 2:  # the user can mend it: one line says what, remedies may follow
        said = [line for line in said if line.startswith("gtx: ")] or said
    return said[-1] if said else f"rank {failed} ended with status {status} and said nothing"


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all ranks; the first one that failed, after a grace for the others, or None."""
    failed: int | None = None
    deadline_s = math.inf
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        if failed is None:
            failed = next((rank for rank, process in enumerate(ranks) if process.poll()), None)
            deadline_s = math.inf if failed is None else time.monotonic() + _GRACE_S
    return failed if failed is not None else next((rank for rank, process in enumerate(ranks) if process.poll()), None)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP act as Ctrl-C does, so that no rank is left behind."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _pinned(cores: set[int] | None) -> Iterator[None]:
    """Processes started within inherit these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores_to_pin_to(device: str) -> list[int] | None:
    """The cores of this process; None where ranks compute on GPUs."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return None
    return sorted(os.sched_getaffinity(0))
