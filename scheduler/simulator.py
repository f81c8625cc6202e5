"""Plays a workload on a machine one does not have: fixed plans and an adaptive one, with scripted events.

The seconds are the cost model's and the decisions the controller's own: nothing here knows better. Not here: the
command line and the tables (`gtx/simulate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from monitor.windows import RankWindow, Window
from scheduler.controller import Controller, Decision
from scheduler.cost import Engine, Estimate, estimate
from scheduler.plan import Plan
from scheduler.topology import Topology
from scheduler.workload import Workload


@dataclass(frozen=True)
class Event:
    """From `step` on (until `until`, or for good) a rank computes, or a link carries, `times` slower.

    ranks: one rank, or the two ends of a link.
    """

    step: int
    ranks: tuple[int, ...]
    times: float
    until: int | None = None

    def __post_init__(self) -> None:
        if self.step < 0 or self.times <= 0 or len(self.ranks) not in (1, 2):
            raise ValueError(
                f"the event at step {self.step} slows {len(self.ranks)} rank(s) by {self.times}: "
                "give one rank or the two ends of a link, a step of at least 0 and a positive factor"
            )

    def holds(self, step: int) -> bool:
        return self.step <= step and (self.until is None or step < self.until)


def parse_event(text: str) -> Event:
    """`STEP:rank R:TIMES` or `STEP:link A-B:TIMES`, with `STEP-UNTIL` for a time. Raises ValueError with one line."""
    try:
        when, what, times = text.split(":")
        first, _, until = when.partition("-")
        kind, name = what.split()
        ranks = tuple(int(r) for r in name.split("-"))
        if len(ranks) != {"rank": 1, "link": 2}[kind]:
            raise ValueError
        return Event(int(first), ranks, float(times), int(until) if until else None)
    except (ValueError, KeyError):
        raise ValueError(
            f"the event {text!r} is not understood; write STEP:rank R:TIMES or STEP:link A-B:TIMES, "
            "such as '200:rank 3:2' or '100-300:link 0-1:10'"
        ) from None


@dataclass
class Played:
    """A simulated run. steps_s: seconds of each step. plans: (from step, plan). switch_s: seconds of switching."""

    name: str
    steps_s: list[float] = field(default_factory=list)
    plans: list[tuple[int, Plan]] = field(default_factory=list)
    switch_s: float = 0.0
    decisions: list[Decision] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        return math.fsum(self.steps_s) + self.switch_s


def machine_at(topology: Topology, events: Sequence[Event], step: int) -> Topology:
    """The machine with the events that hold at a step."""
    slow = [1.0] * topology.world_size
    links = {(a, b): times for a, b, times in topology.slow_links}
    for event in events:
        if event.holds(step):
            outside = [r for r in event.ranks if not 0 <= r < topology.world_size]
            if outside:
                raise ValueError(
                    f"an event names rank {outside[0]}, the machine has {topology.world_size} (0 to "
                    f"{topology.world_size - 1})"
                )
            if len(event.ranks) == 1:
                slow[event.ranks[0]] *= event.times
            else:
                a, b = sorted(event.ranks)
                links[a, b] = links.get((a, b), 1.0) * event.times
    return replace(topology.with_speeds(slow), slow_links=tuple((a, b, t) for (a, b), t in sorted(links.items())))


def play(
    name: str,
    workload: Workload,
    topology: Topology,
    plan: Plan,
    num_steps: int,
    events: Sequence[Event] = (),
    *,
    engine: Engine = Engine(),
    controller: Controller | None = None,
    window: int = 10,
    switch_s: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> Played:
    """Run `num_steps` steps. noise: relative standard deviation of each step's seconds, seeded.

    controller: decides after every `window` steps, as in a real run; without one the plan stays.
    """
    if num_steps < 1:
        raise ValueError(f"there are {num_steps} steps to play; give at least 1")
    generator = np.random.default_rng(seed)
    run = Played(name, plans=[(0, plan)])
    known: dict[tuple[Plan, Topology], Estimate] = {}
    costs: list[tuple[Estimate, float]] = []
    for step in range(num_steps):
        truth = machine_at(topology, events, step)
        key = (plan, truth)
        if key not in known:
            known[key] = estimate(plan, workload, truth, engine)
        factor = max(1.0 + noise * float(generator.standard_normal()), 0.1)
        costs.append((known[key], factor))
        run.steps_s.append(known[key].step_s * factor)
        if controller is None or len(costs) < window or step == num_steps - 1:
            continue
        seen = window_of(costs, step, plan, truth)
        costs = []
        if controller.wants_links(seen):
            seen = replace(seen, links=_probed(truth))
        decision = controller.observe(seen, num_steps - 1 - step)
        if decision.verdict in ("switch", "return"):
            plan = controller.plan
            run.plans.append((step + 1, plan))
            run.switch_s += switch_s
            controller.switched(switch_s)
    if controller is not None:
        run.decisions = controller.decisions
    return run


def window_of(costs: Sequence[tuple[Estimate, float]], last_step: int, plan: Plan, truth: Topology) -> Window:
    """The window that a monitor would report of these steps. costs: what each step took, and its noise."""
    middle, _ = costs[len(costs) // 2]
    factor = float(np.median([f for _, f in costs]))
    steps = [cost.step_s * f for cost, f in costs]
    step_s = float(np.median(steps))
    ranks = tuple(
        RankWindow(
            rank=rank,
            step_s=step_s,
            compute_s=factor * (middle.rowwise_s[rank] + middle.edgewise_s[rank] + middle.visits_s[rank]),
            exchange_s=factor * middle.packing_s[rank],
            wait_s=factor * middle.wait_s[rank],
            rows_per_s=0.0,
            edges_per_s=0.0,
            sent_bytes=middle.sent_bytes[rank],
            peak_memory_bytes=int(middle.memory_bytes[rank]),
            cpu_share=1.0,
            rows=middle.rows[rank],
            edges=middle.edges[rank],
        )
        for rank in range(truth.world_size)
    )
    compute = [rank.compute_s for rank in ranks]
    mean = math.fsum(compute) / len(compute)
    return Window(
        first_step=last_step - len(costs) + 1,
        last_step=last_step,
        plan_fingerprint=plan.fingerprint,
        step_s=step_s,
        step_sigma_s=1.4826 * float(np.median(np.abs(np.array(steps) - step_s))),
        imbalance=max(compute) / mean if mean else 1.0,
        drift=1.0,
        ranks=ranks,
    )


def _probed(truth: Topology) -> tuple[tuple[int, int, float, float], ...]:
    size = truth.world_size
    return tuple(
        (a, b, float(truth.alpha_s[a, b]), float(truth.bytes_per_s[a, b]))
        for a in range(size)
        for b in range(a + 1, size)
    )
