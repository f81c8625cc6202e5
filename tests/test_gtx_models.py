"""The models against their formulas: dense, in float64, on one rank.

Not here: that a plan changes nothing (`test_gtx_parallel_equal.py`), and the attention itself
(`test_sparse_engine_attention.py`).

Legend: `N` nodes, `C` width, `H` heads, `d = C / H`; `A[i, j]` counts the edges from j to i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Rig, awkward_graph, loss_and_gradient, partitioned, plan_of, rig, small_graph
from torch import Tensor, nn

from gtx.batches import Batch, MicroBatch
from gtx.config import MODELS, parse_config
from gtx.expander import with_expander
from gtx.graphs import Graph, edge_list, from_edges, with_self_loops, with_undirected
from gtx.models import FAMILIES, GCNLayer, GPSLayer, GraphModel, GTLayer, LinearAttention, MicroBatchNorm
from gtx.models.layers import mean_outer
from gtx.parallel.context import LayerContext, Runtime, WaveContext
from gtx.parallel.world import World, solo
from gtx.partition import PartitionedGraph
from scheduler.plan import CHECKPOINTING
from sparse_engine import METHODS, Method

pytestmark = pytest.mark.usefixtures("one_thread")

SGD = {"optimizer": "sgd", "lr": 0.1}  # Adam would blow up the rounding of gradients that are zero


def settings_of(model: str, **sections: Any) -> dict[str, Any]:
    shape = {"name": model, "width": 6, "heads": 3, "layers": 2}
    return {"model": shape, "engine": SGD, **sections}


def one_rank(graph: PartitionedGraph, settings: dict[str, Any], **layout: Any) -> Rig:
    layers = settings["model"]["layers"]
    return rig(solo(), graph, plan_of("graph", graph, 1, layers, **layout), settings)


def batch_of(*micro_batches: MicroBatch, layers: int, fanout: int | None = None, step: int = 0) -> Batch:
    return Batch(step, micro_batches, (fanout,) * layers, 0, fixed=False)


def rows_of(nodes: Sequence[int] | np.ndarray) -> MicroBatch:
    """A micro-batch whose rows are all targets."""
    ids = np.asarray(nodes, dtype=np.int64)
    return MicroBatch(ids, ids)


def everything(graph: PartitionedGraph) -> MicroBatch:
    return rows_of(np.arange(graph.graph.num_nodes))


def eval_outputs(run: Rig) -> Tensor:
    """Logits of every node in eval mode `[N, classes]`, in partition order."""
    batch = batch_of(everything(run.graph), layers=run.plan.num_layers)
    nodes, logits = run.executor.predict(run.compiler.compile(batch), run.plan, 0)
    assert nodes.tolist() == list(range(run.graph.graph.num_nodes))
    return torch.from_numpy(logits)


def features_of(graph: PartitionedGraph) -> Tensor:
    return torch.from_numpy(np.asarray(graph.graph.features)).double()


def dense(graph: Graph) -> Tensor:
    """`A [N, N]`, float64."""
    src, dst = edge_list(graph)
    A = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return A.index_put_((torch.from_numpy(dst), torch.from_numpy(src)), torch.ones(1).double(), accumulate=True)


def gradient_of(loss: Tensor, model: nn.Module) -> np.ndarray:
    grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return torch.cat([g.reshape(-1) for g in grads]).numpy()


def close(found: Tensor, wanted: Tensor | None, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def wave_of(run: Rig, batch: Batch, *, training: bool = True) -> tuple[LayerContext, Runtime]:
    """The first layer of the batch's only wave as that layer sees it, and what the step shares."""
    runtime = Runtime(run.executor.channel, run.executor.num_heads, 0, batch.step, training, "reference", "none")
    (wave,) = run.compiler.compile(batch).waves
    context = WaveContext(runtime, wave).layers[0]
    context.token = torch.zeros((), dtype=torch.float64, requires_grad=True)
    return context, runtime


def context_of(sizes: Sequence[int], *, training: bool = True) -> tuple[LayerContext, Runtime]:
    """A layer over micro-batches of these many rows, without edges."""
    graph = partitioned(small_graph([(0, 0)], max(*sizes, 1), train=[0]), parts=1)
    run = one_rank(graph, {"model": {"width": 6, "heads": 3, "layers": 1}})
    return wave_of(run, batch_of(*(rows_of(range(n)) for n in sizes), layers=1), training=training)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_config_can_name_every_model_of_the_registry_and_no_other() -> None:
    assert (
        sorted(MODELS)
        == sorted(FAMILIES)
        == ["Exphormer", "GAT", "GCN", "GPS", "GT", "MLP", "NAGphormer", "Polynormer", "SAGE", "SGFormer"]
    )
    for name in FAMILIES:
        assert parse_config({"model": {"name": name}}).model.name == name
    with pytest.raises(ValueError, match=r"'GTX' is neither one of 'GT', .* nor a Python file of your own"):
        parse_config({"model": {"name": "GTX"}})


# The graph ------------------------------------------------------------------------------------------------------------


def permuted(graph: Graph, new_id: np.ndarray) -> Graph:
    """The same graph with node i called `new_id[i]`."""
    src, dst = edge_list(graph)
    old_id = np.argsort(new_id)
    moved = [
        array[old_id] for array in (graph.features, graph.labels, graph.train_mask, graph.val_mask, graph.test_mask)
    ]
    return from_edges(graph.name, new_id[src], new_id[dst], graph.num_nodes, *moved, num_classes=graph.num_classes)


@pytest.mark.parametrize("model", MODELS)
def test_permuting_nodes_permutes_outputs(model: str) -> None:
    """In eval mode, before and after a training step, which must have the same loss as well."""
    graph = awkward_graph()
    new_id = np.random.default_rng(1).permutation(graph.num_nodes)
    outputs, losses = [], []
    for cut in (partitioned(graph), partitioned(permuted(graph, new_id))):
        run = one_rank(cut, settings_of(model))
        by_original_id = torch.from_numpy(np.argsort(cut.original_id))
        untrained = eval_outputs(run)[by_original_id]
        batch = run.compiler.compile(run.batches.step(0))
        losses.append(run.executor.train_step(batch, run.plan, 0, fixed=True).loss)
        trained = eval_outputs(run)[by_original_id]
        assert not torch.allclose(untrained, trained)
        outputs.append(torch.stack([untrained, trained]))
    original, moved = outputs
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    close(moved[:, torch.from_numpy(new_id)], original)


@pytest.mark.parametrize("model", MODELS)
def test_only_an_mlp_ignores_edges(model: str) -> None:
    graph = awkward_graph()
    src, dst = edge_list(graph)
    masks = (graph.train_mask, graph.val_mask, graph.test_mask)
    rewired = from_edges(
        "rewired", src[::-1], dst, graph.num_nodes, graph.features, graph.labels, *masks, num_classes=3
    )
    outputs = [eval_outputs(one_rank(partitioned(g), settings_of(model))) for g in (graph, rewired)]
    assert torch.allclose(outputs[0], outputs[1]) == (model == "MLP")


def without_duplicates(graph: Graph) -> Graph:
    src, dst = np.unique(np.stack(edge_list(graph)), axis=1)
    masks = (graph.train_mask, graph.val_mask, graph.test_mask)
    return from_edges(graph.name, src, dst, graph.num_nodes, graph.features, graph.labels, *masks, num_classes=3)


# GCN ------------------------------------------------------------------------------------------------------------------


def test_gcn_is_its_formula() -> None:
    """`D^-1/2 A D^-1/2 X W + b`, with ReLU between layers, on an undirected graph with self loops: values, gradient."""
    cut = partitioned(with_self_loops(with_undirected(without_duplicates(awkward_graph())), "add"))
    run = one_rank(cut, settings_of("GCN"))
    model = run.engine.model
    weights, biases = [], []
    for layer in model.layers:
        assert isinstance(layer, GCNLayer)
        weights.append(layer.weight.weight.T)
        biases.append(nn.init.normal_(layer.bias.bias))
    A = dense(cut.graph)
    assert torch.equal(A, A.T)
    assert (A.diagonal() == 1).all()
    scale = A.sum(1).rsqrt()
    normalised = scale[:, None] * A * scale[None, :]
    hidden = F.relu(normalised @ features_of(cut) @ weights[0] + biases[0])
    logits = normalised @ hidden @ weights[1] + biases[1]
    close(eval_outputs(run), logits)
    assert_gradient(run, logits)


def assert_gradient(run: Rig, logits: Tensor) -> None:
    """Loss and gradient of a training step on the whole graph are those of these logits of all nodes."""
    targets = torch.from_numpy(run.batches.train)
    labels = torch.from_numpy(np.asarray(run.graph.graph.labels))[targets]
    wanted = F.cross_entropy(logits[targets], labels)
    loss, gradient, _ = loss_and_gradient(run)
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-12)
    reference = gradient_of(wanted, run.engine.model)
    assert np.linalg.norm(gradient - reference) <= 1e-11 * np.linalg.norm(reference)


# GT -------------------------------------------------------------------------------------------------------------------


def dense_gt_layer(layer: GTLayer, x: Tensor, A: Tensor) -> Tensor:
    """torch's attention where `A > 0`; parallel edges each have their weight, rows without edges attend to nothing."""
    normed = layer.norm_attention(x)
    key, value = layer.key_value(normed).chunk(2, dim=1)
    query = layer.query(normed)
    q, k, v = (t.view(len(x), layer.heads, -1).transpose(0, 1) for t in (query, key, value))  # [H, N, d] each
    some = A.sum(1, keepdim=True) > 0
    bias = torch.where(some, A, 1.0).log()
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(0, 1).flatten(1)  # [N, C]
    x = x + layer.output(torch.where(some, attended, 0.0))
    hidden = F.gelu(layer.ffn.expand(layer.norm_ffn(x)))
    return x + layer.ffn.contract(hidden)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gt_is_dense_attention_under_the_graphs_mask(backend: str) -> None:
    """A hub, duplicate edges and isolated nodes included; values and gradient."""
    cut = partitioned(awkward_graph())
    A = dense(cut.graph)
    assert A.max() > 1
    assert (A.sum(1) == 0).any()
    settings = settings_of("GT")
    settings["model"]["backend"] = backend
    run = one_rank(cut, settings)
    x = run.engine.model.encoder(features_of(cut))
    for layer in run.engine.model.layers:
        assert isinstance(layer, GTLayer)
        x = dense_gt_layer(layer, x, A)
    logits = run.engine.model.classifier(x)
    close(eval_outputs(run), logits)
    assert_gradient(run, logits)


# Batch norm -----------------------------------------------------------------------------------------------------------


def batch_norms(width: int) -> tuple[MicroBatchNorm, nn.BatchNorm1d]:
    ours, theirs = MicroBatchNorm(width, 0).double(), nn.BatchNorm1d(width).double()
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(ours, name).copy_(getattr(theirs, name).normal_())
    return ours, theirs


def test_micro_batch_norm_is_batch_norm_of_each_micro_batch() -> None:
    """Outputs, gradients, running statistics after the micro-batches in order, and eval; one column is constant."""
    sizes = (7, 2, 30)
    context, runtime = context_of(sizes)
    ours, theirs = batch_norms(5)
    x = random(sum(sizes), 5) * 3 + 1
    x[:, 4] = 2.0
    x.requires_grad_()
    out = ours(x, context)
    wanted = torch.cat([theirs(part) for part in x.split(sizes)])
    close(out, wanted)
    upstream = random(*out.shape, seed=1)
    found = torch.autograd.grad(out, [x, ours.weight, ours.bias], upstream)
    for a, b in zip(found, torch.autograd.grad(wanted, [x, theirs.weight, theirs.bias], upstream), strict=True):
        close(a, b, 1e-9)
    assert sorted(runtime.statistics.found) == [(0, 0), (0, 1), (0, 2)]
    for micro_batch in range(3):
        ours.update(*runtime.statistics.found[0, micro_batch])
    close(ours.running_mean, theirs.running_mean)
    close(ours.running_var, theirs.running_var)
    context, runtime = context_of(sizes, training=False)
    theirs.eval()
    close(ours(x, context), theirs(x))
    assert not runtime.statistics.found


def test_the_order_of_micro_batches_matters_to_running_statistics() -> None:
    """So it is worth keeping: the last one weighs most."""
    norm, _ = batch_norms(1)
    for mean in (0.0, 1.0):
        norm.update(torch.tensor([mean]), torch.tensor([1.0]))
    assert float(norm.running_mean) == pytest.approx(0.1)
    norm, _ = batch_norms(1)
    for mean in (1.0, 0.0):
        norm.update(torch.tensor([mean]), torch.tensor([1.0]))
    assert float(norm.running_mean) == pytest.approx(0.09)


def test_a_micro_batch_of_one_row_gives_the_bias() -> None:
    context, runtime = context_of((1, 3))
    norm, theirs = batch_norms(4)
    x = random(4, 4).requires_grad_()
    out = norm(x, context)
    close(out[:1], norm.bias[None])
    close(out[1:], theirs(x[1:]))
    (grad,) = torch.autograd.grad(out, x, random(4, 4, seed=1))
    assert (grad[0] == 0).all()
    assert grad.isfinite().all()
    mean, variance = runtime.statistics.found[0, 0]
    close(mean, x[0].detach())
    assert (variance == 0).all()


def test_half_precision_rows_are_normed_in_float32() -> None:
    context, _ = context_of((50,))
    norm = MicroBatchNorm(3, 0)
    x = (random(50, 3) + 100).bfloat16()
    out = norm(x, context)
    assert out.dtype == torch.bfloat16
    wanted = nn.BatchNorm1d(3).double()(x.double())
    torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=2**-9)


# Linear attention -----------------------------------------------------------------------------------------------------


def quadratic_attention(module: LinearAttention, x: Tensor) -> Tensor:
    """`out_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)` of every row to every row, per head."""
    key, value = (t.view(len(x), module.heads, -1) for t in module.key_value(x).chunk(2, dim=1))
    query = module.query(x).view(len(x), module.heads, -1)
    weights = torch.einsum("ihd,jhd->hij", F.elu(query) + 1, F.elu(key) + 1)
    weights = weights / weights.sum(-1, keepdim=True)
    return module.output(torch.einsum("hij,jhd->ihd", weights, value).flatten(1))


def test_linear_attention_is_its_quadratic_formula_in_each_micro_batch() -> None:
    sizes = (9, 1, 40)
    context, _ = context_of(sizes)
    module = LinearAttention(6, 3).double()
    x = (2 * random(sum(sizes), 6)).requires_grad_()
    out = module(x, context)
    wanted = torch.cat([quadratic_attention(module, part) for part in x.split(sizes)])
    close(out, wanted)
    upstream = random(*out.shape, seed=1)
    inputs = [x, *module.parameters()]
    for a, b in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream), strict=True
    ):
        close(a, b, 1e-10)


# GPS ------------------------------------------------------------------------------------------------------------------


def dense_gps(model: GraphModel, norms: Sequence[nn.BatchNorm1d], x: Tensor, A: Tensor) -> Tensor:
    """The whole model on one micro-batch, with torch's batch norms in place of ours."""
    mean = A / A.sum(1, keepdim=True).clamp(min=1)
    x = model.encoder(x)
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, GPSLayer)
        after_local, after_attention, after_ffn = norms[3 * i : 3 * i + 3]
        local = F.gelu(layer.local.neighbours(mean @ x) + layer.local.own(x))
        both = after_local(x + local) + after_attention(x + quadratic_attention(layer.attention, x))
        x = after_ffn(both + layer.ffn.contract(F.gelu(layer.ffn.expand(both))))
    return model.classifier(x)


@pytest.mark.parametrize("layout", [{}, {"micro_batches_per_wave": 1}, {"micro_batches_per_wave": 2}])
def test_gps_is_its_formula_over_several_micro_batches(layout: dict[str, int]) -> None:
    """Three clusters a step: loss, gradient, running statistics in order; then the whole graph in eval mode."""
    cut = partitioned(awkward_graph())
    settings = settings_of("GPS", batch={"kind": "cluster", "parts": 2, "micro_batches": 3}, partition={"parts": 6})
    run = one_rank(cut, settings, **layout)
    model = run.engine.model
    norms = [nn.BatchNorm1d(6).double() for _ in model.norms]
    for ours, theirs in zip(model.norms, norms, strict=True):
        theirs.weight, theirs.bias = ours.weight, ours.bias
    A, features = dense(cut.graph), features_of(cut)
    batch = run.batches.step(0)
    total = torch.zeros((), dtype=torch.float64)
    for part in batch.micro_batches:
        logits = dense_gps(model, norms, features[part.nodes], A[part.nodes][:, part.nodes])
        labels = torch.from_numpy(np.asarray(cut.graph.labels))[part.targets]
        total = total + F.cross_entropy(logits[np.searchsorted(part.nodes, part.targets)], labels, reduction="sum")
    wanted = total / batch.num_targets
    reference = gradient_of(wanted, model)
    loss, gradient, _ = loss_and_gradient(run)
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-12)
    assert np.linalg.norm(gradient - reference) <= 1e-10 * np.linalg.norm(reference)
    for ours, theirs in zip(model.norms, norms, strict=True):
        close(ours.running_mean, theirs.running_mean)
        close(ours.running_var, theirs.running_var)
        theirs.eval()
    close(eval_outputs(run), dense_gps(model, norms, features, A))


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_is_the_slope_of_the_loss(model: str) -> None:
    """Along a random direction, with dropout and sampling on: draws are keyed, so the loss is one smooth function."""
    settings = settings_of(model, sampling={"fanout": 3}, batch={"kind": "neighbor", "seeds": 5, "micro_batches": 2})
    settings["model"].update(dropout=0.3, input_dropout=0.1)
    run = one_rank(partitioned(awkward_graph()), settings)
    parameters = run.engine.parameters
    start = nn.utils.parameters_to_vector(parameters).detach()
    start = start + 0.1 * random(len(start), seed=1)  # biases of 0 would put isolated nodes at the kink of ReLU
    direction, step = random(len(start)), 1e-6

    def loss_after(move: float) -> float:
        nn.utils.vector_to_parameters(start + move * direction, parameters)
        return loss_and_gradient(run)[0]

    loss_after(0.0)
    _, gradient, _ = loss_and_gradient(run)
    slope = (loss_after(step) - loss_after(-step)) / (2 * step)
    assert slope == pytest.approx(float(torch.from_numpy(gradient) @ direction), rel=1e-6)


def test_sage_is_its_formula() -> None:
    """`x + FFN([norm(x), mean over in-neighbours])`; a row without in-edges has mean 0."""
    cut = partitioned(awkward_graph())
    run = one_rank(cut, settings_of("SAGE"))
    model = run.engine.model
    x = model.encoder(torch.from_numpy(np.array(cut.graph.features)).double())
    mean = dense(cut.graph) / torch.from_numpy(cut.in_degrees).clamp(min=1)[:, None]
    for layer in model.layers:
        normed = layer.norm(x)
        both = torch.cat([normed, mean @ normed], dim=1)
        x = x + layer.ffn.contract(nn.functional.gelu(layer.ffn.expand(both)))
    close(eval_outputs(run), model.classifier(x).detach())


def dense_gat(layer: Any, values: Tensor, A: Tensor) -> Tensor:
    """Softmax of `leaky_relu(u_j + w_i)` over in-edges times `values [N, C]`."""
    logits = layer.source_score(values)[None] + layer.own_score(values)[:, None]  # [N, N, H], to i from j
    weights = A[..., None] * nn.functional.leaky_relu(logits, 0.2).exp()
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
    return torch.einsum("ijh,jhd->ihd", weights, values.view(len(values), layer.heads, -1)).flatten(1)


def test_gat_is_its_formula() -> None:
    """Softmax of `leaky_relu(u_j + w_i)` over in-edges, repeated ones too; a row without any attends to nothing."""
    cut = partitioned(awkward_graph())
    run = one_rank(cut, settings_of("GAT"))
    model, A = run.engine.model, dense(cut.graph)
    x = model.encoder(torch.from_numpy(np.array(cut.graph.features)).double())
    for layer in model.layers:
        attended = dense_gat(layer, layer.values(layer.norm(x)), A)
        x = x + layer.ffn.contract(nn.functional.gelu(layer.ffn.expand(attended)))
    close(eval_outputs(run), model.classifier(x).detach())


def normalised(A: Tensor) -> Tensor:
    """`D^-1/2 A D^-1/2`, D of in-degrees."""
    scale = A.sum(1).clamp(min=1).rsqrt()
    return scale[:, None] * A * scale[None, :]


def test_sgformer_is_its_formula() -> None:
    """All pairs as an `[N, N]` matrix a head: `D^-1 (V + Q K^T V / N)`, Q and K over their norms; gradient."""
    cut = partitioned(awkward_graph())
    settings = settings_of("SGFormer")
    settings["model"] |= {"layers": 3, "graph_weight": 0.8}
    run = one_rank(cut, settings)
    model, spread, N = run.engine.model, normalised(dense(cut.graph)), cut.graph.num_nodes
    first = model.layers[0]
    x = F.relu(first.norm_input(model.encoder(features_of(cut))))
    heads = []
    query, key, value = first.attention.query_key_value(x).chunk(3, dim=1)
    for q, k, v in zip(query.chunk(3, dim=1), key.chunk(3, dim=1), value.chunk(3, dim=1), strict=True):
        pairs = (q / torch.linalg.matrix_norm(q)) @ (k / torch.linalg.matrix_norm(k)).T / N
        heads.append(torch.diag(1 / (1 + pairs.sum(1))) @ (v + pairs @ v))
    everywhere = first.norm_attention(0.5 * torch.cat(heads, dim=1) + 0.5 * x)
    for layer in model.layers:
        x = F.relu(layer.norm(spread @ layer.weight(x)))
    logits = model.classifier(0.2 * everywhere + 0.8 * x)
    close(eval_outputs(run), logits)
    assert_gradient(run, logits)


def test_polynormer_is_its_formula() -> None:
    """Two local layers whose outputs add up, two global ones over all pairs, gates off their start; gradient."""
    cut = partitioned(awkward_graph())
    settings = settings_of("Polynormer")
    settings["model"] |= {"layers": 4, "global_layers": 2}
    run = one_rank(cut, settings)
    model, A = run.engine.model, dense(cut.graph)
    for layer in model.layers:
        nn.init.normal_(layer.gate.beta)
    x, total = model.encoder(features_of(cut)), torch.zeros(())
    for layer in model.layers[:2]:
        u = F.relu(dense_gat(layer, layer.values(x), A) + layer.own(x))
        beta = layer.gate.beta.sigmoid()
        x = (1 - beta) * layer.norm(F.relu(layer.factor(x)) * u) + beta * u
        total = total + x
    x = model.layers[1].norm_sum(total)
    for layer in model.layers[2:]:
        key, value = layer.key_value(x).chunk(2, dim=1)
        heads = []
        for k, v in zip(key.sigmoid().chunk(3, dim=1), value.chunk(3, dim=1), strict=True):
            pairs = k @ k.T
            heads.append(pairs / pairs.sum(1, keepdim=True) @ v)
        attended = layer.norm(torch.cat(heads, dim=1))
        x = F.relu(layer.output(attended * (layer.factor(x) + layer.gate.beta.sigmoid())))
    logits = model.classifier(x)
    close(eval_outputs(run), logits)
    assert_gradient(run, logits)


def expanded_graph() -> Graph:
    return with_expander(awkward_graph(), 4, 0)


def by_type(graph: Graph) -> tuple[Tensor, Tensor]:
    """`A [N, N]` of the graph's own edges, and of those that were added."""
    src, dst = (torch.from_numpy(ends) for ends in edge_list(graph))
    assert graph.edge_types is not None
    types = torch.from_numpy(np.asarray(graph.edge_types)).long()
    A = torch.zeros(2, graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    own, added = A.index_put_((types, dst, src), torch.ones(1).double(), accumulate=True)
    return own, added


def test_exphormer_is_its_formula() -> None:
    """Attention over both kinds of edges, repeated ones count twice; softmax over all rows; gradient."""
    cut = partitioned(expanded_graph())
    run = one_rank(cut, settings_of("Exphormer"))
    model, (own, added) = run.engine.model, by_type(cut.graph)
    assert (own * added).sum() > 0, "some edges are of both kinds"
    mean = own / own.sum(1, keepdim=True).clamp(min=1)
    x = model.encoder(features_of(cut))
    for layer in model.layers:
        h = layer.norm(x)
        q, v, k = (t.view(len(x), 3, 2) for t in (layer.query(h), *layer.key_value(h).chunk(2, dim=1)[::-1]))
        of_own, of_added = layer.type_logits(h).view(len(x), 3, 2).unbind(2)  # [N, H]
        scores = torch.einsum("ihd,jhd->ijh", q, k) * 2**-0.5
        weights = (scores + of_own[:, None]).exp() * own[..., None] + (scores + of_added[:, None]).exp() * added[
            ..., None
        ]
        attended = torch.einsum("ijh,jhd->ihd", weights / weights.sum(1, keepdim=True), v).flatten(1)
        local = F.gelu(layer.local.neighbours(mean @ h) + layer.local.own(h))
        virtual = layer.virtual
        shares = virtual.gathering(h).view(len(x), 3, 4).softmax(0)
        nodes = torch.einsum("jhv,jhd->vhd", shares, virtual.values(h).view(len(x), 3, 2))
        read = torch.einsum("ihv,vhd->ihd", virtual.reading(h).view(len(x), 3, 4).softmax(-1), nodes).flatten(1)
        x = x + layer.output(attended) + local + virtual.output(read)
        x = x + layer.ffn.contract(F.gelu(layer.ffn.expand(layer.norm_ffn(x))))
    logits = model.classifier(x)
    close(eval_outputs(run), logits)
    assert_gradient(run, logits)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["cluster", "neighbor"])
def test_drawn_edges_keep_their_type(method: Method, kind: str) -> None:
    cut = partitioned(expanded_graph())
    matrices = torch.stack(by_type(cut.graph))
    run = one_rank(cut, {"model": {"width": 6, "heads": 3, "layers": 1}})
    micro_batches = [micro_batch_of(cut, kind, parts) for parts in ([0, 3], [1, 2, 5])]
    context, _ = wave_of(run, replace(batch_of(*micro_batches, layers=1, fanout=3), method=method))
    (edges,) = context._compiled.edges
    new_id = torch.from_numpy(np.argsort(cut.original_id))
    nodes = new_id[context._compiled.sources]
    assert edges.pattern.num_cols == len(nodes), "columns are nodes"
    assert edges.types is not None
    rows = new_id[context.nodes_after][edges.pattern.row_index]
    assert (matrices[edges.types, rows, nodes[edges.pattern.indices.long()]] > 0).all()
    assert len(edges.types.unique()) == 2


def test_a_mean_over_one_type_of_edges() -> None:
    """Over all edges exact; over a sample the ratio of two estimates."""
    cut = partitioned(expanded_graph())
    run = one_rank(cut, {"model": {"width": 6, "heads": 3, "layers": 1}})
    x = random(cut.graph.num_nodes, 2)
    context, _ = wave_of(run, batch_of(everything(cut), layers=1))
    for edge_type, A in enumerate(by_type(cut.graph)):
        close(context.aggregate(x, edge_type=edge_type), A @ x / A.sum(1, keepdim=True).clamp(min=1))
    batch = replace(batch_of(everything(cut), layers=1, fanout=3), method="weighted")
    context, _ = wave_of(run, batch)
    (edges,) = context._compiled.edges
    assert edges.types is not None and edges.edge_inclusion is not None
    weights = (edges.types == 1) / edges.edge_inclusion
    B = torch.zeros(len(x), len(x)).double()
    B.index_put_((edges.pattern.row_index, edges.pattern.indices.long()), weights, accumulate=True)
    close(context.aggregate(x, edge_type=1), B @ x / B.sum(1, keepdim=True).clamp(min=1e-300))


def test_nagphormer_is_its_formula() -> None:
    """Node by node: torch's attention over its K + 1 rows `A^k X`, then the readout; gradient."""
    cut = partitioned(awkward_graph())
    settings = settings_of("NAGphormer")
    settings["model"]["hops"] = 4
    run = one_rank(cut, settings)
    model, spread = run.engine.model, normalised(dense(cut.graph))
    hops = [features_of(cut)]
    for _ in range(4):
        hops.append(spread @ hops[-1])
    rounded = [hop.float().double() for hop in hops]  # they are kept in float32
    last, found = model.layers[-1].readout.score, []
    for tokens in model.encoder(torch.stack(rounded, 1)):  # [5, C]
        for layer in model.layers:
            q, k, v = layer.query_key_value(layer.norm(tokens)).view(5, 3, 3, 2).permute(1, 2, 0, 3)
            attended = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]  # [H, 5, d]
            tokens = tokens + layer.output(attended.transpose(0, 1).flatten(1))
            tokens = tokens + layer.ffn.contract(F.gelu(layer.ffn.expand(layer.norm_ffn(tokens))))
        scores = torch.stack([last(torch.cat([tokens[0], hop])) for hop in tokens[1:]])  # [4, 1]
        found.append(tokens[0] + (scores.softmax(0) * tokens[1:]).sum(0))
    logits = model.classifier(torch.stack(found))
    close(eval_outputs(run), logits)
    assert_gradient(run, logits)


def test_a_linear_attention_counts_rows_before_the_layer() -> None:
    """Also where a rank owns as many after it, and other ranks own more before it."""
    context, _ = context_of((4,))
    compiled = context._compiled
    assert compiled.reduction is not None and context.num_src == context.num_dst
    totals = replace(compiled.reduction, src_totals=torch.tensor([8.0]).double())
    context._compiled = replace(compiled, reduction=totals)
    keys, values = random(4, 3, 2), random(4, 3, 2, seed=1)
    close(mean_outer(keys, values, context)[0], torch.einsum("nhr,nhd->hrd", keys, values) / 8)
    assert context.counts(keys).tolist() == [4.0]


# What a plan cannot change --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_weights_do_not_depend_on_plan_or_world(model: str) -> None:
    """Every rank starts with the same weights, all of them, whatever it will do with them."""
    cut = partitioned(awkward_graph())
    wanted = one_rank(cut, settings_of(model)).engine.model.state_dict()
    for size, mode in ((2, "graph"), (3, "model"), (2, "pipeline"), (4, "data"), (2, "mixed")):
        for rank in range(size):
            here = World(rank, size, torch.device("cpu"))
            found = rig(here, cut, plan_of(mode, cut, size, 2), settings_of(model)).engine.model.state_dict()
            assert list(found) == list(wanted)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_numbers_of_parameters() -> None:
    """F = 5 features, C = 6, 2 layers, 3 classes, an FFN of 2C; the plan is not among what a model is made from."""
    F_, C, classes = 5, 6, 3

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    ffn, norm = linear(C, 2 * C) + linear(2 * C, C), 2 * C
    ends = linear(F_, C) + norm + linear(C, classes)
    attention = linear(C, 2 * C) + 2 * linear(C, C)
    wanted = {
        "GT": ends + 2 * (2 * norm + attention + ffn),
        "GPS": ends + 2 * (2 * linear(C, C) + attention + 3 * norm + ffn),
        "GCN": linear(F_, C) + linear(C, classes),
        "SAGE": ends + 2 * (norm + linear(2 * C, 2 * C) + linear(2 * C, C)),
        "GAT": ends + 2 * (norm + linear(C, C) + linear(C, 3) + 3 * C + ffn),
        "MLP": ends + 2 * (norm + ffn),
        "SGFormer": ends + norm + linear(C, 3 * C) + norm + 2 * (C * C + norm),
        "Exphormer": ends
        + 2 * (2 * norm + attention + ffn + linear(C, 3 * 2) + 4 * linear(C, C) + 2 * linear(C, 3 * 4)),
        "NAGphormer": ends + 2 * (2 * norm + attention + ffn) + linear(2 * C, 1),
        "Polynormer": ends
        + (C * C + linear(C, 3) + 3 * C + 2 * linear(C, C) + 2 * norm + C)
        + (linear(C, 2 * C) + 2 * linear(C, C) + norm + C),
    }
    assert set(wanted) == set(MODELS)
    for name, count in wanted.items():
        model = GraphModel(parse_config(settings_of(name)).model, F_, classes)
        assert sum(p.numel() for p in model.parameters()) == count, name


# Nothing at all -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cluster", "neighbor"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("model", MODELS)
def test_a_wave_without_rows_changes_nothing(model: str, checkpointing: str, kind: str) -> None:
    """A micro-batch without rows, in a wave of its own or beside others: same loss, gradient, running statistics."""
    cut = partitioned(awkward_graph())
    a, b, nothing = (micro_batch_of(cut, kind, parts) for parts in ([0, 3], [1, 2, 5], []))
    assert len(nothing.nodes) == 0
    found = []
    for micro_batches, size in (((a, b), 0), ((nothing, a, nothing, b), 1), ((a, b, nothing), 0), ((a, nothing, b), 2)):
        run = one_rank(cut, settings_of(model), micro_batches_per_wave=size, checkpointing=checkpointing)
        run.batches.step = lambda step, parts=micro_batches: batch_of(*parts, layers=2)  # type: ignore[method-assign, misc]
        loss, gradient, compiled = loss_and_gradient(run)
        assert len(compiled.waves) == (1 if size == 0 else -(-len(micro_batches) // size))
        running = [value for name, value in run.engine.model.state_dict().items() if "running" in name]
        assert bool(running) == (model == "GPS")
        found.append(torch.cat([torch.tensor([loss]).double(), torch.from_numpy(gradient), *running]))
        assert found[-1].isfinite().all()
    for other in found[1:]:
        close(other, found[0])


def micro_batch_of(cut: PartitionedGraph, kind: str, parts: list[int]) -> MicroBatch:
    """A cluster of these partitions, or their training nodes as seeds."""
    chosen = np.isin(cut.part_of, parts)
    nodes, train = np.flatnonzero(chosen), np.flatnonzero(chosen & cut.graph.train_mask)
    if kind == "neighbor":
        return MicroBatch(train, train, grows=True)
    return MicroBatch(nodes, train, parts=np.array(parts, dtype=np.int64))


@pytest.mark.parametrize("model", MODELS)
def test_a_step_without_any_row_is_finite(model: str) -> None:
    run = one_rank(partitioned(awkward_graph()), settings_of(model))
    run.batches.step = lambda step: batch_of(rows_of([]), layers=2)  # type: ignore[method-assign]
    loss, gradient, _ = loss_and_gradient(run)
    assert loss == 0.0
    assert (gradient == 0).all()


# Sampling -------------------------------------------------------------------------------------------------------------


def test_a_sampled_sum_estimates_the_full_one() -> None:
    """The mean over the draws of many steps lies within 4.5 standard errors of the full sum; unscaled it does not."""
    cut = partitioned(awkward_graph())
    run = one_rank(cut, {"model": {"width": 6, "heads": 3, "layers": 1}})
    x = random(cut.graph.num_nodes, 2) + 1.0
    full = dense(cut.graph) @ x
    fanout, steps = 3, 500
    degrees = torch.from_numpy(cut.in_degrees)
    sampled = degrees > fanout
    share = (fanout / degrees.clamp(min=fanout))[:, None]  # of a row's edges that is drawn
    sums, unscaled = [], []
    for step in range(steps):
        context, _ = wave_of(run, batch_of(everything(cut), layers=1, fanout=fanout, step=step))
        sums.append(context.aggregate(x, "sum"))
        unscaled.append(sums[-1] * share)
    assert int(sampled.sum()) >= 20
    assert int(degrees.max()) > 60
    estimates = torch.stack(sums)  # [steps, N, 2]
    for one in estimates[:5]:
        close(one[~sampled], full[~sampled])
    assert in_standard_errors(estimates, full)[sampled].max() < 4.5
    assert in_standard_errors(torch.stack(unscaled), full)[sampled].min() > 4.5


def in_standard_errors(estimates: Tensor, wanted: Tensor) -> Tensor:
    """How far the mean over steps `[steps, ...]` is from what is wanted."""
    return (estimates.mean(0) - wanted).abs() / (estimates.std(0) / len(estimates) ** 0.5)


def test_a_sampled_mean_needs_no_scaling() -> None:
    cut = partitioned(awkward_graph())
    run = one_rank(cut, {"model": {"width": 6, "heads": 3, "layers": 1}})
    x = random(cut.graph.num_nodes, 2)
    A = dense(cut.graph)
    full = A @ x / A.sum(1, keepdim=True).clamp(min=1)
    draws = (
        wave_of(run, batch_of(everything(cut), layers=1, fanout=3, step=step))[0].aggregate(x) for step in range(300)
    )
    sampled = torch.from_numpy(cut.in_degrees) > 3
    assert in_standard_errors(torch.stack(list(draws)), full)[sampled].max() < 4.5


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("method", ["weighted", "multinomial", "shared"])
def test_any_draw_by_chance_estimates_the_full_one(method: Method, reduce: str) -> None:
    """And does not where it is not corrected for, except for a mean over edges that are equally likely."""
    cut = partitioned(awkward_graph())
    run = one_rank(cut, {"model": {"width": 6, "heads": 3, "layers": 1}})
    degrees = torch.from_numpy(cut.in_degrees)
    x = degrees[:, None].double() / degrees.max() + 1.0  # so that drawing by degree tells
    full = dense(cut.graph) @ x
    full = full if reduce == "sum" else full / degrees[:, None].clamp(min=1)
    drawn = {}
    for correct in (True, False):
        draws = []
        for step in range(600):
            batch = replace(batch_of(everything(cut), layers=1, fanout=3, step=step), method=method, correct=correct)
            draws.append(wave_of(run, batch)[0].aggregate(x, reduce))
        drawn[correct] = in_standard_errors(torch.stack(draws), full)[degrees > 3]
    if method == "shared" and reduce == "mean":
        return  # the ratio of two estimates, and 0 for a row that drew nothing
    assert drawn[True].max() < 4.5
    assert drawn[False].median() > 4.5


@pytest.mark.parametrize("method", ["weighted", "multinomial"])
def test_attention_over_a_sample_weighs_each_edge_by_how_likely_it_was(method: Method) -> None:
    """So its numerator and denominator estimate those over all edges; unweighed they do not."""
    cut = partitioned(awkward_graph())
    run = one_rank(cut, {"model": {"width": 6, "heads": 3, "layers": 1}})
    q, k, v = random(3, cut.graph.num_nodes, 3, 2)
    A = dense(cut.graph)
    scores = torch.einsum("ihd,jhd->hij", q, k).mul(2**-0.5).exp()  # [H, N, N]
    wanted = torch.stack([scores.mul(A) @ v[..., 0].T[..., None], scores.mul(A).sum(-1, keepdim=True)])
    sums: dict[bool, list[Tensor]] = {True: [], False: []}
    for step in range(600):
        batch = replace(batch_of(everything(cut), layers=1, fanout=3, step=step), method=method)
        context, _ = wave_of(run, batch)
        (edges,) = context._compiled.edges
        assert edges.edge_inclusion is not None and edges.pattern.num_cols == len(A), "columns are nodes"
        rows, columns = edges.pattern.row_index, edges.pattern.indices.long()
        for corrected in (True, False):
            weights = edges.edge_inclusion.reciprocal() if corrected else torch.ones_like(edges.edge_inclusion)
            B = torch.zeros_like(A).index_put((rows, columns), weights, accumulate=True)
            parts = [scores.mul(B) @ v[..., 0].T[..., None], scores.mul(B).sum(-1, keepdim=True)]
            sums[corrected].append(torch.stack(parts))
            if corrected and step < 5:
                out = context.attention(q, torch.stack([k, v], 1))
                close(out[..., 0].T[..., None], (parts[0] / parts[1]).nan_to_num(0.0))
    sampled = torch.from_numpy(cut.in_degrees) > 3
    errors = {known: in_standard_errors(torch.stack(found), wanted)[:, :, sampled] for known, found in sums.items()}
    assert errors[True].max() < 5.0
    assert errors[False].median() > 5.0


def test_a_cut_neighbourhood_is_scaled_to_the_whole_degree() -> None:
    """A cluster lacks the edges to other partitions: a sum is degree times the mean over those that are left."""
    cut = partitioned(awkward_graph())
    run = one_rank(cut, {"model": {"width": 6, "heads": 3, "layers": 1}, "batch": {"kind": "cluster", "parts": 2}})
    (part,) = run.batches.step(0).micro_batches
    context, _ = wave_of(run, batch_of(part, layers=1))
    A = dense(cut.graph)[part.nodes]
    left = A[:, part.nodes]
    x = random(len(part.nodes), 4)
    mean = left @ x / left.sum(1, keepdim=True).clamp(min=1)
    assert (left.sum(1) < A.sum(1)).any()
    close(context.aggregate(x, "sum"), mean * A.sum(1, keepdim=True))
    close(context.in_degrees(before=False), A.sum(1))
