"""Sparse attention by Triton kernels on a GPU: what is launched on which rows, the torch operators, their gradients.

The kernels are in `triton_kernels.py`, which is imported at the first call. Where Python was started with
`TRITON_INTERPRET=1` they run on Triton's interpreter, on a CPU and very slowly, which is what the tests do. Nothing is
kept per edge; besides its result the forward keeps two numbers per row and head. Shape letters: `N` queries, `M` keys,
`E` edges, `H` heads, `d` head dim, `S` segments, `P` pieces of split rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sparse_engine.pattern import SparsePattern, recall, remember

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PIECE = 512  # edges: longer rows are split among programs
_DEGREES = (8, 32, PIECE)  # rows up to each are launched together, as a program's rows take as long as its longest
_OLDEST_GPU = (7, 0)  # the compute capability that Triton supports
_REPEATS = 3  # of a launch that is timed


@dataclass(frozen=True)
class Tile:
    """How large a program is.

    elements: of a tile `[B, L, D]`, a power of two; 16 to 32 a thread leave registers for three of them. warps: of 32
    threads.
    """

    elements: int
    warps: int


TILES = (Tile(2048, 4), Tile(1024, 2), Tile(4096, 4), Tile(4096, 8))
"""Candidates; the first one runs where nothing is measured."""


@dataclass(frozen=True)
class Schedule:
    """A pattern's rows by degree, so that no program waits for a hub.

    groups: (longest degree, segments int64 `[3, S]`: row, first edge, end), each row whole; together with `split` they
    are all rows. pieces: segments of at most `PIECE` edges of the rows that are longer. split: int64 `[3, rows]`, these
    rows, each with its first piece and the end of its pieces.
    """

    groups: tuple[tuple[int, Tensor], ...]
    pieces: Tensor
    split: Tensor


def make_schedule(pattern: SparsePattern, piece: int = PIECE) -> Schedule:
    """Group and split the rows of a pattern, within a group in their order. Costs one wait for the device.

    Example: a hub of five edges in pieces of at most two, beside a row of one.

        >>> made = make_schedule(SparsePattern(torch.tensor([0, 5, 6]), torch.tensor([0, 1, 2, 3, 4, 0]), 5), piece=2)
        >>> made.pieces.tolist()
        [[0, 0, 0], [0, 2, 4], [2, 4, 5]]
        >>> made.split.tolist(), [segments.tolist() for _, segments in made.groups]
        ([[0], [0], [3]], [[[1], [5], [6]]])
    """
    bounds = [degree for degree in _DEGREES if degree < piece] + [piece]
    degrees = pattern.degrees
    group = torch.bucketize(degrees, torch.tensor(bounds, device=pattern.device))  # [N]: the first bound that holds it
    order = torch.argsort(group, stable=True)
    counts = torch.bincount(group, minlength=len(bounds) + 1).tolist()
    segments = torch.stack([order, pattern.indptr[:-1][order], pattern.indptr[1:][order]])  # [3, N]
    *whole, split = segments.split(counts, dim=1)
    row, first, end = split
    num_pieces = (end - first + piece - 1) // piece
    last = num_pieces.cumsum(0)
    of = torch.repeat_interleave(torch.arange(row.numel(), device=row.device), num_pieces)  # [P]: which split row
    begin = first[of] + (torch.arange(of.numel(), device=row.device) - (last - num_pieces)[of]) * piece
    return Schedule(
        groups=tuple((b, s.contiguous()) for b, s in zip(bounds, whole, strict=True) if s.shape[1]),
        pieces=torch.stack([row[of], begin, torch.minimum(begin + piece, end[of])]),
        split=torch.stack([row, last - num_pieces, last]),
    )


_schedules: WeakKeyDictionary[SparsePattern, Schedule] = WeakKeyDictionary()
_tiles: dict[tuple[Any, ...], Tile] = {}
"""The fastest tile by kernel and shape, measured in this process."""


def _schedule(pattern: SparsePattern) -> Schedule:
    known = _schedules.get(pattern)
    if known is None:
        known = _schedules[pattern] = make_schedule(pattern, PIECE)
    return known


def missing(device: torch.device) -> str:
    """Why the kernels cannot run on `device`, to go on from "attention backend 'triton'"; empty if they can."""
    if device.type not in ("cuda", "cpu"):
        return f"runs on CUDA devices, not on {device}; use 'torch'"
    if not _installed():
        return "needs the package triton, which is not installed; run pip install 'gtx[gpu]' or use 'torch'"
    if not _kernels.cache_info().currsize and interpreted() != _asked_to_interpret():
        return "found TRITON_INTERPRET changed after triton was imported; set it before Python starts"
    if device.type == "cpu":
        if not interpreted():
            return "runs on a GPU, not on cpu; use 'cpu' or 'torch', or set TRITON_INTERPRET=1 to try it, very slowly"
        return ""
    if not torch.cuda.is_available():
        return f"cannot run on {device}: no CUDA device was found; use the device cpu"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _OLDEST_GPU:
        needed, found = (".".join(map(str, pair)) for pair in (_OLDEST_GPU, capability))
        return f"needs a GPU of compute capability {needed}, {device} has {found}; use 'torch'"
    return ""


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs on its interpreter in this process: `TRITON_INTERPRET` decides when triton is imported."""
    from triton import language
    from triton.runtime import JITFunction

    return not isinstance(language.sum, JITFunction)


def _asked_to_interpret() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def _kernels() -> Any:
    from sparse_engine import triton_kernels

    return triton_kernels


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern, edge_bias: Tensor | None, scale: float
) -> Tensor:
    """See `attention.sparse_attention`, which checks the inputs. Half types are computed in float32.

    No sum is made by atomics: one tile gives the same bits each time. Which tile is fastest is measured at the first
    call with a shape; `torch.use_deterministic_algorithms(True)` takes the first of `TILES` instead, so that the bits
    are the same in every process too.
    """
    if not torch.compiler.is_compiling():
        remember(pattern)
    out, _ = _forward(q, k, v, pattern.indptr, pattern.indices, edge_bias, scale)
    return out


def _rows(x: Tensor) -> Tensor:
    """`x [n, H, d]` with each head's numbers side by side; rows and heads may be strided."""
    return x if x.stride(2) == 1 else x.contiguous()


def _stored(x: Tensor) -> torch.dtype:
    """What kernels write for a result in the dtype of `x`: the interpreter truncates to bfloat16 where GPUs round."""
    return torch.float32 if interpreted() else x.dtype


# Launching ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """What all kernels of a call are told, and what a tile is kept by."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    def sizes(self, tile: Tile, longest: int) -> dict[str, Any]:
        """A program's numbers of rows, heads and edge slots: heads side by side in memory first, then edges, then rows.

        longest: the most edges that a row has.
        """
        wide = _power_of_two(self.dim)
        heads = _power_of_two(self.heads)
        while heads > 1 and heads * wide * 8 > tile.elements:  # leave room for 8 edges
            heads //= 2
        slots = max(1, min(tile.elements // (heads * wide), 32, _power_of_two(longest)))
        rows = max(1, tile.elements // (heads * wide * slots)) if longest < PIECE else 1
        return {"ROWS": rows, "HEADS": heads, "SLOTS": slots, "DIM": self.dim, "WIDE": wide}


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _launch(kernel: Any, shape: _Shape, longest: int, segments: Tensor, *given: Any, **flags: bool) -> None:
    """Run a kernel over segments of at most `longest` edges. given: its arguments but count and number of heads."""
    count = segments.shape[1]
    if count == 0:
        return  # no empty kernel grids
    kernels = _kernels()
    at = kernel.arg_names.index("count")

    def run(tile: Tile) -> None:
        sizes = shape.sizes(tile, longest)
        grid = (-(-count // sizes["ROWS"]), -(-shape.heads // sizes["HEADS"]))
        options = {} if kernels.INTERPRETED else {"num_warps": tile.warps}
        with torch.cuda.device(shape.device) if shape.device.type == "cuda" else nullcontext():
            kernel[grid](*given[:at], count, shape.heads, *given[at:], **flags, **sizes, **options)

    if kernels.INTERPRETED or torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing():
        run(TILES[0])
        return
    name = kernel.fn.__name__
    key = (name, shape, longest, _power_of_two(count), tuple(sorted(flags.items())))
    if key not in _tiles:
        _tiles[key] = fastest(TILES, run, lambda: torch.cuda.synchronize(shape.device))
    run(_tiles[key])


def fastest(tiles: Sequence[Tile], run: Callable[[Tile], None], wait: Callable[[], None]) -> Tile:
    """The tile whose launch took least, the best of some repetitions each after one that compiles it."""
    taken = {}
    for tile in tiles:
        run(tile)
        wait()
        times = []
        for _ in range(_REPEATS):
            begin = perf_counter()
            run(tile)
            wait()
            times.append(perf_counter() - begin)
        taken[tile] = min(times)
    return min(taken, key=lambda tile: taken[tile])


def _strides(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    found = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    if bias is None:
        return (*found, 0, 0)
    return (*found, bias.stride(0), bias.stride(1) if bias.dim() == 2 else 0)


# The operators --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("gtx::triton_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, edge_bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`[N, H, d]` and, in float32, `[N, 2, H]`: each row's largest logit and its sum of exponentials."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    heads, dim = q.shape[1:]
    out = q.new_empty(q.shape, dtype=_stored(q))
    extremes = q.new_empty(q.shape[0], 2, heads, dtype=torch.float32)
    made = _schedule(recall(indptr, indices, k.shape[0]))
    shape = _Shape(heads, dim, q.dtype, q.device)
    kernels, has_bias = _kernels(), edge_bias is not None
    strides = _strides(q, k, v, edge_bias)
    inputs = (q, k, v, indices.contiguous(), edge_bias)
    num_pieces = made.pieces.shape[1]
    if num_pieces:
        parts = (
            q.new_empty(num_pieces, heads, dim, dtype=torch.float32),
            q.new_empty(num_pieces, 2, heads, dtype=torch.float32),
        )
        flags = {"HAS_BIAS": has_bias, "SPLIT": True}
        _launch(kernels.forward, shape, PIECE, made.pieces, *inputs, made.pieces, *parts, scale, *strides, **flags)
        _launch(kernels.merge_forward, shape, PIECE, made.split, *parts, made.split, out, extremes)
    for longest, segments in reversed(made.groups):
        flags = {"HAS_BIAS": has_bias, "SPLIT": False}
        _launch(kernels.forward, shape, longest, segments, *inputs, segments, out, extremes, scale, *strides, **flags)
    return out.to(q.dtype), extremes


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, edge_bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], 2, q.shape[1])
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("gtx::triton_attention_backward", mutates_args=())
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
    grad, out, indices = grad.contiguous(), out.contiguous(), indices.contiguous()
    want_q, want_k, want_v, want_bias = wanted
    shape = _Shape(q.shape[1], q.shape[2], q.dtype, q.device)
    pattern = recall(indptr, indices, k.shape[0])
    strides = _strides(q, k, v, edge_bias)
    grad_q, grad_k, grad_v = (
        x.new_empty(x.shape if want else (0,), dtype=_stored(x)) for x, want in zip((q, k, v), wanted[:3], strict=True)
    )
    mean = q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)
    grad_bias = mean.new_empty((indices.numel(), q.shape[1]) if want_bias else (0,))
    if want_q or want_k or want_bias:
        _by_row(shape, pattern, (grad, q, k, v, out, extremes, indices, edge_bias), (grad_q, mean), scale, strides)
    if want_k or want_v or want_bias:
        transposed, order = pattern.transpose()
        given = (grad, q, k, v, extremes, mean, transposed.indices, order, edge_bias)
        _by_col(shape, transposed, given, (grad_k, grad_v, grad_bias), scale, strides)
    if want_bias:
        assert edge_bias is not None
        grad_bias = (grad_bias.sum(1) if edge_bias.dim() == 1 else grad_bias).to(edge_bias.dtype)
    return [grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), grad_bias]


def _by_row(
    shape: _Shape,
    pattern: SparsePattern,
    given: tuple[Tensor | None, ...],
    made: tuple[Tensor, Tensor],
    scale: float,
    strides: tuple[int, ...],
) -> None:
    """Fills grad_q `[N, H, d]`, unless it is empty, and mean `[N, H]`."""
    kernels, schedule = _kernels(), _schedule(pattern)
    grad_q, mean = made
    want = {"WANT_Q": grad_q.dim() == 3}
    flags = {"HAS_BIAS": given[-1] is not None, **want}
    num_pieces = schedule.pieces.shape[1]
    if num_pieces:
        width = shape.dim if want["WANT_Q"] else 0
        part_q, part_shared = (mean.new_empty(num_pieces, shape.heads, width) for _ in range(2))
        part_mean = mean.new_empty(num_pieces, shape.heads)
        arguments = (*given, schedule.pieces, part_q, part_shared, part_mean, scale, *strides)
        _launch(kernels.backward_rows, shape, PIECE, schedule.pieces, *arguments, SPLIT=True, **flags)
        grad, out = given[0], given[4]
        parts = (grad, out, part_q, part_shared, part_mean, schedule.split, *made, scale)
        _launch(kernels.merge_rows, shape, PIECE, schedule.split, *parts, **want)
    for longest, segments in reversed(schedule.groups):
        arguments = (*given, segments, grad_q, grad_q, mean, scale, *strides)
        _launch(kernels.backward_rows, shape, longest, segments, *arguments, SPLIT=False, **flags)


def _by_col(
    shape: _Shape,
    transposed: SparsePattern,
    given: tuple[Tensor | None, ...],
    made: tuple[Tensor, Tensor, Tensor],
    scale: float,
    strides: tuple[int, ...],
) -> None:
    """Fills those of grad_k, grad_v `[M, H, d]` and grad_bias `[E, H]` that are not empty."""
    kernels, schedule = _kernels(), _schedule(transposed)
    grad_k, grad_v, grad_bias = made
    want_k, want_v = grad_k.dim() == 3, grad_v.dim() == 3
    flags = {"WANT_K": want_k, "WANT_V": want_v, "WANT_BIAS": grad_bias.dim() == 2, "HAS_BIAS": given[-1] is not None}
    num_pieces = schedule.pieces.shape[1]
    if num_pieces:
        part_k, part_v = (
            x.new_empty(num_pieces, shape.heads, shape.dim if want else 0, dtype=torch.float32)
            for x, want in ((grad_k, want_k), (grad_v, want_v))
        )
        arguments = (*given, schedule.pieces, part_k, part_v, grad_bias, scale, *strides)
        _launch(kernels.backward_cols, shape, PIECE, schedule.pieces, *arguments, SPLIT=True, **flags)
        for part, whole, want in ((part_k, grad_k, want_k), (part_v, grad_v, want_v)):
            if want:
                _launch(kernels.merge_cols, shape, PIECE, schedule.split, part, schedule.split, whole)
    for longest, segments in reversed(schedule.groups):
        arguments = (*given, segments, *made, scale, *strides)
        _launch(kernels.backward_cols, shape, longest, segments, *arguments, SPLIT=False, **flags)


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
