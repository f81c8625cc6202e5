"""Runs a function on P gloo ranks: worker processes that live as long as the test session and meet by file store.

A function is `fn(world, *args)`, top-level in a test module. The first failure ends all ranks, and every rank's
traceback is shown. Not a test itself.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_S = 240.0
GRACE_S = 5.0  # for the other ranks to report, once one has failed


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.register(signal.SIGUSR1)
    import torch
    import torch.distributed as dist

    from gtx.parallel.world import join_world, leave_world

    torch.set_num_threads(1)
    while True:
        try:
            fn, rank, size, path, timeout_s, args = connection.recv()
        except EOFError:
            return
        try:
            store = dist.FileStore(path, size)
            world = join_world(timeout_s=timeout_s, device="cpu", store=store, ranks=(rank, size))
            result = fn(world, *args)
            world.barrier()
            leave_world()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class _Pool:
    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []

    def ensure(self, size: int) -> None:
        # Workers are forked from a fresh server process that has nothing but imports behind it: what torch imports at
        # the first optimizer step takes seconds, once here instead of once a worker.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "gtx.train", "pytest"])
        while len(self.workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def show_stacks(self, ranks: list[int]) -> None:
        """Where these ranks are, on their stderr, which pytest shows."""
        for rank in ranks:
            if self.workers[rank][0].is_alive():
                os.kill(self.workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(1.0 if ranks else 0.0)

    def close(self) -> None:
        for process, connection in self.workers:
            process.kill()
            process.join()
            connection.close()
        self.workers.clear()


_pool = _Pool()
atexit.register(_pool.close)


def end_ranks() -> None:
    """End all workers; the next call starts fresh ones. For tests whose libraries keep a world, as DeepSpeed does."""
    _pool.close()


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, hang_s: float = 60.0, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Results of `fn(world, *args)` in rank order.

    hang_s: how long a rank waits for its peers. Raises AssertionError with every rank's traceback when one fails or
    `timeout_s` pass.
    """
    _pool.ensure(size)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        connections = [connection for _, connection in _pool.workers[:size]]
        for rank, connection in enumerate(connections):
            connection.send((fn, rank, size, path, hang_s, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < size:
            pending = [c for r, c in enumerate(connections) if r not in results and r not in failures]
            ready = wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                break
            for connection in ready:
                rank = connections.index(connection)  # type: ignore[arg-type]
                try:
                    succeeded, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    succeeded, value = False, "the process died"
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures or len(results) < size:
            silent = [r for r in range(size) if r not in results and r not in failures]
            _pool.show_stacks(silent)
            _pool.close()
            text = "\n".join(f"--- rank {r}\n{failures[r]}" for r in sorted(failures))
            raise AssertionError(f"ranks {sorted(failures)} failed, ranks {silent} did not finish\n{text}")
        return [results[r] for r in range(size)]
