"""A training run from config to run folder: load, partition, plan, train, evaluate, report.

Not here: what a step does (`parallel/executor.py`), what the optimizer is (`engine.py`), options (`launch.py`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from gtx.batches import BatchPlanner
from gtx.config import Config
from gtx.datasets import load_graph
from gtx.engine import make_engine
from gtx.environment import device_facts, exactness, versions
from gtx.graphs import GraphSummary, summarize
from gtx.models import GraphModel
from gtx.parallel.compiled import CompiledBatch
from gtx.parallel.compiler import Compiler
from gtx.parallel.executor import Executor, StepResult
from gtx.parallel.prefetch import Prefetcher
from gtx.parallel.world import World, join_world, launched_ranks, leave_world
from gtx.partition import PartitionedGraph, load, load_or_partition
from gtx.report import build_report, write_report
from gtx.tasks import score
from monitor import (
    CsvSink,
    JsonlSink,
    PhaseTimer,
    ProgressBar,
    StepRecord,
    TensorBoardSink,
    gather_steps,
    memory_source,
    peak_memory_bytes,
    reset_peak_memory,
)
from scheduler.plan import Plan, deal, fixed_plan, from_json
from sparse_engine import resolve_backend

ROW_WORK = 8.0  # edges that cost about as much as the row-wise work of one row; only balances partitions over ranks

Say = Callable[[str], None]


@dataclass(frozen=True)
class Loaded:
    """A graph ready to train on, the same on every rank."""

    partitioned: PartitionedGraph
    summary: GraphSummary
    reused: bool


def load_partitioned(config: Config, world: World | None = None) -> Loaded:
    """Load and partition the graph once per host; the other ranks map the files that the first one wrote.

    Raises ValueError with one line, on every rank, if the first rank of any host fails.
    """

    def make() -> Loaded:
        data = config.data
        graph = load_graph(
            data.name,
            root=data.root,
            seed=config.seed,
            split=data.split,
            undirected=data.undirected,
            self_loops=data.self_loops,
            options=data.options,
        )
        part = config.partition
        partitioned, reused = load_or_partition(graph, part.method, part.parts, config.seed, part.cache)
        return Loaded(partitioned, summarize(graph), reused)

    if world is None or world.size == 1:
        return make()
    host, local_rank = socket.gethostname(), launched_ranks()[2]
    made: Loaded | None = None
    error: str | None = None
    if local_rank == 0:
        try:
            made = make()
        except (ValueError, OSError) as problem:
            error = str(problem)
    folder = made.partitioned.folder if made else None
    facts = world.gather_facts((host, local_rank, error, folder, (made.summary, made.reused) if made else None))
    for fact in facts:
        if fact[2] is not None:
            raise ValueError(fact[2])
    if made is not None:
        return made
    first = next(fact for fact in facts if fact[0] == host and fact[1] == 0)
    if first[3] is None:
        return make()  # the first rank could not keep its files
    return Loaded(load(first[3]), *first[4])


def partition_work(graph: PartitionedGraph) -> list[float]:
    """Relative work of each partition `[K]`, by which partitions are dealt to ranks."""
    rows = np.diff(graph.starts)
    return [float(r * ROW_WORK + e) for r, e in zip(rows, graph.facts.edges, strict=True)]


def make_plan(config: Config, graph: PartitionedGraph, world_size: int) -> Plan:
    """The plan the config asks for. Raises ValueError with one line if a plan file does not fit the run."""
    plan = config.plan
    if plan.file is None:
        return fixed_plan(
            plan.mode,
            partition_work(graph),
            world_size,
            config.model.layers,
            micro_batches_per_wave=plan.micro_batches_per_wave,
            waves_per_round=plan.waves_per_round,
            checkpointing=plan.checkpointing,
        )
    made = read_plan(plan.file)
    if made.world_size != world_size:
        raise ValueError(
            f"plan.file {plan.file} is for {made.world_size} ranks, {world_size} were launched; launch as many"
        )
    if made.num_layers != config.model.layers:
        raise ValueError(
            f"plan.file {plan.file} has {made.num_layers} layers, model.layers is {config.model.layers}; "
            "make them equal"
        )
    if made.num_partitions != graph.num_parts:
        raise ValueError(
            f"plan.file {plan.file} places {made.num_partitions} partitions, partition.parts is {graph.num_parts}; "
            "make them equal"
        )
    return made


def read_plan(path: Path) -> Plan:
    """Read a plan file. Raises ValueError with one line naming the file."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read plan.file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"plan.file {path}: {error}") from None


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """This rank's world, torn down at the end."""
    device = config.engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device is cuda and no CUDA device was found; use cpu or auto")
    _, size, _ = launched_ranks()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", size)))
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // local_size)
    torch.set_num_threads(threads)
    yield join_world(timeout_s=config.engine.timeout_s, device=device)
    leave_world()  # not after a failure: peers may be gone


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
        loud = say if world.rank == 0 else _silent
        for line in config.without_effect():
            loud(f"note: {line}")
        loaded = load_partitioned(config, world)
        graph = loaded.partitioned
        tell_graph(loaded, loud)
        plan = make_plan(config, graph, world.size)
        backend = resolve_backend(config.model.backend, world.device, torch.float32)
        batches = BatchPlanner(graph, config.batch, config.sampling, config.model.layers, config.seed)
        num_steps = config.train.steps or (config.train.epochs or 0) * batches.steps_per_epoch
        torch.manual_seed(config.seed)
        model = GraphModel(config.model, graph.graph.num_features, graph.graph.num_classes)
        num_parameters = sum(p.numel() for p in model.parameters())
        engine = make_engine(model, config.engine, world, num_steps, loud)
        timer = PhaseTimer()
        executor = Executor(
            engine, graph, world, timer, seed=config.seed, num_heads=config.model.heads, backend=backend
        )
        homes = np.array(deal(partition_work(graph), world.size))
        compiler = Compiler(graph, plan, world, config.model.heads, homes)
        prefetcher = Prefetcher(compiler, batches, num_steps)
        loud(
            f"{config.model.name} with {num_parameters:,} parameters, plan {plan.fingerprint} "
            f"({'file' if config.plan.file else config.plan.mode}) on {world.size} rank(s), "
            f"engine {config.engine.name}, {num_steps} steps"
        )
        sinks = Sinks(config, run_dir, num_steps) if world.rank == 0 else None
        if sinks is not None:
            (run_dir / "plan-0.json").write_text(plan.to_json(), encoding="utf-8")
        run = Run(config, world, graph, plan, batches, executor, prefetcher, timer, sinks)
        try:
            run.steps(num_steps)
        except ValueError as error:
            raise RuntimeError("a step failed") from error  # no user's mistake any more: show the traceback
        finally:
            if sinks is not None:
                sinks.close()
        prefetcher.close()
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
            partitioning={**graph.facts.as_dict(), "reused": loaded.reused},
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
                "mode": "file" if config.plan.file else config.plan.mode,
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
        plan: Plan,
        batches: BatchPlanner,
        executor: Executor,
        prefetcher: Prefetcher,
        timer: PhaseTimer,
        sinks: Sinks | None,
    ):
        self.config, self.world, self.graph, self.plan = config, world, graph, plan
        self.batches, self.executor, self.prefetcher = batches, executor, prefetcher
        self.timer, self.sinks = timer, sinks
        self.records: list[StepRecord] = []  # of all ranks
        self.losses: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self._edges = np.zeros(2)  # attended and whole
        self._evaluation: CompiledBatch | None = None

    @property
    def shares(self) -> float:
        """Share of the real edges of the micro-batches' rows that were attended, over all steps so far."""
        return float(self._edges[0] / self._edges[1]) if self._edges[1] else 1.0

    def steps(self, num_steps: int) -> None:
        every = self.config.train.eval_every
        device = str(self.world.device)
        for step in range(num_steps):
            reset_peak_memory(device)
            self.timer.start_step()
            with self.timer.phase("compiling"):
                batch, compiled = self.prefetcher.step(step)
            result = self.executor.train_step(compiled, self.plan, step, fixed=batch.fixed)
            self._edges += (result.edges, compiled.edges_whole)
            scores: dict[str, float | None] = {}
            if step == num_steps - 1 or (every and (step + 1) % every == 0):
                with self.timer.phase("evaluate"):
                    scores = self._evaluate(step)
            self._record(step, result, scores)
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

    def _record(self, step: int, result: StepResult, scores: dict[str, float | None]) -> None:
        phases = self.timer.finish_step()
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
        )
        everyone = gather_steps(record, self.world.gather_facts)
        self.losses.append(result.loss)
        if self.sinks is not None:
            self.records.extend(everyone)
            self.sinks.write(everyone, scores)


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


def tell_graph(loaded: Loaded, say: Say) -> None:
    """Two lines on the graph and how it is cut."""
    summary, facts = loaded.summary, loaded.partitioned.facts
    kind = "directed" if summary.directed else "undirected"
    say(
        f"graph {loaded.partitioned.graph.name}: {summary.num_nodes:,} nodes, {summary.num_edges:,} {kind} edges, "
        f"{summary.num_features} features, {summary.num_classes} classes; {summary.isolated_nodes} isolated nodes, "
        f"{summary.duplicate_edges} duplicate edges, {summary.self_loops} self loops"
    )
    made = "reused" if loaded.reused else f"made in {facts.seconds:.1f} s"
    say(
        f"partitions: {facts.parts} by {facts.method} ({facts.implementation}), {made}; cut {facts.cut_fraction:.1%}, "
        f"balance {facts.node_balance:.2f} nodes, {facts.edge_balance:.2f} edges"
    )


def _silent(line: str) -> None:
    pass


def new_run_dir(config: Config, now: float | None = None) -> Path:
    """`runs/<name>-<date>-<time>`, the default run folder."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path("runs") / f"{config.name}-{stamp}"
