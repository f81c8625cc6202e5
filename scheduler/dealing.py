"""Deals partitions to ranks or groups, and layers to stages, so that what takes longest takes least.

Partitions start as neighbours in runs of equal work and are then moved one by one, each move re-counting only the two
groups that it touches. Not here: which groups and modes to try (`search.py`) and what a whole plan costs (`cost.py`).

Legend: `K` partitions, `P` ranks, `L` layers, `G` devices of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scheduler.cost import tensors_sent, work_of
from scheduler.placing import Loads, place
from scheduler.plan import Placement, Plan, deal
from scheduler.topology import Topology
from scheduler.workload import Workload

Array = npt.NDArray[np.float64]


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


def layer_seconds(workload: Workload, topology: Topology) -> Array:
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
    traffic = Traffic(workload, topology, groups, without)
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


class Traffic:
    """Seconds in which a group receives the rows it needs of others, kept up to date as partitions move."""

    def __init__(
        self, workload: Workload, topology: Topology, groups: Sequence[tuple[int, ...]], without: Collection[str]
    ):
        model = workload.model
        sources = sum(tensors_sent(model, layer)[0] for layer in range(model.layers)) / model.layers
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


def balance(own: Array, homes: Sequence[int], traffic: Traffic) -> list[int]:
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
