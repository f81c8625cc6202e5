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


@dataclass(frozen=True)
class ModelShape:
    """What the cost formulas need to know of the model.

    kind: `GT`, `GPS`, `GCN` or `MLP`. bytes_per_element: of activations. parameters: of the whole model.
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
        """`[K, K]`: log of the share of a partition's rows (first) that another one (second) does not need."""
        size = len(self.src_rows)
        result = np.zeros((size, size))
        rows = np.maximum(self.src_rows[self.needs_src], 1e-300)
        result[self.needs_src, self.needs_dst] = np.log1p(-np.minimum(self.needs_rows / rows, 1.0 - 1e-12))
        return result


@dataclass(frozen=True, eq=False)
class Workload:
    """A typical step. micro_batches: `[M][L]`."""

    model: ModelShape
    micro_batches: tuple[tuple[LayerWork, ...], ...]

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
    return Workload(model, ((layer,) * model.layers,) * num_micro_batches)
