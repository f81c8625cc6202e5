"""What to change where no plan fits: single changes that help, the smallest first, in the config's words.

Not here: the search itself (`search.py`) and how much memory a plan takes (`cost.py`).
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.cost import Engine
from scheduler.search import Found, Limits, search, size_text
from scheduler.topology import FREE, Topology
from scheduler.workload import Workload


def remedies(workload: Workload, topology: Topology, engine: Engine, limits: Limits, found: Found) -> tuple[str, ...]:
    """Single changes after which some plan fits, each tried by a search; where none helps, the memory it would take."""
    tries: list[tuple[str, Workload, Topology, Engine]] = []
    for stage in range(engine.zero_stage + 1, 4):
        tries.append((f"engine.zero_stage={stage}", workload, topology, replace(engine, zero_stage=stage)))
    if not engine.offload and topology.host_bytes_per_s < FREE:  # on CPU ranks it frees nothing
        offloaded = Engine(max(engine.zero_stage, 1), True)
        keys = f"engine.zero_stage={offloaded.zero_stage} engine.offload_optimizer=cpu"
        tries.append((keys, workload, topology, offloaded))
    if workload.model.bytes_per_element == 4:
        half = replace(workload, model=replace(workload.model, bytes_per_element=2))
        tries.append(("engine.precision=bf16", half, topology, engine))
    for times in (2, 4, 8):
        larger = topology.resized(topology.world_size * times)
        tries.append((f"{larger.world_size} ranks instead of {topology.world_size}", workload, larger, engine))
    helps = [name for name, w, t, e in tries if search(w, t, e, limits, budget=0).chosen is not None]
    if helps:
        return tuple(helps)
    peaks = [max(c.estimate.memory_bytes) for c in found.candidates if c.estimate is not None]
    needed = size_text(min(peaks) / (1.0 - limits.margin)) if peaks else "more"
    return (f"a memory limit of {needed} or more", "batch.kind=cluster with fewer batch.parts")


def explain_nothing_fits(found: Found, helps: tuple[str, ...]) -> str:
    """One line: how many plans were tried, the smallest one's memory against the limit, and what would help."""
    sized = [(max(c.estimate.memory_bytes), c) for c in found.candidates if c.estimate is not None]
    if not sized:
        return "no plan is allowed: plan.allow and plan.pin rule out every mode; allow more of them"
    _, candidate = min(sized, key=lambda entry: entry[0])
    numbered = "; ".join(f"{i}. {text}" for i, text in enumerate(helps, 1))
    return (
        f"none of the {found.tried} plans that were tried fits: the smallest, {candidate.family}, {candidate.reason}; "
        f"what would help: {numbered}"
    )
