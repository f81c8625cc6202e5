"""How scores came about: where splits are from, what leaks are seen and which are not there, and seconds that add up.

Not here: the report that they stand in (`test_gtx_report.py`).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gtx.config import Config, parse_config
from gtx.evaluation import checks, edge_homophily, edges_of_test, telling_features
from gtx.frames import from_frames
from gtx.graphs import Graph, SplitOrigin, from_edges
from gtx.report import evaluation_facts
from gtx.session import read_graph, silent
from gtx.train import train

EDGES = "edges between test nodes are used in training"
FEATURE = "a feature gives the class away"
LABELS = "edges derive from labels"


def graph_of(edges: list[tuple[int, int]], labels: list[int], features: np.ndarray | None = None) -> Graph:
    """Half of the nodes train, the others test."""
    count = len(labels)
    train = np.arange(count) < count // 2
    src, dst = ([edge[i] for edge in edges] for i in (0, 1))
    rows = np.random.default_rng(0).standard_normal((count, 3)) if features is None else features
    return from_edges("g", src, dst, count, rows, labels, train, np.zeros(count, bool), ~train)


def answers(config: Config, graph: Graph) -> dict[str, str]:
    return {check["question"]: check["answer"] for check in checks(config, graph)}


# Leaks ----------------------------------------------------------------------------------------------------------------


def test_a_column_that_is_the_label_is_seen_and_one_that_only_hints_is_not() -> None:
    labels = [0, 1, 2] * 10
    noise = np.random.default_rng(1).standard_normal((30, 2))
    one_hot = (np.array(labels) == 1).astype(float)
    hint = one_hot.copy()
    hint[4] = 0.0  # wrong at one node
    features = np.column_stack([noise[:, 0], one_hot, hint, np.ones(30), np.array(labels) * 2.0])
    graph = graph_of([(0, 1)], labels, features)
    assert telling_features(graph) == [1, 4], "neither the constant column nor the one with an error"
    found = {check["question"]: check for check in checks(parse_config({}), graph)}[FEATURE]
    assert found["answer"] == "yes" and "feature 1, feature 4" in found["because"]


def test_a_class_of_few_nodes_accuses_no_column() -> None:
    features = np.random.default_rng(0).integers(0, 2, (6, 1)).astype(float)
    assert telling_features(graph_of([(0, 1)], [0, 1, 0, 1, 0, 1], features)) == []
    few = np.array([0.0] * 10 + [1.0, 1.0])[:, None]  # two nodes of class 1 share a value by chance
    assert telling_features(graph_of([(0, 1)], [0] * 10 + [1, 1], few)) == []


def test_an_unlabelled_node_takes_no_part() -> None:
    labels = [0] * 6 + [1] * 6
    column = np.array(labels, dtype=float)[:, None]
    column[11] = 7.0
    whole = graph_of([(0, 11)], labels, column)
    assert telling_features(whole) == []
    masked = np.asarray(whole.labels).copy()
    masked[11] = -1
    unlabelled = dataclasses.replace(whole, labels=masked)
    assert telling_features(unlabelled) == [0]
    assert math.isnan(edge_homophily(unlabelled))


def test_homophily_is_a_share_of_edges_without_self_loops() -> None:
    graph = graph_of([(0, 2), (1, 3), (0, 1), (2, 2)], [0, 1, 0, 1])
    assert edge_homophily(graph) == pytest.approx(2 / 3)
    assert answers(parse_config({}), graph)[LABELS] == "no sign"
    pure = graph_of([(0, 2), (1, 3), (1, 1)], [0, 1, 0, 1])
    assert answers(parse_config({}), pure)[LABELS] == "yes"


def test_generators_that_draw_by_class_say_so() -> None:
    for name, options in (("sbm", {"num_nodes": 200, "num_edges": 1000}), ("rmat", {"scale": 7})):
        config = parse_config({"data": {"name": name, "options": options}})
        assert answers(config, read_graph(config))[LABELS] == "yes", name


def test_edges_between_test_nodes_count_where_a_model_reads_them() -> None:
    graph = graph_of([(0, 2), (2, 3), (3, 2), (3, 3)], [0, 1, 0, 1])  # 2 and 3 test
    assert edges_of_test(graph) == (2, pytest.approx(2 / 3))
    for settings, answer in (
        ({}, "yes"),
        ({"batch": {"kind": "cluster"}}, "yes"),
        ({"batch": {"kind": "neighbor"}}, "yes"),
        ({"model": {"layers": 1}}, "no"),
        ({"model": {"name": "MLP"}}, "no"),
    ):
        assert answers(parse_config(settings), graph)[EDGES] == answer, settings
    apart = graph_of([(0, 1), (1, 2)], [0, 1, 0, 1])
    assert answers(parse_config({}), apart)[EDGES] == "no"


def test_every_answer_has_a_reason() -> None:
    graph = graph_of([(0, 1)], [0, 1, 0, 1])
    for settings in ({}, {"data": {"standardize": True}}, {"model": {"encodings": {"laplacian": 2}}}):
        for check in checks(parse_config(settings), graph):
            assert check["answer"] in ("yes", "no", "no sign") and len(check["because"]) > 10
    assert answers(parse_config(settings), graph)["encodings see test nodes"] == "yes"


# Splits ---------------------------------------------------------------------------------------------------------------


def test_a_split_tells_where_it_is_from(tmp_path: Path) -> None:
    drawn = parse_config({"seed": 3, "data": {"name": "digits", "split": 2}})
    assert read_graph(drawn).split == SplitOrigin("random", 2, 3)
    masks = {f"{part}_masks": np.eye(3, dtype=bool)[[i, i]] for i, part in enumerate(("train", "val", "test"))}
    (tmp_path / "cora").mkdir()
    x = np.ones((3, 2), np.float32)
    np.savez(tmp_path / "cora" / "cora.npz", edge_index=[[0, 1], [1, 2]], x=x, y=[0, 1, 0], **masks)
    public = parse_config({"data": {"name": "cora", "root": str(tmp_path), "split": 1}})
    assert read_graph(public).split == SplitOrigin("public", 1, None)
    nodes = pd.DataFrame({"id": [0, 1, 2, 3], "label": [0, 1, 0, 1], "f": [0.5, 1.5, 2.5, 3.5]})
    edges = pd.DataFrame({"src": [0, 1], "dst": [1, 2]})
    assert from_frames(nodes, edges, seed=4, split=1).split == SplitOrigin("random", 1, 4)
    own = nodes.assign(split=["train", "train", "test", "test"])
    assert from_frames(own, edges).split == SplitOrigin("given")


# In a run -------------------------------------------------------------------------------------------------------------


def test_a_run_tells_its_split_and_seconds_that_add_up(tmp_path: Path) -> None:
    config = parse_config(
        {
            "seed": 2,
            "data": {"name": "sbm", "options": {"num_nodes": 300, "num_edges": 2000}},
            "partition": {"parts": 4, "cache": str(tmp_path / "cut")},
            "model": {"width": 8, "layers": 2, "encodings": {"degree": True}},
            "engine": {"name": "torch", "threads": 1},
            "train": {"steps": 3, "eval_every": 1},
            "monitor": {"progress": False},
        }
    )
    told: list[str] = []
    reports = [train(config, tmp_path / name, say, "test") for name, say in (("one", told.append), ("two", silent))]
    for report, reused in zip(reports, ([], ["partitioning", "degree"]), strict=True):
        evaluation = report["evaluation"]
        assert evaluation["split"] == {"kind": "random", "number": 0, "seed": 2}
        seconds = evaluation["seconds"]
        assert set(seconds["preparing"]) == {"partitioning", "degree"} and seconds["reused"] == reused
        parts = seconds["training"] + seconds["compiling"] + seconds["evaluating"]
        assert parts == pytest.approx(report["scheduler"]["seconds"])
        assert min(seconds[name] for name in ("training", "compiling", "evaluating")) > 0
    assert any(line.startswith("note: edges derive from labels: the generator draws edges by class") for line in told)
    facts = evaluation_facts(reports[0])
    assert facts["split"] == "random, number 0, drawn with seed 2"
    assert facts["label rate"].startswith("20.00% (60 of 300 nodes train)")
    assert "partitioning" in facts["preparing took"] and "(reused)" in evaluation_facts(reports[1])["preparing took"]
