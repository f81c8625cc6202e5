"""What a graph accepts and refuses, and what the edge rewrites mean, against sets of pairs on small random graphs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtx.graphs import (
    Graph,
    edge_list,
    from_edges,
    summarize,
    with_distinct_edges,
    with_self_loops,
    with_standardized_features,
    with_undirected,
)

Pair = tuple[int, int]


def make(num_nodes: int, pairs: list[Pair], **changes: Any) -> Graph:
    """A graph whose feature and label say which node it is; every node trains."""
    arrays: dict[str, Any] = {
        "features": np.arange(num_nodes, dtype=np.float64)[:, None] * [1.0, 10.0],
        "labels": np.arange(num_nodes),
        "train_mask": np.ones(num_nodes, dtype=bool),
        "val_mask": np.zeros(num_nodes, dtype=bool),
        "test_mask": np.zeros(num_nodes, dtype=bool),
    }
    src, dst = [s for s, _ in pairs], [d for _, d in pairs]
    return from_edges("small", src, dst, num_nodes, **(arrays | changes))


def pairs_of(graph: Graph) -> Counter[Pair]:
    """(source, destination) -> how often, read row by row."""
    return Counter(
        (int(source), row)
        for row in range(graph.num_nodes)
        for source in graph.indices[graph.indptr[row] : graph.indptr[row + 1]]
    )


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[int, list[Pair]]:
    num_nodes = draw(st.integers(1, 7))
    node = st.integers(0, num_nodes - 1)
    return num_nodes, draw(st.lists(st.tuples(node, node), max_size=25))


@given(edge_lists())
def test_rows_hold_the_in_edges_ascending_with_duplicates(case: tuple[int, list[Pair]]) -> None:
    num_nodes, pairs = case
    graph = make(num_nodes, pairs)
    assert pairs_of(graph) == Counter(pairs)
    for row in range(num_nodes):
        sources = graph.indices[graph.indptr[row] : graph.indptr[row + 1]]
        assert list(sources) == sorted(source for source, destination in pairs if destination == row)
        assert graph.in_degrees[row] == len(sources)


@given(edge_lists())
def test_undirected_adds_each_missing_reverse_once_and_twice_is_once(case: tuple[int, list[Pair]]) -> None:
    num_nodes, pairs = case
    undirected = with_undirected(make(num_nodes, pairs))
    missing = {(d, s) for s, d in pairs} - set(pairs)
    assert pairs_of(undirected) == Counter(pairs) + Counter(missing)
    assert not summarize(undirected).directed
    twice = with_undirected(undirected)
    assert np.array_equal(twice.indptr, undirected.indptr)
    assert np.array_equal(twice.indices, undirected.indices)


def test_undirected_keeps_features_with_their_nodes() -> None:
    graph = make(3, [(0, 1), (1, 2), (2, 1), (2, 2)], features=[[10.0], [20.0], [30.0]])
    undirected = with_undirected(graph)
    assert pairs_of(undirected) == Counter([(0, 1), (1, 0), (1, 2), (2, 1), (2, 2)])
    assert undirected.features.tolist() == [[10.0], [20.0], [30.0]]
    assert undirected.labels.tolist() == [0, 1, 2]


@given(edge_lists())
def test_self_loop_policies(case: tuple[int, list[Pair]]) -> None:
    num_nodes, pairs = case
    graph = make(num_nodes, pairs)
    others = Counter(pair for pair in pairs if pair[0] != pair[1])
    assert pairs_of(with_self_loops(graph, "keep")) == Counter(pairs)
    assert pairs_of(with_self_loops(graph, "remove")) == others
    assert pairs_of(with_self_loops(graph, "add")) == others + Counter((i, i) for i in range(num_nodes))


@given(edge_lists())
def test_distinct_edges_are_those_that_were_there(case: tuple[int, list[Pair]]) -> None:
    num_nodes, pairs = case
    assert pairs_of(with_distinct_edges(make(num_nodes, pairs))) == Counter(set(pairs))


@given(edge_lists())
def test_features_move_with_their_edges(case: tuple[int, list[Pair]]) -> None:
    """An edge says who it is: its ends and its place in the list; a new one copies the first of its reverses."""
    num_nodes, pairs = case
    told = np.array([[s, d, i] for i, (s, d) in enumerate(pairs)], dtype=np.float64).reshape(-1, 3)
    graph = make(num_nodes, pairs, edge_features=told)

    def known(found: Graph) -> Counter[tuple[int, ...]]:
        assert found.edge_features is not None
        rows = np.column_stack([*edge_list(found), found.edge_features]).astype(int)
        return Counter(map(tuple, rows.tolist()))

    first = {pair: pairs.index(pair) for pair in pairs}
    as_given = Counter((s, d, s, d, i) for i, (s, d) in enumerate(pairs))
    assert known(graph) == as_given
    added = Counter((d, s, s, d, first[s, d]) for s, d in set(pairs) if (d, s) not in first)
    assert known(with_undirected(graph)) == as_given + added
    assert known(with_distinct_edges(graph)) == Counter((s, d, s, d, i) for (s, d), i in first.items())
    others = Counter({row: n for row, n in as_given.items() if row[0] != row[1]})
    assert known(with_self_loops(graph, "remove")) == others
    loops = [(i, i, i, i, first[i, i]) if (i, i) in first else (i, i, 0, 0, 0) for i in range(num_nodes)]
    assert known(with_self_loops(graph, "add")) == others + Counter(loops)


def test_standardized_features_have_the_training_nodes_mean_and_deviation() -> None:
    features = np.random.default_rng(0).normal(50, [1, 1000, 0, 1e-3], (40, 4))
    features[5, 2] = 51  # constant but for a node that does not train
    train_mask = np.arange(40) % 2 == 0
    scaled = with_standardized_features(make(40, [], features=features, train_mask=train_mask)).features
    assert scaled[train_mask].mean(axis=0) == pytest.approx([0] * 4, abs=1e-5)
    assert scaled[train_mask].std(axis=0) == pytest.approx([1, 1, 0, 1], rel=1e-5)
    assert not scaled[:, 2].any()


def test_unknown_self_loop_policy_names_the_choices() -> None:
    with pytest.raises(ValueError, match="self_loops is 'yes'; choose one of keep, add, remove"):
        with_self_loops(make(2, []), "yes")  # type: ignore[arg-type]


@given(edge_lists())
def test_summary_counts_what_a_person_would(case: tuple[int, list[Pair]]) -> None:
    num_nodes, pairs = case
    summary = summarize(make(num_nodes, pairs))
    touched = {node for pair in pairs if pair[0] != pair[1] for node in pair}
    in_degree = Counter(d for _, d in pairs)
    assert summary.num_edges == len(pairs)
    assert summary.isolated_nodes == num_nodes - len(touched)
    assert summary.zero_in_degree_nodes == num_nodes - len(in_degree)
    assert summary.duplicate_edges == len(pairs) - len(set(pairs))
    assert summary.self_loops == sum(s == d for s, d in pairs)
    assert summary.directed == any((d, s) not in pairs for s, d in pairs)
    assert summary.max_in_degree == max(in_degree.values(), default=0)
    assert summary.mean_in_degree == pytest.approx(len(pairs) / num_nodes)


def test_summary_counts_splits_and_labels() -> None:
    mask = np.arange(5)
    graph = make(5, [], labels=[0, 1, -1, 1, -1], train_mask=mask == 0, val_mask=mask == 1, test_mask=mask > 1)
    summary = summarize(graph)
    assert (summary.num_train, summary.num_val, summary.num_test) == (1, 1, 3)
    assert (summary.num_labelled, summary.label_rate, summary.num_classes) == (3, 0.2, 2)
    assert summary.as_dict() == dataclasses.asdict(summary)


def test_labels_that_mean_none_are_unlabelled_and_make_no_class() -> None:
    labelled = np.array([True, True, False, False, False, True])
    graph = make(6, [], labels=[0.0, 1.0, -1.0, np.nan, -100.0, 2.0], train_mask=labelled)
    assert graph.labels.tolist() == [0, 1, -1, -1, -1, 2]
    assert graph.num_classes == 3
    assert graph.labels.dtype == np.int64
    assert make(3, [], labels=[0, -100, -1], train_mask=[True, False, False]).labels.tolist() == [0, -1, -1]


@pytest.mark.parametrize("label", [0.5, -2.0, np.inf])
def test_a_label_that_is_no_class_is_an_error_naming_the_node(label: float) -> None:
    with pytest.raises(ValueError, match=f"node 1 has label {label}"):
        make(2, [], labels=[0.0, label])


def test_an_unknown_endpoint_is_an_error_naming_edge_and_node() -> None:
    with pytest.raises(ValueError, match=r"edge 0, \(1, 2\), names node 2, but the nodes are 0\.\.1"):
        make(2, [(1, 2)])
    with pytest.raises(ValueError, match=r"edge 1, \(-1, 0\), names node -1"):
        make(2, [(1, 0), (-1, 0)])


def test_nodes_without_edges_are_nodes() -> None:
    graph = make(10, [(3, 7)])
    assert graph.num_nodes == 10
    assert graph.in_degrees.tolist() == [0] * 7 + [1, 0, 0]
    empty = make(4, [])
    assert (empty.num_nodes, empty.num_edges) == (4, 0)
    assert empty.features.shape == (4, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_a_feature_that_is_not_finite_is_an_error_naming_its_column(bad: float) -> None:
    features = np.zeros((3, 4))
    features[1, 2] = bad
    with pytest.raises(ValueError, match="feature column 2 is .* at node 1"):
        make(3, [], features=features)


def test_splits_that_overlap_or_train_on_nothing_are_errors() -> None:
    yes, no = [True, True], [False, False]
    with pytest.raises(ValueError, match="1 nodes are in both the train and the test split, node 1 first"):
        make(2, [], test_mask=[False, True])
    with pytest.raises(ValueError, match="both the val and the test split"):
        make(2, [], train_mask=[True, False], val_mask=[False, True], test_mask=[False, True])
    with pytest.raises(ValueError, match="the training split is empty"):
        make(2, [], train_mask=no)
    with pytest.raises(ValueError, match="1 training nodes have no label, node 1 first"):
        make(2, [], labels=[0, -1], train_mask=yes)
    assert not make(2, [], train_mask=yes, val_mask=no, test_mask=no).test_mask.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": np.zeros((3, 1))}, r"features have shape \(3, 1\); expected \(2, F\)"),
        ({"edge_features": np.zeros((1, 1))}, r"edge features have shape \(1, 1\); expected \(0, F\)"),
        ({"labels": [0]}, r"labels have shape \(1,\)"),
        ({"labels": ["a", "b"]}, "labels have dtype"),
        ({"train_mask": [1, 0]}, r"the train mask is int64 .* expected bool \(2,\)"),
        ({"metric": "f1"}, "choose one of accuracy, roc_auc"),
        ({"metric": "roc_auc", "num_classes": 3}, "roc_auc is defined for 2 classes"),
        ({"num_classes": 1}, "node 1 has label 1, but num_classes is 1"),
    ],
)
def test_arrays_that_do_not_fit_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(2, [], **changes)


def test_ids_must_be_whole_and_paired() -> None:
    ones = np.ones(2, dtype=bool)
    rest = (2, np.zeros((2, 1)), [0, 1], ones, ~ones, ~ones)
    with pytest.raises(ValueError, match="src has dtype float64"):
        from_edges("small", [0.5], [1], *rest)
    with pytest.raises(ValueError, match="1 sources for 2 destinations"):
        from_edges("small", [0], [1, 0], *rest)


@settings(max_examples=20)
@given(edge_lists())
def test_read_only_arrays_are_enough(case: tuple[int, list[Pair]]) -> None:
    graph = make(*case)
    for field in ("indptr", "indices", "features", "labels", "train_mask", "val_mask", "test_mask"):
        getattr(graph, field).setflags(write=False)
    expected = make(*case)
    assert summarize(graph) == summarize(expected)
    assert pairs_of(with_self_loops(with_undirected(graph), "add")) == pairs_of(
        with_self_loops(with_undirected(expected), "add")
    )
