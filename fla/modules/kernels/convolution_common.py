# mypy: disable-error-code="assignment, misc"
# Tuples grow in these kernels, which Python's types cannot follow.
"""What the kernels of the short convolution share: bounds of a sequence, the activation, rows of W columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _bound(cu_seqlens, n, T, mask):
    """An entry of `cu_seqlens`, kept within the steps there are."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + n, mask=mask, other=0).to(tl.int32), 0), T)


@triton.jit
def _root(y):
    """Of sigmoid(y): a reciprocal by its root is as exact here and takes none of the care that a division does."""
    return tl.rsqrt(1.0 + tl.exp2(y * -1.4426950408889634))


@triton.jit
def _activated(y, SILU: tl.constexpr):
    if SILU:
        root = _root(y)
        y = y * root * root
    return y


@triton.jit
def _columns(rows, first, there, r_d, r_w, W: tl.constexpr, DENSE: tl.constexpr, BD: tl.constexpr):
    """The columns of `[D, W]` at BD channels from `first` on, of which so many are there, as a tuple. DENSE: of contiguous
    rows of 2, 4 or 8, by wide accesses."""
    columns = ()
    if DENSE:
        flat = tl.arange(0, BD * W)
        tile = tl.load(rows + first * W + flat, mask=flat < there * W, other=0.0)
        # split by the lowest bit of the column, then by the next: in registers
        parts = (tile,)
        for level in tl.static_range(3):
            if (2 << level) <= W:
                even = ()
                odd = ()
                for i in tl.static_range(1 << level):
                    low, high = tl.split(tl.reshape(parts[i], [BD, W >> (level + 1), 2]))
                    even = even + (low,)
                    odd = odd + (high,)
                parts = even + odd
        for w in tl.static_range(W):
            columns = columns + (tl.reshape(parts[w], [BD]),)
    else:
        d = first + tl.arange(0, BD)
        mask = tl.arange(0, BD) < there
        for w in tl.static_range(W):
            place = rows + d.to(tl.int64) * r_d + tl.cast(w, tl.int64) * r_w
            columns = columns + (tl.load(place, mask=mask, other=0.0),)
    return columns


@triton.jit
def _weights(weight, first, D, w_d, w_w, W: tl.constexpr, DENSE: tl.constexpr, BD: tl.constexpr):
    """The columns of the weight at BD channels in float32, as a tuple."""
    read = _columns(weight, first, D - first, w_d, w_w, W, DENSE, BD)
    columns = ()
    for w in tl.static_range(W):
        columns = columns + (read[w].to(tl.float32),)
    return columns


@triton.jit
def _offset(bias, d, D, bias_d, HAS_BIAS: tl.constexpr):
    """The bias at channels d in float32."""
    offset = tl.zeros(d.shape, tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + d * bias_d, mask=d < D, other=0.0).to(tl.float32)
    return offset


@triton.jit
def _window(x, state, n, start, t, d, inside, x_t, s_n, s_d, s_w, W: tl.constexpr, HAS_STATE: tl.constexpr):
    """The W - 1 steps before step t of sequence n, which began at `start`, in float32, as a tuple."""
    same = tl.zeros_like(d)  # a mask of one answer for all
    window = ()
    for w in tl.static_range(W - 1):
        before = t - (W - 1) + w
        place = x + tl.cast(before, tl.int64) * x_t + d
        tap = tl.load(place, mask=inside & (same + before >= start), other=0.0).to(tl.float32)
        if HAS_STATE:
            place = state + n * s_n + tl.cast(tl.maximum(W + before - start, 0), tl.int64) * s_w + d.to(tl.int64) * s_d
            tap += tl.load(place, mask=inside & (same + before < start), other=0.0).to(tl.float32)
        window = window + (tap,)
    return window


@triton.jit
def _store_columns(rows, columns, first, there, r_d, r_w, W: tl.constexpr, DENSE: tl.constexpr, BD: tl.constexpr):
    """The reverse."""
    if DENSE:
        parts = ()
        for w in tl.static_range(W):
            parts = parts + (tl.reshape(columns[w], [BD, 1]),)
        for level in tl.static_range(3):
            if (2 << level) <= W:
                joined = ()
                for i in tl.static_range(W >> (level + 1)):
                    joined = joined + (tl.reshape(tl.join(parts[i], parts[i + (W >> (level + 1))]), [BD, 2 << level]),)
                parts = joined
        flat = tl.arange(0, BD * W)
        tl.store(rows + first * W + flat, tl.reshape(parts[0], [BD * W]), mask=flat < there * W)
    else:
        d = first + tl.arange(0, BD)
        mask = tl.arange(0, BD) < there
        for w in tl.static_range(W):
            tl.store(rows + d.to(tl.int64) * r_d + tl.cast(w, tl.int64) * r_w, columns[w], mask=mask)


def _dense(rows: torch.Tensor) -> bool:
    """Whether each of the rows `[..., D, W]` is one access of a power of two, or two of them."""
    width = rows.shape[-1]
    return width in (2, 4, 8) and rows.stride()[-2:] == (width, 1)


def _strides(x: torch.Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()[:count]
