"""What `dgl.distributed.partition_graph` wrote is read back: the same graph, node by node, in DGL's own partition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import awkward_graph, small_graph

from gtx.config import parse_config
from gtx.convert import to_dgl
from gtx.datasets import load_graph
from gtx.graphs import Graph
from gtx.parallel.world import solo
from gtx.session import load_partitioned

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def graph_with_edge_features(plain: bool = False) -> Graph:
    """plain: a ring both ways, since DGL's METIS never ends on some graphs with isolated nodes and duplicates."""
    ring = [(i, (i + step) % 60) for i in range(60) for step in (1, -1)]
    graph = small_graph(ring, 60, train=[0, 1, 2]) if plain else awkward_graph()
    rng = np.random.default_rng(3)
    return replace(graph, edge_features=rng.standard_normal((graph.num_edges, 2)).astype(np.float32))


def written(graph: Graph, folder: Path, method: str = "random", *, numbers: bool = True, parts: int = 3) -> Any:
    """Partition it by DGL; returns the original number of each of DGL's nodes."""
    import dgl.distributed

    made = to_dgl(graph)
    made.ndata.pop(dgl.NID, None)
    if numbers:
        made.ndata["orig_id"] = torch.arange(graph.num_nodes)
    nodes, _ = dgl.distributed.partition_graph(
        made, "toy", parts, str(folder), part_method=method, num_hops=1, return_mapping=True
    )
    return nodes


def load(root: Path, **options: Any) -> Graph:
    return load_graph("dgl-partition", root=root, seed=0, undirected=False, self_loops="keep", options=options, split=0)


def rows_of(graph: Graph) -> list[list[tuple[float, ...]]]:
    """The edges of each row with their features; edges that come twice are in no order."""
    assert graph.edge_features is not None
    pairs = np.column_stack([graph.indices, graph.edge_features]).tolist()
    bounds = zip(graph.indptr[:-1], graph.indptr[1:], strict=True)
    return [sorted(tuple(pair) for pair in pairs[a:b]) for a, b in bounds]


def check_same(read: Graph, graph: Graph) -> None:
    assert rows_of(read) == rows_of(graph)
    for key in ("indptr", "indices", "features", "labels", "train_mask", "val_mask", "test_mask"):
        assert np.array_equal(getattr(read, key), getattr(graph, key)), key


@pytest.mark.parametrize("method", ["random", "metis"])
def test_the_graph_is_read_back_in_its_own_order(tmp_path: Path, method: str) -> None:
    graph = graph_with_edge_features(plain=method == "metis")
    original = np.asarray(written(graph, tmp_path, method))
    read = load(tmp_path)
    check_same(read, graph)
    assert read.assignment is not None
    sizes = np.bincount(read.assignment.part_of, minlength=3)
    bounds = np.cumsum(sizes)
    dgl_part = np.searchsorted(bounds, np.arange(graph.num_nodes), side="right")  # DGL numbers part by part
    assert np.array_equal(read.assignment.part_of[original], dgl_part)


def test_the_mapping_that_dgl_returned_gives_the_order_too(tmp_path: Path) -> None:
    graph = graph_with_edge_features()
    mapping = written(graph, tmp_path, numbers=False)
    unordered = load(tmp_path)
    assert np.array_equal(unordered.features, graph.features[mapping])  # in DGL's order
    torch.save(mapping, tmp_path / "nodes.pt")
    check_same(load(tmp_path, original_id="nodes.pt"), graph)
    np.save(tmp_path / "nodes.npy", mapping)
    check_same(load(tmp_path, original_id="nodes.npy"), graph)
    with pytest.raises(ValueError, match=r"has no ndata 'nid'; name a key of ndata, or a \.npy or \.pt file"):
        load(tmp_path, original_id="nid")
    np.save(tmp_path / "nodes.npy", mapping * 0)
    with pytest.raises(ValueError, match="does not name each of the 60 nodes once"):
        load(tmp_path, original_id="nodes.npy")


def test_its_partition_is_the_runs_partition(tmp_path: Path) -> None:
    written(graph_with_edge_features(), tmp_path / "dgl")
    read = load(tmp_path / "dgl")
    sections = {
        "data": {"name": "dgl-partition", "root": str(tmp_path / "dgl")},
        "partition": {"parts": 3, "cache": str(tmp_path / "cache")},
    }
    loaded = load_partitioned(parse_config(sections), solo())
    again = load_partitioned(parse_config(sections), solo())
    assert read.assignment is not None
    assert (loaded.reused, again.reused) == (False, True)
    for made in (loaded.partitioned, again.partitioned):
        assert made.facts.method == "given"
        assert np.array_equal(made.part_of, read.assignment.part_of[made.original_id])
    with pytest.raises(ValueError, match=r"parts is 4, but graph 'toy' came in 3 parts .* set partition\.parts to 3"):
        load_partitioned(parse_config(sections, ["partition.parts=4", "batch.parts=1"]), solo())
    cut = load_partitioned(parse_config(sections, ["partition.method=hash", "partition.parts=4"]), solo())
    assert cut.partitioned.num_parts == 4
    with pytest.raises(ValueError, match=r"partition\.method given needs .* data\.name dgl-partition; it is digits"):
        parse_config({"partition": {"method": "given"}})


def test_what_is_wrong_with_a_folder_is_one_line(tmp_path: Path) -> None:
    def fails(root: Path, message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message) as raised:
            load(root, **options)
        assert "\n" not in str(raised.value)

    fails(tmp_path, r"holds 0 \.json files; give the folder that dgl\.distributed\.partition_graph wrote")
    (tmp_path / "toy.json").write_text("{}")
    fails(tmp_path, r"toy\.json is no file of dgl\.distributed\.partition_graph: it has no num_parts")
    (tmp_path / "toy.json").write_text("{")
    fails(tmp_path, r"toy\.json is no file of dgl\.distributed\.partition_graph \(")
    (tmp_path / "toy.json").unlink()
    written(graph_with_edge_features(), tmp_path)
    fails(tmp_path, r"has no ndata 'x', it has .*'label'.*; say which is meant", features="x")
    fails(tmp_path, r"has no edata 'x', it has 'feat'", edge_features="x")
    (tmp_path / "part1" / "node_feat.dgl").unlink()
    fails(tmp_path, r"part 1 cannot be read \(.*\); run partition_graph again")
    with pytest.raises(ValueError, match=r"needs data\.root; set it to the folder"):
        load_graph("dgl-partition", root=None, seed=0, undirected=False, self_loops="keep", options={})
