"""Lists by random walks: kept by content, the same under any partitioning, and what attention and sums make of them.

Not here: the walks themselves (`test_sparse_engine_walks.py`); that any plan equals one rank with them is in
`test_gtx_parallel_equal.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cases import awkward_graph, partitioned, plan_of, rig
from ranks import run_ranks

from gtx.config import parse_config
from gtx.neighbor_lists import NeighborLists, load_lists, load_or_walk, walk_lists
from gtx.parallel.compiled import EdgeSlot
from gtx.parallel.world import World, solo
from gtx.partition import PartitionedGraph
from gtx.session import load_partitioned, tell_graph
from gtx.train import train
from sparse_engine import aggregate, sparse_attention

pytestmark = pytest.mark.usefixtures("one_thread")

WALKS = (5, 12, 0.4, 3)  # fan-out, walks, restart, seed


def entries(graph: PartitionedGraph, lists: NeighborLists) -> dict[int, list[tuple[int, int]]]:
    """original id -> its list as (original id, visits)."""
    pairs = list(zip(graph.original_id[lists.indices].tolist(), lists.visits.tolist(), strict=True))
    bounds = itertools.pairwise(lists.indptr.tolist())
    return {int(graph.original_id[i]): pairs[begin:end] for i, (begin, end) in enumerate(bounds)}


def test_lists_do_not_depend_on_the_partitioning() -> None:
    cuts = [partitioned(awkward_graph(), parts, method) for parts, method in ((6, "random"), (1, "bfs"), (4, "metis"))]
    found = [entries(cut, walk_lists(cut, *WALKS)) for cut in cuts]
    assert found[0] == found[1] == found[2]
    assert max(map(len, found[0].values())) == 5
    assert min(map(len, found[0].values())) == 0, "isolated nodes have empty lists"


def test_lists_are_kept_by_content(tmp_path: Path) -> None:
    graph = partitioned(awkward_graph())
    first = load_or_walk(graph, *WALKS, tmp_path)
    again = load_or_walk(graph, *WALKS, tmp_path)
    assert (first.reused, again.reused) == (False, True)
    assert isinstance(again.indices, np.memmap) and first.folder == again.folder
    assert entries(graph, again) == entries(graph, first) == entries(graph, walk_lists(graph, *WALKS))
    others = [load_or_walk(graph, *given, tmp_path) for given in ((6, 12, 0.4, 3), (5, 13, 0.4, 3), (5, 12, 0.3, 3))]
    others.append(load_or_walk(partitioned(awkward_graph(seed=1)), *WALKS, tmp_path))
    assert len({other.folder for other in others} | {first.folder}) == 5 and not any(o.reused for o in others)
    assert first.facts.bytes == sum(a.nbytes for a in (first.indptr, first.indices, first.visits))


def test_damaged_lists_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graph = partitioned(awkward_graph())
    folder = load_or_walk(graph, *WALKS, tmp_path).folder
    assert folder is not None
    (folder / "visits.npy").write_bytes((folder / "visits.npy").read_bytes()[:-4])
    with pytest.raises(ValueError, match="holds no usable neighbour lists .*delete the folder"):
        load_lists(folder)
    made = load_or_walk(graph, *WALKS, tmp_path)
    assert not made.reused and "walking over awkward again" in caplog.text
    assert entries(graph, load_lists(folder)) == entries(graph, made)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name]


def slots(graph: PartitionedGraph, batch: dict[str, object], fanout: Sequence[int], correct: bool) -> list[EdgeSlot]:
    """Edges of each layer of a step's only wave, on one rank."""
    settings = {
        "model": {"name": "GT", "width": 6, "heads": 3, "layers": len(fanout)},
        "sampling": {"method": "random_walk", "fanout": list(fanout), "correct": correct},
        "batch": batch,
    }
    run = rig(solo(), graph, plan_of("graph", graph, 1, len(fanout)), settings)
    (wave,) = run.compiler.compile(run.batches.step(2)).waves
    return [layer.edges[0] for layer in wave.layers]


def with_lists(parts: int = 6) -> PartitionedGraph:
    graph = partitioned(awkward_graph(), parts)
    return replace(graph, lists=walk_lists(graph, *WALKS))


def test_each_layer_takes_the_first_of_its_list_and_draws_nothing() -> None:
    graph = with_lists()
    lists = graph.lists
    assert lists is not None
    for edges, fanout in zip(slots(graph, {"kind": "full"}, (5, 2), True), (5, 2), strict=True):
        indptr, found = edges.pattern.indptr.tolist(), edges.pattern.indices.tolist()
        for row in range(graph.graph.num_nodes):
            begin, end = (int(x) for x in lists.indptr[row : row + 2])
            assert found[indptr[row] : indptr[row + 1]] == lists.indices[begin : min(end, begin + fanout)].tolist()


def test_a_cluster_takes_the_first_that_are_in_it() -> None:
    graph = with_lists()
    lists = graph.lists
    assert lists is not None
    settings = {
        "model": {"name": "GT", "width": 6, "heads": 3, "layers": 1},
        "sampling": {"method": "random_walk", "fanout": 2},
        "batch": {"kind": "cluster", "parts": 2},
    }
    run = rig(solo(), graph, plan_of("graph", graph, 1, 1), settings)
    step = run.batches.step(2)
    (micro_batch,) = step.micro_batches
    (edges,) = run.compiler.compile(step).waves[0].layers[0].edges
    dropped = 0
    for at, row in enumerate(micro_batch.nodes.tolist()):
        own = lists.indices[lists.indptr[row] : lists.indptr[row + 1]].tolist()
        inside = [node for node in own if node in set(micro_batch.nodes.tolist())]
        dropped += len(own) - len(inside)
        begin, end = edges.pattern.indptr.tolist()[at : at + 2]
        assert micro_batch.nodes[edges.pattern.indices[begin:end].numpy()].tolist() == inside[:2]
    assert dropped > 0


def test_an_entry_counts_as_often_as_it_was_visited() -> None:
    """Attention and means over a list equal those over its nodes repeated; a sum is the mean times the in-degree."""
    graph = with_lists()
    lists = graph.lists
    assert lists is not None
    num_nodes = graph.graph.num_nodes
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(num_nodes, 2, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    (edges,) = slots(graph, {"kind": "full"}, (5,), True)
    odds = edges.edge_inclusion
    assert odds is not None
    attended = sparse_attention(q, k, v, edges.pattern, edge_bias=-odds.log(), backend="torch")
    degrees = torch.from_numpy(graph.in_degrees).double()
    scale = torch.where(edges.inclusion > 0, 1 / edges.inclusion, 0.0)
    total = aggregate(v, edges.pattern, row_scale=scale, edge_weight=odds.reciprocal())
    for row in range(num_nodes):
        begin, end = (int(x) for x in lists.indptr[row : row + 2])
        nodes = np.repeat(lists.indices[begin:end], lists.visits[begin:end])
        if not len(nodes):
            assert degrees[row] == 0 and not total[row].any()
            continue
        share = torch.softmax(torch.einsum("hd,nhd->hn", q[row], k[nodes]) / 3**0.5, 1)
        torch.testing.assert_close(attended[row], torch.einsum("hn,nhd->hd", share, v[nodes]))
        torch.testing.assert_close(total[row], v[nodes].mean(0) * degrees[row])
    (plain,) = slots(graph, {"kind": "full"}, (5,), False)
    assert plain.edge_inclusion is None and plain.inclusion.eq(1).all()


CONFIG = {
    "data": {"name": "sbm", "options": {"num_nodes": 300, "num_edges": 1500}},
    "model": {"layers": 2, "width": 16, "heads": 2},
    "sampling": {"method": "random_walk", "fanout": 6, "walks": 20},
    "engine": {"name": "torch", "threads": 1},
    "train": {"steps": 3, "eval_every": 2},
    "monitor": {"progress": False},
}


def test_a_run_walks_once_and_says_what_that_took(tmp_path: Path) -> None:
    config = parse_config({**CONFIG, "partition": {"parts": 3, "method": "bfs", "cache": str(tmp_path / "cut")}})
    told: list[str] = []
    reports = [train(config, tmp_path / name, told.append, "test") for name in ("one", "two")]
    assert reports[0]["losses"] == reports[1]["losses"] and len(reports[0]["evaluations"]) == 2
    facts = [report["partitioning"] for report in reports]
    assert [fact["lists_reused"] for fact in facts] == [False, True]
    assert facts[0]["lists_entries"] <= 300 * 6 and facts[0]["lists_bytes"] > 8 * facts[0]["lists_entries"]
    assert reports[0]["share_of_edges_attended"] == 1.0
    lines = [line for line in told if line.startswith("neighbour lists")]
    assert "made in" in lines[0] and "reused" in lines[1] and "MiB" in lines[0]
    loaded = load_partitioned(config)
    assert loaded.reused and loaded.partitioned.lists is not None and loaded.partitioned.lists.reused
    tell_graph(loaded, told.append)
    assert told[-1] == lines[1]


def lists_on(world: World, data: dict[str, Any]) -> tuple[bool, list[int]]:
    """Whether this rank maps the lists from files, and what they hold."""
    rank, size = str(world.rank), str(world.size)
    walker = mock.patch("gtx.session.load_or_walk", load_or_walk if world.rank == 0 else None)  # only the first may
    with mock.patch.dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size), walker:
        lists = load_partitioned(parse_config(data), world).partitioned.lists
    assert lists is not None
    return isinstance(lists.indices, np.memmap), lists.indices.tolist()


def test_one_rank_of_a_host_walks_and_the_others_map_its_files(tmp_path: Path) -> None:
    data = {**CONFIG, "partition": {"parts": 3, "method": "bfs", "cache": str(tmp_path / "cut")}}
    (one, found), (other, same) = run_ranks(lists_on, 2, data)
    assert one and other and found == same and len(found) > 0
    assert len(list((tmp_path / "cut").iterdir())) == 2, "a partition and its lists"


def test_settings_of_walks_without_effect_are_told() -> None:
    told = parse_config({"sampling": {"fanout": 3, "walks": 5, "restart": 0.5}}).without_effect()
    assert [line.split()[0] for line in told] == ["sampling.restart", "sampling.walks"]
    told = parse_config({"sampling": {"fanout": 3, "method": "random_walk", "redraw": "once"}}).without_effect()
    assert told == ["sampling.redraw has no effect: the lists of sampling.method random_walk are made once"]
    with pytest.raises(ValueError, match=r"sampling.restart is 0.0: input should be greater than 0"):
        parse_config({"sampling": {"fanout": 3, "method": "random_walk", "restart": 0.0}})
    with pytest.raises(ValueError, match="sampling.method random_walk has no effect without sampling.fanout"):
        parse_config({"sampling": {"method": "random_walk"}})
