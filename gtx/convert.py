"""Graphs of networkx, DGL and PyG in and out, features in the order of the nodes, ids kept.

Not here: the sets that these libraries download (`libraries.py`), frames of pandas (`frames.py`).

Legend: `N` nodes, `E` edges, `F` features, `Fe` edge features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from gtx.frames import Columns, graph_of_tables, ids_as_array, to_frames
from gtx.graphs import BoolArray, Graph, Int64Array, Metric, Names, checked_labels, edge_list, from_edges, summarize
from gtx.splits import split_generator, stratified_split
from gtx.tables import Table, without_categories

if TYPE_CHECKING:
    import networkx

_MASKS = ("train_mask", "val_mask", "test_mask")


# ---------------------------------------------------------------------------------------------------------------------
# networkx


def from_networkx(
    graph: networkx.Graph,
    *,
    name: str = "networkx",
    columns: Columns = Columns(),
    metric: Metric = "accuracy",
    seed: int = 0,
    split: int = 0,
) -> Graph:
    """The graph of networkx: its nodes in their order, their names as ids, attributes as columns of a table.

    So the node attributes `label` and `split` mean what they do in `frames.graph_of_tables`, other numbers and vectors
    are features, and numbers at edges are edge features. An edge of an undirected graph goes both ways.

    Args:
        columns: other names of `label` and `split`, `features` and `ignore`; the rest is not looked at.
        seed, split: of the split that is drawn where no node has the attribute `split`.

    Raises:
        ValueError: one line that names node or edge, attribute and value.
    """
    columns = dataclasses.replace(columns, id="(node)", src="(from)", dst="(to)")
    nodes = list(graph.nodes)
    ends = [(s, d, data) for s, d, data in graph.edges(data=True)]
    if not graph.is_directed():
        ends += [(d, s, data) for s, d, data in ends if s != d]
    return graph_of_tables(
        _table_of_attributes("the node table", nodes, [graph.nodes[node] for node in nodes], {columns.id: nodes}),
        _table_of_attributes(
            "the edge table",
            [(s, d) for s, d, _ in ends],
            [data for *_, data in ends],
            {columns.src: [s for s, *_ in ends], columns.dst: [d for _, d, _ in ends]},
        ),
        name=name,
        columns=columns,
        metric=metric,
        seed=seed,
        split=split,
    )


def to_networkx(graph: Graph, *, undirected: bool = False) -> networkx.Graph:
    """The graph as a `networkx.DiGraph` whose nodes are the original ids, in order, with what is known as attributes.

    Nodes have `label`, `split` (where they have one) and their features by name (`f0`, ... where there are no names),
    edges their features. Where edges come twice it is a `MultiDiGraph`.

    Args:
        undirected: whether to make a `Graph` (or `MultiGraph`) with one edge for each pair of opposite ones.

    Raises:
        ValueError: if it is to be undirected and some edge has no reverse with the same features.
    """
    import networkx

    summary = summarize(graph)
    node_frame, edge_frame = to_frames(graph)
    links = edge_frame.to_dict("records")
    if undirected:
        if summary.directed or not _reverses_match(graph):
            raise ValueError(
                f"graph {graph.name!r} is directed: some edge has no reverse with the same features; leave undirected "
                "out"
            )
        source, destination = edge_list(graph)
        links = [link for link, kept in zip(links, source <= destination, strict=True) if kept]
    kinds = {
        (False, False): networkx.DiGraph,
        (False, True): networkx.MultiDiGraph,
        (True, False): networkx.Graph,
        (True, True): networkx.MultiGraph,
    }
    made: networkx.Graph = kinds[undirected, summary.duplicate_edges > 0]()
    for attributes in node_frame.to_dict("records"):
        node = attributes.pop("id")
        if attributes["label"] in ("", -1):
            del attributes["label"]
        if not attributes["split"]:
            del attributes["split"]
        made.add_node(node, **attributes)
    for attributes in links:
        made.add_edge(attributes.pop("src"), attributes.pop("dst"), **attributes)
    return made


def _table_of_attributes(
    source: str, rows: Sequence[Hashable], attributes: Sequence[dict[str, Any]], known: dict[str, Sequence[Hashable]]
) -> Table:
    """A table whose rows are called by their node or edge; values stay what they are, None where one is missing."""
    keys = dict.fromkeys(str(key) for row in attributes for key in row)
    columns = {
        key: pd.Series([_plain(row.get(key)) for row in attributes], dtype=object).infer_objects() for key in keys
    }
    for key, values in known.items():
        columns[key] = pd.Series(np.fromiter(values, dtype=object, count=len(values)), dtype=object)
    return Table(without_categories(pd.DataFrame(columns)), source, rows=rows)


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _reverses_match(graph: Graph) -> bool:
    """Whether the edges from a to b have the features of those from b to a, in whatever order."""
    source, destination = edge_list(graph)
    features = np.zeros((len(source), 0)) if graph.edge_features is None else graph.edge_features
    there = np.column_stack([source, destination, features])
    back = np.column_stack([destination, source, features])
    return np.array_equal(there[np.lexsort(there.T)], back[np.lexsort(back.T)])


# ---------------------------------------------------------------------------------------------------------------------
# DGL and PyG


def from_dgl(
    graph: Any,
    *,
    name: str = "dgl",
    features: str = "feat",
    label: str = "label",
    edge_features: str | None = None,
    names: Names | None = None,
    num_classes: int | None = None,
    metric: Metric = "accuracy",
    seed: int = 0,
    split: int = 0,
) -> Graph:
    """The graph of a homogeneous `dgl.DGLGraph`.

    Features, labels and `train_mask`, `val_mask`, `test_mask` are those of its `ndata`; ids are `ndata[dgl.NID]`, where
    it has them. Everything else is as in `from_pyg`.

    Args:
        features, label, edge_features: keys in `ndata` and `edata`; for None edge features are `feat` or `w`, if any.

    Raises:
        ValueError: one line that says what is missing or wrong.
    """
    import dgl

    if not graph.is_homogeneous:
        raise ValueError(f"graph {name!r} has several types of nodes or edges; pass one, such as dgl.to_homogeneous(g)")
    for key in (features, label):
        if key not in graph.ndata:
            found = ", ".join(map(repr, graph.ndata)) or "nothing"
            raise ValueError(f"graph {name!r} has no ndata[{key!r}], it has {found}; say which is meant")
    keys = [key for key in ("feat", "w") if key in graph.edata] if edge_features is None else [edge_features]
    if edge_features is not None and edge_features not in graph.edata:
        raise ValueError(f"graph {name!r} has no edata[{edge_features!r}]; say which is meant")
    if names is None:
        names = Names(ids_as_array(graph.ndata[dgl.NID].tolist()) if dgl.NID in graph.ndata else None)
    source, destination = graph.edges(order="eid")
    given = _Tensors(
        source,
        destination,
        graph.ndata[features],
        graph.ndata[label],
        [graph.ndata.get(key) for key in _MASKS],
        graph.edata[keys[0]] if keys else None,
    )
    return given.checked(name, names, num_classes, metric, seed, split)


def to_dgl(graph: Graph) -> Any:
    """The graph as a `dgl.DGLGraph`: `feat`, `label` and the masks in `ndata`, edge features as `feat` in `edata`.

    Node `i` is `graph.node_ids[i]`, kept as `ndata[dgl.NID]` where all ids are whole numbers; tensors hold no text.
    Pass `names=graph.names` to `from_dgl` to have them all back.
    """
    import dgl

    made = dgl.graph(tuple(torch.from_numpy(ends) for ends in edge_list(graph)), num_nodes=graph.num_nodes)
    made.ndata.update({"feat": _tensor(graph.features), "label": _tensor(graph.labels)})
    made.ndata.update({key: _tensor(getattr(graph, key)) for key in _MASKS})
    if graph.node_ids.dtype == np.int64:
        made.ndata[dgl.NID] = _tensor(graph.node_ids)
    if graph.edge_features is not None:
        made.edata["feat"] = _tensor(graph.edge_features)
    return made


def from_pyg(
    data: Any,
    *,
    name: str = "pyg",
    names: Names | None = None,
    num_classes: int | None = None,
    metric: Metric = "accuracy",
    seed: int = 0,
    split: int = 0,
) -> Graph:
    """The graph of a `torch_geometric.data.Data`: `x`, `y`, `edge_index`, the masks, `edge_attr` or `edge_weight`.

    Labels are classes as they stand; NaN, -1 and -100 mean none. Edges are as they are stored.

    Args:
        names: of nodes and columns; if None the ids are `data.node_ids` or `data.n_id`, where it has them.
        num_classes: 1 + the largest label if None.
        seed: of the split that is drawn where there are no masks.
        split: which column of the masks, where they have several; which draw, where there are none.

    Raises:
        ValueError: one line that says what is missing or wrong.
    """
    if not isinstance(getattr(data, "edge_index", None), Tensor):
        raise ValueError(
            f"graph {name!r} is a {type(data).__name__} without edge_index; pass a Data with x, y and edge_index, of "
            "one type of nodes and edges"
        )
    for key in ("x", "y"):
        if not isinstance(getattr(data, key, None), Tensor):
            raise ValueError(f"graph {name!r} has no {key}; a node needs features x and a label y")
    if names is None:
        ids = getattr(data, "node_ids", getattr(data, "n_id", None))
        names = Names(None if ids is None else ids_as_array(ids.tolist() if isinstance(ids, Tensor) else list(ids)))
    edge_features = getattr(data, "edge_attr", None)
    given = _Tensors(
        data.edge_index[0],
        data.edge_index[1],
        data.x,
        data.y,
        [getattr(data, key, None) for key in _MASKS],
        getattr(data, "edge_weight", None) if edge_features is None else edge_features,
    )
    return given.checked(name, names, num_classes, metric, seed, split)


def to_pyg(graph: Graph) -> Any:
    """The graph as a `torch_geometric.data.Data`: `x`, `y` (-1 for no label), `edge_index`, masks, `edge_attr`.

    Node `i` is `data.node_ids[i]`, a list of the original ids.
    """
    from torch_geometric.data import Data

    made = Data(x=_tensor(graph.features), y=_tensor(graph.labels), edge_index=_tensor(np.stack(edge_list(graph))))
    for key in _MASKS:
        made[key] = _tensor(getattr(graph, key))
    if graph.edge_features is not None:
        made.edge_attr = _tensor(graph.edge_features)
    made.node_ids = graph.node_ids.tolist()
    return made


def from_arrays(
    source: Any,
    destination: Any,
    features: Any,
    labels: Any,
    masks: Sequence[Any],
    edge_features: Any,
    *,
    name: str,
    names: Names | None = None,
    num_classes: int | None = None,
    metric: Metric = "accuracy",
    seed: int = 0,
    split: int = 0,
) -> Graph:
    """The graph of arrays or tensors as `from_pyg` takes them.

    Args:
        source, destination: `[E]`. features: `[N, F]` or `[N]`. labels: `[N]` or `[N, 1]`.
        masks: of training, validation and test, `[N]`, `[N, splits]` or None. edge_features: `[E, Fe]`, `[E]` or None.

    Raises:
        ValueError: one line that says what is missing or wrong.
    """
    given = _Tensors(source, destination, features, labels, masks, edge_features)
    return given.checked(name, names or Names(), num_classes, metric, seed, split)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """A tensor of its own: a graph's arrays may be memory maps that nothing may write into."""
    return torch.from_numpy(np.array(array))


def _array(tensor: Any) -> npt.NDArray[Any]:
    return np.asarray(tensor.detach().cpu() if isinstance(tensor, Tensor) else tensor)


@dataclass(frozen=True, eq=False)
class _Tensors:
    """features `[N, F]` or `[N]`, labels `[N]` or `[N, 1]`, masks `[N]`, `[N, splits]` or None, edges `[E]`."""

    source: Any
    destination: Any
    features: Any
    labels: Any
    masks: Sequence[Any]
    edge_features: Any

    def checked(self, name: str, names: Names, num_classes: int | None, metric: Metric, seed: int, split: int) -> Graph:
        features, labels = _array(self.features), _array(self.labels)
        num_nodes = len(features)
        labels = checked_labels(name, labels[:, 0] if labels.shape[1:] == (1,) else labels, num_nodes)
        if names.nodes is not None and len(names.nodes) != num_nodes:
            raise ValueError(f"graph {name!r} has {len(names.nodes)} ids for {num_nodes} nodes; give one each")
        edge_features = None if self.edge_features is None else _array(self.edge_features)
        train, val, test = self._split(name, labels, seed, split)
        return from_edges(
            name,
            _array(self.source),
            _array(self.destination),
            num_nodes,
            features[:, None] if features.ndim == 1 else features,
            labels,
            train,
            val,
            test,
            num_classes=num_classes,
            metric=metric,
            edge_features=edge_features[:, None]
            if edge_features is not None and edge_features.ndim == 1
            else edge_features,
            names=names,
        )

    def _split(self, name: str, labels: Int64Array, seed: int, split: int) -> Sequence[BoolArray]:
        """The masks, one column of them, or a draw; nodes without a label are in no training split that is drawn."""
        if all(mask is None for mask in self.masks):
            return stratified_split(labels, split_generator(seed, split))
        found = []
        for key, mask in zip(_MASKS, self.masks, strict=True):
            columns = np.zeros((len(labels), 1)) if mask is None else _array(mask)
            columns = columns[:, None] if columns.ndim == 1 else columns
            if mask is not None and split >= columns.shape[1]:
                raise ValueError(
                    f"split is {split}, but {key} of graph {name!r} has split(s) 0..{columns.shape[1] - 1}"
                )
            found.append(columns[:, split if mask is not None else 0].astype(np.bool_))
        return found
