"""The fit finds the rates of made-up steps, keeps what they cannot tell, and predicts what it has not seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gtx.fit import FACTORS, Fit, Observation, fit, observe, with_held_out
from monitor import ExchangeRecord, StepRecord
from scheduler.cost import Engine, busy_terms, estimate, state_bytes
from scheduler.placing import place
from scheduler.plan import MODES, Plan, fixed_plan
from scheduler.search import Limits, search
from scheduler.topology import Device, Link, Topology
from scheduler.workload import ModelShape, uniform_workload

MODEL = ModelShape("GT", 32, 64, 4, 3, 16, 4, 20_000)
WORK = uniform_workload(MODEL, [200.0] * 8, [2e4] * 8, 0.5, 4)
STATES = state_bytes(MODEL.parameters, 0, 2, offload=False)
DEVICE = Device(2e9, 1e9, 1e-3, 1e9, row_bytes_per_s=1e9, packed_bytes_per_s=1e8, message_s=1e-4, resident_bytes=3e6)
PRIOR = Topology((DEVICE,) * 2, Link(1e-4, 1e8), Link(1e-4, 1e8), 1e10, 0.0)


def truth() -> Topology:
    device = replace(
        DEVICE,
        row_flops_per_s=2e9 / 3.0,
        row_bytes_per_s=1e9 / 3.0,
        edge_bytes_per_s=1e9 / 0.5,
        row_backward=2.0 * 4.0 / 3.0,
        edge_backward=2.0 * 0.4 / 0.5,
        visit_s=2e-3,
        packed_bytes_per_s=1e8 / 1.5,
        message_s=1.5e-4,
    )
    return replace(PRIOR, devices=(device,) * 2, step_s=0.02)


def seen(mode: str, noise: float = 0.0, seed: int = 0, **options: object) -> Observation:
    """What a machine like `truth` would show under a plan."""
    plan = fixed_plan(mode, [1.0] * 8, 2, MODEL.layers, **options)  # type: ignore[arg-type]
    return seen_under(plan, noise, seed)


def seen_under(plan: Plan, noise: float = 0.0, seed: int = 0) -> Observation:
    machine = truth()
    terms = busy_terms(plan, WORK, machine, place(plan, WORK))
    cost = estimate(plan, WORK, machine)
    generator = np.random.default_rng(seed)
    phases = []
    for rank in range(2):
        at = {name: float(values[rank]) for name, values in terms.items()}
        exact = {
            "rowwise": at["row_forward"] + at["visits"] / 3,
            "edgewise": at["edge_forward"],
            "backward": at["row_backward"] + at["edge_backward"] + at["visits"] * 2 / 3,
            "exchange.kv": at["packing"] + cost.wait_s[rank],
            "optimizer": cost.optimizer_s + cost.reduction_s + 0.02,
        }
        phases.append({name: s * (1 + noise * float(generator.standard_normal())) for name, s in exact.items()})
    formula = np.array(estimate(plan, WORK, PRIOR).memory_bytes) - DEVICE.resident_bytes - STATES
    peaks = tuple(round(5e6 + STATES + 1.6 * activations) for activations in formula)
    return Observation(plan, cost.step_s, tuple(phases), cost.wait_s, peaks)


def checked_fit(observations: list[Observation]) -> Fit:
    return with_held_out(fit(WORK, PRIOR, Engine(), observations), WORK, PRIOR, Engine())


def test_rates_are_found_again() -> None:
    made = checked_fit([seen(mode) for mode in MODES] + [seen("graph", micro_batches_per_wave=1)])
    assert set(made.factors) == set(FACTORS)
    assert made.factors["row_forward"] == pytest.approx(3.0, rel=0.02)
    assert made.factors["edge_forward"] == pytest.approx(0.5, rel=0.02)
    assert made.factors["packing"] == pytest.approx(1.5, rel=0.02)
    # Every plan here has as many edges a row: backward's shares cannot be told apart, their sum can.
    assert made.condition > 500
    assert max(made.errors) < 0.01 and max(made.held_out_errors) < 0.02
    assert made.topology.step_s == pytest.approx(0.02, rel=0.01)


def test_a_rank_that_was_believed_slow_is_found_to_be_like_the_other() -> None:
    wrong = PRIOR.with_speeds([1.0, 6.0])
    made = fit(WORK, wrong, Engine(), [seen("graph")])
    first, second = made.topology.devices
    assert first.row_flops_per_s == pytest.approx(second.row_flops_per_s, rel=0.2)
    assert first.edge_bytes_per_s == pytest.approx(second.edge_bytes_per_s, rel=0.2)
    assert max(made.errors) < 0.1


def test_a_rank_that_was_given_more_is_not_taken_for_a_slow_one() -> None:
    """Rank 1's micro-batches had twice the rows and edges that the workload's step has."""
    usual = seen("graph")
    parts = ("rowwise", "edgewise", "backward")
    twice = {name: s * (2 if name in parts else 1) for name, s in usual.phases[1].items()}
    placed = place(usual.plan, WORK)
    rows, edges = (counted.sum(axis=(0, 1)) * [1.0, 2.0] for counted in (placed.src_rows, placed.edges))
    larger = replace(usual, phases=(usual.phases[0], twice), rows=tuple(rows), edges=tuple(edges))
    first, second = fit(WORK, PRIOR, Engine(), [larger]).topology.devices
    assert first.row_flops_per_s == pytest.approx(second.row_flops_per_s)
    unknown = fit(WORK, PRIOR, Engine(), [replace(larger, rows=(), edges=())]).topology.devices
    assert unknown[0].row_flops_per_s > 1.5 * unknown[1].row_flops_per_s, "what was not recorded is as expected"


def test_a_plan_made_for_a_wrong_belief_is_left_once_a_window_was_fitted() -> None:
    """By the belief rank 1 gets little, by what its steps took it gets its share."""
    wrong, only = PRIOR.with_speeds([1.0, 6.0]), Limits(allow=("graph",))

    def parts_of_rank_1(plan: Plan) -> int:
        return sum(place.ranks == (1,) for place in plan.partitions)

    bad = search(WORK, wrong, limits=only).plan
    assert 1 <= parts_of_rank_1(bad) <= 2
    made = fit(WORK, wrong, Engine(), [seen_under(bad)])
    assert parts_of_rank_1(search(WORK, made.topology, limits=only).plan) >= 3


def test_memory_is_what_was_there_and_a_multiple_of_the_formula() -> None:
    observations = [seen(mode) for mode in MODES]
    made = checked_fit(observations)
    assert made.topology.held == pytest.approx(1.6, rel=0.05)
    assert [device.resident_bytes for device in made.topology.devices] == pytest.approx([5e6, 5e6], rel=0.02)
    for predicted, observation in zip(made.held_out, observations, strict=True):
        assert predicted.errors(observation)[1] < 0.02
    blind = [replace(observation, peak_memory_bytes=(0, 0)) for observation in observations]
    assert fit(WORK, PRIOR, Engine(), blind).topology.held == 1.0, "what was not measured changes nothing"


def test_what_was_not_seen_is_predicted_and_the_error_is_told() -> None:
    observations = [seen(mode, noise=0.05, seed=i) for i, mode in enumerate(("graph", "model", "data"))]
    made = checked_fit(observations)
    assert len(made.held_out) == 3
    other = seen("pipeline")
    predicted = estimate(other.plan, WORK, made.topology).step_s
    assert predicted == pytest.approx(other.step_s, rel=0.05)
    assert abs(estimate(other.plan, WORK, PRIOR).step_s / other.step_s - 1) > 0.2, "the prior alone is far off"
    told = made.as_dict()
    assert told["held_out_error_max"] == max(made.held_out_errors) and told["rows"] == made.rows > 0


def test_what_no_step_shows_keeps_its_prior() -> None:
    alone = replace(PRIOR, devices=PRIOR.devices[:1])
    plan = fixed_plan("graph", [1.0] * 8, 1, MODEL.layers)
    terms = busy_terms(plan, WORK, alone, place(plan, WORK))
    phases = {"rowwise": 2 * float(terms["row_forward"][0]), "edgewise": 2 * float(terms["edge_forward"][0])}
    made = fit(WORK, alone, Engine(), [Observation(plan, sum(phases.values()), (phases,), (0.0,), (0,))])
    made = with_held_out(made, WORK, alone, Engine())
    assert made.factors["packing"] == pytest.approx(1.0), "one rank passes nothing on"
    assert made.factors["edge_backward"] == pytest.approx(1.0), "there was no backward"
    assert made.factors["edge_forward"] == pytest.approx(2.0, rel=0.1)
    assert made.held_out == ()
    with pytest.raises(ValueError, match="at least one observation"):
        fit(WORK, alone, Engine(), [])


def test_an_observation_is_of_medians_and_of_the_slowest_rank() -> None:
    plan = fixed_plan("graph", [1.0] * 8, 2, MODEL.layers)

    def record(step: int, rank: int, wait_s: float, backward_s: float) -> StepRecord:
        phases = {"rowwise": 1.0, "backward": backward_s, "exchange.kv": wait_s, "evaluate": 5.0}
        exchange = ExchangeRecord("kv", 10, 10, wait_s, wait_s, 1)
        wall_s = sum(phases.values())
        return StepRecord(step, rank, wall_s, phases, (exchange,), 100 + step, 1, 1, 0.5, plan.fingerprint)

    steps = [[record(s, 0, 0.5, 2.0 + s), record(s, 1, 0.25, 1.0)] for s in range(3)]
    made = observe(plan, steps)
    assert made.step_s == pytest.approx(1.0 + 3.0 + 0.5), "without evaluation"
    assert made.phases[0]["backward"] == 3.0 and made.phases[1]["backward"] == 1.0
    assert made.wait_s == (0.5, 0.25)
    assert made.peak_memory_bytes == (102, 102)
