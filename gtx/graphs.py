"""A graph as arrays, how to make a checked one, and rewrites of its edges and features.

Where graphs come from is in `datasets.py`; how they are divided is in `partition.py`. Nothing here knows torch.

Legend: `N` nodes, `E` edges, `F` features, `Fe` edge features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

Metric = Literal["accuracy", "roc_auc"]
SelfLoopPolicy = Literal["keep", "add", "remove"]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

UNLABELLED = -1
OWN_EDGE, ADDED_EDGE = 0, 1  # types of edges
NUM_EDGE_TYPES = 2
_UNLABELLED_CODES = (-1, -100)  # -100 is torch's `ignore_index`; NaN is OGB's


@dataclass(frozen=True, eq=False)
class Names:
    """What the rows and columns of a graph were called where it came from; None where they are just counted from 0.

    Attributes:
        nodes: [N], int64, or object where the ids are not all whole numbers of 64 bits.
        classes: one per class.
        features: one per feature.
        edge_features: one per edge feature.
    """

    nodes: npt.NDArray[Any] | None = None
    classes: tuple[Hashable, ...] | None = None
    features: tuple[str, ...] | None = None
    edge_features: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SplitOrigin:
    """Where a split is from.

    kind: `public` if it came with a known set, `given` if the user's own data say it, `random` if it was drawn.
    number: which of several. seed: of the draw.
    """

    kind: Literal["public", "given", "random"]
    number: int = 0
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class Assignment:
    """The part, int32 [N], that each node was put into where the graph came from, of `parts`; by: who put it there."""

    part_of: npt.NDArray[np.int32]
    parts: int
    by: str


@dataclass(frozen=True, eq=False)
class Graph:
    """A node-classification graph in CSR form: row = destination, column = source.

    Arrays may be read-only memory maps: nothing may write into them. Duplicate edges and self loops are kept as given.

    Attributes:
        name: what the graph is called in reports and folder names.
        indptr: int64 [N+1]; the in-edges of node `i` are at `indptr[i]:indptr[i+1]`.
        indices: int32 or int64 [E]; source ids, ascending within a row. (A relabelled graph, see `partition.py`, keeps
            the order of the original ids instead.)
        features: float32 [N, F].
        labels: int64 [N], a class in `0..num_classes-1` or -1 where there is none.
        train_mask, val_mask, test_mask: bool [N], disjoint.
        num_classes: classes the labels are drawn from.
        metric: what validation and test report.
        edge_features: float32 [E, Fe] beside `indices`, or None. Attention reads them with `model.edge_bias`.
        names: ids and column names of the source, where it had any. Not part of what is computed.
        assignment: the partition that the source came with, for `partition.method: given`.
        edge_types: int8 [E] beside `indices`, `OWN_EDGE` or `ADDED_EDGE`; None where all are the graph's own.
        split: where the split is from, if that is known. Not kept with a partition.
    """

    name: str
    indptr: Int64Array
    indices: npt.NDArray[np.int32] | Int64Array
    features: npt.NDArray[np.float32]
    labels: Int64Array
    train_mask: BoolArray
    val_mask: BoolArray
    test_mask: BoolArray
    num_classes: int
    metric: Metric = "accuracy"
    edge_features: npt.NDArray[np.float32] | None = None
    names: Names = Names()
    assignment: Assignment | None = None
    edge_types: npt.NDArray[np.int8] | None = None
    split: SplitOrigin | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Stored edges: an undirected edge counts twice, a self loop once."""
        return len(self.indices)

    @property
    def num_features(self) -> int:
        return int(self.features.shape[1])

    @property
    def num_edge_features(self) -> int:
        return 0 if self.edge_features is None else int(self.edge_features.shape[1])

    @property
    def dims(self) -> tuple[int, int, int]:
        """What a model is built for: features, classes, edge features."""
        return self.num_features, self.num_classes, self.num_edge_features

    @property
    def in_degrees(self) -> Int64Array:
        """int64 [N]."""
        return np.diff(self.indptr)

    @property
    def node_ids(self) -> npt.NDArray[Any]:
        """[N]: what the source called each node; `0..N-1` where it only counted them."""
        return np.arange(self.num_nodes, dtype=np.int64) if self.names.nodes is None else self.names.nodes


@dataclass(frozen=True)
class GraphSummary:
    """What `summarize` counts. `E` is stored edges, so an undirected edge counts twice.

    Attributes:
        isolated_nodes: nodes with neither an in-edge nor an out-edge other than self loops.
        zero_in_degree_nodes: nodes with an empty row: attention has nothing to attend to there.
        duplicate_edges: edges beyond the first of each (source, destination).
        directed: whether the reverse of some edge is missing.
        num_labelled: nodes with a label, in a split or not.
        label_rate: training nodes / N, as Kipf & Welling (2017) use the word.
    """

    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    isolated_nodes: int
    zero_in_degree_nodes: int
    duplicate_edges: int
    self_loops: int
    directed: bool
    max_in_degree: int
    mean_in_degree: float
    num_train: int
    num_val: int
    num_test: int
    num_labelled: int
    label_rate: float

    def as_dict(self) -> dict[str, int | float | bool]:
        return dataclasses.asdict(self)


def from_edges(
    name: str,
    src: npt.ArrayLike,
    dst: npt.ArrayLike,
    num_nodes: int,
    features: npt.ArrayLike,
    labels: npt.ArrayLike,
    train_mask: npt.ArrayLike,
    val_mask: npt.ArrayLike,
    test_mask: npt.ArrayLike,
    *,
    num_classes: int | None = None,
    metric: Metric = "accuracy",
    edge_features: npt.ArrayLike | None = None,
    names: Names | None = None,
    split: SplitOrigin | None = None,
) -> Graph:
    """Check everything and sort the edges `src[e] -> dst[e]` into a `Graph`.

    Args:
        src, dst: integers [E] in `0..num_nodes-1`, in any order. Duplicates and self loops are kept.
        num_nodes: N. Nodes that no edge touches are nodes all the same.
        features: [N, F], cast to float32.
        labels: [N], whole numbers; -1, -100 and NaN mean unlabelled.
        train_mask, val_mask, test_mask: bool [N]; validation and test may be empty, training may not.
        num_classes: 1 + the largest label if None.
        edge_features: [E, Fe], cast to float32; they move with their edges.
        names: see `Names`.
        split: where the masks are from.

    Raises:
        ValueError: an endpoint outside the nodes, a feature that is not finite, a label that is no class, splits that
            overlap, a training node without a label, an empty training split, or arrays of the wrong shape.
    """
    if num_nodes < 0:
        raise ValueError(f"graph {name!r}: num_nodes is {num_nodes}; it cannot be negative")
    source, destination = _check_edges(name, src, dst, num_nodes)
    feature_rows = _check_features(name, "feature", "node", features, num_nodes)
    edge_rows = None
    if edge_features is not None:
        edge_rows = _check_features(name, "edge feature", "edge", edge_features, len(source))
    classes = checked_labels(name, labels, num_nodes)
    train = _check_mask(name, "train", train_mask, num_nodes)
    val = _check_mask(name, "val", val_mask, num_nodes)
    test = _check_mask(name, "test", test_mask, num_nodes)
    _check_splits(name, train, val, test, classes)
    found_classes = int(classes.max(initial=UNLABELLED)) + 1
    if num_classes is None:
        num_classes = found_classes
    elif found_classes > num_classes:
        node = int(np.argmax(classes))
        raise ValueError(
            f"graph {name!r}: node {node} has label {found_classes - 1}, but num_classes is {num_classes}; "
            f"labels are 0..{num_classes - 1}, or -1 for none"
        )
    if metric not in get_args(Metric):
        raise ValueError(f"graph {name!r}: metric is {metric!r}; choose one of {', '.join(get_args(Metric))}")
    if metric == "roc_auc" and num_classes != 2:
        raise ValueError(f"graph {name!r}: roc_auc is defined for 2 classes, the labels have {num_classes}")
    rows = _csr(_edge_keys(source, destination, num_nodes), num_nodes, edge_rows)
    return Graph(
        name,
        rows.indptr,
        rows.indices,
        feature_rows,
        classes,
        train,
        val,
        test,
        num_classes,
        metric,
        rows.edge_features,
        names or Names(),
        split=split,
    )


def with_undirected(graph: Graph) -> Graph:
    """Add the reverse of every edge whose reverse is missing, with the features of the first edge that it reverses.

    Edges that are there stay as they are, duplicates included; a missing reverse is added once, and a self loop is its
    own reverse. Applying it twice is applying it once.
    """
    forward, reverse = _both_ways(graph)
    missing = np.setdiff1d(_distinct(reverse), _distinct(forward), assume_unique=True)
    if not len(missing):
        return graph
    features = graph.edge_features
    if features is not None:
        order = np.argsort(reverse, kind="stable")
        features = np.concatenate([features, features[order[np.searchsorted(reverse[order], missing)]]])
    return _with_edges(graph, np.concatenate([forward, missing]), features)


def with_self_loops(graph: Graph, policy: SelfLoopPolicy) -> Graph:
    """Self loops as `policy` says: `keep` as they are, `add` so that each node has exactly one, `remove` all.

    A loop that was there keeps its edge features (the first of several), an added one has zeros.

    Raises:
        ValueError: for another policy.
    """
    if policy not in get_args(SelfLoopPolicy):
        raise ValueError(f"self_loops is {policy!r}; choose one of {', '.join(get_args(SelfLoopPolicy))}")
    if policy == "keep":
        return graph
    num_nodes = graph.num_nodes
    source, destination = edge_list(graph)
    other = source != destination
    keys = _edge_keys(source[other], destination[other], num_nodes)
    features = None if graph.edge_features is None else graph.edge_features[other]
    if policy == "add":
        nodes = np.arange(num_nodes, dtype=np.int64)
        keys = np.concatenate([keys, _edge_keys(nodes, nodes, num_nodes)])
        if features is not None:
            assert graph.edge_features is not None
            of_loops = np.zeros((num_nodes, features.shape[1]), dtype=np.float32)
            looped, first = np.unique(source[~other], return_index=True)
            of_loops[looped] = graph.edge_features[~other][first]
            features = np.concatenate([features, of_loops])
    return _with_edges(graph, keys, features)


def with_distinct_edges(graph: Graph) -> Graph:
    """Keep the first of the edges that have the same source and destination, with its features."""
    source, destination = edge_list(graph)
    keys, first = np.unique(_edge_keys(source, destination, graph.num_nodes), return_index=True)
    return _with_edges(graph, keys, None if graph.edge_features is None else graph.edge_features[first])


def with_added_edges(graph: Graph, src: Int64Array, dst: Int64Array) -> Graph:
    """Add edges that are not the graph's own, after those with the same ends, with edge features of 0.

    Not idempotent; to be done after all that changes the graph's own edges.
    """
    assert graph.edge_types is None
    keys = np.concatenate([_edge_keys(*edge_list(graph), graph.num_nodes), _edge_keys(src, dst, graph.num_nodes)])
    columns = 0 if graph.edge_features is None else graph.edge_features.shape[1]
    beside = np.zeros((len(keys), columns + 1), dtype=np.float32)  # edge features, then the type
    if graph.edge_features is not None:
        beside[: graph.num_edges, :columns] = graph.edge_features
    beside[:, columns] = np.where(np.arange(len(keys)) < graph.num_edges, OWN_EDGE, ADDED_EDGE)
    rows = _csr(keys, graph.num_nodes, beside)
    assert rows.edge_features is not None
    return dataclasses.replace(
        graph,
        indptr=rows.indptr,
        indices=rows.indices,
        edge_features=rows.edge_features[:, :columns] if columns else graph.edge_features,
        edge_types=rows.edge_features[:, columns].astype(np.int8),
    )


def with_standardized_features(graph: Graph) -> Graph:
    """Every feature minus its mean, over its standard deviation, both of the training nodes (and in float64).

    A feature that is the same at all training nodes becomes 0 everywhere: training could not learn what it means.

    Raises:
        ValueError: for a value that does not fit into float32 any more.
    """
    mean, deviation = training_statistics(graph)
    constant = deviation == 0.0
    scaled = (graph.features - mean) / np.where(constant, 1.0, deviation)
    rows = _check_features(graph.name, "standardized feature", "node", np.where(constant, 0.0, scaled), len(scaled))
    return dataclasses.replace(graph, features=rows)


def with_standardized_edge_features(graph: Graph) -> Graph:
    """Every edge feature minus its mean, over its standard deviation, both of the in-edges of training nodes.

    So an edge whose features are 0 is as any other. A feature that is the same at all those edges becomes 0 everywhere,
    as does everything where there is no such edge.

    Raises:
        ValueError: for a graph without edge features, or a value that does not fit into float32 any more.
    """
    if not graph.num_edge_features:
        raise ValueError(
            f"model.edge_bias is true, but graph {graph.name!r} has no edge features; give it some or set it to false"
        )
    assert graph.edge_features is not None
    _, destination = edge_list(graph)
    seen = graph.edge_features[graph.train_mask[destination]].astype(np.float64)
    if not len(seen):
        return dataclasses.replace(graph, edge_features=np.zeros_like(graph.edge_features))
    constant = seen.min(axis=0) == seen.max(axis=0)
    deviation = np.where(constant, 1.0, seen.std(axis=0))
    scaled = np.where(constant, 0.0, (graph.edge_features - seen.mean(axis=0)) / deviation)
    rows = _check_features(graph.name, "standardized edge feature", "edge", scaled, len(scaled))
    return dataclasses.replace(graph, edge_features=rows)


def training_statistics(graph: Graph) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(mean, standard deviation) of every feature over the training nodes, float64 [F] each; 0 where it is constant."""
    seen = graph.features[graph.train_mask].astype(np.float64)
    constant = seen.min(axis=0) == seen.max(axis=0)
    return seen.mean(axis=0), np.where(constant, 0.0, seen.std(axis=0))


def edge_list(graph: Graph) -> tuple[Int64Array, Int64Array]:
    """The edges as (sources, destinations), int64 [E] each, in the order they are stored in."""
    destination = np.repeat(np.arange(graph.num_nodes, dtype=np.int64), graph.in_degrees)
    return np.asarray(graph.indices).astype(np.int64), destination


def summarize(graph: Graph) -> GraphSummary:
    """Count what a user should know of a graph before training on it."""
    num_nodes = graph.num_nodes
    source, destination = edge_list(graph)
    loop = source == destination
    touched = np.zeros(num_nodes, dtype=np.bool_)
    touched[source[~loop]] = True
    touched[destination[~loop]] = True
    forward, reverse = (_distinct(keys) for keys in _both_ways(graph))
    in_degrees = graph.in_degrees
    num_train = int(np.count_nonzero(graph.train_mask))
    return GraphSummary(
        num_nodes=num_nodes,
        num_edges=graph.num_edges,
        num_features=graph.num_features,
        num_classes=graph.num_classes,
        isolated_nodes=int(np.count_nonzero(~touched)),
        zero_in_degree_nodes=int(np.count_nonzero(in_degrees == 0)),
        duplicate_edges=graph.num_edges - len(forward),
        self_loops=int(np.count_nonzero(loop)),
        directed=not np.array_equal(forward, reverse),
        max_in_degree=int(in_degrees.max(initial=0)),
        mean_in_degree=graph.num_edges / max(num_nodes, 1),
        num_train=num_train,
        num_val=int(np.count_nonzero(graph.val_mask)),
        num_test=int(np.count_nonzero(graph.test_mask)),
        num_labelled=int(np.count_nonzero(graph.labels != UNLABELLED)),
        label_rate=num_train / max(num_nodes, 1),
    )


def _edge_keys(source: Int64Array, destination: Int64Array, num_nodes: int) -> Int64Array:
    """One int64 per edge whose order is (destination, source); one sort of keys is far cheaper than a lexsort."""
    assert num_nodes < 3_037_000_499, "destination * N + source must fit into int64"
    return destination * num_nodes + source


@dataclass(frozen=True, eq=False)
class _Rows:
    indptr: Int64Array
    indices: npt.NDArray[np.int32] | Int64Array
    edge_features: npt.NDArray[np.float32] | None


def _csr(keys: Int64Array, num_nodes: int, edge_features: npt.NDArray[np.float32] | None) -> _Rows:
    """Edge keys in any order as CSR; ids take int32 where they fit, which halves the memory of edges.

    Duplicates stay in the order given, so that their features are where one expects them.
    """
    if edge_features is None:
        keys = np.sort(keys)
    else:
        order = np.argsort(keys, kind="stable")
        keys, edge_features = keys[order], edge_features[order]
    row_ends = np.arange(num_nodes + 1, dtype=np.int64) * num_nodes
    indptr = np.searchsorted(keys, row_ends).astype(np.int64)
    keys -= np.repeat(row_ends[:-1], np.diff(indptr))
    return _Rows(indptr, keys.astype(np.int32) if num_nodes <= np.iinfo(np.int32).max else keys, edge_features)


def _with_edges(graph: Graph, keys: Int64Array, edge_features: npt.NDArray[np.float32] | None) -> Graph:
    assert graph.edge_types is None, "edges are added last"
    rows = _csr(keys, graph.num_nodes, edge_features)
    return dataclasses.replace(graph, indptr=rows.indptr, indices=rows.indices, edge_features=rows.edge_features)


def _both_ways(graph: Graph) -> tuple[Int64Array, Int64Array]:
    """The keys of the edges and of their reverses, unsorted."""
    source, destination = edge_list(graph)
    return _edge_keys(source, destination, graph.num_nodes), _edge_keys(destination, source, graph.num_nodes)


def _distinct(keys: Int64Array) -> Int64Array:
    """Ascending, each once. (`np.unique` hashes integers, which is slower on sizes that matter here.)"""
    keys = np.sort(keys)
    first = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return keys[first]


def _check_edges(name: str, src: npt.ArrayLike, dst: npt.ArrayLike, num_nodes: int) -> tuple[Int64Array, Int64Array]:
    ends: list[Int64Array] = []
    for side, given in (("src", src), ("dst", dst)):
        nodes: npt.NDArray[Any] = np.asarray(given)
        if nodes.ndim != 1:
            raise ValueError(
                f"graph {name!r}: {side} has shape {nodes.shape}; it must be a vector with one id per edge"
            )
        if nodes.size and not np.issubdtype(nodes.dtype, np.integer):
            raise ValueError(f"graph {name!r}: {side} has dtype {nodes.dtype}; node ids must be integers")
        ends.append(nodes.astype(np.int64))
    source, destination = ends
    if len(source) != len(destination):
        raise ValueError(f"graph {name!r}: {len(source)} sources for {len(destination)} destinations")
    for nodes in ends:
        outside = (nodes < 0) | (nodes >= num_nodes)
        if outside.any():
            edge = int(np.argmax(outside))
            raise ValueError(
                f"graph {name!r}: edge {edge}, ({source[edge]}, {destination[edge]}), names node {nodes[edge]}, but "
                f"the nodes are 0..{num_nodes - 1}; drop the edge or add the node's row "
                f"({np.count_nonzero(outside)} such edges on this side)"
            )
    return source, destination


def _check_features(
    name: str, what: str, row_is: str, features: npt.ArrayLike, num_rows: int
) -> npt.NDArray[np.float32]:
    given = np.asarray(features)
    if given.ndim != 2 or len(given) != num_rows:
        raise ValueError(f"graph {name!r}: {what}s have shape {given.shape}; expected ({num_rows}, F)")
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, which the check below names
        rows = np.ascontiguousarray(given, dtype=np.float32)
    finite = np.isfinite(rows)
    if not finite.all():
        columns = np.flatnonzero(~finite.all(axis=0))
        row = int(np.argmin(finite[:, columns[0]]))
        raise ValueError(
            f"graph {name!r}: {what} column {columns[0]} is {given[row, columns[0]]} at {row_is} {row}, which is not a "
            f"finite float32; repair or drop column(s) {', '.join(str(c) for c in columns[:10])}"
            + (f" and {len(columns) - 10} more" if len(columns) > 10 else "")
        )
    return rows


def checked_labels(name: str, labels: npt.ArrayLike, num_nodes: int) -> Int64Array:
    """int64 [N]: labels of any number type, -1 for those that mean none.

    Raises:
        ValueError: for another shape, or a label that is no class.
    """
    given: npt.NDArray[Any] = np.asarray(labels)
    if given.shape != (num_nodes,):
        raise ValueError(
            f"graph {name!r}: labels have shape {given.shape}; expected ({num_nodes},), one class per node"
        )
    if given.dtype.kind not in "biuf":
        raise ValueError(f"graph {name!r}: labels have dtype {given.dtype}; expected whole numbers, -1 or NaN for none")
    values = np.where(np.isnan(given), UNLABELLED, given) if given.dtype.kind == "f" else given.astype(np.int64)
    is_class = np.isfinite(values) & (values >= 0) & (values == np.floor(values))
    is_class &= values < 2**31
    unlabelled = np.isin(values, _UNLABELLED_CODES)
    wrong = ~(is_class | unlabelled)
    if wrong.any():
        node = int(np.argmax(wrong))
        raise ValueError(
            f"graph {name!r}: node {node} has label {given[node]}; a label is a whole number from 0, and -1, -100 or "
            "NaN mean that there is none"
        )
    return np.where(unlabelled, UNLABELLED, values).astype(np.int64)


def _check_mask(name: str, split: str, mask: npt.ArrayLike, num_nodes: int) -> BoolArray:
    given: npt.NDArray[Any] = np.asarray(mask)
    if given.shape != (num_nodes,) or given.dtype != np.bool_:
        raise ValueError(
            f"graph {name!r}: the {split} mask is {given.dtype} of shape {given.shape}; expected bool ({num_nodes},)"
        )
    return np.ascontiguousarray(given)


def _check_splits(name: str, train: BoolArray, val: BoolArray, test: BoolArray, labels: Int64Array) -> None:
    for first, second, both in (
        ("train", "val", train & val),
        ("train", "test", train & test),
        ("val", "test", val & test),
    ):
        if both.any():
            raise ValueError(
                f"graph {name!r}: {np.count_nonzero(both)} nodes are in both the {first} and the {second} split, "
                f"node {int(np.argmax(both))} first; a node belongs to one split at most"
            )
    if not train.any():
        raise ValueError(f"graph {name!r}: the training split is empty; mark at least one labelled node in train_mask")
    without = train & (labels == UNLABELLED)
    if without.any():
        raise ValueError(
            f"graph {name!r}: {np.count_nonzero(without)} training nodes have no label, node {int(np.argmax(without))} "
            "first; take them out of train_mask"
        )
