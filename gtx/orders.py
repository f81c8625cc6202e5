"""Orders of a graph's nodes that put neighbours near each other in memory, and how near they then are, by counting.

An order only says where rows lie: `partition.py` applies it within every part, as a permutation that it keeps, and what
is drawn and learned stays the same. Legend: `N` nodes, `E` stored edges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gtx.graphs import OWN_EDGE, Graph, Int64Array, edge_list

NodeOrder = Literal["none", "bfs", "degree", "rcm", "metis"]
NEAR = 1024  # rows: what 128 columns in float32 take 512 KiB for, about a core's cache
BLOCK = 256  # destinations that are taken together


@dataclass(frozen=True)
class Locality:
    """How near the ends of edges lie, self loops left out.

    mean_gap: rows between source and destination. near_fraction: share of edges whose ends are within 1,024 rows.
    edges_per_source: edges over distinct sources among 256 rows that follow each other: how often a row that was read
        is used while it is at hand.
    """

    mean_gap: float
    near_fraction: float
    edges_per_source: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def node_order(graph: Graph, order: NodeOrder, seed: int, by_metis: Callable[[], npt.NDArray[np.int32]]) -> Int64Array:
    """The nodes in their new order, int64 [N].

    `bfs`: breadth-first, component by component, from a random node of each. `degree`: the most in-edges first. `rcm`:
    reverse Cuthill-McKee (scipy), which keeps the largest gap small. `metis`: by METIS part (`by_metis` gives the part
    of each node), breadth-first over the edges within it. Edges are taken without direction.

    Raises:
        ValueError: for another order.
    """
    if order not in get_args(NodeOrder):
        raise ValueError(f"data.order is {order!r}; choose one of {', '.join(get_args(NodeOrder))}")
    match order:
        case "none":
            return np.arange(graph.num_nodes, dtype=np.int64)
        case "degree":
            return np.argsort(-graph.in_degrees, kind="stable")
        case "bfs":
            return breadth_first(*simple_neighbors(graph), seed)
        case "rcm":
            from scipy.sparse.csgraph import reverse_cuthill_mckee

            adjacency = _adjacency(*simple_neighbors(graph))
            found: Int64Array = np.asarray(reverse_cuthill_mckee(adjacency, symmetric_mode=True)).astype(np.int64)
            return found
        case "metis":
            part = by_metis()
            indptr, neighbors = simple_neighbors(graph)
            row = np.repeat(np.arange(graph.num_nodes), np.diff(indptr))
            within = part[row] == part[neighbors]
            indptr = np.concatenate([[0], np.cumsum(within)])[indptr]
            within_parts = breadth_first(indptr, neighbors[within], seed)
            return within_parts[np.argsort(part[within_parts], kind="stable")]


def locality(graph: Graph, position: Int64Array | None = None) -> Locality:
    """How near the ends of edges lie if node `i` lies at `position[i]` (at `i` if None); linear in `N + E`."""
    from scipy.sparse import csr_array

    source, destination = edge_list(graph)
    other = source != destination
    source, destination = source[other], destination[other]
    if position is not None:
        source, destination = position[source], position[destination]
    if not len(source):
        return Locality(0.0, 1.0, 1.0)
    gap = np.abs(source - destination)
    num_nodes = graph.num_nodes
    shape = (num_nodes, -(-num_nodes // BLOCK))
    # Counting sorts by source, then by block: repeated pairs are added up.
    pairs = csr_array((np.ones(len(source), np.int8), (source, destination // BLOCK)), shape=shape)
    return Locality(float(gap.mean()), float((gap <= NEAR).mean()), len(source) / pairs.nnz)


def breadth_first(indptr: Int64Array, neighbors: Int64Array, seed: int) -> Int64Array:
    """The nodes breadth-first within each component from a random node of it, components one after the other."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components

    num_nodes = len(indptr) - 1
    adjacency = _adjacency(indptr, neighbors)
    num_components, component = connected_components(adjacency, directed=False)
    shuffled = np.random.Generator(np.random.Philox(seed)).permutation(num_nodes)
    _, first = np.unique(component[shuffled], return_index=True)
    # One search from a node before all others that leads to every component's start, rather than one per component:
    # isolated nodes are components too and can be many.
    num_links = len(neighbors) + num_components
    kind: Any = adjacency.indices.dtype
    rooted = csr_array(
        (
            np.ones(num_links),
            np.concatenate([adjacency.indices, shuffled[first]], dtype=kind, casting="same_kind"),
            np.concatenate([indptr, [num_links]], dtype=kind, casting="same_kind"),
        ),
        shape=(num_nodes + 1, num_nodes + 1),
    )
    found = breadth_first_order(rooted, num_nodes, directed=True, return_predecessors=False)[1:].astype(np.int64)
    by_component: Int64Array = found[np.argsort(component[found], kind="stable")]
    return by_component


def simple_neighbors(graph: Graph) -> tuple[Int64Array, Int64Array]:
    """(indptr, neighbors) of the undirected graph without duplicates, self loops and added edges, rows ascending."""
    num_nodes = graph.num_nodes
    source, destination = edge_list(graph)
    other = source != destination
    if graph.edge_types is not None:
        other &= np.asarray(graph.edge_types) == OWN_EDGE
    source, destination = source[other], destination[other]
    keys = np.concatenate([destination * num_nodes + source, source * num_nodes + destination])
    keys.sort()
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
    row_ends = np.arange(num_nodes + 1, dtype=np.int64) * num_nodes
    indptr = np.searchsorted(keys, row_ends).astype(np.int64)
    return indptr, keys - np.repeat(row_ends[:-1], np.diff(indptr))


def _adjacency(indptr: Int64Array, neighbors: Int64Array) -> Any:
    """A scipy matrix; csgraph works on float64 and int32 and would copy anything else."""
    from scipy.sparse import csr_array

    num_nodes = len(indptr) - 1
    kind = np.int32 if max(num_nodes, len(neighbors)) < np.iinfo(np.int32).max else np.int64
    return csr_array((np.ones(len(neighbors)), neighbors.astype(kind), indptr.astype(kind)), shape=(num_nodes,) * 2)
