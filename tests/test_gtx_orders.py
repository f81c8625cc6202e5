"""Orders of nodes: permutations that bring neighbours near, change no draw and no result, and say what they brought."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from cases import awkward_graph, loss_and_gradient, plan_of, rig, small_graph
from ranks import run_ranks

from gtx.config import DataConfig, parse_config
from gtx.datasets import load_graph
from gtx.graphs import Graph
from gtx.orders import BLOCK, NEAR, NodeOrder, locality, node_order
from gtx.parallel.world import World, solo
from gtx.partition import load_or_partition, partition
from gtx.session import load_partitioned, tell_graph

pytestmark = pytest.mark.usefixtures("one_thread")

ORDERS: tuple[NodeOrder, ...] = get_args(NodeOrder)
NEW = tuple(order for order in ORDERS if order != "none")


def in_order(graph: Graph, order: NodeOrder, part: Any = None) -> np.ndarray:
    part = np.arange(graph.num_nodes, dtype=np.int32) % 3 if part is None else part
    return node_order(graph, order, 5, lambda: part)


def shuffled_path(num_nodes: int = 500) -> Graph:
    """0 - 1 - 2 ... under random numbers, each edge in one direction."""
    number = np.random.default_rng(0).permutation(num_nodes).tolist()
    return small_graph(list(itertools.pairwise(number)), num_nodes, [0])


def test_the_config_knows_the_orders() -> None:
    assert get_args(DataConfig.model_fields["order"].annotation) == ORDERS
    with pytest.raises(ValueError, match="data.order is 'best': input should be 'none', 'bfs', 'degree', 'rcm'"):
        parse_config({"data": {"order": "best"}})
    with pytest.raises(ValueError, match="data.order is 'best'; choose one of none, bfs, degree, rcm, metis"):
        in_order(awkward_graph(), "best")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_holds_every_node_once(order: NodeOrder) -> None:
    for graph in (awkward_graph(), small_graph([], 4, [0]), small_graph([(0, 0)], 1, [0])):
        found = in_order(graph, order)
        assert found.dtype == np.int64 and sorted(found.tolist()) == list(range(graph.num_nodes))
        assert found.tolist() == in_order(graph, order).tolist()


def test_what_each_order_promises() -> None:
    path = shuffled_path()
    position = np.argsort(in_order(path, "rcm"))
    assert locality(path, position).mean_gap == 1.0, "neighbours of a path lie side by side"
    assert locality(path, np.argsort(in_order(path, "bfs"))).mean_gap <= 2.0, "from the middle both ways by turns"
    degrees = awkward_graph().in_degrees[in_order(awkward_graph(), "degree")]
    assert (np.diff(degrees) <= 0).all() and degrees[0] > degrees[-1]
    part = np.random.default_rng(1).integers(0, 7, 500).astype(np.int32)
    part[np.argsort(position)] = np.repeat(np.arange(5), 100)  # five runs of the path
    found = in_order(path, "metis", part)
    assert (np.diff(part[found]) >= 0).all()
    inside = locality(path, np.argsort(found)).mean_gap
    assert inside < 10, "within a part breadth-first; only its four borders may lie far"


def test_locality_counts_what_it_says() -> None:
    graph = awkward_graph(num_nodes=600, num_edges=4000)
    position = np.random.default_rng(2).permutation(600)
    pairs = [
        (int(position[source]), int(position[node]))
        for node in range(600)
        for source in graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
        if source != node
    ]
    found = locality(graph, position)
    assert found.mean_gap == pytest.approx(np.mean([abs(a - b) for a, b in pairs]))
    assert found.near_fraction == np.mean([abs(a - b) <= NEAR for a, b in pairs]) == 1.0
    assert found.edges_per_source == pytest.approx(len(pairs) / len({(a, b // BLOCK) for a, b in pairs}))
    far = small_graph([(0, NEAR), (0, NEAR + 1), (7, 7)], NEAR + 2, [0])
    assert locality(far).near_fraction == 0.5
    assert locality(small_graph([(1, 1)], 2, [0])).as_dict() == {
        "mean_gap": 0.0,
        "near_fraction": 1.0,
        "edges_per_source": 1.0,
    }


@pytest.mark.parametrize("order", NEW)
@pytest.mark.parametrize("method", ["random", "metis"])
def test_an_order_moves_nodes_within_their_part_only(order: NodeOrder, method: Any) -> None:
    graph = awkward_graph()
    plain, ordered = partition(graph, method, 4, 3), partition(graph, method, 4, 3, order)
    assert ordered.starts.tolist() == plain.starts.tolist() and ordered.facts.order == order
    assert ordered.facts.unordered == plain.facts.locality == plain.facts.unordered
    assert ordered.facts.locality == locality(ordered.graph)
    for begin, end in itertools.pairwise(plain.starts.tolist()):
        assert sorted(ordered.original_id[begin:end]) == plain.original_id[begin:end].tolist()
    for new, old in enumerate(ordered.original_id.tolist()):
        row = ordered.graph.indices[ordered.graph.indptr[new] : ordered.graph.indptr[new + 1]]
        assert ordered.original_id[row].tolist() == graph.indices[graph.indptr[old] : graph.indptr[old + 1]].tolist()
        assert (ordered.graph.features[new] == graph.features[old]).all()
    assert ordered.original_id.tolist() != plain.original_id.tolist()


def test_shuffled_communities_come_together() -> None:
    options = {"num_nodes": 4000, "num_edges": 20_000, "num_blocks": 20, "homophily": 0.97}
    graph = load_graph("sbm", root=None, seed=0, undirected=True, self_loops="add", options=options)
    for order, method, parts in (("bfs", "random", 1), ("rcm", "random", 1), ("metis", "metis", 20)):
        facts = partition(graph, method, parts, 0, order).facts  # type: ignore[arg-type]
        now, before = facts.locality, facts.unordered
        assert now.mean_gap < 0.9 * before.mean_gap, order
        assert now.edges_per_source > 1.03 * before.edges_per_source, order
        assert now.near_fraction >= before.near_fraction and facts.order_s > 0.0
        assert order == "metis" or now.near_fraction > 1.5 * before.near_fraction


def test_an_order_is_kept_and_told(tmp_path: Path) -> None:
    graph = awkward_graph()
    first, reused = load_or_partition(graph, "bfs", 3, 0, tmp_path, "rcm")
    again, found = load_or_partition(graph, "bfs", 3, 0, tmp_path, "rcm")
    assert (reused, found) == (False, True) and again.facts == first.facts
    assert again.original_id.tolist() == first.original_id.tolist()
    assert not load_or_partition(graph, "bfs", 3, 0, tmp_path)[1], "another order is another partition"
    data = {"name": "digits", "order": "rcm"}
    loaded = load_partitioned(parse_config({"data": data, "partition": {"cache": str(tmp_path / "cut")}}))
    told: list[str] = []
    tell_graph(loaded, told.append)
    assert told[-1].startswith("order in memory: rcm, made in") and "points a second" in told[-1]
    facts = loaded.facts()
    assert facts["order"] == "rcm" and facts["locality_mean_gap"] != facts["unordered_mean_gap"]


SETTINGS: dict[str, Any] = {
    "model": {"name": "GPS", "width": 6, "heads": 3, "layers": 2, "dropout": 0.3},
    "sampling": {"fanout": 4, "method": "weighted"},
}
BATCHES = {
    "full": {"kind": "full"},
    "cluster": {"kind": "cluster", "parts": 2, "micro_batches": 2},
    "neighbor": {"kind": "neighbor", "seeds": 5, "micro_batches": 3},
}


def outcomes(world: World, order: NodeOrder) -> list[tuple[float, np.ndarray]]:
    """Loss and gradient of a step of every kind of batch, in a mode each."""
    found = []
    for (kind, batch), mode in zip(BATCHES.items(), ("graph", "model", "pipeline"), strict=True):
        graph = partition(awkward_graph(), "random", 6, 0, order)
        settings = {
            **SETTINGS,
            "batch": batch,
            "model": {**SETTINGS["model"], "name": "GT" if kind == "full" else "GPS"},
        }
        loss, gradient, _ = loss_and_gradient(rig(world, graph, plan_of(mode, graph, world.size, 2), settings), step=3)
        found.append((loss, gradient))
    return found


@pytest.mark.parametrize("order", NEW)
def test_an_order_changes_no_loss_and_no_gradient(order: NodeOrder) -> None:
    """With fresh samples and dropout on, on one rank and on two: all draws are keyed by the original ids."""
    want = outcomes(solo(), "none")
    for found in (outcomes(solo(), order), *run_ranks(outcomes, 2, order)):
        for (loss, gradient), (other, same) in zip(found, want, strict=True):
            assert abs(loss - other) <= 1e-10 * abs(other)
            assert np.linalg.norm(gradient - same) <= 1e-10 * np.linalg.norm(same)
