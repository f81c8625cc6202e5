"""Shows what a run would do without doing it: the partition and the plan, as tables.

Not here: the strategy report of a run that was (`report.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from gtx.batches import BatchPlanner
from gtx.config import Config
from gtx.engine import DTYPES
from gtx.models import GraphModel
from gtx.partition import PartitionedGraph
from gtx.train import load_partitioned, make_plan, partition_work, tell_graph
from gtx.workload import count_workload, model_shape
from scheduler.cost import estimate
from scheduler.plan import MODES, Mode, Plan, fixed_plan
from scheduler.topology import Topology, topology_from_json


def show_partition(config: Config, console: Console | None = None) -> None:
    """Cut the graph as the config says (or find it cut), and print each partition."""
    console = console or Console()
    loaded = load_partitioned(config)
    tell_graph(loaded, lambda line: console.print(line, soft_wrap=True, highlight=False))
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

    topology_file: print besides what each mode is predicted to cost there.
    """
    if world_size < 1:
        raise ValueError(f"--world-size is {world_size}; give at least 1")
    console = console or Console()
    topology = None if topology_file is None else read_topology(topology_file, world_size)
    loaded = load_partitioned(config)
    tell_graph(loaded, lambda line: console.print(line, soft_wrap=True, highlight=False))
    graph = loaded.partitioned
    plan = make_plan(config, graph, world_size)
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
    console.print(table)
    if topology is not None:
        _print_estimates(config, graph, plan, topology, console)
    console.print(f"plan {plan.fingerprint}")
    if out is not None:
        out.write_text(plan.to_json(), encoding="utf-8")
        console.print(f"written to {out}; pass it as plan.file={out}", soft_wrap=True)


def read_topology(path: Path, world_size: int) -> Topology:
    """A topology file for a number of ranks: as it is, or as many devices like its first one."""
    try:
        topology = topology_from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read --topology {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--topology {path}: {error}") from None
    return topology if topology.world_size == world_size else topology.resized(world_size)


def _print_estimates(config: Config, graph: PartitionedGraph, plan: Plan, topology: Topology, console: Console) -> None:
    """What each mode is predicted to cost for a typical step, and the plan of the config."""
    model = GraphModel(config.model, graph.graph.num_features, graph.graph.num_classes)
    shape = model_shape(config.model, model, graph, DTYPES[config.engine.precision].itemsize)
    batches = BatchPlanner(graph, config.batch, config.sampling, config.model.layers, config.seed)
    workload = count_workload(graph, batches.step(0), shape)
    families: tuple[Mode | Literal["mixed"], ...] = (*MODES, "mixed")
    plans: dict[str, Plan] = {
        mode: fixed_plan(
            mode,
            partition_work(graph),
            topology.world_size,
            config.model.layers,
            checkpointing=config.plan.checkpointing,
        )
        for mode in families
    }
    plans["as configured"] = plan
    table = Table("plan", "step, ms", "busiest, ms", "waiting, ms", "sent, MiB", "memory of a rank, MiB", "verdict")
    for name, candidate in plans.items():
        cost = estimate(
            candidate,
            workload,
            topology,
            zero_stage=config.engine.zero_stage,
            offload=config.engine.offload_optimizer == "cpu",
        )
        busy = max(a + b + c for a, b, c in zip(cost.rowwise_s, cost.edgewise_s, cost.visits_s, strict=True))
        table.add_row(
            name,
            f"{cost.step_s * 1e3:.1f}",
            f"{busy * 1e3:.1f}",
            f"{max(cost.exchange_s) * 1e3:.1f}",
            f"{sum(cost.sent_bytes) / 2**20:.1f}",
            f"{max(cost.memory_bytes) / 2**20:.0f}",
            "fits" if cost.fits else "exceeds the device's memory",
        )
    console.print(table)
