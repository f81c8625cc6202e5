"""Sparse attention by the fused code of `csrc/`: the torch operators around it, their shapes and gradients.

Nothing is kept per edge; besides its result the forward keeps two numbers per row and head. Building and loading is in
`native.py`. Shape letters: `N` queries, `M` keys, `E` edges, `H` heads, `d` head dim.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparse_engine.native import library
from sparse_engine.pattern import SparsePattern, recall, remember

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
_LANES = 16  # of the widest vectors: what rows are padded to is the same on every CPU


class _Inputs(ctypes.Structure):
    """`AttentionInputs` of `csrc/attention.cpp`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_rows", "num_cols", "num_edges", "heads", "dim")),
        *((name, ctypes.c_void_p) for name in "qkv"),
        *((name, ctypes.c_int64) for name in ("stride_q", "stride_k", "stride_v")),
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "bias")),
        *((name, ctypes.c_int64) for name in ("bias_edge_stride", "bias_head_stride")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("type", "wide", "threads")),
    ]


class _Gradients(ctypes.Structure):
    """`AttentionGradients` of `csrc/attention.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("grad", "out", "extremes", "indptr", "indices", "order")),
        *((name, ctypes.c_void_p) for name in ("lines", "grad_q", "grad_k", "grad_v", "grad_bias")),
        ("bias_shared", ctypes.c_int32),
    ]


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern, edge_bias: Tensor | None, scale: float
) -> Tensor:
    """See `attention.sparse_attention`, which checks the inputs."""
    if not torch.compiler.is_compiling():  # while a graph is traced nothing lies anywhere: backward transposes anew
        remember(pattern)
    heads, dim = q.shape[1:]
    wide = _padded(heads, dim)
    if wide != dim:
        q, k, v = (functional.pad(x, (0, wide - dim)) for x in (q, k, v))
    out, _ = _forward(q, k, v, pattern.indptr, pattern.indices, edge_bias, scale)
    return out if wide == dim else out[..., :dim]


def _padded(heads: int, dim: int) -> int:
    """The least head dim that the code runs: heads that share a vector fill it, others take whole vectors."""
    for shared in (4, 2):
        if dim <= _LANES // shared and heads % shared == 0:
            return _LANES // shared
    return -(-dim // _LANES) * _LANES


def _rows(x: Tensor) -> Tensor:
    """`x [n, H, d]` with `[H, d]` without gaps; rows may be strided."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _describe(
    q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, bias: Tensor | None, scale: float
) -> _Inputs:
    heads, dim = q.shape[1:]
    return _Inputs(
        indptr.numel() - 1,
        k.shape[0],
        indices.numel(),
        heads,
        dim,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        indptr.data_ptr(),
        indices.data_ptr(),
        None if bias is None else bias.data_ptr(),
        0 if bias is None else bias.stride(0),
        0 if bias is None or bias.dim() == 1 else bias.stride(1),
        scale,
        DTYPES[q.dtype],
        indices.dtype == torch.int64,
        torch.get_num_threads(),
    )


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.custom_op("gtx::cpu_attention", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, edge_bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`[N, H, d]` and, in the work dtype, `[N, 2, H]`: each row's largest logit, one over its sum of exponentials."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    out = q.new_empty(q.shape)
    work = _work_dtype(q.dtype)
    extremes = q.new_empty(q.shape[0], 2, q.shape[1], dtype=work)
    bias = None if edge_bias is None else edge_bias.to(work)
    inputs = _describe(q, k, v, indptr.contiguous(), indices.contiguous(), bias, scale)
    if q.shape[0]:
        library().gtx_attention_forward(
            ctypes.byref(inputs), ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(extremes.data_ptr())
        )
    return out, extremes


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, edge_bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], 2, q.shape[1])
    return q.new_empty(q.shape), q.new_empty(shape, dtype=_work_dtype(q.dtype))


@torch.library.custom_op("gtx::cpu_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    extremes: Tensor,
    indptr: Tensor,
    indices: Tensor,
    edge_bias: Tensor | None,
    scale: float,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of q, k, v and the bias; what is not wanted is empty."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    grad, out = grad.contiguous(), out.contiguous()
    indptr, indices = indptr.contiguous(), indices.contiguous()
    work = _work_dtype(q.dtype)
    bias = None if edge_bias is None else edge_bias.to(work)
    made = [x.new_empty(x.shape) if want else x.new_empty(0) for x, want in zip((q, k, v), wanted, strict=False)]
    made.append(q.new_empty(0) if bias is None or not wanted[3] else bias.new_empty(bias.shape))
    lines = q.new_empty(q.shape[0], -(-3 * q.shape[1] // _LANES) * _LANES, dtype=work)
    by_source: tuple[SparsePattern, Tensor] | None = None
    if wanted[1] or wanted[2]:
        by_source = recall(indptr, indices, k.shape[0]).transpose()
    pointers = [x.data_ptr() if want else None for x, want in zip(made, wanted, strict=True)]
    inputs = _describe(q, k, v, indptr, indices, bias, scale)
    columns, order = (None, None) if by_source is None else by_source
    gradients = _Gradients(
        grad.data_ptr(),
        out.data_ptr(),
        extremes.data_ptr(),
        None if columns is None else columns.indptr.data_ptr(),
        None if columns is None else columns.indices.data_ptr(),
        None if order is None or bias is None else order.data_ptr(),
        lines.data_ptr(),
        *pointers,
        bias is not None and bias.dim() == 1,
    )
    library().gtx_attention_backward(ctypes.byref(inputs), ctypes.byref(gradients))
    if edge_bias is not None and wanted[3]:
        made[3] = made[3].to(edge_bias.dtype)
    return made


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    edge_bias, _, wanted = rest[-3:]
    of = (q, k, v, q if edge_bias is None else edge_bias)
    return [x.new_empty(x.shape if want else (0,)) for x, want in zip(of, wanted, strict=True)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, indptr, indices, edge_bias, scale = inputs
    ctx.save_for_backward(q, k, v, *output, indptr, indices, edge_bias)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, extremes, indptr, indices, edge_bias = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], needs[2], edge_bias is not None and needs[5]]
    if grad is None:
        return (None,) * 7
    made = _backward(grad, q, k, v, out, extremes, indptr, indices, edge_bias, ctx.scale, wanted)
    grad_q, grad_k, grad_v, grad_bias = (x if want else None for x, want in zip(made, wanted, strict=True))
    return grad_q, grad_k, grad_v, None, None, grad_bias, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
