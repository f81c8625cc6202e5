"""The random regular graph that a model adds: regular, connected, well mixing, and of node ids alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import awkward_graph, small_graph
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from gtx.expander import with_expander
from gtx.graphs import edge_list
from gtx.partition import Method, assign, load_or_partition, partition


def added(graph, degree: int = 4, seed: int = 0) -> np.ndarray:  # type: ignore[no-untyped-def]
    """How often each edge was added, `[N, N]`."""
    found = with_expander(graph, degree, seed)
    src, dst = edge_list(found)
    count = np.zeros((graph.num_nodes, graph.num_nodes))
    np.add.at(count, (dst, src), found.edge_types)
    return count


@pytest.mark.parametrize("degree", [2, 4, 10])
def test_it_is_regular_symmetric_and_connected(degree: int) -> None:
    count = added(awkward_graph(), degree)
    assert (count.sum(0) == degree).all() and (count.sum(1) == degree).all()
    assert (count == count.T).all() and (count.diagonal() == 0).all()
    assert connected_components(csr_array(count))[0] == 1


def test_it_is_an_expander() -> None:
    """The second eigenvalue is near `2 sqrt(degree - 1)`, that of the best such graphs; a ring's would be near 8."""
    values = np.linalg.eigvalsh(added(awkward_graph(500, 10), 8))
    assert values[-1] == pytest.approx(8)
    assert max(values[-2], -values[0]) < 1.1 * 2 * np.sqrt(7)


def test_own_edges_and_their_features_stay() -> None:
    graph = awkward_graph()
    found = with_expander(graph, 6, 0)
    own = np.asarray(found.edge_types) == 0
    for before, after in zip(edge_list(graph), edge_list(found), strict=True):
        np.testing.assert_array_equal(before, after[own])
    assert found.num_edges == graph.num_edges + 6 * graph.num_nodes
    assert with_expander(graph, 0, 0) is graph


def test_it_depends_on_the_seed_and_on_nothing_else() -> None:
    one, other = added(awkward_graph()), added(awkward_graph(num_edges=20, seed=3))
    assert (one == other).all()
    assert (one != added(awkward_graph(), seed=1)).any()


def test_types_move_with_their_edges_and_are_kept(tmp_path: Path) -> None:
    graph = with_expander(awkward_graph(), 4, 0)
    cut, reused = load_or_partition(graph, "random", 6, 0, tmp_path)
    assert not reused and cut.graph.edge_types is not None and cut.graph.edge_types.dtype == np.int8
    src, dst = (np.asarray(cut.original_id)[ends] for ends in edge_list(cut.graph))
    found = sorted(zip(dst, src, np.asarray(cut.graph.edge_types), strict=True))
    assert found == sorted(zip(*edge_list(graph)[::-1], np.asarray(graph.edge_types), strict=True))
    assert partition(awkward_graph(), "random", 6, 0).facts.fingerprint != cut.facts.fingerprint


@pytest.mark.parametrize("method", ["metis", "ldg", "bfs", "hash", "random"])
def test_parts_are_those_of_the_graph_without_it(method: Method) -> None:
    graph = awkward_graph()
    assert (assign(graph, method, 6, 0) == assign(with_expander(graph, 4, 0), method, 6, 0)).all()


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_tiny_graphs(num_nodes: int) -> None:
    count = added(small_graph([(0, 0)], num_nodes, [0]))
    assert (count.sum(1) == (0 if num_nodes == 1 else 4)).all()


@pytest.mark.parametrize("degree", [3, -2])
def test_other_degrees_are_refused(degree: int) -> None:
    with pytest.raises(ValueError, match=f"an expander of degree {degree} cannot be made of cycles; give an even"):
        with_expander(awkward_graph(), degree, 0)
