"""The Triton kernels of sparse attention. Importing this file imports triton: `triton_backend.py` does so at first use.

What is launched on which rows, and with how large tiles, is decided there. Shape letters: `N` queries, `M` keys, `E`
edges, `H` heads, `d` head dim, `S` segments of rows, `P` pieces of split rows; within a program `B` edge slots, `L`
lanes (a lane is one head of one segment), `D` the head dim's next power of two.

A program runs `ROWS` segments and `HEADS` heads over tiles `[B, L, D]`. Each edge slot sums by itself and slots are
added up once, after the last edge, so that within the loop nothing passes between warps but the dot products. All
arithmetic is float32. Every number is written by one program: there are no atomics, and a launch gives the same bits
each time.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether these kernels run on Triton's interpreter: it is decided when a kernel is defined."""


@triton.jit
def _lanes(segments, count, num_heads, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Segment number, row, head, first and last edge (`[L]` each) of this program's lanes, and which lanes exist.

    segments: `[3, count]`: row, first edge, end. A lane that does not exist has no edges.
    """
    lane = tl.arange(0, ROWS * HEADS)
    segment = tl.program_id(0).to(tl.int64) * ROWS + lane // HEADS
    head = tl.program_id(1).to(tl.int64) * HEADS + lane % HEADS
    there = (segment < count) & (head < num_heads)
    row = tl.load(segments + segment, mask=there, other=0)
    first = tl.load(segments + count + segment, mask=there, other=0)
    end = tl.load(segments + 2 * count + segment, mask=there, other=0)
    return segment, row, head, first, end, there


@triton.jit
def forward(
    q, k, v, indices, bias, segments, out, extremes,
    count, num_heads, scale, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_be, stride_bh,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    SLOTS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov and Gimelshein 2018) over a segment's edges.

    out: `[N, H, d]` and extremes `[N, 2, H]`, a row's largest logit and its sum of exponentials. SPLIT: they are
    `[P, H, d]` and `[P, 2, H]` in float32, of pieces, and `out` is not divided by the sum.
    """
    segment, row, head, first, end, there = _lanes(segments, count, num_heads, ROWS, HEADS)
    slot = tl.arange(0, SLOTS)
    dim = tl.arange(0, WIDE)
    in_dim = (dim < DIM)[None, :]
    query = tl.load(q + (row * stride_qn + head * stride_qh)[:, None] + dim[None, :], mask=there[:, None] & in_dim,
                    other=0.0).to(tl.float32)  # fmt: skip
    peak = tl.full([SLOTS, ROWS * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([SLOTS, ROWS * HEADS], tl.float32)
    sums = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    for begin in range(0, tl.max(end - first), SLOTS):
        edge = first[None, :] + begin + slot[:, None]  # [B, L]
        real = edge < end[None, :]
        col = tl.load(indices + edge, mask=real, other=0).to(tl.int64)
        tile = real[:, :, None] & in_dim[None, :, :]
        at = (col * stride_kn + head[None, :] * stride_kh)[:, :, None] + dim[None, None, :]
        key = tl.load(k + at, mask=tile, other=0.0).to(tl.float32)
        at = (col * stride_vn + head[None, :] * stride_vh)[:, :, None] + dim[None, None, :]
        value = tl.load(v + at, mask=tile, other=0.0).to(tl.float32)
        logit = tl.sum(query[None, :, :] * key, 2) * scale
        if HAS_BIAS:
            logit += tl.load(bias + edge * stride_be + head[None, :] * stride_bh, mask=real, other=0.0).to(tl.float32)
        logit = tl.where(real, logit, float("-inf"))
        higher = tl.maximum(peak, logit)
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing reached so far: exp(-inf - 0) is 0
        kept = tl.exp(peak - level)
        weight = tl.exp(logit - level)
        total = total * kept + weight
        sums = sums * kept[:, :, None] + weight[:, :, None] * value
        peak = higher
    top = tl.max(peak, 0)  # [L]
    level = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp(peak - level[None, :])
    total = tl.sum(total * kept, 0)
    sums = tl.sum(sums * kept[:, :, None], 0)  # [L, D]
    place = segment if SPLIT else row
    if not SPLIT:
        total = tl.where(total == 0.0, 1.0, total)
        sums = sums / total[:, None]
        top = level
    at = (place * num_heads + head)[:, None] * DIM + dim[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=there[:, None] & in_dim)
    tl.store(extremes + place * 2 * num_heads + head, top, mask=there)
    tl.store(extremes + (place * 2 + 1) * num_heads + head, total, mask=there)


@triton.jit
def merge_forward(
    part_out, part_extremes, split, out, extremes, count, num_heads,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of several pieces: brings their sums to one maximum and adds them. split: `[3, count]`, row and pieces."""
    _, row, head, first, end, there = _lanes(split, count, num_heads, ROWS, HEADS)
    slot = tl.arange(0, SLOTS)
    dim = tl.arange(0, WIDE)
    in_dim = (dim < DIM)[None, :]
    peak = tl.full([SLOTS, ROWS * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([SLOTS, ROWS * HEADS], tl.float32)
    sums = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    for begin in range(0, tl.max(end - first), SLOTS):
        piece = first[None, :] + begin + slot[:, None]  # [B, L]
        real = piece < end[None, :]
        top = tl.load(part_extremes + piece * 2 * num_heads + head[None, :], mask=real, other=float("-inf"))
        part = tl.load(part_extremes + (piece * 2 + 1) * num_heads + head[None, :], mask=real, other=0.0)
        at = (piece * num_heads + head[None, :])[:, :, None] * DIM + dim[None, None, :]
        value = tl.load(part_out + at, mask=real[:, :, None] & in_dim[None, :, :], other=0.0)
        higher = tl.maximum(peak, top)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(peak - level)
        weight = tl.exp(top - level)
        total = total * kept + part * weight
        sums = sums * kept[:, :, None] + weight[:, :, None] * value
        peak = higher
    top = tl.max(peak, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp(peak - top[None, :])
    total = tl.sum(total * kept, 0)
    total = tl.where(total == 0.0, 1.0, total)
    sums = tl.sum(sums * kept[:, :, None], 0) / total[:, None]
    at = (row * num_heads + head)[:, None] * DIM + dim[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=there[:, None] & in_dim)
    tl.store(extremes + row * 2 * num_heads + head, top, mask=there)
    tl.store(extremes + (row * 2 + 1) * num_heads + head, total, mask=there)


@triton.jit
def backward_rows(
    grad, q, k, v, out, extremes, indices, bias, segments, grad_q, shared, mean,
    count, num_heads, scale, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_be, stride_bh,
    HAS_BIAS: tl.constexpr, WANT_Q: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """By destination: grad_q `[N, H, d]`, and mean `[N, H]`, the row's mean of `grad . v` under its probabilities p.

    With `c = grad . out` (Dao et al. 2022), which rounding keeps from cancelling, and `e = sum p (grad . v - c)`, the
    mean is `c + e` and `grad_q = scale (sum p (grad . v - c) k - e sum p k)`: one pass, and 0 in a row of one edge.
    SPLIT: grad_q, shared `[P, H, d]` and mean `[P, H]` take the two sums and `e` of pieces, in float32.
    """
    segment, row, head, first, end, there = _lanes(segments, count, num_heads, ROWS, HEADS)
    slot = tl.arange(0, SLOTS)
    dim = tl.arange(0, WIDE)
    in_dim = (dim < DIM)[None, :]
    lane_tile = there[:, None] & in_dim
    query = tl.load(q + (row * stride_qn + head * stride_qh)[:, None] + dim[None, :], mask=lane_tile, other=0.0)
    query = query.to(tl.float32)
    at = (row * num_heads + head)[:, None] * DIM + dim[None, :]
    pull = tl.load(grad + at, mask=lane_tile, other=0.0).to(tl.float32)
    about = tl.sum(pull * tl.load(out + at, mask=lane_tile, other=0.0).to(tl.float32), 1)  # [L]
    peak = tl.load(extremes + row * 2 * num_heads + head, mask=there, other=0.0)
    total = tl.load(extremes + (row * 2 + 1) * num_heads + head, mask=there, other=1.0)
    rest = tl.zeros([SLOTS, ROWS * HEADS], tl.float32)
    pulled = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    held = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    for begin in range(0, tl.max(end - first), SLOTS):
        edge = first[None, :] + begin + slot[:, None]  # [B, L]
        real = edge < end[None, :]
        col = tl.load(indices + edge, mask=real, other=0).to(tl.int64)
        tile = real[:, :, None] & in_dim[None, :, :]
        at_k = (col * stride_kn + head[None, :] * stride_kh)[:, :, None] + dim[None, None, :]
        key = tl.load(k + at_k, mask=tile, other=0.0).to(tl.float32)
        at_v = (col * stride_vn + head[None, :] * stride_vh)[:, :, None] + dim[None, None, :]
        value = tl.load(v + at_v, mask=tile, other=0.0).to(tl.float32)
        logit = tl.sum(query[None, :, :] * key, 2) * scale
        if HAS_BIAS:
            logit += tl.load(bias + edge * stride_be + head[None, :] * stride_bh, mask=real, other=0.0).to(tl.float32)
        prob = tl.where(real, tl.exp(logit - peak[None, :]) / total[None, :], 0.0)
        push = prob * (tl.sum(pull[None, :, :] * value, 2) - about[None, :])
        rest += push
        if WANT_Q:
            pulled += push[:, :, None] * key
            held += prob[:, :, None] * key
    excess = tl.sum(rest, 0)  # [L]
    if SPLIT:
        place = segment * num_heads + head
        tl.store(mean + place, excess, mask=there)
        if WANT_Q:
            at = place[:, None] * DIM + dim[None, :]
            tl.store(grad_q + at, tl.sum(pulled, 0), mask=lane_tile)
            tl.store(shared + at, tl.sum(held, 0), mask=lane_tile)
    else:
        tl.store(mean + row * num_heads + head, about + excess, mask=there)
        if WANT_Q:
            made = (tl.sum(pulled, 0) - excess[:, None] * tl.sum(held, 0)) * scale
            tl.store(grad_q + at, made.to(grad_q.dtype.element_ty), mask=lane_tile)


@triton.jit
def merge_rows(
    grad, out, part_q, part_shared, part_mean, split, grad_q, mean, count, num_heads, scale,
    WANT_Q: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`backward_rows` of rows of several pieces, from what it left of each."""
    _, row, head, first, end, there = _lanes(split, count, num_heads, ROWS, HEADS)
    slot = tl.arange(0, SLOTS)
    dim = tl.arange(0, WIDE)
    in_dim = (dim < DIM)[None, :]
    lane_tile = there[:, None] & in_dim
    rest = tl.zeros([SLOTS, ROWS * HEADS], tl.float32)
    pulled = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    held = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    for begin in range(0, tl.max(end - first), SLOTS):
        piece = first[None, :] + begin + slot[:, None]  # [B, L]
        real = piece < end[None, :]
        place = piece * num_heads + head[None, :]
        rest += tl.load(part_mean + place, mask=real, other=0.0)
        if WANT_Q:
            at_piece = place[:, :, None] * DIM + dim[None, None, :]
            tile = real[:, :, None] & in_dim[None, :, :]
            pulled += tl.load(part_q + at_piece, mask=tile, other=0.0)
            held += tl.load(part_shared + at_piece, mask=tile, other=0.0)
    at = (row * num_heads + head)[:, None] * DIM + dim[None, :]
    pull = tl.load(grad + at, mask=lane_tile, other=0.0).to(tl.float32)
    about = tl.sum(pull * tl.load(out + at, mask=lane_tile, other=0.0).to(tl.float32), 1)
    excess = tl.sum(rest, 0)
    tl.store(mean + row * num_heads + head, about + excess, mask=there)
    if WANT_Q:
        made = (tl.sum(pulled, 0) - excess[:, None] * tl.sum(held, 0)) * scale
        tl.store(grad_q + at, made.to(grad_q.dtype.element_ty), mask=lane_tile)


@triton.jit
def backward_cols(
    grad, q, k, v, extremes, mean, indices, order, bias, segments, grad_k, grad_v, grad_bias,
    count, num_heads, scale, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_be, stride_bh,
    HAS_BIAS: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, WANT_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """By source, over the transposed pattern `indices`, `segments` with its edge permutation `order`.

    grad_k, grad_v `[M, H, d]`, or `[P, H, d]` in float32 with SPLIT; grad_bias `[E, H]` in float32, each
    edge once, at its place in the pattern itself.
    """
    segment, row, head, first, end, there = _lanes(segments, count, num_heads, ROWS, HEADS)
    slot = tl.arange(0, SLOTS)
    dim = tl.arange(0, WIDE)
    in_dim = (dim < DIM)[None, :]
    lane_tile = there[:, None] & in_dim
    key = tl.load(k + (row * stride_kn + head * stride_kh)[:, None] + dim[None, :], mask=lane_tile, other=0.0).to(
        tl.float32
    )
    value = tl.load(v + (row * stride_vn + head * stride_vh)[:, None] + dim[None, :], mask=lane_tile, other=0.0)
    value = value.to(tl.float32)
    sum_k = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    sum_v = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    for begin in range(0, tl.max(end - first), SLOTS):
        edge = first[None, :] + begin + slot[:, None]  # [B, L]
        real = edge < end[None, :]
        dst = tl.load(indices + edge, mask=real, other=0).to(tl.int64)
        tile = real[:, :, None] & in_dim[None, :, :]
        at_q = (dst * stride_qn + head[None, :] * stride_qh)[:, :, None] + dim[None, None, :]
        query = tl.load(q + at_q, mask=tile, other=0.0).to(tl.float32)
        place = dst * num_heads + head[None, :]
        pull = tl.load(grad + place[:, :, None] * DIM + dim[None, None, :], mask=tile, other=0.0).to(tl.float32)
        peak = tl.load(extremes + dst * 2 * num_heads + head[None, :], mask=real, other=0.0)
        total = tl.load(extremes + (dst * 2 + 1) * num_heads + head[None, :], mask=real, other=1.0)
        logit = tl.sum(query * key[None, :, :], 2) * scale
        if HAS_BIAS:
            given = tl.load(order + edge, mask=real, other=0)
            logit += tl.load(bias + given * stride_be + head[None, :] * stride_bh, mask=real, other=0.0).to(tl.float32)
        prob = tl.where(real, tl.exp(logit - peak) / total, 0.0)
        if WANT_V:
            sum_v += prob[:, :, None] * pull
        if WANT_K or WANT_BIAS:
            middle = tl.load(mean + place, mask=real, other=0.0)
            push = prob * (tl.sum(pull * value[None, :, :], 2) - middle)
            if WANT_K:
                sum_k += push[:, :, None] * query
            if WANT_BIAS:
                tl.store(grad_bias + given * num_heads + head[None, :], push, mask=real)
    place = segment if SPLIT else row
    at = (place * num_heads + head)[:, None] * DIM + dim[None, :]
    if WANT_K:
        tl.store(grad_k + at, (tl.sum(sum_k, 0) * scale).to(grad_k.dtype.element_ty), mask=lane_tile)
    if WANT_V:
        tl.store(grad_v + at, tl.sum(sum_v, 0).to(grad_v.dtype.element_ty), mask=lane_tile)


@triton.jit
def merge_cols(
    parts, split, made, count, num_heads,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sums of the pieces `[P, H, d]` of split columns, into `made [M, H, d]`."""
    _, row, head, first, end, there = _lanes(split, count, num_heads, ROWS, HEADS)
    slot = tl.arange(0, SLOTS)
    dim = tl.arange(0, WIDE)
    in_dim = (dim < DIM)[None, :]
    sums = tl.zeros([SLOTS, ROWS * HEADS, WIDE], tl.float32)
    for begin in range(0, tl.max(end - first), SLOTS):
        piece = first[None, :] + begin + slot[:, None]  # [B, L]
        tile = (piece < end[None, :])[:, :, None] & in_dim[None, :, :]
        at = (piece * num_heads + head[None, :])[:, :, None] * DIM + dim[None, None, :]
        sums += tl.load(parts + at, mask=tile, other=0.0)
    at = (row * num_heads + head)[:, None] * DIM + dim[None, :]
    tl.store(made + at, tl.sum(sums, 0).to(made.dtype.element_ty), mask=there[:, None] & in_dim)
