"""Sparse attention: one signature, several backends. Checks the inputs and picks who computes.

The arithmetic is in `reference.py` (dense, the definition of right), `torch_backend.py` (any device) and
`cpu_backend.py` (fused, on a CPU). Shape letters: `N` queries, `M` keys, `E` edges, `H` heads, `d` head dim.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from sparse_engine.cpu_backend import DTYPES as CPU_DTYPES
from sparse_engine.cpu_backend import cpu_attention
from sparse_engine.native import NativeError, library
from sparse_engine.pattern import SparsePattern
from sparse_engine.reference import reference_attention
from sparse_engine.torch_backend import torch_attention

BACKENDS = ("reference", "torch", "cpu")
_RUN = {"reference": reference_attention, "torch": torch_attention, "cpu": cpu_attention}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def resolve_backend(name: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """The backend that `name` stands for: itself if it can run.

    `"auto"` is `"cpu"` on a CPU, which compiles its code at first use; `"torch"` elsewhere, for fp16, and without a C++
    compiler, which is warned of once.

    Raises:
        ValueError: if there is no such backend or it cannot run `dtype` on `device`.

    Example:

        >>> resolve_backend("auto", "cpu", torch.float32)
        'cpu'
    """
    if dtype not in _DTYPES:
        raise ValueError(
            f"no attention backend runs {dtype} on {torch.device(device)}; available are {', '.join(BACKENDS)} with "
            f"{', '.join(str(known) for known in _DTYPES)}"
        )
    suits_cpu = torch.device(device).type == "cpu" and dtype in CPU_DTYPES
    if name == "auto":
        return "cpu" if suits_cpu and _compiles() else "torch"
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; available are auto, {', '.join(BACKENDS)}")
    if name == "cpu":
        if not suits_cpu:
            known = ", ".join(map(str, CPU_DTYPES))
            raise ValueError(
                f"attention backend 'cpu' runs {known} on a CPU, not {dtype} on {torch.device(device)}; use 'torch'"
            )
        missing = _missing()
        if missing:
            raise ValueError(f"attention backend 'cpu': {missing}")
    return name


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
        backend: `"auto"` or one of `BACKENDS`.

    Returns:
        `[N, H, d]` in the dtype of `q`; gradients for `q`, `k`, `v` and `edge_bias`. Half types are computed in
        float32 by the backends `torch` and `cpu`.

    Raises:
        ValueError: for shapes, dtypes or devices that do not match, or a backend that cannot run.

    Example: node 0 averages nodes 1 and 2 as its query is zero; node 1 has no in-edge.

        >>> pattern = SparsePattern(torch.tensor([0, 2, 2]), torch.tensor([1, 2]), num_cols=3)
        >>> k = v = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])  # [3, 1, 1]
        >>> sparse_attention(torch.zeros(2, 1, 1), k, v, pattern).flatten().tolist()
        [3.0, 0.0]
    """
    _check_inputs(q, k, v, pattern, edge_bias)
    attend = _RUN[resolve_backend(backend, q.device, q.dtype)]
    return attend(q, k, v, pattern, edge_bias, q.shape[-1] ** -0.5 if scale is None else scale)


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
