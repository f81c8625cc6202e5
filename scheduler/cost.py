"""The cost model: what a plan would take on a topology, rank by rank, as an estimate one can read term by term.

Every term is a small function with its formula. Not here: where the work falls (`placing.py`), which plans to price
(`search.py`), what the workload is (`workload.py`) and what was measured (`monitor/`).

Legend: `K` partitions, `P` ranks, `L` layers, `W` waves, `n` rows, `e` edges, `C` width, `F` FFN width, `H` heads, `b`
bytes per element. Backward costs about twice the forward's computation and the same exchanges.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.placing import Loads, place
from scheduler.plan import Plan
from scheduler.topology import Topology
from scheduler.workload import ModelShape, Workload

Array = npt.NDArray[np.float64]

TERMS = ("rowwise", "edgewise", "visits", "exchange", "reduction", "optimizer")  # what an ablation can leave out


# Work of one layer, forward -------------------------------------------------------------------------------------------


def row_width(model: ModelShape, layer: int) -> int:
    """Columns of the rows that a layer passes on: C, or the layer's own output in a GCN.

    SGFormer and the local layers of Polynormer pass two halves on, NAGphormer a row for each hop.
    """
    last = layer == model.layers - 1
    if model.kind == "GCN" and last:
        return model.num_classes
    if model.kind == "Polynormer":
        last = layer >= model.local_layers - 1
    halves = {"SGFormer": 2, "Polynormer": 2, "NAGphormer": model.hops + 1}
    return model.width * (1 if last else halves.get(model.kind, 1))


def edge_width(model: ModelShape, layer: int) -> int:
    """Columns that edge-wise work sees of a row: C, or the layer's own output in a GCN."""
    return row_width(model, layer) if model.kind == "GCN" else model.width


def source_flops(model: ModelShape, layer: int) -> float:
    """FLOPs per row before a layer: K and V `4 C^2` in GT, the global attention besides in GPS, the projection in GCN.

    The first layer's rows go through the encoder, `2 F_in C`. A linear attention adds `2 C (d + 1)` on either side:
    in SGFormer's first layer, whose Q, K and V are `6 C^2` more, and in Polynormer's global ones.
    """
    c, first = model.width, layer == 0
    if model.kind == "GCN":
        return 2.0 * (model.num_inputs if first else c) * edge_width(model, layer)
    encoder = 2.0 * model.num_inputs * c if first else 0.0
    linear = 2.0 * c * (c / model.heads + 1)
    projections = {
        "GT": 4.0 * c * c,
        "GPS": 4.0 * c * c + linear,
        "Exphormer": 6.0 * c * c + linear,
        "GAT": 2.0 * c * c,
        "SGFormer": 2.0 * c * c + (6.0 * c * c + linear if first else 0.0),
        "Polynormer": 2.0 * c * c if layer < model.local_layers else 4.0 * c * c + linear,
    }
    return encoder + projections.get(model.kind, 0.0)


def destination_flops(model: ModelShape, layer: int) -> float:
    """FLOPs per row after a layer: Q and output `4 C^2`, FFN `4 C F`; the last layer's classifier, `2 C classes`.

    SAGE's FFN takes `2 C` columns; SGFormer and Polynormer have none. NAGphormer is a GT layer and attention among
    tokens, `4 C` a pair of them, for each hop.
    """
    c = model.width
    if model.kind == "GCN":
        return 0.0
    classifier = 2.0 * c * model.num_classes if layer == model.layers - 1 else 0.0
    ffn = {"SAGE": 6.0, "SGFormer": 0.0, "Polynormer": 0.0}.get(model.kind, 4.0) * c * model.ffn_width
    linear, tokens = 2.0 * c * (c / model.heads + 1), model.hops + 1
    if model.kind == "NAGphormer":
        return classifier + tokens * (8.0 * c * c + ffn + 4.0 * c * tokens)
    mixing = {
        "GT": 4.0 * c * c,
        "GPS": 8.0 * c * c + linear,
        "Exphormer": 10.0 * c * c + linear,
        "SGFormer": linear if layer == 0 else 0.0,
        "Polynormer": 4.0 * c * c + (0.0 if layer < model.local_layers else linear),
    }
    return classifier + ffn + mixing.get(model.kind, 0.0)


def row_bytes(model: ModelShape, layer: int) -> float:
    """Memory traffic per row of what is no product: norms, residuals, activations, counted from the layers' code."""
    c, f = float(model.width), float(model.ffn_width)
    residual = {"GT": 16.0, "GPS": 48.0, "Exphormer": 34.0, "SAGE": 12.0, "GAT": 12.0, "MLP": 7.0}  # layers with an FFN
    plain = {"GCN": 6.0, "SGFormer": 34.0 if layer == 0 else 16.0, "Polynormer": 26.0}
    if model.kind == "NAGphormer":
        elements = (model.hops + 1) * (16.0 * c + 5.0 * f + 3.0 * model.heads * (model.hops + 1))
    else:
        elements = plain[model.kind] * c if model.kind in plain else residual[model.kind] * c + 5.0 * f
    first = float(model.num_inputs) if layer == 0 else 0.0
    return model.bytes_per_element * (elements + first)


def has_edges(model: ModelShape, layer: int) -> bool:
    """Whether a layer does edge-wise work."""
    if model.kind == "Polynormer":
        return layer < model.local_layers
    return model.kind not in ("MLP", "NAGphormer")


def edge_bytes(model: ModelShape, layer: int) -> tuple[float, float]:
    """Memory traffic of edge-wise work per edge and per row after the layer: `b 2 C + 4` and `b 2 C` in attention.

    One gathered row per edge, not two, where there is no attention; per head and edge three values of a softmax, and
    as many of the scores of GAT. Exphormer has attention, a bias and a mean.
    """
    if not has_edges(model, layer):
        return 0.0, 0.0
    b, c = model.bytes_per_element, float(edge_width(model, layer))
    softmax, plain = 3.0 * b * model.heads, b * c + 4.0
    scores = plain + 2.0 * softmax
    per_edge = {
        "GT": b * c + plain + softmax,
        "Exphormer": b * c + 2.0 * plain + 2.0 * softmax,
        "GAT": scores,
        "Polynormer": scores,
    }
    return per_edge.get(model.kind, plain), (4.0 if model.kind == "Exphormer" else 2.0) * b * c


def tensors_sent(model: ModelShape, layer: int) -> tuple[float, float, float]:
    """Tensors that travel with a source row (K and V) and with a destination row there (Q), and that come back (O).

    Exphormer's mean takes another row and gives another.
    """
    if not has_edges(model, layer):
        return 0.0, 0.0, 0.0
    return {"GT": (2.0, 1.0, 1.0), "Exphormer": (3.0, 1.0, 2.0)}.get(model.kind, (1.0, 0.0, 1.0))


def meetings(model: ModelShape, layer: int) -> int:
    """Sums over all rows of a micro-batch in a layer: two a batch norm and one of the global attention in GPS.

    SGFormer's one attention needs norms of Q and K first.
    """
    if model.kind == "SGFormer":
        return 2 if layer == 0 else 0
    if model.kind == "Polynormer":
        return 0 if layer < model.local_layers else 1
    return {"GPS": 7, "Exphormer": 1}.get(model.kind, 0)


# What a rank does in a step: the quantities that take time ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Work:
    """Quantities of each layer of each wave, forward: FLOPs and bytes `[W, L, P]`, bytes between ranks `[W, L, P, P]`.

    encoder_flops: the part of `before_flops` without a gradient of its input.
    """

    before_flops: Array
    encoder_flops: Array
    after_flops: Array
    row_bytes: Array
    edge_bytes: Array
    sent: Array
    returned: Array
    moved: Array
    fetched: Array
    messages: Array
    meetings: Array


def work_of(placed: Loads, model: ModelShape) -> Work:
    """The quantities of placed work."""
    layers = range(model.layers)
    b = float(model.bytes_per_element)

    def per_layer(values: list[float], rank_axes: int = 1) -> Array:
        return np.array(values).reshape(1, -1, *(1,) * rank_axes)

    passed = per_layer([b * row_width(model, layer) for layer in layers], 2)
    width = per_layer([b * edge_width(model, layer) for layer in layers], 2)
    travelling = zip(*(tensors_sent(model, layer) for layer in layers), strict=True)
    sources, destinations, returns = (per_layer(list(tensors), 2) for tensors in travelling)
    exchanges = per_layer([float(has_edges(model, layer)) for layer in layers])
    met = per_layer([float(meetings(model, layer)) for layer in layers])
    per_edge, per_row = zip(*(edge_bytes(model, layer) for layer in layers), strict=True)
    encoder = np.zeros_like(placed.src_rows)
    encoder[:, 0] = placed.src_rows[:, 0] * 2.0 * model.num_inputs * edge_width(model, 0)
    owners = (placed.src_rows > 0).sum(axis=-1, keepdims=True) - 1.0
    return Work(
        before_flops=placed.src_rows * per_layer([source_flops(model, layer) for layer in layers]),
        encoder_flops=encoder,
        after_flops=placed.dst_rows * per_layer([destination_flops(model, layer) for layer in layers]),
        row_bytes=placed.dst_rows * per_layer([row_bytes(model, layer) for layer in layers]),
        edge_bytes=placed.edges * per_layer(list(per_edge)) + placed.dst_rows * per_layer(list(per_row)),
        sent=width * (sources * placed.kv + destinations * placed.q),
        returned=width * returns * placed.q.transpose(0, 1, 3, 2),
        moved=passed * placed.moved,
        fetched=b * model.num_inputs * placed.fetched,
        messages=placed.messages * exchanges + 2.0 * met * np.maximum(owners, 0.0),
        meetings=np.where(owners > 0, met, 0.0) * (placed.src_rows > 0),
    )


# Memory of one rank ---------------------------------------------------------------------------------------------------


def activation_bytes(model: ModelShape, rows: Array, halo: Array, checkpointing: str) -> Array:
    """What one layer holds for backward: `b [(8 n + 2 h) C + 2 n F] + b n H`; checkpointed `b (n + 2 h) C`.

    NAGphormer has that many rows for each hop.
    """
    b, c = model.bytes_per_element, model.width
    rows = rows * (model.hops + 1)
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

    step_s: the whole step. rowwise_s, edgewise_s, visits_s, packing_s: busy seconds. wait_s: seconds until rows had
    arrived, a pipeline's bubble among them. sent_bytes: of all exchanges. rows, edges: of all layers, forward.
    memory_bytes: what was there before, states and activations. fits: the limit holds.
    """

    step_s: float
    rowwise_s: tuple[float, ...]
    edgewise_s: tuple[float, ...]
    visits_s: tuple[float, ...]
    packing_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    reduction_s: float
    optimizer_s: float
    sent_bytes: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    rows: tuple[float, ...]
    edges: tuple[float, ...]
    fits: bool

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of each rank without waiting, reduction and optimizer."""
        parts = (self.rowwise_s, self.edgewise_s, self.visits_s, self.packing_s)
        return tuple(map(sum, zip(*parts, strict=True)))


def busy_terms(plan: Plan, workload: Workload, topology: Topology, placed: Loads) -> dict[str, Array]:
    """Seconds of each rank `[P]` without waiting, by what a calibration fits: forward and backward, visits, packing."""
    work, speeds = work_of(placed, workload.model), topology.rates
    before, after = work.before_flops / speeds.row_flops_per_s, work.after_flops / speeds.row_flops_per_s
    after = after + work.row_bytes / speeds.row_bytes_per_s
    encoder = work.encoder_flops / speeds.row_flops_per_s
    row, edge = before + after, work.edge_bytes / speeds.edge_bytes_per_s
    row_again, edge_again = float(plan.checkpointing == "layer"), float(plan.checkpointing != "none")
    moved = work.sent + work.returned + work.moved
    packed = 2.0 * (moved.sum(axis=-1) + moved.sum(axis=-2)) / speeds.packed_bytes_per_s
    packed[:, 0] += (work.fetched.sum(axis=-1) + work.fetched.sum(axis=-2)) / speeds.packed_bytes_per_s
    visits = np.full(row.shape, 1.0) * speeds.visit_s
    terms = {
        "row_forward": row,
        "row_backward": row * speeds.row_backward - encoder * (speeds.row_backward / 2.0),
        "row_again": row * row_again,
        "edge_forward": edge,
        "edge_backward": edge * speeds.edge_backward,
        "edge_again": edge * edge_again,
        "visits": visits,
        "packing": packed + 2.0 * work.messages * speeds.message_s,
    }
    return {name: np.asarray(values).sum(axis=(0, 1)) for name, values in terms.items()}


@dataclass(frozen=True)
class Engine:
    """What of the engine costs or saves: ZeRO stage, whether the optimizer's state lies on the host."""

    zero_stage: int = 0
    offload: bool = False


def estimate(
    plan: Plan,
    workload: Workload,
    topology: Topology,
    engine: Engine = Engine(),
    *,
    without: Collection[str] = (),
    placed: Loads | None = None,
) -> Estimate:
    """Price a plan: place the work, then let every rank run its waves and layers, waiting where rows must arrive.

    `t[r] = max(t[r], max over senders s (t[s] + alpha + bytes / beta)) + work`, wave by wave and layer by layer,
    forward and, in reverse, backward; the step is the latest rank's end plus gradients, optimizer and the rest.

    without: terms of `TERMS` that count nothing, for ablations. placed: `place(plan, workload)` if at hand.
    """
    if topology.world_size != plan.world_size:
        raise ValueError(
            f"the topology has {topology.world_size} devices, the plan {plan.world_size} ranks; describe as many"
        )
    unknown = sorted(set(without) - set(TERMS))
    if unknown:
        raise ValueError(f"there is no cost term {unknown[0]!r}; use some of {', '.join(TERMS)}")
    model, size = workload.model, plan.world_size
    placed = placed or place(plan, workload)
    work = work_of(placed, model)
    speeds = topology.rates
    rowwise, edgewise = float("rowwise" not in without), float("edgewise" not in without)
    visit = speeds.visit_s * ("visits" not in without)
    exchange = float("exchange" not in without)
    before = rowwise * work.before_flops / speeds.row_flops_per_s
    encoder = rowwise * work.encoder_flops / speeds.row_flops_per_s
    after = rowwise * (work.after_flops / speeds.row_flops_per_s + work.row_bytes / speeds.row_bytes_per_s)
    between = edgewise * work.edge_bytes / speeds.edge_bytes_per_s
    row_back, edge_back = speeds.row_backward, speeds.edge_backward
    row_passes = row_back + (1.0 if plan.checkpointing == "layer" else 0.0)
    edge_passes = edge_back + (0.0 if plan.checkpointing == "none" else 1.0)
    before_back = before * row_passes - encoder * (row_back / 2.0)
    posting = exchange * work.messages * speeds.message_s
    meet_s = exchange * work.meetings * topology.slowest_link.alpha_s

    clock, waited, packing = np.zeros(size), np.zeros(size), np.zeros(size)

    def meet(sent: Array) -> None:
        """Rows go from rank to rank; a rank's port carries what it sends and what it receives."""
        nonlocal clock, waited, packing
        if not exchange or not sent.any():
            return
        out, into = sent.sum(axis=1), sent.sum(axis=0)
        clock = clock + out / speeds.packed_bytes_per_s
        on_way = np.maximum(np.maximum(sent, out[:, None]), into[None, :]) / topology.bytes_per_s
        arrival = np.where(sent > 0, clock[:, None] + topology.alpha_s + on_way, 0.0).max(axis=0)
        later = np.maximum(clock, arrival)
        waited += later - clock
        clock = later + into / speeds.packed_bytes_per_s
        packing += (out + into) / speeds.packed_bytes_per_s

    def together(seconds: Array) -> None:
        """Sums over all rows: the ranks that own some meet as often as the layer says."""
        nonlocal clock, waited
        owning = seconds > 0
        if owning.any():
            later = np.where(owning, clock[owning].max() + seconds, clock)
            waited += later - clock
            clock = later

    num_waves = placed.src_rows.shape[0]
    rounds = plan.rounds(num_waves)
    for waves in rounds:
        for w in waves:
            meet(work.fetched[w])
        for w in waves:
            for layer in range(plan.num_layers):
                clock = clock + before[w, layer] + visit / 3.0 + posting[w, layer]
                meet(work.sent[w, layer])
                clock = clock + between[w, layer]
                meet(work.returned[w, layer])
                together(meet_s[w, layer])
                clock = clock + after[w, layer]
                meet(work.moved[w, layer])
        for w in reversed(waves):
            for layer in reversed(range(plan.num_layers)):
                meet(work.moved[w, layer].T)
                clock = clock + after[w, layer] * row_passes + visit * (2.0 / 3.0) + posting[w, layer]
                together(meet_s[w, layer])
                meet(work.returned[w, layer].T)
                clock = clock + between[w, layer] * edge_passes
                meet(work.sent[w, layer].T)
                clock = clock + before_back[w, layer]
    reduction = reduction_s(model.parameters, topology, engine.zero_stage, len(rounds)) * ("reduction" not in without)
    optimizer = optimizer_s(model.parameters, topology, engine) * ("optimizer" not in without)
    memory = memory_bytes(plan, workload, placed, topology, engine)
    sent = 2.0 * (work.sent + work.returned + work.moved).sum(axis=(0, 1)).sum(axis=1)
    sent += work.fetched.sum(axis=0).sum(axis=1)
    limits = [device.memory_bytes for device in topology.devices]
    row_s = (before + before_back + after * (1.0 + row_passes)).sum(axis=(0, 1))
    edge_s = between.sum(axis=(0, 1)) * (1.0 + edge_passes)
    visits_s = num_waves * plan.num_layers * visit + np.zeros(size)
    packing += 2.0 * posting.sum(axis=(0, 1))
    end = float(clock.max())
    slower = 1.0 + topology.contention * crowding(float((row_s + edge_s + visits_s + packing).sum()), end, size)
    return Estimate(
        step_s=slower * end + reduction + optimizer + topology.step_s,
        rowwise_s=_tuple(slower * row_s),
        edgewise_s=_tuple(slower * edge_s),
        visits_s=_tuple(slower * visits_s),
        packing_s=_tuple(slower * packing),
        wait_s=_tuple(slower * waited),
        reduction_s=reduction,
        optimizer_s=optimizer,
        sent_bytes=_tuple(sent),
        memory_bytes=_tuple(memory),
        rows=_tuple(placed.src_rows.sum(axis=(0, 1))),
        edges=_tuple(placed.edges.sum(axis=(0, 1))),
        fits=bool(all(m <= limit for m, limit in zip(memory, limits, strict=True))),
    )


def crowding(busy_s: float, step_s: float, size: int) -> float:
    """How much ranks compute at the same time: 0 if one after the other, 1 if all are busy all along.

    `(busy / step - 1) / (P - 1)`, busy the seconds of all ranks together. Ranks that share a memory slow each other
    down by it: on two cores of one processor the same work took up to 1.5 times as long (docs/log.md, 2026-11-30).
    """
    if size == 1 or step_s <= 0:
        return 0.0
    return float(min(max((busy_s / step_s - 1.0) / (size - 1), 0.0), 1.0))


def reduction_s(parameters: int, topology: Topology, zero_stage: int, rounds: int) -> float:
    """Gradients over all ranks: `2 (P - 1) / P` times their bytes over the slowest link, and `2 (P - 1)` messages.

    ZeRO 2 and 3 reduce once a round, ZeRO 3 gathers the weights for forward and backward besides.
    """
    size = topology.world_size
    if size == 1:
        return 0.0
    link = topology.slowest_link
    once = 2.0 * (size - 1) * link.alpha_s + 2.0 * (size - 1) / size * 4.0 * parameters / link.bytes_per_s
    return once * (rounds if zero_stage >= 2 else 1) * (2.0 if zero_stage == 3 else 1.0)


def optimizer_s(parameters: int, topology: Topology, engine: Engine) -> float:
    """Adam's memory traffic, `28 B` a parameter of the rank's shard; offloaded, gradients and weights cross besides."""
    shard = parameters / (topology.world_size if engine.zero_stage else 1)
    seconds = 28.0 * shard / topology.optimizer_bytes_per_s
    if engine.offload:
        seconds += 2.0 * 4.0 * shard / topology.host_bytes_per_s
    return seconds


def round_bytes(plan: Plan, workload: Workload, placed: Loads) -> Array:
    """Peak bytes of the activations of a step on each rank `[P]`.

    What the waves of the fullest round hold for backward, and what is live besides in one layer. From the model's
    footprint where it was measured, with `2 b C` for a row of another rank; else from `activation_bytes`. Of what a
    layer holds a row, up to `4 b C` belong to the row before it (itself, its norm, K and V), the rest to the one after.
    """
    model = workload.model
    measured = model.footprint(plan.checkpointing)
    rows, halo = placed.src_rows, placed.halo_rows  # [W, L, P]
    if measured is None:
        held = activation_bytes(model, rows, halo, plan.checkpointing).sum(axis=1)  # [W, P]
        live = activation_bytes(model, rows, halo, "none").max(axis=1) * float(plan.checkpointing == "layer")
    else:
        received = 2.0 * model.bytes_per_element * model.width * halo
        before = min(measured.held_row, 4.0 * model.bytes_per_element * model.width)
        after = measured.held_row - before
        held = before * rows + after * placed.dst_rows + measured.held_edge * placed.edges + received
        held = held.sum(axis=1)
        held = held + model.bytes_per_element * model.num_inputs * rows[:, 0]
        live = (measured.live_row * rows + measured.live_edge * placed.edges).max(axis=1)
    each = [held[list(waves)].sum(axis=0) + live[list(waves)].max(axis=0) for waves in plan.rounds(held.shape[0])]
    peak: Array = np.max(each, axis=0)
    return peak


def memory_bytes(plan: Plan, workload: Workload, placed: Loads, topology: Topology, engine: Engine) -> Array:
    """Peak bytes of each rank `[P]`: what was there before, states, `held` times the step's activations."""
    states = state_bytes(workload.model.parameters, engine.zero_stage, plan.world_size, engine.offload)
    resident = np.array([device.resident_bytes for device in topology.devices])
    peak: Array = topology.held * round_bytes(plan, workload, placed) + states + resident
    return peak


def _tuple(values: Array) -> tuple[float, ...]:
    return tuple(float(v) for v in values)
