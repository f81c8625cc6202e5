"""Counter-based randomness, keyed by what is drawn and never by where: equal keys give equal draws on any device.

No generator has a state here, so a node's draw is the same at any world size, thread count and batch order. Drawing
neighbours is in `sampler.py`. Shape letters: `n` ids or rows, `C` columns of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PURPOSE_SAMPLING = 1
PURPOSE_DROPOUT = 2
PURPOSE_SHUFFLE = 3
PURPOSE_INIT = 4
PURPOSE_FEATURES = 5
PURPOSE_SHARED = 6
PURPOSE_WALKS = 7
PURPOSE_EXPANDER = 8

_MASK64 = 2**64 - 1
_LANES = 2**16  # dropout compares 16 random bits with a threshold
_DROPOUT_BLOCK = 2**17  # hashes per block of rows: the dozen passes over one then stay in a core's cache


def _signed(value: int, bits: int = 64) -> int:
    """The two's complement reading of an unsigned value, as torch scalars are signed."""
    value &= 2**bits - 1
    return value - 2**bits if value >> (bits - 1) else value


# splitmix64 (Steele, Lea, Flood 2014): the golden-ratio increment, then the finaliser of Stafford's variant 13.
_GAMMA = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def _mix_int(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * _MUL_1) & _MASK64
    value = ((value ^ (value >> 27)) * _MUL_2) & _MASK64
    return value ^ (value >> 31)


def _finalise(state: Tensor) -> Tensor:
    """`_mix_int` without its increment, in place on an int64 tensor that the caller owns."""
    for shift, multiplier in ((30, _MUL_1), (27, _MUL_2)):
        state ^= (state >> shift).bitwise_and_(2 ** (64 - shift) - 1)  # `>>` copies the sign, the mask undoes it
        state *= _signed(multiplier)
    state ^= (state >> 31).bitwise_and_(2**33 - 1)
    return state


def keys(seed: int, purpose: int, step: int, layer: int, ids: Tensor) -> Tensor:
    """One 64-bit key per id: `mix(mix(id) ^ chain(seed, purpose, step, layer))`, mix being splitmix64's.

    Args:
        seed, purpose, step, layer: any integers; every one changes every key. `layer=-1` means "no layer".
        ids: int64 `[n]` (any shape), global node or edge ids.

    Returns:
        int64 of the same shape. Equal arguments give equal keys on any device.

    Raises:
        ValueError: if `ids` is not int64.

    Example:

        >>> whole = keys(7, PURPOSE_SAMPLING, 0, 1, torch.arange(4))
        >>> torch.equal(whole[2:], keys(7, PURPOSE_SAMPLING, 0, 1, torch.tensor([2, 3])))
        True
    """
    _check_int64("ids", ids)
    chain = 0
    for part in (seed, purpose, step, layer):
        chain = _mix_int(chain ^ _mix_int(part & _MASK64))
    return _finalise((_finalise(ids + _signed(_GAMMA)) ^ _signed(chain)).add_(_signed(_GAMMA)))


def subkeys(keys: Tensor, index: int | Tensor) -> Tensor:
    """Mix one more counter into keys: output `index` of the splitmix64 generator that starts at each key.

    Args:
        keys: int64, any shape.
        index: an integer, or an int64 tensor that broadcasts with `keys`.

    Raises:
        ValueError: if `keys` or a tensor `index` is not int64.

    Example: three draws for each of four rows, int64 `[4, 3]`.

        >>> rows = keys(7, PURPOSE_INIT, 0, -1, torch.arange(4))
        >>> subkeys(rows[:, None], torch.arange(3)).shape
        torch.Size([4, 3])
    """
    _check_int64("keys", keys)
    if isinstance(index, Tensor):
        _check_int64("index", index)
        return _finalise(keys + (index + 1) * _signed(_GAMMA))
    return _finalise(keys + _signed((index + 1) * _GAMMA))


def uniform(keys: Tensor) -> Tensor:
    """The upper 53 bits of each key as float64 in `[0, 1)`.

    Raises:
        ValueError: if `keys` is not int64.

    Example:

        >>> uniform(torch.tensor([0, -1])).tolist()
        [0.0, 0.9999999999999999]
    """
    _check_int64("keys", keys)
    return (keys >> 11).bitwise_and_(2**53 - 1).to(torch.float64).mul_(2.0**-53)


def keyed_permutation(seed: int, purpose: int, step: int, n: int, *, device: torch.device | str = "cpu") -> Tensor:
    """A random order of `range(n)`, int64 `[n]`: the stable argsort of the ids' keys, so one order on any device.

    Raises:
        ValueError: if `n` is negative.

    Example:

        >>> sorted(keyed_permutation(7, PURPOSE_SHUFFLE, 0, 5).tolist())
        [0, 1, 2, 3, 4]
    """
    if n < 0:
        raise ValueError(f"keyed_permutation got n={n}; give the number of things to order, at least 0")
    return torch.argsort(keys(seed, purpose, step, -1, torch.arange(n, device=device)), stable=True)


def keyed_dropout(x: Tensor, p: float, row_keys: Tensor, *, training: bool = True, column_offset: int = 0) -> Tensor:
    """Dropout whose mask is a function of row key and column alone, so it does not matter which rank holds the row.

    An element is dropped when its 16 random bits are below `round(p * 65536)`; kept ones are divided by the kept
    share that this gives exactly, so the output is unbiased for every `p`. Only the mask, one byte an element, is
    kept for backward. Bits: two 16-bit lanes of one 32-bit hash of (row key, column pair).

    Args:
        x: floating `[n, ...]`; all dims after the first count as columns `C`, numbered in row-major order.
        p: probability of dropping, in `[0, 1)`, rounded to a multiple of 1/65536.
        row_keys: int64 `[n]`, from `keys`.
        training: `False` returns `x` itself, as does `p == 0`.
        column_offset: number of the first column of `x`, for a slice of a wider row.

    Raises:
        ValueError: for `p` outside `[0, 1)`, a negative offset, a non-floating `x`, or keys that do not match `x`.

    Example: half of the columns drop as they do in the whole.

        >>> x, row_keys = torch.ones(3, 8), keys(7, PURPOSE_DROPOUT, 0, 0, torch.arange(3))
        >>> whole = keyed_dropout(x, 0.5, row_keys)
        >>> torch.equal(whole[:, 5:], keyed_dropout(x[:, 5:], 0.5, row_keys, column_offset=5))
        True
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout p is {p}; choose it in [0, 1)")
    if not x.is_floating_point() or x.dim() < 1:
        raise ValueError(f"keyed_dropout needs a floating x of [n, ...], got {x.dtype} {list(x.shape)}")
    if row_keys.shape != x.shape[:1] or row_keys.dtype != torch.int64 or row_keys.device != x.device:
        raise ValueError(
            f"keyed_dropout needs row_keys int64 [{x.shape[0]}] on {x.device}, got {row_keys.dtype} "
            f"{list(row_keys.shape)} on {row_keys.device}"
        )
    if column_offset < 0:
        raise ValueError(f"keyed_dropout got column_offset={column_offset}; give the first column's number, at least 0")
    if p == 0.0 or not training:
        return x
    out: Tensor = _KeyedDropout.apply(x, p, row_keys, column_offset)  # type: ignore[no-untyped-call]
    return out


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, row_keys: Tensor, column_offset: int) -> Tensor:
        num_dropped = min(round(p * _LANES), _LANES - 1)  # of 65536 values of a lane; keep at least one of them
        ctx.scale = _LANES / (_LANES - num_dropped)
        mask = _kept(row_keys, num_dropped, column_offset, x[0].numel() if x.shape[0] else 0).view(x.shape)
        ctx.save_for_backward(mask)
        return _apply_mask(x, mask, ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (mask,) = ctx.saved_tensors
        return _apply_mask(grad, mask, ctx.scale), None, None, None


def _apply_mask(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.where(mask, x, 0.0).mul_(scale)


def _kept(row_keys: Tensor, num_dropped: int, column_offset: int, num_columns: int) -> Tensor:
    """The mask, bool `[n, C]`."""
    first_pair = column_offset // 2
    num_pairs = (column_offset + num_columns + 1) // 2 - first_pair
    skip = column_offset - 2 * first_pair
    pairs = torch.arange(first_pair, first_pair + num_pairs, device=row_keys.device)
    pair_bits = _finalise(pairs.mul_(_signed(_GAMMA))).view(torch.int32)[::2]
    row_bits = row_keys.contiguous().view(torch.int32).view(-1, 2)  # [n, 2]: lower and upper half of each key
    threshold = num_dropped - _LANES // 2  # lanes are signed
    mask = torch.empty(row_keys.numel(), num_columns, dtype=torch.bool, device=row_keys.device)
    rows_per_block = max(1, _DROPOUT_BLOCK // max(num_pairs, 1)) if row_keys.device.type == "cpu" else row_keys.numel()
    for start in range(0, row_keys.numel(), max(rows_per_block, 1)):
        block = slice(start, start + rows_per_block)
        lanes = _hash32(row_bits[block], pair_bits).view(torch.int16)  # [rows, 2 * pairs]
        torch.ge(lanes[:, skip : skip + num_columns], threshold, out=mask[block])
    return mask


def _hash32(row_bits: Tensor, pair_bits: Tensor) -> Tensor:
    """The finaliser lowbias32 (Ellis 2018) on mixed inputs; the key's upper half enters between its two rounds."""
    bits = row_bits[:, :1] ^ pair_bits  # [rows, pairs]
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(2**17 - 1)
    bits += row_bits[:, 1:]
    bits *= _signed(0x846CA68B, bits=32)
    bits ^= (bits >> 16).bitwise_and_(2**16 - 1)
    return bits


def _check_int64(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {tensor.dtype}; convert with .long()")
