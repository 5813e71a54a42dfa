# mypy: disable-error-code="assignment, unreachable"
# Tuples grow in these kernels, which Python's types cannot follow.
"""The backward of the short causal convolution: one launch for the gradients of x and state and, tile by tile, of weight and
bias, one more that adds the latter.

Programs walk along time as those of the forward, from sequence to sequence, with the last steps and the unfinished gradients
of x in registers: a gradient of x needs the derivative of the activation at W steps, which would otherwise be computed W
times. They walk W - 1 steps further than they have gradients to finish.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.modules.kernels.convolution_common import _bound, _dense, _offset, _root, _strides, _weights, _window
from fla.ops.launch.kernels.layout import sequence_of
from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.triton_call import in_rows, on_device_of, resolve_neg
from fla.utils.sizes import next_power_of_2

# Measured on an H200 with bfloat16 and W = 4.
RUNS = (32, 128)  # of few, and of many numbers: steps of a program
WIDTH = 4  # bytes that a thread has of each
MANY_NUMBERS = 1 << 25  # of x
AT_ONCE = tl.constexpr(8)  # steps that a program asks for at once
LAST_AT_ONCE = tl.constexpr(4)  # of the last steps of a sequence, or of what the program has of it


@triton.jit
def _derivative(y, SILU: tl.constexpr):
    if SILU:
        root = _root(y)
        s = root * root
        return s * (1.0 + y * (1.0 - s))
    else:
        return tl.full(y.shape, 1.0, tl.float32)


@triton.jit
def _step(now, g, there, column, offset, window, unfinished, W: tl.constexpr, SILU: tl.constexpr, ALL: tl.constexpr):
    """One step: what it was computed of, its gradient before the activation, that of step t - (W - 1), which this step ends,
    and of the W - 1 after that, the last first. ALL: it is there, whatever `there` says."""
    taps = window + (now,)
    pre = offset
    for w in tl.static_range(W):
        pre += column[w] * taps[w]
    g = g * _derivative(pre, SILU)
    if not ALL:
        g = tl.where(there, g, 0.0)  # where nothing is, the derivative may be one of infinity
    grown = (column[W - 1] * g,)
    for j in tl.static_range(1, W):
        grown = grown + (unfinished[j - 1] + column[W - 1 - j] * g,)
    return taps, g, grown[W - 1], grown[: W - 1]


@triton.jit
def _store(row, dfinal, ended, t, ends, mask, d, f_d, f_w, W: tl.constexpr, HAS_DFINAL: tl.constexpr):
    """The gradient of step t, in its row, of a sequence that ends before step `ends`."""
    if HAS_DFINAL:
        last = tl.zeros_like(d) + (W - (ends - t))
        place = dfinal + last.to(tl.int64) * f_w + d.to(tl.int64) * f_d
        ended += tl.load(place, mask=mask & (last >= 0) & (last < W), other=0.0).to(tl.float32)
    tl.store(row + d, ended.to(row.dtype.element_ty), mask=mask)


@triton.jit
def _walk(
    x,
    weight,
    bias,
    state,
    cu_seqlens,
    dy,
    dfinal,
    dx,
    partial,
    b,
    begin,
    first,
    T,
    D,
    N,
    levels,
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
    DENSE: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
):
    """R steps from `begin` on, sequence by sequence. x, dy, dx begin with the row of the batch."""
    d = first + tl.arange(0, BD)
    same = tl.zeros_like(d)  # a mask of one answer for all
    inside = d < D
    column = _weights(weight, first, D, w_d, w_w, W, DENSE, BD)
    offset = _offset(bias, d, D, bias_d, HAS_BIAS)
    sums = ()
    for _w in tl.static_range(W):
        sums = sums + (tl.zeros([BD], tl.float32),)
    dbias = tl.zeros([BD], tl.float32)
    stop = tl.minimum(begin + R, T)
    t = begin
    while t < stop:
        n = b
        start = 0
        own_ends = T
        ends = T
        if PACKED:
            n = tl.max(sequence_of(t + tl.zeros([1], tl.int32), cu_seqlens, N, levels)).to(tl.int64)
            start = _bound(cu_seqlens, n, T, True)
            own_ends = _bound(cu_seqlens, n + 1, T, True)
            ends = tl.where(own_ends > t, own_ends, stop)  # whatever the lengths, there is an end to this
        end = tl.minimum(ends, stop)
        window = _window(x, state, n, start, t, d, inside, x_t, s_n, s_d, s_w, W, HAS_STATE)
        unfinished = ()
        for _w in tl.static_range(W - 1):
            unfinished = unfinished + (tl.zeros([BD], tl.float32),)
        if HAS_DFINAL:
            final = dfinal + n * f_n
        else:
            final = dx  # not looked at
        x_row = x + tl.cast(t, tl.int64) * x_t
        dy_row = dy + tl.cast(t, tl.int64) * dy_t
        dx_row = dx + tl.cast(t - (W - 1), tl.int64) * D
        # whole blocks of steps that all count
        blocks = (end - t) // AT_ONCE
        for block in range(blocks):
            row = t + block * AT_ONCE
            xs = ()
            gs = ()
            for _i in tl.static_range(AT_ONCE):
                xs = xs + (tl.load(x_row + d, mask=inside, other=0.0),)
                gs = gs + (tl.load(dy_row + d, mask=inside, other=0.0),)
                x_row += x_t
                dy_row += dy_t
            for i in tl.static_range(AT_ONCE):
                taps, g, ended, unfinished = _step(
                    *(xs[i].to(tl.float32), gs[i].to(tl.float32), inside, column, offset, window, unfinished, W, SILU, True)
                )
                window = taps[1:]
                grown = ()
                for w in tl.static_range(W):
                    grown = grown + (sums[w] + g * taps[w],)
                sums = grown
                if HAS_BIAS:
                    dbias += g
                of = row + i - (W - 1)
                _store(dx_row, final, ended, of, own_ends, inside & (same + of >= t), d, f_d, f_w, W, HAS_DFINAL)
                dx_row += D
        # the rest, and W - 1 more
        from_here = t + blocks * AT_ONCE
        for block in range(tl.cdiv(end - from_here + W - 1, LAST_AT_ONCE)):
            for i in tl.static_range(LAST_AT_ONCE):
                row = from_here + block * LAST_AT_ONCE + i
                there = inside & (same + row < ends)
                now = tl.load(x_row + d, mask=there, other=0.0).to(tl.float32)
                g = tl.load(dy_row + d, mask=there, other=0.0).to(tl.float32)
                taps, g, ended, unfinished = _step(now, g, there, column, offset, window, unfinished, W, SILU, False)
                window = taps[1:]
                grown = ()
                for w in tl.static_range(W):
                    grown = grown + (sums[w] + tl.where(same + row < end, g * taps[w], 0.0),)
                sums = grown
                if HAS_BIAS:
                    dbias += tl.where(same + row < end, g, 0.0)
                of = row - (W - 1)
                mask = inside & (same + of >= t) & (same + of < end)
                _store(dx_row, final, ended, of, own_ends, mask, d, f_d, f_w, W, HAS_DFINAL)
                x_row += x_t
                dy_row += dy_t
                dx_row += D
        t = end
    for w in tl.static_range(W):
        tl.store(partial + tl.cast(w, tl.int64) * D + d, sums[w], mask=inside)
    if HAS_BIAS:
        tl.store(partial + tl.cast(W, tl.int64) * D + d, dbias, mask=inside)


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
    first,
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
    DENSE: tl.constexpr,
    BD: tl.constexpr,
):
    """The gradient of the initial state of sequence n."""
    channel = (first + tl.arange(0, BD)).to(tl.int64)
    column = _weights(weight, first, D, w_d, w_w, W, DENSE, BD)
    offset = _offset(bias, channel, D, bias_d, HAS_BIAS)
    start = 0
    end = T
    if PACKED:
        start = _bound(cu_seqlens, n, T, True)
        end = _bound(cu_seqlens, n + 1, T, True)
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
        total = tl.zeros([BD], tl.float32)
        for step in tl.static_range(i):
            total += column[i - 1 - step] * early[step]
        if HAS_DFINAL:
            w = i - length
            place = dfinal + n * f_n + channel * f_d + w * f_w
            total += tl.load(place, mask=(channel < D) & (w >= 0) & (w < W), other=0.0).to(tl.float32)
        tl.store(dstate + (n * D + channel) * W + i, total.to(dstate.dtype.element_ty), mask=channel < D)


@triton.jit(do_not_specialize=['T', 'N', 'tiles', 'extra', 'levels'])
def _backward(
    x,
    weight,
    bias,
    state,
    cu_seqlens,
    dy,
    dfinal,
    dx,
    dstate,
    partial,
    T,
    D,
    N,
    tiles,
    extra,
    levels,
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
    DENSE: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (B * (tiles + extra) * ceil(D / BD),): a tile is R steps; the extra programs write `dstate`.

    Args:
        x, dy: `[B, T, D]` by strides, the last 1; dx: `[B, T, D]`, contiguous.
        weight, bias, state: as in the forward; dfinal: `[N, D, W]` by strides; dstate: `[N, D, W]`, contiguous.
        partial: float32 `[B * tiles, W, D]`, with a bias `[B * tiles, W + 1, D]`: the sums over a tile's steps for the
            columns of the weight and the bias.
    """
    blocks = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    first = (pid % blocks) * BD
    tile = pid // blocks
    b = (tile // (tiles + extra)).to(tl.int64)
    tile = tile % (tiles + extra)
    x += b * x_b
    dy += b * dy_b
    if tile < tiles:
        dx += b * T * D
        partial += (b * tiles + tile) * (W + HAS_BIAS) * D
        _walk(
            x,
            weight,
            bias,
            state,
            cu_seqlens,
            dy,
            dfinal,
            dx,
            partial,
            b,
            tile * R,
            first,
            T,
            D,
            N,
            levels,
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
            DENSE,
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
            first,
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
            DENSE,
            BD,
        )


@triton.jit(do_not_specialize=['tiles'])
def _add_tiles(
    partial, dweight, dbias, tiles, D, W: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr
):
    """Grid (ceil(D / BD), COLUMNS): dweight `[D, W]`, and dbias `[D]` if there is one, of the sums of tiles
    `[tiles, COLUMNS, D]`."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    column = tl.program_id(1)
    total = tl.zeros((ROWS, BD), tl.float32)
    for first in range(0, tiles, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        place = partial + (row.to(tl.int64) * COLUMNS + column) * D + d[None, :]
        total += tl.load(place, mask=(row < tiles) & (d < D)[None, :], other=0.0)
    if column < W:
        tl.store(dweight + d.to(tl.int64) * W + column, tl.sum(total, 0).to(dweight.dtype.element_ty), mask=d < D)
    elif dbias is not None:
        tl.store(dbias + d, tl.sum(total, 0).to(dbias.dtype.element_ty), mask=d < D)


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
    weight, bias, initial_state, dfinal = (resolve_neg(one) for one in (weight, bias, initial_state, dfinal))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    dx = torch.empty((batch, length, D), dtype=x.dtype, device=x.device)
    dweight = torch.empty((D, W), dtype=weight.dtype, device=x.device)
    dbias = None if bias is None else torch.empty((D,), dtype=bias.dtype, device=x.device)
    dstate = None
    run = RUNS[batch * length * D > MANY_NUMBERS]
    tiles, extra = -(-length // run), 0
    if initial_state is not None:
        dstate = torch.empty((count, D, W), dtype=initial_state.dtype, device=x.device)
        extra = 1 if cu_seqlens is None else count
    columns = W + (bias is not None)
    partial = torch.empty((batch * tiles, columns, D), dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(max(D, 1)), 32 * WIDTH // x.element_size())
    programs = batch * (tiles + extra) * -(-D // block)
    with on_device_of(x):
        if programs:
            launch_kernel(
                _backward,
                (programs,),
                *(x, weight, bias, initial_state, cu_seqlens, dy, dfinal, dx, dstate, partial),
                *(length, D, count, tiles, extra, count.bit_length(), *_strides(x, 2), *weight.stride(), *_strides(bias, 1)),
                *(*_strides(initial_state, 3), *_strides(dy, 2), *_strides(dfinal, 3)),
                *(W, silu, bias is not None, initial_state is not None, dfinal is not None, cu_seqlens is not None),
                *(_dense(weight), run, block),
                num_warps=1,
            )
        if D:
            launch_kernel(_add_tiles, (-(-D // 32), columns), partial, dweight, dbias, batch * tiles, D, W, columns, 64, 32)
    return dx, dweight, dbias, dstate
