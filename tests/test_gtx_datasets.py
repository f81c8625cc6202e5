"""Generated graphs are what was asked for, the same every time; packed graphs have the counts their authors state."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtx.datasets import graph_names, load_graph
from gtx.graphs import Graph, edge_list, summarize

# name: nodes, stored edges, features, classes, (train, val, test), as the sets' authors state them
PACKED: dict[str, tuple[int, int, int, int, tuple[int, int, int]]] = {
    "cora": (2708, 10556, 1433, 7, (140, 500, 1000)),
    "citeseer": (3327, 9104, 3703, 6, (120, 500, 1000)),
    "pubmed": (19717, 88648, 500, 3, (60, 500, 1000)),
    "minesweeper": (10000, 78804, 7, 2, (5000, 2500, 2500)),
    "tolokers": (11758, 1038000, 10, 2, (5879, 2939, 2940)),
    "squirrel": (2223, 93996, 2089, 5, (1053, 718, 452)),
    "actor": (7600, 53318, 932, 5, (3648, 2432, 1520)),
    "texas": (183, 558, 1703, 5, (87, 59, 37)),
    "wisconsin": (251, 900, 1703, 5, (120, 80, 51)),
    "cornell": (183, 554, 1703, 5, (87, 59, 37)),
    "photo": (7650, 238162, 745, 8, (0, 0, 0)),
}


def load(name: str, *, seed: int = 0, split: int = 0, root: Path | None = None, **options: object) -> Graph:
    return load_graph(name, root=root, seed=seed, split=split, undirected=False, self_loops="keep", options=options)


def same(one: Graph, other: Graph, *fields: str) -> bool:
    return all(np.array_equal(getattr(one, field), getattr(other, field)) for field in fields)


STRUCTURE = ("indptr", "indices", "features", "labels")
MASKS = ("train_mask", "val_mask", "test_mask")
SMALL: dict[str, dict[str, Any]] = {
    "digits": {},
    "sbm": {"num_nodes": 600, "num_edges": 6000, "num_blocks": 5},
    "rmat": {"num_nodes": 700, "num_edges": 6000},
}


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_decides_everything_that_is_drawn(name: str) -> None:
    one, again, other = (load(name, seed=seed, **SMALL[name]) for seed in (3, 3, 4))
    assert same(one, again, *STRUCTURE, *MASKS)
    assert not same(one, other, *MASKS)
    assert same(one, other, *STRUCTURE) == (name == "digits")  # where only the split is drawn


@pytest.mark.parametrize("name", SMALL)
def test_another_split_is_of_the_same_graph(name: str) -> None:
    one, other = (load(name, split=split, **SMALL[name]) for split in (0, 1))
    assert same(one, other, *STRUCTURE)
    assert not same(one, other, "train_mask")


@pytest.mark.parametrize("name", SMALL)
def test_splits_cover_the_graph_and_every_class(name: str) -> None:
    graph = load(name, **SMALL[name])
    assert (graph.train_mask.astype(int) + graph.val_mask + graph.test_mask == 1).all()
    for label in range(graph.num_classes):
        of_class = graph.labels == label
        if of_class.any():
            assert graph.train_mask[of_class].mean() == pytest.approx(0.2, abs=0.6 / of_class.sum())
            assert graph.val_mask[of_class].mean() == pytest.approx(0.2, abs=0.6 / of_class.sum())


def test_digits_have_edges_from_their_nearest_images() -> None:
    graph = load("digits", neighbors=5)
    assert (graph.num_nodes, graph.num_features, graph.num_classes) == (1797, 64, 10)
    assert (graph.in_degrees == 5).all()
    assert graph.features.min() == 0
    assert graph.features.max() == 1
    pixels = np.rint(graph.features * 16).astype(np.int64)
    for node in (0, 7, 1000, 1796):
        squared = np.square(pixels - pixels[node]).sum(axis=1)
        ranked = sorted((int(squared[other]), other) for other in range(1797) if other != node)  # ties by id
        expected = sorted(other for _, other in ranked[:5])
        assert graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist() == expected
    source, destination = edge_list(graph)
    assert (graph.labels[source] == graph.labels[destination]).mean() > 0.9


@pytest.mark.parametrize("homophily", [0.0, 0.3, 0.9])
def test_sbm_has_the_edges_and_homophily_asked_for(homophily: float) -> None:
    graph = load("sbm", num_nodes=2000, num_edges=30_000, num_blocks=8, homophily=homophily)
    summary = summarize(graph)
    assert summary.num_edges == 30_000
    assert (summary.directed, summary.duplicate_edges, summary.self_loops) == (False, 0, 0)
    source, destination = edge_list(graph)
    assert (graph.labels[source] == graph.labels[destination]).mean() == pytest.approx(homophily, abs=1e-4)
    assert np.bincount(graph.labels).tolist() == [250] * 8


def test_sbm_degrees_are_heavier_tailed_at_a_lower_exponent() -> None:
    heavy, light, equal = (
        summarize(load("sbm", num_nodes=5000, num_edges=50_000, degree_exponent=exponent)).max_in_degree
        for exponent in (2.3, 5.0, np.inf)
    )
    assert heavy > 2 * light > 3 * equal
    assert equal < 40  # Poisson of mean 10


def test_sbm_neighborhoods_say_more_of_the_class_than_one_node() -> None:
    graph = load("sbm", num_nodes=3000, num_edges=60_000, num_blocks=6)
    own, around = nearest_centroid_accuracy(graph)
    assert 1 / 6 + 0.1 < own < around - 0.2
    noisy, _ = nearest_centroid_accuracy(load("sbm", num_nodes=3000, num_edges=60_000, num_blocks=6, feature_noise=5))
    assert noisy < own


def nearest_centroid_accuracy(graph: Graph) -> tuple[float, float]:
    """Test accuracy of the class whose training mean is nearest: of own features, and of means with the neighbours."""
    source, destination = edge_list(graph)
    summed = graph.features.astype(np.float64)
    np.add.at(summed, destination, graph.features[source])
    found = []
    for rows in (graph.features, summed / (1 + graph.in_degrees)[:, None]):
        means = np.stack(
            [rows[graph.train_mask & (graph.labels == label)].mean(axis=0) for label in range(graph.num_classes)]
        )
        nearest = np.square(rows[:, None] - means).sum(axis=2).argmin(axis=1)
        found.append(float((nearest == graph.labels)[graph.test_mask].mean()))
    return found[0], found[1]


def test_rmat_has_hubs_at_scattered_ids_and_no_edge_twice() -> None:
    summary = summarize(graph := load("rmat", scale=11, num_edges=20_000))
    assert (summary.num_nodes, summary.num_edges, summary.duplicate_edges, summary.self_loops) == (2048, 20_000, 0, 0)
    assert summary.max_in_degree > 12 * summary.mean_in_degree
    assert summary.isolated_nodes > 0
    hubs = np.argsort(-graph.in_degrees)[:64]  # unscrambled, hubs have few bits set and lie at small ids
    assert 700 < hubs.mean() < 1350
    even = summarize(load("rmat", scale=11, num_edges=20_000, a=0.25, b=0.25, c=0.25))
    assert even.max_in_degree < 4 * even.mean_in_degree


def test_rmat_labels_can_be_read_off_the_neighborhood() -> None:
    graph = load_graph(
        "rmat", root=None, seed=1, undirected=True, self_loops="keep",
        options={"num_nodes": 3000, "num_edges": 15_000, "num_classes": 4, "feature_noise": 0.3},
    )  # fmt: skip
    own, around = nearest_centroid_accuracy(graph)
    assert own < around - 0.05


def test_rmat_takes_a_number_of_nodes_that_is_no_power_of_two() -> None:
    graph = load("rmat", num_nodes=1001, num_edges=5000)
    assert (graph.num_nodes, graph.num_edges) == (1001, 5000)
    assert graph.indices.max() > 900


def test_a_graph_without_edges_is_a_graph() -> None:
    assert load("sbm", num_nodes=50, num_edges=0, num_blocks=2).num_edges == 0
    assert load("rmat", num_nodes=50, num_edges=0).num_edges == 0


def test_edges_that_cannot_be_found_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gtx.datasets"):
        graph = load("rmat", num_nodes=64, num_edges=4000, a=0.97, b=0.01, c=0.01)
    assert f"has {graph.num_edges} edges where 4000 were asked for" in caplog.text


def test_undirected_and_self_loops_are_applied_in_this_order() -> None:
    graph = load_graph("digits", root=None, seed=0, undirected=True, self_loops="add", options={})
    summary = summarize(graph)
    assert (summary.directed, summary.self_loops, summary.duplicate_edges) == (False, 1797, 0)
    assert 8 < summary.mean_in_degree < 17


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sbm", {"homophilly": 0.5}, r"data\.options\.homophilly is no option of 'sbm'; it has .*homophily"),
        ("sbm", {"homophily": 1.5}, r"data\.options\.homophily is 1\.5; it must lie in 0\.\.1"),
        ("sbm", {"num_nodes": "1e6"}, r"data\.options\.num_nodes is '1e6'; expected a number"),
        ("sbm", {"num_nodes": 10.5}, "expected a whole number"),
        ("sbm", {"num_nodes": True}, "expected a number"),
        ("sbm", {"num_nodes": 20, "num_edges": 1000}, "only .* are possible; lower num_edges or change homophily"),
        ("sbm", {"num_nodes": 5, "num_blocks": 6}, "num_blocks is 6, more than num_nodes 5"),
        ("rmat", {"scale": 4, "num_nodes": 16}, "both scale and num_nodes"),
        ("rmat", {"a": 0.6, "b": 0.3, "c": 0.2}, "add up to"),
        ("rmat", {"num_nodes": 3, "num_edges": 7}, "have room for 6"),
        ("digits", {"neighbors": 1797}, r"neighbors is 1797; it must lie in 1\.\.1796"),
        ("cora", {"normalize": "column"}, "normalize is 'column'; choose one of none, row"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, **options)


def test_unknown_names_and_negative_seeds_are_errors() -> None:
    with pytest.raises(
        ValueError,
        match="'karate', which is no known graph; choose one of table, dgl-partition, digits, sbm, rmat, cora",
    ):
        load("karate")
    with pytest.raises(ValueError, match="seed is -1"):
        load("digits", seed=-1)
    assert set(PACKED) < set(graph_names())


def test_a_whole_float_is_taken_for_an_integer() -> None:
    assert load("sbm", num_nodes=1e2, num_edges=2e2, num_blocks=2.0).num_nodes == 100


# ---------------------------------------------------------------------------------------------------------------------
# Packed graphs


def write_packed(root: Path, **changes: Any) -> Path:
    """A five-node stand-in for cora."""
    arrays: dict[str, Any] = {
        "edge_index": np.array([[0, 1, 1, 2], [1, 0, 2, 1]], dtype=np.int32),
        "x_data": np.array([1, 3, 2], dtype=np.uint8),
        "x_indices": np.array([0, 2, 1], dtype=np.int32),
        "x_indptr": np.array([0, 2, 2, 3, 3, 3]),
        "x_shape": np.array([5, 3]),
        "y": np.array([0, 1, 1, 0, 0]),
        "train_mask": np.array([True, False, False, False, False]),
        "val_mask": np.array([False, True, False, False, False]),
        "test_mask": np.array([False, False, True, True, False]),
    } | changes
    path = root / "cora" / "cora.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def test_packed_features_are_unpacked_and_normalized_on_request(tmp_path: Path) -> None:
    write_packed(tmp_path)
    graph = load("cora", root=tmp_path)
    assert graph.features.tolist() == [[1, 0, 3], [0, 0, 0], [0, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert load("cora", root=tmp_path, normalize="row").features[:3].tolist() == [[0.25, 0, 0.75], [0, 0, 0], [0, 1, 0]]
    dense = np.arange(10.0).reshape(5, 2)
    write_packed(tmp_path, x=dense, x_data=None, x_shape=None)
    assert load("cora", root=tmp_path).features.tolist() == dense.tolist()


def test_packed_nodes_that_are_not_labelled_have_no_label(tmp_path: Path) -> None:
    write_packed(tmp_path, labelled=np.array([True, True, False, True, False]))
    assert load("cora", root=tmp_path).labels.tolist() == [0, 1, -1, 0, -1]


def test_packed_splits_are_chosen_by_number(tmp_path: Path) -> None:
    eye = np.eye(5, dtype=bool)
    masks = {"train_masks": eye[:3], "val_masks": eye[1:4], "test_masks": eye[2:5]}
    write_packed(tmp_path, train_mask=None, val_mask=None, test_mask=None, **masks)
    graph = load("cora", root=tmp_path, split=2)
    assert [int(np.argmax(getattr(graph, mask))) for mask in MASKS] == [2, 3, 4]
    with pytest.raises(ValueError, match=r"data\.split is 3, but 'cora' has split\(s\) 0\.\.2"):
        load("cora", root=tmp_path, split=3)


def test_a_missing_or_damaged_file_is_one_error_that_says_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set data\.root to the one that holds cora/cora\.npz"):
        load("cora")
    with pytest.raises(ValueError, match=r"there is no file .*cora\.npz; set data\.root"):
        load("cora", root=tmp_path / "nowhere")
    write_packed(tmp_path, val_mask=None)
    with pytest.raises(ValueError, match="its file has no array 'val_mask'"):
        load("cora", root=tmp_path)
    path = write_packed(tmp_path, y=None)
    with pytest.raises(
        ValueError, match=r"is no packed graph \(KeyError: 'y'\); restore the file or change data\.root"
    ):
        load("cora", root=tmp_path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="is no packed graph"):
        load("cora", root=tmp_path)
    path.write_bytes(b"not a zip archive")
    with pytest.raises(ValueError, match="is no packed graph"):
        load("cora", root=tmp_path)


@pytest.fixture(scope="module")
def data_root() -> Path:
    given = os.environ.get("GTX_DATA_ROOT")
    root = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not root.is_dir():
        pytest.skip(f"no packed graphs at {root}; set GTX_DATA_ROOT to the folder that holds cora/cora.npz")
    return root


@pytest.mark.parametrize("name", PACKED)
def test_packed_graphs_have_the_stated_counts(name: str, data_root: Path) -> None:
    num_nodes, num_edges, num_features, num_classes, split_sizes = PACKED[name]
    summary = summarize(graph := load(name, root=data_root))
    assert (summary.num_nodes, summary.num_edges) == (num_nodes, num_edges)
    assert (summary.num_features, summary.num_classes) == (num_features, num_classes)
    assert (summary.directed, summary.duplicate_edges, summary.self_loops) == (False, 0, 0)
    if any(split_sizes):
        assert (summary.num_train, summary.num_val, summary.num_test) == split_sizes
    assert graph.metric == ("roc_auc" if name in ("minesweeper", "tolokers") else "accuracy")
    assert graph.name == name


def test_cora_has_the_published_homophily(data_root: Path) -> None:
    graph = load("cora", root=data_root)
    source, destination = edge_list(graph)
    assert (graph.labels[source] == graph.labels[destination]).mean() == pytest.approx(0.81, abs=0.005)


def test_ten_splits_differ_and_an_alias_is_the_same_graph(data_root: Path) -> None:
    masks = {load("texas", root=data_root, split=split).train_mask.tobytes() for split in range(10)}
    assert len(masks) == 10
    assert same(load("squirrel", root=data_root), load("squirrel_filtered", root=data_root), *STRUCTURE, *MASKS)
    with pytest.raises(ValueError, match=r"has split\(s\) 0\.\.9"):
        load("texas", root=data_root, split=10)
    with pytest.raises(ValueError, match=r"has split\(s\) 0\.\.0"):
        load("cora", root=data_root, split=1)
