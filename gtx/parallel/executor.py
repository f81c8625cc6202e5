"""Runs compiled batches on this rank: features in, waves and rounds through the model, loss, backward, one step.

Not here: what is sent when (`context.py`), compiling (`compiler.py`), and what an optimizer step is (`gtx/engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gtx.checkpoint import EngineState
from gtx.models import GraphModel
from gtx.parallel.compiled import CompiledBatch, CompiledWave
from gtx.parallel.context import Runtime, WaveContext
from gtx.parallel.exchange import Channel, Flight, Timer
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph
from gtx.tasks import loss_sum
from scheduler.plan import Plan


class Engine(Protocol):
    """An optimizer step over gradients that ranks add up."""

    model: GraphModel
    dtype: torch.dtype

    def forward(self, x: Tensor, token: Tensor, wave: WaveContext) -> tuple[Tensor, Tensor]: ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Backward of this rank's share of the loss; gradients are summed over ranks. last: no round follows."""
        ...

    def step(self) -> None: ...

    def state(self) -> EngineState:
        """What the engine has learnt, in full on every rank. A collective."""
        ...


@dataclass(frozen=True)
class StepResult:
    """loss: the mean over all targets of the step, the same on every rank. rows, edges: computed by this rank."""

    loss: float
    rows: int
    edges: float


class Executor:
    """Runs steps and evaluations of one model on one rank."""

    def __init__(
        self,
        engine: Engine,
        graph: PartitionedGraph,
        world: World,
        timer: Timer,
        *,
        seed: int,
        num_heads: int,
        backend: str,
    ):
        self.engine, self.graph, self.world, self.timer = engine, graph, world, timer
        self.seed, self.num_heads, self.backend = seed, num_heads, backend
        self.channel = Channel(world, timer)
        self.labels = torch.from_numpy(np.asarray(graph.graph.labels)).to(world.device)
        self._kept: tuple[CompiledBatch, list[Tensor]] | None = None  # inputs of a batch that every step repeats

    def _fetch(self, wave: CompiledWave) -> Flight:
        """Start to bring the input rows of a wave from where they are stored to their first owner."""
        stored = torch.from_numpy(self.graph.input_rows(wave.stored)).to(self.world.device, self.engine.dtype)
        width = (1, 1, stored.shape[1])
        flight = Flight(self.channel, wave.fetch, f"fetch of wave {wave.index}", stored, width)
        flight.post_gather(stored[:, None, None, :])
        return flight

    def _inputs(self, batch: CompiledBatch, waves: range, *, fixed: bool) -> Callable[[int], Tensor]:
        """A function from wave to this rank's input rows `[n, columns]`.

        All are on their way before the first wave runs: a rank that stores features would else send those of a later
        wave only when it gets there, and a pipeline's first stage would wait for its last.
        """
        if fixed:
            if self._kept is None or self._kept[0] is not batch:
                flights = [self._fetch(wave) for wave in batch.waves]
                self._kept = (batch, [_rows(flight) for flight in flights])
            return self._kept[1].__getitem__
        flying = {index: self._fetch(batch.waves[index]) for index in waves}
        return lambda index: _rows(flying.pop(index))

    def runtime(self, plan: Plan, step: int, training: bool) -> Runtime:
        """What the layers of a step share."""
        return Runtime(self.channel, self.num_heads, self.seed, step, training, self.backend, plan.checkpointing)

    def _token(self, training: bool) -> Tensor:
        return torch.zeros((), dtype=self.engine.dtype, device=self.world.device, requires_grad=training)

    def train_step(self, batch: CompiledBatch, plan: Plan, step: int, *, fixed: bool) -> StepResult:
        """One optimizer step: every rank calls it with its part of the same batch."""
        runtime = self.runtime(plan, step, training=True)
        self.engine.model.train()
        local = torch.zeros((), dtype=torch.float64)
        rounds = plan.rounds(len(batch.waves))
        for number, waves in enumerate(rounds):
            token = self._token(training=True)
            inputs = self._inputs(batch, waves, fixed=fixed)
            losses = []
            for index in waves:
                wave = batch.waves[index]
                with self.timer.phase("rowwise"):
                    context = WaveContext(runtime, wave)
                    logits, token = self.engine.forward(inputs(index), token, context)
                    losses.append(self._loss(logits, wave) / max(batch.num_targets, 1))
            with self.timer.phase("backward"):
                total = torch.stack(losses).sum()
                local += total.detach().cpu()
                with self.world.meeting(f"backward of step {step}"):
                    self.engine.backward(total + token.to(total.dtype), last=number == len(rounds) - 1)
        with self.timer.phase("optimizer"), self.world.meeting(f"gradients and optimizer of step {step}"):
            self.engine.step()
        with self.timer.phase("exchange.reduce"):
            self.channel.drain()
            self._update_norms(runtime, batch)
            loss = float(self.world.sum_facts(local.reshape(1))[0])
        return StepResult(loss, batch.rows, batch.edges if self.engine.model.uses_edges else 0.0)

    def _loss(self, logits: Tensor, wave: CompiledWave) -> Tensor:
        labels = self.labels[torch.from_numpy(wave.target_nodes).to(self.labels.device)]
        return loss_sum(logits.index_select(0, wave.target_rows), labels)

    def _update_norms(self, runtime: Runtime, batch: CompiledBatch) -> None:
        """Running batch-norm statistics on every rank, from whoever reported them, in micro-batch order."""
        norms = self.engine.model.norms
        if not norms:
            return
        width = max(norm.running_mean.numel() for norm in norms)
        shape = (len(norms), batch.num_micro_batches, 2, width + 1)  # the last column: whether somebody reported
        mine = torch.zeros(shape, dtype=torch.float64)
        for (number, micro_batch), (mean, variance) in runtime.statistics.found.items():
            mine[number, micro_batch, 0, : mean.numel()] = mean.double().cpu()
            mine[number, micro_batch, 1, : variance.numel()] = variance.double().cpu()
            mine[number, micro_batch, :, -1] = 1.0
        total = self.world.sum_facts(mine)
        for norm in norms:
            size = norm.running_mean.numel()
            for micro_batch in range(batch.num_micro_batches):
                if not total[norm.number, micro_batch, 0, -1]:
                    continue  # no rank has rows of it
                mean, variance = total[norm.number, micro_batch, :, :size].to(norm.running_mean.device)
                norm.update(mean, variance)

    def predict(
        self, batch: CompiledBatch, plan: Plan, step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Logits of all target rows, on every rank: node ids in partition order `[n]`, sorted, and `[n, classes]`."""
        nodes, logits, _ = self.embed(batch, plan, step)
        return nodes, logits

    @torch.no_grad()
    def embed(
        self, batch: CompiledBatch, plan: Plan, step: int, *, hidden: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """As `predict`, with what the classifier was given, `[n, width]`; `[n, 0]` unless `hidden`."""
        runtime = self.runtime(plan, step, training=False)
        model = self.engine.model
        model.eval()
        nodes, logits, before = [], [], []
        token = self._token(training=False)
        inputs = self._inputs(batch, range(len(batch.waves)), fixed=False)
        given: list[Tensor] = []
        watch = model.classifier.register_forward_pre_hook(lambda _, rows: given.append(rows[0]))
        try:
            for wave in batch.waves:
                out, token = self.engine.forward(inputs(wave.index), token, WaveContext(runtime, wave))
                nodes.append(wave.target_nodes)
                logits.append(out.index_select(0, wave.target_rows).double().cpu().numpy())
                rows = given.pop()
                before.append(
                    (rows if hidden else rows[:, :0]).index_select(0, wave.target_rows).double().cpu().numpy()
                )
        finally:
            watch.remove()
        self.channel.drain()
        parts = self.world.gather_facts(tuple(np.concatenate(arrays) for arrays in (nodes, logits, before)))
        all_nodes, all_logits, all_before = (np.concatenate([part[k] for part in parts]) for k in range(3))
        order = np.argsort(all_nodes, kind="stable")
        return all_nodes[order], all_logits[order], all_before[order]


def _rows(flight: Flight) -> Tensor:
    (rows,) = flight.wait_gather()
    return rows.flatten(1)
