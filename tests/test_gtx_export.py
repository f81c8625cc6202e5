"""An exported model says what predict says, on any graph, by torch alone; an edge of weight 2 counts as two.

Not here: the checkpoint that it is made of (`test_gtx_checkpoint.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import launch
from gtx.checkpoint import EngineState, Progress, write_checkpoint
from gtx.config import Config, ModelConfig, load_config, parse_config
from gtx.export import FACTS, export, plain_model
from gtx.graphs import edge_list
from gtx.models import GraphModel
from gtx.node_inputs import make_input
from gtx.parallel.context import LayerContext
from gtx.plain import PlainContext, PlainModel
from gtx.session import read_graph

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "configs" / "digits_gt.yaml")
MODELS = ("GT", "GPS", "GCN", "SAGE", "GAT", "MLP", "SGFormer", "Polynormer")
SETTINGS = [
    "engine.name=torch",
    "engine.zero_stage=0",
    "engine.threads=1",
    "monitor.progress=false",
    "train.steps=2",
    "model.width=12",
    "model.heads=3",
    "model.layers=2",
    "data.standardize=true",
    "model.encodings.degree=true",
]


def inputs(config: Config) -> tuple[Tensor, Tensor]:
    """What the exported model takes, made from the graph by hand: raw features, encodings, edges."""
    raw = read_graph(config.model_copy(update={"data": config.data.model_copy(update={"standardize": False})}))
    encodings = [make_input(raw, kind, size).array for kind, size in config.model.encodings.kinds]
    x = np.concatenate([raw.features, *encodings], axis=1)
    return torch.from_numpy(x), torch.from_numpy(np.stack(edge_list(raw)))


@pytest.mark.parametrize("name", MODELS)
def test_the_file_says_what_predict_says_by_torch_alone(name: str, tmp_path: Path) -> None:
    """Standardised features and encodings; the file is loaded by a process that cannot import gtx."""
    run_dir, to = tmp_path / "run", tmp_path / "model.pt2"
    arguments = [*SETTINGS, f"model.name={name}", f"partition.cache={tmp_path / 'cut'}", "--run-dir", str(run_dir)]
    assert launch.main(["train", CONFIG, *arguments]) == 0
    assert launch.main(["export", str(run_dir), "--to", str(to)]) == 0
    assert launch.main(["predict", str(run_dir)]) == 0
    x, edge_index = inputs(load_config(run_dir / "config.yaml"))
    torch.save({"x": x, "edge_index": edge_index}, tmp_path / "inputs.pt")
    script = (
        "import sys, torch\n"
        "given = torch.load('inputs.pt')\n"
        "model = torch.export.load('model.pt2').module()\n"
        "torch.save(model(given['x'], given['edge_index']).softmax(1).detach(), 'found.pt')\n"
        "assert not any(name.split('.')[0] in ('gtx', 'sparse_engine', 'scheduler') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}, check=True, timeout=120)
    frame = pd.read_parquet(run_dir / "predictions.parquet")
    predicted = np.stack([frame[f"probability_{c}"] for c in range(10)], axis=1)
    found = torch.load(tmp_path / "found.pt").numpy()
    np.testing.assert_allclose(found, predicted, rtol=1e-4, atol=1e-5)


def made(tmp_path: Path, **model: object) -> tuple[Config, Path]:
    """A config and a checkpoint of its untrained model: four features, three classes."""
    config = parse_config({"model": {"width": 6, "heads": 3, "layers": 2, **model}})
    torch.manual_seed(0)
    graph_model = GraphModel(config.model, 4, 3)
    weights = {key: p.detach() for key, p in graph_model.named_parameters()}
    buffers = dict(graph_model.named_buffers())
    progress = Progress(1, 1, config.as_dict(), {"num_features": 4, "num_classes": 3}, "")
    write_checkpoint(tmp_path / "model.safetensors", progress, EngineState(weights, buffers, {}, 1))
    return config, tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", MODELS)
def test_a_file_takes_graphs_of_any_size(name: str, tmp_path: Path) -> None:
    """Among them one node without an edge, and no edges at all."""
    config, checkpoint = made(tmp_path, name=name)
    plain = plain_model(config, checkpoint)
    export(plain, config, tmp_path / "model.pt2")
    extra = {FACTS: ""}
    loaded = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    assert json.loads(extra[FACTS])["classes"] == ["0", "1", "2"]
    for num_nodes, num_edges in ((1, 0), (1, 2), (2, 1), (4, 4), (50, 0), (300, 2000)):
        x, edge_index = torch.randn(num_nodes, 4), torch.randint(0, num_nodes, (2, num_edges))
        out = loaded(x, edge_index)
        assert out.shape == (num_nodes, 3) and out.isfinite().all()
        torch.testing.assert_close(out, plain.model(x, edge_index), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_an_edge_of_weight_two_counts_as_two_edges(name: str, tmp_path: Path) -> None:
    model = plain_model(*made(tmp_path, name=name)).model
    x, edge_index = torch.randn(20, 4), torch.randint(0, 20, (2, 60))
    weight = torch.randint(1, 4, (60,)).float()
    twice = edge_index.repeat_interleave(weight.long(), dim=1)
    torch.testing.assert_close(model(x, edge_index, weight), model(x, twice), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x, edge_index, torch.ones(60)), model(x, edge_index), rtol=1e-5, atol=1e-5)
    differs = (model(x, twice) - model(x, edge_index)).abs().max() > 1e-4
    assert bool(differs) == (name != "MLP")


def test_renumbering_nodes_renumbers_the_outcome(tmp_path: Path) -> None:
    model = plain_model(*made(tmp_path, name="GPS")).model
    x, edge_index, order = torch.randn(20, 4), torch.randint(0, 20, (2, 60)), torch.randperm(20)
    torch.testing.assert_close(model(x[order], order.argsort()[edge_index]), model(x, edge_index)[order])


def test_the_plain_context_answers_all_that_a_layer_may_ask() -> None:
    asked = {name for name in vars(LayerContext) if not name.startswith("_")}
    only_of_ranks = {"keep", "replay", "move"}  # recomputation and changes of owner, which the wave does
    answered = dir(PlainContext(torch.ones(1, 1), torch.empty(2, 0, dtype=torch.int64), None, 1, False))
    assert asked - only_of_ranks <= set(answered)


class OwnEdges(nn.Module):
    """Edge-wise work of a layer's own: the largest of the in-neighbours' rows."""

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        def largest(edges, query, source):
            rows = source[:, 0].index_select(0, edges.pattern.indices)
            out = rows.new_zeros(edges.pattern.num_rows, *rows.shape[1:])
            index = edges.pattern.row_index[:, None, None].expand_as(rows)
            return out.scatter_reduce(0, index, rows, "amax", include_self=False)

        return context.edgewise(largest, None, x.view(x.shape[0], 1, 3, 2)).flatten(1)


def test_a_layer_with_edge_work_of_its_own_runs_as_a_module_and_is_no_file(tmp_path: Path) -> None:
    config, checkpoint = made(tmp_path, name="MLP")
    plain = plain_model(config, checkpoint)
    plain.model.model.layers[1] = OwnEdges()
    edges = torch.tensor([[0, 1, 2], [2, 2, 0]])
    hidden: list[Tensor] = []
    plain.model.model.layers[1].register_forward_hook(lambda _, given, out: hidden.extend([given[0], out]))
    plain.model(torch.randn(3, 4), edges)
    before, after = hidden
    torch.testing.assert_close(after, torch.stack([before[2], torch.zeros(6), torch.maximum(before[0], before[1])]))
    with pytest.raises(ValueError, match="MLP cannot be traced by torch.export .*plain_model") as error:
        export(plain, config, tmp_path / "model.pt2")
    assert "\n" not in str(error.value) and not (tmp_path / "model.pt2").exists()


def test_a_constant_feature_is_nothing_to_the_module() -> None:
    model = GraphModel(ModelConfig(name="MLP", width=6, heads=3), 2, 3)
    scaling = (torch.tensor([1.0, 5.0]).double(), torch.tensor([2.0, 0.0]).double())
    plain = PlainModel(model, 3, scaling).eval()
    no_edges = torch.empty(2, 0, dtype=torch.int64)
    other = PlainModel(model, 3).eval()
    found = plain(torch.tensor([[3.0, 5.0], [3.0, 9.0]]), no_edges)
    torch.testing.assert_close(found, other(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), no_edges))


def test_what_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, name="GT")[1]
    lists = parse_config({"sampling": {"method": "random_walk", "fanout": 3}})
    with pytest.raises(ValueError, match="random_walk, which an exported model cannot"):
        plain_model(lists, checkpoint)
    with pytest.raises(
        ValueError, match="^the parameter classifier.0.bias is .6,. in the checkpoint and .12,. in this model"
    ):
        plain_model(parse_config({"model": {"width": 12, "heads": 3, "layers": 2}}), checkpoint)
    for to, part in (("model.onnx", "ends in .pt2"), ("no/such/model.pt2", "there is no folder")):
        ended = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), "export", str(tmp_path), "--to", str(tmp_path / to)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        (line,) = ended.stderr.splitlines()
        assert ended.returncode == 2 and part in line, line


@pytest.mark.parametrize(
    "model", [{"name": "Exphormer"}, {"name": "NAGphormer"}, {"name": "GT", "edge_bias": True}], ids=lambda m: m["name"]
)
def test_what_takes_more_than_features_and_edges_is_refused(model: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"takes .*; an exported model takes features and edges alone"):
        plain_model(parse_config({"model": model}), tmp_path / "no.safetensors")
