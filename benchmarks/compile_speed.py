"""Seconds to compile a layer at 200,000 nodes and 2.5 million edges, and what fresh samples cost a step.

The first part times the compiler alone, each rank pinned to one core. The second runs the command line with edges that
are drawn at every step against the same number of edges drawn once, alternating.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from common import ROOT, run, step_seconds, write

sys.path.insert(0, str(ROOT / "tests"))
from ranks import run_ranks

LAYERS = 3


def compile_times(world: Any, mode: str, fanout: int | None, repeats: int) -> list[float]:
    """Seconds per layer of each repeat on this rank, the first (allocations) left out."""
    from gtx.batches import BatchPlanner
    from gtx.config import BatchConfig, SamplingConfig
    from gtx.datasets import load_graph
    from gtx.parallel.compiler import Compiler
    from gtx.partition import partition
    from gtx.workload import partition_work
    from scheduler.plan import deal, fixed_plan

    os.sched_setaffinity(0, {world.rank % (os.cpu_count() or 1)})
    options = {"num_nodes": 200_000, "num_edges": 2_500_000, "num_features": 8, "num_blocks": 64, "homophily": 0.9}
    graph = load_graph("sbm", root=None, seed=0, undirected=True, self_loops="keep", options=options)
    cut = partition(graph, "metis", 16, 0)
    plan = fixed_plan(mode, partition_work(cut), world.size, LAYERS)  # type: ignore[arg-type]
    compiler = Compiler(cut, plan, world, 8, np.array(deal(partition_work(cut), world.size)))
    batches = BatchPlanner(cut, BatchConfig(), SamplingConfig(fanout=fanout), LAYERS, 0)
    times = []
    for step in range(repeats + 1):
        batch = batches.step(step)
        world.barrier()
        start = time.perf_counter()
        compiler.compile(batch)
        times.append((time.perf_counter() - start) / LAYERS)
    return times[1:]


def main() -> None:
    rows = []
    for world_size in (1, 2):
        for mode in ("graph", "model", "pipeline"):
            for fanout in (None, 8):
                times = run_ranks(compile_times, world_size, mode, fanout, 5)
                rows.append(
                    {
                        "ranks": world_size,
                        "mode": mode,
                        "fan-out": fanout or "all",
                        "s a layer, slowest rank": max(median(t) for t in times),
                    }
                )
                print(rows[-1], flush=True)
    compiled = pd.DataFrame(rows).round(3).to_markdown(index=False)

    ratios, fresh_s, once_s = [], [], []
    overrides = ["sampling.fanout=10", "train.steps=8", "model.layers=2"]
    for _ in range(6):
        once = step_seconds(run("configs/sbm_gt.yaml", [*overrides, "sampling.redraw=once"], 2, (0, 1)))
        fresh = step_seconds(run("configs/sbm_gt.yaml", [*overrides, "sampling.redraw=step"], 2, (0, 1)))
        ratios.append(fresh / once)
        fresh_s.append(fresh)
        once_s.append(once)
    write(
        "compile_speed",
        "Compiling a plan",
        "200,000 nodes, 2.5 million edges, 16 partitions by METIS; drawing, finding remote rows, the id exchange and "
        "building patterns and routes. Medians of 5.\n\n"
        + compiled
        + "\n\nA step with fresh samples against one whose edges were drawn once (100,000 nodes, fan-out 10 of about "
        "21, 2 layers, 2 ranks on a core each, compiling ahead in the background on the same core): "
        f"{median(fresh_s):.2f} s against {median(once_s):.2f} s, ratio {median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f} over 6 pairs).",
    )


if __name__ == "__main__":
    main()
