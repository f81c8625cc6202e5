"""Micro-batches: which nodes, edges and targets one forward holds. Part of the mathematics, the same under every plan.

Not here: which rank computes what (`scheduler/plan.py`) and which edges are drawn (`sparse_engine/sampler.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gtx.config import BatchConfig, SamplingConfig
from gtx.partition import PartitionedGraph
from sparse_engine import PURPOSE_SHUFFLE, Method, keyed_permutation

Ids = npt.NDArray[np.int64]
EdgeMethod = Method | Literal["random_walk"]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The active nodes and targets of one forward.

    nodes: sorted ids (partition order) of the rows at the last layer boundary.
    targets: sorted ids of the rows that enter the loss or the metric; a subset of `nodes`.
    parts: `cluster` only: the partitions whose edges among each other are used; None for any source.
    grows: `neighbor` only: earlier boundaries also hold the sampled sources of the next.
    """

    nodes: Ids
    targets: Ids
    parts: Ids | None = None
    grows: bool = False


@dataclass(frozen=True, eq=False)
class Batch:
    """All micro-batches of one optimizer step (or of one evaluation).

    step: keys every draw (0 throughout where edges are drawn once). fanout: sampled in-edges a layer, None for all.
    method, correct: how they are drawn and whether results are corrected for it, as in the config.
    fixed: the same rows and edges at every step, so that what was compiled can be kept.
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    fanout: tuple[int | None, ...]
    seed: int
    fixed: bool
    method: EdgeMethod = "uniform"
    correct: bool = True

    @property
    def num_targets(self) -> int:
        return sum(len(m.targets) for m in self.micro_batches)


class BatchPlanner:
    """Says which micro-batches each optimizer step holds: shuffled by key, every target once an epoch."""

    def __init__(
        self, graph: PartitionedGraph, config: BatchConfig, sampling: SamplingConfig, num_layers: int, seed: int
    ):
        self.graph, self.config, self.seed = graph, config, seed
        self.sampling = sampling
        self.fanout = sampling.per_layer(num_layers)
        self.lists = sampling.method == "random_walk"  # edges that are the model's own, also in evaluation
        self.redraws = sampling.redraw == "step" and any(f is not None for f in self.fanout) and not self.lists
        train = np.asarray(graph.graph.train_mask)
        self.train = np.flatnonzero(train).astype(np.int64)
        self.everything = MicroBatch(np.arange(graph.graph.num_nodes, dtype=np.int64), self.train)
        match config.kind:
            case "full":
                self.epoch_size = 1
            case "cluster":
                self.epoch_size = -(-graph.num_parts // config.parts)
            case "neighbor":
                self.epoch_size = -(-len(self.train) // config.seeds)
        per_step = config.micro_batches * config.accumulation
        self.per_step = min(per_step, self.epoch_size)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.epoch_size // self.per_step)

    @property
    def max_micro_batches(self) -> int:
        """Micro-batches of a step; the last step of an epoch may hold fewer."""
        return self.per_step

    def step(self, step: int) -> Batch:
        """The micro-batches of optimizer step `step`, counted from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        first = position * self.per_step
        indices = range(first, min(first + self.per_step, self.epoch_size))
        if self.config.kind == "full":
            batches = [self.everything]
        else:
            batches = [self._cut(epoch, i) for i in indices]
        fixed = self.config.kind == "full" and not self.redraws
        return Batch(
            step if self.redraws else 0,
            tuple(batches),
            self.fanout,
            self.seed,
            fixed,
            self.sampling.method,
            self.sampling.correct,
        )

    def _cut(self, epoch: int, index: int) -> MicroBatch:
        if self.config.kind == "cluster":
            order = keyed_permutation(self.seed, PURPOSE_SHUFFLE, epoch, self.graph.num_parts).numpy()
            parts = np.sort(order[index * self.config.parts : (index + 1) * self.config.parts])
            starts = self.graph.starts
            nodes = np.concatenate([np.arange(starts[p], starts[p + 1], dtype=np.int64) for p in parts])
            return MicroBatch(nodes, nodes[np.asarray(self.graph.graph.train_mask)[nodes]], parts=parts)
        order = keyed_permutation(self.seed, PURPOSE_SHUFFLE, epoch, len(self.train)).numpy()
        by_original = self.train[np.argsort(self.graph.original_id[self.train], kind="stable")]
        seeds = np.sort(by_original[order[index * self.config.seeds : (index + 1) * self.config.seeds]])
        return MicroBatch(seeds, seeds, grows=True)

    def evaluation(self, step: int) -> Batch:
        """One full-graph micro-batch over all edges (or static lists), with every labelled node as a target."""
        nodes = self.everything.nodes
        targets = nodes[np.asarray(self.graph.graph.labels)[nodes] >= 0]
        batch = (MicroBatch(nodes, targets),)
        if self.lists:
            return Batch(step, batch, self.fanout, self.seed, True, "random_walk", self.sampling.correct)
        return Batch(step, batch, (None,) * len(self.fanout), self.seed, True)
