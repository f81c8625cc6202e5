"""The search for 1,024 partitions on 128 devices, on one core: seconds, plans priced, what was found.

A made workload with hubs and neighbours that need each other's rows; nothing is trained. The aim is ten seconds.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pandas as pd
from common import write

from scheduler.search import family_of, search
from scheduler.topology import Device, Link, Topology
from scheduler.workload import LayerWork, ModelShape, Workload


def workload(parts: int, micro_batches: int, seed: int) -> Workload:
    """Partitions of uneven size, power-law work, rows needed of 12 others each."""
    rng = np.random.default_rng(seed)
    model = ModelShape("GT", 128, 256, 8, 6, 64, 16, 2_000_000)
    batches = []
    for _ in range(micro_batches):
        rows = rng.uniform(500, 1500, parts)
        edges = rows * 20 * rng.pareto(2.0, parts).clip(0.2, 30)
        count = min(12, parts - 1)
        users = np.repeat(np.arange(parts), count)
        near = np.concatenate([rng.choice(min(40, parts - 1), size=count, replace=False) for _ in range(parts)])
        others = (users + 1 + near) % parts
        needed = rows[others] * rng.uniform(0.01, 0.2, len(others))
        batches.append((LayerWork(rows, rows, edges, others, users, needed),) * model.layers)
    return Workload(model, tuple(batches))


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    device = Device(5e12, 5e11, 1e-4, 80e9, row_bytes_per_s=1e12, packed_bytes_per_s=1e12, message_s=1e-5)
    rows = []
    for parts, devices, micro_batches in ((16, 2, 4), (64, 8, 8), (1024, 128, 1), (1024, 128, 8)):
        machine = Topology((device,), Link(5e-6, 2e11), Link(2e-5, 2e10), 1e12, 0.0).resized(devices, 8)
        work = workload(parts, micro_batches, seed=1)
        began = time.perf_counter()
        found = search(work, machine)
        rows.append(
            {
                "partitions": parts,
                "devices": devices,
                "micro-batches": micro_batches,
                "seconds": time.perf_counter() - began,
                "plans priced": found.tried,
                "chosen": family_of(found.plan),
            }
        )
        print(pd.DataFrame(rows).round(2).to_string(), flush=True)
    table = pd.DataFrame(rows).round(2).to_markdown(index=False)
    write("search_speed", "Searching a plan", "One core; a made workload of 6 layers with hubs.\n\n" + table)


if __name__ == "__main__":
    main()
