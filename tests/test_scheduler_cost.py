"""The cost model means what it says: work is conserved, bytes follow the formulas, more of anything is never slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost import TERMS, Work, busy_terms, estimate, reduction_s, state_bytes, work_of
from scheduler.placing import Loads, place
from scheduler.plan import MODES, Placement, Plan, fixed_plan
from scheduler.topology import Device, Link, Topology
from scheduler.workload import ModelShape, Workload, uniform_workload

MODEL = ModelShape("GT", 16, 32, 4, 4, 8, 3, 10_000)
SHAPES: dict[str, dict[str, int]] = {"Polynormer": {"global_layers": 2}, "NAGphormer": {"hops": 3}}
K, P = 8, 4


def machine(size: int = P, **device: float) -> Topology:
    """Equal devices on one host."""
    one = Device(**{"row_flops_per_s": 1e9, "edge_bytes_per_s": 1e9, "visit_s": 1e-4, "memory_bytes": 1e9, **device})
    return Topology((one,) * size, Link(1e-4, 1e8), Link(1e-3, 1e7), 1e10, 0.0)


def work(micro_batches: int = 1, halo: float = 0.4) -> Workload:
    return uniform_workload(MODEL, [100.0] * K, [1000.0] * K, halo, micro_batches)


@st.composite
def plans(draw: st.DrawFn, size: int = P, layers: int = MODEL.layers) -> Plan:
    """Any legal plan of K partitions."""
    placements = []
    for _ in range(K):
        ranks = tuple(draw(st.permutations(range(size)))[: draw(st.integers(1, size))])
        mode = draw(st.sampled_from(MODES))
        if mode == "graph":
            placements.append(Placement("graph", ranks[:1]))
        elif mode == "pipeline":
            cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
            split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
            placements.append(Placement("pipeline", ranks, split))
        else:
            placements.append(Placement(mode, ranks))
    wave, rounds = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    return Plan(size, layers, tuple(placements), wave, rounds, draw(st.sampled_from(("none", "edges", "layer"))))


@given(plan=plans(), micro_batches=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_work_is_conserved_by_any_plan(plan: Plan, micro_batches: int) -> None:
    workload = work(micro_batches)
    placed = place(plan, workload)
    assert placed.src_rows.sum() == pytest.approx(workload.rows)
    assert placed.dst_rows.sum() == pytest.approx(workload.rows)
    assert placed.edges.sum() == pytest.approx(workload.edges)
    for sent in (placed.kv, placed.q, placed.moved):
        assert (sent >= 0).all()
        assert np.einsum("wlrr->", sent) == 0, "a rank sends itself nothing"


@given(plan=plans(), micro_batches=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_a_better_machine_is_never_slower(plan: Plan, micro_batches: int) -> None:
    workload, base = work(micro_batches), machine()
    step = estimate(plan, workload, base).step_s
    better = [
        replace(base, same_host=Link(1e-4, 1e9)),
        replace(base, same_host=Link(1e-5, 1e8)),
        machine(row_flops_per_s=2e9),
        machine(edge_bytes_per_s=2e9),
        machine(visit_s=0.0),
        machine(row_backward=1.5),
        replace(base, optimizer_bytes_per_s=1e11),
    ]
    for topology in better:
        assert estimate(plan, workload, topology).step_s <= step * (1 + 1e-12)
    slow = replace(base.devices[2], row_flops_per_s=5e8)
    slower = replace(base, devices=(*base.devices[:2], slow, base.devices[3]))
    assert estimate(plan, workload, slower).step_s >= step * (1 - 1e-12)


def test_bytes_follow_the_formulas() -> None:
    n, c, b = 100.0 * K, MODEL.width, MODEL.bytes_per_element
    workload = work()

    def placed(mode: str, workload: Workload = workload) -> tuple[Loads, Work]:
        found = place(fixed_plan(mode, [1.0] * K, P, MODEL.layers), workload)  # type: ignore[arg-type]
        return found, work_of(found, MODEL)

    loads, graph = placed("graph")
    halo = loads.halo_rows[0, 0]
    # 2 h C b: keys and values of the halo
    assert graph.sent[0, 0].sum(axis=0) == pytest.approx(2 * halo * c * b)
    assert graph.returned.sum() == graph.moved.sum() == graph.fetched.sum() == 0
    # 4 (u - 1) / u n C b over a group of u, a rank's share each: Q, K, V there and O back
    _, model = placed("model")
    layer = (model.sent + model.returned)[0, 0]
    assert layer.sum() == pytest.approx(4 * (P - 1) / P * n * c * b)
    assert layer.sum(axis=1) == pytest.approx(np.full(P, layer.sum() / P))
    # n C b at each of the stage borders
    _, pipeline = placed("pipeline")
    assert pipeline.moved.sum() == pytest.approx((P - 1) * n * c * b)
    assert pipeline.sent.sum() == 0
    # Features go to their micro-batch's rank where the batch is another one every step.
    _, data = placed("data", work(P))
    assert data.sent.sum() == data.returned.sum() == data.moved.sum() == data.fetched.sum() == 0
    _, data = placed("data", replace(work(P), repeats=False))
    assert data.fetched.sum() == pytest.approx((P - 1) * n * MODEL.num_features * b)


@pytest.mark.parametrize(
    "kind", ["GT", "GPS", "GCN", "SAGE", "GAT", "MLP", "SGFormer", "Polynormer", "Exphormer", "NAGphormer"]
)
def test_every_kind_of_model_has_a_price(kind: str) -> None:
    """Finite under every mode, and no less with more layers."""
    shape = replace(MODEL, kind=kind, **SHAPES.get(kind, {}))
    for mode in MODES:
        steps = []
        for layers in (MODEL.layers, MODEL.layers + 1):
            model = replace(shape, layers=layers)
            workload = uniform_workload(model, [100.0] * K, [1000.0] * K, 0.4, 2)
            cost = estimate(fixed_plan(mode, [1.0] * K, P, layers), workload, machine())
            assert np.isfinite([cost.step_s, *cost.memory_bytes, *cost.sent_bytes]).all()
            steps.append(cost.step_s)
        assert 0 < steps[0] < steps[1]


def test_a_stage_border_passes_what_the_layer_gives() -> None:
    """In columns of one row: halves of SGFormer, of Polynormer before its last local layer; NAGphormer's hops."""
    plan = fixed_plan("pipeline", [1.0] * K, P, MODEL.layers)
    n, c, b = 100.0 * K, MODEL.width, MODEL.bytes_per_element
    for kind, columns in (("SGFormer", 3 * 2 * c), ("Polynormer", 2 * c + c + c), ("NAGphormer", 3 * 4 * c)):
        model = replace(MODEL, kind=kind, **SHAPES.get(kind, {}))
        workload = uniform_workload(model, [100.0] * K, [1000.0] * K, 0.4)
        assert work_of(place(plan, workload), model).moved.sum() == pytest.approx(n * b * columns), kind


def test_messages_are_counted_once_a_peer_however_many_micro_batches_a_wave_holds() -> None:
    plan = fixed_plan("model", [1.0] * K, 2, MODEL.layers)
    one, many = place(plan, work(1)), place(plan, work(3))
    # K and V, Q, O: each to the other and from it
    assert one.messages[0, 0] == pytest.approx([6.0, 6.0])
    assert (many.messages == one.messages).all()
    apart = replace(plan, micro_batches_per_wave=1)
    assert place(apart, work(3)).messages.sum() == 3 * one.messages.sum()


def test_terms_of_a_fit_are_those_of_the_estimate() -> None:
    for mode in MODES:
        for checkpointing in ("none", "edges", "layer"):
            plan = fixed_plan(mode, [1.0] * K, P, MODEL.layers, checkpointing=checkpointing)  # type: ignore[arg-type]
            workload, topology = work(2), machine(packed_bytes_per_s=1e8, message_s=1e-5)
            terms = busy_terms(plan, workload, topology, place(plan, workload))
            cost = estimate(plan, workload, topology)
            rows = terms["row_forward"] + terms["row_backward"] + terms["row_again"]
            edges = terms["edge_forward"] + terms["edge_backward"] + terms["edge_again"]
            assert cost.rowwise_s == pytest.approx(rows)
            assert cost.edgewise_s == pytest.approx(edges)
            assert cost.visits_s == pytest.approx(terms["visits"])
            assert cost.packing_s == pytest.approx(terms["packing"])


@pytest.mark.parametrize("term", TERMS)
def test_a_term_left_out_makes_a_step_no_longer(term: str) -> None:
    topology = machine(packed_bytes_per_s=1e8, message_s=1e-5)
    for mode in MODES:
        plan = fixed_plan(mode, [1.0] * K, P, MODEL.layers)
        whole, part = estimate(plan, work(3), topology), estimate(plan, work(3), topology, without=[term])
        assert part.step_s <= whole.step_s
    with pytest.raises(ValueError, match="no cost term 'colour'"):
        estimate(plan, work(3), topology, without=["colour"])


def test_a_plan_for_another_workload_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan places 3 partitions and 4 layers, the workload has 8 and 4"):
        place(fixed_plan("graph", [1.0] * 3, P, MODEL.layers), work())


def test_needed_rows_of_partitions_on_one_rank_count_once() -> None:
    everything = work(halo=float(K - 1))  # every partition needs every row of all others
    graph = place(fixed_plan("graph", [1.0] * K, P, MODEL.layers), everything)
    assert graph.halo_rows[0, 0] == pytest.approx(100.0 * (K - K // P))


@pytest.mark.parametrize("waves", [1, 2, 8])
def test_a_pipeline_fills_and_drains(waves: int) -> None:
    """Without messages: `(m + p - 1) t`, forward and backward, with equal stages."""
    free = replace(machine(visit_s=0.0), same_host=Link(0.0, 1e30))
    plan = fixed_plan("pipeline", [1.0] * K, P, MODEL.layers)
    layers_alike = replace(work(waves), model=replace(MODEL, num_features=0, num_classes=0))
    cost = estimate(plan, layers_alike, free)
    stage = (cost.rowwise_s[0] + cost.edgewise_s[0]) / waves
    expected = (waves + P - 1) * stage + cost.reduction_s + cost.optimizer_s
    assert cost.step_s == pytest.approx(expected)


def test_data_parallel_micro_batches_share_the_time() -> None:
    free = replace(machine(visit_s=0.0), same_host=Link(0.0, 1e30))
    plan = fixed_plan("data", [1.0] * K, P, MODEL.layers)
    alone = fixed_plan("data", [1.0] * K, 1, MODEL.layers)
    many = estimate(plan, work(P), free)
    one = estimate(alone, work(P), machine(1, visit_s=0.0))
    assert many.step_s - many.reduction_s == pytest.approx((one.step_s - one.optimizer_s) / P + many.optimizer_s)


def test_memory_falls_with_checkpointing_rounds_and_zero() -> None:
    workload, base = work(4), machine()
    plan = fixed_plan("graph", [1.0] * K, P, MODEL.layers, micro_batches_per_wave=1)
    none = max(estimate(plan, workload, base).memory_bytes)
    assert max(estimate(replace(plan, checkpointing="layer"), workload, base).memory_bytes) < none
    assert max(estimate(replace(plan, waves_per_round=1), workload, base).memory_bytes) < none
    states = [state_bytes(1000, stage, 4, False) for stage in (0, 1, 2, 3)]
    assert states == sorted(states, reverse=True)
    assert states[0] == 16_000 and states[3] == 4_000
    assert not estimate(plan, workload, machine(memory_bytes=none / 2)).fits


def test_gradients_cost_more_with_more_rounds_only_where_they_are_reduced_each_round() -> None:
    assert reduction_s(1000, machine(1), 2, 5) == 0
    once = reduction_s(1000, machine(), 1, 1)
    assert reduction_s(1000, machine(), 1, 5) == once
    assert reduction_s(1000, machine(), 2, 5) == pytest.approx(5 * once)


def test_a_topology_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="2 devices, the plan 4 ranks"):
        estimate(fixed_plan("graph", [1.0] * K, P, MODEL.layers), work(), machine(2))
