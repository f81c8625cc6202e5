"""The search: which plan would be fastest and fits, with the best of every family and why the others were left.

Families first (one mode for all partitions, dealt to ranks or groups by their work and by each device's speed), then a
local search from the best of them that moves single partitions and gives hubs to a group. Everything is deterministic
and counted in estimates, never in seconds, so that every machine finds the same plan. Not here: what a plan costs
(`cost.py`) and when a running job should change it (`controller.py`).

Legend: `K` partitions, `P` ranks, `L` layers, `M` micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler.cost import Engine, Estimate, estimate
from scheduler.dealing import assignments, layer_seconds, layer_split
from scheduler.placing import place
from scheduler.plan import (
    CHECKPOINTING,
    MODES,
    Checkpointing,
    Mode,
    Placement,
    Plan,
    deal,
    split_evenly,
)
from scheduler.topology import Topology
from scheduler.workload import Workload

Array = npt.NDArray[np.float64]

FAMILIES = (*MODES, "mixed")
VERDICTS = ("chosen", "slower", "too large", "not allowed", "no plan")


@dataclass(frozen=True)
class Limits:
    """What the user rules out.

    allow: modes that may be used. pin: partition -> mode it must have. memory_bytes: a tighter limit for every rank.
    margin: share of the memory to leave free. checkpointing: levels that may be used, in order of preference.
    groups: sizes of groups for model, pipeline and data parallelism; None for any divisor of the world size.
    fixed_waves: (micro-batches a wave, waves a round) that must stay; None where the search may choose them.
    """

    allow: tuple[Mode, ...] = MODES
    pin: Mapping[int, Mode] | None = None
    memory_bytes: float | None = None
    margin: float = 0.05
    checkpointing: tuple[Checkpointing, ...] = CHECKPOINTING
    groups: tuple[int, ...] | None = None
    fixed_waves: tuple[int, int] | None = None


@dataclass(frozen=True)
class Candidate:
    """The best plan of a family. verdict: of `VERDICTS`. reason: in words. plan, estimate: None where
    the family has no plan.
    """

    family: str
    plan: Plan | None
    estimate: Estimate | None
    verdict: str
    reason: str


@dataclass(frozen=True)
class Found:
    """What a search found. chosen: None if nothing fits. tried: plans priced."""

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    tried: int

    @property
    def plan(self) -> Plan:
        """The chosen plan. Raises ValueError if nothing fits."""
        if self.chosen is None or self.chosen.plan is None:
            raise ValueError(f"none of the {self.tried} plans that were tried fits")
        return self.chosen.plan


class Pricer:
    """Prices plans of one workload on one topology, each once."""

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        engine: Engine,
        limits: Limits,
        without: Collection[str] = (),
    ):
        self.workload, self.topology, self.engine, self.limits = workload, topology, engine, limits
        self.without = without
        self._known: dict[Plan, Estimate] = {}
        cap = [device.memory_bytes for device in topology.devices]
        if limits.memory_bytes is not None:
            cap = [min(c, limits.memory_bytes) for c in cap]
        self.cap = np.array(cap) * (1.0 - limits.margin)

    @cached_property
    def layer_seconds(self) -> Array:
        """Seconds of each layer on each device, `[L, P]`."""
        return layer_seconds(self.workload, self.topology)

    @property
    def tried(self) -> int:
        return len(self._known)

    def price(self, plan: Plan) -> Estimate:
        if plan not in self._known:
            found = estimate(plan, self.workload, self.topology, self.engine, without=self.without)
            self._known[plan] = replace(found, fits=bool((np.array(found.memory_bytes) <= self.cap).all()))
        return self._known[plan]

    def key(self, plan: Plan) -> tuple[bool, float, float]:
        """Smaller is better: what fits first, then the step, then the memory; what fits nowhere by its memory."""
        cost = self.price(plan)
        over = float((np.array(cost.memory_bytes) - self.cap).max())
        return (not cost.fits, cost.step_s if cost.fits else over, max(cost.memory_bytes))


def search(
    workload: Workload,
    topology: Topology,
    engine: Engine = Engine(),
    limits: Limits = Limits(),
    *,
    start: Plan | None = None,
    budget: int | None = None,
    without: Collection[str] = (),
) -> Found:
    """The fastest plan that fits, and the best of each family beside it.

    start: a plan to set out from besides, such as the running one. budget: plans that the local search may price; None:
    as many as suit the size of the problem.
    """
    pricer = Pricer(workload, topology, engine, limits, without)
    if budget is None:
        size = workload.num_partitions * topology.world_size * workload.num_micro_batches
        budget = int(max(min(400, 4800 / size), min(150, 3e6 / size)))
    best: dict[str, Plan] = {}
    ruled_out: dict[str, str] = {}
    for family in MODES:
        reason = _ruled_out(family, workload, topology, limits)
        if reason:
            ruled_out[family] = reason
            continue
        dealt = sorted(_family(family, pricer), key=pricer.key)
        plans = list(_with_waves(dealt[:2], pricer))
        best[family] = min(plans, key=pricer.key)
    ranked = sorted(best.values(), key=pricer.key)
    if limits.pin:
        ranked = sorted((_pinned(plan, limits.pin, best, ruled_out) for plan in ranked), key=pricer.key)
        other = [family for family, plan in best.items() if not _allowed(plan, limits)]
        ruled_out |= dict.fromkeys(other, "plan.pin asks for other modes too")
        best = {family: plan for family, plan in best.items() if family not in other}
    starts = ranked[:2] + ([start] if start is not None and _allowed(start, limits) else [])
    improved = [_improve(plan, pricer, budget // max(len(starts), 1)) for plan in starts]
    mixed = min([*improved, *ranked], key=pricer.key)
    name = family_of(mixed)
    if name not in best or pricer.key(mixed) < pricer.key(best[name]):
        best[name] = mixed
    if "mixed" not in best:
        ruled_out["mixed"] = (
            f"plan.allow leaves only {limits.allow[0]}"
            if len(limits.allow) == 1
            else "no exchange of single partitions beside a family made it faster"
        )
    return _verdicts(best, ruled_out, pricer)


def _verdicts(best: Mapping[str, Plan], ruled_out: Mapping[str, str], pricer: Pricer) -> Found:
    fitting = [plan for plan in best.values() if pricer.price(plan).fits]
    winner = min(fitting, key=pricer.key) if fitting else None
    candidates = []
    chosen = None
    for family in FAMILIES:
        if family not in best:
            forbidden = family in MODES and family not in pricer.limits.allow
            verdict = "not allowed" if forbidden else "no plan"
            candidates.append(Candidate(family, None, None, verdict, ruled_out[family]))
            continue
        plan = best[family]
        cost = pricer.price(plan)
        if plan is winner:
            verdict, reason = "chosen", _why_chosen(cost)
        elif not cost.fits:
            rank = int(np.argmax(np.array(cost.memory_bytes) - pricer.cap))
            verdict = "too large"
            needed, rounds = size_text(cost.memory_bytes[rank]), len(plan.rounds(_waves(plan, pricer)))
            reason = (
                f"needs {needed} on rank {rank}, {size_text(pricer.cap[rank])} may be used, even with checkpointing "
                f"{plan.checkpointing} and {rounds} round(s)"
            )
        else:
            assert winner is not None
            other = pricer.price(winner)
            verdict = "slower"
            reason = f"{cost.step_s / other.step_s - 1.0:.0%} slower: {_difference(cost, other)}"
        candidate = Candidate(family, plan, cost, verdict, reason)
        candidates.append(candidate)
        if plan is winner:
            chosen = candidate
    return Found(chosen, tuple(candidates), pricer.tried)


def _waves(plan: Plan, pricer: Pricer) -> int:
    return len(plan.waves(pricer.workload.num_micro_batches))


def _why_chosen(cost: Estimate) -> str:
    return f"the fastest that fits; {max(cost.wait_s) / max(cost.step_s, 1e-30):.0%} of it the longest wait"


def _difference(cost: Estimate, other: Estimate) -> str:
    """Which term sets a plan apart from the chosen one."""
    terms = {
        "the busiest rank computes": max(map(sum, zip(cost.rowwise_s, cost.edgewise_s, strict=True)))
        - max(map(sum, zip(other.rowwise_s, other.edgewise_s, strict=True))),
        "waits take": max(cost.wait_s) - max(other.wait_s),
        "packing takes": max(cost.packing_s) - max(other.packing_s),
        "visits to layers take": max(cost.visits_s) - max(other.visits_s),
        "gradients take": cost.reduction_s - other.reduction_s,
    }
    name = max(terms, key=lambda term: terms[term])
    return f"{name} {_seconds(max(terms[name], 0.0))} longer"


# Families -------------------------------------------------------------------------------------------------------------


def _ruled_out(family: Mode, workload: Workload, topology: Topology, limits: Limits) -> str | None:
    if family not in limits.allow:
        return f"plan.allow does not name it ({', '.join(limits.allow)})"
    if topology.world_size == 1 and family != "graph":
        return "one rank: the same as graph" if "graph" in limits.allow else None
    if family == "pipeline" and workload.model.layers == 1 and "graph" in limits.allow:
        return "one layer has no stages"
    return None


def _group_sizes(size: int, limits: Limits) -> list[int]:
    if limits.groups is not None:
        fitting = [g for g in limits.groups if size % g == 0]
        if not fitting:
            raise ValueError(
                f"plan.groups {list(limits.groups)} has no size that divides {size} ranks; name one that does, or null"
            )
        return fitting
    return [g for g in range(2, size + 1) if size % g == 0] or [1]


def _family(family: Mode, pricer: Pricer) -> Iterator[Plan]:
    """Plans that run every partition in one mode, for every size of group, with the waves that suit the mode."""
    workload, topology = pricer.workload, pricer.topology
    size, layers = topology.world_size, workload.model.layers
    level = pricer.limits.checkpointing[0]

    def plan(placements: Sequence[Placement], wave: int) -> Plan:
        fixed = pricer.limits.fixed_waves
        return Plan(size, layers, tuple(placements), *(fixed or (wave, 0)), checkpointing=level)

    if family == "graph":
        for homes in assignments(workload, topology, [(rank,) for rank in range(size)], pricer.without):
            yield plan([Placement("graph", (home,)) for home in homes], 0)
        return
    for group_size in _group_sizes(size, pricer.limits):
        groups = [tuple(range(g, g + group_size)) for g in range(0, size, group_size)]
        splits: list[tuple[int, ...]] = []
        if family == "pipeline":
            seconds = pricer.layer_seconds
            splits = [layer_split(seconds[:, list(group)]) for group in groups]
        for homes in assignments(workload, topology, groups, pricer.without):
            if family == "pipeline":
                yield plan([Placement("pipeline", groups[h], splits[h]) for h in homes], 1)
            else:
                yield plan([Placement(family, groups[h]) for h in homes], group_size if family == "data" else 0)


# Waves, rounds and checkpointing --------------------------------------------------------------------------------------


def _with_waves(plans: Sequence[Plan], pricer: Pricer) -> Iterator[Plan]:
    """Each plan with the layouts of waves that may pay; with less held at a time where it would not fit."""
    for plan in plans:
        laid_out = list(_layouts(plan, pricer))
        fitting = [p for p in laid_out if pricer.price(p).fits]
        yield from laid_out
        if fitting:
            continue
        base = min(laid_out, key=pricer.key)
        for checkpointing in pricer.limits.checkpointing:
            for layout in [base, *_smaller_rounds(base, pricer)]:
                yield replace(layout, checkpointing=checkpointing)


def _layouts(plan: Plan, pricer: Pricer) -> Iterator[Plan]:
    level = pricer.limits.checkpointing[0]
    plan = replace(plan, checkpointing=level)
    if pricer.limits.fixed_waves is not None:
        wave, rounds = pricer.limits.fixed_waves
        yield replace(plan, micro_batches_per_wave=wave, waves_per_round=rounds)
        return
    count = pricer.workload.num_micro_batches
    sizes = {0} | {s for s in _powers(count) if s < count}
    longest = max((len(place.ranks) for place in set(plan.partitions) if place.mode == "data"), default=0)
    if 0 < longest < count:
        sizes.add(longest)
    for size in sorted(sizes):
        yield replace(plan, micro_batches_per_wave=size)


def _smaller_rounds(plan: Plan, pricer: Pricer) -> Iterator[Plan]:
    if pricer.limits.fixed_waves is not None:
        return
    count = pricer.workload.num_micro_batches
    for size in sorted({plan.micro_batches_per_wave or count, *_powers(count)}, reverse=True):
        if size < count:
            waves = -(-count // size)
            for rounds in reversed([r for r in _powers(waves) if r < waves]):
                yield replace(plan, micro_batches_per_wave=size, waves_per_round=rounds)


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(max(limit, 1).bit_length()) if 1 << i <= limit]


# Local search ---------------------------------------------------------------------------------------------------------


def _improve(plan: Plan, pricer: Pricer, budget: int) -> Plan:
    """Hill climbing: hubs to groups, then partitions elsewhere, one at a time and, once that helps no more, two."""
    limit = pricer.tried + budget
    best = _hubs_to_groups(plan, pricer, limit)
    while True:
        better = next(
            (candidate for candidate in _neighbours(best, pricer, limit) if pricer.key(candidate) < pricer.key(best)),
            None,
        )
        if better is None:
            return best
        best = better


def _neighbours(plan: Plan, pricer: Pricer, limit: int) -> Iterator[Plan]:
    """Plans that differ in one partition, then those that differ in two, until `limit` plans are priced."""
    parts, options = _busiest_first(plan, pricer), _placements(plan, pricer)
    allowed = {p: [o for o in options if o != plan.partitions[p] and _may(p, o.mode, pricer.limits)] for p in parts}
    singles = ({p: option} for p in parts for option in allowed[p])
    pairs = (
        {p: one, q: other}
        for p, q in itertools.combinations(parts, 2)
        for one, other in itertools.product(allowed[p], allowed[q])
    )
    for change in itertools.chain(singles, pairs):
        if pricer.tried >= limit:
            return
        yield replace(plan, partitions=tuple(change.get(p, place) for p, place in enumerate(plan.partitions)))


def _busiest_first(plan: Plan, pricer: Pricer) -> list[int]:
    """Partitions, those of the rank that takes longest first and the heaviest of them before the others."""
    cost = pricer.price(plan)
    busy = np.array(cost.busy_s) + np.array(cost.packing_s)
    work = np.array(pricer.workload.work)
    load = np.array([max(busy[list(place.ranks)]) for place in plan.partitions])
    order = np.lexsort((-work, -load))
    return [int(p) for p in order]


def _placements(plan: Plan, pricer: Pricer) -> list[Placement]:
    """Where a partition could go: what the plan already does, the ranks that are least busy, and groups."""
    size, layers = plan.world_size, plan.num_layers
    limits = pricer.limits
    busy = np.array(pricer.price(plan).busy_s)
    options: dict[Placement, None] = {}
    if size <= 8:
        options.update(dict.fromkeys(plan.partitions))
    if "graph" in limits.allow:
        options.update(dict.fromkeys(Placement("graph", (int(r),)) for r in np.argsort(busy, kind="stable")[:8]))
    for group_size in _group_sizes(size, limits):
        if group_size == 1:
            continue
        starts = range(0, size, group_size)
        lightest = sorted(starts, key=lambda s: (float(busy[s : s + group_size].max()), s))[:2]
        for start in lightest:
            group = tuple(range(start, start + group_size))
            if "model" in limits.allow:
                options[Placement("model", group)] = None
            if "data" in limits.allow and pricer.workload.num_micro_batches > 1:
                options[Placement("data", group)] = None
                if group_size == 2:
                    options[Placement("data", group[::-1])] = None
            if "pipeline" in limits.allow and layers > 1:
                for split in _splits(layers, group_size):
                    options[Placement("pipeline", group, split)] = None
                    if group_size == 2:
                        options[Placement("pipeline", group[::-1], split)] = None
    return list(options)


def _splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every split into two stages; the even one beyond."""
    if stages == 2 and layers <= 8:
        return [(i, layers - i) for i in range(1, layers)]
    bounds = split_evenly(layers, stages)
    return [tuple(b - a for a, b in itertools.pairwise(bounds))]


def _hubs_to_groups(plan: Plan, pricer: Pricer, limit: int) -> Plan:
    """Give the heaviest partitions to a head-parallel group, more and more of them, while that pays."""
    size = plan.world_size
    if "model" not in pricer.limits.allow or size == 1:
        return plan
    order = np.argsort(-np.array(pricer.workload.work), kind="stable")
    best = plan
    for count in _powers(max(len(order) // 4, 1)):
        if pricer.tried >= limit:
            break
        for group_size in _group_sizes(size, pricer.limits)[-2:]:
            group = tuple(range(group_size))
            changed = list(plan.partitions)
            for part in order[:count]:
                if _may(int(part), "model", pricer.limits):
                    changed[part] = Placement("model", group)
            candidate = replace(plan, partitions=tuple(changed))
            if pricer.key(candidate) < pricer.key(best):
                best = candidate
    return best


# Constraints ----------------------------------------------------------------------------------------------------------


def _may(part: int, mode: Mode, limits: Limits) -> bool:
    return mode in limits.allow and (limits.pin or {}).get(part, mode) == mode


def _allowed(plan: Plan, limits: Limits) -> bool:
    return all(_may(p, place.mode, limits) for p, place in enumerate(plan.partitions))


def _pinned(plan: Plan, pin: Mapping[int, Mode], best: Mapping[str, Plan], ruled_out: Mapping[str, str]) -> Plan:
    """The plan with pinned partitions as the best plan of their mode places them."""
    changed = list(plan.partitions)
    for part, mode in pin.items():
        if not 0 <= part < len(changed):
            raise ValueError(f"plan.pin names partition {part}, there are {len(changed)} (0 to {len(changed) - 1})")
        if changed[part].mode != mode:
            if mode not in best:
                raise ValueError(
                    f"plan.pin puts partition {part} into mode {mode!r}, of which there is no plan: "
                    f"{ruled_out[mode]}; pin another mode"
                )
            changed[part] = best[mode].partitions[part]
    return replace(plan, partitions=tuple(changed))


def family_of(plan: Plan) -> str:
    """A plan's mode, or `mixed`."""
    modes = {place.mode for place in plan.partitions}
    return modes.pop() if len(modes) == 1 else "mixed"


# Without a search ---------------------------------------------------------------------------------------------------


def greedy_family(workload: Workload, topology: Topology, limits: Limits) -> Mode:
    """The mode that the crossovers of one layer prefer, for ablations: no search, no rates but the halo.

    `data` where there are at least as many micro-batches as ranks; else `graph` iff `rho < 2 (P - 1) / P`, rho the halo
    rows over the rows; else `model`, or `pipeline` where more layers than ranks and several micro-batches suggest it.
    """
    size, model = topology.world_size, workload.model
    order: list[Mode] = []
    if workload.num_micro_batches >= size > 1:
        order.append("data")
    homes = deal(list(workload.work), size)
    plan = Plan(size, model.layers, tuple(Placement("graph", (home,)) for home in homes))
    loads = place(plan, workload)
    halo = float(loads.halo_rows.sum()) / max(float(loads.src_rows.sum()), 1e-300)
    order.append("graph" if halo < 2.0 * (size - 1) / size else "model")
    order += ["pipeline", "model", "graph", "data"] if workload.num_micro_batches > 1 else ["model", "graph"]
    return next((mode for mode in order if mode in limits.allow), limits.allow[0])


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
