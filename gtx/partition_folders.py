"""Reads the folders that `dgl.distributed.partition_graph` writes: the whole graph again, and where each node was put.

Not here: DGL's named sets (`libraries.py`), how an assignment becomes a partition (`partition.py`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gtx.convert import from_arrays
from gtx.frames import ids_as_array
from gtx.graphs import Assignment, Graph, Metric, Names

_MASKS = ("train_mask", "val_mask", "test_mask")


def read_partition_folder(
    folder: Path,
    *,
    features: str = "feat",
    label: str = "label",
    edge_features: str | None = None,
    original_id: str | None = None,
    metric: Metric = "accuracy",
    seed: int = 0,
    split: int = 0,
) -> Graph:
    """The graph of a folder with one JSON file of `partition_graph`, with DGL's assignment as `Graph.assignment`.

    DGL numbers nodes anew, part by part. Where the original number of each is known, nodes are in that order: from
    ndata `orig_id`, or from a `.npy` or `.pt` file of what `partition_graph(..., return_mapping=True)` returned for
    nodes. Elsewhere they stay in DGL's order.

    Args:
        features, label, edge_features: keys that ndata and edata had; for None edge features are `feat` or `w`, if any.
        original_id: the key in ndata, or the file (relative to the folder). If None `orig_id`, where there is one.
        seed, split: of the split that is drawn where no node has a mask.

    Raises:
        ValueError: one line that says what is missing or wrong.
    """
    config, about = _manifest(folder)
    try:
        import dgl
        from dgl.data.utils import load_tensors
    except (ImportError, OSError) as error:
        raise ValueError(
            f"data.name dgl-partition needs DGL, which cannot be imported ({error}); pip install dgl, or write the "
            "graph to tables where it can (gtx.convert.from_dgl, gtx.frames.to_frames)"
        ) from None

    parts, num_nodes, num_edges = (int(about[key]) for key in ("num_parts", "num_nodes", "num_edges"))
    ends = np.full((2, num_edges), -1, dtype=np.int64)
    assigned = np.full(num_nodes, -1, dtype=np.int32)
    node_data: dict[str, Any] = {}
    edge_data: dict[str, Any] = {}
    for part in range(parts):
        try:
            files = about[f"part-{part}"]
            (graph,), _ = dgl.load_graphs(str(config.parent / files["part_graph"]))
            inner, own = graph.ndata["inner_node"].bool(), graph.edata["inner_edge"].bool()
            nodes = graph.ndata[dgl.NID]
            source, destination = graph.edges(order="eid")
            edges = graph.edata[dgl.EID][own].numpy()
            ends[0, edges], ends[1, edges] = nodes[source[own]].numpy(), nodes[destination[own]].numpy()
            assigned[nodes[inner].numpy()] = part
            _fill(node_data, load_tensors(str(config.parent / files["node_feats"])), nodes[inner], num_nodes)
            _fill(edge_data, load_tensors(str(config.parent / files["edge_feats"])), torch.from_numpy(edges), num_edges)
        except (OSError, KeyError, IndexError, ValueError, RuntimeError, dgl.DGLError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{config}: part {part} cannot be read ({type(error).__name__}: {reason}); run partition_graph again"
            ) from None
    if (ends < 0).any() or (assigned < 0).any():
        raise ValueError(f"{config}: some of its {num_nodes} nodes or {num_edges} edges are in no part; run it again")

    for key in (features, label):
        if key not in node_data:
            raise ValueError(
                f"{config} has no ndata {key!r}, it has {', '.join(map(repr, node_data)) or 'nothing'}; say which is "
                "meant in data.options.features and data.options.label"
            )
    if edge_features is not None and edge_features not in edge_data:
        raise ValueError(
            f"{config} has no edata {edge_features!r}, it has {', '.join(map(repr, edge_data)) or 'nothing'}"
        )
    keys = [key for key in ("feat", "w") if key in edge_data] if edge_features is None else [edge_features]
    original = _original(config, node_data, original_id, num_nodes)
    order = np.argsort(original)  # the node of DGL's that comes first, second, ...
    graph_of_all = from_arrays(
        original[ends[0]],
        original[ends[1]],
        node_data[features][order],
        node_data[label][order],
        [node_data[key][order] if key in node_data else None for key in _MASKS],
        edge_data[keys[0]] if keys else None,
        name=str(about.get("graph_name", folder.name)),
        names=Names(ids_as_array(range(num_nodes))),
        metric=metric,
        seed=seed,
        split=split,
    )
    return replace(graph_of_all, assignment=Assignment(assigned[order], parts, "dgl.distributed.partition_graph"))


def _manifest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The JSON file and what it holds."""
    found = sorted(folder.glob("*.json")) if folder.is_dir() else [folder] if folder.suffix == ".json" else []
    if len(found) != 1:
        raise ValueError(
            f"data.root {folder} holds {len(found)} .json files; give the folder that dgl.distributed.partition_graph "
            "wrote, or its .json file"
        )
    try:
        about = json.loads(found[0].read_text(encoding="utf-8"))
        missing = [key for key in ("num_parts", "num_nodes", "num_edges", "ntypes", "etypes") if key not in about]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{found[0]} is no file of dgl.distributed.partition_graph ({error})") from None
    if missing:
        raise ValueError(f"{found[0]} is no file of dgl.distributed.partition_graph: it has no {', '.join(missing)}")
    if len(about["ntypes"]) != 1 or len(about["etypes"]) != 1:
        raise ValueError(f"{found[0]} has several types of nodes or edges; partition a graph of one type")
    return found[0], about


def _fill(into: dict[str, Any], found: dict[str, Tensor], at: Tensor, total: int) -> None:
    """Put the rows that a part has of each key to where they belong."""
    for full, rows in found.items():
        key = full.rpartition("/")[2]
        if key not in into:
            into[key] = torch.zeros(total, *rows.shape[1:], dtype=rows.dtype)
        into[key][at] = rows


def _original(config: Path, node_data: dict[str, Any], given: str | None, num_nodes: int) -> Any:
    """int64 [N]: the original number of each of DGL's nodes."""
    where = f"ndata {given or 'orig_id'!r}"
    if given is not None and Path(given).suffix in (".npy", ".pt"):
        path = config.parent / given
        where = f"data.options.original_id {path}"
        try:
            numbers = np.load(path) if path.suffix == ".npy" else torch.load(path, weights_only=True)
        except Exception as error:  # torch and numpy raise whatever they like
            raise ValueError(f"{where} cannot be read ({type(error).__name__}: {str(error)[:100]})") from None
    elif given is None and "orig_id" not in node_data:
        return np.arange(num_nodes)
    elif (given or "orig_id") in node_data:
        numbers = node_data[given or "orig_id"]
    else:
        raise ValueError(f"{config} has no {where}; name a key of ndata, or a .npy or .pt file")
    original = np.asarray(numbers)
    if original.shape != (num_nodes,) or not np.array_equal(np.sort(original), np.arange(num_nodes)):
        raise ValueError(f"{where} does not name each of the {num_nodes} nodes once; give their original numbers")
    return original.astype(np.int64)
