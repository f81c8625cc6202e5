"""Drawing in-neighbours by the compiled code of `csrc/sampling.cpp`, the same edges as `torch_sampler.py`.

Building and loading is in `native.py`. Other Python threads run meanwhile. Shape letters as in `sampler.py`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sparse_engine.native import NativeError, library
from sparse_engine.torch_sampler import Drawn, Request, unknown_source

_METHODS = {"uniform": 0, "weighted": 1, "multinomial": 2, "top": 3, "shared": 4}


class _Request(ctypes.Structure):
    """`SampleRequest` of `csrc/sampling.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("indptr", "indices", "rows", "row_keys", "weights", "source_keys")),
        *((name, ctypes.c_int64) for name in ("num_rows", "fanout", "num_sources")),
        *((name, ctypes.c_int32) for name in ("method", "wide", "threads")),
    ]


def suits(request: Request) -> bool:
    """Whether the compiled code can be had and the graph lies as it reads it."""
    if request.indptr.device.type != "cpu" or request.indices.dtype not in (torch.int64, torch.int32):
        return False
    try:
        library()
    except NativeError:
        return False
    return True


def draw(request: Request) -> Drawn:
    """See `sampler.sample_neighbors`."""
    indptr, indices = request.indptr.contiguous(), request.indices.contiguous()
    others = (request.rows, request.row_keys, request.weights, request.source_keys)
    rows, row_keys, weights, source_keys = (None if x is None else x.contiguous() for x in others)
    fanout, method = request.fanout, request.method
    num_rows = indptr.numel() - 1 if rows is None else rows.numel()
    out_indptr = torch.empty(num_rows + 1, dtype=torch.int64)
    inclusion = torch.empty(num_rows, dtype=torch.float64)
    asked = _Request(
        *(None if x is None else x.data_ptr() for x in (indptr, indices, rows, row_keys, weights, source_keys)),
        num_rows,
        -1 if fanout is None else fanout,
        0 if source_keys is None else source_keys.numel(),
        _METHODS[method],
        indices.dtype == torch.int64,
        torch.get_num_threads(),
    )
    code = library()
    if not code.gtx_sample_count(ctypes.byref(asked), _pointer(out_indptr), _pointer(inclusion)):
        raise unknown_source(request)
    num_edges = int(out_indptr[-1])
    drawn = indices.new_empty(num_edges)
    odds = torch.empty(num_edges, dtype=torch.float64) if method in ("weighted", "multinomial") else None
    code.gtx_sample_fill(ctypes.byref(asked), _pointer(out_indptr), _pointer(drawn), _pointer(odds))
    return out_indptr, drawn, inclusion, odds


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
