"""What makes the controller switch and what does not, played by the simulator and by windows made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from monitor.windows import Window
from scheduler.controller import TRIGGERS, Controller, Decision, Rules, replay
from scheduler.cost import Engine, estimate
from scheduler.plan import Plan, fixed_plan
from scheduler.search import Limits, family_of, search
from scheduler.simulator import Event, Played, machine_at, parse_event, play, window_of
from scheduler.topology import Device, Link, Topology
from scheduler.workload import ModelShape, Workload, uniform_workload

MODEL = ModelShape("GT", 32, 64, 4, 3, 16, 4, 20_000)
WORK = uniform_workload(MODEL, [200.0] * 16, [3e4] * 16, 0.5)
NEEDY = uniform_workload(MODEL, [200.0] * 16, [3e4] * 16, 3.0)  # every partition needs rows of many others
DEVICE = Device(2e9, 1e9, 1e-4, 1e9, row_bytes_per_s=1e9, packed_bytes_per_s=1e9, message_s=1e-5)
MACHINE = Topology((DEVICE,) * 4, Link(1e-4, 1e8), Link(1e-4, 1e8), 1e10, 0.0)
SWITCHES = ("switch", "return")
RULES = Rules()


def controller(rules: Rules = RULES, workload: Workload = WORK, plan: Plan | None = None, **more: Any) -> Controller:
    plan = plan or search(workload, MACHINE).plan
    return Controller(rules, workload, MACHINE, plan, switch_cost_s=0.2, **more)


def run(
    events: list[Event], rules: Rules = RULES, workload: Workload = WORK, *, noise: float = 0.0, steps: int = 300
) -> Played:
    mind = controller(rules, workload)
    return play(
        "adaptive", workload, MACHINE, mind.plan, steps, events, controller=mind, switch_s=0.2, noise=noise, seed=1
    )


def switches(played: Played) -> list[Decision]:
    return [decision for decision in played.decisions if decision.verdict in SWITCHES]


ALTERNATING = [Event(20 * i, ((i % 2),), 2.0, until=20 * i + 20) for i in range(3, 30)]


# What it does ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tried", [False, True])
def test_a_plan_that_was_tried_beside_others_is_not_searched_for_again(tried: bool) -> None:
    mind = controller(tried=tried)
    for last in (9, 19):
        window = window_of([(estimate(mind.plan, WORK, MACHINE), 1.0)] * 10, last, mind.plan, MACHINE)
        mind.observe(window, steps_left=100)
    assert [decision.triggers for decision in mind.decisions] == [() if tried else ("first window",), ()]
    assert [bool(decision.candidates) for decision in mind.decisions] == [not tried, False]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_on_a_steady_machine_nothing_is_switched(noise: float) -> None:
    assert switches(run([], noise=noise)) == []


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_rank_that_slows_is_one_switch_which_recovers_most_of_the_gap(noise: float) -> None:
    event = Event(100, (2,), 2.0)
    played = run([event], noise=noise)
    (decision,) = switches(played)
    assert "straggler" in decision.triggers and decision.slowness[2] == pytest.approx(2.0, rel=0.15)
    assert decision.step <= 129, "within three windows"
    assert decision.kept is True and decision.outcome_s is not None
    after = machine_at(MACHINE, [event], 100)
    kept = estimate(controller().plan, WORK, after).step_s
    best = search(WORK, after).chosen
    assert best is not None and best.estimate is not None
    recovered = (kept - decision.outcome_s) / (kept - best.estimate.step_s)
    assert recovered >= 0.8
    fixed = play("fixed", WORK, MACHINE, controller().plan, 300, [event], noise=noise, seed=1)
    assert played.total_s < fixed.total_s


def heavier(window: Window, rank: int, amount: float, seconds: float) -> Window:
    """A window in which a rank worked on `amount` times as much, and computed `seconds` times as long."""
    ranks = list(window.ranks)
    one = ranks[rank]
    ranks[rank] = replace(
        one, rows=amount * one.rows, edges=amount * one.edges, compute_s=seconds * one.compute_s, wait_s=0.0
    )
    return replace(window, ranks=tuple(ranks))


@pytest.mark.parametrize(("amount", "seconds", "slowness"), [(3.0, 3.0, 1.0), (1.0, 3.0, 3.0), (3.0, 6.0, 2.0)])
def test_a_rank_whose_micro_batches_are_larger_is_not_a_slow_one(
    amount: float, seconds: float, slowness: float
) -> None:
    """Micro-batches differ from step to step: what a rank worked on counts, not what the first step had."""
    mind = controller()
    usual = window_of([(estimate(mind.plan, WORK, MACHINE), 1.0)] * 10, 9, mind.plan, MACHINE)
    decision = mind.observe(heavier(usual, 2, amount, seconds), steps_left=100)
    assert decision.slowness[2] == pytest.approx(slowness, rel=0.05)
    assert ("straggler" in decision.triggers) == (slowness > RULES.straggler)


def test_a_rank_without_work_in_the_first_step_is_known_once_it_had_some() -> None:
    mind = controller()
    usual = window_of([(estimate(mind.plan, WORK, MACHINE), 1.0)] * 10, 9, mind.plan, MACHINE)
    idle = uniform_workload(MODEL, [200.0] * 16, [3e4] * 16, 0.5)
    parts = [p for p, place in enumerate(mind.plan.partitions) if place.ranks == (2,)]
    assert parts, "the best plan places whole partitions"
    for layer in [layer for layers in idle.micro_batches for layer in layers]:
        for amounts in (layer.src_rows, layer.dst_rows, layer.edges):
            amounts[parts] = 0.0
    mind.workload = idle
    assert mind.observe(heavier(usual, 2, 1.0, 3.0), steps_left=100).slowness[2] == pytest.approx(3.0, rel=0.15)


def test_a_link_that_fills_is_probed_and_left() -> None:
    played = run([Event(100, (0, 1), 50.0)], workload=NEEDY)
    found = switches(played)
    assert found and "exchange hotspot" in found[0].triggers
    assert found[0].links == ((0, 1, pytest.approx(50.0)),)
    assert played.plans[-1][1] != played.plans[0][1]


def searches(played: Played) -> list[tuple[int, tuple[str, ...]]]:
    """The step and triggers of every decision that rests on a search, first windows and reviews left out."""
    found = [(d.step, d.triggers) for d in played.decisions if d.candidates]
    return [(step, triggers) for step, triggers in found if not {"first window", "review"} & set(triggers)]


def test_a_straggler_that_was_answered_is_not_news_again() -> None:
    played = run([Event(100, (2,), 2.0)], noise=0.02)
    (switch,) = switches(played)
    assert {step for step, _ in searches(played)} <= set(range(100, switch.step + 1))


def test_a_rank_that_recovers_is_given_work_again() -> None:
    played = run([Event(100, (2,), 2.0, until=300)], steps=600)
    away, back = switches(played)
    assert "straggler" in back.triggers and 300 <= back.step <= 329 and back.slowness[2] == 1.0
    assert played.plans[-1][1].fingerprint == played.plans[0][1].fingerprint, "the machine is what it was"
    assert away.kept and back.kept


def test_a_link_that_fills_after_a_straggler_was_answered_is_noticed() -> None:
    played = run([Event(100, (2,), 2.0), Event(300, (0, 1), 50.0)], workload=NEEDY, steps=600)
    late = [d for d in played.decisions if d.step >= 300 and d.links]
    assert late and late[0].step <= 329 and late[0].links == ((0, 1, pytest.approx(50.0)),)
    assert late[0].candidates, "searched for, with what the probe found"


def test_an_alternating_straggler_is_not_followed_to_and_fro() -> None:
    played = run(ALTERNATING, steps=600)
    assert [d.verdict for d in played.decisions].count("switch") <= RULES.max_failures
    assert played.decisions[-1].verdict == "stopped", "it finds out that switching does not pay"
    fixed = play("fixed", WORK, MACHINE, controller().plan, 600, ALTERNATING)
    assert played.total_s <= fixed.total_s


def test_without_hysteresis_it_follows_more_often() -> None:
    free, held = run(ALTERNATING, Rules(hysteresis=False), steps=200), run(ALTERNATING, steps=200)
    assert len(switches(free)) > len(switches(held))


def test_few_steps_left_are_not_worth_a_switch() -> None:
    mind = controller()
    mind.switched(5.0)
    slow = machine_at(MACHINE, [Event(0, (2,), 2.0)], 0)
    cost = estimate(mind.plan, WORK, slow)
    decisions = [
        mind.observe(window_of([(cost, 1.0)] * 10, 10 * i + 9, mind.plan, slow), steps_left=1) for i in range(4)
    ]
    assert [d.verdict for d in decisions] == ["stay"] * 4
    assert "over 1 steps, 1.5 x 5 s of switching" in decisions[0].rule


def test_with_modes_fixed_it_only_moves_partitions() -> None:
    mind = controller(limits=Limits(allow=("graph",)), plan=search(WORK, MACHINE, limits=Limits(allow=("graph",))).plan)
    played = play("a", WORK, MACHINE, mind.plan, 300, [Event(100, (2,), 2.0)], controller=mind, switch_s=0.2)
    assert {family_of(plan) for _, plan in played.plans} == {"graph"} and len(played.plans) == 2


# Promises -------------------------------------------------------------------------------------------------------------


def windows_of_a_lie(mind: Controller, better_s: float, worse_s: float, count: int) -> list[Decision]:
    """Feed windows in which every plan but the first is slower than it was said to be."""
    first, decisions = mind.plan, []
    for i in range(count):
        seconds = better_s if mind.plan == first else worse_s
        cost = estimate(mind.plan, WORK, MACHINE)
        window = window_of([(cost, seconds / cost.step_s)] * 10, 10 * i + 9, mind.plan, MACHINE)
        decisions.append(mind.observe(window, 1000 - 10 * i))
    return decisions


def liar(mind: Controller) -> Controller:
    """A controller whose first plan is worse than the search would have it, so that it wants to switch at once."""
    bad = fixed_plan("graph", [1.0] + [0.0] * 15, 4, MODEL.layers)  # nearly all on few ranks
    return controller(mind.rules, plan=bad)


def test_a_broken_promise_is_followed_by_the_way_back_and_a_longer_rest() -> None:
    mind = liar(controller(Rules(cooldown=10)))
    decisions = windows_of_a_lie(mind, better_s=1.0, worse_s=2.0, count=6)
    verdicts = [decision.verdict for decision in decisions]
    assert verdicts[0] == "switch"
    assert verdicts.count("return") == 1
    back = decisions[verdicts.index("return")]
    assert "promise" in back.triggers and back.chosen_fingerprint == decisions[0].plan_fingerprint
    told = mind.decisions[0]
    assert told.kept is False and told.outcome_s == pytest.approx(2.0)
    assert mind._cooldown == 20


def test_it_goes_back_even_where_it_then_stops_for_good() -> None:
    mind = liar(controller(Rules(cooldown=0, max_failures=1)))
    decisions = windows_of_a_lie(mind, better_s=1.0, worse_s=2.0, count=6)
    verdicts = [decision.verdict for decision in decisions]
    assert verdicts == ["switch", "stay", "return", "stopped", "stopped", "stopped"]
    assert mind.plan.fingerprint == decisions[0].plan_fingerprint, "the better plan runs"


def test_a_way_back_promises_nothing_and_so_is_never_undone() -> None:
    mind = liar(controller(Rules(cooldown=10, max_failures=10)))
    decisions = windows_of_a_lie(mind, better_s=1.0, worse_s=2.0, count=30)
    undone = [
        (a.chosen_fingerprint, b.chosen_fingerprint)
        for a, b in zip(decisions[:-1], decisions[1:], strict=True)
        if a.verdict == "return" and b.verdict in SWITCHES
    ]
    assert undone == []


# Memory ---------------------------------------------------------------------------------------------------------------


def test_a_plan_that_no_longer_fits_is_left_whatever_it_costs() -> None:
    plan = fixed_plan("graph", WORK.work, 4, MODEL.layers)
    peak = max(estimate(plan, WORK, MACHINE).memory_bytes)
    mind = controller(plan=plan, limits=Limits(memory_bytes=0.8 * peak))
    cost = estimate(plan, WORK, MACHINE)
    decision = mind.observe(window_of([(cost, 1.0)] * 10, 9, plan, MACHINE), 3)
    assert decision.verdict == "switch" and "memory pressure" in decision.triggers
    assert max(estimate(mind.plan, WORK, MACHINE).memory_bytes) <= 0.8 * peak


# Replay ---------------------------------------------------------------------------------------------------------------


def test_replayed_from_json_the_decisions_are_the_same() -> None:
    mind = controller()
    plan, seen = mind.plan, []
    for i in range(30):
        truth = machine_at(MACHINE, [Event(100, (1,), 2.5)], 10 * i)
        cost = estimate(plan, WORK, truth)
        window = window_of([(cost, 1.0 + 0.01 * (i % 3))] * 10, 10 * i + 9, plan, truth)
        decision = mind.observe(window, 300 - 10 * i)
        entry: dict[str, Any] = {"window": window.as_dict(), "steps_left": 300 - 10 * i, "switch_s": None}
        if decision.verdict in SWITCHES:
            plan, entry["switch_s"] = mind.plan, 0.3
            mind.switched(0.3)
        seen.append(entry)
    assert any(d.verdict == "switch" for d in mind.decisions)
    again = replay(controller(), json.loads(json.dumps(seen)))
    assert again == mind.decisions
    assert json.loads(json.dumps([d.as_dict() for d in again])) == json.loads(
        json.dumps([d.as_dict() for d in mind.decisions])
    )


def test_a_window_of_another_plan_is_refused() -> None:
    mind = controller()
    cost = estimate(mind.plan, WORK, MACHINE)
    window = window_of([(cost, 1.0)], 0, mind.plan, MACHINE)
    with pytest.raises(ValueError, match="is of plan other, .* is running"):
        mind.observe(replace(window, plan_fingerprint="other"), 10)


def test_all_triggers_that_are_named_are_explained() -> None:
    played = [run([Event(100, (2,), 2.0)]), run([Event(100, (0, 1), 50.0)], workload=NEEDY)]
    named = {trigger for p in played for decision in p.decisions for trigger in decision.triggers}
    assert named <= set(TRIGGERS)


# The simulator --------------------------------------------------------------------------------------------------------


def test_events_are_read() -> None:
    assert parse_event("200:rank 3:2") == Event(200, (3,), 2.0)
    assert parse_event("100-300:link 0-1:10") == Event(100, (0, 1), 10.0, 300)
    for wrong in ("", "200:rank:2", "x:rank 3:2", "1:link 3:2", "1:rank 0-1:2", "1:disk 0:2", "1:rank 0:0"):
        with pytest.raises(ValueError, match=f"the event {wrong!r} is not understood; write STEP:rank R:TIMES"):
            parse_event(wrong)


def test_an_event_holds_from_its_step_until_its_end() -> None:
    event = Event(10, (1,), 4.0, until=20)
    slow = [machine_at(MACHINE, [event], step).devices[1].row_flops_per_s for step in (9, 10, 19, 20)]
    assert slow == [2e9, 5e8, 5e8, 2e9]
    link = machine_at(MACHINE, [Event(0, (3, 2), 5.0)], 0)
    assert link.bytes_per_s[2, 3] == 2e7 and link.bytes_per_s[0, 1] == 1e8
    with pytest.raises(ValueError, match="names rank 4, the machine has 4"):
        machine_at(MACHINE, [Event(0, (4,), 2.0)], 0)


def test_a_fixed_plan_takes_what_the_cost_model_says() -> None:
    plan = fixed_plan("graph", WORK.work, 4, MODEL.layers)
    played = play("graph", WORK, MACHINE, plan, 20, [Event(10, (0,), 2.0)])
    slow = estimate(plan, WORK, machine_at(MACHINE, [Event(10, (0,), 2.0)], 10), Engine()).step_s
    assert played.steps_s == pytest.approx([estimate(plan, WORK, MACHINE).step_s] * 10 + [slow] * 10)
    assert played.total_s == pytest.approx(sum(played.steps_s))
    with pytest.raises(ValueError, match="0 steps to play"):
        play("graph", WORK, MACHINE, plan, 0)


def test_windows_survive_json() -> None:
    plan = fixed_plan("graph", WORK.work, 4, MODEL.layers)
    window = window_of([(estimate(plan, WORK, MACHINE), 1.0)] * 3, 2, plan, MACHINE)
    window = replace(window, links=((0, 1, 1e-4, 1e8),))
    assert Window.from_dict(json.loads(json.dumps(window.as_dict()))) == window
    with pytest.raises(ValueError, match="'colour' is missing or unknown"):
        Window.from_dict({**window.as_dict(), "colour": 1})
