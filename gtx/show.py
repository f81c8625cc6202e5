"""Shows what a run would do without doing it: the partition and the plan, as tables.

Not here: the strategy report of a run that was (`report.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gtx.adapt import engine_of, find_plan, limits_of, pick_engine, read_topology
from gtx.budget import check, cpu_slack, limit_of, with_footprints
from gtx.calibrate import calibrate
from gtx.config import Config
from gtx.parallel.world import solo
from gtx.partition import PartitionedGraph
from gtx.session import load_partitioned, tell_graph
from gtx.train import make_plan
from gtx.workload import workload_of
from monitor import current_memory_bytes
from scheduler.cost import Estimate, estimate
from scheduler.plan import Plan
from scheduler.search import Found, search, size_text
from scheduler.topology import Topology

_COLUMNS = (("step", "ms"), ("busiest", "ms"), ("waiting", "ms"), ("sent", "MiB"), ("memory", "MiB"))


def show_partition(config: Config, console: Console | None = None) -> None:
    """Cut the graph as the config says (or find it cut), and print each partition."""
    console = console or Console()
    loaded = load_partitioned(config)
    tell_graph(loaded, lambda line: console.print(line, soft_wrap=True, highlight=False), order=True)
    facts = loaded.partitioned.facts
    table = Table("partition", "rows", "edges", "halo rows", "halo / rows")
    for p in range(facts.parts):
        rows, halo = facts.rows[p], facts.halo_rows[p]
        table.add_row(str(p), f"{rows:,}", f"{facts.edges[p]:,}", f"{halo:,}", f"{halo / rows:.2f}" if rows else "-")
    console.print(table)
    console.print(f"kept in {loaded.partitioned.folder}" if loaded.partitioned.folder else "not kept")


def show_plan(
    config: Config, world_size: int, out: Path | None, topology_file: Path | None, console: Console | None = None
) -> None:
    """Print the plan that a run on `world_size` ranks would have; write it as JSON where asked.

    topology_file: print besides what the best plan of each family is predicted to cost there. Where the scheduler makes
    the plan and no file is given, one rank of this machine is measured and the others are taken to be like it.
    Raises ValueError with remedies if the scheduler finds no plan that fits.
    """
    if world_size < 1:
        raise ValueError(f"--world-size is {world_size}; give at least 1")
    console = console or Console()
    topology_file = topology_file or config.plan.topology
    topology = None if topology_file is None else read_topology(topology_file, world_size)
    loaded = load_partitioned(config)
    tell_graph(loaded, lambda line: console.print(line, soft_wrap=True, highlight=False), order=True)
    graph = loaded.partitioned
    if topology is None and not config.plan.searched:
        plan = make_plan(config, graph, world_size)
        console.print(_placements(plan, graph))
        _memory(config, graph, plan, console)
    else:
        plan = _predict(config, graph, topology, world_size, console)
    console.print(f"plan {plan.fingerprint}")
    if out is not None:
        out.write_text(plan.to_json(), encoding="utf-8")
        console.print(f"written to {out}; pass it as plan.file={out}", soft_wrap=True)


def _memory(config: Config, graph: PartitionedGraph, plan: Plan, console: Console) -> None:
    """What a step would take on each rank of this host, as if all had in use what this process has.

    Raises ValueError with remedies if that is more than the limit.
    """
    workload, _ = workload_of(config, graph)
    world = replace(solo(), size=plan.world_size)
    limit, why = limit_of(config, world)
    workload = with_footprints(config, workload, limit, plan.world_size, (plan.checkpointing,))
    resident = (float(current_memory_bytes("cpu") or 0),) * plan.world_size
    budget = check(config, workload, plan, resident, limit, why, cpu_slack())
    shown = ", ".join(size_text(peak) for peak in budget.peaks)
    console.print(
        f"memory of a step by rank: {shown}; limit {size_text(limit)} ({why})", highlight=False, soft_wrap=True
    )


def _placements(plan: Plan, graph: PartitionedGraph) -> Table:
    table = Table("partition", "mode", "ranks", "layers a stage", "rows", "edges", "halo rows")
    facts = graph.facts
    for p, place in enumerate(plan.partitions):
        table.add_row(
            str(p),
            place.mode,
            " ".join(map(str, place.ranks)),
            " ".join(map(str, place.layer_split)) or "-",
            f"{facts.rows[p]:,}",
            f"{facts.edges[p]:,}",
            f"{facts.halo_rows[p]:,}",
        )
    return table


def _predict(
    config: Config, graph: PartitionedGraph, topology: Topology | None, world_size: int, console: Console
) -> Plan:
    """Price the best plan of every family for a typical step, and the configured one; the plan that would run."""
    workload, shape = workload_of(config, graph)
    if topology is None:
        rows = graph.graph.num_nodes // world_size
        topology = calibrate(config, solo(), shape, "launch.py plan", rows).resized(world_size)
        console.print("machine: one rank of this one was measured, the others are taken to be like it")
    workload = with_footprints(config, workload, topology.smallest_memory, world_size)
    config = pick_engine(config, workload, topology) if config.plan.searched else config
    engine, limits = engine_of(config), limits_of(config)
    if config.plan.searched:
        found = find_plan(config, workload, topology, engine, limits)
        plan = found.plan
    else:
        plan = make_plan(config, graph, world_size)
        found = search(workload, topology, engine, limits)
    console.print(_placements(plan, graph))
    console.print(_families(found, plan, estimate(plan, workload, topology, engine), config))
    for candidate in found.candidates:
        console.print(f"{candidate.family}: {candidate.reason}", soft_wrap=True, highlight=False, markup=False)
    picked = f"; ZeRO stage {engine.zero_stage}{', optimizer on the host' * engine.offload}" * config.plan.searched
    console.print(f"{found.tried} plans priced{picked}", highlight=False)
    return plan


def _families(found: Found, plan: Plan, configured: Estimate, config: Config) -> Table:
    """Fits 80 columns; the reasons follow as lines."""
    table = Table("plan", *(f"{name}\n{unit}" for name, unit in _COLUMNS), "verdict")

    def row(name: str, cost: Estimate | None, verdict: str) -> None:
        cells = ["-"] * len(_COLUMNS)
        if cost is not None:
            cells = [
                f"{cost.step_s * 1e3:.1f}",
                f"{max(cost.busy_s) * 1e3:.1f}",
                f"{max(cost.wait_s) * 1e3:.1f}",
                f"{sum(cost.sent_bytes) / 2**20:.1f}",
                f"{max(cost.memory_bytes) / 2**20:.0f}",
            ]
        table.add_row(name, *cells, verdict)

    for candidate in found.candidates:
        row(candidate.family, candidate.estimate, candidate.verdict)
    if not config.plan.searched:
        row("configured", configured, "fits" if configured.fits else "too large")
    return table
