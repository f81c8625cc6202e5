"""Sets of DGL, PyG and OGB, loaded by these libraries from files as they come: the same graph, split and labels.

The files are written here in the format that the libraries download; no test asks the network.
"""

from __future__ import annotations

import gzip
import hashlib
import pickle
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from gtx.datasets import load_graph
from gtx.graphs import Graph, edge_list

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what the libraries call
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NUM_NODES, NUM_TRAIN, NUM_TEST = 660, 30, 60


def load(name: str, root: Path | None, split: int = 0, **options: Any) -> Graph:
    return load_graph(
        name, root=root, seed=0, split=split, undirected=False, self_loops="keep", options=options, dedupe=False
    )


def edges_of(graph: Graph) -> set[tuple[int, int]]:
    source, destination = edge_list(graph)
    return set(zip(source.tolist(), destination.tolist(), strict=True))


def planetoid_files(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray, set[tuple[int, int]]]:
    """A small set in the eight files of Yang et al. 2016: features [N, 8], labels [N] and undirected edges."""
    rng = np.random.default_rng(0)
    features = (rng.random((NUM_NODES, 8)) < 0.4).astype(np.float32)
    features[:, 0] = 1
    labels = rng.integers(0, 3, NUM_NODES)
    labels[:3] = [0, 1, 2]
    links: dict[int, list[int]] = defaultdict(list)
    for i in range(NUM_NODES):  # a ring, so that the nodes of the dict are 0, 1, ... in order
        links[i] = [(i + 1) % NUM_NODES, (i - 1) % NUM_NODES]
    one_hot = np.eye(3, dtype=np.int32)[labels]
    border = NUM_NODES - NUM_TEST
    order = border + rng.permutation(NUM_TEST)  # the test rows are stored in the order of test.index
    parts: dict[str, Any] = {
        "x": sp.csr_matrix(features[:NUM_TRAIN]),
        "y": one_hot[:NUM_TRAIN],
        "allx": sp.csr_matrix(features[:border]),
        "ally": one_hot[:border],
        "tx": sp.csr_matrix(features[order]),
        "ty": one_hot[order],
        "graph": links,
    }
    folder.mkdir(parents=True)
    for key, value in parts.items():
        (folder / f"ind.{prefix}.{key}").write_bytes(pickle.dumps(value))
    (folder / f"ind.{prefix}.test.index").write_text("".join(f"{i}\n" for i in order))
    return features, labels, {(i, j) for i, ends in links.items() for j in ends}


def check_planetoid(graph: Graph, labels: np.ndarray, edges: set[tuple[int, int]]) -> None:
    assert graph.labels.tolist() == labels.tolist()
    assert edges_of(graph) == edges
    assert np.flatnonzero(graph.train_mask).tolist() == list(range(NUM_TRAIN))
    assert np.flatnonzero(graph.val_mask).tolist() == list(range(NUM_TRAIN, NUM_TRAIN + 500))
    assert np.flatnonzero(graph.test_mask).tolist() == list(range(NUM_NODES - NUM_TEST, NUM_NODES))
    assert (graph.num_classes, graph.metric) == (3, "accuracy")


def test_cora_of_pyg(tmp_path: Path) -> None:
    features, labels, edges = planetoid_files(tmp_path / "Cora" / "raw", "cora")
    graph = load("pyg:Planetoid/Cora", tmp_path)
    check_planetoid(graph, labels, edges)
    assert np.array_equal(graph.features, features)
    again = load("pyg:Planetoid/Cora", tmp_path, normalize="row")  # from what PyG has kept
    check_planetoid(again, labels, edges)
    assert np.allclose(again.features.sum(axis=1), 1)
    with pytest.raises(ValueError, match=r"split is 1, but train_mask of graph 'pyg:Planetoid/Cora' has split\(s\) 0"):
        load("pyg:Planetoid/Cora", tmp_path, split=1)


def test_cora_of_dgl(tmp_path: Path) -> None:
    from dgl.data.utils import _get_dgl_url

    suffix = hashlib.sha1(_get_dgl_url("dataset/cora_v2.zip").encode()).hexdigest()[:8]
    features, labels, edges = planetoid_files(tmp_path / f"cora_v2_{suffix}", "cora_v2")
    graph = load("dgl:CoraGraphDataset", tmp_path)
    check_planetoid(graph, labels, edges)
    assert np.allclose(graph.features, features / features.sum(axis=1, keepdims=True))  # as DGL hands them out
    check_planetoid(load("dgl:CoraGraphDataset", tmp_path), labels, edges)


def test_minesweeper_of_pyg_has_ten_splits_and_is_scored_by_roc_auc(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    kind = rng.integers(0, 3, (10, 40))
    folder = tmp_path / "minesweeper" / "raw"
    folder.mkdir(parents=True)
    np.savez(
        folder / "minesweeper.npz",
        node_features=rng.random((40, 7), dtype=np.float32),
        node_labels=np.arange(40) % 2,
        edges=np.stack([np.arange(39), np.arange(1, 40)], axis=1),
        train_masks=kind == 0,
        val_masks=kind == 1,
        test_masks=kind == 2,
    )
    graph = load("pyg:HeterophilousGraphDataset/Minesweeper", tmp_path, split=9)
    assert graph.test_mask.tolist() == (kind[9] == 2).tolist()
    assert graph.metric == "roc_auc"
    assert graph.num_edges == 78
    assert load("pyg:HeterophilousGraphDataset/Minesweeper", tmp_path, metric="accuracy").metric == "accuracy"
    with pytest.raises(ValueError, match=r"has split\(s\) 0\.\.9"):
        load("pyg:HeterophilousGraphDataset/Minesweeper", tmp_path, split=10)


def arxiv_files(folder: Path, num_nodes: int = 12) -> dict[str, np.ndarray]:
    """ogbn-arxiv in the files that OGB's archive holds."""
    rng = np.random.default_rng(2)
    order = rng.permutation(num_nodes)
    tables = {
        "raw/edge": np.stack([np.arange(num_nodes - 1), np.arange(1, num_nodes)], axis=1),
        "raw/num-node-list": np.array([[num_nodes]]),
        "raw/num-edge-list": np.array([[num_nodes - 1]]),
        "raw/node-feat": rng.random((num_nodes, 4)).round(3),
        "raw/node-label": rng.integers(0, 40, (num_nodes, 1)),
        "raw/node_year": np.full((num_nodes, 1), 2018),
        "split/time/train": order[:6, None],
        "split/time/valid": order[6:9, None],
        "split/time/test": order[9:, None],
    }
    for key, table in tables.items():
        path = folder / f"{key}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as stream:
            np.savetxt(stream, table, delimiter=",", fmt="%.3f" if table.dtype.kind == "f" else "%d")
    (folder / "processed").mkdir()
    (folder / "RELEASE_v1.txt").touch()
    return tables


def test_arxiv_of_ogb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = arxiv_files(tmp_path / "ogbn_arxiv")
    for _ in range(2):  # the files as they come, then what OGB made of them
        graph = load("ogb:ogbn-arxiv", tmp_path)
        assert graph.labels.tolist() == tables["raw/node-label"][:, 0].tolist()
        assert np.allclose(graph.features, tables["raw/node-feat"])
        assert edges_of(graph) == {(int(a), int(b)) for a, b in tables["raw/edge"]}
        for mask, key in ((graph.train_mask, "train"), (graph.val_mask, "valid"), (graph.test_mask, "test")):
            assert np.flatnonzero(mask).tolist() == sorted(tables[f"split/time/{key}"][:, 0].tolist())
    assert sys.modules.get("outdated") is None  # nobody asked for the newest version
    with pytest.raises(ValueError, match=r"data\.split is 1, but ogb:ogbn-arxiv has one split, 0"):
        load("ogb:ogbn-arxiv", tmp_path, split=1)
    (tmp_path / "ogbn_arxiv" / "RELEASE_v1.txt").unlink()  # OGB would ask whether to replace them
    with pytest.raises(ValueError, match="its library asks before it downloads or replaces") as raised:
        load("ogb:ogbn-arxiv", tmp_path)
    assert "\n" not in str(raised.value)


def test_a_set_that_comes_with_its_library_needs_no_folder(tmp_path: Path) -> None:
    graph = load("pyg:KarateClub", None)
    assert (graph.num_nodes, graph.num_edges, graph.num_classes, int(graph.train_mask.sum())) == (34, 156, 4, 4)
    with pytest.raises(ValueError, match=r"data\.root .* has no effect: pyg:KarateClub comes with the library"):
        load("pyg:KarateClub", tmp_path)
    with pytest.raises(ValueError, match=r"has no ndata\['feat'\], it has 'label'"):
        load("dgl:KarateClubDataset", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dgl:CoraGrafDataset", r"dgl\.data has no 'CoraGrafDataset'; near it are CoraGraphDataset"),
        ("pyg:Planetoids/Cora", r"torch_geometric\.datasets has no 'Planetoids'; near it are Planetoid"),
        ("pyg:Planetoid", r"is of several sets; say which, as in pyg:Planetoid/Cora"),
        ("pyg:HeterophilousGraphDataset/Mine", r"Mine cannot be loaded from .*as for a name that is none"),
        ("pyg:Reddit/x", r"has no sets to choose from; leave out /x"),
        ("ogb:ogbn-arxive", r"has no 'ogbn-arxive'; near it are ogbn-arxiv"),
        ("tgb:wiki", r"data\.name is 'tgb:wiki', which is no known graph; .*dgl:CLASS, pyg:CLASS/NAME or ogb:NAME"),
    ],
)
def test_a_name_that_is_none_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load(name, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["dgl:CoraGraphDataset", "pyg:Planetoid/Cora", "ogb:ogbn-arxiv"])
def test_no_folder_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=f"data.name {name} needs data.root; set it to the folder"):
        load(name, None)


@pytest.mark.parametrize("name", ["dgl:CoraGraphDataset", "pyg:Planetoid/Cora", "ogb:ogbn-arxiv"])
def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def unknown(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(
        ValueError, match=r"cannot be loaded from .*Name or service not known.*copy its files"
    ) as raised:
        load(name, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "module", "trouble"),
    [
        ("dgl:CoraGraphDataset", "dgl", OSError("libdgl.so: no such file")),
        ("pyg:Planetoid/Cora", "torch_geometric", ImportError("not here")),
        ("ogb:ogbn-arxiv", "ogb", ImportError("not here")),
    ],
)
def test_no_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, trouble: Exception
) -> None:
    import importlib

    real: Callable[..., Any] = importlib.import_module

    def broken(asked: str, *args: Any) -> Any:
        if asked.partition(".")[0] == module:
            raise trouble
        return real(asked, *args)

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ValueError, match=rf"data\.name {name} needs .*{trouble}.*pip install {module}"):
        load(name, tmp_path)


def test_labels_of_several_classes_a_node_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_geometric.datasets import KarateClub

    def several(self: Any, index: int) -> Any:
        data = self._data.clone()
        data.y = torch.ones(34, 5)
        return data

    monkeypatch.setattr(KarateClub, "__getitem__", several)
    with pytest.raises(ValueError, match=r"labels have shape \(34, 5\); expected \(34,\), one class per node"):
        load("pyg:KarateClub", None)
