"""Fits a topology's rates to what steps really took, and says how well the cost model then predicts.

Non-negative least squares with every row divided by the seconds of its step, so that short and long steps count alike,
and a prior that keeps what the rows cannot tell. Not here: the formulas (`scheduler/cost.py`) and the first measurement
(`calibrate.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import lsq_linear, nnls

from monitor import StepRecord
from scheduler.cost import Engine, busy_terms, crowding, estimate, optimizer_s, reduction_s, state_bytes
from scheduler.placing import Loads, place
from scheduler.plan import Plan
from scheduler.topology import Device, Topology
from scheduler.workload import Workload

FACTORS = ("row_forward", "row_backward", "edge_forward", "edge_backward", "visits", "packing")
COMPUTING = ("rowwise", "edgewise", "backward")
EXCHANGE_REDUCE = "exchange.reduce"
CONTENTION_WEIGHT = 0.02  # so that none is found where none is needed
CONTENTIONS = tuple(i / 10 for i in range(11))  # that are tried
RANK_ROUNDS = 5  # at most
Terms = dict[str, npt.NDArray[np.float64]]  # seconds of each rank by kind
PRIOR_WEIGHT = 1e-4  # of each prior, in rows: enough to settle what the rows leave open


@dataclass(frozen=True)
class Observation:
    """Medians of some steps under one plan. phases: seconds of each rank by phase; step_s: of the slowest rank.

    rows, edges: that each rank worked on in all layers, forward; () where it was not recorded.
    """

    plan: Plan
    step_s: float
    phases: tuple[dict[str, float], ...]
    wait_s: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    rows: tuple[float, ...] = ()
    edges: tuple[float, ...] = ()

    @property
    def crowding(self) -> float:
        """How much the ranks computed at the same time, see `scheduler.cost.crowding`."""
        return crowding(sum(self.busy_s), self.step_s, len(self.phases))

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of each rank in computing and packing."""
        return tuple(
            sum(phases.get(name, 0.0) for name in COMPUTING) + self.packing_s(rank)
            for rank, phases in enumerate(self.phases)
        )

    def packing_s(self, rank: int) -> float:
        """Seconds of a rank in exchanges, without waiting and without the reduction of gradients."""
        passed = (
            s for name, s in self.phases[rank].items() if name.startswith("exchange.") and name != EXCHANGE_REDUCE
        )
        return max(sum(passed) - self.wait_s[rank], 0.0)


@dataclass(frozen=True)
class Predicted:
    """What a fit predicts for an observation: the step, and the peak of the rank that needs most."""

    step_s: float
    memory_bytes: float

    def errors(self, seen: Observation) -> tuple[float, float]:
        """Relative errors of the step and of the peak; a peak that was not measured counts none."""
        peak = max(seen.peak_memory_bytes)
        return abs(self.step_s / seen.step_s - 1.0), abs(self.memory_bytes / peak - 1.0) if peak else 0.0


@dataclass(frozen=True)
class Fit:
    """Fitted rates. factors: what each term of the prior was multiplied by. condition: of the rows without the prior.

    fitted: what is predicted of each observation. held_out: of each when the rates were fitted to the others; none with
    one observation, or until `with_held_out`. errors, held_out_errors: of their steps.
    """

    topology: Topology
    factors: dict[str, float]
    condition: float
    rows: int
    seen: tuple[Observation, ...]
    fitted: tuple[Predicted, ...]
    held_out: tuple[Predicted, ...] = ()

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(p.errors(o)[0] for p, o in zip(self.fitted, self.seen, strict=True))

    @property
    def held_out_errors(self) -> tuple[float, ...]:
        return tuple(p.errors(o)[0] for p, o in zip(self.held_out, self.seen, strict=False))

    def as_dict(self) -> dict[str, Any]:
        told = {"held_out_error_median": None, "held_out_error_max": None, "held_out_memory_error_max": None}
        if self.held_out:
            pairs = [p.errors(o) for p, o in zip(self.held_out, self.seen, strict=True)]
            steps, peaks = zip(*pairs, strict=True)
            told = {
                "held_out_error_median": median(steps),
                "held_out_error_max": max(steps),
                "held_out_memory_error_max": max(peaks),
            }
        return {
            "factors": self.factors,
            "condition": self.condition if np.isfinite(self.condition) else None,
            "rows": self.rows,
            "fitted_error_median": median(self.errors) if self.errors else None,
            **told,
        }


def observe(plan: Plan, steps: Sequence[Sequence[StepRecord]]) -> Observation:
    """Medians over steps of the records of all ranks."""
    ranks = range(len(steps[0]))
    names = {name for records in steps for record in records for name in record.phases}
    return Observation(
        plan,
        median(max(record.work_s for record in records) for records in steps),
        tuple({n: median(records[r].phases.get(n, 0.0) for records in steps) for n in sorted(names)} for r in ranks),
        tuple(median(records[r].wait_s for records in steps) for r in ranks),
        tuple(max(records[r].peak_memory_bytes for records in steps) for r in ranks),
        tuple(float(median(records[r].rows_computed for records in steps)) for r in ranks),
        tuple(float(median(records[r].edges_computed for records in steps)) for r in ranks),
    )


def fit(workload: Workload, topology: Topology, engine: Engine, seen: Sequence[Observation]) -> Fit:
    """Scale the rates of a topology so that its terms match the seconds of each phase and rank.

    A factor for each kind of work, common to all ranks, and one for each rank where they differ by more than a tenth.

    Raises ValueError without observations.
    """
    if not seen:
        raise ValueError("a fit needs at least one observation")
    ranks = np.ones(topology.world_size)
    placed = [place(observation.plan, workload) for observation in seen]
    for _ in range(RANK_ROUNDS):  # factors by kind and by rank in turn
        paced = topology.with_speeds(ranks.tolist())
        terms = [_terms(o, workload, paced, at) for o, at in zip(seen, placed, strict=True)]
        tries = [(contention, *_factors(terms, seen, contention)) for contention in CONTENTIONS]
        contention, factors, table, _ = min(tries, key=lambda t: t[-1] ** 2 + CONTENTION_WEIGHT * t[0] ** 2)
        scaled = replace(paced, devices=tuple(_scaled(device, factors) for device in paced.devices))
        scaled = replace(scaled, contention=contention)
        terms = [_terms(o, workload, scaled, at) for o, at in zip(seen, placed, strict=True)]
        apart = _rank_factors(terms, seen)
        if (apart == 1.0).all():
            break
        ranks = ranks * apart
    scaled = replace(_with_memory(workload, scaled, engine, seen), step_s=_rest(workload, scaled, engine, seen))
    scaled = _with_latency(workload, scaled, engine, seen)
    used = table[:, (table > 0).any(axis=0)]
    condition = float(np.linalg.cond(used)) if used.size else float("inf")
    fitted = tuple(_predict(observation, workload, scaled, engine) for observation in seen)
    return Fit(scaled, factors, condition, len(table), tuple(seen), fitted)


def with_held_out(made: Fit, workload: Workload, topology: Topology, engine: Engine) -> Fit:
    """The fit with what is predicted of each observation by rates fitted to the others, of the same prior topology."""
    if len(made.seen) == 1:
        return made
    held_out = []
    for i, observation in enumerate(made.seen):
        others = fit(workload, topology, engine, [*made.seen[:i], *made.seen[i + 1 :]])
        held_out.append(_predict(observation, workload, others.topology, engine))
    return replace(made, held_out=tuple(held_out))


def _terms(seen: Observation, workload: Workload, topology: Topology, placed: Loads) -> Terms:
    """Seconds expected of each rank, for the rows and edges that were seen where the workload's step had others."""
    terms = busy_terms(seen.plan, workload, topology, placed)
    for kind, amounts, counted in (("row", seen.rows, placed.src_rows), ("edge", seen.edges, placed.edges)):
        expected = counted.sum(axis=(0, 1))
        if any(amounts) and (expected > 0).any():
            times = np.divide(amounts, expected, out=np.ones_like(expected), where=expected > 0)
            terms |= {name: s * times for name, s in terms.items() if name.startswith(kind)}
    return terms


def _factors(
    terms_seen: Sequence[Terms], seen: Sequence[Observation], contention: float
) -> tuple[dict[str, float], npt.NDArray[np.float64], float]:
    """What to multiply each kind of seconds by, the same on all ranks; the rows that say so, and what these leave."""
    rows: list[list[float]] = []
    wanted: list[float] = []
    for observation, terms in zip(seen, terms_seen, strict=True):
        slower = 1.0 + contention * observation.crowding
        for rank, phases in enumerate(observation.phases):
            at = {name: slower * float(values[rank]) for name, values in terms.items()}
            for seconds, parts in _rows(at, phases, observation, rank):
                rows.append([parts.get(name, 0.0) / observation.step_s for name in FACTORS])
                wanted.append(seconds / observation.step_s)
    table = np.array(rows) if rows else np.zeros((0, len(FACTORS)))
    prior = np.sqrt(PRIOR_WEIGHT) * np.eye(len(FACTORS))
    solved, left = nnls(np.vstack([table, prior]), np.array([*wanted, *np.diag(prior)]))
    factors = {name: float(min(max(value, 0.02), 50.0)) for name, value in zip(FACTORS, solved, strict=True)}
    return factors, table, float(left)


def _rank_factors(terms_seen: Sequence[Terms], seen: Sequence[Observation]) -> npt.NDArray[np.float64]:
    """How many times slower each rank computes than the others and the terms say; 1 for all within a tenth."""
    size = len(seen[0].phases)
    spent, expected, work = np.zeros(size), np.zeros(size), np.zeros(size)
    for observation, terms in zip(seen, terms_seen, strict=True):
        expected += sum(values for name, values in terms.items() if name != "packing")
        work += sum(values for name, values in terms.items() if name not in ("packing", "visits"))
        spent += [sum(phases.get(name, 0.0) for name in COMPUTING) for phases in observation.phases]
    told = (spent > 0) & (work > 0.1 * work.max())  # a rank that mostly visits tells of visits, not of itself
    if told.sum() < 2:
        return np.ones(size)
    ratio = np.where(told, spent / np.maximum(expected, 1e-300), 1.0)
    ratio = np.where(told, ratio / np.exp(np.log(ratio[told]).mean()), 1.0)
    return ratio if ratio.max() >= 1.1 * ratio.min() else np.ones(size)


def _predict(seen: Observation, workload: Workload, topology: Topology, engine: Engine) -> Predicted:
    cost = estimate(seen.plan, workload, topology, engine)
    return Predicted(cost.step_s, max(cost.memory_bytes))


def _with_memory(workload: Workload, topology: Topology, engine: Engine, seen: Sequence[Observation]) -> Topology:
    """The topology with what is resident and held as the peaks say: `peak = states + resident + held x formula`.

    Least squares over plans and ranks, relative to each peak, with a weak prior at what the topology says.
    """
    model, size = workload.model, topology.world_size
    states = state_bytes(model.parameters, engine.zero_stage, size, engine.offload)
    before = float(np.mean([device.resident_bytes for device in topology.devices]))
    rows, wanted = [], []
    for observation in seen:
        formula = np.array(estimate(observation.plan, workload, topology, engine).memory_bytes)
        formula -= states + np.array([device.resident_bytes for device in topology.devices])
        for rank, peak in enumerate(observation.peak_memory_bytes):
            if peak > 0:
                rows.append([before / peak, float(formula[rank]) / topology.held / peak])
                wanted.append((peak - states) / peak)
    if not rows or before <= 0:
        return topology
    prior = 0.1 * np.sqrt(PRIOR_WEIGHT)  # plans differ little in what they hold
    matrix, values = np.vstack([rows, prior * np.eye(2)]), np.array([*wanted, prior, prior * topology.held])
    solved = lsq_linear(matrix, values, bounds=([0.1, 0.25], [10.0, 4.0])).x
    resident, held = before * float(solved[0]), float(solved[1])
    return replace(topology, devices=tuple(replace(d, resident_bytes=resident) for d in topology.devices), held=held)


def _rows(
    terms: dict[str, float], phases: dict[str, float], seen: Observation, rank: int
) -> list[tuple[float, dict[str, float]]]:
    """Of each phase: its seconds, and how much each factor's term adds to it."""
    third = terms["visits"] / 3.0
    told = [
        (phases.get("rowwise", 0.0), {"row_forward": terms["row_forward"], "visits": third}),
        (phases.get("edgewise", 0.0), {"edge_forward": terms["edge_forward"]}),
        (
            phases.get("backward", 0.0),
            {
                "row_backward": terms["row_backward"],
                "row_forward": terms["row_again"],
                "edge_backward": terms["edge_backward"],
                "edge_forward": terms["edge_again"],
                "visits": 2.0 * third,
            },
        ),
        (seen.packing_s(rank), {"packing": terms["packing"]}),
    ]
    return [(seconds, parts) for seconds, parts in told if seconds > 0 and sum(parts.values()) > 0]


def _scaled(device: Device, factors: dict[str, float]) -> Device:
    return replace(
        device,
        row_flops_per_s=device.row_flops_per_s / factors["row_forward"],
        row_bytes_per_s=device.row_bytes_per_s / factors["row_forward"],
        edge_bytes_per_s=device.edge_bytes_per_s / factors["edge_forward"],
        packed_bytes_per_s=device.packed_bytes_per_s / factors["packing"],
        message_s=device.message_s * factors["packing"],
        visit_s=device.visit_s * factors["visits"],
        row_backward=device.row_backward * factors["row_backward"] / factors["row_forward"],
        edge_backward=device.edge_backward * factors["edge_backward"] / factors["edge_forward"],
    )


def _with_latency(workload: Workload, topology: Topology, engine: Engine, seen: Sequence[Observation]) -> Topology:
    """The topology with the latency of its links as large as what is missing from the steps says.

    Ranks that meet wait for each other's jitter besides the message. Least squares of what the predicted steps lack,
    relative to each step, over how much the step grows with the latency; never less than was calibrated. One
    observation cannot tell it from the rest.
    """
    if len(seen) == 1:
        return topology

    def later(seconds: float) -> Topology:
        near, far = topology.same_host, topology.between_hosts
        return replace(
            topology,
            same_host=replace(near, alpha_s=near.alpha_s + seconds),
            between_hosts=replace(far, alpha_s=far.alpha_s + seconds),
        )

    small = 1e-3
    up = down = 0.0
    for observation in seen:
        now = estimate(observation.plan, workload, topology, engine).step_s
        growth = (estimate(observation.plan, workload, later(small), engine).step_s - now) / small
        lacking = (observation.step_s - now) / observation.step_s
        up, down = up + growth / observation.step_s * lacking, down + (growth / observation.step_s) ** 2
    return later(max(up / down, 0.0)) if down > 0 else topology


def _rest(workload: Workload, topology: Topology, engine: Engine, seen: Sequence[Observation]) -> float:
    """What a step takes beside its terms: optimizer, reduction and the rest, of the rank that waits least in them."""
    rest = []
    for observation in seen:
        rounds = len(observation.plan.rounds(len(observation.plan.waves(workload.num_micro_batches))))
        expected = optimizer_s(workload.model.parameters, topology, engine)
        expected += reduction_s(workload.model.parameters, topology, engine.zero_stage, rounds)
        measured = min(p.get("optimizer", 0.0) + p.get("other", 0.0) for p in observation.phases)
        rest.append(measured - expected)
    return max(median(rest), 0.0)
