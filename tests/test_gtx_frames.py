"""One's own graph from tables: what the columns mean, that ids come back exactly, and that nothing is counted wrongly.

Not here: files that are wrong (`test_gtx_tables.py`).
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtx.batches import BatchPlanner
from gtx.config import BatchConfig, SamplingConfig, parse_config
from gtx.datasets import load_graph
from gtx.frames import Columns, from_frames, to_frames
from gtx.graphs import Graph, edge_list, summarize
from gtx.partition import partition
from gtx.train import train

NODES = """id,label,split,age,income
7,cat,train,1.5,10
07,dog,valid,2,20
NA,cat,test,-3e2,30
 x,,,4,40
7.0,dog,train,5,50
"""
EDGES = """src,dst,weight
7,07,0.5
NA,7,1
07,7.0,2
"""


def load(folder: Path, nodes: str = NODES, edges: str = EDGES, **changes: Any) -> Graph:
    """The graph of two CSV files as it is, without changes to its edges."""
    (folder / "nodes.csv").write_text(nodes, encoding="utf-8")
    (folder / "edges.csv").write_text(edges, encoding="utf-8")
    settings = {"root": None, "seed": 0, "undirected": False, "self_loops": "keep", "options": {}}
    files = {"nodes": folder / "nodes.csv", "edges": folder / "edges.csv"}
    return load_graph("table", **(settings | files | changes))  # type: ignore[arg-type]


def named_edges(graph: Graph) -> list[tuple[object, object]]:
    ids = graph.node_ids.tolist()
    return [(ids[s], ids[d]) for s, d in zip(*edge_list(graph), strict=True)]


def assert_same(one: Graph, other: Graph) -> None:
    for field in ("indptr", "indices", "features", "labels", "train_mask", "val_mask", "test_mask", "edge_features"):
        assert np.array_equal(getattr(one, field), getattr(other, field)), field
    assert one.node_ids.tolist() == other.node_ids.tolist()
    assert [type(node) for node in one.node_ids.tolist()] == [type(node) for node in other.node_ids.tolist()]
    assert (one.num_classes, one.names.classes) == (other.num_classes, other.names.classes)
    assert (one.names.features, one.names.edge_features) == (other.names.features, other.names.edge_features)


# What is read ---------------------------------------------------------------------------------------------------------


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    graph = load(tmp_path)
    assert graph.node_ids.tolist() == [7, "07", "NA", " x", "7.0"]
    assert graph.names.classes == ("cat", "dog")
    assert graph.labels.tolist() == [0, 1, 0, -1, 1]
    assert graph.train_mask.tolist() == [True, False, False, False, True]
    assert (np.flatnonzero(graph.val_mask).tolist(), np.flatnonzero(graph.test_mask).tolist()) == ([1], [2])
    assert graph.names.features == ("age", "income")
    assert graph.features.tolist() == [[1.5, 10], [2, 20], [-300, 30], [4, 40], [5, 50]]
    assert named_edges(graph) == [("NA", 7), (7, "07"), ("07", "7.0")]
    assert graph.edge_features is not None and graph.edge_features.tolist() == [[1.0], [0.5], [2.0]]
    assert graph.names.edge_features == ("weight",)
    assert (graph.metric, graph.num_classes, graph.name) == ("accuracy", 2, str(tmp_path / "nodes.csv"))


def test_columns_can_have_other_names_and_be_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = "paper;venue;part;a;b;title\n0;1;train;1;2;x\n1;0;val;3;4;y\n2;1;;5;6;7\n"
    edges = "from;to\n0;1\n"
    options: dict[str, object] = {"id": "paper", "label": "venue", "split": "part", "src": "from", "dst": "to"}
    options |= {"separator": ";", "ignore": ["title"], "metric": "roc_auc"}
    graph = load(tmp_path, nodes, edges, options=options)
    assert (graph.names.features, graph.metric) == (("a", "b"), "roc_auc")
    assert graph.val_mask.tolist() == [False, True, False]
    assert graph.edge_features is None
    only_b = load(tmp_path, nodes, edges, options=options | {"features": ["b"], "ignore": []})
    assert only_b.features.tolist() == [[2], [4], [6]]
    assert not caplog.records
    with caplog.at_level(logging.WARNING, logger="gtx.frames"):
        load(tmp_path, nodes.replace("7", "z"), edges, options=options | {"ignore": []})
    assert caplog.messages == [
        f"{tmp_path / 'nodes.csv'}: columns without any number are not used: 'title'; what is meant so goes into "
        "data.options.ignore"
    ]


def test_tabs_quotes_empty_lines_and_a_byte_order_mark_are_taken(tmp_path: Path) -> None:
    wanted = load(tmp_path)
    text = "\ufeff" + NODES.replace("07,dog", '"07","dog"').replace("\n", "\r\n").replace("NA,", "\r\n\r\nNA,")
    assert_same(load(tmp_path, text + "\r\n"), wanted)
    for name, content in (("n.tsv", NODES), ("e.tsv", EDGES)):
        (tmp_path / name).write_text(content.replace(",", "\t"), encoding="utf-8")
    assert_same(load(tmp_path, NODES, EDGES), wanted)
    tabs = load_graph(
        "table", root=None, seed=0, undirected=False, self_loops="keep", options={},
        nodes=tmp_path / "n.tsv", edges=tmp_path / "e.tsv",
    )  # fmt: skip
    assert_same(tabs, wanted)


def test_parquet_gives_the_graph_of_the_csv(tmp_path: Path) -> None:
    edges = EDGES.replace("\n7,", "\nseven,").replace("NA,7,", "NA,seven,")  # a Parquet column has one type
    graph = load(tmp_path, NODES.replace("\n7,", "\nseven,"), edges)
    node_frame, edge_frame = to_frames(graph)
    node_frame.set_index("id").to_parquet(tmp_path / "nodes.parquet")
    edge_frame.to_parquet(tmp_path / "edges.parquet")
    files = {"nodes": tmp_path / "nodes.parquet", "edges": tmp_path / "edges.parquet"}
    read = load_graph("table", root=None, seed=0, undirected=False, self_loops="keep", options={}, **files)
    assert_same(read, graph)


def test_vectors_types_and_categories_of_parquet(tmp_path: Path) -> None:
    nodes = pd.DataFrame(
        {
            "id": pd.array([2**62, 5, -1], dtype="int64"),
            "label": pd.Categorical(["b", None, "a"]),
            "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
            "known": [True, False, True],
            "count": pd.array([1, 2, 3], dtype="Int64"),
            "when": pd.to_datetime(["2020-01-01"] * 3),
        }
    )
    nodes.to_parquet(tmp_path / "nodes.parquet")
    pd.DataFrame({"src": [5, 5], "dst": [2**62, -1]}).to_parquet(tmp_path / "edges.parquet")
    files = {"nodes": tmp_path / "nodes.parquet", "edges": tmp_path / "edges.parquet"}
    graph = load_graph("table", root=None, seed=0, undirected=False, self_loops="keep", options={}, **files)
    assert graph.node_ids.tolist() == [2**62, 5, -1]
    assert graph.names.features == ("x.0", "x.1", "known", "count")
    assert graph.features.tolist() == [[1, 2, 1, 1], [3, 4, 0, 2], [5, 6, 1, 3]]
    assert graph.names.classes == ("a", "b")
    assert graph.labels.tolist() == [1, -1, 0]


def test_a_split_that_the_table_lacks_is_drawn(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": range(40), "label": [i % 4 for i in range(40)], "f": range(40)})
    frame.loc[3, "label"] = -1
    text = frame.to_csv(index=False)
    drawn = [
        load(tmp_path, text, "src,dst\n", split=split, seed=seed) for split, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    for graph in drawn:
        masks = np.stack([graph.train_mask, graph.val_mask, graph.test_mask]).astype(int)
        assert (masks.sum(axis=0) == (graph.labels >= 0)).all()
        assert masks.sum(axis=1).tolist() == [8, 8, 23]
    assert np.array_equal(drawn[0].train_mask, drawn[1].train_mask)
    assert not any(np.array_equal(drawn[0].train_mask, other.train_mask) for other in drawn[2:])


# Ids ------------------------------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=5)
IDS = st.lists(st.one_of(st.integers(-(2**70), 2**70), WORDS), min_size=1, max_size=8, unique_by=str)


@settings(max_examples=40, deadline=None)
@given(IDS, st.data())
def test_ids_of_a_csv_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, ids: list[Any], data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    ends = data.draw(st.lists(st.tuples(st.sampled_from(ids), st.sampled_from(ids)), max_size=9))
    nodes = pd.DataFrame({"id": pd.Series(ids, dtype=object), "label": 0, "split": "train", "f": 1.0})
    edges = pd.DataFrame({"src": [s for s, _ in ends], "dst": [d for _, d in ends]}, dtype=object)
    graph = load(folder, nodes.to_csv(index=False), edges.to_csv(index=False))
    as_text = [str(node) for node in graph.node_ids.tolist()]
    assert as_text == [str(node) for node in ids]
    for node, given_id in zip(graph.node_ids.tolist(), ids, strict=True):
        if type(given_id) is int:
            assert type(node) is int and node == given_id
    assert sorted((str(s), str(d)) for s, d in named_edges(graph)) == sorted((str(s), str(d)) for s, d in ends)
    again = load(folder, *(frame.to_csv(index=False) for frame in to_frames(graph)))
    assert_same(again, graph)


def test_frames_take_ids_of_any_hashable_type() -> None:
    ids = [(0, 1), "a", 1, frozenset({2}), "1", 2.5]
    nodes = pd.DataFrame({"id": pd.Series(ids, dtype=object), "label": [0, 1, 2, 0, 1, 2], "f": range(6)})
    edges = pd.DataFrame({"src": pd.Series([1, "1"], dtype=object), "dst": pd.Series([ids[0], ids[3]], dtype=object)})
    graph = from_frames(nodes, edges)
    assert graph.node_ids.tolist() == ids
    assert named_edges(graph) == [(1, (0, 1)), ("1", frozenset({2}))]
    assert_same(from_frames(*to_frames(graph)), graph)


def test_a_partition_knows_the_ids_of_its_nodes(tmp_path: Path) -> None:
    graph = load(tmp_path)
    cut = partition(graph, "random", 3, 0)
    assert sorted(map(str, cut.graph.node_ids)) == sorted(map(str, graph.node_ids))
    for new, old in enumerate(cut.original_id):
        assert cut.graph.node_ids[new] == graph.node_ids[old]
        assert cut.graph.labels[new] == graph.labels[old]
    assert sorted(map(str, named_edges(cut.graph))) == sorted(map(str, named_edges(graph)))
    assert graph.edge_features is not None and cut.graph.edge_features is not None
    weights = zip(named_edges(graph), graph.edge_features.ravel(), strict=True)
    assert dict(zip(named_edges(cut.graph), cut.graph.edge_features.ravel(), strict=True)) == dict(weights)


# Labels, seeds and edges, as people have met them ---------------------------------------------------------------------


def test_labels_that_mean_none_take_no_part(tmp_path: Path) -> None:
    """Labels 0, 1, -1, NaN, -100, 2: three classes; the others are no target of a step or of an evaluation."""
    labels = ["0", "1", "-1", "NaN", "-100", "2", "", "-1.0"]
    nodes = "id,label,split,f\n" + "".join(
        f"{i},{label},{'train' if i in (0, 1) else 'test'},{i}\n" for i, label in enumerate(labels)
    )
    graph = load(tmp_path, nodes, "src,dst\n0,1\n")
    assert graph.names.classes == (0, 1, 2)
    assert graph.labels.tolist() == [0, 1, -1, -1, -1, 2, -1, -1]
    cut = partition(graph, "random", 2, 0)
    planner = BatchPlanner(cut, BatchConfig(), SamplingConfig(), 2, 0)
    (training,) = planner.step(0).micro_batches
    (evaluation,) = planner.evaluation(0).micro_batches
    assert sorted(cut.graph.node_ids[training.targets]) == [0, 1]
    assert sorted(cut.graph.node_ids[evaluation.targets]) == [0, 1, 5]


def test_classes_are_the_distinct_labels_in_ascending_order(tmp_path: Path) -> None:
    rows = "id,label,split,f\n" + "".join(f"{i},{y},train,0\n" for i, y in enumerate((2010, 1999, 2010, -1, 9)))
    with pytest.raises(ValueError, match="line 5, column 'label': a node of the training split has no label"):
        load(tmp_path, rows, "src,dst\n")
    graph = load(tmp_path, rows.replace("-1,train", "-1,"), "src,dst\n")
    assert graph.names.classes == (9, 1999, 2010)
    assert graph.labels.tolist() == [2, 1, 2, -1, 0]


def test_an_edge_to_an_unknown_node_is_an_error_naming_it_and_its_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"edges\.csv, line 2, column 'dst': there is no node 2 in .*nodes\.csv; add"):
        load(tmp_path, "id,label,split,f\n1,0,train,0\n", "src,dst\n1,2\n")


def test_ten_rows_with_edges_among_two_are_ten_nodes(tmp_path: Path) -> None:
    nodes = "id,label,split,f\n" + "".join(f"{i},{i % 2},train,{i}\n" for i in range(10))
    summary = summarize(load(tmp_path, nodes, "src,dst\n3,7\n7,3\n"))
    assert (summary.num_nodes, summary.num_edges, summary.isolated_nodes) == (10, 2, 8)


def test_evaluated_nodes_are_the_seeds_once_each(tmp_path: Path) -> None:
    """7-ring, seeds {1, 3, 5} and an isolated seed: what surrounds them is never counted."""
    seeds = {"n1", "n3", "n5", "alone"}
    ids = [f"n{i}" for i in range(7)] + ["alone"]
    nodes = "id,label,split,f\n" + "".join(
        f"{node},{i % 2},{'train' if node in seeds else ''},{i}\n" for i, node in enumerate(ids)
    )
    edges = "src,dst\n" + "".join(f"n{i},n{(i + 1) % 7}\n" for i in range(7))
    cut = partition(load(tmp_path, nodes, edges, undirected=True), "random", 3, 0)
    planner = BatchPlanner(cut, BatchConfig(kind="neighbor", seeds=3), SamplingConfig(fanout=2), 2, 0)
    for epoch in range(3):
        steps = range(epoch * planner.steps_per_epoch, (epoch + 1) * planner.steps_per_epoch)
        seen = [cut.graph.node_ids[m.targets].tolist() for step in steps for m in planner.step(step).micro_batches]
        assert sorted(itertools.chain(*seen)) == sorted(seeds)


def test_edges_keep_their_features_through_every_change(tmp_path: Path) -> None:
    """Weights 10, 20, a self loop, an existing reverse edge, a duplicate; undirected twice is once."""
    nodes = "id,label,split,f\n" + "".join(f"{node},0,train,0\n" for node in "abc")
    edges = "src,dst,w\na,b,10\nb,c,20\nc,c,5\nb,a,30\na,b,11\n"

    def weights(graph: Graph) -> list[tuple[object, ...]]:
        assert graph.edge_features is not None
        return sorted(
            (*ends, w) for ends, w in zip(named_edges(graph), graph.edge_features[:, 0].tolist(), strict=True)
        )

    given_edges = [("a", "b", 10), ("a", "b", 11), ("b", "a", 30), ("b", "c", 20), ("c", "c", 5)]
    assert weights(load(tmp_path, nodes, edges)) == given_edges
    undirected = load(tmp_path, nodes, edges, undirected=True)
    assert weights(undirected) == sorted([*given_edges, ("c", "b", 20)])
    again = load(tmp_path, *(frame.to_csv(index=False) for frame in to_frames(undirected)), undirected=True)
    assert_same(again, undirected)
    distinct = load(tmp_path, nodes, edges, dedupe=True)
    assert weights(distinct) == [edge for edge in given_edges if edge[2] != 11]
    looped = load(tmp_path, nodes, edges, dedupe=True, self_loops="add")
    assert weights(looped) == sorted([*weights(distinct), ("a", "a", 0), ("b", "b", 0)])
    bare = load(tmp_path, nodes, edges, self_loops="remove")
    assert weights(bare) == [edge for edge in given_edges if edge[2] != 5]


def test_standardizing_knows_the_training_nodes_only(tmp_path: Path) -> None:
    nodes = "id,label,split,f,constant,half\n0,0,train,1,0.1,1\n1,1,train,3,0.1,1\n2,0,test,{},0.1,{}\n3,1,,7,0.1,4\n"
    one = load(tmp_path, nodes.format(5, 2), "src,dst\n", standardize=True)
    assert one.features[:, 0].tolist() == [-1, 1, 3, 5]  # mean 2, deviation 1
    assert not one.features[:, 1:].any()  # the same at all training nodes
    other = load(tmp_path, nodes.format(-1e6, 3), "src,dst\n", standardize=True)
    assert np.array_equal(one.features[[0, 1, 3]], other.features[[0, 1, 3]])
    assert load(tmp_path, nodes.format(5, 2), "src,dst\n").features[0].tolist() == pytest.approx([1, 0.1, 1])
    with pytest.raises(ValueError, match="standardized feature column 0 is .* at node 2"):
        load(tmp_path, nodes.format(3e38, 1).replace("3,0.1", "1.0000001,0.1"), "src,dst\n", standardize=True)


@pytest.mark.usefixtures("one_thread")
def test_a_graph_without_edges_trains(tmp_path: Path) -> None:
    nodes = "id,label,split,f,g\n" + "".join(
        f"n{i},{'even' if i % 2 == 0 else 'odd'},{('train', 'train', 'valid', 'test')[i // 5]},{i % 2},1\n"
        for i in range(20)
    )
    (tmp_path / "nodes.csv").write_text(nodes, encoding="utf-8")
    (tmp_path / "edges.csv").write_text("src,dst\n", encoding="utf-8")
    files = {"nodes": str(tmp_path / "nodes.csv"), "edges": str(tmp_path / "edges.csv")}
    for loops in ("keep", "add"):
        config = parse_config(
            {
                "data": {"name": "table", "self_loops": loops, "standardize": True, **files},
                "partition": {"parts": 4, "cache": str(tmp_path / "cache")},
                "model": {"name": "GT", "width": 8, "heads": 2, "layers": 1},
                "engine": {"name": "torch", "lr": 0.05},
                "train": {"steps": 30},
                "monitor": {"progress": False},
            }
        )
        lines: list[str] = []
        report = train(config, tmp_path / loops, lines.append, "")
        assert f"20 nodes, {20 * (loops == 'add')} undirected edges, 2 features, 2 classes" in lines[0]
        assert report["best"]["test_score"] == 100.0


def test_columns_are_those_of_the_options() -> None:
    """`data.options` names the fields of `Columns`, and its defaults are theirs."""
    from gtx.datasets import _SOURCES  # the table of options is nowhere else

    options = {key: option.default for key, option in _SOURCES["table"].options.items()}
    assert Columns(**{key: options[key] for key in Columns.__dataclass_fields__}) == Columns()  # type: ignore[arg-type]
    assert set(options) - set(Columns.__dataclass_fields__) == {"separator", "metric"}
