"""Compiles the next step while this one runs, in one background thread per rank.

One thread, so that the id exchanges of all compilations keep one order on every rank. Not here: compiling itself
(`compiler.py`).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from gtx.batches import Batch, BatchPlanner
from gtx.parallel.compiled import CompiledBatch
from gtx.parallel.compiler import Compiler


class Prefetcher:
    """The compiled batches of a run, in order; every rank asks for the same ones."""

    def __init__(self, compiler: Compiler, batches: BatchPlanner):
        self.compiler, self.batches = compiler, batches
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gtx-compile")
        self._ahead: dict[int, Future[CompiledBatch]] = {}
        self._kept: CompiledBatch | None = None  # batches that every step repeats are compiled once

    def _compile(self, batch: Batch) -> CompiledBatch:
        compiled = self.compiler.compile(batch)
        for wave in compiled.waves:
            for layer in wave.layers:
                for edges in layer.edges:
                    edges.pattern.transpose()  # backward needs it: here it costs the step nothing
        return compiled

    def evaluation(self, batch: Batch) -> CompiledBatch:
        """Compile a batch outside the sequence of steps; the same call on every rank."""
        return self._pool.submit(self.compiler.compile, batch).result()

    def step(self, step: int, *, last: bool = False) -> tuple[Batch, CompiledBatch]:
        """The batch of a step; the next one is compiled meanwhile, unless this is the last."""
        batch = self.batches.step(step)
        if batch.fixed:
            if self._kept is None:
                self._kept = self._pool.submit(self._compile, batch).result()
            return batch, self._kept
        if step not in self._ahead:
            self._ahead[step] = self._pool.submit(self._compile, batch)
        compiled = self._ahead.pop(step).result()
        if not last:
            self._ahead[step + 1] = self._pool.submit(self._compile, self.batches.step(step + 1))
        return batch, compiled

    def close(self) -> None:
        """Drop what was compiled ahead. It is waited for, since every rank takes part in it or none."""
        self._pool.shutdown(wait=True)
        self._ahead.clear()
