# mypy: disable-error-code="assignment, misc"
# Tuples grow in these kernels, which Python's types cannot follow.
"""What the kernels of the short convolution share: bounds of a sequence, the activation, rows of W columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def clamped_bound(cu_seqlens, n, T):
    """Entry n of `cu_seqlens`, clamped to [0, T]."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int32), 0), T)


@triton.jit
def root_of_sigmoid(y):
    """The square root of sigmoid(y). Its square is as exact as a division here, and cheaper."""
    return tl.rsqrt(1.0 + tl.exp2(y * -1.4426950408889634))


@triton.jit
def activate(y, SILU: tl.constexpr):
    if SILU:
        root = root_of_sigmoid(y)
        y = y * root * root
    return y


@triton.jit
def load_columns(rows, first, channels, r_d, r_w, W: tl.constexpr, DENSE: tl.constexpr, BD: tl.constexpr):
    """The W columns of rows `[D, W]`, as a tuple, for BD channels from `first` on, of which `channels` exist. With DENSE the
    rows are contiguous and W is 2, 4 or 8, so that wide loads read them."""
    columns = ()
    if DENSE:
        flat = tl.arange(0, BD * W)
        tile = tl.load(rows + first * W + flat, mask=flat < channels * W, other=0.0)
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
        mask = tl.arange(0, BD) < channels
        for w in tl.static_range(W):
            place = rows + d.to(tl.int64) * r_d + tl.cast(w, tl.int64) * r_w
            columns = columns + (tl.load(place, mask=mask, other=0.0),)
    return columns


@triton.jit
def store_columns(rows, columns, first, channels, r_d, r_w, W: tl.constexpr, DENSE: tl.constexpr, BD: tl.constexpr):
    """The reverse of `load_columns`."""
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
        tl.store(rows + first * W + flat, tl.reshape(parts[0], [BD * W]), mask=flat < channels * W)
    else:
        d = first + tl.arange(0, BD)
        mask = tl.arange(0, BD) < channels
        for w in tl.static_range(W):
            tl.store(rows + d.to(tl.int64) * r_d + tl.cast(w, tl.int64) * r_w, columns[w], mask=mask)


@triton.jit
def load_weight(weight, first, D, w_d, w_w, W: tl.constexpr, DENSE: tl.constexpr, BD: tl.constexpr):
    """The columns of the weight for BD channels, in float32, as a tuple."""
    read = load_columns(weight, first, D - first, w_d, w_w, W, DENSE, BD)
    columns = ()
    for w in tl.static_range(W):
        columns = columns + (read[w].to(tl.float32),)
    return columns


@triton.jit
def load_bias(bias, d, D, bias_d, HAS_BIAS: tl.constexpr):
    """The bias of channels d in float32, 0 without one."""
    offset = tl.zeros(d.shape, tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + d * bias_d, mask=d < D, other=0.0).to(tl.float32)
    return offset


@triton.jit
def load_window(x, state, n, start, t, d, inside, x_t, s_n, s_d, s_w, W: tl.constexpr, HAS_STATE: tl.constexpr):
    """The W - 1 steps before step t of sequence n, which begins at `start`, in float32, as a tuple."""
    zero = tl.zeros_like(d)  # turns a scalar condition into a mask
    window = ()
    for w in tl.static_range(W - 1):
        before = t - (W - 1) + w
        place = x + tl.cast(before, tl.int64) * x_t + d
        tap = tl.load(place, mask=inside & (zero + before >= start), other=0.0).to(tl.float32)
        if HAS_STATE:
            place = state + n * s_n + tl.cast(tl.maximum(W + before - start, 0), tl.int64) * s_w + d.to(tl.int64) * s_d
            tap += tl.load(place, mask=inside & (zero + before < start), other=0.0).to(tl.float32)
        window = window + (tap,)
    return window


def is_dense(rows: torch.Tensor) -> bool:
    """Whether `load_columns` may read rows `[..., D, W]` by wide loads."""
    width = rows.shape[-1]
    return width in (2, 4, 8) and rows.stride()[-2:] == (width, 1)


def strides_of(x: torch.Tensor | None, count: int) -> tuple[int, ...]:
    """The first `count` strides of x, zeros for None."""
    return (0,) * count if x is None else x.stride()[:count]
