"""Which plan each step runs under: one given beforehand, one searched at the start, or one that a controller changes.

Rank 0 thinks and hands out what it decided, so all ranks do the same. Not here: the search and the rule
(`scheduler/`), what is measured (`monitor/`), and how a step runs under a plan (`train.py`, `parallel/`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from gtx.batches import BatchPlanner
from gtx.budget import with_footprints
from gtx.calibrate import calibrate, probe_links
from gtx.config import Config
from gtx.fit import Fit, Observation, fit, observe, with_held_out
from gtx.parallel.world import World
from gtx.partition import PartitionedGraph
from gtx.session import Say
from gtx.workload import count_workload
from monitor import StepRecord, Window, reduce_window
from scheduler.controller import Controller, Rules
from scheduler.cost import Engine, Estimate, estimate, optimizer_s, reduction_s, state_bytes
from scheduler.plan import CHECKPOINTING, Plan, from_dict
from scheduler.plan import from_json as plan_from_json
from scheduler.remedies import explain_nothing_fits, remedies
from scheduler.search import Found, Limits, family_of, greedy_family, search
from scheduler.topology import FREE, Topology, topology_from_json
from scheduler.workload import ModelShape, Workload


class Pilot:
    """Keeps the plan it was given. What a run asks after every step; `Scheduled` changes its mind."""

    def __init__(self, plan: Plan, setting: str, first_step: int = 0):
        self.plan, self.setting, self.first_step = plan, setting, first_step
        self.history: list[tuple[int, Plan]] = [(first_step, plan)]
        self.spent_s = {"monitor": 0.0, "controller": 0.0, "start": 0.0}

    def after_step(self, step: int, records: Sequence[StepRecord], steps_left: int) -> Plan | None:
        """The plan to switch to before the next step, or None to stay. The same on every rank; a collective."""
        return None

    def switched(self, step: int, seconds: float, sent_bytes: int) -> None:
        """Tell what the switch before step `step` cost."""

    def report(self) -> dict[str, Any]:
        """The block `scheduler` of the strategy report. On rank 0."""
        return {
            "setting": self.setting,
            "topology": None,
            "calibration": None,
            "candidates": [],
            "probes": [],
            "watch": None,
            "windows": [],
            "decisions": [],
            "switches": [],
            "spent_s": self.spent_s,
            "regret": None,
        }


@dataclass
class _Thoughts:
    """What only rank 0 knows."""

    workload: Workload
    topology: Topology
    found: Found
    search_s: float  # of the first search
    observations: list[Observation] = field(default_factory=list)
    fitted: Fit | None = None
    controller: Controller | None = None
    watch: dict[str, Any] | None = None  # how the controller began
    seen: list[dict[str, Any]] = field(default_factory=list)
    switches: list[dict[str, Any]] = field(default_factory=list)


class Scheduled(Pilot):
    """Searches a plan, tries the best few in the first steps, and, if adaptive, watches."""

    def __init__(
        self,
        config: Config,
        world: World,
        graph: PartitionedGraph,
        batches: BatchPlanner,
        shape: ModelShape,
        num_steps: int,
        say: Say,
        first_step: int = 0,
    ):
        """num_steps: that are left from `first_step` on.

        Raises ValueError on every rank, with remedies, if no plan fits. A collective.

        A plan file is where an adaptive run starts: nothing is tried, and its first window gives the rates.
        """
        began = time.perf_counter()
        self.config, self.world, self.say = config, world, say
        self.limits = limits_of(config)
        topology = the_topology(config, world, shape, graph)
        self._mind: _Thoughts | None = None
        answer: tuple[Config, list[dict[str, Any]]] | str | None = None
        if world.rank == 0:
            try:
                workload = count_workload(graph, batches.step(0), shape)
                workload = with_footprints(config, workload, topology.smallest_memory, world.size)
                config = pick_engine(config, workload, topology)
                self.engine = engine_of(config)
                searching = time.perf_counter()
                found = find_plan(config, workload, topology, self.engine, self.limits)
                self._mind = _Thoughts(workload, topology, found, time.perf_counter() - searching)
                given = config.plan.file
                start = self._shortlist(found, num_steps)
                if given is not None:
                    start = [given_plan(given, config, graph, world.size)]
                answer = (config, [plan.as_dict() for plan in start])
            except ValueError as error:
                answer = str(error)
        answer = world.gather_facts(answer)[0]
        if isinstance(answer, str):
            raise ValueError(answer)
        assert answer is not None
        self.config, queue = answer  # with the engine that was picked
        self.engine = engine_of(self.config)
        self._queue = [from_dict(data) for data in queue]
        super().__init__(self._queue[0], config.plan.mode, first_step)
        tries = config.scheduler.probe_steps > 0 and self._long_enough(num_steps) and config.plan.file is None
        self._probing = len(self._queue) > 1 or tries
        self._extra = True  # one plan more may be tried once rates are fitted
        self._steps: list[Sequence[StepRecord]] = []
        self._window_before: Window | None = None
        self._fresh = True  # the first step under a plan pays for compiling and allocations
        self._compile_s = 1.0  # of the first step
        self.spent_s["start"] = time.perf_counter() - began

    # The start --------------------------------------------------------------------------------------------------------

    def _long_enough(self, num_steps: int) -> bool:
        settings = self.config.scheduler
        return num_steps >= 2 * settings.probe_plans * (settings.probe_steps + 1)

    def _shortlist(self, found: Found, num_steps: int) -> list[Plan]:
        """The plans to try, the most promising first."""
        settings = self.config.scheduler
        best = found.plan
        rated = sorted(
            (
                (candidate.estimate.step_s, i, candidate.plan)
                for i, candidate in enumerate(found.candidates)
                if candidate.plan is not None and candidate.estimate is not None and candidate.estimate.fits
            ),
            key=lambda entry: entry[:2],
        )
        if settings.setting == "greedy" or settings.probe_steps == 0 or not self._long_enough(num_steps):
            return [best]
        if settings.setting == "oracle":
            return [plan for _, _, plan in rated]
        return [plan for seconds, _, plan in rated if seconds <= 2.0 * rated[0][0]][: settings.probe_plans]

    def _watch(self, mind: _Thoughts, steps: Sequence[Sequence[StepRecord]]) -> Controller:
        """The controller of the plan that was chosen; a switch is priced at what the start and the probes took.

        Where no plan was tried, the first window gives the rates.
        """
        if mind.fitted is None:
            mind.topology = fit(mind.workload, mind.topology, self.engine, [observe(self.plan, steps)]).topology
        mind.watch = {
            "plan": self.plan.fingerprint,
            "switch_cost_s": median([self._compile_s, *(switch["seconds"] for switch in mind.switches)]),
            "search_cost_s": mind.search_s,
            "tried": mind.fitted is not None,
        }
        topology = mind.fitted.topology if mind.fitted else mind.topology
        return watching(self.config, mind.workload, topology, self.plan, mind.watch)

    # While it runs ----------------------------------------------------------------------------------------------------

    def after_step(self, step: int, records: Sequence[StepRecord], steps_left: int) -> Plan | None:
        if not self._probing and self.config.plan.mode != "adaptive":
            return None
        if self._fresh:
            self._fresh = False
            if step == self.first_step:
                self._compile_s = max(record.phases.get("compiling", 0.0) for record in records)
            return None
        self._steps.append(records)
        wanted = self.config.scheduler.probe_steps if self._probing else self.config.scheduler.window
        if len(self._steps) < wanted or steps_left == 0:
            return None
        steps, self._steps = self._steps, []
        began = time.perf_counter()
        plan = self._after_probe(steps) if self._probing else self._after_window(steps, steps_left)
        self.spent_s["controller"] += time.perf_counter() - began
        if plan is None or plan == self.plan:
            return None
        self.plan = plan
        self.history.append((step + 1, plan))
        self._fresh, self._window_before = True, None
        return plan

    def _after_probe(self, steps: Sequence[Sequence[StepRecord]]) -> Plan | None:
        """Note what a tried plan took; the next one to try, or the fastest of all."""
        answer: dict[str, Any] | None = None
        self._queue.pop(0)
        if self._mind is not None:
            mind = self._mind
            mind.observations.append(observe(self.plan, steps))
            if not self._queue:
                answer = self._choose(mind)
        if self._queue:
            return self._queue[0]
        answer = self.world.gather_facts(answer)[0]
        assert answer is not None
        plan = from_dict(answer["plan"])
        if answer["try"]:
            self._queue, self._extra = [plan], False
            return plan
        self._probing = False
        self.say(f"plan {plan.fingerprint} ({family_of(plan)}) chosen: {answer['why']}")
        return plan

    def _choose(self, mind: _Thoughts) -> dict[str, Any]:
        """After the last probe: fit, search once more, and keep the fastest that was measured."""
        mind.fitted = fit(mind.workload, mind.topology, self.engine, mind.observations)
        best = min(mind.observations, key=lambda o: o.step_s)
        if self._extra and self.config.scheduler.setting == "cost_model":
            mind.found = find_plan(self.config, mind.workload, mind.fitted.topology, self.engine, self.limits)
            again = mind.found.plan
            tried = {o.plan for o in mind.observations}
            expected = estimate(again, mind.workload, mind.fitted.topology, self.engine).step_s
            known = estimate(best.plan, mind.workload, mind.fitted.topology, self.engine).step_s
            if again not in tried and expected < 0.95 * known:
                return {"plan": again.as_dict(), "try": True, "why": ""}
        times = ", ".join(f"{family_of(o.plan)} {o.step_s * 1e3:.1f}" for o in mind.observations)
        why = f"fastest of {len(mind.observations)} tried (ms a step: {times})"
        return {"plan": best.plan.as_dict(), "try": False, "why": why}

    def _after_window(self, steps: Sequence[Sequence[StepRecord]], steps_left: int) -> Plan | None:
        window = reduce_window(steps, self._window_before)
        self._window_before = window
        mind = self._mind
        wants = None
        if mind is not None:
            mind.controller = mind.controller or self._watch(mind, steps)
            wants = mind.controller.wants_links(window)
        if self.world.gather_facts(wants)[0]:
            window = replace(window, links=probe_links(self.world))
        answer: dict[str, Any] | None = None
        if mind is not None:
            assert mind.controller is not None
            decision = mind.controller.observe(window, steps_left)
            mind.seen.append({"window": window.as_dict(), "steps_left": steps_left, "switch_s": None})
            if decision.verdict in ("switch", "return"):
                answer = {"plan": mind.controller.plan.as_dict(), "rule": decision.rule}
        answer = self.world.gather_facts(answer)[0]
        if answer is None:
            return None
        plan = from_dict(answer["plan"])
        self.say(f"step {window.last_step}: plan {plan.fingerprint} ({family_of(plan)}): {answer['rule']}")
        return plan

    def switched(self, step: int, seconds: float, sent_bytes: int) -> None:
        if self._mind is None:
            return
        mind = self._mind
        fingerprint = self.plan.fingerprint
        mind.switches.append({"step": step, "plan": fingerprint, "seconds": seconds, "sent_bytes": sent_bytes})
        if mind.controller is not None and mind.seen:
            mind.controller.switched(seconds)
            mind.seen[-1]["switch_s"] = seconds

    # Afterwards -------------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        base = super().report()
        mind = self._mind
        if mind is None:
            return base
        fitted = mind.fitted and with_held_out(mind.fitted, mind.workload, mind.topology, self.engine)
        base["topology"] = asdict(fitted.topology if fitted else mind.topology)
        base["calibration"] = fitted.as_dict() if fitted else None
        base["candidates"] = [
            {
                "family": c.family,
                "fingerprint": c.plan.fingerprint if c.plan else None,
                "predicted": None if c.estimate is None else estimate_facts(c.estimate),
                "verdict": c.verdict,
                "reason": c.reason,
            }
            for c in mind.found.candidates
        ]
        if fitted is not None:
            held_out = fitted.held_out or (None,) * len(fitted.seen)
            base["probes"] = [
                {
                    "plan": o.plan.fingerprint,
                    "family": family_of(o.plan),
                    "measured_s": o.step_s,
                    "predicted_s": predicted.step_s,
                    "held_out_s": unseen and unseen.step_s,
                    "measured_memory_bytes": max(o.peak_memory_bytes),
                    "predicted_memory_bytes": predicted.memory_bytes,
                    "held_out_memory_bytes": unseen and unseen.memory_bytes,
                }
                for o, predicted, unseen in zip(fitted.seen, fitted.fitted, held_out, strict=True)
            ]
        if mind.controller is not None:
            base["watch"] = mind.watch
            base["windows"] = mind.seen
            base["decisions"] = [d.as_dict() for d in mind.controller.decisions]
        base["switches"] = mind.switches
        base["regret"] = regret(mind)
        return base


def regret(mind: _Thoughts) -> dict[str, Any] | None:
    """How much slower the plan kept was than the fastest one measured in this run, in hindsight."""
    known: dict[str, list[float]] = {}
    for o in mind.observations:
        known.setdefault(o.plan.fingerprint, []).append(o.step_s)
    for entry in mind.seen:
        known.setdefault(entry["window"]["plan_fingerprint"], []).append(entry["window"]["step_s"])
    if len(known) < 2:
        return None
    times = {plan: min(values) for plan, values in known.items()}
    best = min(times, key=lambda plan: times[plan])
    last = (
        mind.seen[-1]["window"]["plan_fingerprint"]
        if mind.seen
        else min(mind.observations, key=lambda o: o.step_s).plan.fingerprint
    )
    now = known[last][-1]
    return {"best_plan": best, "best_s": times[best], "kept_plan": last, "kept_s": now, "share": now / times[best] - 1}


# From the config ------------------------------------------------------------------------------------------------------


def engine_of(config: Config) -> Engine:
    """What of the engine the cost model knows. Of a config that says which it is."""
    stage = config.engine.zero_stage
    if stage == "auto":
        raise ValueError("engine.zero_stage is auto; pick_engine says which")
    return Engine(stage, config.engine.offload_optimizer == "cpu")


def pick_engine(config: Config, workload: Workload, topology: Topology) -> Config:
    """The config with the ZeRO stage and offload that cost least of those under which a plan fits, where it says auto.

    A running engine cannot change them, so they are picked once. Offload counts only where there is a host behind the
    device: on CPU ranks it frees nothing. If nothing fits, the one that holds least.
    """
    engine = config.engine
    stages = (0, 1, 2, 3) if engine.zero_stage == "auto" else (engine.zero_stage,)
    behind = topology.host_bytes_per_s < FREE
    offloads = {"auto": (False, True) if behind else (False,), "cpu": (True,), "none": (False,)}[
        engine.offload_optimizer
    ]
    options = [Engine(stage, offload) for stage in stages for offload in offloads if stage > 0 or not offload]
    limits, parameters = limits_of(config), workload.model.parameters

    def cost(option: Engine) -> float:
        return optimizer_s(parameters, topology, option) + reduction_s(parameters, topology, option.zero_stage, 1)

    ranked = sorted(options, key=lambda option: (cost(option), option.zero_stage, option.offload))
    fitting = (option for option in ranked if search(workload, topology, option, limits, budget=0).chosen is not None)
    least = min(options, key=lambda o: state_bytes(parameters, o.zero_stage, topology.world_size, o.offload))
    picked = ranked[0] if len(ranked) == 1 else next(fitting, least)
    changes = {"zero_stage": picked.zero_stage, "offload_optimizer": "cpu" if picked.offload else "none"}
    return config.model_copy(update={"engine": engine.model_copy(update=changes)})


def limits_of(config: Config) -> Limits:
    """What the user rules out."""
    plan = config.plan
    first = CHECKPOINTING.index(plan.checkpointing)
    return Limits(
        allow=plan.allow,
        pin=plan.pin or None,
        memory_bytes=None if plan.memory_limit_gib is None else plan.memory_limit_gib * 2**30,
        checkpointing=CHECKPOINTING[first:],
        groups=plan.groups,
        fixed_waves=None
        if plan.micro_batches_per_wave is None
        else (plan.micro_batches_per_wave, plan.waves_per_round),
    )


def rules_of(config: Config) -> Rules:
    """The thresholds of the switch rule."""
    settings = config.scheduler
    return Rules(**{f.name: getattr(settings, f.name) for f in fields(Rules)})


def watching(
    config: Config, workload: Workload, topology: Topology, plan: Plan, costs: Mapping[str, Any]
) -> Controller:
    """The controller of a plan that begins to be watched. costs: `switch_cost_s`, `search_cost_s` and `tried`."""
    limits = limits_of(config)
    if not config.scheduler.modes:
        limits = replace(limits, allow=tuple(dict.fromkeys(place.mode for place in plan.partitions)))
    return Controller(
        rules_of(config),
        workload,
        topology,
        plan,
        engine_of(config),
        limits,
        switch_cost_s=costs["switch_cost_s"],
        search_cost_s=costs["search_cost_s"],
        tried=costs.get("tried", False),
        without=config.scheduler.without,
    )


def the_topology(config: Config, world: World, shape: ModelShape, graph: PartitionedGraph) -> Topology:
    """The machine: from the file that the config names, else measured now. A collective."""
    if config.plan.topology is not None:
        return read_topology(config.plan.topology, world.size, "plan.topology")
    rows = graph.graph.num_nodes // world.size
    return calibrate(config, world, shape, "at the start of a run", rows)


def read_plan(path: Path) -> Plan:
    """Read a plan file. Raises ValueError with one line naming the file."""
    try:
        return plan_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read plan.file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"plan.file {path}: {error}") from None


def given_plan(path: Path, config: Config, graph: PartitionedGraph, world_size: int) -> Plan:
    """The plan file of a run. Raises ValueError with one line that names the file if it does not suit the run."""
    made = read_plan(path)
    if made.world_size != world_size:
        raise ValueError(f"plan.file {path} is for {made.world_size} ranks, {world_size} were launched; launch as many")
    if made.num_layers != config.model.layers:
        raise ValueError(
            f"plan.file {path} has {made.num_layers} layers, model.layers is {config.model.layers}; make them equal"
        )
    if made.num_partitions != graph.num_parts:
        raise ValueError(
            f"plan.file {path} places {made.num_partitions} partitions, partition.parts is {graph.num_parts}; "
            "make them equal"
        )
    return made


def read_topology(path: Path, world_size: int, key: str = "--topology") -> Topology:
    """A topology file for a number of ranks: as it is, or as many devices like its first one."""
    try:
        topology = topology_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {key} {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{key} {path}: {error}") from None
    return topology if topology.world_size == world_size else topology.resized(world_size)


def find_plan(config: Config, workload: Workload, topology: Topology, engine: Engine, limits: Limits) -> Found:
    """Search as the config says. Raises ValueError with remedies if nothing fits."""
    without = config.scheduler.without
    if config.scheduler.setting == "greedy":
        limits = replace(limits, allow=(greedy_family(workload, topology, limits),))
        found = search(workload, topology, engine, limits, budget=0, without=without)
    else:
        found = search(workload, topology, engine, limits, without=without)
    if found.chosen is None:
        raise ValueError(explain_nothing_fits(found, remedies(workload, topology, engine, limits, found)))
    return found


def estimate_facts(cost: Estimate) -> dict[str, Any]:
    """An estimate for the report: the step, and the largest of all ranks by kind."""
    return {
        "step_s": cost.step_s,
        "rowwise_s": max(cost.rowwise_s),
        "edgewise_s": max(cost.edgewise_s),
        "visits_s": max(cost.visits_s),
        "packing_s": max(cost.packing_s),
        "wait_s": max(cost.wait_s),
        "reduction_s": cost.reduction_s,
        "optimizer_s": cost.optimizer_s,
        "sent_bytes": sum(cost.sent_bytes),
        "memory_bytes": max(cost.memory_bytes),
    }
