"""Graphs of networkx, DGL and PyG in and out: the same graph, and the same outputs under the original ids."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from cases import awkward_graph, partitioned, plan_of, rig

from gtx.convert import from_dgl, from_networkx, from_pyg, to_dgl, to_networkx, to_pyg
from gtx.frames import Columns
from gtx.graphs import Graph, Names, edge_list, with_self_loops, with_undirected
from gtx.parallel.world import solo

pytestmark = pytest.mark.usefixtures("one_thread")
IDS: list[Hashable] = [f"n{i}" if i % 3 else -i * i for i in range(60)]  # mixed, in no order that sorting would keep


def awkward(ids: list[Any] | None = IDS) -> Graph:
    """A hub, duplicate edges, self loops, isolated and unlabelled nodes, edge features, and ids of its own."""
    graph = awkward_graph()
    nodes = None if ids is None else np.array(ids, dtype=object if ids is IDS else np.int64)
    rng = np.random.default_rng(5)
    return dataclasses.replace(
        graph,
        edge_features=rng.standard_normal((graph.num_edges, 2)).astype(np.float32),
        names=Names(nodes=nodes, classes=("x", "y", "z"), features=tuple("abcde"), edge_features=("w", "t")),
    )


def assert_same(one: Graph, other: Graph) -> None:
    for field in ("indptr", "indices", "features", "labels", "train_mask", "val_mask", "test_mask", "edge_features"):
        mine, theirs = getattr(one, field), getattr(other, field)
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), field
    assert one.num_classes == other.num_classes
    assert one.node_ids.tolist() == other.node_ids.tolist()
    assert [type(node) for node in one.node_ids.tolist()] == [type(node) for node in other.node_ids.tolist()]


def outputs(graph: Graph, model: str = "GT") -> dict[Hashable, np.ndarray]:
    """Logits in float64 of an untrained model, by the id of the node."""
    cut = partitioned(with_self_loops(with_undirected(graph), "add"), 4)
    settings = {"model": {"name": model, "width": 8, "heads": 2, "layers": 2}}
    run = rig(solo(), cut, plan_of("graph", cut, 1, 2), settings)
    everything = dataclasses.replace(cut.graph, labels=np.zeros(graph.num_nodes, dtype=np.int64))
    run.batches.graph = dataclasses.replace(cut, graph=everything)  # so that unlabelled nodes are predicted as well
    nodes, logits = run.executor.predict(run.compiler.compile(run.batches.evaluation(0)), run.plan, 0)
    return dict(zip(cut.graph.node_ids[nodes].tolist(), np.asarray(logits), strict=True))


def assert_same_outputs(one: dict[Hashable, np.ndarray], other: dict[Hashable, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for node, logits in one.items():
        np.testing.assert_allclose(other[node], logits, rtol=1e-10, atol=1e-12)


# There and back -------------------------------------------------------------------------------------------------------

CONVERSIONS: dict[str, Callable[[Graph], Graph]] = {
    "networkx": lambda graph: from_networkx(to_networkx(graph)),
    "pyg": lambda graph: from_pyg(to_pyg(graph)),
    "dgl": lambda graph: from_dgl(to_dgl(graph), names=graph.names),
}


@pytest.mark.parametrize("library", CONVERSIONS)
def test_there_and_back_is_the_same_graph_and_gives_the_same_outputs(library: str) -> None:
    graph = awkward()
    back = CONVERSIONS[library](graph)
    assert_same(back, graph)
    assert_same_outputs(outputs(graph), outputs(back))
    if library != "pyg":
        assert back.names.features == graph.names.features
        assert back.names.classes == graph.names.classes


@pytest.mark.parametrize("ids", [None, [i * 7 - 3 for i in range(60)]], ids=["none", "whole numbers"])
def test_ids_that_are_whole_numbers_need_no_help(ids: list[int] | None) -> None:
    graph = awkward(ids)
    for convert in (CONVERSIONS["networkx"], CONVERSIONS["pyg"], lambda graph: from_dgl(to_dgl(graph))):
        assert_same(convert(graph), graph)


def test_arrays_that_may_not_be_written_are_copied() -> None:
    graph = awkward(None)
    for field in ("indptr", "indices", "features", "labels", "train_mask", "val_mask", "test_mask", "edge_features"):
        getattr(graph, field).setflags(write=False)
    data, other = to_pyg(graph), to_dgl(graph)
    data.x += 1
    other.ndata["feat"] += 1
    assert_same(graph, awkward(None))


@pytest.mark.parametrize("model", ["GT", "GPS", "GCN"])
def test_relabelling_nodes_changes_nothing(model: str) -> None:
    """The same networkx graph with its nodes in another order and under other names."""
    graph = to_networkx(awkward())
    order = np.random.default_rng(1).permutation(graph.number_of_nodes())
    nodes = list(graph.nodes)
    renamed = {node: ("node", i) for i, node in enumerate(nodes)}
    moved = networkx.MultiDiGraph()
    for i in order:
        moved.add_node(renamed[nodes[i]], **graph.nodes[nodes[i]])
    for source, destination, data in reversed(list(graph.edges(data=True))):
        moved.add_edge(renamed[source], renamed[destination], **data)
    before, after = outputs(from_networkx(graph), model), outputs(from_networkx(moved), model)
    assert_same_outputs({renamed[node]: logits for node, logits in before.items()}, after)


# networkx -------------------------------------------------------------------------------------------------------------


def karate() -> networkx.Graph:
    """A graph that people know, with the attributes that gtx looks for."""
    graph = networkx.karate_club_graph()
    for node, data in graph.nodes(data=True):
        data["label"] = data.pop("club")
        data["x"] = [float(graph.degree(node)), node % 2]
    return graph


def test_an_undirected_networkx_graph_has_its_edges_both_ways() -> None:
    known = karate()
    known.add_edge(3, 3, weight=9)
    graph = from_networkx(known)
    assert (graph.num_nodes, graph.num_edges) == (34, 2 * 78 + 1)
    assert graph.names.classes == ("Mr. Hi", "Officer")
    assert (graph.names.features, graph.names.edge_features) == (("x.0", "x.1"), ("weight",))
    assert graph.features[:, 0].tolist() == [degree for _, degree in karate().degree()]
    assert graph.edge_features is not None
    for source, destination, weight in zip(*edge_list(graph), graph.edge_features[:, 0], strict=True):
        assert known.edges[source, destination]["weight"] == weight
    assert graph.train_mask.sum() == 6  # drawn: a fifth of 17, twice
    back = to_networkx(graph, undirected=True)
    assert type(back) is networkx.Graph
    assert back.number_of_edges() == 79
    assert_same(from_networkx(back), graph)


def test_parallel_edges_stay_parallel() -> None:
    known = networkx.MultiGraph(karate())
    known.add_edge(0, 1, weight=3)
    graph = from_networkx(known)
    assert graph.num_edges == 2 * 79
    back = to_networkx(graph, undirected=True)
    assert type(back) is networkx.MultiGraph and back.number_of_edges() == 79
    assert_same(from_networkx(back), graph)
    assert type(to_networkx(graph)) is networkx.MultiDiGraph


def test_a_directed_graph_is_not_made_undirected() -> None:
    graph = from_networkx(karate())
    assert graph.edge_features is not None
    graph.edge_features[0] += 1
    with pytest.raises(
        ValueError, match="is directed: some edge has no reverse with the same features; leave undirected"
    ):
        to_networkx(graph, undirected=True)


def test_what_is_wrong_with_a_networkx_graph_is_said_by_node() -> None:
    def changed(**attributes: Any) -> networkx.Graph:
        graph = karate()
        graph.nodes[5].update(attributes)
        return graph

    for graph, say in (
        (changed(x=[1.0]), r"the node table, row 5, column 'x': \[1.0\] is no vector of 2 numbers"),
        (changed(x=None), "the node table, row 5, column 'x': None is no vector of 2 numbers"),
        (changed(age=3), "the node table, row 0, column 'age': the value is missing"),
        (changed(label=["a"]), r"the node table, row 5, column 'label': \['a'\] is no label"),
        (changed(split="learn"), "the node table, row 5, column 'split': 'learn' is no split"),
        (networkx.path_graph(3), "the node table has no column 'label'"),
        (networkx.Graph(), "the node table has no column 'label'"),
    ):
        with pytest.raises(ValueError, match=say):
            from_networkx(graph)
    wrong = karate()
    wrong.edges[2, 32]["weight"] = float("nan")
    with pytest.raises(ValueError, match=r"the edge table, row \(2, 32\), column 'weight': the value is missing"):
        from_networkx(wrong)
    assert from_networkx(wrong, columns=Columns(ignore=("weight",))).edge_features is None


# DGL and PyG ----------------------------------------------------------------------------------------------------------


def test_a_pyg_graph_as_its_sets_have_it() -> None:
    from torch_geometric.data import Data, HeteroData

    data = Data(
        x=torch.eye(4),
        y=torch.tensor([[1.0], [0.0], [float("nan")], [2.0]]),
        edge_index=torch.tensor([[3, 0, 1], [0, 3, 1]]),
        edge_weight=torch.tensor([1.0, 2.0, 3.0]),
        train_mask=torch.tensor([[True, False], [False, True], [False, False], [False, False]]),
        val_mask=torch.tensor([[False, False], [True, False], [False, False], [False, False]]),
        test_mask=torch.tensor([False, False, False, True]),
    )
    with pytest.raises(ValueError, match=r"split is 1, but test_mask of graph 'pyg' has split\(s\) 0\.\.0"):
        from_pyg(data, split=1)
    data.test_mask = data.test_mask[:, None].expand(4, 2)
    one, other = from_pyg(data), from_pyg(data, split=1)
    assert one.labels.tolist() == [1, 0, -1, 2]
    assert (one.train_mask.tolist(), other.train_mask.tolist()) == (
        [True, False, False, False],
        [False, True, False, False],
    )
    assert one.edge_features is not None and one.edge_features.tolist() == [[1], [3], [2]]
    bare = Data(x=data.x, y=data.y, edge_index=data.edge_index, n_id=torch.tensor([9, 8, 7, 6]))
    drawn = from_pyg(bare, num_classes=5)
    assert drawn.node_ids.tolist() == [9, 8, 7, 6]
    assert (drawn.num_classes, drawn.train_mask.tolist()) == (5, [True, True, False, True])
    for change, say in (
        ({"x": None}, "graph 'pyg' has no x; a node needs features x and a label y"),
        ({"y": None}, "graph 'pyg' has no y"),
        ({"y": torch.zeros(4, 2)}, r"labels have shape \(4, 2\); expected \(4,\)"),
        ({"x": torch.full((4, 1), float("nan"))}, "feature column 0 is nan at node 0"),
        ({"node_ids": ["a"]}, "has 1 ids for 4 nodes; give one each"),
        ({"edge_index": torch.tensor([[0], [4]])}, "names node 4, but the nodes are 0..3"),
    ):
        wrong = copy.copy(bare)
        for key, value in change.items():
            setattr(wrong, key, value)
        with pytest.raises(ValueError, match=say):
            from_pyg(wrong)
    with pytest.raises(ValueError, match="graph 'pyg' is a HeteroData without edge_index; pass a Data"):
        from_pyg(HeteroData())


def test_a_dgl_graph_as_its_sets_have_it() -> None:
    import dgl

    graph = dgl.graph(([3, 0, 1], [0, 3, 1]), num_nodes=5)
    with pytest.raises(ValueError, match=r"graph 'dgl' has no ndata\['feat'\], it has nothing; say which is meant"):
        from_dgl(graph)
    graph.ndata["feat"] = torch.arange(5.0)
    graph.ndata["y"] = torch.tensor([0, 1, 1, 0, -1])
    graph.ndata["train_mask"] = torch.tensor([1, 1, 0, 0, 0], dtype=torch.uint8)
    graph.edata["w"] = torch.tensor([1.0, 2.0, 3.0])
    graph.edata["h"] = torch.zeros(3, 4)
    taken = from_dgl(graph, label="y")
    assert taken.features.tolist() == [[0], [1], [2], [3], [4]]
    assert taken.train_mask.tolist() == [True, True, False, False, False]
    assert taken.edge_features is not None and taken.edge_features.tolist() == [[1], [3], [2]]
    chosen = from_dgl(graph, label="y", edge_features="h").edge_features
    assert chosen is not None and chosen.shape == (3, 4)
    with pytest.raises(ValueError, match=r"has no edata\['size'\]"):
        from_dgl(graph, label="y", edge_features="size")
    several = dgl.heterograph({("a", "to", "b"): ([0], [0])})
    with pytest.raises(ValueError, match="has several types of nodes or edges; pass one"):
        from_dgl(several)
    part = dgl.node_subgraph(graph, [3, 0])  # a part knows where its nodes come from
    assert from_dgl(part, label="y", num_classes=2).node_ids.tolist() == [3, 0]
