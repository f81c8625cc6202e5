"""The ranks of a run: who am I, which groups carry what, and how small facts are shared.

Not here: rows of hidden states, which only `exchange.py` moves. DeepSpeed's own groups belong to `gtx/engine.py`.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Group = Any  # torch.distributed.ProcessGroup, absent in a world of one

_FACT_BYTES = 4096  # a step's record is half of it
_LENGTH = np.dtype("<i8")
_GRACE_S = 2.0  # for the other waiting ranks to say that they wait, once one has given up
_LOST_PEER = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "socket", "gloo")


class ExchangeError(RuntimeError):
    """Ranks did not meet: says where, who waited, for how long, and which ranks did not arrive."""


@dataclass(frozen=True)
class World:
    """This rank's place in the run.

    rank, size: as the launcher gave them.
    device: where rows live.
    rows_group: carries row exchanges (gloo on CPU, NCCL on GPU), and nothing else.
    ids_group: carries the compiler's id exchanges; gloo, so that a background thread can use it.
    facts_group: carries losses, scores and records; gloo.
    timeout_s: how long a rank waits for its peers before it calls the run hung.
    """

    rank: int
    size: int
    device: torch.device
    rows_group: Group = None
    ids_group: Group = None
    facts_group: Group = None
    timeout_s: float = 300.0

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def gather_facts(self, fact: Any) -> list[Any]:
        """Every rank's `fact` (anything picklable and small), in rank order, on every rank."""
        if self.size == 1:
            return [fact]
        with self.meeting("the exchange of facts"):
            return _gather(fact, self.size, self.facts_group)

    def from_first(self, fact: Any) -> Any:
        """Rank 0's `fact` (anything picklable), on every rank."""
        if self.size == 1:
            return fact
        held = [fact]
        with self.meeting("the sharing of rank 0's facts"):
            dist.broadcast_object_list(held, src=0, group=self.facts_group)
        return held[0]

    def sum_facts(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a small float64 CPU tensor over ranks, the same bits on every rank."""
        if self.size == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with self.meeting("the sum of facts"):
            dist.all_gather(parts, values.contiguous(), group=self.facts_group)
        return torch.stack(parts).sum(0)

    def barrier(self) -> None:
        if self.size > 1:
            with self.meeting("the barrier"):
                dist.barrier(group=self.facts_group)

    @contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """Around a collective: if peers are lost in it, ExchangeError names the ranks that did not arrive."""
        try:
            yield
        except ExchangeError:
            raise
        except RuntimeError as error:
            if self.size == 1 or not any(sign in str(error).lower() for sign in _LOST_PEER):
                raise
            raise self.lost(what, None, error) from error

    def lost(self, what: str, peers: Sequence[int] | None, error: RuntimeError) -> ExchangeError:
        """The error for a wait on `peers` (None: on everybody) that ended without them.

        Every rank that gives up leaves a mark in the store; those without one are not waiting but stuck or dead.
        """
        silent: list[int] | None = None
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"gtx/waits/{self.rank}", what)
            time.sleep(_GRACE_S)
            silent = [r for r in range(self.size) if r != self.rank and not store.check([f"gtx/waits/{r}"])]
        except RuntimeError:
            pass  # the store went with the rank that kept it
        missing = sorted(peers) if peers is not None else silent
        text = f"{what}: rank {self.rank} waited up to {self.timeout_s:g} s; "
        text += "rank(s) that did not arrive: " + (", ".join(map(str, missing)) if missing else "unknown")
        if silent and silent != missing:
            text += f"; rank(s) that wait nowhere: {', '.join(map(str, silent))}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return ExchangeError(f"{text} ({reason})")


def _gather(fact: Any, size: int, group: Group) -> list[Any]:
    """`all_gather_object` in one collective for what fits `_FACT_BYTES`; what is longer follows in a second one."""
    pickled = np.frombuffer(pickle.dumps(fact), dtype=np.uint8)
    room = _FACT_BYTES - _LENGTH.itemsize

    def collect(mine: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
        padded, out = torch.zeros(width, dtype=torch.uint8), torch.empty(size, width, dtype=torch.uint8)
        padded.numpy()[: len(mine)] = mine
        dist.all_gather(list(out.unbind()), padded, group=group)
        return out.numpy()

    header = np.array([len(pickled)], dtype=_LENGTH).view(np.uint8)
    came = collect(np.concatenate([header, pickled[:room]]), _FACT_BYTES)
    lengths = came[:, : _LENGTH.itemsize].copy().view(_LENGTH)[:, 0]
    whole = came[:, _LENGTH.itemsize :]
    if lengths.max() > room:
        whole = np.concatenate([whole, collect(pickled[room:], int(lengths.max()) - room)], axis=1)
    return [pickle.loads(row[:length].tobytes()) for row, length in zip(whole, lengths, strict=True)]


def solo(device: str | torch.device = "cpu") -> World:
    """A world of one rank that needs no process group."""
    return World(0, 1, torch.device(device))


def launched_ranks() -> tuple[int, int, int]:
    """(rank, world size, local rank) from the launcher's environment; (0, 1, 0) when run by plain python."""
    env = os.environ
    if "RANK" not in env:
        return 0, 1, 0
    return int(env["RANK"]), int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0"))


def join_world(*, timeout_s: float, device: str, store: dist.Store | None = None, ranks: Sequence[int] = ()) -> World:
    """Join the process groups of the launched run and return this rank's world.

    store, ranks: for tests: a store to meet at and `(rank, world size)`, instead of the launcher's environment.
    """
    rank, size, local_rank = launched_ranks()
    if ranks:
        rank, size = ranks
    timeout = timedelta(seconds=timeout_s)
    on_gpu = device == "cuda"
    place = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        backend = "nccl" if on_gpu else "gloo"
        if store is None and "RANK" not in os.environ:
            store = dist.HashStore()
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if size == 1:
        return World(rank, size, place, timeout_s=timeout_s)
    rows = dist.new_group(backend="nccl" if on_gpu else "gloo", timeout=timeout)
    ids = dist.new_group(backend="gloo", timeout=timeout)
    facts = dist.new_group(backend="gloo", timeout=timeout)
    return World(rank, size, place, rows, ids, facts, timeout_s)


def leave_world() -> None:
    """Tear the process groups down; harmless when there are none."""
    if dist.is_initialized():
        dist.destroy_process_group()
