"""Positional encodings, which say where in the graph a node is, and features of its hops: the same whatever the plan.

Laplacian eigenvectors (Dwivedi and Bresson 2021, arXiv 2012.09699), return probabilities of random walks (Dwivedi et
al. 2022, arXiv 2110.07875) and degrees. The first two take edges without direction, multiplicity or self loops. Not
here: where they are kept (`node_inputs.py`) and how they enter a model (`models/model.py`).

Legend: `N` nodes, `n` nodes of a connected component, `k` columns, `L = I - D^-1/2 A D^-1/2`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, sparray
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

from gtx.graphs import Graph, Int64Array
from gtx.orders import simple_neighbors

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_DENSE_NODES = 1024  # components up to this size are solved whole
_SAME_VALUE = 1e-7  # eigenvalues closer than this to their neighbour share a space
_SAME_SIZE = 1e-6  # relative; entries this close to the largest count as tied with it
_STEP = 2.0**-20  # entries are multiples of it, so that rounding in another order hardly ever shows
_BLOCK_ENTRIES = 1 << 22  # of a block of walks, once they have reached every node
_FILLED = 0.1  # share of entries from which on a block of walks is kept dense


def laplacian_encoding(graph: Graph, k: int) -> Float32Array:
    """The eigenvectors of the `k` smallest eigenvalues of each component's Laplacian but the first, float32 `[N, k]`.

    The first belongs to eigenvalue 0 and holds nothing but degrees. Each vector's mean square over its component is 1;
    columns for which a component is too small are 0, and so is the row of an isolated node. Which basis a repeated
    eigenvalue's space gets, and which sign a vector, follow the rule of `laplacian_eigenpairs`.

    Raises:
        ValueError: if the solver does not converge.
    """
    _, vectors, sizes = _eigenpairs(graph, k + 1)
    scaled = vectors[:, 1:] * np.sqrt(sizes)[:, None]
    return (np.round(scaled / _STEP) * _STEP + 0.0).astype(np.float32)  # + 0.0: there is no -0


def laplacian_eigenpairs(graph: Graph, k: int) -> tuple[Float64Array, Float64Array]:
    """The `k` smallest eigenvalues of each component's Laplacian and orthonormal vectors, float64 `[N, k]` each.

    Row i holds what belongs to the component of node i: its eigenvalues, ascending, and node i's entries of the
    vectors; 0 where a component has no more, and for isolated nodes. Components are taken one by one, so that a node's
    numbers depend on its own component only.

    The rule for signs and repeated eigenvalues: of the space of an eigenvalue take the node whose unit vector is
    nearest to the space (of several the one with the lowest id); its projection, normed, is the first vector; go on
    with what is orthogonal to it. A single vector so has its largest entry positive. In a component of more than 1024
    nodes, a space of more vectors than the solver was asked for (`2 k + 64`) is left out, its columns are 0.

    Raises:
        ValueError: if the solver does not converge.
    """
    values, vectors, _ = _eigenpairs(graph, k)
    return values, vectors


def random_walk_encoding(graph: Graph, k: int) -> Float32Array:
    """The probability that a random walk is back after 1, 2, ..., k steps, float32 `[N, k]`; 0 for isolated nodes.

    `diag(P^t)`, `P = D^-1 A`. Exact: about `N E k / 2` products where walks reach every node, less where they do not.
    The first column is 0, since self loops are left out.
    """
    adjacency = _normalised_adjacency(graph)
    num_nodes = graph.num_nodes
    found = np.zeros((num_nodes, k))
    rows = max(1, _BLOCK_ENTRIES // max(num_nodes, 1))
    for begin in range(0, num_nodes, rows):
        block = slice(begin, min(begin + rows, num_nodes))
        # diag(P^t) = diag(S^t), S = D^-1/2 A D^-1/2. As S is symmetric, row i of S^a times row i of S^b is entry (i, i)
        # of S^(a + b): half the steps are enough.
        left = right = adjacency[block]
        for t in range(2, k + 1):
            found[block, t - 1] = _row_products(left, right)
            if t % 2:
                left = right
            elif t < k:
                right = left @ adjacency
                if isinstance(right, sparray) and right.nnz > _FILLED * right.shape[0] * num_nodes:
                    right = right.toarray()
    return found.astype(np.float32)


def degree_encoding(graph: Graph) -> Float32Array:
    """`log(1 + in-degree)` and `log(1 + out-degree)` of the edges as they are stored, float32 `[N, 2]`."""
    out_degrees = np.bincount(np.asarray(graph.indices), minlength=graph.num_nodes)
    return np.log1p(np.stack([graph.in_degrees, out_degrees], axis=1)).astype(np.float32)


def hop_features(graph: Graph, k: int) -> Float32Array:
    """The features after 1, 2, ..., k propagations `D^-1/2 A D^-1/2 X`, float32 `[N, k F]`, one after the other.

    Hop2Token of NAGphormer (Chen et al. 2023, arXiv 2206.04910). Edges are taken as they are stored, D are in-degrees:
    GCN's propagation. Made in float64.
    """
    scale = 1.0 / np.sqrt(np.maximum(graph.in_degrees, 1))
    indices = np.asarray(graph.indices)
    weights = np.repeat(scale, graph.in_degrees) * scale[indices]
    adjacency = csr_array((weights, indices, graph.indptr), shape=(graph.num_nodes, graph.num_nodes))
    rows, hops = np.asarray(graph.features, dtype=np.float64), []
    for _ in range(k):
        rows = adjacency @ rows
        hops.append(rows.astype(np.float32))
    return np.concatenate(hops, axis=1)


def _normalised_adjacency(graph: Graph) -> csr_array:
    """`D^-1/2 A D^-1/2` of the simple undirected graph, float64 `[N, N]`."""
    num_nodes = graph.num_nodes
    indptr, neighbors = simple_neighbors(graph)
    degrees = np.diff(indptr)
    scale = 1.0 / np.sqrt(np.maximum(degrees, 1))
    return csr_array((np.repeat(scale, degrees) * scale[neighbors], neighbors, indptr), shape=(num_nodes, num_nodes))


def _row_products(left: Any, right: Any) -> Float64Array:
    """The product of each row of `left` with that of `right`; each a sparse or a dense matrix of the same shape."""
    if isinstance(left, sparray):
        products = left.multiply(right).sum(axis=1)
    elif isinstance(right, sparray):
        products = right.multiply(left).sum(axis=1)
    else:
        products = np.einsum("ij,ij->i", left, right)
    return np.asarray(products, dtype=np.float64).reshape(-1)


def _eigenpairs(graph: Graph, k: int) -> tuple[Float64Array, Float64Array, Int64Array]:
    """`laplacian_eigenpairs`, and the size `[N]` of each node's component."""
    adjacency = _normalised_adjacency(graph)
    num_nodes = graph.num_nodes
    values, vectors = np.zeros((num_nodes, k)), np.zeros((num_nodes, k))
    _, component = connected_components(adjacency, directed=False)
    sizes = np.bincount(component)
    by_component = np.argsort(component, kind="stable")  # ascending ids within
    ends = np.cumsum(sizes)
    for end, size in zip(ends[sizes > 1], sizes[sizes > 1], strict=True):
        nodes = by_component[end - size : end]
        own = adjacency if size == num_nodes else adjacency[nodes][:, nodes]
        own_values, own_vectors = _component_eigenpairs(own, k)
        values[nodes, : len(own_values)] = own_values
        vectors[nodes, : len(own_values)] = own_vectors
    return values, vectors, sizes[component]


def _component_eigenpairs(adjacency: csr_array, k: int) -> tuple[Float64Array, Float64Array]:
    """The `k` smallest eigenvalues `[m]` of a connected graph's Laplacian, vectors `[n, m]`; `m = min(k, n)`, or less.

    adjacency: normalised, `[n, n]`. Its largest eigenvalues are one minus the Laplacian's smallest.
    """
    size = adjacency.shape[0]
    asked, most = min(size, k + 4), min(size, 2 * k + 64)
    while True:
        if size <= _DENSE_NODES or asked >= size:
            asked = size
            found, basis = np.linalg.eigh(adjacency.toarray())
        else:
            found, basis = _largest(adjacency, asked)
        found, basis = found[::-1], basis[:, ::-1]
        starts = np.flatnonzero(np.diff(found, prepend=np.inf) < -_SAME_VALUE)
        if asked == size or starts[-1] >= k or asked >= most:
            break
        asked = most
    if asked < size:
        starts, ends = starts[:-1], starts[1:]  # there may be more vectors of the last space
    else:
        ends = np.append(starts[1:], size)
    wanted = starts < k
    spaces = [basis[:, start:end] for start, end in zip(starts[wanted], ends[wanted], strict=True)]
    values = [
        np.full(space.shape[1], max(1.0 - found[start], 0.0)) for space, start in zip(spaces, starts, strict=False)
    ]
    empty = (np.empty(0), np.empty((size, 0)))
    chosen = [_canonical(space) for space in spaces]
    return np.concatenate([*values, empty[0]])[:k], np.concatenate([*chosen, empty[1]], axis=1)[:, :k]


def _largest(adjacency: csr_array, count: int) -> tuple[Float64Array, Float64Array]:
    """The `count` largest eigenvalues, ascending, and their vectors."""
    start = np.random.Generator(np.random.Philox(0)).standard_normal(adjacency.shape[0])
    try:
        found: tuple[Float64Array, Float64Array] = eigsh(adjacency, k=count, which="LA", v0=start, rng=0)
    except ArpackNoConvergence as error:
        raise ValueError(
            f"model.encodings.laplacian: {len(error.eigenvalues)} of {count} eigenvectors of a component of "
            f"{adjacency.shape[0]} nodes were found; ask for fewer, or use random_walk"
        ) from None
    return found


def _canonical(space: Float64Array) -> Float64Array:
    """The basis of a space `[n, m]` that the rule of `laplacian_eigenpairs` chooses, whatever basis it is given in."""
    rest = space.copy()
    basis = np.empty_like(space)
    for column in range(space.shape[1]):
        lengths = np.einsum("ij,ij->i", rest, rest)
        pivot = int(np.argmax(lengths >= (1.0 - _SAME_SIZE) * lengths.max()))
        direction = rest[pivot] / np.linalg.norm(rest[pivot])
        basis[:, column] = rest @ direction
        rest -= np.outer(basis[:, column], direction)
    return basis
