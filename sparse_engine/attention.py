"""Sparse attention: one signature, several backends. Checks the inputs and picks who computes.

The arithmetic is in `reference.py` (dense, the definition of right), `torch_backend.py` (any device),
`cpu_backend.py` (fused, on a CPU) and `triton_backend.py` (fused, on a GPU). Shape letters: `N` queries, `M` keys,
`E` edges, `H` heads, `d` head dim.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sparse_engine.cpu_backend import DTYPES as CPU_DTYPES
from sparse_engine.cpu_backend import cpu_attention
from sparse_engine.native import NativeError, library
from sparse_engine.pattern import SparsePattern
from sparse_engine.reference import reference_attention
from sparse_engine.torch_backend import torch_attention
from sparse_engine.triton_backend import DTYPES as TRITON_DTYPES
from sparse_engine.triton_backend import interpreted, triton_attention
from sparse_engine.triton_backend import missing as triton_missing

BACKENDS = ("reference", "torch", "cpu", "triton")
_RUN: dict[str, Callable[..., Tensor]] = {
    "reference": reference_attention,
    "torch": torch_attention,
    "cpu": cpu_attention,
    "triton": triton_attention,
}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_REPEATS = 3  # of a backend that is timed
_fastest: dict[tuple[Any, ...], str] = {}
"""The backend that was measured fastest in this process, by what `fastest_backend` says."""


def auto_backends(device: torch.device | str, dtype: torch.dtype) -> tuple[str, ...]:
    """The backends that `"auto"` may take, the likely fastest first.

    On a CPU that is `"cpu"`, which compiles its code at first use, or `"torch"` for fp16 and without a C++ compiler,
    which is warned of once. On a GPU it is `"triton"`, where it can run, and `"torch"`.

    Raises:
        ValueError: if no backend runs `dtype`.

    Example:

        >>> auto_backends("cpu", torch.float16)
        ('torch',)
    """
    device = torch.device(device)
    _check_dtype(device, dtype)
    if device.type == "cpu":
        return ("cpu",) if dtype in CPU_DTYPES and _compiles() else ("torch",)
    return ("triton", "torch") if dtype in TRITON_DTYPES and _on_gpu(str(device)) else ("torch",)


def resolve_backend(name: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """The backend that `name` stands for: itself if it can run, the first of `auto_backends` for `"auto"`.

    Raises:
        ValueError: if there is no such backend or it cannot run `dtype` on `device`.

    Example:

        >>> resolve_backend("auto", "cpu", torch.float32)
        'cpu'
    """
    if name == "auto":
        return auto_backends(device, dtype)[0]
    device = torch.device(device)
    _check_dtype(device, dtype)
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; available are auto, {', '.join(BACKENDS)}")
    if name == "cpu":
        if device.type != "cpu" or dtype not in CPU_DTYPES:
            known = ", ".join(map(str, CPU_DTYPES))
            raise ValueError(f"attention backend 'cpu' runs {known} on a CPU, not {dtype} on {device}; use 'torch'")
        missing = _missing()
        if missing:
            raise ValueError(f"attention backend 'cpu': {missing}")
    if name == "triton":
        if dtype not in TRITON_DTYPES:
            known = ", ".join(map(str, TRITON_DTYPES))
            raise ValueError(f"attention backend 'triton' runs {known}, not {dtype}; use 'torch'")
        missing = _triton_missing(str(device))
        if missing:
            raise ValueError(f"attention backend 'triton' {missing}")
    return name


def _check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise ValueError(
            f"no attention backend runs {dtype} on {device}; available are {', '.join(BACKENDS)} with "
            f"{', '.join(str(known) for known in _DTYPES)}"
        )


def fastest_backend(pattern: SparsePattern, heads: int, dim: int, dtype: torch.dtype, names: Sequence[str]) -> str:
    """The one of `names` that takes least for forward and backward over this pattern; measured once in a process.

    What was found holds for the same names, heads, head dim, dtype and device and numbers of rows, columns and edges
    that round up to the same power of two, so that fresh samples of a graph are not measured anew. A backend that
    fails, as when its memory does not suffice, is warned of and not taken. Under
    `torch.use_deterministic_algorithms(True)` nothing is measured and the first one is taken.

    Raises:
        Exception: what the last backend raised, if all fail.

    Example:

        >>> pattern = SparsePattern(torch.tensor([0, 1]), torch.tensor([0]), num_cols=1)
        >>> fastest_backend(pattern, heads=1, dim=4, dtype=torch.float32, names=["torch"])
        'torch'
    """
    if len(names) == 1 or pattern.num_edges == 0 or torch.are_deterministic_algorithms_enabled():
        return names[0]
    sizes = tuple(size.bit_length() for size in (pattern.num_rows - 1, pattern.num_cols - 1, pattern.num_edges - 1))
    key = (*names, heads, dim, dtype, str(pattern.device), *sizes)
    if key not in _fastest:
        taken = {}
        for name in names:
            try:
                taken[name] = _seconds(pattern, heads, dim, dtype, name)
            except Exception as error:  # a GPU's memory, Triton's compiler and its assembler each have their own
                if len(names) == len(taken) + 1 and not any(map(math.isfinite, taken.values())):
                    raise
                taken[name] = math.inf
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                warnings.warn(f"attention backend {name!r} failed and is not taken: {reason}", stacklevel=3)
        _fastest[key] = min(taken, key=lambda name: taken[name])
    return _fastest[key]


def _seconds(pattern: SparsePattern, heads: int, dim: int, dtype: torch.dtype, name: str) -> float:
    """Least seconds of some repetitions of forward and backward, after one that compiles."""
    rows = (pattern.num_rows, pattern.num_cols, pattern.num_cols)
    generator = torch.Generator(pattern.device).manual_seed(0)  # the caller's draws stay as they are
    q, k, v = (
        torch.randn(n, heads, dim, dtype=dtype, device=pattern.device, generator=generator).requires_grad_()
        for n in rows
    )
    times = []
    for _ in range(1 + _REPEATS):
        _wait(pattern.device)
        begin = perf_counter()
        with torch.enable_grad():
            out = _RUN[name](q, k, v, pattern, None, dim**-0.5)
            torch.autograd.grad(out, (q, k, v), out.detach())
        _wait(pattern.device)
        times.append(perf_counter() - begin)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.compiler.assume_constant_result
def _triton_missing(device: str) -> str:
    return triton_missing(torch.device(device))


@torch.compiler.assume_constant_result
def _on_gpu(device: str) -> bool:
    """Whether the Triton kernels can run there, compiled: the interpreter is for tests."""
    return not triton_missing(torch.device(device)) and not interpreted()


@torch.compiler.assume_constant_result
def _missing() -> str:
    """Why the fused code cannot be had; nothing if it can."""
    try:
        library()
    except NativeError as error:
        return str(error)
    return ""


@cache
def _warn(missing: str) -> None:
    warnings.warn(f"{missing}; attention runs by torch operators, several times slower", stacklevel=4)


@torch.compiler.assume_constant_result
def _compiles() -> bool:
    """Whether the fused code can be had; warns once if not."""
    missing = _missing()
    if missing:
        _warn(missing)
    return not missing


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: SparsePattern,
    *,
    edge_bias: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention of every destination over its in-edges.

    `out[i] = sum_e p[e] v[src(e)]` over the edges `e` of row `i`, with `p` the softmax over these edges of
    `scale * q[i] . k[src(e)] + edge_bias[e]` (Vaswani et al. 2017, restricted to edges as in Dwivedi and Bresson 2021).
    A repeated edge counts as often as it is there. A row without edges, or whose edges all have a bias of `-inf`, gives
    zeros.

    Args:
        q: `[N, H, d]`, float64, float32, bfloat16 or float16; may be non-contiguous, as may `k` and `v`.
        k, v: `[M, H, d]` in the dtype of `q`.
        pattern: `N x M`.
        edge_bias: added to the logits, `[E, H]` or `[E]` (one for all heads), any floating dtype; differentiable.
        scale: default `d ** -0.5`.
        backend: `"auto"` or one of `BACKENDS`. Where `"auto"` may take several, as on a GPU, it takes what
            `fastest_backend` measures, or while a graph is traced or captured the first of `auto_backends`.

    Returns:
        `[N, H, d]` in the dtype of `q`; gradients for `q`, `k`, `v` and `edge_bias`. Half types are computed in
        float32 by all backends but `reference`.

    Raises:
        ValueError: for shapes, dtypes or devices that do not match, or a backend that cannot run.

    Example: node 0 averages nodes 1 and 2 as its query is zero; node 1 has no in-edge.

        >>> pattern = SparsePattern(torch.tensor([0, 2, 2]), torch.tensor([1, 2]), num_cols=3)
        >>> k = v = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])  # [3, 1, 1]
        >>> sparse_attention(torch.zeros(2, 1, 1), k, v, pattern).flatten().tolist()
        [3.0, 0.0]
    """
    _check_inputs(q, k, v, pattern, edge_bias)
    return _RUN[_picked(backend, q, pattern)](
        q, k, v, pattern, edge_bias, q.shape[-1] ** -0.5 if scale is None else scale
    )


def _picked(name: str, q: Tensor, pattern: SparsePattern) -> str:
    if name != "auto" or q.device.type == "cpu" or torch.compiler.is_compiling():
        return resolve_backend(name, q.device, q.dtype)
    names = auto_backends(q.device, q.dtype)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return names[0]
    return fastest_backend(pattern, q.shape[1], q.shape[2], q.dtype, names)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern, edge_bias: Tensor | None) -> None:
    if q.dim() != 3 or q.shape[1] < 1 or q.shape[2] < 1 or q.shape[0] != pattern.num_rows:
        raise ValueError(
            f"q must be [N={pattern.num_rows}, H, d] with H and d at least 1, got {list(q.shape)}; "
            "reshape q or give the pattern of these rows"
        )
    for name, tensor in (("k", k), ("v", v)):
        if list(tensor.shape) != [pattern.num_cols, *q.shape[1:]]:
            raise ValueError(
                f"{name} must be [M={pattern.num_cols}, H={q.shape[1]}, d={q.shape[2]}], got {list(tensor.shape)}; "
                f"reshape {name} or give a pattern with its number of columns"
            )
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and q is {q.dtype}; convert them to one dtype")
    if edge_bias is not None:
        heads = edge_bias.shape[1:]
        if edge_bias.shape[:1] != (pattern.num_edges,) or list(heads) not in ([], [q.shape[1]]):
            raise ValueError(
                f"edge_bias must be [E={pattern.num_edges}] or [E={pattern.num_edges}, H={q.shape[1]}], "
                f"got {list(edge_bias.shape)}"
            )
        if not edge_bias.is_floating_point():
            raise ValueError(f"edge_bias must be floating, got {edge_bias.dtype}; convert it to {q.dtype}")
    named = {"k": k, "v": v, "pattern": pattern.indices, "edge_bias": edge_bias}
    elsewhere = {name: str(t.device) for name, t in named.items() if t is not None and t.device != q.device}
    if elsewhere:
        raise ValueError(f"q is on {q.device}, elsewhere are {elsewhere}; move all to one device")
