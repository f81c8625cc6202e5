"""Sparse attention against its dense float64 definition: values, every gradient, memory, and the awkward patterns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_engine import SparsePattern, fastest_backend, resolve_backend, sparse_attention
from sparse_engine import attention as attention_module
from sparse_engine import torch_backend as torch_backend_module

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ("reference", "torch", "cpu")  # those that run on a CPU; test_sparse_engine_triton_backend.py has the other
SPARSE = [backend for backend in BACKENDS if backend != "reference"]


def random_pattern(num_rows: int, num_cols: int, num_edges: int, seed: int = 0) -> SparsePattern:
    generator = torch.Generator().manual_seed(seed)
    dst = torch.randint(0, num_rows, (num_edges,), generator=generator)
    src = torch.randint(0, num_cols, (num_edges,), generator=generator)
    return SparsePattern.from_edges(dst, src, num_rows, num_cols)


def full_pattern(num_rows: int, num_cols: int) -> SparsePattern:
    return SparsePattern(torch.arange(num_rows + 1) * num_cols, torch.arange(num_cols).repeat(num_rows), num_cols)


def hub_pattern() -> SparsePattern:
    """Row 0 attends to everyone three times over, everyone attends to column 0 and itself; row 40 is isolated."""
    others = torch.arange(1, 40)
    everyone = torch.arange(41).repeat(3)
    dst = torch.cat([torch.zeros_like(everyone), others, others])
    return SparsePattern.from_edges(dst, torch.cat([everyone, torch.zeros_like(others), others]), 41, 41)


def steep_pattern() -> SparsePattern:
    """One row of 8,000 edges, the others with one each."""
    dst = torch.cat([torch.zeros(8000, dtype=torch.int64), torch.arange(1, 60)])
    return SparsePattern.from_edges(dst, torch.arange(dst.numel()) % 60, 60, 60)


CASES: dict[str, tuple[SparsePattern, int, int]] = {  # pattern, heads, head dim
    "empty rows": (random_pattern(50, 50, 60), 2, 8),
    "self loops only": (SparsePattern(torch.arange(8), torch.arange(7), 7), 2, 4),
    "hub and isolated node": (hub_pattern(), 2, 8),
    "hub of thousands beside rows of one": (steep_pattern(), 2, 16),
    "full": (full_pattern(17, 17), 3, 5),
    "rectangular": (random_pattern(13, 61, 200), 4, 16),
    "odd sizes": (random_pattern(31, 29, 211), 3, 7),
    "one head of one": (random_pattern(9, 11, 40), 1, 1),
    "duplicates": (random_pattern(4, 3, 90), 2, 4),
    "int32": (SparsePattern(torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1], dtype=torch.int32), 2), 2, 4),
}
EMPTY_CASES: dict[str, SparsePattern] = {
    "no rows": SparsePattern(torch.tensor([0]), torch.zeros(0, dtype=torch.int64), 5),
    "no edges": SparsePattern(torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 3),
    "no columns": SparsePattern(torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 0),
    "nothing": SparsePattern(torch.tensor([0]), torch.zeros(0, dtype=torch.int64), 0),
}


def inputs(pattern: SparsePattern, heads: int, dim: int, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    """q, k, v and a gradient of the output; q and the pair k, v are strided views."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(pattern.num_rows, heads, 2 * dim, dtype=torch.float64, generator=generator).to(dtype)
    kv = torch.randn(pattern.num_cols, 2, heads, dim, dtype=torch.float64, generator=generator).to(dtype)
    grad = torch.randn(pattern.num_rows, heads, dim, dtype=torch.float64, generator=generator).to(dtype)
    return [wide[..., ::2], kv[:, 0], kv[:, 1], grad]


def bias_of(pattern: SparsePattern, heads: int | None, dtype: torch.dtype) -> Tensor:
    shape = (pattern.num_edges,) if heads is None else (pattern.num_edges, heads)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)


def gather_scatter(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern, edge_bias: Tensor | None) -> Tensor:
    """Plain torch, as message passing is usually written: the yardstick of the error budget."""
    row, col = pattern.row_index, pattern.indices.long()
    logits = (q[row] * k[col]).sum(-1) * q.shape[-1] ** -0.5  # [E, H]
    if edge_bias is not None:
        logits = logits + (edge_bias if edge_bias.dim() == 2 else edge_bias[:, None])
    index = row[:, None].expand_as(logits)
    peak = logits.new_full((pattern.num_rows, q.shape[1]), -torch.inf)
    weights = torch.exp(logits - peak.scatter_reduce(0, index, logits.detach(), "amax")[row])
    probs = weights / torch.zeros_like(peak).index_add(0, row, weights)[row]
    return torch.zeros_like(q).index_add(0, row, probs[:, :, None] * v[col])


def with_gradients(attend: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def on(pattern: SparsePattern, backend: str = "torch") -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, edge_bias: Tensor | None = None) -> Tensor:
        return sparse_attention(q, k, v, pattern, edge_bias=edge_bias, backend=backend)

    return attend


@pytest.mark.parametrize("bias", ["none", "per head", "shared"])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", SPARSE)
def test_error_budget_of_the_output_and_every_gradient(backend: str, case: str, dtype: torch.dtype, bias: str) -> None:
    pattern, heads, dim = CASES[case]
    *tensors, grad = inputs(pattern, heads, dim, dtype)
    if bias != "none":
        tensors.append(bias_of(pattern, heads if bias == "per head" else None, dtype))
    ours = with_gradients(on(pattern, backend), tensors, grad)
    plain = with_gradients(lambda q, k, v, b=None: gather_scatter(q, k, v, pattern, b), tensors, grad)
    right = with_gradients(on(pattern, "reference"), [t.double() for t in tensors], grad.double())
    for name, budget, our, usual, true in zip(
        ("out", "q", "k", "v", "bias"), (2, 3, 3, 3, 3), ours, plain, right, strict=False
    ):
        assert our.dtype == dtype
        floor = torch.finfo(dtype).eps * float(true.norm())  # where the yardstick happens to be exact
        error, usual_error = float((our.double() - true).norm()), float((usual.double() - true).norm())
        assert error <= budget * usual_error + floor, f"{name}: {error} against {usual_error} of plain torch"


@pytest.mark.parametrize("case", EMPTY_CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_rows_or_edges_everything_is_zero(case: str, backend: str) -> None:
    pattern = EMPTY_CASES[case]
    *tensors, grad = inputs(pattern, 2, 4, torch.float32)
    for extra in ([], [bias_of(pattern, 2, torch.float32)]):
        for result in with_gradients(on(pattern, backend), [*tensors, *extra], grad):
            assert not result.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_nothing_reaches_are_zero_with_zero_gradients(backend: str) -> None:
    pattern = SparsePattern(torch.tensor([0, 0, 2, 4]), torch.tensor([0, 1, 1, 2]), 3)
    *tensors, grad = inputs(pattern, 2, 4, torch.float64)
    bias = torch.zeros(4, 2, dtype=torch.float64)
    bias[:2] = -torch.inf  # row 1 has edges, all masked
    out, grad_q, _, _, grad_bias = with_gradients(on(pattern, backend), [*tensors, bias], grad)
    assert not out[:2].any()
    assert not grad_q[:2].any()
    assert not grad_bias[:2].any()
    assert out[2].all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_full_pattern_equals_sdpa(backend: str) -> None:
    *tensors, grad = inputs(full_pattern(12, 20), 3, 8, torch.float64)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, N or M, d]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)

    expected = with_gradients(sdpa, tensors, grad)
    for ours, theirs in zip(with_gradients(on(full_pattern(12, 20), backend), tensors, grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeated_edge_weighs_twice(backend: str) -> None:
    once = SparsePattern(torch.tensor([0, 2]), torch.tensor([0, 1]), 2)
    twice = SparsePattern(torch.tensor([0, 3]), torch.tensor([0, 1, 0]), 2)
    q, k, v, _ = inputs(once, 2, 4, torch.float64)
    log_two = torch.tensor([2.0, 1.0], dtype=torch.float64).log()
    expected = sparse_attention(q, k, v, once, edge_bias=log_two, backend=backend)
    torch.testing.assert_close(sparse_attention(q, k, v, twice, backend=backend), expected, rtol=1e-13, atol=1e-13)


@settings(deadline=None, max_examples=25)
@given(
    num_rows=st.integers(1, 8),
    num_cols=st.integers(1, 8),
    num_edges=st.integers(0, 40),
    heads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_random_patterns_equal_the_definition(
    num_rows: int, num_cols: int, num_edges: int, heads: int, seed: int
) -> None:
    pattern = random_pattern(num_rows, num_cols, num_edges, seed)
    *tensors, grad = inputs(pattern, heads, 3, torch.float64, seed)
    tensors.append(bias_of(pattern, heads, torch.float64) * 5)
    results = (with_gradients(on(pattern, backend), tensors, grad) for backend in BACKENDS)
    for right, *others in zip(*results, strict=True):
        for left in others:
            torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck_with_edge_bias(backend: str) -> None:
    pattern = random_pattern(5, 6, 14)
    *tensors, _ = inputs(pattern, 2, 3, torch.float64)
    for bias in (bias_of(pattern, 2, torch.float64), bias_of(pattern, None, torch.float64)):
        leaves = tuple(t.detach().requires_grad_() for t in [*tensors, bias])
        assert torch.autograd.gradcheck(on(pattern, backend), leaves)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
@pytest.mark.parametrize("backend", SPARSE)
def test_only_the_asked_gradients_are_computed_and_they_are_the_same(backend: str, wanted: tuple[int, ...]) -> None:
    pattern = random_pattern(9, 7, 40)
    *tensors, grad = inputs(pattern, 2, 4, torch.float64)
    tensors.append(bias_of(pattern, 2, torch.float64))
    _, *every = with_gradients(on(pattern, backend), tensors, grad)
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    some = torch.autograd.grad(on(pattern, backend)(*leaves), [leaves[i] for i in wanted], grad)
    for index, gradient in zip(wanted, some, strict=True):
        assert torch.equal(gradient, every[index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    pattern, heads, dim = CASES["rectangular"]
    *tensors, grad = inputs(pattern, heads, dim, dtype)
    half = on(pattern)(*tensors)
    assert torch.equal(half, on(pattern)(*(t.float() for t in tensors)).to(dtype))
    bias = bias_of(pattern, heads, torch.float32)  # its gradient keeps its own dtype
    assert [t.dtype for t in with_gradients(on(pattern), [*tensors, bias], grad)] == [dtype] * 4 + [torch.float32]


@pytest.mark.parametrize("elements", [1, 30, 500])
def test_a_tiny_chunk_budget_gives_the_same_also_on_a_hub(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, heads, dim = CASES["hub and isolated node"]
    *tensors, grad = inputs(pattern, heads, dim, torch.float64)
    expected = with_gradients(on(pattern), tensors, grad)
    monkeypatch.setattr(torch_backend_module, "_CPU_CHUNK_ELEMENTS_PER_THREAD", elements)
    for left, right in zip(with_gradients(on(pattern), tensors, grad), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", SPARSE)
def test_nothing_depends_on_what_new_memory_holds(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        buffer = new_empty(self, *args, **kwargs)
        return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer.fill_(2**30)

    cases = {**{name: case[0] for name, case in CASES.items()}, **EMPTY_CASES}
    for pattern in cases.values():
        *tensors, grad = inputs(pattern, 2, 4, torch.float64)
        expected = with_gradients(on(pattern, backend), tensors, grad)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "new_empty", poisoned)
            poisoned_results = with_gradients(on(pattern, backend), tensors, grad)
        for left, right in zip(poisoned_results, expected, strict=True):
            assert torch.equal(left, right)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest floating tensor that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor) and result.is_floating_point():
                self.elements = max(self.elements, result.numel())
        return results


def test_no_tensor_of_edges_times_width_is_made_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    num_nodes, num_edges, heads, dim = 60, 6000, 2, 8
    pattern = random_pattern(num_nodes, num_nodes, num_edges)
    *tensors, grad = inputs(pattern, heads, dim, torch.float32)
    monkeypatch.setattr(torch_backend_module, "_CPU_CHUNK_ELEMENTS_PER_THREAD", 1000)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    leaves = [t.detach().requires_grad_() for t in tensors]
    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = on(pattern)(*leaves)
        torch.autograd.grad(out, leaves, grad)
    assert sorted(t.numel() for t in saved) == [num_nodes * heads] * 2 + [num_nodes * heads * dim] * 3
    assert largest.elements == num_edges * heads


def test_the_fused_code_makes_and_keeps_nothing_per_edge() -> None:
    num_nodes, heads, dim = 60, 2, 16
    pattern = random_pattern(num_nodes, num_nodes, 6000)
    *tensors, grad = inputs(pattern, heads, dim, torch.float32)
    tensors = [t.contiguous() for t in tensors]
    with LargestTensor() as largest:
        with_gradients(on(pattern, "cpu"), tensors, grad)
    assert largest.elements == num_nodes * heads * dim


@pytest.mark.parametrize("backend", SPARSE)
def test_it_does_not_warn(backend: str) -> None:
    pattern, heads, dim = CASES["odd sizes"]
    *tensors, grad = inputs(pattern, heads, dim, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_gradients(on(pattern, backend), tensors, grad)


@pytest.mark.parametrize("backend", SPARSE)
def test_scale_and_large_logits(backend: str) -> None:
    pattern, heads, dim = CASES["rectangular"]
    q, k, v, _ = inputs(pattern, heads, dim, torch.float32)
    out = sparse_attention(q, k, v, pattern, scale=300.0, backend=backend)
    expected = sparse_attention(q.double(), k.double(), v.double(), pattern, scale=300.0, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


def test_backends_are_resolved_or_refused_by_name() -> None:
    assert resolve_backend("auto", "cpu", torch.float32) == "cpu"
    assert resolve_backend("auto", "cpu", torch.float16) == resolve_backend("auto", "cuda", torch.float32) == "torch"
    with pytest.raises(ValueError, match="backend 'cpu' runs .* not torch.float16 on cpu; use 'torch'"):
        resolve_backend("cpu", "cpu", torch.float16)
    for name in BACKENDS:
        assert resolve_backend(name, "cpu", torch.bfloat16) == name
    with pytest.raises(ValueError, match="'cuda-graph' is unknown; available are auto, reference, torch"):
        resolve_backend("cuda-graph", "cpu", torch.float32)
    with pytest.raises(ValueError, match="no attention backend runs torch.int64"):
        resolve_backend("auto", "cpu", torch.int64)


def test_wrong_inputs_are_refused_in_one_line() -> None:
    pattern = random_pattern(4, 5, 9)
    q, k, v, _ = inputs(pattern, 2, 3, torch.float32)
    wrong: list[tuple[str, dict[str, Tensor]]] = [
        (r"q must be \[N=4, H, d\]", {"q": q[:3]}),
        (r"q must be \[N=4, H, d\]", {"q": q[:, 0]}),
        (r"k must be \[M=5, H=2, d=3\], got \[4, 2, 3\]", {"k": k[:4]}),
        (r"v must be \[M=5", {"v": v[:, :1]}),
        ("v is torch.float64 and q is torch.float32", {"v": v.double()}),
        (r"edge_bias must be \[E=9\]", {"edge_bias": torch.zeros(8)}),
        (r"edge_bias must be \[E=9\]", {"edge_bias": torch.zeros(9, 3)}),
        ("edge_bias must be floating", {"edge_bias": torch.zeros(9, dtype=torch.int64)}),
        ("q is on cpu", {"edge_bias": torch.zeros(9, device="meta")}),
    ]
    for message, change in wrong:
        given_inputs = {"q": q, "k": k, "v": v, **change}
        with pytest.raises(ValueError, match=message) as caught:
            sparse_attention(pattern=pattern, **given_inputs)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_auto_takes_what_was_measured_once_for_alike_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    seconds = {"reference": 3.0, "torch": 1.0, "cpu": 2.0}

    def time_it(pattern: SparsePattern, heads: int, dim: int, dtype: torch.dtype, name: str) -> float:
        measured.append(name)
        return seconds[name]

    monkeypatch.setattr(attention_module, "_fastest", {})
    monkeypatch.setattr(attention_module, "_seconds", time_it)
    names = ("reference", "torch", "cpu")
    for num_edges in (100, 99):  # one power of two
        assert fastest_backend(random_pattern(9, 9, num_edges), 2, 4, torch.float32, names) == "torch"
    assert measured == list(names)
    for others in ((200, 2, torch.float32), (100, 3, torch.float32), (100, 2, torch.float16)):
        fastest_backend(random_pattern(9, 9, others[0]), others[1], 4, others[2], names)
    assert measured == list(names) * 4
    assert fastest_backend(EMPTY_CASES["no edges"], 2, 4, torch.float32, names) == "reference"
    torch.use_deterministic_algorithms(True)
    try:
        assert fastest_backend(random_pattern(9, 9, 100), 2, 4, torch.float32, names) == "reference"
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(measured) == 12


def test_a_backend_that_fails_when_measured_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise ArithmeticError("out of memory\nand more")

    monkeypatch.setattr(attention_module, "_fastest", {})
    monkeypatch.setitem(attention_module._RUN, "cpu", fail)
    with pytest.warns(UserWarning, match="'cpu' failed and is not taken: out of memory$"):
        assert fastest_backend(random_pattern(9, 9, 30), 2, 4, torch.float32, ("cpu", "torch")) == "torch"
    monkeypatch.setitem(attention_module._RUN, "torch", fail)
    monkeypatch.setattr(attention_module, "_fastest", {})
    with pytest.warns(UserWarning, match="not taken"), pytest.raises(ArithmeticError, match="out of memory"):
        fastest_backend(random_pattern(9, 9, 30), 2, 4, torch.float32, ("cpu", "torch"))


def test_measuring_leaves_the_callers_draws_alone() -> None:
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    assert attention_module._seconds(random_pattern(9, 9, 30), 2, 4, torch.float32, "torch") > 0
    assert torch.equal(torch.randn(2), expected)
