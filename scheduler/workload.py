"""The workload: what a step must compute and who needs whose rows, by partition, wherever it is placed.

Plain numbers, so that plans for machines one does not have can be priced. Not here: how it is counted on a real graph
(`gtx/workload.py`), what machines can do (`topology.py`), and what a plan would cost (`cost.py`).

Legend: `K` partitions, `L` layers, `C` width, `F` FFN width, `H` heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

ROW_WORK = 8.0  # edges that cost about as much as the row-wise work of one row; only balances partitions over ranks


@dataclass(frozen=True)
class Footprint:
    """Bytes of activations that a model takes under a kind of checkpointing, as steps of it were measured.

    held_row, held_edge: what a layer keeps from forward to backward, a row before it and an edge. live_row, live_edge:
    what is there besides at the fullest moment, whatever the number of layers.
    """

    checkpointing: str
    held_row: float
    held_edge: float
    live_row: float
    live_edge: float


@dataclass(frozen=True)
class ModelShape:
    """What the cost formulas need to know of the model.

    kind: the model's name. bytes_per_element: of activations. parameters: of the whole model. extra_inputs: columns
    that a node brings beside its features, such as positional encodings. global_layers: layers at the end without
    edges. hops: tokens of a node beside its own row. footprints: measured, of some kinds of checkpointing; a formula
    stands in for the others.
    """

    kind: str
    width: int
    ffn_width: int
    heads: int
    layers: int
    num_features: int
    num_classes: int
    parameters: int
    bytes_per_element: int = 4
    extra_inputs: int = 0
    global_layers: int = 0
    hops: int = 0
    footprints: tuple[Footprint, ...] = ()

    def footprint(self, checkpointing: str) -> Footprint | None:
        """What was measured under that kind of checkpointing, if it was."""
        return next((f for f in self.footprints if f.checkpointing == checkpointing), None)

    @property
    def local_layers(self) -> int:
        return self.layers - self.global_layers

    @property
    def num_inputs(self) -> int:
        """Columns of the rows that are fetched and encoded."""
        return self.num_features + self.extra_inputs


@dataclass(frozen=True, eq=False)
class LayerWork:
    """One layer of one micro-batch, by partition.

    src_rows, dst_rows, edges: float64 `[K]`: rows before and after the layer, and edges by destination partition.
    needs_src, needs_dst, needs_rows: COO: partition `needs_dst[i]` attends to `needs_rows[i]` distinct rows of
    `needs_src[i]`, another partition.
    """

    src_rows: Counts
    dst_rows: Counts
    edges: Counts
    needs_src: Ids
    needs_dst: Ids
    needs_rows: Counts

    @cached_property
    def log_unneeded(self) -> Counts:
        """For each entry of the needs: log of the share of the source partition's rows that is not needed."""
        rows = np.maximum(self.src_rows[self.needs_src], 1e-300)
        return np.log1p(-np.minimum(self.needs_rows / rows, 1.0 - 1e-12))

    @cached_property
    def unneeded(self) -> Counts | None:
        """`log_unneeded` as a table `[source, destination]`, where there are too many needs for a list to be faster."""
        size = len(self.src_rows)
        if len(self.needs_src) * 16 < size * size:
            return None
        table = np.zeros((size, size))
        table[self.needs_src, self.needs_dst] = self.log_unneeded
        return table


@dataclass(frozen=True, eq=False)
class Workload:
    """A typical step. micro_batches: `[M][L]`.

    repeats: every step holds the same rows and edges, so that features are brought once and nothing is compiled anew.
    part_work: relative work of each partition over the whole graph, where it is known; counted from the step if not.
    """

    model: ModelShape
    micro_batches: tuple[tuple[LayerWork, ...], ...]
    repeats: bool = True
    part_work: tuple[float, ...] = ()

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Relative work of each partition `[K]`, by which features are dealt to ranks and plans start."""
        if self.part_work:
            return self.part_work
        total = np.zeros(self.num_partitions)
        for layers in self.micro_batches:
            for layer in layers:
                total += ROW_WORK * layer.dst_rows + layer.edges
        return tuple(float(v) for v in total)

    @cached_property
    def needs(self) -> tuple[Counts, Counts]:
        """Rows `[K]` before layers, and the log of the share of them that is not needed, `[source, destination]`.

        Layers and micro-batches are added up: what a partition needs over a whole step.
        """
        size = self.num_partitions
        rows, needs = np.zeros(size), np.zeros(size * size)
        times: dict[int, int] = {}
        layers = {id(layer): layer for layers in self.micro_batches for layer in layers}
        for layer in (layer for layers in self.micro_batches for layer in layers):
            times[id(layer)] = times.get(id(layer), 0) + 1
        for key, layer in layers.items():
            rows += times[key] * layer.src_rows
            at = layer.needs_src * size + layer.needs_dst
            needs += times[key] * np.bincount(at, weights=layer.needs_rows, minlength=size * size)
        share = needs.reshape(size, size) / np.maximum(rows, 1e-300)[:, None]
        return rows, np.log1p(-np.minimum(share, 1.0 - 1e-12))

    @property
    def num_partitions(self) -> int:
        return len(self.micro_batches[0][0].src_rows)

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches)

    @property
    def rows(self) -> float:
        """Rows before each layer, summed over layers and micro-batches."""
        return float(sum(layer.src_rows.sum() for layers in self.micro_batches for layer in layers))

    @property
    def edges(self) -> float:
        """Edges summed over layers and micro-batches."""
        return float(sum(layer.edges.sum() for layers in self.micro_batches for layer in layers))


def uniform_workload(
    model: ModelShape,
    rows: Sequence[float],
    edges: Sequence[float],
    halo_share: float,
    num_micro_batches: int = 1,
    *,
    repeats: bool = True,
) -> Workload:
    """A made-up workload for machines and graphs one does not have: every partition needs the same of every other.

    halo_share: rows a partition needs of all others together, over its own rows.
    """
    size = np.asarray(rows, dtype=np.float64)
    num_parts = len(size)
    src, dst = np.nonzero(~np.eye(num_parts, dtype=bool))
    others = max(num_parts - 1, 1)
    needs = np.minimum(size[dst] * halo_share / others, size[src])
    layer = LayerWork(size, size, np.asarray(edges, dtype=np.float64), src, dst, needs)
    return Workload(model, ((layer,) * model.layers,) * num_micro_batches, repeats)
