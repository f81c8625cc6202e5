"""Positional encodings: their values, the rules that fix them to the bit, how they are kept and how they enter a model.

Not here: that any plan equals one rank with them (`test_gtx_parallel_equal.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cases import awkward_graph, partitioned, plan_of, rig, small_graph
from ranks import run_ranks

from gtx import encodings
from gtx.config import parse_config
from gtx.encodings import degree_encoding, hop_features, laplacian_eigenpairs, laplacian_encoding, random_walk_encoding
from gtx.graphs import Graph, edge_list, with_self_loops, with_undirected
from gtx.node_inputs import NodeInputs, load_or_make, make_input
from gtx.orders import simple_neighbors
from gtx.parallel.world import World, solo
from gtx.session import load_partitioned
from gtx.train import train

pytestmark = pytest.mark.usefixtures("one_thread")

TRIANGLES = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]


def graph_of(edges: Sequence[tuple[int, int]], num_nodes: int) -> Graph:
    return small_graph(edges, num_nodes, train=[0])


def laplacian_of(graph: Graph) -> np.ndarray:
    """Dense, of the simple undirected graph; an isolated node's row is 0."""
    src, dst = edge_list(graph)
    adjacency = np.zeros((graph.num_nodes, graph.num_nodes))
    adjacency[src, dst] = adjacency[dst, src] = 1.0
    np.fill_diagonal(adjacency, 0.0)
    degrees = adjacency.sum(0)
    scale = 1 / np.sqrt(np.maximum(degrees, 1))
    return np.diag((degrees > 0).astype(float)) - scale[:, None] * adjacency * scale


def test_hops_are_powers_of_the_normalised_adjacency(tmp_path: Path) -> None:
    """With a hub, duplicate edges and isolated nodes, whose rows become 0; kept by edges and features."""
    graph = awkward_graph()
    src, dst = edge_list(graph)
    adjacency = np.zeros((graph.num_nodes, graph.num_nodes))
    np.add.at(adjacency, (dst, src), 1.0)
    scale = 1 / np.sqrt(np.maximum(adjacency.sum(1), 1))
    normalised = scale[:, None] * adjacency * scale
    found = hop_features(graph, 3)
    wanted = [np.linalg.matrix_power(normalised, k) @ graph.features for k in (1, 2, 3)]
    np.testing.assert_allclose(found, np.concatenate(wanted, axis=1), rtol=1e-6, atol=1e-6)
    assert not found[-1].any() and found.dtype == np.float32
    other = replace(graph, features=graph.features + np.float32(1.0))
    for reused in (False, True):
        for one in (graph, other):
            (kept,) = load_or_make(one, [("hops", 3)], tmp_path).kinds  # type: ignore[union-attr]
            assert kept.reused == reused
            np.testing.assert_array_equal(kept.array, hop_features(one, 3))


# Values ---------------------------------------------------------------------------------------------------------------


def test_two_triangles_and_an_isolated_node() -> None:
    """Eigenvalues 0, 0 and four times 1.5; the isolated node's row is 0, all is finite; worked out by hand."""
    graph = graph_of(TRIANGLES, 7)
    values, vectors = laplacian_eigenpairs(graph, 5)
    np.testing.assert_allclose(np.sort(np.concatenate([values[0, :3], values[3, :3]])), [0, 0, *[1.5] * 4], atol=1e-12)
    assert not values[:, 3:].any() and not vectors[:, 3:].any() and not values[6].any() and not vectors[6].any()
    found = laplacian_encoding(graph, 4)
    triangle = [[2**0.5, 0], [-(0.5**0.5), 1.5**0.5], [-(0.5**0.5), -(1.5**0.5)]]  # of equal rows the first goes ahead
    np.testing.assert_allclose(found[:, :2], [*triangle, *triangle, [0, 0]], atol=2e-6)
    assert found.dtype == np.float32 and found.shape == (7, 4) and not found[:, 2:].any() and np.isfinite(found).all()


def test_a_directed_path_is_taken_both_ways() -> None:
    graph = graph_of([(0, 1), (1, 2), (2, 3)], 4)
    values, vectors = laplacian_eigenpairs(graph, 4)
    np.testing.assert_allclose(values, [[0, 0.5, 1.5, 2]] * 4, atol=1e-12)
    np.testing.assert_allclose(laplacian_of(graph) @ vectors, vectors * values, atol=1e-12)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(4), atol=1e-12)


@pytest.mark.parametrize("edges", [[], [(0, 0)]])
def test_a_graph_of_one_node_and_more_columns_than_nodes(edges: list[tuple[int, int]]) -> None:
    for graph, size in ((graph_of(edges, 1), 1), (graph_of([(0, 1), (1, 2), *edges], 3), 3)):
        for found in (laplacian_encoding(graph, 9), random_walk_encoding(graph, 9)):
            assert found.shape == (size, 9) and found.dtype == np.float32 and np.isfinite(found).all()
            assert found.any() == (size == 3)


def test_a_component_is_encoded_as_if_it_were_alone() -> None:
    """So that graphs in one batch never know of each other."""
    square = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]
    alone, beside = graph_of(square, 4), graph_of([*square, *((a + 4, b + 4) for a, b in TRIANGLES)], 11)
    for encode in (laplacian_encoding, random_walk_encoding):
        assert np.array_equal(encode(alone, 3), encode(beside, 3)[:4]), encode.__name__


def test_return_probabilities_are_the_diagonals_of_powers() -> None:
    """Blocks of any size, sparse or filled, directed edges taken both ways, duplicates and self loops ignored."""
    graph = awkward_graph()
    simple = laplacian_of(graph)
    degrees = np.diff(simple_neighbors(graph)[0])
    walk = (np.diag((degrees > 0).astype(float)) - simple) * np.sqrt(degrees / np.maximum(degrees, 1)[:, None])
    walk = walk / np.maximum(walk.sum(1, keepdims=True), 1e-300)
    wanted = np.stack([np.diag(np.linalg.matrix_power(walk, t)) for t in range(1, 8)], axis=1)
    for block_entries, filled in ((1, 2.0), (7 * 60, 0.0), (1 << 22, 0.1)):
        with mock.patch.multiple(encodings, _BLOCK_ENTRIES=block_entries, _FILLED=filled):
            for k in (2, 3, 7):
                np.testing.assert_allclose(random_walk_encoding(graph, k), wanted[:, :k], atol=1e-7)
    assert wanted[-1].any() == 0 and wanted[:, 1].max() > 0.1


def test_degrees_are_those_of_the_stored_edges() -> None:
    found = degree_encoding(graph_of([(0, 1), (2, 1), (1, 1), (1, 1)], 4))
    np.testing.assert_allclose(np.expm1(found), [[0, 1], [4, 2], [0, 1], [0, 0]], rtol=1e-6)


def test_self_loops_and_directions_change_nothing() -> None:
    graph = awkward_graph()
    for other in (with_undirected(graph), with_self_loops(graph, "add"), with_self_loops(graph, "remove")):
        assert np.array_equal(laplacian_encoding(graph, 5), laplacian_encoding(other, 5))
        assert np.array_equal(random_walk_encoding(graph, 5), random_walk_encoding(other, 5))


# The rules ------------------------------------------------------------------------------------------------------------


def torus(side: int) -> Graph:
    """Every eigenvalue but few is repeated two, four or eight times."""
    at = np.arange(side * side).reshape(side, side)
    edges = [*zip(at.ravel(), np.roll(at, 1, 0).ravel(), strict=True)]
    edges += [*zip(at.ravel(), np.roll(at, 1, 1).ravel(), strict=True)]
    return graph_of([(int(a), int(b)) for a, b in edges], side * side)


def test_the_basis_does_not_depend_on_what_the_solver_returns() -> None:
    """Turned at random within each repeated eigenvalue's space, signs included: the same bits."""
    graph = torus(8)
    wanted = laplacian_encoding(graph, 10)
    solve = np.linalg.eigh

    def turned(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = solve(matrix)
        rng = np.random.default_rng(0)
        for value in np.unique(values.round(9)):
            same = np.flatnonzero(abs(values - value) < 1e-8)
            rotation = np.linalg.qr(rng.standard_normal((len(same), len(same))))[0]
            vectors[:, same] = vectors[:, same] @ rotation
        return values, vectors

    with mock.patch("numpy.linalg.eigh", turned):
        again = laplacian_encoding(graph, 10)
    assert again.tobytes() == wanted.tobytes()
    assert np.allclose(np.square(wanted).mean(0), 1.0, atol=1e-4)


def test_the_sparse_solver_gives_what_the_dense_one_gives() -> None:
    """Also where the columns end within a repeated eigenvalue's space, which is then completed before it is cut."""
    graph = torus(12)
    for k in (3, 6, 10):
        dense = laplacian_encoding(graph, k)
        with mock.patch.object(encodings, "_DENSE_NODES", 10):
            sparse = [laplacian_encoding(graph, k) for _ in range(2)]
        assert sparse[0].tobytes() == sparse[1].tobytes()
        np.testing.assert_allclose(sparse[0], dense, atol=4e-6)


def test_a_space_too_large_to_complete_is_left_out() -> None:
    """A star: 0, then 1 as often as there are leaves but one, then 2."""
    graph = graph_of([(0, leaf) for leaf in range(1, 200)], 200)
    with mock.patch.object(encodings, "_DENSE_NODES", 10):
        values, vectors = laplacian_eigenpairs(graph, 4)
    np.testing.assert_allclose(values, 0, atol=1e-12)
    assert vectors[:, 0].all() and not vectors[:, 1:].any()
    np.testing.assert_allclose(laplacian_eigenpairs(graph, 4)[0], [[0, 1, 1, 1]] * 200, atol=1e-12)  # solved whole


def test_a_solver_that_does_not_converge_is_one_line() -> None:
    path = graph_of([(i, i + 1) for i in range(299)], 300)
    from scipy.sparse.linalg import eigsh

    def hurried(*args: Any, **kwargs: Any) -> Any:
        return eigsh(*args, **kwargs, maxiter=1)

    with (
        mock.patch.multiple(encodings, _DENSE_NODES=10, eigsh=hurried),
        pytest.raises(ValueError, match=r"laplacian: \d+ of 9 eigenvectors of a component of 300 nodes were found"),
    ):
        laplacian_encoding(path, 4)


# Kept on disk ---------------------------------------------------------------------------------------------------------

WANTED = (("laplacian", 3), ("random_walk", 4), ("degree", 2))


def test_inputs_are_kept_by_content(tmp_path: Path) -> None:
    graph = awkward_graph()
    first, again = (load_or_make(graph, WANTED, tmp_path) for _ in range(2))
    assert isinstance(first, NodeInputs) and isinstance(again, NodeInputs)
    assert [kind.reused for kind in (*first.kinds, *again.kinds)] == [False] * 3 + [True] * 3
    assert all(isinstance(kind.array, np.memmap) for kind in again.kinds)
    everyone = np.arange(graph.num_nodes)
    fresh = np.concatenate([make_input(graph, *one).array for one in WANTED], axis=1)
    assert again.rows(everyone).tobytes() == first.rows(everyone).tobytes() == fresh.tobytes()
    load_or_make(graph, (("laplacian", 4),), tmp_path)
    load_or_make(awkward_graph(seed=1), WANTED, tmp_path)
    load_or_make(replace(graph, features=graph.features + 1), WANTED, tmp_path)  # which features play no part in
    assert len(list(tmp_path.iterdir())) == 7
    assert load_or_make(graph, (), tmp_path) is None


def test_a_damaged_input_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graph = awkward_graph()
    first = load_or_make(graph, WANTED[:1], tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "array.npy").write_bytes(b"nothing")
    again = load_or_make(graph, WANTED[:1], tmp_path)
    assert first is not None and again is not None and not again.kinds[0].reused
    assert "making laplacian of awkward again" in caplog.text
    assert np.array_equal(again.kinds[0].array, make_input(graph, *WANTED[0]).array)


CONFIG: dict[str, Any] = {
    "data": {"name": "sbm", "options": {"num_nodes": 300, "num_edges": 1500}},
    "model": {"layers": 2, "width": 16, "heads": 2, "encodings": {"laplacian": 4, "random_walk": 5, "degree": True}},
    "engine": {"name": "torch", "threads": 1},
    "train": {"steps": 2},
    "monitor": {"progress": False},
}


def test_a_run_makes_them_once_and_says_what_that_took(tmp_path: Path) -> None:
    config = parse_config({**CONFIG, "partition": {"parts": 3, "method": "bfs", "cache": str(tmp_path / "cut")}})
    told: list[str] = []
    reports = [train(config, tmp_path / name, told.append, "test") for name in ("one", "two")]
    assert reports[0]["losses"] == reports[1]["losses"]
    facts = [report["partitioning"] for report in reports]
    assert [fact["laplacian_reused"] for fact in facts] == [False, True]
    assert facts[0]["random_walk_columns"] == 5 and facts[0]["degree_bytes"] == 300 * 2 * 4
    assert facts[0]["laplacian_seconds"] > 0
    lines = [line for line in told if line.startswith("inputs beside the features")]
    assert len(lines) == 6 and "4 columns of laplacian, made in" in lines[0] and "reused" in lines[3]


def inputs_on(world: World, data: dict[str, Any]) -> tuple[bool, bytes]:
    """Whether this rank maps the encodings from files, and what they hold."""
    rank, size = str(world.rank), str(world.size)
    maker = mock.patch("gtx.session.load_or_make", load_or_make if world.rank == 0 else None)  # only the first may
    with mock.patch.dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size), maker:
        graph = load_partitioned(parse_config(data), world, inputs=True).partitioned
    assert graph.inputs is not None
    return all(isinstance(kind.array, np.memmap) for kind in graph.inputs.kinds), graph.input_rows(
        np.arange(9)
    ).tobytes()


def test_one_rank_of_a_host_makes_them_and_the_others_map_its_files(tmp_path: Path) -> None:
    data = {**CONFIG, "partition": {"parts": 3, "method": "bfs", "cache": str(tmp_path / "cut")}}
    (one, found), (other, same) = run_ranks(inputs_on, 2, data)
    assert one and other and found == same and len(found) == 9 * (32 + 4 + 5 + 2) * 4


def test_one_step_of_a_walk_is_refused() -> None:
    with pytest.raises(ValueError, match=r"random_walk: 1 step never leads back"):
        parse_config({"model": {"encodings": {"random_walk": 1}}})


# In a model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["GT", "GCN"])
def test_their_projection_is_added_to_the_encoded_features(model: str) -> None:
    """To the features themselves in a GCN, which has no encoder; rows follow their nodes through any partitioning."""
    graph = awkward_graph()
    inputs = NodeInputs(tuple(make_input(graph, *one) for one in WANTED))
    asked = {"laplacian": 3, "random_walk": 4, "degree": True}
    settings = {"model": {"name": model, "width": 6, "heads": 3, "layers": 1, "encodings": asked}}
    logits = []
    for cut in (replace(partitioned(graph, parts), inputs=inputs) for parts in (1, 6)):
        run = rig(solo(), cut, plan_of("graph", cut, 1, 1), settings)
        seen: list[torch.Tensor] = []
        run.engine.model.layers[0].register_forward_pre_hook(lambda layer, given, seen=seen: seen.append(given[0]))
        batch = run.batches.evaluation(0)
        nodes, found = run.executor.predict(run.compiler.compile(batch), run.plan, 0)
        logits.append(found[np.argsort(cut.original_id[nodes])])
        original = np.asarray(cut.original_id)
        features = torch.from_numpy(graph.features[original]).double()
        encoding = torch.from_numpy(inputs.rows(original)).double()
        projection = run.engine.model.encodings
        assert projection is not None and projection.weight.shape == (5 if model == "GCN" else 6, 9)
        torch.testing.assert_close(seen[0], run.engine.model.encoder(features) + projection(encoding))
    np.testing.assert_allclose(*logits, atol=1e-12)
