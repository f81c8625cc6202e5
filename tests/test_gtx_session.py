"""What every command begins with: here, that all ranks take the same attention code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

from gtx import session
from gtx.config import Config
from gtx.graphs import Graph, from_edges
from gtx.parallel.world import World, solo
from gtx.partition import PartitionedGraph, partition
from sparse_engine import SparsePattern


def small_graph(degrees: Sequence[int] = (2, 0, 3, 1)) -> Graph:
    dst = np.repeat(np.arange(len(degrees)), degrees)
    features = np.zeros((len(degrees), 1), dtype=np.float32)
    labels, masks = np.zeros(len(degrees), dtype=np.int64), np.eye(3, len(degrees), dtype=bool)
    return from_edges("small", np.arange(len(dst)) % len(degrees), dst, len(degrees), features, labels, *masks)


def cut_graph() -> PartitionedGraph:
    return partition(small_graph(), "random", 1, 0)


def picked_on_a_gpu(world: World, offered: Sequence[Sequence[str]], model: dict[str, Any]) -> tuple[str, list[str]]:
    """The backend that a rank takes, with GPUs made up; rank 0 finds the last one to be the fastest."""
    said: list[str] = []

    def fastest(pattern: SparsePattern, heads: int, dim: int, dtype: torch.dtype, names: Sequence[str]) -> str:
        assert world.rank == 0, "only rank 0 measures"
        assert (heads, dim, pattern.num_edges) == (4, 8, 6)
        return names[-1]

    mine = tuple(offered[world.rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "resolve_backend", lambda name, device, dtype: mine[0] if name == "auto" else name)
        patch.setattr(session, "auto_backends", lambda device, dtype: mine)
        patch.setattr(session, "fastest_backend", fastest)
        patch.setattr(SparsePattern, "to", lambda pattern, device: pattern)
        config = Config(model={"width": 32, "heads": 4, **model})
        here = replace(world, device=torch.device("cuda"))
        backend = session.attention_backend(config, here, torch.float32, said.append, cut_graph())
    return backend, said


BOTH = ("triton", "torch")


@pytest.mark.parametrize(
    ("offered", "taken", "said"),
    [
        ((BOTH, BOTH), "torch", ["attention by torch, the fastest of triton, torch"]),
        ((BOTH, ("torch",)), "torch", ["attention by torch"]),
        ((("torch",), BOTH), "torch", ["attention by torch"]),
    ],
)
def test_all_ranks_take_what_rank_0_measured(offered: Any, taken: str, said: list[str]) -> None:
    found = run_ranks(picked_on_a_gpu, 2, offered, {})
    assert found == [(taken, said)] * 2


@pytest.mark.parametrize("model", [{"backend": "triton"}, {"name": "GCN"}, {"name": "GPS"}])
def test_nothing_is_measured_where_there_is_no_choice(model: dict[str, Any]) -> None:
    assert picked_on_a_gpu(replace(solo(), rank=1), (BOTH, BOTH), model) == ("triton", [])


def test_on_a_cpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "fastest_backend", None)
    assert session.attention_backend(Config(), solo(), torch.float32, print, cut_graph()) == "cpu"


def test_a_backend_that_cannot_run_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="^attention backend 'triton' [^\n]*$"):
        session.attention_backend(Config(model={"backend": "triton"}), solo(), torch.float32, print, cut_graph())


@pytest.mark.parametrize(("num_edges", "num_rows"), [(0, 1), (2, 2), (4, 2), (5, 3), (100, 4)])
def test_what_is_measured_is_the_first_rows_of_the_graph(num_edges: int, num_rows: int) -> None:
    graph = small_graph()
    pattern = session.some_rows(graph, num_edges)
    pattern.validate()
    assert pattern.degrees.tolist() == np.diff(graph.indptr)[:num_rows].tolist()
    named = np.unique(graph.indices[: pattern.num_edges])
    assert pattern.num_cols == len(named)
    assert (named[pattern.indices.numpy()] == graph.indices[: pattern.num_edges]).all()
