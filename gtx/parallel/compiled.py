"""What a rank does in one step, compiled: rows, patterns and routes of every layer and wave, as frozen dataclasses.

Not here: how it is found (`compiler.py`) and how it is run (`context.py`, `executor.py`).

Legend: `n_src` rows this rank owns before a layer, `n_dst` after it, `Mw` micro-batches of a wave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from gtx.parallel.exchange import Route
from scheduler.plan import HeadRange
from sparse_engine import SparsePattern

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EdgeSlot:
    """The edges that this rank attends with one head range.

    pattern: CSR, rows = destinations that arrived by `q`, columns = sources that arrived by `kv`.
    degrees: in-degree of each destination in the whole graph `[rows]`, float64, so that means over a sample can be
        scaled up. inclusion: probability `[rows]` of each attended in-edge of that row. edge_inclusion: times this one
        `[edges]`, where the edges of a row differ; both float64, and 1 where nothing is to be corrected.
    features: of each edge, float32 `[edges, Fe]`; None where the graph has none.
    types: int64 `[edges]`, the type of each edge; None where all are the graph's own.
    """

    heads: HeadRange
    pattern: SparsePattern
    degrees: torch.Tensor
    inclusion: torch.Tensor
    edge_inclusion: torch.Tensor | None
    features: torch.Tensor | None = None
    types: torch.Tensor | None = None

    def to(self, device: torch.device) -> EdgeSlot:
        return replace(
            self,
            pattern=self.pattern.to(device),
            degrees=self.degrees.to(device),
            inclusion=self.inclusion.to(device),
            edge_inclusion=None if self.edge_inclusion is None else self.edge_inclusion.to(device),
            features=None if self.features is None else self.features.to(device),
            types=None if self.types is None else self.types.to(device),
        )


@dataclass(frozen=True, eq=False)
class Reduction:
    """How partial sums, one row per micro-batch of the wave, become totals among the ranks that own rows of it.

    route: passes partial sums on; they arrive in rank order, so that every owner adds up the same bits.
    rows: the micro-batch of each arriving row. src_totals, dst_totals: rows of each over all ranks, float64 `[Mw]`.
    reporters: for each micro-batch whether this rank reports its statistics (its first owner does).
    """

    route: Route
    rows: torch.Tensor
    src_totals: torch.Tensor
    dst_totals: torch.Tensor
    reporters: tuple[bool, ...]

    def to(self, device: torch.device) -> Reduction:
        return replace(
            self,
            route=self.route.to(device),
            rows=self.rows.to(device),
            src_totals=self.src_totals.to(device),
            dst_totals=self.dst_totals.to(device),
        )


@dataclass(frozen=True, eq=False)
class CompiledLayer:
    """One layer of one wave on this rank.

    sources: original ids `[n_src]` of the rows this rank owns; row-wise work runs on them. degrees: their in-degrees in
    the whole graph, float64 `[n_src]`.
    destinations: positions `[n_dst]` of the rows that live on after the layer, or None for all of them.
    q, kv, o: the routes; `move` follows the layer where rows change owner, else None.
    edges: one entry per slot of `q` and `kv`.
    src_splits, dst_splits: rows of each micro-batch of the wave on this rank, `[Mw]`.
    reduction: sums over the rows of a micro-batch on all ranks; known once all layers are compiled.
    """

    sources: torch.Tensor
    degrees: torch.Tensor
    destinations: torch.Tensor | None
    q: Route
    kv: Route
    o: Route
    move: Route | None
    edges: tuple[EdgeSlot, ...]
    src_splits: tuple[int, ...]
    dst_splits: tuple[int, ...]
    reduction: Reduction | None = None

    @property
    def num_src(self) -> int:
        return self.kv.num_rows

    @property
    def num_dst(self) -> int:
        return self.q.num_rows

    def to(self, device: torch.device) -> CompiledLayer:
        if device.type == "cpu":
            return self
        return replace(
            self,
            sources=self.sources.to(device),
            degrees=self.degrees.to(device),
            destinations=None if self.destinations is None else self.destinations.to(device),
            q=self.q.to(device),
            kv=self.kv.to(device),
            o=self.o.to(device),
            move=None if self.move is None else self.move.to(device),
            edges=tuple(e.to(device) for e in self.edges),
            reduction=None if self.reduction is None else self.reduction.to(device),
        )


@dataclass(frozen=True, eq=False)
class CompiledWave:
    """One wave on this rank.

    micro_batches: their numbers in the step. stored: ids of the feature rows that this rank holds and that somebody
    needs, in the order of `fetch`. target_rows: positions of target rows among the final rows; target_nodes: their ids.
    """

    index: int
    micro_batches: range
    layers: tuple[CompiledLayer, ...]
    stored: Ids
    fetch: Route
    target_rows: torch.Tensor
    target_nodes: Ids

    def to(self, device: torch.device) -> CompiledWave:
        if device.type == "cpu":
            return self
        layers = tuple(layer.to(device) for layer in self.layers)
        return replace(self, layers=layers, fetch=self.fetch.to(device), target_rows=self.target_rows.to(device))


@dataclass(frozen=True, eq=False)
class CompiledBatch:
    """All waves of a step on this rank, with what they amount to.

    rows: row-layers owned by this rank. edges: edge-layers attended, a head slice counting as its share of the heads.
    edges_whole: the same without sampling or dropped edges. sampling_s, compiling_s: seconds that making this took.
    """

    step: int
    waves: tuple[CompiledWave, ...]
    num_micro_batches: int
    num_targets: int
    rows: int
    edges: float
    edges_whole: float
    sampling_s: float
    compiling_s: float
