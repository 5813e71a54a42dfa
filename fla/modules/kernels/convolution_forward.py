# mypy: disable-error-code="assignment, unreachable"
# Tuples grow in these kernels, which Python's types cannot follow.
"""The forward of the short causal convolution, in one launch.

A program walks along time with the last W - 1 steps in registers. It goes from sequence to sequence, so that only the first
steps of a sequence need a mask or a state. Otherwise instructions, not memory, would bound the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.modules.kernels.convolution_common import (
    activate,
    clamped_bound,
    is_dense,
    load_bias,
    load_weight,
    load_window,
    strides_of,
)
from fla.ops.launch.kernels.layout import sequence_of
from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.triton_call import in_rows, on_device_of, resolve_neg
from fla.utils.sizes import next_power_of_2

# Measured on an H200 with bfloat16 and W = 4.
TILE_STEPS, THREAD_BYTES = (8, 64), (8, 16)  # for few and for many numbers: steps of a program, bytes of a row per thread
MANY_NUMBERS = 1 << 25  # of x
BLOCK_STEPS = 8  # steps whose loads a program issues together


@triton.jit
def _step(y, column, offset, taps, residual, d, inside, W: tl.constexpr, SILU: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    acc = offset
    for w in tl.static_range(W):
        acc += column[w] * taps[w]
    acc = activate(acc, SILU)
    if HAS_RESIDUAL:
        acc += residual.to(tl.float32)
    tl.store(y + d, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _block(
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
    """`count` steps (BT of them with ALL), whose loads are issued together. Returns pointers to the next step, and the W - 1
    steps before it."""
    rows = ()
    residuals = ()  # without a residual the rows again, unused
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
            # a branch, not a mask: with many short sequences most blocks are partial
            if i < count:
                _step(y, column, offset, taps, residuals[i], d, inside, W, SILU, HAS_RESIDUAL)
        y += y_t
    return x, residual, y, window


@triton.jit
def _tile(
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
    """R steps of y from `begin` on, sequence by sequence. x, residual and y point to batch row b."""
    d = first + tl.arange(0, BD)
    inside = d < D
    column = load_weight(weight, first, D, w_d, w_w, W, DENSE, BD)
    offset = load_bias(bias, d, D, bias_d, HAS_BIAS)
    stop = tl.minimum(begin + R, T)
    t = begin
    while t < stop:
        n = b
        start = 0
        end = stop
        if PACKED:
            n = tl.max(sequence_of(t + tl.zeros([1], tl.int32), cu_seqlens, N, levels)).to(tl.int64)
            start = clamped_bound(cu_seqlens, n, T)
            end = tl.minimum(clamped_bound(cu_seqlens, n + 1, T), stop)
            end = tl.where(end > t, end, stop)  # the loop ends for any cu_seqlens
        window = load_window(x, state, n, start, t, d, inside, x_t, s_n, s_d, s_w, W, HAS_STATE)
        at = tl.cast(t, tl.int64)
        x_row = x + at * x_t
        y_row = y + at * D
        r_row = y_row
        if HAS_RESIDUAL:
            r_row = residual + at * r_t
        for _ in range((end - t) // BT):
            x_row, r_row, y_row, window = _block(
                *(x_row, r_row, y_row, column, offset, window, BT, d, inside, x_t, r_t, D),
                *(W, SILU, HAS_RESIDUAL, BT, True),
            )
        if (end - t) % BT > 0:
            _block(
                *(x_row, r_row, y_row, column, offset, window, (end - t) % BT, d, inside, x_t, r_t, D),
                *(W, SILU, HAS_RESIDUAL, BT, False),
            )
        t = end


@triton.jit
def _final_state(
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
    """Stores the last W steps of sequence n."""
    start = 0
    end = T
    if PACKED:
        start = clamped_bound(cu_seqlens, n, T)
        end = clamped_bound(cu_seqlens, n + 1, T)
    w = tl.arange(0, BW)
    step = end - start - W + w
    valid = (w < W)[:, None] & (d < D)[None, :]
    place = x + (start + step).to(tl.int64)[:, None] * x_t + d[None, :]
    last = tl.load(place, mask=valid & (step >= 0)[:, None], other=0.0).to(tl.float32)
    if HAS_STATE:
        place = state + n * s_n + (tl.maximum(W + step, 0).to(tl.int64) * s_w)[:, None] + d[None, :].to(tl.int64) * s_d
        last += tl.load(place, mask=valid & (step < 0)[:, None], other=0.0).to(tl.float32)
    place = final + (n * D + d)[None, :] * W + w[:, None]
    tl.store(place, last.to(final.dtype.element_ty), mask=valid)


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
        x, residual: `[B, T, D]` with strides, the last 1; y: `[B, T, D]`, contiguous.
        weight: `[D, W]`, bias: `[D]`, state: `[N, D, W]`, with strides.
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
        _tile(
            *(x, weight, bias, residual, state, cu_seqlens, y, b, tile * R, first, T, D, N, levels),
            *(x_t, r_t, w_d, w_w, bias_d, s_n, s_d, s_w),
            *(W, SILU, HAS_BIAS, HAS_RESIDUAL, HAS_STATE, PACKED, DENSE, R, BD, BT),
        )
    elif final is not None:
        n = b + (tile - tiles)
        d = first + tl.arange(0, BD)
        _final_state(x, state, cu_seqlens, final, n, d, T, D, x_t, s_n, s_d, s_w, W, HAS_STATE, PACKED, BW)


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y, and the final state or None; see `causal_conv1d`."""
    (batch, length, D), W = x.shape, weight.shape[1]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    x, residual = in_rows(x), None if residual is None else in_rows(residual)
    weight, bias, initial_state = resolve_neg(weight), resolve_neg(bias), resolve_neg(initial_state)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    y = torch.empty((batch, length, D), dtype=x.dtype, device=x.device)
    final = None
    if output_final_state:
        dtype = x.dtype if initial_state is None else initial_state.dtype
        final = torch.empty((count, D, W), dtype=dtype, device=x.device)
    many = batch * length * D > MANY_NUMBERS
    steps, thread_bytes = TILE_STEPS[many], THREAD_BYTES[many]
    channels = 32 * thread_bytes // x.element_size() // (1 if W <= 4 else 2)  # keeps the number of registers
    block = min(next_power_of_2(max(D, 1)), channels)
    tiles, extra = -(-length // steps), 0
    if final is not None:
        extra = 1 if cu_seqlens is None else count
    programs = batch * (tiles + extra) * -(-D // block)
    if programs:
        with on_device_of(x):
            launch_kernel(
                _forward,
                (programs,),
                *(x, weight, bias, residual, initial_state, cu_seqlens, y, final),
                *(length, D, count, tiles, extra, count.bit_length()),
                *(*strides_of(x, 2), *strides_of(residual, 2), *weight.stride(), *strides_of(bias, 1)),
                *strides_of(initial_state, 3),
                *(W, activation is not None, bias is not None, residual is not None),
                *(initial_state is not None, cu_seqlens is not None),
                *(is_dense(weight), steps, block, next_power_of_2(W), BLOCK_STEPS),
                num_warps=1,
            )
    return y, final
