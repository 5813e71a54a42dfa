# mypy: disable-error-code="assignment, unreachable"
# Tuples grow in these kernels, which Python's types cannot follow.
"""The backward of the short causal convolution, in two launches.

The first computes the gradients of x and of the initial state, and those of weight and bias tile by tile. The second sums
the tiles. Like the forward, a program walks along time from sequence to sequence. It keeps the last W - 1 steps and the
partial gradients of x in registers, because a gradient of x needs the derivative of the activation at W steps, which would
otherwise be computed W times. It walks W - 1 steps past its tile to complete the gradients of the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.modules.kernels.convolution_common import (
    clamped_bound,
    is_dense,
    load_bias,
    load_weight,
    load_window,
    root_of_sigmoid,
    strides_of,
)
from fla.ops.launch.kernels.layout import sequence_of
from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.triton_call import in_rows, on_device_of, resolve_neg
from fla.utils.sizes import next_power_of_2

# Measured on an H200 with bfloat16 and W = 4.
TILE_STEPS = (32, 128)  # for few and for many numbers: steps of a program
THREAD_BYTES = 4  # of a row, per thread
MANY_NUMBERS = 1 << 25  # of x
BLOCK_STEPS = tl.constexpr(8)  # steps whose loads a program issues together
LAST_BLOCK_STEPS = tl.constexpr(4)  # the same for the rest of a sequence, or of the program's part of it


@triton.jit
def _derivative(y, SILU: tl.constexpr):
    if SILU:
        root = root_of_sigmoid(y)
        s = root * root
        return s * (1.0 + y * (1.0 - s))
    else:
        return tl.full(y.shape, 1.0, tl.float32)


@triton.jit
def _step(now, g, valid, column, offset, window, partial, W: tl.constexpr, SILU: tl.constexpr, ALL: tl.constexpr):
    """One step t. Returns its W taps, its gradient before the activation, the gradient of x at t - (W - 1), which is now
    complete, and the W - 1 partial ones after it, the last first. With ALL, `valid` is taken to be true."""
    taps = window + (now,)
    pre = offset
    for w in tl.static_range(W):
        pre += column[w] * taps[w]
    g = g * _derivative(pre, SILU)
    if not ALL:
        g = tl.where(valid, g, 0.0)  # an invalid step may have an infinite derivative
    added = (column[W - 1] * g,)
    for j in tl.static_range(1, W):
        added = added + (partial[j - 1] + column[W - 1 - j] * g,)
    return taps, g, added[W - 1], added[: W - 1]


@triton.jit
def _store(row, dfinal, gradient, t, ends, mask, d, f_d, f_w, W: tl.constexpr, HAS_DFINAL: tl.constexpr):
    """Stores the gradient of step t of a sequence that ends before step `ends`, after adding that of the final state."""
    if HAS_DFINAL:
        last = tl.zeros_like(d) + (W - (ends - t))
        place = dfinal + last.to(tl.int64) * f_w + d.to(tl.int64) * f_d
        gradient += tl.load(place, mask=mask & (last >= 0) & (last < W), other=0.0).to(tl.float32)
    tl.store(row + d, gradient.to(row.dtype.element_ty), mask=mask)


@triton.jit
def _tile(
    x,
    weight,
    bias,
    state,
    cu_seqlens,
    dy,
    dfinal,
    dx,
    sums,
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
    """R steps from `begin` on, sequence by sequence. x, dy and dx point to batch row b, `sums` to this tile."""
    d = first + tl.arange(0, BD)
    zero = tl.zeros_like(d)  # turns a scalar condition into a mask
    inside = d < D
    column = load_weight(weight, first, D, w_d, w_w, W, DENSE, BD)
    offset = load_bias(bias, d, D, bias_d, HAS_BIAS)
    dweight = ()
    for _w in tl.static_range(W):
        dweight = dweight + (tl.zeros([BD], tl.float32),)
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
            start = clamped_bound(cu_seqlens, n, T)
            own_ends = clamped_bound(cu_seqlens, n + 1, T)
            ends = tl.where(own_ends > t, own_ends, stop)  # the loop ends for any cu_seqlens
        end = tl.minimum(ends, stop)
        window = load_window(x, state, n, start, t, d, inside, x_t, s_n, s_d, s_w, W, HAS_STATE)
        partial = ()
        for _w in tl.static_range(W - 1):
            partial = partial + (tl.zeros([BD], tl.float32),)
        if HAS_DFINAL:
            final = dfinal + n * f_n
        else:
            final = dx  # unused
        x_row = x + tl.cast(t, tl.int64) * x_t
        dy_row = dy + tl.cast(t, tl.int64) * dy_t
        dx_row = dx + tl.cast(t - (W - 1), tl.int64) * D
        # full blocks, without masks
        blocks = (end - t) // BLOCK_STEPS
        for block in range(blocks):
            row = t + block * BLOCK_STEPS
            xs = ()
            gs = ()
            for _i in tl.static_range(BLOCK_STEPS):
                xs = xs + (tl.load(x_row + d, mask=inside, other=0.0),)
                gs = gs + (tl.load(dy_row + d, mask=inside, other=0.0),)
                x_row += x_t
                dy_row += dy_t
            for i in tl.static_range(BLOCK_STEPS):
                taps, g, gradient, partial = _step(
                    *(xs[i].to(tl.float32), gs[i].to(tl.float32), inside, column, offset, window, partial, W, SILU, True)
                )
                window = taps[1:]
                added = ()
                for w in tl.static_range(W):
                    added = added + (dweight[w] + g * taps[w],)
                dweight = added
                if HAS_BIAS:
                    dbias += g
                complete = row + i - (W - 1)
                mask = inside & (zero + complete >= t)
                _store(dx_row, final, gradient, complete, own_ends, mask, d, f_d, f_w, W, HAS_DFINAL)
                dx_row += D
        # the rest, and W - 1 steps more
        rest = t + blocks * BLOCK_STEPS
        for block in range(tl.cdiv(end - rest + W - 1, LAST_BLOCK_STEPS)):
            for i in tl.static_range(LAST_BLOCK_STEPS):
                row = rest + block * LAST_BLOCK_STEPS + i
                valid = inside & (zero + row < ends)
                now = tl.load(x_row + d, mask=valid, other=0.0).to(tl.float32)
                g = tl.load(dy_row + d, mask=valid, other=0.0).to(tl.float32)
                taps, g, gradient, partial = _step(now, g, valid, column, offset, window, partial, W, SILU, False)
                window = taps[1:]
                added = ()
                for w in tl.static_range(W):
                    added = added + (dweight[w] + tl.where(zero + row < end, g * taps[w], 0.0),)
                dweight = added
                if HAS_BIAS:
                    dbias += tl.where(zero + row < end, g, 0.0)
                complete = row - (W - 1)
                mask = inside & (zero + complete >= t) & (zero + complete < end)
                _store(dx_row, final, gradient, complete, own_ends, mask, d, f_d, f_w, W, HAS_DFINAL)
                x_row += x_t
                dy_row += dy_t
                dx_row += D
        t = end
    for w in tl.static_range(W):
        tl.store(sums + tl.cast(w, tl.int64) * D + d, dweight[w], mask=inside)
    if HAS_BIAS:
        tl.store(sums + tl.cast(W, tl.int64) * D + d, dbias, mask=inside)


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
    column = load_weight(weight, first, D, w_d, w_w, W, DENSE, BD)
    offset = load_bias(bias, channel, D, bias_d, HAS_BIAS)
    start = 0
    end = T
    if PACKED:
        start = clamped_bound(cu_seqlens, n, T)
        end = clamped_bound(cu_seqlens, n + 1, T)
    length = tl.zeros_like(channel) + (end - start)
    # the gradients of the steps that read the state, before the activation
    early = ()
    for step in tl.static_range(W - 1):
        pre = offset
        for w in tl.static_range(W):
            t = step - (W - 1 - w)
            if t >= 0:
                place = x + (start + t).to(tl.int64) * x_t + channel
                valid = (channel < D) & (t < length)
                pre += column[w] * tl.load(place, mask=valid, other=0.0).to(tl.float32)
            else:
                place = state + n * s_n + channel * s_d + tl.cast(W + t, tl.int64) * s_w
                pre += column[w] * tl.load(place, mask=channel < D, other=0.0).to(tl.float32)
        valid = (channel < D) & (step < length)
        g = tl.load(dy + (start + step).to(tl.int64) * dy_t + channel, mask=valid, other=0.0).to(tl.float32)
        early = early + (tl.where(valid, g * _derivative(pre, SILU), 0.0),)
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
    sums,
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
        x, dy: `[B, T, D]` with strides, the last 1; dx: `[B, T, D]`, contiguous.
        weight, bias, state: as in the forward; dfinal: `[N, D, W]` with strides; dstate: `[N, D, W]`, contiguous.
        sums: float32 `[B * tiles, W, D]`, with a bias `[B * tiles, W + 1, D]`: the gradients of weight and bias from the
            steps of each tile.
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
        sums += (b * tiles + tile) * (W + HAS_BIAS) * D
        _tile(
            *(x, weight, bias, state, cu_seqlens, dy, dfinal, dx, sums, b, tile * R, first, T, D, N, levels),
            *(x_t, w_d, w_w, bias_d, s_n, s_d, s_w, dy_t, f_n, f_d, f_w),
            *(W, SILU, HAS_BIAS, HAS_STATE, HAS_DFINAL, PACKED, DENSE, R, BD),
        )
    elif dstate is not None:
        _state_gradient(
            *(x, weight, bias, state, cu_seqlens, dy, dfinal, dstate, b + (tile - tiles), first, T, D),
            *(x_t, w_d, w_w, bias_d, s_n, s_d, s_w, dy_t, f_n, f_d, f_w),
            *(W, SILU, HAS_BIAS, HAS_DFINAL, PACKED, DENSE, BD),
        )


@triton.jit(do_not_specialize=['tiles'])
def _sum_tiles(sums, dweight, dbias, tiles, D, W: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """Grid (ceil(D / BD), COLUMNS): dweight `[D, W]` and dbias `[D]` or None from the tiles' sums `[tiles, COLUMNS, D]`."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    column = tl.program_id(1)
    total = tl.zeros((ROWS, BD), tl.float32)
    for first in range(0, tiles, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        place = sums + (row.to(tl.int64) * COLUMNS + column) * D + d[None, :]
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
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of x, weight, bias and initial_state."""
    (batch, length, D), W = x.shape, weight.shape[1]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    x, dy = in_rows(x), in_rows(dy)
    weight, bias, initial_state, dfinal = (resolve_neg(one) for one in (weight, bias, initial_state, dfinal))
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    dx = torch.empty((batch, length, D), dtype=x.dtype, device=x.device)
    dweight = torch.empty((D, W), dtype=weight.dtype, device=x.device)
    dbias = None if bias is None else torch.empty((D,), dtype=bias.dtype, device=x.device)
    dstate = None
    steps = TILE_STEPS[batch * length * D > MANY_NUMBERS]
    tiles, extra = -(-length // steps), 0
    if initial_state is not None:
        dstate = torch.empty((count, D, W), dtype=initial_state.dtype, device=x.device)
        extra = 1 if cu_seqlens is None else count
    columns = W + (bias is not None)
    sums = torch.empty((batch * tiles, columns, D), dtype=torch.float32, device=x.device)
    block = min(next_power_of_2(max(D, 1)), 32 * THREAD_BYTES // x.element_size())
    programs = batch * (tiles + extra) * -(-D // block)
    with on_device_of(x):
        if programs:
            launch_kernel(
                _backward,
                (programs,),
                *(x, weight, bias, initial_state, cu_seqlens, dy, dfinal, dx, dstate, sums),
                *(length, D, count, tiles, extra, count.bit_length()),
                *(*strides_of(x, 2), *weight.stride(), *strides_of(bias, 1)),
                *(*strides_of(initial_state, 3), *strides_of(dy, 2), *strides_of(dfinal, 3)),
                *(W, activation is not None, bias is not None, initial_state is not None),
                *(dfinal is not None, cu_seqlens is not None, is_dense(weight), steps, block),
                num_warps=1,
            )
        if D:
            launch_kernel(_sum_tiles, (-(-D // 32), columns), sums, dweight, dbias, batch * tiles, D, W, columns, 64, 32)
    return dx, dweight, dbias, dstate
