"""Where the work of a step falls under a plan: rows, edges and rows passed on, by wave, layer and rank.

Not here: what it costs (`cost.py`), what the work is (`workload.py`) and what a plan means (`plan.py`).

Legend: `K` partitions, `P` ranks, `L` layers, `W` waves, `G` head-parallel groups. A *column* is a set of partitions
that are attended together: one a rank (its own partitions), then one a group (`X = P + G`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from scheduler.plan import Plan, deal, head_slices, stage_of
from scheduler.workload import LayerWork, Workload

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LayerLoads:
    """What each rank does in a layer, forward; `[P]`, or with leading axes for waves and layers.

    src_rows, dst_rows, edges, halo_rows: a head slice counts as its share of the heads.
    kv, q: rows `[P, P]` from rank to rank, a head slice as its share: sources before the edge-wise work, and
        destinations before it (and, transposed, back after it).
    messages: that a rank sends or receives.
    """

    src_rows: Array
    dst_rows: Array
    edges: Array
    halo_rows: Array
    kv: Array
    q: Array
    messages: Array


@dataclass(frozen=True, eq=False)
class Loads(LayerLoads):
    """What each rank does in each layer of each wave: the figures of a layer as `[W, L, ...]`, and beside them

    moved: rows `[W, L, P, P]` that change owner after the layer.
    fetched: feature rows `[W, P, P]` from where they are stored to their first owner; none where a batch repeats.
    """

    moved: Array
    fetched: Array


class Placed:
    """A plan as arrays, and the work that it has placed."""

    def __init__(self, plan: Plan, workload: Workload):
        self.plan, self.workload, self.size = plan, workload, plan.world_size
        kinds = list(dict.fromkeys(plan.partitions))
        number = {place: i for i, place in enumerate(kinds)}
        self.kinds = kinds
        self.which: Ids = np.array([number[place] for place in plan.partitions], dtype=np.int64)
        groups = list(dict.fromkeys(place.ranks for place in kinds if place.mode == "model"))
        self.groups = groups
        self.group_of: Ids = np.array(
            [groups.index(place.ranks) if place.mode == "model" else -1 for place in kinds], dtype=np.int64
        )
        self._layers: dict[tuple[int, bytes], LayerLoads] = {}

    def owners(self, micro_batch: int, layer: int) -> Ids:
        """The owner `[K]` of each partition's rows; `P + g` where group g shares them."""
        owner = np.empty(len(self.kinds), dtype=np.int64)
        for i, place in enumerate(self.kinds):
            match place.mode:
                case "graph":
                    owner[i] = place.ranks[0]
                case "model":
                    owner[i] = self.size + self.group_of[i]
                case "pipeline":
                    owner[i] = place.ranks[stage_of(place, layer)]
                case "data":
                    owner[i] = place.ranks[micro_batch % len(place.ranks)]
        found: Ids = owner[self.which]
        return found

    def shares(self, rows: Array, owner: Ids) -> Array:
        """Rows of each partition `[K]` as rows of each rank `[P]`."""
        column = np.bincount(owner, weights=rows, minlength=self.size + len(self.groups)).astype(np.float64)
        ranks: Array = column[: self.size].copy()
        for g, group in enumerate(self.groups):
            ranks[list(group)] += column[self.size + g] / len(group)
        return ranks

    def layer(self, work: LayerWork, owner: Ids) -> LayerLoads:
        """Place one layer's work."""
        key = (id(work), owner.tobytes())
        if key not in self._layers:
            self._layers[key] = self._place(work, owner)
        return self._layers[key]

    def _place(self, work: LayerWork, owner: Ids) -> LayerLoads:
        size, heads = self.size, self.workload.model.heads
        edges = np.bincount(owner, weights=work.edges, minlength=size + len(self.groups))
        needed = self._needed(work, owner)  # [P or group that owns, X]
        kv, q = np.zeros((size, size)), np.zeros((size, size))
        kv_messages, q_messages = np.zeros((size, size), bool), np.zeros((size, size), bool)
        rank_edges = edges[:size].copy()
        from_ranks = needed[:size].copy()
        for g, group in enumerate(self.groups):
            from_ranks[list(group)] += needed[size + g] / len(group)
        kv += from_ranks[:, :size]
        kv_messages |= kv > 0
        group_rows = np.bincount(owner, weights=work.dst_rows, minlength=size + len(self.groups))
        for g, group in enumerate(self.groups):
            members = list(group)
            queries = group_rows[size + g] / len(group)
            for rank, (h0, h1) in zip(group, head_slices(heads, len(group)), strict=True):
                if h1 == h0:
                    continue
                share = (h1 - h0) / heads
                rank_edges[rank] += share * edges[size + g]
                kv[:, rank] += share * from_ranks[:, size + g]
                q[members, rank] += share * queries
                kv_messages[:, rank] |= from_ranks[:, size + g] > 0
                q_messages[members, rank] |= queries > 0
        for table in (kv, q):
            np.fill_diagonal(table, 0.0)
        np.fill_diagonal(kv_messages, False)
        np.fill_diagonal(q_messages, False)
        both = kv_messages.astype(np.float64) + q_messages + q_messages.T  # q there, o back
        return LayerLoads(
            self.shares(work.src_rows, owner),
            self.shares(work.dst_rows, owner),
            rank_edges,
            kv.sum(axis=0),
            kv,
            q,
            both.sum(axis=0) + both.sum(axis=1),
        )

    def _needed(self, work: LayerWork, owner: Ids) -> Array:
        """Distinct rows of each owner that each column uses, its own among them, `[X, X]`.

        Rows of partition `p` needed by several partitions of a column join as if they were independent: of `n` rows,
        needs `x_1, x_2, ...` join to `n (1 - prod(1 - x_i / n))`, exact for one and for all.
        """
        count, columns = len(owner), self.size + len(self.groups)
        order = np.argsort(owner, kind="stable")
        first = np.flatnonzero(np.diff(owner[order], prepend=-1))
        present = owner[order][first]
        if work.unneeded is None:
            at = work.needs_src * columns + owner[work.needs_dst]
            flat = np.bincount(at, weights=work.log_unneeded, minlength=count * columns)
            unneeded: Array = flat.astype(np.float64).reshape(count, columns)
        else:
            attends = np.zeros((count, len(present)))
            attends[np.arange(count), np.searchsorted(present, owner)] = 1.0
            unneeded = np.zeros((count, columns))
            unneeded[:, present] = work.unneeded @ attends
        rows = -np.expm1(unneeded) * work.src_rows[:, None]
        rows[np.arange(count), owner] = work.src_rows
        result = np.zeros((columns, columns))
        result[present] = np.add.reduceat(rows[order], first, axis=0)
        return result


def place(plan: Plan, workload: Workload) -> Loads:
    """Place a workload. Raises ValueError if the plan is for another number of partitions or layers."""
    if plan.num_partitions != workload.num_partitions or plan.num_layers != workload.model.layers:
        raise ValueError(
            f"the plan places {plan.num_partitions} partitions and {plan.num_layers} layers, the workload has "
            f"{workload.num_partitions} and {workload.model.layers}; plan for this workload"
        )
    placed, size = Placed(plan, workload), plan.world_size
    waves = plan.waves(workload.num_micro_batches)
    shape = (len(waves), plan.num_layers, size)
    totals = {f.name: np.zeros(shape) for f in fields(LayerLoads)}
    for name in ("kv", "q", "moved"):
        totals[name] = np.zeros((*shape, size))
    fetched = np.zeros((len(waves), size, size))
    homes = np.array(deal(workload.work, size), dtype=np.int64)
    for w, numbers in enumerate(waves):
        for m in numbers:
            owner = placed.owners(m, 0)
            if not workload.repeats:
                _pass_on(fetched[w], homes, owner, workload.micro_batches[m][0].src_rows, placed)
            for layer in range(plan.num_layers):
                work = workload.micro_batches[m][layer]
                found = placed.layer(work, owner)
                for f in fields(LayerLoads):
                    totals[f.name][w, layer] += getattr(found, f.name)
                if layer + 1 < plan.num_layers:
                    later = placed.owners(m, layer + 1)
                    if (owner != later).any():
                        _pass_on(totals["moved"][w, layer], owner, later, work.dst_rows, placed)
                    owner = later
        # A wave's exchange is one message between two ranks, however many micro-batches it holds.
        totals["messages"][w] = np.minimum(totals["messages"][w], _most_messages(totals, w, size))
    moves = totals["moved"] > 0
    totals["messages"] += moves.sum(axis=-1) + moves.sum(axis=-2)
    return Loads(fetched=fetched, **totals)


def _pass_on(table: Array, owner: Ids, later: Ids, rows: Array, placed: Placed) -> None:
    """Add rows that change owner; head-parallel groups share theirs evenly."""
    for p in np.flatnonzero((owner != later) & (rows > 0)):
        to = later[p]
        if to < placed.size:
            table[owner[p], to] += rows[p]
        else:
            group = list(placed.groups[to - placed.size])
            table[owner[p], group] += rows[p] / len(group)
    np.fill_diagonal(table, 0.0)


def _most_messages(totals: dict[str, Array], wave: int, size: int) -> Array:
    kv, q = totals["kv"][wave] > 0, totals["q"][wave] > 0
    both = kv.astype(np.float64) + q + q.transpose(0, 2, 1)
    found: Array = both.sum(axis=1) + both.sum(axis=2)
    return found
