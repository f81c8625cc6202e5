"""Parts cover the graph, relabelling loses nothing, counts are a person's, and what is on disk is whole or refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gtx.partition
from gtx.datasets import load_graph
from gtx.graphs import Graph, Names, edge_list, from_edges
from gtx.orders import simple_neighbors
from gtx.partition import Method, PartitionedGraph, assign, fingerprint, load, load_or_partition, partition, save
from gtx.streaming import by_hash, linear_deterministic_greedy

Pair = tuple[int, int]
# `given` assigns nothing by itself: `test_gtx_partition_folders.py`.
METHODS: tuple[Method, ...] = tuple(method for method in get_args(Method) if method != "given")
GRAPH_ARRAYS = ("indptr", "indices", "features", "labels", "train_mask", "val_mask", "test_mask")


def make(num_nodes: int, pairs: list[Pair], name: str = "small", **more: Any) -> Graph:
    """A graph whose features, labels and masks say which node it is."""
    node = np.arange(num_nodes)
    src, dst = [s for s, _ in pairs], [d for _, d in pairs]
    features = node[:, None] * [1.0, -1.0]
    return from_edges(name, src, dst, num_nodes, features, node, node % 3 == 0, node % 3 == 1, node % 3 == 2, **more)


def sbm(num_nodes: int = 2000, num_edges: int = 24_000, seed: int = 0, **options: object) -> Graph:
    options = {"num_nodes": num_nodes, "num_edges": num_edges, "num_features": 4, **options}
    return load_graph("sbm", root=None, seed=seed, undirected=False, self_loops="keep", options=options)


@pytest.fixture(scope="module")
def blocks() -> Graph:
    return sbm(num_blocks=8, homophily=0.9)


def assert_equal(one: PartitionedGraph, other: PartitionedGraph) -> None:
    for name in GRAPH_ARRAYS:
        assert np.array_equal(getattr(one.graph, name), getattr(other.graph, name)), name
    assert np.array_equal(one.starts, other.starts)
    assert np.array_equal(one.original_id, other.original_id)
    assert (one.graph.name, one.graph.num_classes, one.graph.metric) == (
        other.graph.name,
        other.graph.num_classes,
        other.graph.metric,
    )


def without_seconds(partitioned: PartitionedGraph) -> dict[str, Any]:
    return partitioned.facts.as_dict() | {"seconds": None}


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[Pair], Method, int]:
    num_nodes = draw(st.integers(1, 9))
    node = st.integers(0, num_nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=30))
    return num_nodes, pairs, draw(st.sampled_from(METHODS)), draw(st.integers(1, 12))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_relabelling_loses_nothing_and_counts_are_right(case: tuple[int, list[Pair], Method, int]) -> None:
    num_nodes, pairs, method, parts = case
    graph = make(num_nodes, pairs)
    assigned = assign(graph, method, parts, seed=5)
    assert assigned.shape == (num_nodes,)
    assert assigned.dtype == np.int32
    assert all(0 <= part < parts for part in assigned)

    divided = partition(graph, method, parts, seed=5)
    original = divided.original_id.tolist()
    assert original == sorted(range(num_nodes), key=lambda node: (assigned[node], node))
    assert divided.num_parts == parts
    assert divided.part_of.tolist() == [assigned[node] for node in original]
    for part in range(parts):
        assert set(divided.part_of[divided.starts[part] : divided.starts[part + 1]]) <= {part}

    for new, old in enumerate(original):
        row = divided.graph.indices[divided.graph.indptr[new] : divided.graph.indptr[new + 1]]
        neighbors = [original[source] for source in row]
        assert neighbors == sorted(source for source, destination in pairs if destination == old)  # by original id
        assert divided.in_degrees[new] == len(neighbors)
        assert divided.graph.features[new].tolist() == [old, -old]
        assert divided.graph.labels[new] == old
        masks = [getattr(divided.graph, f"{split}_mask")[new] for split in ("train", "val", "test")]
        assert masks == [old % 3 == split for split in range(3)]

    others = [pair for pair in pairs if pair[0] != pair[1]]
    facts = divided.facts
    assert facts.cut_fraction == pytest.approx(sum(assigned[s] != assigned[d] for s, d in others) / max(len(others), 1))
    assert facts.rows == tuple(int((assigned == part).sum()) for part in range(parts))
    assert facts.edges == tuple(sum(assigned[d] == part for _, d in pairs) for part in range(parts))
    assert facts.halo_rows == tuple(
        len({s for s, d in pairs if assigned[d] == part and assigned[s] != part}) for part in range(parts)
    )
    assert facts.empty_parts == parts - len(set(assigned.tolist()))
    assert facts.node_balance == pytest.approx(max(facts.rows) / (num_nodes / parts))
    assert facts.edge_balance == pytest.approx(max(facts.edges) / (len(pairs) / parts) if pairs else 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("parts", [1, 2, 4, 5, 8])
def test_reported_troubles_put_each_node_in_one_part(method: Method, parts: int) -> None:
    graph = make(5, [(0, 1), (0, 1), (1, 2), (2, 2), (3, 0)])  # a duplicate, a self loop, one way only, node 4 alone
    divided = partition(graph, method, parts, seed=0)
    assert sorted(divided.original_id.tolist()) == [0, 1, 2, 3, 4]
    assert sum(divided.facts.rows) == 5
    assert divided.facts.empty_parts == divided.facts.rows.count(0)
    assert divided.facts.empty_parts >= parts - 5
    if parts == 1:
        assert divided.facts.cut_fraction == 0
        assert np.array_equal(divided.original_id, np.arange(5))
        assert np.array_equal(divided.graph.indices, graph.indices)


@pytest.mark.parametrize("method", METHODS)
def test_the_j_th_neighbor_is_the_same_node_however_the_graph_is_divided(method: Method, blocks: Graph) -> None:
    rows = []
    for parts in (1, 3, 7):
        divided = partition(blocks, method, parts, seed=1)
        place = np.argsort(divided.original_id)  # original -> new
        begins, ends = divided.graph.indptr[place], divided.graph.indptr[place + 1]
        names = divided.original_id[divided.graph.indices]
        rows.append([names[begin:end].tolist() for begin, end in zip(begins, ends, strict=True)])
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.parametrize("method", METHODS)
def test_parts_are_balanced_and_a_seed_decides_them(method: Method, blocks: Graph) -> None:
    one, again, other = (partition(blocks, method, 6, seed) for seed in (2, 2, 3))
    assert_equal(one, again)
    assert without_seconds(one) == without_seconds(again)
    assert not np.array_equal(one.original_id, other.original_id)
    assert one.facts.node_balance < (1.2 if method == "hash" else 1.06)


def test_isolated_nodes_even_out_the_parts() -> None:
    ring = [(i, (i + 1) % 40) for i in range(40)]
    for method in (method for method in METHODS if method != "hash"):
        divided = partition(make(100, ring), method, 4, seed=0)
        assert divided.facts.rows == (25, 25, 25, 25)
    assert partition(make(100, ring), "bfs", 4, seed=0).facts.cut_fraction <= 0.5


def test_bfs_keeps_a_path_in_runs_and_components_together() -> None:
    path = [(i, i + 1) for i in range(29)]
    facts = partition(make(30, path), "bfs", 3, seed=0).facts
    assert facts.cut_fraction <= 4 / 29  # from a node inside, the two directions alternate
    cliques = [(a + 5 * c, b + 5 * c) for c in range(4) for a in range(5) for b in range(5) if a != b]
    assert partition(make(20, cliques), "bfs", 4, seed=0).facts.cut_fraction == 0


def test_metis_cuts_less_than_random_and_finds_planted_blocks(blocks: Graph) -> None:
    metis, random = (partition(blocks, method, 8, seed=0).facts for method in ("metis", "random"))  # type: ignore[arg-type]
    assert random.cut_fraction == pytest.approx(7 / 8, abs=0.02)
    assert metis.cut_fraction < 0.2  # a tenth of the edges is between the eight planted blocks
    assert metis.implementation.split()[0] in ("pymetis", "dgl")
    assert sum(metis.halo_rows) < sum(random.halo_rows)


def test_a_greedy_stream_cuts_less_than_a_hash_and_never_overfills(blocks: Graph) -> None:
    metis, ldg, hashed = (partition(blocks, method, 8, seed=0).facts for method in ("metis", "ldg", "hash"))  # type: ignore[arg-type]
    assert metis.cut_fraction < ldg.cut_fraction < 0.75 * hashed.cut_fraction
    assert hashed.cut_fraction == pytest.approx(7 / 8, abs=0.03)
    assert max(ldg.rows) == 250


def test_a_greedy_stream_does_what_its_formula_says() -> None:
    """Two triangles and a node between: 0, 1, 2 fill a part of room 4, 3 joins them, 4 begins the other one."""
    pairs = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (4, 6)]
    indptr, neighbors = simple_neighbors(make(7, pairs))
    assert linear_deterministic_greedy(indptr, neighbors, np.arange(7), 2).tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_hash_knows_no_other_node() -> None:
    assert by_hash(1000, 7, 3)[:10].tolist() == by_hash(10, 7, 3).tolist()


def test_every_metis_at_hand_is_as_good(blocks: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pymetis")
    pytest.importorskip("dgl", exc_type=(ImportError, OSError))  # type: ignore[arg-type]
    first = partition(blocks, "metis", 8, seed=0).facts
    monkeypatch.setitem(sys.modules, "pymetis", None)
    second = partition(blocks, "metis", 8, seed=0).facts
    assert first.implementation.startswith("pymetis ")
    assert second.implementation.startswith("dgl ")
    assert second.cut_fraction == pytest.approx(first.cut_fraction, abs=0.05)
    assert sum(second.rows) == blocks.num_nodes
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("trouble", [ImportError("not here"), OSError("libdgl.so: no such file")])
def test_without_metis_the_error_names_the_other_ways_which_work(
    trouble: Exception, blocks: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name in ("dgl", "pymetis"):
                raise trouble

    for name in ("dgl", "pymetis"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ValueError, match=r"pip install pymetis, or \(2\) set the method to ldg or bfs"):
        assign(blocks, "metis", 4, 0)
    for method in ("bfs", "random"):
        assert len(set(assign(blocks, method, 4, 0))) == 4  # type: ignore[arg-type]


def test_wrong_requests_are_errors(blocks: Graph) -> None:
    with pytest.raises(ValueError, match="parts is 0; at least 1"):
        assign(blocks, "bfs", 0, 0)
    with pytest.raises(ValueError, match="method is 'kmeans'; choose one of metis, ldg, bfs, hash, random"):
        assign(blocks, "kmeans", 2, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed is -1"):
        assign(blocks, "random", 2, -1)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(0, 40))
def test_filling_raises_the_smallest_first(sizes: list[int], count: int) -> None:
    expected = list(sizes)
    for _ in range(count):
        expected[expected.index(min(expected))] += 1
    more = Counter(gtx.partition._fill(np.array(sizes), count).tolist())
    assert sorted(size + more[part] for part, size in enumerate(sizes)) == sorted(expected)
    assert sum(more.values()) == count


# ---------------------------------------------------------------------------------------------------------------------
# On disk


def test_what_is_loaded_equals_what_was_saved_and_stays_on_disk(blocks: Graph, tmp_path: Path) -> None:
    divided = partition(blocks, "bfs", 5, seed=0)
    save(divided, tmp_path / "kept")
    loaded = load(tmp_path / "kept")
    assert_equal(divided, loaded)
    assert loaded.facts == divided.facts
    for array in (*(getattr(loaded.graph, name) for name in GRAPH_ARRAYS), loaded.starts, loaded.original_id):
        assert isinstance(array, np.memmap)
        array[:1] = 0  # stays private
    loaded = load(tmp_path / "kept")
    assert_equal(divided, loaded)
    assert np.array_equal(loaded.part_of, divided.part_of)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    other = partition(blocks, "bfs", 6, seed=0)
    save(other, tmp_path / "kept")  # replaces
    assert_equal(load(tmp_path / "kept"), other)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_loaded_graph_can_be_divided_and_saved_again(blocks: Graph, tmp_path: Path) -> None:
    save(partition(blocks, "random", 3, seed=0), tmp_path / "one")
    again = partition(load(tmp_path / "one").graph, "bfs", 4, seed=0)
    save(again, tmp_path / "two")
    assert_equal(load(tmp_path / "two"), again)


def test_a_graph_without_edges_is_saved_and_loaded(tmp_path: Path) -> None:
    divided = partition(make(6, []), "metis", 4, seed=0)
    assert divided.facts.cut_fraction == 0
    assert divided.facts.edge_balance == 1
    save(divided, tmp_path / "kept")
    assert_equal(load(tmp_path / "kept"), divided)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * 8)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "folder missing": (shutil.rmtree, "FileNotFoundError"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "FileNotFoundError"),
    "manifest cut off": (lambda f: truncate(f / "manifest.json"), "JSONDecodeError"),
    "foreign manifest": (lambda f: (f / "manifest.json").write_text('{"name": "web"}'), "KeyError: 'format'"),
    "manifest is a list": (lambda f: (f / "manifest.json").write_text("[]"), "TypeError"),
    "other version": (lambda f: edit(f / "manifest.json", lambda m: m.update(format_version=99)), "version 99"),
    "fact missing": (lambda f: edit(f / "manifest.json", lambda m: m["facts"].pop("seed")), "seed"),
    "array missing": (lambda f: (f / "labels.npy").unlink(), r"labels\.npy"),
    "array empty": (lambda f: (f / "labels.npy").write_bytes(b""), r"labels\.npy cannot be read"),
    "array not numpy": (lambda f: (f / "labels.npy").write_bytes(b"labels" * 99), r"labels\.npy cannot be read"),
    "array cut off": (lambda f: truncate(f / "indices.npy"), r"indices\.npy cannot be read"),
    "array too long": (lambda f: lengthen(f / "indices.npy"), r"indices\.npy has .* bytes instead of"),
    "array of other dtype": (lambda f: np.save(f / "labels.npy", np.zeros(2000, np.float64)), "labels.npy is float64"),
    "array of other shape": (lambda f: np.save(f / "labels.npy", np.zeros(1999, np.int64)), "labels.npy has shape"),
    "starts not ascending": (lambda f: np.save(f / "starts.npy", np.array([0, 9, 8, 2000])), "starts.npy does not"),
    "id twice": (lambda f: np.save(f / "original_id.npy", np.zeros(2000, np.int64)), "does not name node 1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_one_clear_error_and_is_rebuilt_by_the_cache(
    damage: str, blocks: Graph, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harm, reason = DAMAGES[damage]
    first, reused = load_or_partition(blocks, "random", 3, 0, tmp_path)
    assert not reused
    (folder,) = tmp_path.iterdir()
    harm(folder)
    begun = time.perf_counter()
    with pytest.raises(ValueError, match=f"holds no usable partition .*({reason}).*partition the graph again"):
        load(folder)
    assert time.perf_counter() - begun < 5
    with caplog.at_level(logging.WARNING, logger="gtx.partition"):
        rebuilt, reused = load_or_partition(blocks, "random", 3, 0, tmp_path)
    assert not reused
    assert ("partitioning sbm again" in caplog.text) == (damage != "folder missing")
    assert rebuilt.facts.fingerprint == first.facts.fingerprint
    assert_equal(load(folder), partition(blocks, "random", 3, 0))
    assert list(tmp_path.iterdir()) == [folder]


def test_edge_features_are_kept_with_their_edges_and_names_with_the_graph(tmp_path: Path) -> None:
    pairs = [(0, 1), (3, 1), (2, 1), (2, 3), (2, 3)]
    told = np.array([[10 * s + d, i] for i, (s, d) in enumerate(pairs)], dtype=np.float32)
    names = Names(nodes=np.array(["a", 2, (3,), "d"], dtype=object), classes=("x", "y", "z", "w"))
    plain, _ = load_or_partition(make(4, pairs), "random", 2, 0, tmp_path)
    assert plain.graph.edge_features is None
    for made_before in (False, True):
        graph = make(4, pairs, edge_features=told, names=names)
        divided, reused = load_or_partition(graph, "random", 2, 0, tmp_path)
        assert reused == made_before
        assert divided.graph.node_ids.tolist() == [names.nodes[old] for old in divided.original_id]  # type: ignore[index]
        assert divided.graph.names.classes == names.classes
        sources, destinations = (divided.original_id[ends] for ends in edge_list(divided.graph))
        assert divided.graph.edge_features is not None
        assert divided.graph.edge_features[:, 0].tolist() == (10 * sources + destinations).tolist()
        assert sorted(divided.graph.edge_features[:, 1].tolist()) == [0, 1, 2, 3, 4]
    assert divided.folder is not None
    assert load(divided.folder).graph.node_ids.tolist() == divided.original_id.tolist()


def test_the_cache_is_used_for_just_the_same_request(blocks: Graph, tmp_path: Path) -> None:
    first, reused = load_or_partition(blocks, "bfs", 4, 0, tmp_path)
    assert not reused
    second, reused = load_or_partition(blocks, "bfs", 4, 0, tmp_path)
    assert reused
    assert_equal(first, second)
    assert second.facts == first.facts
    assert isinstance(second.graph.features, np.memmap)
    features = blocks.features.copy()
    features[7, 1] += 1
    for other in (
        (blocks, "bfs", 4, 1),
        (blocks, "bfs", 5, 0),
        (blocks, "random", 4, 0),
        (dataclasses.replace(blocks, features=features), "bfs", 4, 0),
        (dataclasses.replace(blocks, train_mask=blocks.val_mask, val_mask=blocks.train_mask), "bfs", 4, 0),
        (dataclasses.replace(blocks, num_classes=99), "bfs", 4, 0),
    ):
        assert not load_or_partition(*other, tmp_path)[1]  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == 7


def test_a_stale_folder_is_rebuilt_and_the_reason_logged(
    blocks: Graph, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_or_partition(blocks, "bfs", 4, 0, tmp_path)
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder)
    save(partition(sbm(seed=9), "bfs", 4, 0), folder)  # another graph's partition under this one's name
    with caplog.at_level(logging.WARNING, logger="gtx.partition"):
        rebuilt, reused = load_or_partition(blocks, "bfs", 4, 0, tmp_path)
    assert not reused
    assert "is stale" in caplog.text
    assert rebuilt.facts.fingerprint == fingerprint(blocks, "bfs", 4, 0)
    assert load_or_partition(blocks, "bfs", 4, 0, tmp_path)[1]


def test_a_graph_name_cannot_leave_the_cache(tmp_path: Path) -> None:
    load_or_partition(make(4, [(0, 1)], name="../up/and away"), "random", 2, 0, tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_failed_write_leaves_nothing(blocks: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        save(partition(blocks, "random", 2, 0), tmp_path / "kept")
    assert list(tmp_path.iterdir()) == []


def race(caches: list[str], start: Any, results: Any) -> None:
    """One of several processes that want the same partition of each cache; reports what it got."""
    graph = sbm(num_nodes=500, num_edges=4000)
    for cache in caches:
        start.wait(60)
        divided, reused = load_or_partition(graph, "bfs", 4, 0, cache)
        source, _ = edge_list(divided.graph)
        results.put((cache, os.getpid(), divided.facts.fingerprint, int(source.sum()), reused))


def test_processes_that_race_for_a_folder_all_get_the_partition(tmp_path: Path) -> None:
    graph = sbm(num_nodes=500, num_edges=4000)
    caches = [tmp_path / "with nothing", tmp_path / "with a damaged folder"]
    load_or_partition(graph, "bfs", 4, 0, caches[1])
    (folder,) = caches[1].iterdir()
    truncate(folder / "features.npy")
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    arguments = ([str(cache) for cache in caches], start, results)
    processes = [context.Process(target=race, args=arguments, daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in range(6)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for cache in caches:
        own = [answer[1:] for answer in answers if answer[0] == str(cache)]
        assert len({pid for pid, *_ in own}) == 3
        assert len({answer[1:3] for answer in own}) == 1
        assert not all(reused for *_, reused in own)
        (folder,) = cache.iterdir()  # nothing left over
        assert_equal(load(folder), partition(graph, "bfs", 4, 0))


def test_a_partition_that_did_not_come_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="given: graph 'small' came without a partition; choose another"):
        assign(make(3, [(0, 1)]), "given", 3, 0)
