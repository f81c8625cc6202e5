"""Edge features as attention bias: any plan equals one rank, the features stay with their edges, and they can matter.

Not here: other cases of any plan equals one rank (`test_gtx_parallel_equal.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import awkward_graph, loss_and_gradient, partitioned, plan_of, rig, small_graph
from ranks import run_ranks

from gtx.config import parse_config
from gtx.graphs import Graph, edge_list, with_self_loops, with_standardized_edge_features
from gtx.parallel.world import World, solo
from gtx.partition import PartitionedGraph
from gtx.session import load_partitioned, tell_graph
from scheduler.plan import CHECKPOINTING
from sparse_engine import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("graph", "model", "pipeline", "data", "mixed")
KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "cluster": {"kind": "cluster", "parts": 2, "micro_batches": 3},
    "neighbor": {"kind": "neighbor", "seeds": 5, "micro_batches": 4},
}


def with_features(graph: Graph, columns: int = 2) -> Graph:
    rng = np.random.default_rng(4)
    return replace(graph, edge_features=rng.standard_normal((graph.num_edges, columns)).astype(np.float32))


@cache
def cut(parts: int = 6) -> PartitionedGraph:
    return partitioned(with_features(awkward_graph()), parts)


def settings_of(kind: str, model: str, **sampling: Any) -> dict[str, Any]:
    return {
        "model": {"name": model, "width": 6, "heads": 3, "layers": 3, "dropout": 0.2, "edge_bias": True},
        "sampling": sampling,
        "batch": KINDS[kind],
    }


def cases_of(world_size: int) -> list[tuple[dict[str, Any], Any]]:
    """(settings, plan): every mode with every kind of micro-batch, then every way to draw edges."""
    found = []
    ways = [{"fanout": 3, "method": method} for method in METHODS]
    for i, (kind, mode) in enumerate(itertools.product(KINDS, MODES)):
        settings = settings_of(kind, ("GT", "GAT", "Exphormer")[(i + i // 3) % 3], **({"fanout": 4} if i % 3 else {}))
        found.append((settings, plan_of(mode, cut(), world_size, 3, checkpointing=CHECKPOINTING[i % 3])))
    for i, way in enumerate(ways):
        for kind in ("full", "cluster"):
            plan = plan_of(MODES[i % 5], cut(), world_size, 3)
            found.append((settings_of(kind, ("GT", "GAT", "Exphormer")[(i + 1) % 3], **way), plan))
    return found


def outcomes(world: World, world_size: int) -> list[tuple[float, np.ndarray]]:
    """Of the cases, each under its plan; on one rank under a plan of one."""
    found = []
    for settings, plan in cases_of(world_size):
        here = plan if world.size > 1 else plan_of("graph", cut(), 1, 3)
        loss, gradient, _ = loss_and_gradient(rig(world, cut(), here, settings))
        found.append((loss, gradient))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_plan_equals_one_rank(world_size: int) -> None:
    expected = outcomes(solo(), world_size)
    for rank in run_ranks(outcomes, world_size, world_size):
        for (settings, plan), (loss, gradient), (right, wanted) in zip(
            cases_of(world_size), rank, expected, strict=True
        ):
            where = f"{settings} {plan}"
            assert abs(loss - right) <= 1e-10 * abs(right), where
            assert np.linalg.norm(gradient - wanted) <= 1e-10 * np.linalg.norm(wanted), where


def bias_gradient(graph: PartitionedGraph, model: str = "GT", **sampling: Any) -> tuple[float, np.ndarray]:
    """Loss and gradient of one step, the weights of the edge bias last but for the classifier's."""
    settings = settings_of("full", model, **sampling)
    settings["model"]["dropout"] = 0.0
    loss, gradient, _ = loss_and_gradient(rig(solo(), graph, plan_of("graph", graph, 1, 3), settings))
    return loss, gradient


@pytest.mark.parametrize("model", ["GT", "GAT"])
@pytest.mark.parametrize("fanout", [None, 3])
def test_features_stay_with_their_edges_however_the_graph_is_cut(model: str, fanout: int | None) -> None:
    expected = bias_gradient(cut(6), model, fanout=fanout)
    for parts in (1, 4):
        loss, gradient = bias_gradient(cut(parts), model, fanout=fanout)
        assert np.isclose(loss, expected[0], rtol=1e-10)
        assert np.allclose(gradient, expected[1], atol=1e-10)
    shuffled = cut(6)
    features = np.random.default_rng(0).permutation(np.asarray(shuffled.graph.edge_features))
    moved = replace(shuffled, graph=replace(shuffled.graph, edge_features=features))
    assert not np.isclose(bias_gradient(moved, model, fanout=fanout)[0], expected[0], rtol=1e-6)


def test_zero_features_change_nothing_and_draw_the_same_edges() -> None:
    for method in METHODS:
        graph = cut(6)
        zero = np.zeros_like(np.asarray(graph.graph.edge_features))
        silent = replace(graph, graph=replace(graph.graph, edge_features=zero))
        bare = replace(graph, graph=replace(graph.graph, edge_features=None))
        losses = []
        for given, biased in ((silent, True), (bare, False)):
            settings = settings_of("full", "GT", fanout=3, method=method)
            settings["model"] |= {"dropout": 0.0, "edge_bias": biased}
            run = rig(solo(), given, plan_of("graph", given, 1, 3), settings)
            generator = torch.Generator().manual_seed(1)
            for name, parameter in run.engine.model.named_parameters():
                if not name.startswith("edge_biases"):
                    parameter.data.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5)
            losses.append(loss_and_gradient(run)[0])
        assert losses[0] == pytest.approx(losses[1], rel=1e-12), method


def test_standardized_over_edges_into_training_nodes() -> None:
    graph = small_graph([(0, 1), (2, 1), (1, 0), (1, 2), (0, 3)], 4, train=[0, 1])
    features = np.array([[1, 7], [3, 7], [5, 7], [100, 9], [200, 9]], dtype=np.float32)  # in the order given
    source, destination = edge_list(graph)
    by_edge = {(0, 1): 0, (2, 1): 1, (1, 0): 2, (1, 2): 3, (0, 3): 4}
    rows = [by_edge[edge] for edge in zip(source.tolist(), destination.tolist(), strict=True)]
    graph = replace(graph, edge_features=features[rows])
    made = with_standardized_edge_features(graph)
    seen = np.isin(destination, [0, 1])
    assert made.edge_features is not None
    assert np.allclose(made.edge_features[seen, 0].mean(), 0, atol=1e-6)
    assert np.allclose(made.edge_features[seen, 0].std(), 1, atol=1e-6)
    assert not made.edge_features[:, 1].any()  # constant where one trains
    changed = graph.edge_features * np.where(seen, 1, -3)[:, None]
    again = with_standardized_edge_features(replace(graph, edge_features=changed.astype(np.float32)))
    assert again.edge_features is not None
    assert np.array_equal(again.edge_features[seen], made.edge_features[seen])
    looped = with_self_loops(made, "add")
    source, destination = edge_list(looped)
    assert looped.edge_features is not None
    assert not looped.edge_features[source == destination].any()
    alone = with_standardized_edge_features(with_features(small_graph([(0, 1)], 3, train=[2])))
    assert alone.edge_features is not None
    assert not alone.edge_features.any()  # no edge into a training node


def written(folder: Path, *, weights: bool = True) -> dict[str, Any]:
    (folder / "nodes.csv").write_text("id,label,split,x\n" + "".join(f"{i},{i % 2},train,{i}\n" for i in range(6)))
    rows = "".join(f"{i},{(i + 1) % 6}" + (f",{i}\n" if weights else "\n") for i in range(6))
    (folder / "edges.csv").write_text(("src,dst,weight\n" if weights else "src,dst\n") + rows)
    return {
        "data": {"name": "table", "nodes": str(folder / "nodes.csv"), "edges": str(folder / "edges.csv")},
        "partition": {"parts": 2, "method": "random", "cache": str(folder / "cache")},
        "batch": {"kind": "full"},
    }


def test_what_has_no_effect_is_told(tmp_path: Path) -> None:
    sections = written(tmp_path)
    said: list[str] = []
    loaded = load_partitioned(parse_config(sections), solo())
    tell_graph(loaded, said.append)
    assert loaded.partitioned.graph.edge_features is None
    assert "note: 1 edge features are not used; attention takes them with model.edge_bias=true" in said
    biased = load_partitioned(parse_config(sections, ["model.edge_bias=true"]), solo())
    said.clear()
    tell_graph(biased, said.append)
    assert biased.partitioned.graph.num_edge_features == 1
    assert not [line for line in said if line.startswith("note")]
    for name in ("GPS", "GCN", "SAGE", "MLP"):
        with pytest.raises(ValueError, match=f"edge_bias has no effect with {name}, whose layers do not read it"):
            parse_config(sections, ["model.edge_bias=true", f"model.name={name}"])
    with pytest.raises(ValueError, match=r"model\.edge_bias has no effect with sampling\.method random_walk"):
        parse_config(sections, ["model.edge_bias=true", "sampling.method=random_walk", "sampling.fanout=3"])
    sections = written(tmp_path, weights=False)
    with pytest.raises(ValueError, match=r"edge_bias is true, but graph .* has no edge features; give it some or set"):
        load_partitioned(parse_config(sections, ["model.edge_bias=true"]), solo())


@pytest.mark.parametrize("model", ["GT", "GAT"])
def test_a_bias_learns_which_edges_tell_the_truth(model: str) -> None:
    """A target knows nothing itself and hears of both classes; only the edge says which one is its own."""
    targets, truth = np.arange(40), np.arange(40) % 2
    src = np.concatenate([40 + truth, 41 - truth])  # node 40 tells of class 0, node 41 of class 1
    edges = list(zip(src.tolist(), np.tile(targets, 2).tolist(), strict=True))
    graph = small_graph(edges, 42, train=targets.tolist())
    source, destination = edge_list(graph)
    labels = np.append(truth, [-1, -1])
    features = np.zeros((42, 4), dtype=np.float32)
    features[40, 0], features[41, 0] = 1, -1
    tells = (source - 40 == labels[destination]).astype(np.float32)
    graph = replace(graph, labels=labels, num_classes=2, features=features, edge_features=tells[:, None])
    losses = {}
    for biased in (True, False):
        cut_in_two = partitioned(with_standardized_edge_features(graph), 2)
        settings = settings_of("full", model)
        settings["model"] |= {"dropout": 0.0, "edge_bias": biased, "layers": 1}
        settings["engine"] = {"lr": 0.02}
        run = rig(solo(), cut_in_two, plan_of("graph", cut_in_two, 1, 1), settings)
        compiled = run.compiler.compile(run.batches.step(0))
        for step in range(80):
            losses[biased] = run.executor.train_step(compiled, run.plan, step, fixed=True).loss
    assert losses[False] == pytest.approx(np.log(2), abs=0.02)
    assert losses[True] < 0.2
