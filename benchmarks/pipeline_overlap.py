"""A pipeline of 4 ranks and 8 waves whose layers sleep, against the recursion of an ideal pipeline.

Sleeping layers need no core, so that 4 ranks on 2 cores show how well waves overlap and nothing else.
`end(i, j) = max(end(i - 1, j), end(i, j - 1)) + t` over stages i and waves j, forward, then the same backward.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import ROOT, write
from torch import Tensor, nn

sys.path.insert(0, str(ROOT / "tests"))
from cases import awkward_graph, partitioned
from ranks import run_ranks

FORWARD_S, BACKWARD_S = 0.02, 0.04
STAGES, WAVES, REPEATS = 4, 8, 5


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        if ctx.rows:
            time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if ctx.rows:
            time.sleep(BACKWARD_S)
        return grads[0]


class SleepingLayer(nn.Module):
    """Row-wise work that takes its time wherever there are rows."""

    def forward(self, x: Tensor, context: Any) -> Tensor:
        out: Tensor = _Sleep.apply(x)  # type: ignore[no-untyped-call]
        return out


def steps(world: Any, mode: str, waves_per_round: int) -> list[float]:
    """Wall seconds of each step on this rank."""
    from gtx.config import parse_config
    from gtx.engine import TorchEngine
    from gtx.models import GraphModel
    from gtx.parallel.compiler import Compiler
    from gtx.parallel.executor import Executor
    from monitor import PhaseTimer
    from scheduler.plan import deal, fixed_plan

    graph = partitioned(awkward_graph(num_nodes=160, num_edges=600), parts=WAVES)
    config = parse_config(
        {
            "model": {"name": "MLP", "width": 8, "heads": 1, "layers": STAGES},
            "batch": {"kind": "cluster", "parts": 1, "micro_batches": WAVES},
            "engine": {"name": "torch"},
        }
    )
    model = GraphModel(config.model, graph.graph.num_features, graph.graph.num_classes)
    model.layers = nn.ModuleList([SleepingLayer() for _ in range(STAGES)])
    engine = TorchEngine(model, config.engine, world, 10)
    timer = PhaseTimer()
    timer.start_step()
    executor = Executor(engine, graph, world, timer, seed=0, num_heads=1, backend="torch")
    work = np.diff(graph.starts).tolist()
    plan = fixed_plan(mode, work, world.size, STAGES, waves_per_round=waves_per_round)  # type: ignore[arg-type]
    compiler = Compiler(graph, plan, world, 1, np.array(deal(work, world.size)))
    from gtx.batches import BatchPlanner

    batches = BatchPlanner(graph, config.batch, config.sampling, STAGES, 0)
    times = []
    for step in range(REPEATS + 1):
        compiled = compiler.compile(batches.step(step))
        world.barrier()
        start = time.perf_counter()
        executor.train_step(compiled, plan, step, fixed=False)
        times.append(time.perf_counter() - start)
    return times[1:]


def ideal_s(waves: int) -> float:
    """The recursion with equal stages, forward and then backward."""

    def sweep(t: float) -> float:
        end = np.zeros((STAGES + 1, waves + 1))
        for i in range(1, STAGES + 1):
            for j in range(1, waves + 1):
                end[i, j] = max(end[i - 1, j], end[i, j - 1]) + t
        return float(end[-1, -1])

    return sweep(FORWARD_S) + sweep(BACKWARD_S)


def main() -> None:
    rows = []
    for waves_per_round in (0, 4):
        times = run_ranks(steps, STAGES, "pipeline", waves_per_round)
        took = median(max(rank[i] for rank in times) for i in range(REPEATS))
        per_round = waves_per_round or WAVES
        ideal = ideal_s(per_round) * (WAVES // per_round)
        rows.append(
            {"waves": WAVES, "waves a round": per_round, "step, s": took, "ideal, s": ideal, "ratio": took / ideal}
        )
    serial = (FORWARD_S + BACKWARD_S) * STAGES * WAVES
    table = pd.DataFrame(rows).round(3).to_markdown(index=False)
    write(
        "pipeline_overlap",
        "A pipeline's overlap",
        f"{STAGES} ranks, {WAVES} waves, layers that sleep {FORWARD_S * 1e3:.0f} ms forward and "
        f"{BACKWARD_S * 1e3:.0f} ms backward; medians of {REPEATS} steps. Without any overlap: {serial:.2f} s.\n\n"
        + table,
    )


if __name__ == "__main__":
    main()
