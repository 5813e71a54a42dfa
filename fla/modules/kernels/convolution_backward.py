# mypy: disable-error-code="assignment, var-annotated"
# Tuples grow in these kernels, which Python's types cannot follow.
"""The backward of the short causal convolution, in one launch, or two for packed sequences.

Lanes walk along time with the last steps in registers as in the forward. They have a mask at each step, and the unfinished
gradients in registers besides: the derivative of the activation is needed at W steps for every gradient of x, and would
otherwise be computed W times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.modules.kernels.convolution_common import MANY, _bound, _strides
from fla.ops.common.kernels.layout import sequence_of
from fla.ops.common.triton_call import as_stored, in_rows, on_device_of

# Measured on an H200 with bfloat16 and W = 4.
LANES, WALK_CHANNELS = 4, 64  # of a tile: lanes side by side, each walking some steps
WALKS = (32, 64)  # of few, and of many tiles
AHEAD = tl.constexpr(4)


@triton.jit
def _derivative(y, SILU: tl.constexpr):
    s = tl.sigmoid(y)
    return s * (1.0 + y * (1.0 - s)) if SILU else tl.full(y.shape, 1.0, tl.float32)


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
