# mypy: disable-error-code="assignment, misc, unreachable, var-annotated"
# Tuples grow in these kernels, which Python's types cannot follow.
"""The short causal convolution: one launch forward, one backward (two for packed sequences), one for a decode step.

Both walk along time with the last steps in registers. The forward's programs go from sequence to sequence, so that only the
first steps of one need a mask or a state: instructions, not memory, would bound it otherwise. The backward's have a mask at
each step, and the unfinished gradients in registers besides: it needs the derivative of the activation at W steps for every
gradient of x, and would otherwise compute it W times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.ops.common.kernels.layout import sequence_of
from fla.ops.common.triton_call import as_stored, in_rows, on_device_of

# Measured on an H200 with bfloat16 and W = 4.
RUNS, WIDTHS = (8, 64), (8, 16)  # of few, and of many numbers: steps of a program of the forward, bytes a thread has of each
MANY_NUMBERS = 1 << 25  # of x
AT_ONCE = 8  # steps that a program of the forward asks for at once
UPDATE_ROWS, UPDATE_WARPS = (1, 4), 2  # sequences of a program of a step, of few, and of many numbers
LANES, WALK_CHANNELS = 4, 64  # of a tile of the backward: lanes side by side, each walking some steps
WALKS = (32, 64)  # of few, and of many tiles
MANY = 2048
AHEAD = tl.constexpr(4)


@triton.jit
def _bound(cu_seqlens, n, T, mask):
    """An entry of `cu_seqlens`, kept within the steps there are."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + n, mask=mask, other=0).to(tl.int32), 0), T)


@triton.jit
def _activated(y, SILU: tl.constexpr):
    if SILU:
        # y sigmoid(y); a reciprocal by its root is as exact here and takes none of the care that a division does
        root = tl.rsqrt(1.0 + tl.exp2(y * -1.4426950408889634))
        y = y * root * root
    return y


@triton.jit
def _derivative(y, SILU: tl.constexpr):
    s = tl.sigmoid(y)
    return s * (1.0 + y * (1.0 - s)) if SILU else tl.full(y.shape, 1.0, tl.float32)


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


@triton.jit
def _step(y, column, offset, taps, residual, d, inside, W: tl.constexpr, SILU: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    acc = offset
    for w in tl.static_range(W):
        acc += column[w] * taps[w]
    acc = _activated(acc, SILU)
    if HAS_RESIDUAL:
        acc += residual.to(tl.float32)
    tl.store(y + d, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _steps(
    x,
    residual,
    y,
    column,
    offset,
    window,
    count,
    d,
    inside,
    x_t,
    r_t,
    y_t,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BT: tl.constexpr,
    ALL: tl.constexpr,
):
    """`count` steps, ALL: BT of them; what they load is asked for at once. Returns where the next ones are, and what is
    before them."""
    rows = ()
    residuals = ()  # or, not looked at, the same rows
    for i in tl.static_range(BT):
        mask = inside if ALL else inside & (tl.full(inside.shape, i, tl.int32) < count)
        rows = rows + (tl.load(x + d, mask=mask),)
        x += x_t
        if HAS_RESIDUAL:
            residuals = residuals + (tl.load(residual + d, mask=mask),)
            residual += r_t
        else:
            residuals = rows
    for i in tl.static_range(BT):
        taps = window + (rows[i].to(tl.float32),)
        window = taps[1:]
        if ALL:
            _step(y, column, offset, taps, residuals[i], d, inside, W, SILU, HAS_RESIDUAL)
        else:
            # a branch, not a mask: of many short sequences most steps would be nothing else
            if i < count:
                _step(y, column, offset, taps, residuals[i], d, inside, W, SILU, HAS_RESIDUAL)
        y += y_t
    return x, residual, y, window


@triton.jit
def _convolve(
    x,
    weight,
    bias,
    residual,
    state,
    cu_seqlens,
    y,
    b,
    begin,
    first,
    T,
    D,
    N,
    levels,
    x_t,
    r_t,
    w_d,
    w_w,
    bias_d,
    s_n,
    s_d,
    s_w,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    DENSE: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
):
    """R steps of y from `begin` on, sequence by sequence. x, residual, y begin with the row of the batch."""
    d = first + tl.arange(0, BD)
    same = tl.zeros_like(d)  # a mask of one answer for all
    inside = d < D
    column = ()
    read = _columns(weight, first, D - first, w_d, w_w, W, DENSE, BD)
    for w in tl.static_range(W):
        column = column + (read[w].to(tl.float32),)
    offset = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + d * bias_d, mask=inside, other=0.0).to(tl.float32)
    stop = tl.minimum(begin + R, T)
    t = begin
    while t < stop:
        n = b
        start = 0
        end = stop
        if PACKED:
            n = tl.max(sequence_of(t + tl.zeros([1], tl.int32), cu_seqlens, N, levels)).to(tl.int64)
            start = _bound(cu_seqlens, n, T, True)
            end = tl.minimum(_bound(cu_seqlens, n + 1, T, True), stop)
            end = tl.where(end > t, end, stop)  # whatever the lengths, there is an end to this
        window = ()
        for w in tl.static_range(W - 1):
            before = t - (W - 1) + w
            place = x + tl.cast(before, tl.int64) * x_t + d
            tap = tl.load(place, mask=inside & (same + before >= start), other=0.0).to(tl.float32)
            if HAS_STATE:
                place = state + n * s_n + tl.cast(tl.maximum(W + before - start, 0), tl.int64) * s_w + d.to(tl.int64) * s_d
                tap += tl.load(place, mask=inside & (same + before < start), other=0.0).to(tl.float32)
            window = window + (tap,)
        at = tl.cast(t, tl.int64)
        x_row = x + at * x_t
        y_row = y + at * D
        r_row = y_row
        if HAS_RESIDUAL:
            r_row = residual + at * r_t
        # a few steps at a time
        for _ in range((end - t) // BT):
            x_row, r_row, y_row, window = _steps(
                *(x_row, r_row, y_row, column, offset, window, BT, d, inside, x_t, r_t, D),
                *(W, SILU, HAS_RESIDUAL, BT, True),
            )
        if (end - t) % BT > 0:
            _steps(
                *(x_row, r_row, y_row, column, offset, window, (end - t) % BT, d, inside, x_t, r_t, D),
                *(W, SILU, HAS_RESIDUAL, BT, False),
            )
        t = end


@triton.jit
def _last_steps(
    x,
    state,
    cu_seqlens,
    final,
    n,
    d,
    T,
    D,
    x_t,
    s_n,
    s_d,
    s_w,
    W: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    BW: tl.constexpr,
):
    """The last W steps of sequence n."""
    start = 0
    end = T
    if PACKED:
        start = _bound(cu_seqlens, n, T, True)
        end = _bound(cu_seqlens, n + 1, T, True)
    w = tl.arange(0, BW)
    step = end - start - W + w
    there = (w < W)[:, None] & (d < D)[None, :]
    place = x + (start + step).to(tl.int64)[:, None] * x_t + d[None, :]
    last = tl.load(place, mask=there & (step >= 0)[:, None], other=0.0).to(tl.float32)
    if HAS_STATE:
        place = state + n * s_n + (tl.maximum(W + step, 0).to(tl.int64) * s_w)[:, None] + d[None, :].to(tl.int64) * s_d
        last += tl.load(place, mask=there & (step < 0)[:, None], other=0.0).to(tl.float32)
    place = final + (n * D + d)[None, :] * W + w[:, None]
    tl.store(place, last.to(final.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=['T', 'N', 'tiles', 'extra', 'levels'])
def _forward(
    x,
    weight,
    bias,
    residual,
    state,
    cu_seqlens,
    y,
    final,
    T,
    D,
    N,
    tiles,
    extra,
    levels,
    x_b,
    x_t,
    r_b,
    r_t,
    w_d,
    w_w,
    bias_d,
    s_n,
    s_d,
    s_w,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    DENSE: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid (B * (tiles + extra) * ceil(D / BD),): a tile is R steps; the extra programs write final states `[N, D, W]`.

    Args:
        x, residual: `[B, T, D]` by strides, the last 1; y: `[B, T, D]`, contiguous.
        weight: `[D, W]`, bias: `[D]`, state: `[N, D, W]`, by strides.
    """
    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    first = (pid % blocks) * BD
    tile = pid // blocks
    b = (tile // (tiles + extra)).to(tl.int64)
    tile = tile % (tiles + extra)
    x += b * x_b
    if tile < tiles:
        if HAS_RESIDUAL:
            residual += b * r_b
        y += b * T * D
        _convolve(
            x,
            weight,
            bias,
            residual,
            state,
            cu_seqlens,
            y,
            b,
            tile * R,
            first,
            T,
            D,
            N,
            levels,
            x_t,
            r_t,
            w_d,
            w_w,
            bias_d,
            s_n,
            s_d,
            s_w,
            W,
            SILU,
            HAS_BIAS,
            HAS_RESIDUAL,
            HAS_STATE,
            PACKED,
            DENSE,
            R,
            BD,
            BT,
        )
    elif final is not None:
        _last_steps(
            x,
            state,
            cu_seqlens,
            final,
            b + (tile - tiles),
            first + tl.arange(0, BD),
            T,
            D,
            x_t,
            s_n,
            s_d,
            s_w,
            W,
            HAS_STATE,
            PACKED,
            BW,
        )


@triton.jit(do_not_specialize=['T', 'N', 'levels'])
def _sequences(cu_seqlens, sequences, T, N, levels, BLOCK: tl.constexpr):
    """Grid (ceil(T / BLOCK),): which sequence each step is in, int32 `[T]`."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sequences + t, sequence_of(t, cu_seqlens, N, levels), mask=t < T)


@triton.jit
def _weights(weight, d, D, w_d, w_w, W: tl.constexpr):
    """The columns of the weight at channels d, as a tuple."""
    columns = ()
    for w in tl.static_range(W):
        columns = columns + (tl.load(weight + d * w_d + w * w_w, mask=d < D, other=0.0).to(tl.float32)[None, :],)
    return columns


@triton.jit
def _walk(
    x,
    weight,
    bias,
    state,
    cu_seqlens,
    sequences,
    dy,
    dfinal,
    dx,
    partial,
    b,
    begin,
    d,
    T,
    D,
    x_t,
    w_d,
    w_w,
    bias_d,
    s_n,
    s_d,
    s_w,
    dy_t,
    f_n,
    f_d,
    f_w,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    PACKED: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
):
    """Lanes of R steps from `begin` on, and W - 1 more that finish their gradients."""
    column = _weights(weight, d, D, w_d, w_w, W)
    offset = tl.zeros([1, BD], tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + d * bias_d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    window = ()
    sums = ()
    unfinished = ()
    for w in tl.static_range(W):
        t = begin - W + w
        mask = ((t >= 0) & (t < T))[:, None] & (d < D)[None, :]
        before = tl.load(x + t.to(tl.int64)[:, None] * x_t + d[None, :], mask=mask, other=0.0).to(tl.float32)
        window = window + (before,)
        sums = sums + (tl.zeros([G, BD], tl.float32),)
        unfinished = unfinished + (tl.zeros([G, BD], tl.float32),)
    dbias = tl.zeros([G, BD], tl.float32)
    # a few steps at a time, so that what they load is asked for at once
    for first in range(0, R + W - 1, AHEAD):
        for ahead in tl.static_range(AHEAD):
            row = tl.zeros_like(begin) + (first + ahead)
            t = begin + row
            at = t.to(tl.int64)
            there = (t < T)[:, None] & (d < D)[None, :]
            step = t
            n = tl.zeros_like(t) + b
            if PACKED:
                n = tl.load(sequences + t, mask=t < T, other=0).to(tl.int64)
                step = t - _bound(cu_seqlens, n, T, t < T)
            now = tl.load(x + at[:, None] * x_t + d[None, :], mask=there, other=0.0).to(tl.float32)
            window = window[1:] + (now,)
            taps = ()
            pre = tl.zeros([G, BD], tl.float32) + offset
            for w in tl.static_range(W):
                tap = tl.where((step >= W - 1 - w)[:, None], window[w], 0.0)
                if HAS_STATE:
                    if w < W - 1:
                        place = (
                            state
                            + (n * s_n + tl.maximum(step + w + 1, 0).to(tl.int64) * s_w)[:, None]
                            + d[None, :].to(tl.int64) * s_d
                        )
                        mask = there & (step < W - 1 - w)[:, None]
                        tap += tl.load(place, mask=mask, other=0.0).to(tl.float32)
                pre += column[w] * tap
                taps = taps + (tap,)
            g = tl.load(dy + at[:, None] * dy_t + d[None, :], mask=there, other=0.0).to(tl.float32)
            g = tl.where(there, g * _derivative(pre, SILU), 0.0)
            here = tl.where((row < R)[:, None], g, 0.0)
            dbias += here
            grown = ()
            for w in tl.static_range(W):
                grown = grown + (sums[w] + here * taps[w],)
            sums = grown
            # unfinished[j] is the gradient of step t - j, which this step ends for j = W - 1
            grown = (column[W - 1] * g,)
            for j in tl.static_range(1, W):
                grown = grown + (unfinished[j - 1] + tl.where((step >= j)[:, None], column[W - 1 - j] * g, 0.0),)
            unfinished = grown
            ended = t - (W - 1)
            own = (row >= W - 1) & (row < R + W - 1) & (ended < T)
            out = own[:, None] & (d < D)[None, :]
            total = unfinished[W - 1]
            if HAS_DFINAL:
                end = tl.zeros_like(t) + T
                n = tl.zeros_like(t) + b
                if PACKED:
                    n = tl.load(sequences + ended, mask=own, other=0).to(tl.int64)
                    end = _bound(cu_seqlens, n + 1, T, own)
                last = W - (end - ended)
                kept = out & ((last >= 0) & (last < W))[:, None]
                place = dfinal + (n * f_n + last.to(tl.int64) * f_w)[:, None] + d[None, :].to(tl.int64) * f_d
                total += tl.load(place, mask=kept, other=0.0).to(tl.float32)
            place = dx + (b * T + ended)[:, None] * D + d[None, :]
            tl.store(place, total.to(dx.dtype.element_ty), mask=out)
    partial += d
    for w in tl.static_range(W):
        tl.store(partial + w * D, tl.sum(sums[w], 0), mask=d < D)
    tl.store(partial + W * D, tl.sum(dbias, 0), mask=d < D)


@triton.jit
def _state_gradient(
    x,
    weight,
    bias,
    state,
    cu_seqlens,
    dy,
    dfinal,
    dstate,
    n,
    d,
    T,
    D,
    x_t,
    w_d,
    w_w,
    bias_d,
    s_n,
    s_d,
    s_w,
    dy_t,
    f_n,
    f_d,
    f_w,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    PACKED: tl.constexpr,
    BD: tl.constexpr,
):
    """The gradient of the initial state of sequence n."""
    column = _weights(weight, d, D, w_d, w_w, W)
    offset = tl.zeros([1, BD], tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + d * bias_d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    start = 0
    end = T
    if PACKED:
        start = _bound(cu_seqlens, n, T, True)
        end = _bound(cu_seqlens, n + 1, T, True)
    channel = d[None, :].to(tl.int64)
    length = tl.zeros_like(channel) + (end - start)
    # the gradients of the steps that read the state, before the activation
    early = ()
    for step in tl.static_range(W - 1):
        pre = offset
        for w in tl.static_range(W):
            t = step - (W - 1 - w)
            if t >= 0:
                place = x + (start + t).to(tl.int64) * x_t + channel
                there = (channel < D) & (t < length)
                pre += column[w] * tl.load(place, mask=there, other=0.0).to(tl.float32)
            else:
                place = state + n * s_n + channel * s_d + tl.cast(W + t, tl.int64) * s_w
                pre += column[w] * tl.load(place, mask=channel < D, other=0.0).to(tl.float32)
        there = (channel < D) & (step < length)
        g = tl.load(dy + (start + step).to(tl.int64) * dy_t + channel, mask=there, other=0.0).to(tl.float32)
        early = early + (tl.where(there, g * _derivative(pre, SILU), 0.0),)
    for i in tl.static_range(W):
        total = tl.zeros([1, BD], tl.float32)
        for step in tl.static_range(i):
            total += column[i - 1 - step] * early[step]
        if HAS_DFINAL:
            w = i - length
            place = dfinal + n * f_n + channel * f_d + w * f_w
            total += tl.load(place, mask=(channel < D) & (w >= 0) & (w < W), other=0.0).to(tl.float32)
        tl.store(dstate + (n * D + channel) * W + i, total.to(dstate.dtype.element_ty), mask=channel < D)


@triton.jit(do_not_specialize=['T', 'tiles', 'extra'])
def _backward(
    x,
    weight,
    bias,
    state,
    cu_seqlens,
    sequences,
    dy,
    dfinal,
    dx,
    dstate,
    partial,
    T,
    D,
    tiles,
    extra,
    x_b,
    x_t,
    w_d,
    w_w,
    bias_d,
    s_n,
    s_d,
    s_w,
    dy_b,
    dy_t,
    f_n,
    f_d,
    f_w,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    PACKED: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (B * (tiles + extra) * ceil(D / BD),): a tile is G lanes of R steps; the extra programs write `dstate`.

    Args:
        x, dy: `[B, T, D]` by strides, the last 1; dx: `[B, T, D]`, contiguous.
        weight, bias, state: as in the forward; dfinal: `[N, D, W]` by strides; dstate: `[N, D, W]`, contiguous.
        sequences: int32 `[T]`, of packed sequences.
        partial: float32 `[B * tiles, W + 1, D]`: the sums over a tile's steps for the W columns of the weight and the bias.
    """
    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    d = (pid % blocks) * BD + tl.arange(0, BD)
    tile = pid // blocks
    b = (tile // (tiles + extra)).to(tl.int64)
    tile = tile % (tiles + extra)
    x += b * x_b
    dy += b * dy_b
    if tile < tiles:
        begin = (tile * G + tl.arange(0, G)) * R
        partial += (b * tiles + tile) * (W + 1) * D
        _walk(
            x,
            weight,
            bias,
            state,
            cu_seqlens,
            sequences,
            dy,
            dfinal,
            dx,
            partial,
            b,
            begin,
            d,
            T,
            D,
            x_t,
            w_d,
            w_w,
            bias_d,
            s_n,
            s_d,
            s_w,
            dy_t,
            f_n,
            f_d,
            f_w,
            W,
            SILU,
            HAS_BIAS,
            HAS_STATE,
            HAS_DFINAL,
            PACKED,
            G,
            R,
            BD,
        )
    elif dstate is not None:
        _state_gradient(
            x,
            weight,
            bias,
            state,
            cu_seqlens,
            dy,
            dfinal,
            dstate,
            b + (tile - tiles),
            d,
            T,
            D,
            x_t,
            w_d,
            w_w,
            bias_d,
            s_n,
            s_d,
            s_w,
            dy_t,
            f_n,
            f_d,
            f_w,
            W,
            SILU,
            HAS_BIAS,
            HAS_DFINAL,
            PACKED,
            BD,
        )


@triton.jit(do_not_specialize=['N'])
def _update(
    x,
    cache,
    residual,
    weight,
    bias,
    y,
    N,
    D,
    x_n,
    r_n,
    c_n,
    c_d,
    c_w,
    w_d,
    w_w,
    bias_d,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DENSE_CACHE: tl.constexpr,
    DENSE: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (ceil(N / BN) * ceil(D / BD),): a step of BN sequences.

    Args:
        x, residual: `[N, D]` by strides, the last 1; y: `[N, D]`, contiguous.
        cache: `[N, D, W]`, weight: `[D, W]`, bias: `[D]`, by strides; DENSE_CACHE, DENSE: see `_columns`.
    """
    blocks = tl.cdiv(D, BD)
    row = tl.program_id(0) // blocks * BN
    first = (tl.program_id(0) % blocks) * BD
    d = first + tl.arange(0, BD)
    past = ()
    steps = ()
    residuals = ()
    for i in tl.static_range(BN):
        n = tl.cast(row + i, tl.int64)
        there = tl.where(row + i < N, D, 0)
        mask = d < there
        past = past + (_columns(cache + n * c_n, first, there - first, c_d, c_w, W, DENSE_CACHE, BD),)
        steps = steps + (tl.load(x + n * x_n + d, mask=mask, other=0.0),)
        if HAS_RESIDUAL:
            residuals = residuals + (tl.load(residual + n * r_n + d, mask=mask, other=0.0),)
    read = _columns(weight, first, D - first, w_d, w_w, W, DENSE, BD)
    offset = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + d * bias_d, mask=d < D, other=0.0).to(tl.float32)
    # everything of these rows is read before any of it is written over: x may lie in its own row's cache, not in another's
    tl.debug_barrier()
    for i in tl.static_range(BN):
        n = tl.cast(row + i, tl.int64)
        there = tl.where(row + i < N, D, 0)
        mask = d < there
        taps = past[i][1:]
        acc = offset
        for w in tl.static_range(W - 1):
            acc += read[w].to(tl.float32) * taps[w].to(tl.float32)
        acc = _activated(acc + read[W - 1].to(tl.float32) * steps[i].to(tl.float32), SILU)
        if HAS_RESIDUAL:
            acc += residuals[i].to(tl.float32)
        tl.store(y + n * D + d, acc.to(y.dtype.element_ty), mask=mask)
        taps = taps + (steps[i].to(cache.dtype.element_ty),)
        _store_columns(cache + n * c_n, taps, first, there - first, c_d, c_w, W, DENSE_CACHE, BD)


def _strides(x: torch.Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()[:count]


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    output_final_state: bool,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y and the final state or None."""
    (batch, length, D), W = x.shape, weight.shape[1]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    x, residual = in_rows(x), None if residual is None else in_rows(residual)
    weight, bias, initial_state = as_stored(weight), as_stored(bias), as_stored(initial_state)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    y = torch.empty((batch, length, D), dtype=x.dtype, device=x.device)
    final = None
    if output_final_state:
        dtype = x.dtype if initial_state is None else initial_state.dtype
        final = torch.empty((count, D, W), dtype=dtype, device=x.device)
    many = batch * length * D > MANY_NUMBERS
    run, width = RUNS[many], WIDTHS[many]
    channels = 32 * width // x.element_size() // (1 if W <= 4 else 2)  # for as many registers
    block = min(triton.next_power_of_2(max(D, 1)), channels)
    tiles, extra = -(-length // run), 0
    if final is not None:
        extra = 1 if cu_seqlens is None else count
    programs = batch * (tiles + extra) * -(-D // block)
    if programs:
        with on_device_of(x):
            _forward[(programs,)](
                *(x, weight, bias, residual, initial_state, cu_seqlens, y, final),
                *(length, D, count, tiles, extra, count.bit_length()),
                *(*_strides(x, 2), *_strides(residual, 2), *weight.stride(), *_strides(bias, 1)),
                *_strides(initial_state, 3),
                *(W, silu, bias is not None, residual is not None, initial_state is not None, cu_seqlens is not None),
                *(_dense(weight), run, block, triton.next_power_of_2(W), AT_ONCE),
                num_warps=1,
            )
    return y, final


def _dense(rows: torch.Tensor) -> bool:
    """Whether each of the rows `[..., D, W]` is one access of a power of two, or two of them."""
    width = rows.shape[-1]
    return width in (2, 4, 8) and rows.stride()[-2:] == (width, 1)


def launch_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, weight, bias and initial state."""
    (batch, length, D), W = x.shape, weight.shape[1]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    x, dy = in_rows(x), in_rows(dy)
    weight, bias, initial_state, dfinal = (as_stored(one) for one in (weight, bias, initial_state, dfinal))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    dx = torch.empty((batch, length, D), dtype=x.dtype, device=x.device)
    dstate = None
    walk = WALKS[batch * length * D > MANY * LANES * WALKS[1] * WALK_CHANNELS]
    tiles, extra = -(-length // (LANES * walk)), 0
    if initial_state is not None:
        dstate = torch.empty((count, D, W), dtype=initial_state.dtype, device=x.device)
        extra = 1 if cu_seqlens is None else count
    partial = torch.empty((batch * tiles, W + 1, D), dtype=torch.float32, device=x.device)
    sequences = None
    block = min(triton.next_power_of_2(max(D, 1)), WALK_CHANNELS)
    programs = batch * (tiles + extra) * -(-D // block)
    if programs:
        with on_device_of(x):
            if cu_seqlens is not None:
                # there with no steps, too: what walks over them is compiled all the same
                sequences = torch.empty(length, dtype=torch.int32, device=x.device)
                if length:
                    _sequences[(-(-length // 512),)](cu_seqlens, sequences, length, count, count.bit_length(), 512)
            _backward[(programs,)](
                *(x, weight, bias, initial_state, cu_seqlens, sequences, dy, dfinal, dx, dstate, partial),
                *(length, D, tiles, extra, *_strides(x, 2), *weight.stride(), *_strides(bias, 1)),
                *(*_strides(initial_state, 3), *_strides(dy, 2), *_strides(dfinal, 3)),
                *(W, silu, bias is not None, initial_state is not None, dfinal is not None, cu_seqlens is not None),
                *(LANES, walk, block),
            )
    sums = partial.sum(0)
    dweight = sums[:W].t().to(weight.dtype).contiguous()
    return dx, dweight, None if bias is None else sums[W].to(bias.dtype, copy=True), dstate


def launch_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """y, and the cache changed in place."""
    D, W = x.shape[-1], weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, residual = in_rows(x), None if residual is None else in_rows(residual)
    weight, bias, stored = as_stored(weight), as_stored(bias), as_stored(cache)
    count = cache.shape[0]
    # of as many channels as 16 bytes of the cache hold, so that each thread keeps to its own
    channels = 32 * UPDATE_WARPS * max(16 // (W * stored.element_size()), 1)
    block = min(triton.next_power_of_2(max(D, 1)), channels)
    rows = UPDATE_ROWS[count * D > 4 * MANY * channels]
    programs = -(-count // rows) * -(-D // block)
    if programs:
        with on_device_of(x):
            _update[(programs,)](
                *(
                    x,
                    stored,
                    residual,
                    weight,
                    bias,
                    y,
                    count,
                    D,
                    _step_stride(x),
                    0 if residual is None else _step_stride(residual),
                ),
                *(*stored.stride(), *weight.stride(), *_strides(bias, 1)),
                *(W, silu, bias is not None, residual is not None, _dense(stored), _dense(weight), rows, block),
                num_warps=UPDATE_WARPS,
            )
    if stored is not cache:
        cache.copy_(stored)
    return y


def _step_stride(x: torch.Tensor) -> int:
    """From one sequence to the next: of `[N, D]`, `[N, 1, D]` or `[1, N, D]`."""
    return x.stride(1) if x.dim() == 3 and x.shape[0] == 1 else x.stride(0)
