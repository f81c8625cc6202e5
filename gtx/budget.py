"""Whether a step under a fixed plan fits into memory: predicted before anything is written, with what would fit if not.

Plans that the scheduler makes are held to the same limit while they are searched (`adapt.py`). Not here: what a plan
takes (`scheduler/cost.py`), what a layer takes (`footprint.py`), and what was taken (`monitor/`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gtx.batches import BatchPlanner
from gtx.calibrate import memory_of_rank
from gtx.config import Config
from gtx.footprint import measure_footprints
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph
from gtx.workload import count_workload
from monitor import current_memory_bytes
from scheduler.cost import round_bytes, state_bytes
from scheduler.placing import place
from scheduler.plan import CHECKPOINTING, Checkpointing, Plan, fixed_plan
from scheduler.search import size_text
from scheduler.workload import ModelShape, Workload

MATTERS = 0.01  # share of the limit above which a model's own footprint is worth measuring
# Resident bytes over live ones on a CPU: glibc keeps freed tensors below 32 MiB, unless it is told to give them back
# from some size on (docs/benchmarks/peak_memory.md).
KEEPS, GIVES_BACK = 2.0, 1.15
MALLOC = ("MALLOC_MMAP_THRESHOLD_", 4194304)


@dataclass(frozen=True)
class Budget:
    """Bytes of each rank: what is there before the first step, what weights, gradients and optimizer add, activations.

    limit: of one rank. why: where the limit comes from. measured: whether activations were counted in steps of the
    model, not by a formula.
    """

    resident: tuple[float, ...]
    states: float
    activations: tuple[float, ...]
    limit: float
    why: str
    measured: bool

    @property
    def peaks(self) -> tuple[float, ...]:
        return tuple(r + self.states + a for r, a in zip(self.resident, self.activations, strict=True))

    def report(self) -> dict[str, Any]:
        """For the strategy report, in bytes."""
        return {
            "limit_bytes": round(self.limit),
            "predicted_bytes": [round(peak) for peak in self.peaks],
            "resident_bytes": [round(value) for value in self.resident],
            "states_bytes": round(self.states),
            "activations": "counted in steps of the model" if self.measured else "formula",
        }


def with_footprints(
    config: Config, workload: Workload, limit: float, world_size: int, kinds: Sequence[Checkpointing] = CHECKPOINTING
) -> Workload:
    """The workload with what the model's own layers hold, if activations may come near `limit` bytes a rank.

    Measuring takes about half a second a kind of checkpointing; where a formula says that a step takes less than a
    hundredth of the limit, the formula is kept.
    """
    shape = workload.model
    plan = fixed_plan("graph", workload.work, world_size, shape.layers)
    if round_bytes(plan, workload, place(plan, workload)).max() < MATTERS * limit:
        return workload
    backend = "cpu" if config.model.backend in ("auto", "cpu") else "torch"
    made = measure_footprints(
        config.model,
        shape.num_features,
        shape.num_classes,
        precision=config.engine.precision if config.engine.device == "cuda" else _on_cpu(config.engine.precision),
        backend=backend,
        kinds=kinds,
    )
    return replace(workload, model=replace(shape, footprints=made))


def _on_cpu(precision: str) -> str:
    return "bf16" if precision == "fp16" else precision  # as many bytes, and products that a CPU has


def predict(
    config: Config, world: World, graph: PartitionedGraph, batches: BatchPlanner, shape: ModelShape, plan: Plan
) -> Budget:
    """What a step under `plan` takes on each rank, once engine and graph are there. A collective.

    Raises ValueError with one line, on every rank, if it is more than the limit: which rank needs what, and the
    smallest changes after which it would fit.
    """
    limit, why = limit_of(config, world)
    resident = [float(b) for b in world.gather_facts(current_memory_bytes(str(world.device)) or 0)]
    found: Budget | str = ""
    if world.rank == 0:
        slack = cpu_slack() if world.device.type == "cpu" else 1.0
        try:
            workload = count_workload(graph, batches.step(0), shape)
            workload = with_footprints(config, workload, limit, world.size, (plan.checkpointing,))
            # A rank's first steps load code; those that were just counted have done so here.
            loaded = max((current_memory_bytes(str(world.device)) or 0) - resident[0], 0.0)
            resident = [b + loaded for b in resident]
            found = check(config, workload, plan, resident, limit, why, slack)
        except ValueError as error:
            found = str(error)
    found = world.from_first(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def cpu_slack() -> float:
    """What steps of this process take of the host's memory over the bytes of tensors alive."""
    threshold = os.environ.get(MALLOC[0], "")
    return GIVES_BACK if threshold.isdigit() and int(threshold) <= MALLOC[1] else KEEPS


def limit_of(config: Config, world: World) -> tuple[float, str]:
    """Bytes that a rank may use, and in words where that comes from."""
    has, why = memory_of_rank(world), "the device's memory"
    if world.device.type == "cpu":
        why = "a rank's share of the host's memory"
    asked = config.plan.memory_limit_gib
    return (has, why) if asked is None or asked * 2**30 > has else (asked * 2**30, "plan.memory_limit_gib")


def check(
    config: Config,
    workload: Workload,
    plan: Plan,
    resident: Sequence[float],
    limit: float,
    why: str,
    slack: float = 1.0,
) -> Budget:
    """The budget of a plan, from what is resident on each rank. slack: of activations, as `cpu_slack` on a CPU.

    Raises ValueError with one line if the fullest rank needs more than `limit`.
    """
    budget = Budget(
        tuple(resident),
        _states(config, workload, plan.world_size),
        tuple(slack * round_bytes(plan, workload, place(plan, workload))),
        limit,
        why,
        workload.model.footprint(plan.checkpointing) is not None,
    )
    rank = int(np.argmax(budget.peaks))
    if budget.peaks[rank] <= limit:
        return budget
    helps = _smaller(config, workload, plan, max(resident), limit, slack)
    numbered = "; ".join(f"{i}. {text}" for i, text in enumerate(helps, 1))
    raise ValueError(
        f"a step does not fit: rank {rank} of {plan.world_size} would need {size_text(budget.peaks[rank])} "
        f"({size_text(budget.resident[rank])} are in use, weights and optimizer add {size_text(budget.states)}, "
        f"activations {size_text(budget.activations[rank])}), the limit is {size_text(limit)} ({why}); "
        f"what would fit: {numbered}"
    )


def _states(config: Config, workload: Workload, world_size: int, **changes: Any) -> float:
    """Bytes that weights, gradients and moments add to an engine that was just made."""
    engine = config.engine.model_copy(update=changes)
    stage = engine.zero_stage if engine.name == "deepspeed" and isinstance(engine.zero_stage, int) else 0
    whole = state_bytes(workload.model.parameters, stage, world_size, engine.offload_optimizer == "cpu")
    there = 4.0 * workload.model.parameters  # the weights; from stage 1 on DeepSpeed has made the moments as well
    return max(whole - there, 0.0) if stage == 0 else min(whole, there)


def _smaller(
    config: Config, workload: Workload, plan: Plan, resident: float, limit: float, slack: float
) -> tuple[str, ...]:
    """Changes after which the step fits, the smallest first, each with the bytes that it leaves a rank with."""
    workload = with_footprints(config, workload, 0.0, plan.world_size)
    found = []

    def peak(tried: Plan, of: Workload = workload, slack: float = slack, **engine: Any) -> float:
        states = _states(config, of, tried.world_size, **engine)
        return resident + states + slack * float(round_bytes(tried, of, place(tried, of)).max())

    def offer(text: str, needs: float) -> bool:
        if needs <= limit:
            found.append(f"{text} ({size_text(needs)})")
        return needs <= limit

    if slack > GIVES_BACK:
        name, size = MALLOC
        offer(f"{name}={size} in the environment, for steps a tenth slower", peak(plan, slack=GIVES_BACK))
    further = CHECKPOINTING[CHECKPOINTING.index(plan.checkpointing) + 1 :]
    any(offer(f"plan.checkpointing={kind}", peak(replace(plan, checkpointing=kind))) for kind in further)
    one = replace(plan, micro_batches_per_wave=1, waves_per_round=1)
    keys = "plan.micro_batches_per_wave=1 plan.waves_per_round=1"
    if workload.num_micro_batches > 1:
        offer(keys, peak(one))
    if config.engine.name == "deepspeed" and isinstance(config.engine.zero_stage, int) and plan.world_size > 1:
        stages = range(config.engine.zero_stage + 1, 4)
        any(offer(f"engine.zero_stage={stage}", peak(plan, zero_stage=stage)) for stage in stages)
    if config.engine.name == "deepspeed" and config.engine.precision == "float32":
        prints = tuple(
            replace(f, **{name: getattr(f, name) / 2 for name in ("held_row", "held_edge", "live_row", "live_edge")})
            for f in workload.model.footprints
        )
        half = replace(workload, model=replace(workload.model, bytes_per_element=2, footprints=prints))
        offer("engine.precision=bf16", peak(plan, half))
    if config.plan.file is None and config.plan.mode != "auto" and config.plan.mode != "adaptive":
        for times in (2, 4, 8):
            size = times * plan.world_size
            larger = fixed_plan(
                config.plan.mode,
                workload.work,
                size,
                plan.num_layers,
                micro_batches_per_wave=config.plan.micro_batches_per_wave,
                waves_per_round=plan.waves_per_round,
                checkpointing=plan.checkpointing,
            )
            if offer(f"{size} ranks instead of {plan.world_size}, each with {size_text(limit)}", peak(larger)):
                break
    if found:
        return tuple(found)
    least = peak(replace(one, checkpointing="layer"))
    keys = "plan.checkpointing=layer" + f" {keys}" * (workload.num_micro_batches > 1)
    if offer(keys, least):
        return tuple(found)
    return (f"{keys} with a limit of {size_text(least)}", "batch.kind=cluster or neighbor, with smaller micro-batches")
