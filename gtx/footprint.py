"""How many bytes of activations a model takes, a row and an edge: counted in steps of it on small graphs.

A layer's own code decides what autograd keeps, so that it is run and not modelled: the bytes of all tensors alive are
followed through a training step, on two numbers of rows, of edges and of layers, and what differs between them is what
a row, an edge and a layer take. Not here: what a plan makes of that (`scheduler/cost.py`), and what it is compared with
(`budget.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from gtx.batches import BatchPlanner
from gtx.config import BatchConfig, EngineConfig, ModelConfig, SamplingConfig
from gtx.engine import TorchEngine
from gtx.graphs import Graph, from_edges
from gtx.models import GraphModel
from gtx.node_inputs import InputFacts, NodeInput, NodeInputs
from gtx.parallel.compiler import Compiler
from gtx.parallel.executor import Executor
from gtx.parallel.world import solo
from gtx.partition import partition
from monitor import PhaseTimer
from scheduler.plan import CHECKPOINTING, Checkpointing, fixed_plan
from scheduler.workload import Footprint

_ROWS, _EDGES = 1024, 4096
_MORE_LAYERS = 2


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made inside and are still alive: `now`, and `peak` of it.

    A storage counts once, however many tensors view it, from the operation that returns it until nothing holds it. What
    an operation takes and gives back inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage in self._seen:
                continue
            if given is None:
                leaves = tree_leaves((args, kwargs))
                given = {t.untyped_storage().data_ptr() for t in leaves if isinstance(t, Tensor)}
            self._seen[storage] = None
            if storage.data_ptr() in given:
                continue  # a view of what was there before
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, size)
        return out

    def _gone(self, size: int) -> None:
        self.now -= size


class _NoSteps(TorchEngine):
    """Computes gradients, and drops them: a step of the optimizer is no activation."""

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def measure_footprints(
    config: ModelConfig,
    num_features: int,
    num_classes: int,
    *,
    precision: str = "float32",
    backend: str = "torch",
    kinds: Collection[Checkpointing] = CHECKPOINTING,
) -> tuple[Footprint, ...]:
    """What a layer of the model holds and what is alive besides, for each kind of checkpointing.

    config: of the model; its number of layers does not matter. precision: of activations. backend: of the attention,
    as it runs on a CPU. Takes about half a second a kind; what was measured before in this process is not measured
    again. Bytes of the rows of features are left out of `live_row`, since every wave has its own.

    Raises whatever the model raises.
    """
    fewest = config.global_layers + 1  # Polynormer has one layer with edges then; other models read no such number
    wanted = config.model_copy(update={"layers": fewest}).model_dump_json()
    return tuple(_measure(wanted, num_features, num_classes, precision, backend, kind) for kind in kinds)


@lru_cache(maxsize=64)
def _measure(
    config_json: str, num_features: int, num_classes: int, precision: str, backend: str, kind: Checkpointing
) -> Footprint:
    config = ModelConfig.model_validate_json(config_json)

    def peak(layers: int, rows: int, edges: int) -> float:
        deep = config.model_copy(update={"layers": layers})
        graph = _random_graph(rows, edges, num_features, num_classes, edge_features=config.edge_bias)
        return float(_peak(deep, graph, precision, backend, kind))

    sizes = ((_ROWS, _EDGES), (2 * _ROWS, _EDGES), (2 * _ROWS, 2 * _EDGES))
    few, many = (np.array([peak(config.layers + more, *size) for size in sizes]) for more in (0, _MORE_LAYERS))
    held = (many - few) / _MORE_LAYERS  # of one layer, at each size
    live = few - config.layers * held
    (held_row, held_edge), (live_row, live_edge) = _slopes(held), _slopes(live)
    itemsize = 4 if precision == "float32" else {"float64": 8}.get(precision, 2)
    columns = num_features + _more_columns(config, num_features)
    return Footprint(kind, held_row, held_edge, max(live_row - itemsize * columns, 0.0), live_edge)


def _more_columns(config: ModelConfig, num_features: int) -> int:
    """Columns that the model takes of a node beside its features."""
    return config.encodings.columns + (config.tokens - 1) * num_features


def _slopes(at: Sequence[float] | np.ndarray[Any, Any]) -> tuple[float, float]:
    """Bytes a row and an edge, from those at `(n, e)`, `(2 n, e)`, `(2 n, 2 e)`."""
    return max(float(at[1] - at[0]), 0.0) / _ROWS, max(float(at[2] - at[1]), 0.0) / _EDGES


def _random_graph(rows: int, edges: int, num_features: int, num_classes: int, *, edge_features: bool) -> Graph:
    """Half of the nodes are trained on. edge_features: whether edges have some; how many is no activation's size."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, rows, (2, edges))
    train = np.arange(rows) % 2 == 0
    none = np.zeros(rows, dtype=bool)
    features = rng.standard_normal((rows, num_features), dtype=np.float32)
    labels = rng.integers(0, num_classes, rows)
    given = rng.standard_normal((edges, 4), dtype=np.float32) if edge_features else None
    return from_edges(
        "random", src, dst, rows, features, labels, train, none, none, num_classes=num_classes, edge_features=given
    )


def _peak(config: ModelConfig, graph: Graph, precision: str, backend: str, kind: Checkpointing) -> int:
    """The most bytes alive in the second of two steps on one rank; the first leaves what later ones find."""
    cut = partition(graph, "hash", 1, 0)
    columns = _more_columns(config, graph.num_features)
    if columns:
        array = np.zeros((graph.num_nodes, columns), dtype=np.float32)
        made = NodeInput(array, InputFacts("none", columns, columns, array.nbytes, 0.0, ""))
        cut = replace(cut, inputs=NodeInputs((made,)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GraphModel(config, *graph.dims)
    # Half precision is allowed to any engine here: nothing is learnt.
    settings = EngineConfig(name="torch", optimizer="sgd").model_copy(update={"precision": precision})
    engine = _NoSteps(model, settings, solo(), 2)
    timer = PhaseTimer()
    timer.start_step()
    executor = Executor(engine, cut, solo(), timer, seed=0, num_heads=config.heads, backend=backend)
    plan = fixed_plan("graph", [1.0], 1, config.layers, checkpointing=kind)
    batches = BatchPlanner(cut, BatchConfig(), SamplingConfig(), config.layers, 0)
    compiled = Compiler(cut, plan, solo(), config.heads, np.zeros(1, dtype=np.int64)).compile(batches.step(0))
    executor.train_step(compiled, plan, 0, fixed=False)
    live = LiveBytes()
    with live:
        executor.train_step(compiled, plan, 1, fixed=False)
    return live.peak
