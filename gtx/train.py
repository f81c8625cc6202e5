"""A training run from config to run folder: load, partition, plan, train, evaluate, report.

Not here: what a step does (`parallel/executor.py`), what the optimizer is (`engine.py`), options (`launch.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml

from gtx.adapt import Pilot, Scheduled, given_plan, read_plan
from gtx.batches import BatchPlanner
from gtx.config import Config
from gtx.engine import DTYPES, make_engine
from gtx.environment import device_facts, exactness, versions
from gtx.models import GraphModel
from gtx.parallel.compiled import CompiledBatch
from gtx.parallel.compiler import Compiler
from gtx.parallel.executor import Executor, StepResult
from gtx.parallel.prefetch import Prefetcher
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph
from gtx.report import build_report, write_report
from gtx.session import Say, attention_backend, joined, load_partitioned, silent, tell_graph
from gtx.tasks import score
from gtx.workload import model_shape, partition_work
from monitor import (
    CsvSink,
    JsonlSink,
    PhaseTimer,
    ProgressBar,
    StepRecord,
    TensorBoardSink,
    device_utilisation,
    gather_steps,
    gathering_s,
    memory_source,
    peak_memory_bytes,
    reset_peak_memory,
)
from scheduler.plan import Plan, deal, fixed_plan


def make_plan(config: Config, graph: PartitionedGraph, world_size: int) -> Plan:
    """The plan the config asks for. Raises ValueError with one line if a plan file does not fit the run."""
    plan = config.plan
    if plan.file is not None:
        return given_plan(plan.file, config, graph, world_size)
    if plan.mode == "auto" or plan.mode == "adaptive":
        raise ValueError(f"plan.mode {plan.mode} is made by the scheduler, not here")
    return fixed_plan(
        plan.mode,
        partition_work(graph),
        world_size,
        config.model.layers,
        micro_batches_per_wave=plan.micro_batches_per_wave,
        waves_per_round=plan.waves_per_round,
        checkpointing=plan.checkpointing,
    )


def run_training(config: Config, run_dir: Path | None, command: str) -> None:
    """Train, and say where the results are. Rank 0 speaks."""
    if config.plan.file is not None:
        read_plan(config.plan.file)  # a wrong file should not wait for the graph
    run_dir = run_dir or new_run_dir(config)
    report = train(config, run_dir, lambda line: print(line, flush=True), command)
    if report:
        best = report["best"]
        if best is not None:
            test = best["test_score"]
            shown = "not available" if test is None else f"{test:.2f}"
            print(f"best validation {report['metric']} {best['val_score']:.2f} at step {best['step']}, test {shown}")
        print(f"run folder: {run_dir}\nstrategy report: python launch.py report {run_dir}", flush=True)


def train(config: Config, run_dir: Path, say: Say, command: str) -> dict[str, Any]:
    """Run a whole training job on this rank; returns the strategy report (on rank 0; empty elsewhere).

    Raises ValueError with one line for what the user can mend.
    """
    started = datetime.now(timezone.utc)
    with joined(config) as world:
        loud = say if world.rank == 0 else silent
        for line in config.without_effect():
            loud(f"note: {line}")
        loaded = load_partitioned(config, world, inputs=True)
        graph = loaded.partitioned
        tell_graph(loaded, loud)
        backend = attention_backend(config, world.device, DTYPES[config.engine.precision], loud)
        batches = BatchPlanner(graph, config.batch, config.sampling, config.model.layers, config.seed)
        num_steps = config.train.steps or (config.train.epochs or 0) * batches.steps_per_epoch
        torch.manual_seed(config.seed)
        model = GraphModel(config.model, graph.graph.num_features, graph.graph.num_classes)
        num_parameters = sum(p.numel() for p in model.parameters())
        shape = model_shape(config.model, model, graph, DTYPES[config.engine.precision].itemsize)
        pilot = (
            Scheduled(config, world, graph, batches, shape, num_steps, loud)
            if config.plan.searched
            else Pilot(make_plan(config, graph, world.size), "file" if config.plan.file else config.plan.mode)
        )
        if isinstance(pilot, Scheduled):
            config = pilot.config  # with the engine that was picked
        engine = make_engine(model, config.engine, world, num_steps, loud)
        timer = PhaseTimer()
        executor = Executor(
            engine, graph, world, timer, seed=config.seed, num_heads=config.model.heads, backend=backend
        )
        homes = np.array(deal(partition_work(graph), world.size))
        loud(
            f"{config.model.name} with {num_parameters:,} parameters, plan {pilot.plan.fingerprint} "
            f"({pilot.setting}) on {world.size} rank(s), "
            f"engine {config.engine.name}, {num_steps} steps"
        )
        sinks = Sinks(config, run_dir, num_steps) if world.rank == 0 else None
        run = Run(config, world, graph, pilot, batches, executor, homes, timer, sinks)
        try:
            run.steps(num_steps)
        except ValueError as error:
            raise RuntimeError("a step failed") from error  # no user's mistake any more: show the traceback
        finally:
            if sinks is not None:
                sinks.close()
        run.close()
        plan = pilot.plan
        devices = world.gather_facts(device_facts(world))
        if world.rank != 0:
            return {}
        finished = datetime.now(timezone.utc)
        report = build_report(
            run={
                "name": config.name,
                "seed": config.seed,
                "world_size": world.size,
                "collectives": "none" if world.size == 1 else ("nccl" if world.device.type == "cuda" else "gloo"),
                "engine": config.engine.name,
                "zero_stage": config.engine.zero_stage if config.engine.name == "deepspeed" else None,
                "offload": config.engine.offload_optimizer,
                "precision": config.engine.precision,
                "config_hash": config.hash,
                "command": command,
                "started": started.isoformat(timespec="seconds"),
                "finished": finished.isoformat(timespec="seconds"),
                "seconds": (finished - started).total_seconds(),
            },
            versions=versions(),
            devices=devices,
            graph={"name": graph.graph.name, **loaded.summary.as_dict()},
            partitioning=loaded.facts(),
            partitions=[
                {
                    "mode": place.mode,
                    "ranks": list(place.ranks),
                    "layer_split": list(place.layer_split),
                    "rows": graph.facts.rows[p],
                    "edges": graph.facts.edges[p],
                    "halo_rows": graph.facts.halo_rows[p],
                }
                for p, place in enumerate(plan.partitions)
            ],
            plan={
                "fingerprint": plan.fingerprint,
                "mode": pilot.setting,
                "num_waves": len(plan.waves(batches.max_micro_batches)),
                "num_rounds": len(plan.rounds(len(plan.waves(batches.max_micro_batches)))),
                "checkpointing": plan.checkpointing,
                "micro_batches_per_wave": plan.micro_batches_per_wave,
                "waves_per_round": plan.waves_per_round,
            },
            steps=run.records,
            evaluations=run.evaluations,
            exactness=exactness(config),
            share_of_edges_attended=run.shares,
            model={**config.model.model_dump(mode="json"), "parameters": num_parameters, "attention_backend": backend},
            losses=run.losses,
            metric=graph.graph.metric,
            scheduler={
                **pilot.report(),
                "plans": [{"from_step": step, "fingerprint": p.fingerprint} for step, p in pilot.history],
                "seconds": run.seconds,
            },
        )
        write_report(report, run_dir)
        return report


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
    ):
        self.config, self.world, self.graph, self.pilot = config, world, graph, pilot
        self.batches, self.executor, self.homes = batches, executor, homes
        self.timer, self.sinks = timer, sinks
        self.records: list[StepRecord] = []  # of all ranks
        self.losses: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self.seconds = 0.0  # of all steps, evaluation and switches with them
        self._edges = np.zeros(2)  # attended and whole
        self._gathers_s: list[float] = []  # each step's gathering of records, waiting for slower ranks with it
        self._adopt(0)

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

    def steps(self, num_steps: int) -> None:
        every = self.config.train.eval_every
        device = str(self.world.device)
        began = time.perf_counter()
        switched_s: float | None = None
        for step in range(num_steps):
            reset_peak_memory(device)
            cpu = time.process_time()
            self.timer.start_step(trace=step == self._traced)
            with self.timer.phase("compiling"):
                batch, compiled = self.prefetcher.step(step, last=step == num_steps - 1)
            result = self.executor.train_step(compiled, self.plan, step, fixed=batch.fixed)
            self._edges += (result.edges, compiled.edges_whole)
            scores: dict[str, float | None] = {}
            if step == num_steps - 1 or (every and (step + 1) % every == 0):
                with self.timer.phase("evaluate"):
                    scores = self._evaluate(step)
            records = self._record(step, result, compiled, scores, time.process_time() - cpu)
            if switched_s is not None:
                waited = max(record.phases.get("compiling", 0.0) for record in records)
                sent = sum(e.sent_bytes for r in records for e in r.exchanges if e.kind == "fetch")
                self.pilot.switched(step, switched_s + waited, sent)
                switched_s = None
            if self.pilot.after_step(step, records, num_steps - 1 - step) is not None:
                begin = time.perf_counter()
                self.prefetcher.close()
                self._adopt(step + 1)
                switched_s = time.perf_counter() - begin
        self.seconds = time.perf_counter() - began
        self.pilot.spent_s["monitor"] += gathering_s(self.world.gather_facts(self._gathers_s))
        self._edges = self.world.sum_facts(torch.from_numpy(self._edges)).numpy()

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


class Sinks:
    """Where rank 0 writes while the run lasts."""

    def __init__(self, config: Config, run_dir: Path, num_steps: int):
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config.as_dict(), sort_keys=False), encoding="utf-8")
        (run_dir / "env.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")
        self._metrics = CsvSink(run_dir / "metrics.csv")
        self._records = JsonlSink(run_dir / "records.jsonl") if config.monitor.records else None
        self._board = TensorBoardSink(run_dir / "tensorboard") if config.monitor.tensorboard else None
        self._bar = ProgressBar(num_steps) if config.monitor.progress else None
        self._run_dir, self._plans = run_dir, 0

    def keep_plan(self, plan: Plan) -> None:
        """Write the plan that the next steps run under as `plan-<n>.json`."""
        (self._run_dir / f"plan-{self._plans}.json").write_text(plan.to_json(), encoding="utf-8")
        self._plans += 1

    def keep_trace(self, step: int, plan: Plan, traces: Sequence[Sequence[tuple[str, float, float]]]) -> None:
        """Write the spans of one step as a Chrome trace, a thread a rank; chrome://tracing and Perfetto read it."""
        events = [
            {"name": name, "ph": "X", "pid": 0, "tid": rank, "ts": round(begin * 1e6, 1), "dur": round(s * 1e6, 1)}
            for rank, spans in enumerate(traces)
            for name, begin, s in ((name, begin, end - begin) for name, begin, end in spans)
        ]
        data = {"traceEvents": events, "otherData": {"step": step, "plan": plan.fingerprint}}
        (self._run_dir / f"trace-{step}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")

    def write(self, records: Sequence[StepRecord], scores: dict[str, float | None]) -> None:
        """One step: the records of all ranks, and scores where it ended with an evaluation."""
        first = records[0]
        slowest_s = max(record.wall_s for record in records)
        self._metrics.write_step(first.step, first.loss, slowest_s, **scores)
        if self._records is not None:
            for record in records:
                self._records.write(record)
        if self._board is not None:
            self._board.write_steps(records)
            if scores:
                self._board.write_evaluation(first.step, **scores)
        if self._bar is not None:
            val = scores.get("val_score")
            if val is not None:
                self._bar.show_score(val)
            self._bar.update(records)

    def close(self) -> None:
        for sink in (self._metrics, self._records, self._board, self._bar):
            if sink is not None:
                sink.close()


def new_run_dir(config: Config, now: float | None = None) -> Path:
    """`runs/<name>-<date>-<time>`, the default run folder."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path("runs") / f"{config.name}-{stamp}"
