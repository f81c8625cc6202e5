"""The search: which plan would be fastest and fits, with the best of every family and why the others were left.

Families first (one mode for all partitions, dealt to ranks or groups by their work and by each device's speed), then a
local search from the best of them that moves single partitions and gives hubs to a group. Everything is deterministic
and counted in estimates, never in seconds, so that every machine finds the same plan. Not here: what a plan costs
(`cost.py`) and when a running job should change it (`controller.py`).

Legend: `K` partitions, `P` ranks, `L` layers, `M` micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler.cost import Engine, Estimate, estimate, work_of
from scheduler.placing import Loads, place
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


@dataclass(frozen=True)
class Limits:
    """What the user rules out.

    allow: modes that may be used. pin: partition -> mode it must have. memory_bytes: a tighter limit for every rank.
    margin: share of the memory to leave free. checkpointing: levels that may be used, in order of preference.
    groups: sizes of groups for model, pipeline and data parallelism; None for any divisor of the world size.
    waves: whether waves and rounds may be changed; else the `fixed_waves` (micro-batches a wave, waves a round) stay.
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
    """The best plan of a family. verdict: `chosen`, `slower`, `too large`, `not allowed`; reason: in words."""

    family: str
    plan: Plan | None
    estimate: Estimate | None
    verdict: str
    reason: str


@dataclass(frozen=True)
class Found:
    """What a search found. chosen: None if nothing fits. tried: plans priced. engine: what was chosen of it."""

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    tried: int
    engine: Engine
    remedies: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The chosen plan. Raises ValueError with the remedies if nothing fits."""
        if self.chosen is None or self.chosen.plan is None:
            raise ValueError(explain_nothing_fits(self))
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
        return _layer_seconds(self.workload, self.topology)

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
    engine: Engine = Engine(),  # noqa: B008
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
        budget = int(min(150, 3e6 / (workload.num_partitions * topology.world_size * workload.num_micro_batches)))
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
        ranked = [_pinned(plan, limits.pin, best) for plan in ranked]
        best = {}
        ranked.sort(key=pricer.key)
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
            candidates.append(Candidate(family, None, None, "not allowed", ruled_out.get(family, "not asked for")))
            continue
        plan = best[family]
        cost = pricer.price(plan)
        if plan is winner:
            verdict, reason = "chosen", _why_chosen(cost)
        elif not cost.fits:
            rank = int(np.argmax(np.array(cost.memory_bytes) - pricer.cap))
            verdict = "too large"
            reason = (
                f"needs {_size(cost.memory_bytes[rank])} on rank {rank}, {_size(pricer.cap[rank])} may be used, even "
                f"with checkpointing {plan.checkpointing} and {len(plan.rounds(_waves(plan, pricer)))} round(s)"
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
    return Found(chosen, tuple(candidates), pricer.tried, pricer.engine)


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
        return [g for g in limits.groups if size % g == 0]
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


def layer_split(seconds: Array) -> tuple[int, ...]:
    """Layers a stage so that the slowest stage is fastest. Exact, by dynamic programming over (stage, first layer).

    seconds: of each layer on each device of the group, `[L, G]`.
    """
    cost, layers, group = seconds, len(seconds), range(seconds.shape[1])
    total = np.vstack([np.zeros((1, len(group))), np.cumsum(cost, axis=0)])
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] * (layers + 1) for _ in range(len(group) + 1)]
    best[0] = [(0.0 if end == 0 else np.inf, 0) for end in range(layers + 1)]
    for stage in range(len(group)):
        for end in range(layers + 1):
            options = [
                (max(best[stage][begin][0], float(total[end, stage] - total[begin, stage])), begin)
                for begin in range(end + 1)
            ]
            # Of equals the one that spreads the layers, so that fewer rows wait at one rank.
            best[stage + 1][end] = min(options, key=lambda o: (round(o[0], 12), abs(end - o[1] - layers / len(group))))
    split: list[int] = []
    end = layers
    for stage in reversed(range(len(group))):
        begin = best[stage + 1][end][1]
        split.insert(0, end - begin)
        end = begin
    return tuple(split)


def _layer_seconds(workload: Workload, topology: Topology) -> Array:
    """Forward and backward seconds of each layer on each device, `[L, P]`, of an average micro-batch."""
    size, layers = topology.world_size, workload.model.layers
    whole = place(Plan(1, layers, (Placement("graph", (0,)),) * workload.num_partitions), workload)
    work = work_of(whole, workload.model)
    speeds = topology.rates
    flops = (work.before_flops + work.after_flops).sum(axis=(0, 2))[:, None]
    rows = work.row_bytes.sum(axis=(0, 2))[:, None]
    edges = work.edge_bytes.sum(axis=(0, 2))[:, None]
    seconds = (flops / speeds.row_flops_per_s + rows / speeds.row_bytes_per_s) * (1.0 + speeds.row_backward)
    seconds = seconds + edges / speeds.edge_bytes_per_s * (1.0 + speeds.edge_backward) + np.zeros((layers, size))
    return np.asarray(seconds)


def _part_seconds(workload: Workload, topology: Topology, without: Collection[str] = ()) -> Array:
    """Seconds of each partition's own work of a step on each device, forward and backward, `[K, P]`."""
    model, speeds = workload.model, topology.rates
    parts = workload.num_partitions
    flops, rows, edges = np.zeros(parts), np.zeros(parts), np.zeros(parts)
    # A made-up machine of one rank per partition has each partition's work as its loads.
    apart = Plan(parts, model.layers, tuple(Placement("graph", (p,)) for p in range(parts)))
    for layers in workload.micro_batches:
        single = replace(workload, micro_batches=(layers,), repeats=True)
        work = work_of(_own_work(apart, single), model)
        flops += (work.before_flops + work.after_flops).sum(axis=(0, 1))
        rows += work.row_bytes.sum(axis=(0, 1))
        edges += work.edge_bytes.sum(axis=(0, 1))
    row_s = flops[:, None] / speeds.row_flops_per_s + rows[:, None] / speeds.row_bytes_per_s
    edge_s = edges[:, None] / speeds.edge_bytes_per_s
    found: Array = row_s * (1.0 + speeds.row_backward) * ("rowwise" not in without)
    found = found + edge_s * (1.0 + speeds.edge_backward) * ("edgewise" not in without)
    return found


def _own_work(plan: Plan, workload: Workload) -> Loads:
    """Loads of one partition a rank without exchanges."""
    (layers,) = workload.micro_batches
    shape = (1, len(layers), plan.world_size)
    nothing = np.zeros((*shape, 1))
    return Loads(
        src_rows=np.stack([layer.src_rows for layer in layers])[None],
        dst_rows=np.stack([layer.dst_rows for layer in layers])[None],
        edges=np.stack([layer.edges for layer in layers])[None],
        halo_rows=np.zeros(shape),
        kv=nothing,
        q=nothing,
        moved=nothing,
        messages=np.zeros(shape),
        fetched=np.zeros((1, plan.world_size, 1)),
    )


# Dealing partitions to ranks or groups --------------------------------------------------------------------------------


def assignments(
    workload: Workload, topology: Topology, groups: Sequence[tuple[int, ...]], without: Collection[str] = ()
) -> list[list[int]]:
    """Ways to deal partitions to groups: neighbours together by work, and that one improved move by move."""
    own = _part_seconds(workload, topology, without)
    # A group shares a partition's work evenly, at its slowest member's speed.
    per_group = np.stack([own[:, list(group)].max(axis=1) / len(group) for group in groups], axis=1)
    weight = 1.0 / np.maximum(per_group.sum(axis=0), 1e-300)
    by_work = _deal_to(per_group.mean(axis=1), weight)
    if len(groups) == 1:
        return [by_work]
    traffic = _Traffic(workload, topology, groups, without)
    better = balance(per_group, by_work, traffic)
    plain = deal(list(workload.work), len(groups))
    unique = [by_work, better, plain]
    return [list(a) for a in dict.fromkeys(map(tuple, unique))]


def _deal_to(work: Array, speed: Array) -> list[int]:
    """Contiguous runs of partitions, each group's in proportion to its speed."""
    total = work.sum()
    if total <= 0:
        work, total = np.ones_like(work), float(len(work))
    bounds = np.cumsum(speed) / speed.sum()
    middle = (np.cumsum(work) - work / 2) / total
    return [int(g) for g in np.minimum(np.searchsorted(bounds, middle, side="right"), len(speed) - 1)]


class _Traffic:
    """Seconds in which a group receives the rows it needs of others, kept up to date as partitions move."""

    def __init__(
        self, workload: Workload, topology: Topology, groups: Sequence[tuple[int, ...]], without: Collection[str]
    ):
        model = workload.model
        sources = {"GT": 2.0, "GPS": 1.0, "GCN": 1.0, "MLP": 0.0}[model.kind]
        link = topology.slowest_link
        packing = 2.0 / float(topology.rates.packed_bytes_per_s.min())
        row_s = 2.0 * sources * model.width * model.bytes_per_element * (1.0 / link.bytes_per_s + packing)
        self.row_s = row_s * ("exchange" not in without)
        self.rows, self.log = workload.needs  # [K], [source, destination]
        self.shares = np.array([len(group) for group in groups], dtype=np.float64)

    def start(self, homes: Sequence[int]) -> None:
        columns = len(self.shares)
        self.homes = np.array(homes, dtype=np.int64)
        onehot = np.zeros((len(self.homes), columns))
        onehot[np.arange(len(self.homes)), self.homes] = 1.0
        self.unneeded = self.log @ onehot  # [K, groups]

    def seconds(self, group: int) -> float:
        return self._of(self.unneeded[:, group], self.homes != group, group)

    def after(self, part: int, group: int, joins: bool) -> float:
        """The group's seconds if a partition joined or left it."""
        change = self.log[:, part] if joins else -self.log[:, part]
        outside = self.homes != group
        outside[part] = not joins
        return self._of(self.unneeded[:, group] + change, outside, group)

    def move(self, part: int, group: int) -> None:
        self.unneeded[:, self.homes[part]] -= self.log[:, part]
        self.unneeded[:, group] += self.log[:, part]
        self.homes[part] = group

    def _of(self, unneeded: Array, outside: npt.NDArray[np.bool_], group: int) -> float:
        rows = float((-np.expm1(unneeded) * self.rows)[outside].sum())
        return self.row_s * rows / float(self.shares[group])


def balance(own: Array, homes: Sequence[int], traffic: _Traffic) -> list[int]:
    """Move partitions off the group that takes longest, where that shortens it, until nothing does.

    own: seconds of each partition on each group `[K, groups]`. Each move re-counts only the two groups it touches.
    """
    traffic.start(homes)
    parts, groups = own.shape
    work = np.array([own[traffic.homes == g, g].sum() for g in range(groups)])
    total = work + np.array([traffic.seconds(g) for g in range(groups)])
    for _ in range(4 * parts):
        worst = int(total.argmax())
        mine = np.flatnonzero(traffic.homes == worst)
        if not len(mine):
            break
        best: tuple[float, int, int, float, float] | None = None
        # Partitions that matter, to the groups that have most room.
        for part in mine[np.argsort(-own[mine, worst], kind="stable")][:24]:
            leaves = work[worst] - own[part, worst] + traffic.after(part, worst, joins=False)
            for group in np.argsort(total, kind="stable")[: min(groups, 6)]:
                if group == worst or total[group] + own[part, group] >= total[worst]:
                    continue
                joins = work[group] + own[part, group] + traffic.after(part, group, joins=True)
                value = max(leaves, joins)
                if value < total[worst] * (1.0 - 1e-9) and (best is None or value < best[0]):
                    best = (float(value), int(part), int(group), float(leaves), float(joins))
        if best is None:
            break
        _, part, group, leaves, joins = best
        work[worst] -= own[part, worst]
        work[group] += own[part, group]
        traffic.move(part, group)
        total[worst], total[group] = leaves, joins
    return [int(g) for g in traffic.homes]


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
    """Hill climbing: hubs to groups, then single partitions elsewhere, while that makes the plan faster."""
    limit = pricer.tried + budget
    best = _hubs_to_groups(plan, pricer, limit)
    improved = True
    while improved and pricer.tried < limit:
        improved = False
        for part in _busiest_first(best, pricer):
            for option in _placements(best, pricer):
                if pricer.tried >= limit:
                    return best
                if option == best.partitions[part] or not _may(part, option.mode, pricer.limits):
                    continue
                changed = list(best.partitions)
                changed[part] = option
                candidate = replace(best, partitions=tuple(changed))
                if pricer.key(candidate) < pricer.key(best):
                    best, improved = candidate, True
                    break
            if improved:
                break
    return best


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
        options.update(dict.fromkeys(set_in_order(plan.partitions)))
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


def set_in_order(placements: Sequence[Placement]) -> list[Placement]:
    return list(dict.fromkeys(placements))


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


def _pinned(plan: Plan, pin: Mapping[int, Mode], best: Mapping[str, Plan]) -> Plan:
    """The plan with pinned partitions as the best plan of their mode places them."""
    changed = list(plan.partitions)
    for part, mode in pin.items():
        if changed[part].mode != mode:
            if mode not in best:
                raise ValueError(f"plan.pin puts partition {part} into mode {mode!r}, which plan.allow rules out")
            changed[part] = best[mode].partitions[part]
    return replace(plan, partitions=tuple(changed))


def family_of(plan: Plan) -> str:
    """A plan's mode, or `mixed`."""
    modes = {place.mode for place in plan.partitions}
    return modes.pop() if len(modes) == 1 else "mixed"


# Exhaustive, where it is small ----------------------------------------------------------------------------------------


def every_plan(workload: Workload, world_size: int) -> Iterator[Plan]:
    """Every plan of a small problem: all placements of every partition over all ordered groups, all wave sizes."""
    layers, count = workload.model.layers, workload.num_micro_batches
    options: list[Placement] = [Placement("graph", (rank,)) for rank in range(world_size)]
    for size in range(2, world_size + 1):
        for ranks in itertools.permutations(range(world_size), size):
            if ranks == tuple(sorted(ranks)):
                options.append(Placement("model", ranks))
            if count > 1:
                options.append(Placement("data", ranks))
            for cuts in itertools.combinations(range(1, layers), size - 1):
                bounds = (0, *cuts, layers)
                options.append(Placement("pipeline", ranks, tuple(b - a for a, b in itertools.pairwise(bounds))))
    for chosen in itertools.product(options, repeat=workload.num_partitions):
        for wave in sorted({0, *(s for s in _powers(count) if s < count)}):
            yield Plan(world_size, layers, chosen, wave)


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


# If nothing fits ------------------------------------------------------------------------------------------------------


def remedies(
    workload: Workload, topology: Topology, engine: Engine, limits: Limits, *, bytes_per_element: int | None = None
) -> tuple[str, ...]:
    """Single changes after which some plan fits, the smallest first, each with its config key; else all of them."""
    best = search(workload, topology, engine, limits, budget=0)
    smallest = _least_memory(best)
    cap = limits.memory_bytes or min(device.memory_bytes for device in topology.devices)
    tries: list[tuple[str, Callable[[], Found]]] = []
    for stage in range(engine.zero_stage + 1, 4):
        changed = replace(engine, zero_stage=stage)
        tries.append((f"engine.zero_stage={stage}", lambda e=changed: search(workload, topology, e, limits, budget=0)))  # type: ignore[misc]
    if not engine.offload:
        changed = Engine(max(engine.zero_stage, 1), True)
        tries.append(
            (
                f"engine.zero_stage={changed.zero_stage} engine.offload_optimizer=cpu",
                lambda e=changed: search(workload, topology, e, limits, budget=0),  # type: ignore[misc]
            )
        )
    if workload.model.bytes_per_element == 4:
        half = replace(workload, model=replace(workload.model, bytes_per_element=2))
        tries.append(("engine.precision=bf16", lambda: search(half, topology, engine, limits, budget=0)))
    for times in (2, 4, 8):
        larger = topology.resized(topology.world_size * times)
        tries.append(
            (
                f"{larger.world_size} ranks instead of {topology.world_size}",
                lambda t=larger: search(workload, t, engine, limits, budget=0),  # type: ignore[misc]
            )
        )
    helps = [name for name, run in tries if run().chosen is not None]
    if helps:
        return tuple(helps)
    needed = _size(smallest) if smallest is not None else "more"
    return (f"a memory limit of {needed} or more (now {_size(cap)})", "batch.kind=cluster with fewer batch.parts")


def _least_memory(found: Found) -> float | None:
    peaks = [max(c.estimate.memory_bytes) for c in found.candidates if c.estimate is not None]
    return min(peaks) if peaks else None


def explain_nothing_fits(found: Found) -> str:
    """One paragraph: how many plans were tried, the best one's memory, and what would help."""
    peaks = [(max(c.estimate.memory_bytes), c) for c in found.candidates if c.estimate is not None]
    if not peaks:
        return "no plan is allowed: plan.allow and plan.pin rule out every mode; allow more of them"
    peak, candidate = min(peaks, key=lambda entry: entry[0])
    text = (
        f"none of {found.tried} plans fits: the smallest, {candidate.family} with checkpointing "
        f"{candidate.plan.checkpointing if candidate.plan else '-'}, {candidate.reason}"
    )
    del peak
    if found.remedies:
        text += "; what would help: " + "; ".join(f"{i}. {r}" for i, r in enumerate(found.remedies, 1))
    return text


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
