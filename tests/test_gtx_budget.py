"""A step that does not fit is refused before anything is written, and what is offered instead does fit.

Not here: what activations take by formula (`test_scheduler_cost.py`) and plans that are searched
(`test_scheduler_search.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import awkward_graph, partitioned

from gtx.budget import KEEPS, Budget, check, cpu_slack, with_footprints
from gtx.config import ModelConfig, parse_config
from gtx.footprint import LiveBytes, measure_footprints
from gtx.graphs import from_edges
from gtx.partition import PartitionedGraph
from gtx.report import load_report
from gtx.show import show_plan
from gtx.train import make_plan, train
from gtx.workload import workload_of
from scheduler.cost import activation_bytes, round_bytes
from scheduler.placing import place
from scheduler.workload import ModelShape

pytestmark = pytest.mark.usefixtures("one_thread")
MIB = 2.0**20


# Counting -------------------------------------------------------------------------------------------------------------


def test_live_bytes_follow_tensors_and_not_their_views() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        a = torch.ones(256)  # 1 KiB
        b = a + 1
        views = [b[:10], b.view(16, 16).t(), before[5:]]
        assert (live.now, live.peak) == (2048, 2048)
        b.mul_(2)
        assert live.now == 2048
        del b
        assert live.now == 2048  # views hold it
        views.clear()
        assert (live.now, live.peak) == (1024, 2048)
        c = a.double()
        assert (live.now, live.peak) == (3072, 3072)
        del a, c
        assert (live.now, live.peak) == (0, 3072)


def test_live_bytes_see_what_autograd_keeps() -> None:
    w = torch.ones(64, 64, requires_grad=True)
    with LiveBytes() as live:
        y = (torch.ones(10, 64) @ w).exp().sum()
        kept = live.now
        y.backward()
        del y
        assert kept >= 2 * 10 * 64 * 4  # the input of the product and the result of exp
        assert live.now == 64 * 64 * 4  # the gradient


@pytest.mark.parametrize("kind", ["none", "layer"])
def test_a_transformer_holds_what_the_formula_says(kind: str) -> None:
    """`activation_bytes` was derived by hand from the layer's code; without a halo and with the fused attention."""
    config = ModelConfig(name="GT", width=32, heads=4, layers=5)
    (measured,) = measure_footprints(config, 9, 4, backend="cpu", kinds=(kind,))
    shape = ModelShape("GT", 32, 64, 4, 5, 9, 4, 0)
    formula = float(activation_bytes(shape, np.ones(1), np.zeros(1), kind)[0])
    assert measured.held_row == pytest.approx(formula, rel=0.05)
    assert measured.held_edge == 0.0


def test_checkpointing_holds_less_and_recomputes_one_layer_at_a_time() -> None:
    for name in ("GT", "GPS", "GAT"):
        none, layer = measure_footprints(ModelConfig(name=name, width=32, heads=4), 9, 4, kinds=("none", "layer"))
        assert layer.held_row == 32 * 4  # the layer's input
        assert layer.held_row < none.held_row / 4
        assert layer.live_row > none.live_row
    deep = ModelConfig(name="Polynormer", width=32, heads=4, layers=5, global_layers=3)
    assert measure_footprints(deep, 9, 4, kinds=("none",))[0].held_row > 0
    biased = measure_footprints(ModelConfig(width=32, heads=4, edge_bias=True), 9, 4, kinds=("none",))[0]
    assert biased.held_edge >= 4 * 4  # a bias per head
    hops = ModelConfig(name="NAGphormer", width=32, heads=4, encodings={"degree": True})
    assert measure_footprints(hops, 9, 4, kinds=("none",))[0].held_row > 0
    half = measure_footprints(ModelConfig(width=32, heads=4), 9, 4, precision="bf16", kinds=("none",))[0]
    full = measure_footprints(ModelConfig(width=32, heads=4), 9, 4, kinds=("none",))[0]
    assert half.held_row == pytest.approx(full.held_row / 2, rel=0.1)


# Refusing -------------------------------------------------------------------------------------------------------------


def large(num_nodes: int = 4000) -> PartitionedGraph:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, num_nodes, (2, 8 * num_nodes))
    train = np.ones(num_nodes, dtype=bool)
    features = rng.standard_normal((num_nodes, 8), dtype=np.float32)
    labels = rng.integers(0, 3, num_nodes)
    graph = from_edges("large", src, dst, num_nodes, features, labels, train, ~train, ~train, num_classes=3)
    return partitioned(graph, 8)


def refused(limit_mib: float, *settings: str, world_size: int = 2, slack: float = 1.0) -> Any:
    """The budget of a config on the large graph where 10 MiB are in use, or the line it is refused with."""
    base = {"model": {"name": "GT", "width": 64, "heads": 4, "layers": 4}}
    config = parse_config(base, settings)
    graph = large()
    workload, _ = workload_of(config, graph)
    plan = make_plan(config, graph, world_size)
    workload = with_footprints(config, workload, limit_mib * MIB, world_size)
    try:
        return check(config, workload, plan, (10 * MIB,) * world_size, limit_mib * MIB, "given", slack)
    except ValueError as error:
        return str(error)


def test_what_fits_is_predicted_by_rank() -> None:
    budget = refused(1000)
    assert isinstance(budget, Budget) and len(budget.peaks) == 2
    assert all(10 * MIB < peak < 1000 * MIB for peak in budget.peaks)
    assert sum(budget.activations) > 4 * 4000 * 3000  # four layers hold about 3 KB a row
    assert budget.report()["activations"] == "counted in steps of the model"


def test_one_line_says_what_is_needed_and_every_offer_fits() -> None:
    whole = max(refused(1000).peaks) / MIB
    limit = 0.7 * whole
    line = refused(limit)
    assert line.startswith("a step does not fit: rank ")
    assert "are in use" in line and "(given)" in line and "\n" not in line
    offers = re.findall(r"\d\. (.+?) \(([\d.]+) (MiB|GiB)\)(?:;|$)", line)
    keys = [text.partition("=")[0].partition(" ")[0] for text, _, _ in offers]
    assert keys == ["plan.checkpointing", "engine.precision", "8"]  # with four ranks most rows are needed on all
    for text, number, _ in offers:
        changed = refused(limit, text) if "=" in text else refused(limit, world_size=8)
        assert isinstance(changed, Budget), changed
        assert max(changed.peaks) / MIB == pytest.approx(float(number), rel=0.2)
    assert "engine.precision" not in refused(limit, "engine.name=torch")


def test_micro_batches_are_offered_one_at_a_time() -> None:
    settings = ("batch.kind=cluster", "batch.parts=2", "batch.micro_batches=4", "engine.name=torch")
    whole = max(refused(1000, *settings).peaks) / MIB
    line = refused(0.6 * whole, *settings)
    keys = "plan.micro_batches_per_wave=1 plan.waves_per_round=1"
    assert keys in line
    assert isinstance(refused(0.6 * whole, *settings, *keys.split()), Budget)


def test_malloc_that_gives_back_is_offered_where_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert cpu_slack() == KEEPS
    whole = max(refused(1000).peaks) / MIB
    line = refused(1.5 * whole, slack=KEEPS)
    assert "1. MALLOC_MMAP_THRESHOLD_=4194304 in the environment" in line
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
    assert isinstance(refused(1.5 * whole, slack=cpu_slack()), Budget)


def test_where_no_single_change_helps_the_least_is_named() -> None:
    line = refused(10.5, "engine.name=torch")
    assert "1. plan.checkpointing=layer with a limit of " in line and "2. batch.kind=cluster or neighbor" in line


def test_more_rounds_hold_less() -> None:
    """What a round holds is given back at its end; what waves of one round hold adds up."""
    config = parse_config(
        {"model": {"width": 6, "heads": 3, "layers": 2}, "batch": {"kind": "cluster", "parts": 1, "micro_batches": 4}}
    )
    graph = partitioned(awkward_graph())
    workload, _ = workload_of(config, graph)
    workload = with_footprints(config, workload, 0.0, 1)
    held = []
    for settings in (
        [],
        ["plan.micro_batches_per_wave=1"],
        ["plan.micro_batches_per_wave=1", "plan.waves_per_round=1"],
    ):
        plan = make_plan(parse_config(config.as_dict(), settings), graph, 1)
        held.append(float(round_bytes(plan, workload, place(plan, workload))[0]))
    assert held[2] < held[1] <= held[0]


# From the config to the report ----------------------------------------------------------------------------------------

DIGITS = ["engine.name=torch", "model.width=32", "train.steps=2", "monitor.progress=false"]


def digits(tmp_path: Path, *settings: str) -> Any:
    return parse_config({"data": {"name": "digits"}, "partition": {"cache": str(tmp_path)}}, [*DIGITS, *settings])


def test_a_run_that_does_not_fit_leaves_no_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(ValueError, match=r"^a step does not fit: rank 0 of 1 would need .*plan\.memory_limit_gib"):
        train(digits(tmp_path, "plan.memory_limit_gib=0.05"), run_dir, lambda line: None, "test")
    assert not run_dir.exists()
    with pytest.raises(ValueError, match=r"^a step does not fit: .* of 2 would need .*plan\.memory_limit_gib"):
        show_plan(digits(tmp_path, "plan.memory_limit_gib=0.05"), 2, None, None)


def test_the_report_shows_predicted_beside_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    train(digits(tmp_path), run_dir, lambda line: None, "test")
    report = load_report(run_dir)
    memory = report["plan"]["memory"]
    (predicted,), (resident,) = memory["predicted_bytes"], memory["resident_bytes"]
    assert resident < predicted < memory["limit_bytes"] and memory["activations"] == "formula"
    measured = report["measured"]["ranks"][0]["peak_memory_bytes"]
    assert predicted == pytest.approx(measured, rel=0.3)
    show_plan(digits(tmp_path), 2, None, None)
    assert "memory of a step by rank: " in capsys.readouterr().out
