"""Parts given to nodes one after the other, for graphs that METIS would take too long or too much memory for.

Not here: METIS, runs of an order, and what a partitioning is (`partition.py`).
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
import torch

from gtx.graphs import Int64Array
from sparse_engine.keyed import keys

_PURPOSE = 101  # of keys: no draw of training has it


def by_hash(num_nodes: int, parts: int, seed: int) -> npt.NDArray[np.int32]:
    """int32 `[N]`: a hash of seed and node, modulo `parts`. No edge is read, and sizes are even only by chance."""
    hashed = keys(seed, _PURPOSE, 0, -1, torch.arange(num_nodes)).numpy().view(np.uint64)
    return (hashed % np.uint64(parts)).astype(np.int32)


def linear_deterministic_greedy(
    indptr: Int64Array, neighbors: Int64Array, order: Int64Array, parts: int
) -> npt.NDArray[np.int32]:
    """int32 `[N]`: each node in turn goes where most of its neighbours are, the fuller a part the less it counts.

    A part `P` scores `|N(v) and P| (1 - |P| / C)` with room for `C = ceil(N / parts)` nodes each: Stanton and Kliot,
    "Streaming graph partitioning for large distributed graphs", KDD 2012, section 4. Of equal ones the smaller part is
    taken, then the first. One pass: `O(N log parts + E)` time, `8 N` bytes beside the graph.

    indptr, neighbors: undirected, as `simple_neighbors` gives them. order: a permutation of the nodes; breadth-first
    cuts fewer edges than random does.
    """
    num_nodes = len(order)
    room = -(-num_nodes // parts)
    part = [-1] * num_nodes
    sizes = [0] * parts
    smallest = [(0, p) for p in range(parts)]  # a heap of (size then, part); entries of another size are stale
    for node in order.tolist():
        counts: dict[int, int] = {}
        for neighbor in neighbors[indptr[node] : indptr[node + 1]].tolist():
            p = part[neighbor]
            if p >= 0:
                counts[p] = counts.get(p, 0) + 1
        best = max(
            ((count * (room - sizes[p]), -sizes[p], -p) for p, count in counts.items() if sizes[p] < room), default=None
        )
        if best is not None:
            chosen = -best[2]
        else:
            while smallest[0][0] != sizes[smallest[0][1]]:
                heapq.heappop(smallest)
            chosen = smallest[0][1]
        part[node] = chosen
        sizes[chosen] += 1
        heapq.heappush(smallest, (sizes[chosen], chosen))
    return np.array(part, dtype=np.int32)
