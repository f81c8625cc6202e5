"""Shows what a run would do without doing it: the partition and the plan, as tables.

Not here: the strategy report of a run that was (`report.py`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from gtx.config import Config
from gtx.train import load_partitioned, make_plan, tell_graph
from scheduler.plan import owner_table


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


def show_plan(config: Config, world_size: int, out: Path | None, console: Console | None = None) -> None:
    """Print the plan that a run on `world_size` ranks would have; write it as JSON where asked."""
    if world_size < 1:
        raise ValueError(f"--world-size is {world_size}; give at least 1")
    console = console or Console()
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
    rows = np.zeros((world_size, plan.num_layers))
    for layer in range(plan.num_layers):
        owners = owner_table(plan, 0, layer)
        for p, place in enumerate(plan.partitions):
            ranks = place.ranks if owners[p] < 0 else (int(owners[p]),)
            for rank in ranks:
                rows[rank, layer] += facts.rows[p] / len(ranks)
    share = rows.sum(1) / max(rows.sum(), 1)
    console.print(
        f"plan {plan.fingerprint}; rows of micro-batch 0 by rank: "
        + ", ".join(f"{rank}: {part:.0%}" for rank, part in enumerate(share)),
        soft_wrap=True,
    )
    if out is not None:
        out.write_text(plan.to_json(), encoding="utf-8")
        console.print(f"written to {out}; pass it as plan.file={out}")
