"""Divides a graph into parts, relabels it so that a part is a range of ids, and keeps the result on disk.

Which rank holds which part is not decided here but by the scheduler; where graphs come from is in `datasets.py`.

Legend: `N` nodes, `E` stored edges (an undirected edge counts twice), `K` parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gtx.folders import open_array, read_manifest, replace, settle, write_beside
from gtx.graphs import Graph, Int64Array, Names, edge_list
from gtx.orders import Locality, NodeOrder, breadth_first, locality, node_order, simple_neighbors
from gtx.streaming import by_hash, linear_deterministic_greedy

if TYPE_CHECKING:
    from gtx.neighbor_lists import NeighborLists
    from gtx.node_inputs import NodeInputs

logger = logging.getLogger(__name__)

Method = Literal["metis", "ldg", "bfs", "hash", "random", "given"]
Int32Array = npt.NDArray[np.int32]
_Metis = Callable[
    [Int64Array, Int64Array, int, int], Int64Array
]  # (indptr, neighbors, parts, seed) -> part of each node

FORMAT = "gtx-partition"
FORMAT_VERSION = 2
_GRAPH_ARRAYS = ("indptr", "indices", "features", "labels", "train_mask", "val_mask", "test_mask")
_MAYBE = ("edge_features", "edge_types")  # arrays that not every graph has
_DTYPES = {
    "indptr": ("int64",),
    "indices": ("int32", "int64"),
    "features": ("float32",),
    "labels": ("int64",),
    "train_mask": ("bool",),
    "val_mask": ("bool",),
    "test_mask": ("bool",),
    "starts": ("int64",),
    "original_id": ("int64",),
    "edge_features": ("float32",),
    "edge_types": ("int8",),
}


@dataclass(frozen=True)
class PartitionFacts:
    """What is known of a partitioning. Sequences have one entry per part, `K` in all.

    Attributes:
        implementation: what ran, with its version, such as "pymetis 2025.2.2".
        seconds: wall time of assigning, relabelling and counting; not of hashing, writing or reading.
        fingerprint: sha256 of the source graph's arrays, method, parts, seed and versions: equal means interchangeable.
        cut_fraction: share of edges, self loops left out, whose ends are in different parts.
        node_balance, edge_balance: the largest part's rows (in-edges) over the mean; 1 is perfect.
        rows: nodes of a part.
        edges: in-edges of a part's nodes.
        halo_rows: distinct sources of a part's in-edges that are in other parts.
        empty_parts: parts without nodes.
        order: how nodes lie within a part. order_s: seconds that making the order took, a part of `seconds`.
        locality: how near the ends of edges lie in memory. unordered: the same with `order` none.
    """

    method: Method
    implementation: str
    parts: int
    seed: int
    seconds: float
    fingerprint: str
    cut_fraction: float
    node_balance: float
    edge_balance: float
    rows: tuple[int, ...]
    edges: tuple[int, ...]
    halo_rows: tuple[int, ...]
    empty_parts: int
    order: NodeOrder
    order_s: float
    locality: Locality
    unordered: Locality

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, eq=False)
class PartitionedGraph:
    """A graph relabelled so that part `p` is the nodes `starts[p]:starts[p+1]`.

    Attributes:
        graph: in new ids. Within a row the neighbours stay in the order of their *original* ids, so that the `j`-th
            neighbour of a node is the same node whatever the partitioning.
        starts: int64 [K+1].
        original_id: int64 [N]; node `i` here was node `original_id[i]`, whose own name, where the source had names, is
            `graph.node_ids[i]`. Within a part in the order of `facts.order`, ascending if
            that is none.
        facts: how it was made and how good it is.
        folder: where it is kept, so that other processes can map the same files; None if only in memory.
        lists: what a row attends to instead of its in-edges where `sampling.method` is `random_walk`.
        inputs: what a model takes beside the features; rows in original ids.
    """

    graph: Graph
    starts: Int64Array
    original_id: Int64Array
    facts: PartitionFacts
    folder: Path | None = None
    lists: NeighborLists | None = None
    inputs: NodeInputs | None = None

    @property
    def num_parts(self) -> int:
        return len(self.starts) - 1

    def input_rows(self, nodes: Int64Array) -> npt.NDArray[np.float32]:
        """What a model takes of these nodes, float32 `[n, columns]`: features, then `inputs`."""
        features = np.asarray(self.graph.features)[nodes]
        if self.inputs is None:
            return features
        return np.concatenate([features, self.inputs.rows(np.asarray(self.original_id)[nodes])], axis=1)

    @cached_property
    def part_of(self) -> Int32Array:
        """int32 [N]: the part of each new id; read-only."""
        parts = np.repeat(np.arange(self.num_parts, dtype=np.int32), np.diff(self.starts))
        parts.setflags(write=False)
        return parts

    @property
    def in_degrees(self) -> Int64Array:
        """int64 [N], in new ids."""
        return self.graph.in_degrees


def assign(graph: Graph, method: Method, parts: int, seed: int) -> Int32Array:
    """The part of each node.

    `metis` keeps neighbours together and the numbers of nodes near equal, `bfs` cuts a breadth-first order of the nodes
    into equal runs, `random` is the baseline of equal runs in random order. `ldg` gives each node in turn to the part
    with most of its neighbours and room left, `hash` to one by its id alone (see `streaming.py`), `given` is
    `graph.assignment`. Edges are taken without direction, multiplicity or self loops, and without those that a model
    adds. With more parts than nodes some parts are empty.

    Returns:
        int32 [N] in `0..parts-1`.

    Raises:
        ValueError: for parts below 1, a negative seed, an unknown method, or `metis` where no METIS can be imported.
    """
    return _assigner(method, parts, seed).assign(graph, parts, seed)


def partition(graph: Graph, method: Method, parts: int, seed: int, order: NodeOrder = "none") -> PartitionedGraph:
    """Assign nodes as `assign` does and relabel the graph accordingly, the nodes of a part in the order asked for.

    Raises:
        ValueError: as `assign`.
    """
    return _partition(graph, method, parts, seed, order, fingerprint(graph, method, parts, seed, order))


def fingerprint(graph: Graph, method: Method, parts: int, seed: int, order: NodeOrder = "none") -> str:
    """sha256 over what decides a partitioning: the graph's arrays, method, parts, seed, order, the versions at work."""
    implementation = _assigner(method, parts, seed).implementation
    digest = hashlib.sha256()
    head = [FORMAT, FORMAT_VERSION, graph.name, graph.num_classes, graph.metric]
    head += [method, implementation, parts, seed, order]
    digest.update(json.dumps(head).encode())
    for name in _arrays_of(graph):
        array = np.ascontiguousarray(getattr(graph, name))
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    if method == "given":
        digest.update(np.ascontiguousarray(_assign_given(graph, parts, seed)).data)
    return digest.hexdigest()


def _arrays_of(graph: Graph) -> list[str]:
    """The arrays that this graph has."""
    return [*_GRAPH_ARRAYS, *(name for name in _MAYBE if getattr(graph, name) is not None)]


# ---------------------------------------------------------------------------------------------------------------------
# Assigning


@dataclass(frozen=True)
class _Assigner:
    implementation: str
    assign: Callable[[Graph, int, int], Int32Array]


def _assigner(method: str, parts: int, seed: int) -> _Assigner:
    if parts < 1:
        raise ValueError(f"partition parts is {parts}; at least 1 is needed")
    if not 0 <= seed < 2**31:
        raise ValueError(f"partition seed is {seed}; it must lie in 0..{2**31 - 1}")
    if method == "random":
        return _Assigner(f"numpy {np.__version__}", _assign_random)
    if method == "bfs":
        import scipy

        return _Assigner(f"scipy {scipy.__version__}", _assign_bfs)
    if method == "ldg":
        return _Assigner("gtx 1", _assign_ldg)
    if method == "given":
        return _Assigner("as it came", _assign_given)
    if method == "hash":
        return _Assigner("gtx 1", lambda graph, parts, seed: by_hash(graph.num_nodes, parts, seed))
    if method == "metis":
        return _metis()
    raise ValueError(f"partition method is {method!r}; choose one of {', '.join(get_args(Method))}")


def _metis() -> _Assigner:
    """pymetis before dgl: it cuts as well, takes a seed, is imported 30 times faster and prints nothing."""
    failures: list[str] = []
    try:
        import pymetis
    except (ImportError, OSError) as error:
        failures.append(f"pymetis: {error}")
    else:
        version = getattr(pymetis, "version", getattr(pymetis, "__version__", "of unknown version"))
        return _Assigner(f"pymetis {version}", partial(_assign_metis, _run_pymetis(pymetis)))
    try:
        with _python_output_dropped():
            import dgl
    except (ImportError, OSError) as error:
        failures.append(f"dgl: {error}")
    else:
        # dgl hands no seed on to METIS.
        return _Assigner(f"dgl {dgl.__version__}", partial(_assign_metis, _run_dgl(dgl)))
    raise ValueError(
        f"partition method metis needs METIS, and neither library with it can be imported ({'; '.join(failures)}); "
        "(1) pip install pymetis, or (2) set the method to ldg or bfs"
    )


def _equal_runs(order: Int64Array, parts: int) -> Int32Array:
    """Cut `order`, a permutation of the nodes, into `parts` runs whose lengths differ by one at most."""
    assigned = np.empty(len(order), dtype=np.int32)
    assigned[order] = np.arange(len(order), dtype=np.int64) * parts // max(len(order), 1)
    return assigned


def _assign_random(graph: Graph, parts: int, seed: int) -> Int32Array:
    return _equal_runs(np.random.Generator(np.random.Philox(seed)).permutation(graph.num_nodes), parts)


def _assign_bfs(graph: Graph, parts: int, seed: int) -> Int32Array:
    """Breadth-first within each component from a random node of it; components one after the other."""
    return _equal_runs(breadth_first(*simple_neighbors(graph), seed), parts)


def _assign_given(graph: Graph, parts: int, seed: int) -> Int32Array:
    given = graph.assignment
    if given is None:
        raise ValueError(
            f"partition method given: graph {graph.name!r} came without a partition; choose another method"
        )
    if given.parts != parts:
        raise ValueError(
            f"partition parts is {parts}, but graph {graph.name!r} came in {given.parts} parts by {given.by}; set "
            f"partition.parts to {given.parts}, or partition.method to another"
        )
    return given.part_of


def _assign_ldg(graph: Graph, parts: int, seed: int) -> Int32Array:
    indptr, neighbors = simple_neighbors(graph)
    return linear_deterministic_greedy(indptr, neighbors, breadth_first(indptr, neighbors, seed), parts)


def _assign_metis(run: _Metis, graph: Graph, parts: int, seed: int) -> Int32Array:
    """METIS on the nodes that have neighbours; isolated ones then fill the smallest parts.

    METIS is never asked where it has no choice (one part, as many parts as nodes) or cannot answer (no edges).
    """
    num_nodes = graph.num_nodes
    if parts == 1:
        return np.zeros(num_nodes, dtype=np.int32)
    indptr, neighbors = simple_neighbors(graph)
    linked = np.flatnonzero(np.diff(indptr))
    assigned = np.empty(num_nodes, dtype=np.int32)
    if len(linked) <= parts:
        assigned[linked] = np.arange(len(linked), dtype=np.int32)
    else:
        compact = np.cumsum(np.diff(indptr) > 0) - 1
        assigned[linked] = run(np.append(indptr[linked], len(neighbors)), compact[neighbors], parts, seed)
    isolated = np.flatnonzero(np.diff(indptr) == 0)
    assigned[isolated] = _fill(np.bincount(assigned[linked], minlength=parts), len(isolated))
    return assigned


def _fill(sizes: Int64Array, count: int) -> Int32Array:
    """int32 [count]: the parts that `count` more nodes go to so that the smallest parts grow first."""
    ascending = np.sort(sizes)
    # Raising the k smallest to the level of the next costs k * next - their sum; find how many get raised.
    cost = np.arange(len(sizes)) * ascending - np.concatenate([[0], np.cumsum(ascending)[:-1]])
    raised = max(1, int(np.searchsorted(cost, count, side="right")))
    level, rest = divmod(count + int(ascending[:raised].sum()), raised)
    wanted = np.maximum(sizes, level)
    lowest = np.argsort(sizes, kind="stable")[:raised]
    wanted[lowest[:rest]] += 1
    return np.repeat(np.arange(len(sizes), dtype=np.int32), wanted - sizes)


def _run_pymetis(pymetis: ModuleType) -> _Metis:
    def run(indptr: Int64Array, neighbors: Int64Array, parts: int, seed: int) -> Int64Array:
        # Bisection for few parts, as METIS advises, and for tiny ones, where its k-way method leaves many empty.
        settings = {"options": pymetis.Options(seed=seed), "recursive": parts <= 8 or len(indptr) <= 8 * parts}
        if hasattr(pymetis, "CSRAdjacency"):  # since 2025.2, which warns about the other form
            _, assigned = pymetis.part_graph(parts, pymetis.CSRAdjacency(indptr, neighbors), **settings)
        else:
            _, assigned = pymetis.part_graph(parts, xadj=indptr, adjncy=neighbors, **settings)
        return np.asarray(assigned, dtype=np.int64)

    return run


def _run_dgl(dgl: ModuleType) -> _Metis:
    def run(indptr: Int64Array, neighbors: Int64Array, parts: int, seed: int) -> Int64Array:
        logger.warning("METIS runs through dgl, which takes no seed: partition seed %d has no effect", seed)
        graph = dgl.graph(("csr", (indptr, neighbors, [])), num_nodes=len(indptr) - 1)
        with _python_output_dropped():
            assigned = dgl.metis_partition_assignment(graph, parts)
        return np.asarray(assigned, dtype=np.int64)

    return run


@contextlib.contextmanager
def _python_output_dropped() -> Any:
    """dgl prints timings and hints; what its C++ part prints still comes through."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Relabelling


def _partition(
    graph: Graph,
    method: Method,
    parts: int,
    seed: int,
    order: NodeOrder,
    graph_fingerprint: str,
    known: Int32Array | None = None,
) -> PartitionedGraph:
    """known: the part of each node, where it has been found before."""
    begun = time.perf_counter()
    assigner = _assigner(method, parts, seed)
    assigned = assigner.assign(graph, parts, seed) if known is None else known
    ordering = time.perf_counter()
    nodes = node_order(
        graph, order, seed, lambda: assigned if method == "metis" else _metis().assign(graph, parts, seed)
    )
    order_s = time.perf_counter() - ordering if order != "none" else 0.0
    relabelled, starts, original_id = _relabel(graph, assigned, nodes, parts)
    rows = np.diff(starts)
    edges = np.diff(relabelled.indptr[starts])
    cut_fraction, halo_rows = _cut_and_halo(relabelled, starts)
    near = unordered = locality(relabelled)
    if order != "none":
        unordered = locality(graph, np.argsort(np.argsort(assigned, kind="stable")))
    facts = PartitionFacts(
        method=method,
        implementation=assigner.implementation,
        parts=parts,
        seed=seed,
        seconds=time.perf_counter() - begun,
        fingerprint=graph_fingerprint,
        cut_fraction=cut_fraction,
        node_balance=_balance(rows),
        edge_balance=_balance(edges),
        rows=tuple(rows.tolist()),
        edges=tuple(edges.tolist()),
        halo_rows=halo_rows,
        empty_parts=int(np.count_nonzero(rows == 0)),
        order=order,
        order_s=order_s,
        locality=near,
        unordered=unordered,
    )
    return PartitionedGraph(relabelled, starts, original_id, facts)


def _relabel(graph: Graph, assigned: Int32Array, nodes: Int64Array, parts: int) -> tuple[Graph, Int64Array, Int64Array]:
    """(graph in new ids, starts, original ids). Rows move whole, so the order within a row survives.

    nodes: all nodes [N], in the order that those of a part shall have.
    """
    num_nodes = graph.num_nodes
    original_id = nodes[np.argsort(assigned[nodes], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(assigned, minlength=parts))])
    new_id = np.empty(num_nodes, dtype=graph.indices.dtype)
    new_id[original_id] = np.arange(num_nodes)
    degrees = graph.in_degrees[original_id]
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    edge_from = np.arange(graph.num_edges) + np.repeat(graph.indptr[:-1][original_id] - indptr[:-1], degrees)
    relabelled = dataclasses.replace(
        graph,
        edge_features=None if graph.edge_features is None else graph.edge_features[edge_from],
        edge_types=None if graph.edge_types is None else graph.edge_types[edge_from],
        names=dataclasses.replace(graph.names, nodes=graph.node_ids[original_id]),
        assignment=None,
        indptr=indptr,
        indices=new_id[graph.indices[edge_from]],
        features=graph.features[original_id],
        labels=graph.labels[original_id],
        train_mask=graph.train_mask[original_id],
        val_mask=graph.val_mask[original_id],
        test_mask=graph.test_mask[original_id],
    )
    return relabelled, starts, original_id


def _cut_and_halo(graph: Graph, starts: Int64Array) -> tuple[float, tuple[int, ...]]:
    """(share of cut edges among those that are no self loops, distinct outside sources of each part)."""
    num_cut = 0
    halo_rows = []
    seen = np.zeros(graph.num_nodes, dtype=np.bool_)
    for begin, end in itertools.pairwise(starts.tolist()):
        sources = graph.indices[graph.indptr[begin] : graph.indptr[end]]
        outside = sources[(sources < begin) | (sources >= end)]
        num_cut += len(outside)
        if len(outside) * 32 < graph.num_nodes:
            halo_rows.append(len(np.unique(outside)))
        else:  # marking beats sorting unless clearing the marks outweighs it
            seen[outside] = True
            halo_rows.append(int(np.count_nonzero(seen)))
            seen[:] = False
    source, destination = edge_list(graph)
    num_edges = int(np.count_nonzero(source != destination))
    return num_cut / max(num_edges, 1), tuple(halo_rows)


def _balance(loads: Int64Array) -> float:
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


# ---------------------------------------------------------------------------------------------------------------------
# On disk


def save(partitioned: PartitionedGraph, folder: str | Path) -> None:
    """Write one `.npy` per array and `manifest.json` into `folder`, replacing what is there.

    Everything is written beside it first and then renamed, so that `folder` is either whole or not there.
    """
    folder = Path(folder)
    replace(_write_beside(partitioned, folder), folder)


def load(folder: str | Path) -> PartitionedGraph:
    """Open what `save` wrote, arrays memory-mapped copy-on-write (torch warns of read-only ones): files never change.

    Checked are the manifest, every file's size and type, and that ranges and ids are consistent; edges and features are
    not read. Names stay with the graph that was partitioned: `graph.node_ids` are the rows there.

    Raises:
        ValueError: if the folder is missing, was not written by `save`, is of another version, or is damaged.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder, FORMAT, FORMAT_VERSION)
        arrays = {
            name: open_array(folder, name, manifest["arrays"][name], kinds)
            for name, kinds in _DTYPES.items()
            if name not in _MAYBE or name in manifest["arrays"]
        }
        facts = _facts_from(manifest["facts"])
        rows: dict[str, Any] = {name: arrays[name] for name in (*_GRAPH_ARRAYS, *_MAYBE) if name in arrays}
        graph = Graph(
            name=str(manifest["graph"]["name"]),
            num_classes=int(manifest["graph"]["num_classes"]),
            metric=manifest["graph"]["metric"],
            names=Names(nodes=arrays["original_id"]),
            **rows,
        )
        partitioned = PartitionedGraph(graph, arrays["starts"], arrays["original_id"], facts, folder)
        _check_consistent(partitioned)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{folder} holds no usable partition ({reason}); delete the folder and partition the graph again"
        ) from error
    return partitioned


def load_or_partition(
    graph: Graph, method: Method, parts: int, seed: int, cache_dir: str | Path, order: NodeOrder = "none"
) -> tuple[PartitionedGraph, bool]:
    """The partitioning from `cache_dir` if it is there for just this graph, else a new one, which is kept there.

    Several processes may do this at once: each writes apart, the first to finish gets the place, the others use it.
    Where the same edges were partitioned alike for another split, that assignment is taken instead of found anew.

    Returns:
        The partitioned graph, memory-mapped, and whether it was there already. Why a folder that was there had to be
        rebuilt is logged as a warning.
    """
    wanted = fingerprint(graph, method, parts, seed, order)
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", graph.name)[-60:].lstrip(".") or "graph"
    folder = Path(cache_dir) / f"{label}-{method}-{parts}-{wanted[:16]}"
    found = _load_matching(folder, wanted)
    if isinstance(found, PartitionedGraph):
        return _with_names(found, graph), True
    if folder.exists():
        logger.warning("partitioning %s again: %s", graph.name, found)
    edges = _edges_fingerprint(graph)
    known = _known_assignment(Path(cache_dir), edges, method, parts, seed)
    partitioned = _partition(graph, method, parts, seed, order, wanted, known)
    settle(
        _write_beside(partitioned, folder, edges),
        folder,
        lambda: isinstance(_load_matching(folder, wanted), PartitionedGraph),
    )
    kept = _load_matching(folder, wanted)
    if isinstance(kept, PartitionedGraph):
        return _with_names(kept, graph), False
    logger.warning("the partition of %s is used without being kept: %s", graph.name, kept)
    return partitioned, False


def _with_names(partitioned: PartitionedGraph, graph: Graph) -> PartitionedGraph:
    """Names are not kept on disk: they can be of any type, and nothing that is computed depends on them."""
    names = dataclasses.replace(graph.names, nodes=graph.node_ids[partitioned.original_id])
    return dataclasses.replace(partitioned, graph=dataclasses.replace(partitioned.graph, names=names))


def _load_matching(folder: Path, wanted: str) -> PartitionedGraph | str:
    """What `folder` holds if its fingerprint is `wanted`, else the reason why not."""
    try:
        partitioned = load(folder)
    except ValueError as error:
        return str(error)
    if partitioned.facts.fingerprint != wanted:
        return f"{folder} is stale: it was made from another graph, seed or version"
    return partitioned


def _edges_fingerprint(graph: Graph) -> str:
    """sha256 of the edges alone: the same for other splits, labels and features."""
    digest = hashlib.sha256()
    for array in (graph.indptr, graph.indices):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _known_assignment(cache_dir: Path, edges: str, method: Method, parts: int, seed: int) -> Int32Array | None:
    """The part of each node as kept with another split, other labels or features of the same edges; None if nowhere."""
    wanted = (method, _assigner(method, parts, seed).implementation, parts, seed)
    for folder in sorted(cache_dir.glob(f"*-{method}-{parts}-*")):
        try:
            if read_manifest(folder, FORMAT, FORMAT_VERSION).get("edges") != edges:
                continue
            found = load(folder)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        facts = found.facts
        if (facts.method, facts.implementation, facts.parts, facts.seed) == wanted:
            assigned = np.empty(found.graph.num_nodes, dtype=np.int32)
            assigned[found.original_id] = found.part_of
            return assigned
    return None


def _write_beside(partitioned: PartitionedGraph, folder: Path, edges: str | None = None) -> Path:
    """Write everything into a new folder next to `folder` and return that.

    edges: `_edges_fingerprint` of the source.
    """
    graph = partitioned.graph
    arrays = {name: np.ascontiguousarray(getattr(graph, name)) for name in _arrays_of(graph)}
    arrays |= {"starts": partitioned.starts, "original_id": partitioned.original_id}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "graph": {"name": graph.name, "num_classes": graph.num_classes, "metric": graph.metric},
        "facts": partitioned.facts.as_dict(),  # with the fingerprint
        "edges": edges,
    }
    return write_beside(folder, arrays, manifest)


def _facts_from(stored: dict[str, Any]) -> PartitionFacts:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
    values |= {key: Locality(**stored[key]) for key in ("locality", "unordered")}
    return PartitionFacts(**values)


def _check_consistent(partitioned: PartitionedGraph) -> None:
    """Raise where arrays that were each read well do not belong together."""
    graph, starts, original_id = partitioned.graph, partitioned.starts, partitioned.original_id
    num_nodes = graph.num_nodes
    per_node = [original_id, *(getattr(graph, name) for name in _GRAPH_ARRAYS if name not in ("indptr", "indices"))]
    for name in _MAYBE:
        array = getattr(graph, name)
        if array is not None and len(array) != graph.num_edges:
            raise ValueError(f"its arrays have {len(array)} {name.replace('_', ' ')} for {graph.num_edges} edges")
    if any(len(array) != num_nodes for array in per_node):
        raise ValueError(f"its arrays have {sorted({len(array) for array in per_node})} rows for {num_nodes} nodes")
    for name, ranges, total in (("indptr", graph.indptr, graph.num_edges), ("starts", starts, num_nodes)):
        if ranges[0] != 0 or ranges[-1] != total or (ranges[1:] < ranges[:-1]).any():
            raise ValueError(f"{name}.npy does not divide 0..{total} into ranges")
    if len(starts) - 1 != partitioned.facts.parts:
        raise ValueError(f"starts.npy has {len(starts) - 1} parts, the manifest {partitioned.facts.parts}")
    seen = np.zeros(num_nodes, dtype=np.bool_)
    seen[original_id[(original_id >= 0) & (original_id < num_nodes)]] = True
    if not seen.all():
        raise ValueError(f"original_id.npy does not name node {int(np.argmin(seen))}")
