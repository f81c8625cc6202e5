"""The loop over the steps of one rank: train, evaluate, record, keep checkpoints, and change the plan when told to.

Not here: what a step does (`parallel/executor.py`), what surrounds the loop (`train.py`), files (`run_writer.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gtx.adapt import Pilot
from gtx.batches import BatchPlanner
from gtx.checkpoint import Progress
from gtx.config import Config
from gtx.parallel.compiled import CompiledBatch
from gtx.parallel.compiler import Compiler
from gtx.parallel.executor import Executor, StepResult
from gtx.parallel.prefetch import Prefetcher
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph
from gtx.report import best_evaluation
from gtx.run_writer import Sinks
from gtx.tasks import per_class, score
from monitor import (
    PhaseTimer,
    StepRecord,
    device_utilisation,
    gather_steps,
    gathering_s,
    memory_source,
    peak_memory_bytes,
    reset_peak_memory,
)


class Run:
    """The loop over steps of one rank, and what it has seen."""

    def __init__(
        self,
        config: Config,
        world: World,
        graph: PartitionedGraph,
        pilot: Pilot,
        batches: BatchPlanner,
        executor: Executor,
        homes: npt.NDArray[np.int64],
        timer: PhaseTimer,
        sinks: Sinks | None,
        graph_facts: Mapping[str, Any],
        resumed: Progress | None = None,
    ):
        """graph_facts: of the graph's summary. resumed: what was seen before, if the run goes on."""
        self.config, self.world, self.graph, self.pilot = config, world, graph, pilot
        self.batches, self.executor, self.homes = batches, executor, homes
        self.timer, self.sinks = timer, sinks
        self.records: list[StepRecord] = []  # of all ranks
        self.first_step = 0 if resumed is None else resumed.step
        self.losses: list[float] = [] if resumed is None else list(resumed.losses)
        self.evaluations: list[dict[str, Any]] = [] if resumed is None else [dict(e) for e in resumed.evaluations]
        self._graph_facts = graph_facts
        self.seconds = 0.0  # of all steps, evaluation and switches with them
        self._edges = np.zeros(2)  # attended and whole
        self._gathers_s: list[float] = []  # each step's gathering of records, waiting for slower ranks with it
        self._adopt(self.first_step)

    def _adopt(self, step: int) -> None:
        """Compile for the pilot's plan from `step` on; what was compiled ahead for another is dropped."""
        self.plan = self.pilot.plan
        self._traced = step + 2  # a step whose spans are kept, once caches are warm
        compiler = Compiler(self.graph, self.plan, self.world, self.config.model.heads, self.homes)
        self.prefetcher = Prefetcher(compiler, self.batches)
        self._evaluation: CompiledBatch | None = None
        if self.sinks is not None:
            self.sinks.keep_plan(self.plan)

    def close(self) -> None:
        self.prefetcher.close()

    @property
    def shares(self) -> float:
        """Share of the real edges of the micro-batches' rows that were attended, over all steps so far."""
        return float(self._edges[0] / self._edges[1]) if self._edges[1] else 1.0

    def steps(self, num_steps: int) -> str | None:
        """Train up to `num_steps`. Returns why it ended before, if it did: the same on every rank."""
        every, keep_every = self.config.train.eval_every, self.config.train.checkpoint_every
        device = str(self.world.device)
        began = time.perf_counter()
        switched_s: float | None = None
        stopped: str | None = None
        for step in range(self.first_step, num_steps):
            reset_peak_memory(device)
            cpu = time.process_time()
            self.timer.start_step(trace=step == self._traced)
            with self.timer.phase("compiling"):
                batch, compiled = self.prefetcher.step(step, last=step == num_steps - 1)
            result = self.executor.train_step(compiled, self.plan, step, fixed=batch.fixed)
            self._edges += (result.edges, compiled.edges_whole)
            scores: dict[str, float | None] = {}
            evaluates = step == num_steps - 1 or bool(every and (step + 1) % every == 0)
            if evaluates:
                with self.timer.phase("evaluate"):
                    scores = self._evaluate(step)
            records = self._record(step, result, compiled, scores, time.process_time() - cpu)
            if evaluates or (keep_every and (step + 1) % keep_every == 0):
                self._keep(step, is_best=evaluates and self._is_best(step))
            if switched_s is not None:
                waited = max(record.phases.get("compiling", 0.0) for record in records)
                sent = sum(e.sent_bytes for r in records for e in r.exchanges if e.kind == "fetch")
                self.pilot.switched(step, switched_s + waited, sent)
                switched_s = None
            if evaluates and self.config.train.patience and step < num_steps - 1:
                stopped = self.world.from_first(self._out_of_patience())
                if stopped is not None:
                    break
            if self.pilot.after_step(step, records, num_steps - 1 - step) is not None:
                begin = time.perf_counter()
                self.prefetcher.close()
                self._adopt(step + 1)
                switched_s = time.perf_counter() - begin
        self.seconds = time.perf_counter() - began
        self.pilot.spent_s["monitor"] += gathering_s(self.world.gather_facts(self._gathers_s))
        self._edges = self.world.sum_facts(torch.from_numpy(self._edges)).numpy()
        return stopped

    def _out_of_patience(self) -> str | None:
        """Why training ends here, or None. On rank 0."""
        best, patience = best_evaluation(self.evaluations), self.config.train.patience
        if best is None:
            return None
        since = [e["step"] for e in self.evaluations if e["step"] > best["step"]]
        if len(since) < patience:
            return None
        return (
            f"stopped at step {since[-1]}: no better validation score than {best['val_score']:.2f} of step "
            f"{best['step']} in {len(since)} evaluation(s) (train.patience)"
        )

    def _is_best(self, step: int) -> bool:
        """Whether the evaluation of `step` is the one to read the test score at, so far. On rank 0."""
        best = best_evaluation(self.evaluations)
        return best is not None and best["step"] == step

    def _keep(self, step: int, *, is_best: bool) -> None:
        """Write a checkpoint of the state after `step`. A collective; rank 0 writes."""
        state = self.executor.engine.state()
        if self.sinks is not None:
            progress = Progress(
                step=step + 1,
                world_size=self.world.size,
                config=self.config.as_dict(),
                graph=self._graph_facts,
                fingerprint=self.graph.facts.fingerprint,
                losses=self.losses,
                evaluations=self.evaluations,
            )
            self.sinks.keep_checkpoint(progress, state, is_best=is_best)

    def _evaluate(self, step: int) -> dict[str, float | None]:
        """Scores of the splits over the full neighbourhoods; only rank 0 computes them."""
        if self._evaluation is None:
            self._evaluation = self.prefetcher.evaluation(self.batches.evaluation(step))
        nodes, logits = self.executor.predict(self._evaluation, self.plan, step)
        if self.sinks is None:
            return {}
        graph = self.graph.graph
        labels = np.asarray(graph.labels)
        scores = {}
        for name, mask in (("val_score", graph.val_mask), ("test_score", graph.test_mask)):
            chosen = np.asarray(mask)[nodes]
            scores[name] = score(graph.metric, [logits[chosen]], labels[nodes[chosen]])
        self.evaluations.append({"step": step, **scores})
        if self._is_best(step) and chosen.any():  # the test nodes, which came last
            for evaluation in self.evaluations:
                evaluation.pop("per_class", None)
            classes = graph.names.classes or range(graph.num_classes)
            names = [str(name) for name in classes]
            self.evaluations[-1]["per_class"] = per_class(logits[chosen], labels[nodes[chosen]], names)
        return scores

    def _record(
        self,
        step: int,
        result: StepResult,
        compiled: CompiledBatch,
        scores: dict[str, float | None],
        cpu_s: float,
    ) -> tuple[StepRecord, ...]:
        phases = self.timer.finish_step()
        began = time.perf_counter()
        record = StepRecord(
            step=step,
            rank=self.world.rank,
            wall_s=self.timer.wall_s,
            phases=phases,
            exchanges=self.timer.exchanges,
            peak_memory_bytes=peak_memory_bytes(str(self.world.device)),
            rows_computed=result.rows,
            edges_computed=round(result.edges),
            loss=result.loss,
            plan_fingerprint=self.plan.fingerprint,
            memory_source=memory_source(str(self.world.device)),
            peers=self.timer.peers,
            cpu_s=cpu_s,
            prepared_s=(compiled.sampling_s, compiled.compiling_s),
            device_utilisation=device_utilisation(str(self.world.device)),
        )
        gathering = time.perf_counter()
        everyone = gather_steps(record, self.world.gather_facts)
        gathered = time.perf_counter()
        self._gathers_s.append(gathered - gathering)
        spans = self.timer.spans
        self.losses.append(result.loss)
        if self.sinks is not None:
            self.records.extend(everyone)
            self.sinks.write(everyone, scores)
        if step == self._traced:
            traces = self.world.gather_facts(spans)
            if self.sinks is not None:
                self.sinks.keep_trace(step, self.plan, traces)
        self.pilot.spent_s["monitor"] += time.perf_counter() - gathered + gathering - began
        return everyone
