"""The controller: when a running job should change its plan, as a pure function of windows that all ranks share.

It names a trigger, asks the search for a better plan under what the windows say of the machine, prices the switch,
compares afterwards what it promised with what it got, and goes back if it was wrong. Not here: how windows are measured
(`monitor/`), how a plan is found (`search.py`) and how a job switches (`gtx/adapt.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from monitor.windows import Window
from scheduler.cost import Engine, estimate
from scheduler.plan import Plan
from scheduler.search import Candidate, Found, Limits, search
from scheduler.topology import Topology
from scheduler.workload import Workload

TRIGGERS = {
    "first window": "a plan has just settled that was not tried beside others",
    "compute hotspot": "a rank computes `hotspot` times the mean",
    "straggler": "a rank has become `straggler` times slower or faster beside the others than the last search believed",
    "exchange hotspot": "waiting, without a straggler, is the share `exchange` of a step and grew by half since then",
    "memory pressure": "a rank uses the share `memory` of what it may",
    "drift": "the step has changed by the share `drift` since the plan began or the last search",
    "review": "nothing was searched for `review` windows",
    "promise": "a switch brought less than half of what it promised",
}


@dataclass(frozen=True)
class Rules:
    """Thresholds. Defaults are those of the config.

    delta: least gain over the step. kappa: times the switch's cost that the gain must exceed. z: sigmas besides.
    hold: windows in which the same must hold. cooldown: least steps between switches. hotspot: the busiest rank's
    compute over the mean. straggler: change of a rank's slowness. exchange: share of the step that is waiting.
    memory: share of the limit. drift: change of the step. review: windows between searches
    without a trigger. snap: slowness below it counts as none. max_failures: broken promises after which it stops.
    hysteresis: off, for ablations, leaves only "the predicted gain is positive".
    """

    delta: float = 0.07
    kappa: float = 1.5
    z: float = 1.0
    hold: int = 2
    cooldown: int = 20
    hotspot: float = 2.0
    straggler: float = 1.3
    exchange: float = 0.25
    memory: float = 0.9
    drift: float = 0.2
    review: int = 20
    snap: float = 1.2
    max_failures: int = 3
    hysteresis: bool = True


@dataclass(frozen=True)
class Option:
    """A candidate as a decision shows it. predicted_s: after the correction by what the running plan measures."""

    family: str
    fingerprint: str
    predicted_s: float | None
    memory_bytes: float | None
    verdict: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """What the controller saw and decided after one window.

    verdict: `stay`, `switch`, `return` (to the plan before) or `stopped`. rule: which clause decided, with its numbers.
    promised_s: the predicted step after a switch. slowness: of each rank, believed. links: (rank, rank, times slower).
    outcome_s, kept: filled in later: what the step became, and whether the promise was kept.
    """

    step: int
    triggers: tuple[str, ...]
    verdict: str
    rule: str
    plan_fingerprint: str
    chosen_fingerprint: str
    measured_s: float
    predicted_s: float
    promised_s: float | None
    gain_s: float
    steps_left: int
    cost_s: float
    slowness: tuple[float, ...]
    links: tuple[tuple[int, int, float], ...]
    candidates: tuple[Option, ...]
    outcome_s: float | None = None
    kept: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Promise:
    """A switch whose outcome is awaited."""

    decision: int
    before: Plan
    before_s: float
    promised_s: float
    windows: list[float] = field(default_factory=list)

    @property
    def outcome_s(self) -> float:
        return median(self.windows)


@dataclass(frozen=True)
class _View:
    """What a decision is made on."""

    window: Window
    triggers: tuple[str, ...]
    steps_left: int
    slowness: tuple[float, ...]


@dataclass(frozen=True)
class _Searched:
    """The last search under the running plan: what it and those before were for, what it alone, what was believed, what
    was found.
    """

    triggers: frozenset[str]
    asked: tuple[str, ...]
    believed: Topology
    found: Found

    def under(self, believed: Topology) -> bool:
        """Whether what is believed now is about what was believed then."""
        now, then = believed, self.believed
        pairs = [(a.row_flops_per_s, b.row_flops_per_s) for a, b in zip(now.devices, then.devices, strict=True)]
        pairs += list(zip(now.slowness.flat, then.slowness.flat, strict=True))
        return all(abs(a / b - 1.0) < 0.15 for a, b in pairs)


Search = Callable[..., Found]


class Controller:
    """Folds windows into decisions. The same windows give the same decisions, wherever and whenever they are folded."""

    def __init__(
        self,
        rules: Rules,
        workload: Workload,
        topology: Topology,
        plan: Plan,
        engine: Engine = Engine(),
        limits: Limits = Limits(),
        *,
        switch_cost_s: float = 1.0,
        search_cost_s: float = 0.0,
        tried: bool = False,
        find: Search = search,
        without: Sequence[str] = (),
    ):
        """switch_cost_s: expected of a switch until one was measured. search_cost_s: what a search takes. tried: the
        plan is the fastest of several that just ran, so its first window is no reason to search.
        """
        self.rules, self.workload, self.topology, self.engine, self.limits = rules, workload, topology, engine, limits
        self.plan, self.find, self.without = plan, find, tuple(without)
        self.decisions: list[Decision] = []
        self.believed = topology
        self.stopped = False
        self._links: tuple[tuple[int, int, float], ...] = topology.slow_links
        self._costs = [switch_cost_s]
        self._switches = 0
        self._tried = tried
        self._since_search = 0
        self._held = 0
        self._lost_s = 0.0
        self._last_switch: int | None = None
        self._cooldown = rules.cooldown
        self._failures = 0
        self._promise: _Promise | None = None
        self._reference_s: float | None = None  # the step when the plan had settled or was last compared with others
        self._wait_reference_s: float | None = None
        self._slowness_reference = tuple(self._slow_before(rank) for rank in range(topology.world_size))
        self._bias: dict[str, float] = {}  # measured over predicted, of plans that ran
        self.search_cost_s = search_cost_s
        self._searched: _Searched | None = None
        self._open = False  # the last search found something that only waits for the rule's clauses
        self._fruitless = 0  # searches under the running plan that found nothing
        self._waited_s = 0.0  # by the mean rank, since the last search

    # What the windows say ---------------------------------------------------------------------------------------------

    def wants_links(self, window: Window) -> bool:
        """Whether the links should be probed before `observe` is called with this window."""
        triggers = self._triggers(window, self._slowness(window))
        waited = self._waited_s + self._wait(window)
        unexplained = "exchange hotspot" in triggers or ("drift" in triggers and "straggler" not in triggers)
        return not self.stopped and unexplained and self._search_pays(triggers, waited)

    def observe(self, window: Window, steps_left: int) -> Decision:
        """Take in a window and decide. A `switch` or `return` is taken as done: the next window is of the new plan."""
        if window.plan_fingerprint != self.plan.fingerprint:
            raise ValueError(
                f"the window of step {window.first_step} is of plan {window.plan_fingerprint}, "
                f"{self.plan.fingerprint} is running; reduce windows plan by plan"
            )
        self._since_search += 1
        self._waited_s += self._wait(window)
        slowness = self._slowness(window)
        triggers = self._triggers(window, slowness)
        self._believe(window, slowness)
        self._bias[self.plan.fingerprint] = window.step_s / max(self._predict(self.plan), 1e-12)
        if self._reference_s is None:
            self._refer_to(window)
        broken = self._settle_promise(window)
        if not triggers and self._open and self._searched is not None:
            triggers = self._searched.asked  # what was found then waits for the rule's clauses, not for a trigger
        view = _View(window, (*triggers, "promise") if broken else triggers, steps_left, slowness)
        if broken is not None and broken.outcome_s > broken.before_s:
            return self._return(view, broken)
        if self.stopped:
            return self._stay(view, "stopped: switching did not pay", verdict="stopped")
        if not view.triggers and not self._open:
            self._held, self._lost_s = 0, 0.0
            return self._stay(view, "no trigger")
        if not self._open and not self._search_pays(view.triggers, self._waited_s):
            wanted = self.search_cost_s * 2**self._fruitless
            return self._stay(view, f"searched for that before; {self._waited_s:.3g} s of {wanted:.3g} s waited since")
        return self._consider(view)

    def _refer_to(self, window: Window) -> None:
        """From now on triggers are about what differs from this window."""
        self._reference_s = window.step_s
        self._wait_reference_s = max(rank.wait_s for rank in window.ranks)

    @staticmethod
    def _wait(window: Window) -> float:
        """Seconds that the mean rank waited in a window: what a better plan could win."""
        steps = window.last_step - window.first_step + 1
        return steps * sum(rank.wait_s for rank in window.ranks) / len(window.ranks)

    def _search_pays(self, triggers: Sequence[str], waited_s: float) -> bool:
        """Whether to search: for what was not searched for under this plan, else once as much was lost to waiting as a
        search takes, twice as much after each that found nothing.
        """
        if self._searched is None or "review" in triggers or set(triggers) - self._searched.triggers:
            return True
        return waited_s >= self.search_cost_s * 2.0**self._fruitless

    def switched(self, cost_s: float) -> None:
        """Tell what the last switch took, in seconds."""
        self._costs = [*self._costs, cost_s] if self._switches else [cost_s]  # the first one replaces the guess
        self._switches += 1

    @property
    def cost_s(self) -> float:
        """What a switch is expected to cost."""
        return median(self._costs)

    def _slowness(self, window: Window) -> tuple[float, ...]:
        """How many times slower than calibrated each rank computes, next to the least slowed; small ones count as 1.

        Expected of the rows and edges that the window's step had, which need not be those of the workload's step.
        """
        expected = estimate(self.plan, self.workload, self.topology, self.engine, without=self.without)
        rowwise = _as_seen(expected.rowwise_s, expected.rows, [rank.rows for rank in window.ranks])
        edgewise = _as_seen(expected.edgewise_s, expected.edges, [rank.edges for rank in window.ranks])
        busy = [a + b + c for a, b, c in zip(rowwise, edgewise, expected.visits_s, strict=True)]
        floor = 0.05 * max(busy)
        ratios = [rank.compute_s / b if b > floor else math.nan for rank, b in zip(window.ranks, busy, strict=True)]
        known = [r for r in ratios if not math.isnan(r)]
        least = min(known) if known else 1.0
        relative = tuple(1.0 if math.isnan(r) else r / max(least, 1e-12) for r in ratios)
        # A rank without work in this plan keeps what is believed of it.
        return tuple(
            self._slow_before(i) if math.isnan(ratios[i]) else (r if r >= self.rules.snap else 1.0)
            for i, r in enumerate(relative)
        )

    def _slow_before(self, rank: int) -> float:
        now, base = self.believed.devices[rank], self.topology.devices[rank]
        return base.row_flops_per_s / now.row_flops_per_s

    def _triggers(self, window: Window, slowness: Sequence[float]) -> tuple[str, ...]:
        rules, found = self.rules, []
        if self._reference_s is None and not self._tried:
            found.append("first window")
        if window.imbalance >= rules.hotspot:
            found.append("compute hotspot")
        changes = [max(now / then, then / now) for now, then in zip(slowness, self._slowness_reference, strict=True)]
        if max(changes) >= rules.straggler:
            found.append("straggler")
        wait = max(rank.wait_s for rank in window.ranks)
        grew = self._wait_reference_s is None or wait > 1.5 * self._wait_reference_s
        if wait >= rules.exchange * window.step_s and grew and "straggler" not in found:
            found.append("exchange hotspot")
        if any(rank.peak_memory_bytes >= rules.memory * self._limit(rank.rank) for rank in window.ranks):
            found.append("memory pressure")
        if self._reference_s is not None and abs(window.step_s / self._reference_s - 1.0) >= rules.drift:
            found.append("drift")
        if self._since_search >= rules.review:
            found.append("review")
        return tuple(found)

    def _believe(self, window: Window, slowness: Sequence[float]) -> None:
        if window.links:
            self._links = self._slow_links(window.links)
        self.believed = replace(self.topology.with_speeds(slowness), slow_links=self._links)

    def _slow_links(self, probed: Sequence[tuple[int, int, float, float]]) -> tuple[tuple[int, int, float], ...]:
        found = []
        for a, b, _, bytes_per_s in probed:
            times = float(self.topology.bytes_per_s[a, b]) / max(bytes_per_s, 1.0)
            if times >= 2.0:  # a probe of a busy machine is coarse
                found.append((a, b, times))
        return tuple(found)

    def _predict(self, plan: Plan) -> float:
        return estimate(plan, self.workload, self.believed, self.engine, without=self.without).step_s

    # What follows -----------------------------------------------------------------------------------------------------

    def _settle_promise(self, window: Window) -> _Promise | None:
        """The promise that has just turned out broken, if one has: it brought less than half of what it said."""
        promise = self._promise
        if promise is None:
            return None
        promise.windows.append(window.step_s)
        if len(promise.windows) < self.rules.hold:
            return None
        outcome = promise.outcome_s
        kept = promise.before_s - outcome >= 0.5 * (promise.before_s - promise.promised_s)
        self.decisions[promise.decision] = replace(self.decisions[promise.decision], outcome_s=outcome, kept=kept)
        self._promise = None
        if kept:
            self._failures, self._cooldown = 0, self.rules.cooldown
            return None
        self._failures += 1
        self._cooldown *= 2
        self.stopped = self._failures >= self.rules.max_failures
        return promise

    def _consider(self, view: _View) -> Decision:
        """Search, and switch if every clause of the rule holds."""
        last = self._searched
        if last is None or not self._open or set(view.triggers) - last.triggers:
            return self._decide(view, self._search(view))
        if self._lost_s >= self.cost_s and not last.under(self.believed):  # what is about to be taken shall be the best
            return self._decide(view, self._search(view))
        return self._decide(view, self._again(last.found))

    def _again(self, found: Found) -> Found:
        """The last search's plans under what is believed now."""
        return replace(
            found,
            candidates=tuple(
                candidate
                if candidate.plan is None
                else replace(
                    candidate,
                    estimate=estimate(candidate.plan, self.workload, self.believed, self.engine, without=self.without),
                )
                for candidate in found.candidates
            ),
        )

    def _search(self, view: _View) -> Found:
        self._since_search, self._waited_s = 0, 0.0
        self._slowness_reference = view.slowness
        self._refer_to(view.window)
        found = self.find(self.workload, self.believed, self.engine, self.limits, start=self.plan, without=self.without)
        before = self._searched.triggers if self._searched is not None else frozenset()
        self._searched = _Searched(before | set(view.triggers), view.triggers, self.believed, found)
        return found

    def _decide(self, view: _View, found: Found) -> Decision:
        """Apply the rule to what was found."""
        rules, window = self.rules, view.window
        usual = self._bias[self.plan.fingerprint]
        options = tuple(self._option(candidate, usual) for candidate in found.candidates)
        rated = [
            (option.predicted_s, i)
            for i, option in enumerate(options)
            if option.predicted_s is not None and option.verdict != "too large"
        ]
        if not rated:
            return self._stay(view, "no plan fits", candidates=options)
        promised, index = min(rated)
        chosen = found.candidates[index].plan
        assert chosen is not None
        now = window.step_s
        gain = now - promised
        pressed = "memory pressure" in view.triggers and not self._fits(self.plan)
        worth = gain > 0 and (gain / now >= rules.delta or not rules.hysteresis)
        clauses = [
            (chosen != self.plan, "the running plan is the best"),
            (gain > 0 or pressed, f"no gain: {promised:.4g} s predicted, {now:.4g} s measured"),
        ]
        if rules.hysteresis and not pressed:
            clauses += self._hysteresis(window, gain, view.steps_left)
        for holds, text in clauses:
            if not holds:
                self._open = worth  # else time alone changes nothing about it
                if not worth:
                    self._held = 0
                    self._fruitless += 1
                return self._stay(view, text, candidates=options, gain=gain)
        self._held += 1
        wanted = rules.hold if rules.hysteresis and not pressed and "first window" not in view.triggers else 1
        self._open = True
        if self._held < wanted:
            return self._stay(view, f"held for {self._held} of {wanted} windows", candidates=options, gain=gain)
        rule = f"gain {gain:.4g} s a step ({gain / now:.1%}) over {view.steps_left} steps against {self.cost_s:.3g} s"
        before = self.plan
        decision = self._change(view, "switch", chosen, promised, rule, options, gain)
        self._promise = _Promise(len(self.decisions) - 1, before, now, promised)
        return decision

    def _hysteresis(self, window: Window, gain: float, steps_left: int) -> list[tuple[bool, str]]:
        """The clauses that keep a switch from being made for little, too soon or too often."""
        rules, cost, now = self.rules, self.cost_s, window.step_s
        noise = rules.z * window.step_sigma_s * math.sqrt(max(steps_left, 0))
        self._lost_s += max(gain, 0.0) * (window.last_step - window.first_step + 1)
        since = math.inf if self._last_switch is None else window.last_step - self._last_switch
        rest = max(self._cooldown if self._last_switch is not None else 0, cost / max(gain, 1e-12))
        return [
            (gain / now >= rules.delta, f"gain {gain / now:.1%} of the step, {rules.delta:.1%} asked"),
            (
                gain * steps_left > rules.kappa * cost + noise,
                f"gain {gain * steps_left:.3g} s over {steps_left} steps, {rules.kappa:g} x {cost:.3g} s of "
                f"switching and {noise:.3g} s of noise to beat",
            ),
            (since >= rest, f"{since:g} steps since the last switch, {rest:.3g} asked"),
            (self._lost_s >= cost, f"lost so far {self._lost_s:.3g} s, less than a switch costs ({cost:.3g} s)"),
        ]

    def _option(self, candidate: Candidate, usual: float) -> Option:
        """A candidate with its prediction corrected: by its own past where it ran, else by the running plan's."""
        if candidate.plan is None or candidate.estimate is None:
            return Option(candidate.family, "", None, None, candidate.verdict, candidate.reason)
        fingerprint = candidate.plan.fingerprint
        factor = self._bias.get(fingerprint, usual)
        return Option(
            candidate.family,
            fingerprint,
            candidate.estimate.step_s * factor,
            max(candidate.estimate.memory_bytes),
            candidate.verdict,
            candidate.reason,
        )

    def _fits(self, plan: Plan) -> bool:
        memory = estimate(plan, self.workload, self.believed, self.engine).memory_bytes
        return all(m <= self._limit(rank) for rank, m in enumerate(memory))

    def _limit(self, rank: int) -> float:
        """Memory that a rank may use."""
        return min(self.topology.devices[rank].memory_bytes, self.limits.memory_bytes or math.inf)

    def _return(self, view: _View, broken: _Promise) -> Decision:
        """Back to the plan before a switch that made the step longer; it was measured, so nothing is promised."""
        gain = view.window.step_s - broken.before_s
        rule = f"the step became {broken.outcome_s:.4g} s, it was {broken.before_s:.4g} s before the switch: back"
        return self._change(view, "return", broken.before, broken.before_s, rule, (), gain)

    def _change(
        self,
        view: _View,
        verdict: str,
        plan: Plan,
        promised: float,
        rule: str,
        options: tuple[Option, ...],
        gain: float,
    ) -> Decision:
        decision = self._decision(view, verdict, rule, plan, options, gain, promised)
        self.decisions.append(decision)
        self.plan = plan
        self._last_switch = view.window.last_step
        self._held, self._lost_s = 0, 0.0
        self._tried = False
        self._reference_s = self._wait_reference_s = None
        self._searched, self._open, self._fruitless, self._waited_s = None, False, 0, 0.0
        return decision

    def _stay(
        self,
        view: _View,
        rule: str,
        verdict: str = "stay",
        candidates: tuple[Option, ...] = (),
        gain: float = 0.0,
    ) -> Decision:
        decision = self._decision(view, verdict, rule, self.plan, candidates, gain, None)
        self.decisions.append(decision)
        return decision

    def _decision(
        self,
        view: _View,
        verdict: str,
        rule: str,
        plan: Plan,
        options: tuple[Option, ...],
        gain: float,
        promised: float | None,
    ) -> Decision:
        return Decision(
            step=view.window.last_step,
            triggers=view.triggers,
            verdict=verdict,
            rule=rule,
            plan_fingerprint=self.plan.fingerprint,
            chosen_fingerprint=plan.fingerprint,
            measured_s=view.window.step_s,
            predicted_s=self._predict(self.plan),
            promised_s=promised,
            gain_s=gain,
            steps_left=view.steps_left,
            cost_s=self.cost_s,
            slowness=view.slowness,
            links=self._links,
            candidates=options,
        )


def replay(controller: Controller, seen: Sequence[Mapping[str, Any]]) -> list[Decision]:
    """Fold recorded windows anew: `seen` holds `window` (as `Window.as_dict`), `steps_left` and `switch_s` (or null).

    Returns the decisions; with the controller's settings of the run they are those of the run.
    """
    for entry in seen:
        controller.observe(Window.from_dict(entry["window"]), int(entry["steps_left"]))
        if entry.get("switch_s") is not None:
            controller.switched(float(entry["switch_s"]))
    return controller.decisions


def _as_seen(seconds: Sequence[float], amounts: Sequence[float], seen: Sequence[float]) -> list[float]:
    """Expected seconds of each rank for the amounts that were seen: at its own rate, or the mean one without work.

    As expected where nothing was recorded.
    """
    if not any(seen) or not any(amounts):
        return list(seconds)
    usual = math.fsum(seconds) / math.fsum(amounts)
    return [n * (s / a if a > 0 else usual) for s, a, n in zip(seconds, amounts, seen, strict=True)]
