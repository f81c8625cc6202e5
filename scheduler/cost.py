"""The cost model: what a plan would take on a topology, rank by rank, as an estimate one can read term by term.

Every term is a small function with its formula. Not here: which plans to price (`search.py`), what the workload is
(`workload.py`) and what was measured (`monitor/`).

Legend: `K` partitions, `P` ranks, `L` layers, `W` waves, `n` rows, `e` edges, `C` width, `F` FFN width, `H` heads, `b`
bytes per element. Backward costs twice the forward's computation and the same exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.plan import Plan, head_slices, owner_table
from scheduler.topology import Topology
from scheduler.workload import LayerWork, ModelShape, Workload

Array = npt.NDArray[np.float64]

BACKWARD = 2.0  # a product's backward is two products of its size


# Work of one layer, forward -------------------------------------------------------------------------------------------


def source_flops(model: ModelShape, rows: Array | float) -> Array | float:
    """Row-wise FLOPs of rows before a layer: K and V, `4 n C^2`, in attention; `2 n C^2` in a convolution."""
    per_row = {"GT": 4.0, "GPS": 6.0, "GCN": 2.0, "MLP": 0.0}[model.kind]
    return rows * (per_row * model.width**2)


def destination_flops(model: ModelShape, rows: Array | float) -> Array | float:
    """Row-wise FLOPs of rows after a layer: Q and output `4 n C^2`, FFN `4 n C F`."""
    per_row = {"GT": 4.0, "GPS": 6.0, "GCN": 0.0, "MLP": 0.0}[model.kind]
    ffn = 0.0 if model.kind == "GCN" else 4.0 * model.width * model.ffn_width
    return rows * (per_row * model.width**2 + ffn)


def edge_bytes(model: ModelShape, rows: Array | float, edges: Array | float) -> Array | float:
    """Memory traffic of edge-wise work: K and V per edge, Q and output per row, `b (2 e C + 2 n C) + 4 e`.

    One gathered row per edge, not two, where there is no attention.
    """
    gathered = {"GT": 2.0, "GPS": 1.0, "GCN": 1.0, "MLP": 0.0}[model.kind]
    b = model.bytes_per_element
    return gathered * b * model.width * edges + (2.0 * b * model.width * rows + 4.0 * edges) * (gathered > 0)


def packed_tensors(model: ModelShape) -> tuple[float, float]:
    """Tensors of width C that travel with a source row (K and V) and with a destination row (Q, and O back)."""
    return {"GT": (2.0, 2.0), "GPS": (1.0, 1.0), "GCN": (1.0, 1.0), "MLP": (0.0, 0.0)}[model.kind]


# Where the work falls under a plan ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Loads:
    """What each rank does in each layer of each wave, forward.

    src_rows, dst_rows, edges: `[W, L, P]`; edges count a head slice as its share of the heads. sent: bytes `[W, L, P,
    P]` from rank to rank before the layer's edge-wise work (K, V, Q), `returned` after it (O), `moved` to the next
    layer's owners. micro_batches: rows-weighted number of micro-batches of a wave that a rank holds rows of.
    """

    src_rows: Array
    dst_rows: Array
    edges: Array
    halo_rows: Array
    sent: Array
    returned: Array
    moved: Array


def loads(plan: Plan, workload: Workload) -> Loads:
    """Place a workload. Needed rows of several partitions on one rank are counted once, as if they were independent:
    of `q`'s `n` rows, needs `x_1, x_2, ...` join to `n (1 - prod(1 - x_i / n))`, exact for one and for all.
    """
    model, size = workload.model, plan.world_size
    waves = plan.waves(workload.num_micro_batches)
    shape = (len(waves), plan.num_layers, size)
    src, dst, edges, halo = (np.zeros(shape) for _ in range(4))
    sent, returned, moved = (np.zeros((*shape, size)) for _ in range(3))
    source_tensors, row_tensors = packed_tensors(model)
    row_bytes = float(model.width * model.bytes_per_element)
    for w, numbers in enumerate(waves):
        for m in numbers:
            for layer in range(plan.num_layers):
                work = workload.micro_batches[m][layer]
                owners = ownership(plan, m, layer)  # [K, P]
                slots = attendance(plan, owners, model.heads)
                src[w, layer] += work.src_rows @ owners
                dst[w, layer] += work.dst_rows @ owners
                for share, attends in slots:
                    edges[w, layer] += share * (work.edges @ attends)
                    needed = needed_rows(work, attends)  # [K, P]
                    kv = owners.T @ needed  # [owner, attending]
                    np.fill_diagonal(kv, 0.0)
                    halo[w, layer] += share * kv.sum(0)
                    queries = owners.T @ (work.dst_rows[:, None] * attends)
                    np.fill_diagonal(queries, 0.0)
                    # Rows of a group are owned in parts: each owner passes its own part to each attending rank.
                    sent[w, layer] += share * row_bytes * (source_tensors * kv + (row_tensors / 2) * queries)
                    returned[w, layer] += share * row_bytes * (row_tensors / 2) * queries.T
                if layer + 1 < plan.num_layers:
                    later = ownership(plan, m, layer + 1)
                    for p in np.flatnonzero((owners != later).any(axis=1)):
                        step = work.dst_rows[p] * row_bytes * np.outer(owners[p], later[p])
                        moved[w, layer] += step
    return Loads(src, dst, edges, halo, sent, returned, moved)


def ownership(plan: Plan, micro_batch: int, layer: int) -> Array:
    """The share `[K, P]` of each partition's rows that each rank owns."""
    share = np.zeros((plan.num_partitions, plan.world_size))
    owner = owner_table(plan, micro_batch, layer)
    for p, place in enumerate(plan.partitions):
        if owner[p] >= 0:
            share[p, owner[p]] = 1.0
        else:
            share[p, list(place.ranks)] = 1.0 / len(place.ranks)
    return share


def attendance(plan: Plan, owners: Array, num_heads: int) -> list[tuple[float, Array]]:
    """For each share of the heads: which ranks attend with it to which partitions, 0 or 1, `[K, P]`."""
    found: dict[tuple[int, int], Array] = {}

    def mark(heads: tuple[int, int], p: int, rank: int) -> None:
        found.setdefault(heads, np.zeros_like(owners))[p, rank] = 1.0

    for p, place in enumerate(plan.partitions):
        if place.mode == "model":
            for rank, heads in zip(place.ranks, head_slices(num_heads, len(place.ranks)), strict=True):
                if heads[1] > heads[0]:
                    mark(heads, p, rank)
        else:
            mark((0, num_heads), p, int(owners[p].argmax()))
    return [((h1 - h0) / num_heads, attends) for (h0, h1), attends in sorted(found.items())]


def needed_rows(work: LayerWork, attends: Array) -> Array:
    """Distinct rows of each partition that each rank's attended partitions use, `[K, P]`, its own among them."""
    needed: Array = -np.expm1(work.log_unneeded @ attends) * work.src_rows[:, None]
    return np.where(attends > 0, work.src_rows[:, None], needed)


# Memory of one rank ---------------------------------------------------------------------------------------------------


def activation_bytes(model: ModelShape, rows: Array, halo: Array, checkpointing: str) -> Array:
    """What one layer holds for backward: `b [(8 n + 2 h) C + 2 n F] + b n H`; checkpointed `b (n + 2 h) C`."""
    b, c = model.bytes_per_element, model.width
    if checkpointing == "layer":
        return b * (rows + 2.0 * halo) * c
    return b * ((8.0 * rows + 2.0 * halo) * c + 2.0 * rows * model.ffn_width + rows * model.heads)


def state_bytes(parameters: int, zero_stage: int, world_size: int, offload: bool) -> float:
    """Weights, gradients and float32 Adam of one rank: 16 B a parameter, sharded by stage, 2P to 4P with offload."""
    p, dp = float(parameters), float(world_size)
    if offload:
        return 4.0 * p
    return {0: 16.0 * p, 1: 4.0 * p + 12.0 * p / dp, 2: 2.0 * p + 14.0 * p / dp, 3: 16.0 * p / dp}[zero_stage]


# The estimate ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A plan's predicted cost. Tuples have one entry a rank.

    step_s: the whole step. rowwise_s, edgewise_s, visits_s: busy seconds. exchange_s: seconds until rows had arrived,
    waiting included. sent_bytes: of all exchanges. memory_bytes: activations and states. fits: the limit holds.
    """

    step_s: float
    rowwise_s: tuple[float, ...]
    edgewise_s: tuple[float, ...]
    visits_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    reduction_s: float
    optimizer_s: float
    sent_bytes: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    fits: bool


def estimate(
    plan: Plan, workload: Workload, topology: Topology, *, zero_stage: int = 0, offload: bool = False
) -> Estimate:
    """Price a plan: place the work, then let every rank run its waves and layers, waiting where rows must arrive.

    `t[r] = max(t[r], max over senders s (t[s] + alpha + bytes / beta)) + work`, wave by wave and layer by layer,
    forward and, in reverse, backward; the step is the latest rank's end plus gradients, optimizer and the rest.
    """
    if topology.world_size != plan.world_size:
        raise ValueError(
            f"the topology has {topology.world_size} devices, the plan {plan.world_size} ranks; describe as many"
        )
    model, size = workload.model, plan.world_size
    placed = loads(plan, workload)
    flops = np.array([d.row_flops_per_s for d in topology.devices])
    edge_rate = np.array([d.edge_bytes_per_s for d in topology.devices])
    visit_s = np.array([d.visit_s for d in topology.devices])
    alpha, beta = _links(topology)
    before = np.asarray(source_flops(model, placed.src_rows)) / flops
    after = np.asarray(destination_flops(model, placed.dst_rows)) / flops
    between = np.asarray(edge_bytes(model, placed.dst_rows, placed.edges)) / edge_rate
    again = 1.0 if plan.checkpointing == "layer" else 0.0
    edges_again = 0.0 if plan.checkpointing == "none" else 1.0

    clock, waited = np.zeros(size), np.zeros(size)

    def meet(sent: Array) -> None:
        nonlocal clock, waited
        arrival = np.where(sent > 0, clock[:, None] + alpha + sent / beta, 0.0).max(axis=0)
        later = np.maximum(clock, arrival)
        waited += later - clock
        clock = later

    for waves in plan.rounds(placed.src_rows.shape[0]):
        for w in waves:
            for layer in range(plan.num_layers):
                clock += before[w, layer] + visit_s / (1 + BACKWARD)
                meet(placed.sent[w, layer])
                clock += between[w, layer]
                meet(placed.returned[w, layer])
                clock += after[w, layer]
                meet(placed.moved[w, layer])
        for w in reversed(waves):
            for layer in reversed(range(plan.num_layers)):
                meet(placed.moved[w, layer].T)
                clock += after[w, layer] * (BACKWARD + again) + visit_s * BACKWARD / (1 + BACKWARD)
                meet(placed.returned[w, layer].T)
                clock += between[w, layer] * (BACKWARD + edges_again)
                meet(placed.sent[w, layer].T)
                clock += before[w, layer] * (BACKWARD + again)
    reduction = reduction_s(model.parameters, topology, zero_stage, len(plan.rounds(placed.src_rows.shape[0])))
    shard = model.parameters / (size if zero_stage else 1)
    optimizer = 28.0 * shard / topology.optimizer_bytes_per_s
    memory = memory_bytes(plan, workload, placed, zero_stage, offload)
    passes = 1.0 + BACKWARD
    visits = np.full(size, placed.src_rows.shape[0] * plan.num_layers) * visit_s
    sent = 2.0 * (placed.sent + placed.returned + placed.moved).sum(axis=(0, 1)).sum(axis=1)
    limits = [device.memory_bytes for device in topology.devices]
    return Estimate(
        step_s=float(clock.max() + reduction + optimizer + topology.step_s),
        rowwise_s=_tuple((before + after).sum(axis=(0, 1)) * (passes + again)),
        edgewise_s=_tuple(between.sum(axis=(0, 1)) * (passes + edges_again)),
        visits_s=_tuple(visits),
        exchange_s=_tuple(waited),
        reduction_s=reduction,
        optimizer_s=optimizer,
        sent_bytes=_tuple(sent),
        memory_bytes=_tuple(memory),
        fits=bool(all(m <= limit for m, limit in zip(memory, limits, strict=True))),
    )


def reduction_s(parameters: int, topology: Topology, zero_stage: int, rounds: int) -> float:
    """Gradients over all ranks: `2 (P - 1) / P` times their bytes over the slowest link, and `2 (P - 1)` messages.

    ZeRO 2 and 3 reduce once a round, ZeRO 3 gathers the weights for forward and backward besides.
    """
    size = topology.world_size
    if size == 1:
        return 0.0
    hosts = {device.host for device in topology.devices}
    link = topology.same_host if len(hosts) == 1 else topology.between_hosts
    once = 2.0 * (size - 1) * link.alpha_s + 2.0 * (size - 1) / size * 4.0 * parameters / link.bytes_per_s
    return once * (rounds if zero_stage >= 2 else 1) * (2.0 if zero_stage == 3 else 1.0)


def memory_bytes(plan: Plan, workload: Workload, placed: Loads, zero_stage: int, offload: bool) -> Array:
    """Peak bytes of each rank `[P]`: states, and the activations of the fullest round."""
    model = workload.model
    held = activation_bytes(model, placed.src_rows, placed.halo_rows, plan.checkpointing).sum(axis=1)  # [W, P]
    live = activation_bytes(model, placed.src_rows, placed.halo_rows, "none").max(axis=1)
    if plan.checkpointing == "layer":
        held = held + live
    per_round = [held[list(waves)].sum(axis=0) for waves in plan.rounds(held.shape[0])]
    states = state_bytes(model.parameters, zero_stage, plan.world_size, offload)
    peak: Array = np.max(per_round, axis=0) + states
    return peak


def _links(topology: Topology) -> tuple[Array, Array]:
    host = np.array([device.host for device in topology.devices])
    near = host[:, None] == host[None, :]
    alpha = np.where(near, topology.same_host.alpha_s, topology.between_hosts.alpha_s)
    beta = np.where(near, topology.same_host.bytes_per_s, topology.between_hosts.bytes_per_s)
    return alpha, beta


def _tuple(values: Array) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
