"""A training run from config to run folder: load, partition, plan, train or go on from a checkpoint, report.

Not here: the loop over steps (`loop.py`), what the optimizer is (`engine.py`), options (`launch.py`).
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gtx.adapt import Pilot, Scheduled, given_plan
from gtx.batches import BatchPlanner
from gtx.budget import predict
from gtx.checkpoint import changes, check_fits
from gtx.config import Config
from gtx.engine import DTYPES, make_engine
from gtx.environment import device_facts, exactness, versions
from gtx.evaluation import SUSPICIOUS, describe
from gtx.loop import Run
from gtx.models import GraphModel
from gtx.parallel.executor import Executor
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph
from gtx.report import build_report, write_report
from gtx.run_writer import Sinks
from gtx.session import Say, attention_backend, joined, load_partitioned, share_checkpoint, silent, tell_graph
from gtx.workload import model_shape, partition_work
from monitor import PhaseTimer
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


def train(config: Config, run_dir: Path, say: Say, command: str, resume: Path | None = None) -> dict[str, Any]:
    """`train_in` the ranks as they were launched."""
    with joined(config) as world:
        return train_in(world, config, run_dir, say, command, resume)


def train_in(
    world: World, config: Config, run_dir: Path, say: Say, command: str, resume: Path | None = None
) -> dict[str, Any]:
    """Run a whole training job on this rank; returns the strategy report (on rank 0; empty elsewhere).

    resume: a run folder or a checkpoint, on rank 0's host. Raises ValueError with one line for what the user can mend.
    """
    started = datetime.now(timezone.utc)
    loud = say if world.rank == 0 else silent
    for line in config.without_effect():
        loud(f"note: {line}")
    resumed, state = (None, None) if resume is None else share_checkpoint(world, resume)
    loaded = load_partitioned(config, world, inputs=True)
    graph = loaded.partitioned
    tell_graph(loaded, loud)
    backend = attention_backend(config, world, DTYPES[config.engine.precision], loud, graph)
    batches = BatchPlanner(graph, config.batch, config.sampling, config.model.layers, config.seed)
    num_steps = config.train.steps or (config.train.epochs or 0) * batches.steps_per_epoch
    first_step = 0
    if resumed is not None:
        check_fits(resumed, config.as_dict(), loaded.summary.as_dict(), num_steps)
        for line in changes(resumed, config.as_dict()):
            loud(f"note: {line}")
        first_step = resumed.step
        loud(f"resuming at step {first_step}, left by {resumed.world_size} rank(s)")
    torch.manual_seed(config.seed)
    model = GraphModel(config.model, *graph.graph.dims)
    num_parameters = sum(p.numel() for p in model.parameters())
    shape = model_shape(config.model, model, graph, DTYPES[config.engine.precision].itemsize)
    pilot: Pilot
    if config.plan.searched:
        pilot = Scheduled(config, world, graph, batches, shape, num_steps - first_step, loud, first_step)
    else:
        setting = "file" if config.plan.file else config.plan.mode
        pilot = Pilot(make_plan(config, graph, world.size), setting, first_step)
    if isinstance(pilot, Scheduled):
        config = pilot.config  # with the engine that was picked
    engine = make_engine(model, config.engine, world, num_steps, loud, state)
    budget = None if config.plan.searched else predict(config, world, graph, batches, shape, pilot.plan)
    timer = PhaseTimer()
    executor = Executor(engine, graph, world, timer, seed=config.seed, num_heads=config.model.heads, backend=backend)
    homes = np.array(deal(partition_work(graph), world.size))
    loud(
        f"{config.model.name} with {num_parameters:,} parameters, plan {pilot.plan.fingerprint} "
        f"({pilot.setting}) on {world.size} rank(s), "
        f"engine {config.engine.name}, {num_steps} steps"
    )
    sinks = Sinks(config, run_dir, num_steps, resumed) if world.rank == 0 else None
    facts = loaded.summary.as_dict()
    run = Run(config, world, graph, pilot, batches, executor, homes, timer, sinks, facts, resumed)
    try:
        stopped = run.steps(num_steps)
    except ValueError as error:
        raise RuntimeError("a step failed") from error  # no user's mistake any more: show the traceback
    finally:
        if sinks is not None:
            sinks.close()
    run.close()
    if stopped is not None:
        loud(stopped)
    plan = pilot.plan
    devices = world.gather_facts(device_facts(world))
    if world.rank != 0:
        return {}
    search_s = pilot.report()["spent_s"]["start"]
    own = [record for record in run.records if record.rank == 0]
    evaluation = describe(config, graph.graph, loaded.split, loaded.facts(), own, search_s=search_s, loop_s=run.seconds)
    for check in evaluation["checks"]:
        if check["answer"] == "yes" and check["question"] in SUSPICIOUS:
            loud(f"note: {check['question']}: {check['because']}")
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
            **({} if resumed is None else {"resumed": {"step": first_step, "world_size": resumed.world_size}}),
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
            **({} if budget is None else {"memory": budget.report()}),
        },
        steps=run.records,
        evaluations=run.evaluations,
        evaluation=evaluation,
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


def new_run_dir(config: Config, now: float | None = None) -> Path:
    """`runs/<name>-<date>-<time>`, the default run folder."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path("runs") / f"{config.name}-{stamp}"
