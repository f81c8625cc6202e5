"""What a model takes of each node beside its features, made once for a graph and kept on disk beside its partitions.

Not here: how the numbers are found (`encodings.py`) and what a model makes of them (`models/model.py`).

Legend: `N` nodes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from gtx.encodings import degree_encoding, hop_features, laplacian_encoding, random_walk_encoding
from gtx.folders import open_array, read_manifest, settle, write_beside
from gtx.graphs import Graph, Int64Array

logger = logging.getLogger(__name__)

Float32Array = npt.NDArray[np.float32]

FORMAT = "gtx-node-inputs"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class InputFacts:
    """How one kind of input was made and what it takes.

    size: what was asked for, such as the number of eigenvectors. columns: that it has. bytes: of its array. seconds:
    wall time of making it, not of reading or writing. fingerprint: sha256 of all that decides it.
    """

    kind: str
    size: int
    columns: int
    bytes: int
    seconds: float
    fingerprint: str


@dataclass(frozen=True, eq=False)
class NodeInput:
    """One kind of input, float32 `[N, columns]` in the graph's own ids, whatever the partitioning.

    reused: whether it was there already. folder: where it is kept, None if only in memory.
    """

    array: Float32Array
    facts: InputFacts
    reused: bool = False
    folder: Path | None = None


@dataclass(frozen=True, eq=False)
class NodeInputs:
    """All kinds, side by side in the order in which the model asked for them."""

    kinds: tuple[NodeInput, ...]

    def rows(self, original_ids: Int64Array) -> Float32Array:
        """float32 `[n, all columns]`."""
        return np.concatenate([np.asarray(kind.array)[original_ids] for kind in self.kinds], axis=1)

    @property
    def folders(self) -> tuple[Path | None, ...]:
        return tuple(kind.folder for kind in self.kinds)

    def report(self) -> dict[str, Any]:
        """What each is and took, for the strategy report: `laplacian_seconds` and so on."""
        facts: dict[str, Any] = {}
        for one in self.kinds:
            kept = {key: getattr(one.facts, key) for key in ("columns", "bytes", "seconds")}
            facts |= {f"{one.facts.kind}_{key}": value for key, value in {**kept, "reused": one.reused}.items()}
        return facts


def make_input(graph: Graph, kind: str, size: int) -> NodeInput:
    """One kind: `laplacian` or `random_walk` of `size` columns, `degree`, or the features of `size` hops.

    Raises:
        ValueError: where the eigenvectors cannot be found.
    """
    begun = time.perf_counter()
    array = _MAKERS[kind](graph, size)
    seconds = time.perf_counter() - begun
    facts = InputFacts(kind, size, array.shape[1], array.nbytes, seconds, _fingerprint(graph, kind, size))
    return NodeInput(array, facts)


def load_or_make(graph: Graph, wanted: Sequence[tuple[str, int]], cache_dir: str | Path) -> NodeInputs | None:
    """The inputs of these kinds and sizes from `cache_dir`, made and kept there where they are missing; None if empty.

    Several processes may do this at once. Why a folder that was there had to be made again is logged as a warning.

    Raises:
        ValueError: as `make_input`.
    """
    return NodeInputs(tuple(_load_or_make(graph, *one, Path(cache_dir)) for one in wanted)) if wanted else None


def load_inputs(folders: Sequence[Path]) -> NodeInputs | None:
    """Open what `load_or_make` kept, memory-mapped; None if empty. Raises ValueError if one is missing or damaged."""
    return NodeInputs(tuple(_load(folder) for folder in folders)) if folders else None


_MAKERS: dict[str, Callable[[Graph, int], Float32Array]] = {
    "laplacian": laplacian_encoding,
    "random_walk": random_walk_encoding,
    "degree": lambda graph, size: degree_encoding(graph),
    "hops": hop_features,
}


def _load_or_make(graph: Graph, kind: str, size: int, cache_dir: Path) -> NodeInput:
    fingerprint = _fingerprint(graph, kind, size)
    folder = cache_dir / f"{kind}-{size}-{fingerprint[:16]}"
    found = _load_matching(folder, fingerprint)
    if isinstance(found, NodeInput):
        return found
    if folder.exists():
        logger.warning("making %s of %s again: %s", kind, graph.name, found)
    made = make_input(graph, kind, size)
    manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "facts": dataclasses.asdict(made.facts)}
    written = write_beside(folder, {"array": made.array}, manifest)
    settle(written, folder, lambda: isinstance(_load_matching(folder, fingerprint), NodeInput))
    kept = _load_matching(folder, fingerprint)
    if isinstance(kept, NodeInput):
        return dataclasses.replace(kept, facts=made.facts, reused=False)
    logger.warning("%s of %s is used without being kept: %s", kind, graph.name, kept)
    return made


def _load(folder: Path) -> NodeInput:
    try:
        manifest = read_manifest(folder, FORMAT, FORMAT_VERSION)
        array = open_array(folder, "array", manifest["arrays"]["array"], ("float32",))
        facts = InputFacts(**manifest["facts"])
        if array.ndim != 2 or array.shape[1] != facts.columns:
            raise ValueError(f"array.npy has shape {list(array.shape)}; the manifest says {facts.columns} columns")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} holds no usable input ({reason}); delete the folder") from error
    return NodeInput(array, facts, reused=True, folder=folder)


def _load_matching(folder: Path, fingerprint: str) -> NodeInput | str:
    """What `folder` holds if its fingerprint is the one given, else the reason why not."""
    try:
        found = _load(folder)
    except ValueError as error:
        return str(error)
    return found if found.facts.fingerprint == fingerprint else f"{folder} was made from another graph or version"


def _fingerprint(graph: Graph, kind: str, size: int) -> str:
    """sha256 over what decides an input: the edges, for `hops` features, what is asked for and the versions at work."""
    head = [FORMAT, FORMAT_VERSION, kind, size, np.__version__, scipy.__version__, graph.num_nodes]
    digest = hashlib.sha256(json.dumps(head).encode())
    for array in (graph.indptr, graph.indices, *([graph.features] if kind == "hops" else [])):
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
