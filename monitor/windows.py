"""A window: the records of all ranks over some steps, reduced to the numbers that a scheduler decides by.

Not here: the records themselves (`records.py`), and what follows from the numbers (`scheduler/controller.py`). Given
the same records every rank gets the same window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import mean, median
from typing import Any

from monitor.records import EXCHANGE_KINDS, StepRecord


@dataclass(frozen=True)
class RankWindow:
    """One rank over a window, medians of a step unless said otherwise.

    compute_s: row-wise and edge-wise work and backward. rows, edges: that this step, the middle one by compute_s,
    worked on in all layers, where it was recorded. exchange_s: packing, posting and adding up. wait_s: waiting for
    peers. rows_per_s, edges_per_s: of forward row-wise and edge-wise work. peak_memory_bytes: the highest of the steps.
    pair_bytes, pair_wait_s: bytes received from each peer, and seconds waited for it; [] where it was not recorded.
    """

    rank: int
    step_s: float
    compute_s: float
    exchange_s: float
    wait_s: float
    rows_per_s: float
    edges_per_s: float
    sent_bytes: float
    peak_memory_bytes: int
    cpu_share: float
    rows: float = 0.0
    edges: float = 0.0
    pair_bytes: tuple[float, ...] = ()
    pair_wait_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Window:
    """All ranks over steps `first_step` to `last_step`, all under one plan.

    step_s: the median step of the slowest rank in each; step_sigma_s: its spread (1.4826 times the median absolute
    deviation). imbalance: the busiest rank's compute over the mean. drift: step_s over that of the window before, or 1.
    links: probed (rank, rank, alpha_s, bytes_per_s), where links were probed.
    """

    first_step: int
    last_step: int
    plan_fingerprint: str
    step_s: float
    step_sigma_s: float
    imbalance: float
    drift: float
    ranks: tuple[RankWindow, ...]
    links: tuple[tuple[int, int, float, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON types; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Window:
        """Raises ValueError with one line where a key is missing or unknown."""
        known = {f.name for f in fields(cls)}
        if set(data) != known:
            odd = sorted(set(data) ^ known)
            raise ValueError(f"a window's keys are {', '.join(sorted(known))}; {odd[0]!r} is missing or unknown")
        pairs = ("pair_bytes", "pair_wait_s")
        ranks = tuple(RankWindow(**{**entry, **{k: tuple(entry[k]) for k in pairs}}) for entry in data["ranks"])
        links = tuple((int(a), int(b), float(s), float(r)) for a, b, s, r in data["links"])
        return cls(**{**data, "ranks": ranks, "links": links})


def reduce_window(steps: Sequence[Sequence[StepRecord]], before: Window | None = None) -> Window:
    """Reduce the records of some steps, each a tuple in rank order, to a window.

    Raises ValueError without steps, or if they ran under different plans.
    """
    if not steps:
        raise ValueError("a window needs at least one step")
    plans = {record.plan_fingerprint for records in steps for record in records}
    if len(plans) > 1:
        raise ValueError(f"a window holds steps of the plans {', '.join(sorted(plans))}; begin a new one at a switch")
    size = len(steps[0])
    ranks = tuple(_reduce_rank([records[rank] for records in steps], size) for rank in range(size))
    longest = [max(record.work_s for record in records) for records in steps]
    step_s = median(longest)
    compute = [rank.compute_s for rank in ranks]
    average = math.fsum(compute) / size
    return Window(
        first_step=steps[0][0].step,
        last_step=steps[-1][0].step,
        plan_fingerprint=plans.pop(),
        step_s=step_s,
        step_sigma_s=1.4826 * median(abs(s - step_s) for s in longest),
        imbalance=max(compute) / average if average else 1.0,
        drift=step_s / before.step_s if before is not None and before.step_s else 1.0,
        ranks=ranks,
    )


def _reduce_rank(records: Sequence[StepRecord], size: int) -> RankWindow:
    exchange = [math.fsum(r.phases.get(f"exchange.{kind}", 0.0) for kind in EXCHANGE_KINDS) for r in records]
    waits = [record.wait_s for record in records]
    phases = ("rowwise", "edgewise", "backward", "other")
    compute = [math.fsum(r.phases.get(name, 0.0) for name in phases) for r in records]
    middle = _middle(compute)
    pairs = [{p.peer: p for p in record.peers} for record in records]
    with_pairs = any(pairs)
    return RankWindow(
        rank=records[0].rank,
        step_s=median(record.work_s for record in records),
        compute_s=mean(compute[i] for i in middle),
        exchange_s=median(max(e - w, 0.0) for e, w in zip(exchange, waits, strict=True)),
        wait_s=median(waits),
        rows_per_s=_rate([r.rows_computed for r in records], [r.phases.get("rowwise", 0.0) for r in records]),
        edges_per_s=_rate([r.edges_computed for r in records], [r.phases.get("edgewise", 0.0) for r in records]),
        sent_bytes=median(math.fsum(e.sent_bytes for e in record.exchanges) for record in records),
        peak_memory_bytes=max(record.peak_memory_bytes for record in records),
        cpu_share=median(record.cpu_s / record.wall_s if record.wall_s else 0.0 for record in records),
        rows=mean(records[i].rows_computed for i in middle),
        edges=mean(records[i].edges_computed for i in middle),
        pair_bytes=tuple(_per_pair(pairs, peer, "received_bytes") for peer in range(size)) if with_pairs else (),
        pair_wait_s=tuple(_per_pair(pairs, peer, "wait_s") for peer in range(size)) if with_pairs else (),
    )


def _middle(values: Sequence[float]) -> list[int]:
    """Where the median is: one index, or the two that it lies between."""
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    return order[(len(order) - 1) // 2 : len(order) // 2 + 1]


def _per_pair(pairs: Sequence[Mapping[int, Any]], peer: int, name: str) -> float:
    return float(median(getattr(found[peer], name) if peer in found else 0.0 for found in pairs))


def _rate(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    total = math.fsum(seconds)
    return math.fsum(amounts) / total if total else 0.0
