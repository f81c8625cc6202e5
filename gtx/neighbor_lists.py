"""Neighbour lists by random walks, made once for a partitioned graph and kept on disk beside it.

Not here: the walks (`sparse_engine/walks.py`) and what is done with a list (`parallel/compiler.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gtx.folders import open_array, read_manifest, settle, write_beside
from gtx.partition import PartitionedGraph
from sparse_engine import PURPOSE_WALKS, keys, most_visited

logger = logging.getLogger(__name__)

FORMAT = "gtx-neighbor-lists"
FORMAT_VERSION = 1
_DTYPES = {"indptr": ("int64",), "indices": ("int32", "int64"), "visits": ("int32",)}


@dataclass(frozen=True)
class ListFacts:
    """How lists were made and what they take.

    entries: of all lists. bytes: of their arrays. seconds: wall time of walking, not of reading or writing.
    fingerprint: sha256 of the partition's fingerprint and of all that decides the lists: equal means interchangeable.
    """

    fanout: int
    walks: int
    restart: float
    seed: int
    entries: int
    bytes: int
    seconds: float
    fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, eq=False)
class NeighborLists:
    """The nodes that random walks from each node visit most, in ids of the partitioned graph.

    indptr: int64 `[N + 1]`. indices: the graph's dtype `[e]`, the most visited first. visits: int32 `[e]`.
    reused: whether they were there already. folder: where they are kept, None if only in memory.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[Any]
    visits: npt.NDArray[np.int32]
    facts: ListFacts
    reused: bool = False
    folder: Path | None = None


def walk_lists(graph: PartitionedGraph, fanout: int, walks: int, restart: float, seed: int) -> NeighborLists:
    """Walk from every node. Keyed by original ids: a node's list is the same however the graph is partitioned."""
    wanted = _fingerprint(graph, fanout, walks, restart, seed)
    begun = time.perf_counter()
    original = torch.from_numpy(np.asarray(graph.original_id))
    found = most_visited(
        torch.from_numpy(np.asarray(graph.graph.indptr)),
        torch.from_numpy(np.asarray(graph.graph.indices)),
        None,
        fanout,
        keys(seed, PURPOSE_WALKS, 0, -1, original),
        walks=walks,
        restart=restart,
        order=original,
    )
    seconds = time.perf_counter() - begun
    arrays = (found.indptr.numpy(), found.indices.numpy(), found.visits.numpy())
    num_bytes = sum(array.nbytes for array in arrays)
    facts = ListFacts(fanout, walks, restart, seed, len(arrays[1]), num_bytes, seconds, wanted)
    return NeighborLists(*arrays, facts)


def load_or_walk(
    graph: PartitionedGraph, fanout: int, walks: int, restart: float, seed: int, cache_dir: str | Path
) -> NeighborLists:
    """The lists from `cache_dir` if they are there for just this graph, else new ones, which are kept there.

    Several processes may do this at once. Why a folder that was there had to be made again is logged as a warning.
    """
    wanted = _fingerprint(graph, fanout, walks, restart, seed)
    folder = Path(cache_dir) / f"walks-{wanted[:16]}"
    found = _load_matching(folder, wanted)
    if isinstance(found, NeighborLists):
        return found
    if folder.exists():
        logger.warning("walking over %s again: %s", graph.graph.name, found)
    made = walk_lists(graph, fanout, walks, restart, seed)
    arrays = {name: getattr(made, name) for name in _DTYPES}
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "facts": made.facts.as_dict()}
    written = write_beside(folder, arrays, manifest)
    settle(written, folder, lambda: isinstance(_load_matching(folder, wanted), NeighborLists))
    kept = _load_matching(folder, wanted)
    if isinstance(kept, NeighborLists):
        return dataclasses.replace(kept, reused=False)
    logger.warning("the neighbour lists of %s are used without being kept: %s", graph.graph.name, kept)
    return made


def load_lists(folder: Path) -> NeighborLists:
    """Open what `load_or_walk` kept, memory-mapped. Raises ValueError if it is missing or damaged."""
    try:
        manifest = read_manifest(folder, FORMAT, FORMAT_VERSION)
        arrays = {name: open_array(folder, name, manifest["arrays"][name], kinds) for name, kinds in _DTYPES.items()}
        lists = NeighborLists(**arrays, facts=ListFacts(**manifest["facts"]), reused=True, folder=folder)
        if lists.indptr[0] != 0 or lists.indptr[-1] != len(lists.indices) or len(lists.visits) != len(lists.indices):
            raise ValueError("its arrays do not belong together")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} holds no usable neighbour lists ({reason}); delete the folder") from error
    return lists


def _load_matching(folder: Path, wanted: str) -> NeighborLists | str:
    """What `folder` holds if its fingerprint is `wanted`, else the reason why not."""
    try:
        lists = load_lists(folder)
    except ValueError as error:
        return str(error)
    return lists if lists.facts.fingerprint == wanted else f"{folder} was made from another graph or by other walks"


def _fingerprint(graph: PartitionedGraph, fanout: int, walks: int, restart: float, seed: int) -> str:
    head = [FORMAT, FORMAT_VERSION, graph.facts.fingerprint, fanout, walks, restart, seed]
    return hashlib.sha256(json.dumps(head).encode()).hexdigest()
