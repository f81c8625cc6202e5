"""What every command begins with: ranks joined, the graph loaded and cut into partitions, the attention code picked.

Not here: what is then done with them (`train.py`, `calibrate.py`, `show.py`).
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gtx.checkpoint import EngineState, Progress, find_checkpoint, read_checkpoint
from gtx.config import Config
from gtx.datasets import load_graph
from gtx.expander import with_expander
from gtx.graphs import Graph, GraphSummary, SplitOrigin, summarize
from gtx.neighbor_lists import load_lists, load_or_walk
from gtx.node_inputs import load_inputs, load_or_make
from gtx.orders import BLOCK, NEAR
from gtx.parallel.world import World, join_world, launched_ranks, leave_world
from gtx.partition import PartitionedGraph, PartitionFacts, load, load_or_partition
from sparse_engine import SparsePattern, auto_backends, fastest_backend, resolve_backend

Say = Callable[[str], None]


def silent(line: str) -> None:
    """A `Say` for the ranks that have nothing to tell."""


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """This rank's world, torn down at the end."""
    device = config.engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device is cuda and no CUDA device was found; use cpu or auto")
    _, size, _ = launched_ranks()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", size)))
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // local_size)
    torch.set_num_threads(threads)
    yield join_world(timeout_s=config.engine.timeout_s, device=device)
    leave_world()  # not after a failure: peers may be gone


def share_checkpoint(world: World, place: Path) -> tuple[Progress, EngineState]:
    """The checkpoint at `place`, read by rank 0. A collective.

    Raises ValueError with one line, on every rank, if there is none or it is damaged.
    """
    found: tuple[Progress, EngineState] | str = ""
    if world.rank == 0:
        try:
            found = read_checkpoint(find_checkpoint(place))
        except ValueError as error:
            found = str(error)
    found = world.from_first(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@dataclass(frozen=True)
class Loaded:
    """A graph ready to train on, the same on every rank. split: where its split is from, if that is known."""

    partitioned: PartitionedGraph
    summary: GraphSummary
    reused: bool
    split: SplitOrigin | None = None
    unused_edge_features: int = 0  # known where the graph was read

    def facts(self) -> dict[str, Any]:
        """How the graph was cut and what was made for it, for the strategy report."""
        facts = {**self.partitioned.facts.as_dict(), "reused": self.reused}
        for place in ("locality", "unordered"):
            facts |= {f"{place}_{key}": value for key, value in facts.pop(place).items()}
        lists = self.partitioned.lists
        if lists is not None:
            kept = ("walks", "restart", "entries", "bytes", "seconds")
            facts |= {f"lists_{key}": value for key, value in lists.facts.as_dict().items() if key in kept}
            facts["lists_reused"] = lists.reused
        inputs = self.partitioned.inputs
        return facts if inputs is None else {**facts, **inputs.report()}


def read_graph(config: Config) -> Graph:
    """The graph that the section `data` names. Raises ValueError with one line if it is not there or not right."""
    data = config.data
    return load_graph(
        data.name,
        root=data.root,
        seed=config.seed,
        split=data.split,
        nodes=data.nodes,
        edges=data.edges,
        dedupe=data.dedupe,
        undirected=data.undirected,
        self_loops=data.self_loops,
        standardize=data.standardize,
        edge_bias=config.model.edge_bias,
        options=data.options,
    )


def load_partitioned(config: Config, world: World | None = None, *, inputs: bool = False) -> Loaded:
    """Load and partition the graph once per host; the other ranks map the files that the first one wrote.

    inputs: whether what the model takes beside the features is loaded or made as well.
    Raises ValueError with one line, on every rank, if the first rank of any host fails.
    """

    wanted = config.model.input_kinds if inputs else ()

    def make() -> Loaded:
        graph = read_graph(config)
        unused = 0 if config.model.edge_bias else graph.num_edge_features
        graph = replace(graph, edge_features=None) if unused else graph
        part, data = config.partition, config.data
        seed = config.seed if part.seed is None else part.seed
        trained = with_expander(graph, config.model.added_degree, seed)
        partitioned, reused = load_or_partition(trained, part.method, part.parts, seed, part.cache, data.order)
        sampling = config.sampling
        if sampling.method == "random_walk":
            longest = max(fanout or 1 for fanout in sampling.per_layer(config.model.layers))
            walks = (longest, sampling.walks, sampling.restart, config.seed)
            partitioned = replace(partitioned, lists=load_or_walk(partitioned, *walks, part.cache))
        partitioned = replace(partitioned, inputs=load_or_make(graph, wanted, part.cache))
        return Loaded(partitioned, summarize(graph), reused, graph.split, unused)

    if world is None or world.size == 1:
        return make()
    host, local_rank = socket.gethostname(), launched_ranks()[2]
    made: Loaded | None = None
    error: str | None = None
    if local_rank == 0:
        try:
            made = make()
        except (ValueError, OSError) as problem:
            error = str(problem)
    folders = _folders(made.partitioned) if made else None
    told = (made.summary, made.reused, made.split) if made else None
    facts = world.gather_facts((host, local_rank, error, folders, told))
    for fact in facts:
        if fact[2] is not None:
            raise ValueError(fact[2])
    if made is not None:
        return made
    first = next(fact for fact in facts if fact[0] == host and fact[1] == 0)
    if first[3] is None:
        return make()  # the first rank could not keep its files
    folder, lists_folders, input_folders = first[3]
    partitioned = replace(load(folder), inputs=load_inputs(input_folders))
    for lists_folder in lists_folders:
        partitioned = replace(partitioned, lists=load_lists(lists_folder))
    return Loaded(partitioned, *first[4])


def _folders(graph: PartitionedGraph) -> tuple[Path, tuple[Path, ...], tuple[Path, ...]] | None:
    """Where a graph, its lists and its inputs are kept; None if any of them is not."""
    lists = () if graph.lists is None else (graph.lists.folder,)
    inputs = () if graph.inputs is None else graph.inputs.folders
    if graph.folder is None or None in lists or None in inputs:
        return None
    return graph.folder, tuple(filter(None, lists)), tuple(filter(None, inputs))


def attention_backend(config: Config, world: World, dtype: torch.dtype, say: Say, graph: PartitionedGraph) -> str:
    """The attention code that the config means on this machine; that it is the slow one is said in a line.

    A collective where `auto` has a choice, as on GPUs: rank 0 measures what all ranks can run on some rows of `graph`,
    and all take what it found. Steps measure nothing.

    Raises ValueError with one line if the backend that the config names cannot run.
    """
    asked = config.model
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        backend = resolve_backend(asked.backend, world.device, dtype)
        if asked.backend == "auto" and world.device.type != "cpu" and asked.name not in _WITHOUT_ATTENTION:
            backend = _agreed_backend(config, world, dtype, say, graph)
    for warning in warned:
        say(f"note: {warning.message}")
    return backend


def _agreed_backend(config: Config, world: World, dtype: torch.dtype, say: Say, graph: PartitionedGraph) -> str:
    offered = world.gather_facts(auto_backends(world.device, dtype))
    common = [name for name in offered[0] if all(name in names for names in offered)]  # torch runs everywhere
    fastest = common[0]
    if len(common) > 1:
        if world.rank == 0:
            head_dim = config.model.width // config.model.heads
            pattern = some_rows(graph.graph, _TRIED_EDGES).to(world.device)
            fastest = fastest_backend(pattern, config.model.heads, head_dim, dtype, common)
        fastest = world.from_first(fastest)
    say(f"attention by {fastest}" + (f", the fastest of {', '.join(common)}" if len(common) > 1 else ""))
    return fastest


_WITHOUT_ATTENTION = ("GPS", "SGFormer", "NAGphormer", "GCN", "SAGE", "MLP")  # over edges
_TRIED_EDGES = 2**21  # enough that a launch costs nothing beside them


def some_rows(graph: Graph, num_edges: int) -> SparsePattern:
    """The first rows of a graph that hold at most `num_edges` edges, at least one row, over the columns they name."""
    num_rows = max(1, int(np.searchsorted(graph.indptr, num_edges, side="right")) - 1)
    indptr = torch.from_numpy(np.array(graph.indptr[: num_rows + 1], dtype=np.int64))
    columns, indices = np.unique(np.asarray(graph.indices[: int(indptr[-1])]), return_inverse=True)
    return SparsePattern(indptr, torch.from_numpy(indices.astype(np.int64)), max(1, len(columns)))


def tell_graph(loaded: Loaded, say: Say, *, order: bool = False) -> None:
    """Lines on the graph, how it is cut, its order in memory if it has one or `order`, its lists and inputs if any."""
    summary, facts = loaded.summary, loaded.partitioned.facts
    kind = "directed" if summary.directed else "undirected"
    say(
        f"graph {loaded.partitioned.graph.name}: {summary.num_nodes:,} nodes, {summary.num_edges:,} {kind} edges, "
        f"{summary.num_features} features, {summary.num_classes} classes; {summary.isolated_nodes} isolated nodes, "
        f"{summary.duplicate_edges} duplicate edges, {summary.self_loops} self loops"
    )
    if loaded.unused_edge_features:
        say(
            f"note: {loaded.unused_edge_features} edge features are not used; "
            "attention takes them with model.edge_bias=true"
        )
    types = loaded.partitioned.graph.edge_types
    if types is not None:
        say(f"expander: {np.count_nonzero(types):,} random edges added, each way one")
    made = "reused" if loaded.reused else f"made in {facts.seconds:.1f} s"
    say(
        f"partitions: {facts.parts} by {facts.method} ({facts.implementation}), {made}; cut {facts.cut_fraction:.1%}, "
        f"balance {facts.node_balance:.2f} nodes, {facts.edge_balance:.2f} edges"
    )
    if order or facts.order != "none":
        say(_told_order(facts))
    lists = loaded.partitioned.lists
    if lists is not None:
        made = "reused" if lists.reused else f"made in {lists.facts.seconds:.1f} s"
        say(
            f"neighbour lists: at most {lists.facts.fanout} nodes each by {lists.facts.walks} walks, {made}; "
            f"{lists.facts.entries:,} entries, {lists.facts.bytes / 2**20:.1f} MiB"
        )
    for given in loaded.partitioned.inputs.kinds if loaded.partitioned.inputs else ():
        made = "reused" if given.reused else f"made in {given.facts.seconds:.1f} s"
        size = given.facts.bytes / 2**20
        say(f"inputs beside the features: {given.facts.columns} columns of {given.facts.kind}, {made}; {size:.1f} MiB")


def _told_order(facts: PartitionFacts) -> str:
    """How near the ends of edges lie in memory, and what the order brought for its seconds."""
    now, before = facts.locality, facts.unordered
    if facts.order == "none":
        return (
            f"order in memory: none; edges within {NEAR:,} rows {now.near_fraction:.1%}, mean gap {now.mean_gap:,.0f} "
            f"rows, {now.edges_per_source:.2f} edges a source of {BLOCK} rows"
        )
    gained = 100 * (now.near_fraction - before.near_fraction) / max(facts.order_s, 1e-9)
    return (
        f"order in memory: {facts.order}, made in {facts.order_s:.2f} s; edges within {NEAR:,} rows "
        f"{before.near_fraction:.1%} -> {now.near_fraction:.1%} ({gained:+.1f} points a second), mean gap "
        f"{before.mean_gap:,.0f} -> {now.mean_gap:,.0f} rows, {before.edges_per_source:.2f} -> "
        f"{now.edges_per_source:.2f} edges a source of {BLOCK} rows"
    )
