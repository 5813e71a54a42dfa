# mypy: disable-error-code="assignment, unreachable, misc, var-annotated"
# Loops over steps append to tuples, which Python's types cannot express.
"""Gates of chunked Kimi delta attention: running sums of log decays, and the gradients of the gates' arguments.

A program has all channels of a head and adds up the steps of a chunk one after the other, 16 steps of loads at a time. A
scan would take more instructions than everything else, and such a loop would wait between the products of another kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import sigmoid, softplus

# Steps of a block, and the kinds of blocks: see forward.py.
BLOCK = tl.constexpr(16)
WHOLE, NEAR, FAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def gate_of(g, rate, bias, lower_bound, GATE: tl.constexpr, BOUNDED: tl.constexpr):
    """Returns the log decay of a step, at least -1000, because -inf - -inf is NaN.

    It is g itself, with GATE -rate softplus(g + bias), and with GATE and BOUNDED lower_bound sigmoid(rate (g + bias))."""
    if GATE:
        g += bias
        g = lower_bound * sigmoid(rate * g) if BOUNDED else -rate * softplus(g)
    return tl.where(g < -1000.0, -1000.0, g)


@triton.jit
def parameters(A_log, dt_bias, hv, cols, in_cols, K: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Returns the rate e^A_log of a head (1 without HAS_A), and the bias of each of its channels (0 without HAS_BIAS)."""
    rate = 1.0
    bias = cols * 0.0
    if HAS_A:
        rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
    if HAS_BIAS:
        bias += tl.load(dt_bias + hv * K + cols, mask=in_cols, other=0.0).to(tl.float32)
    return rate, bias


@triton.jit(do_not_specialize=['T'])
def decays(
    g,
    A_log,
    dt_bias,
    G,
    block_kind,
    cu_seqlens,
    table,
    lower_bound,
    limit,
    T,
    g_b,
    g_t,
    g_h,
    HV: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid (rows * HV,). Computes the running log decays, and the kinds of blocks (see forward.py). BK >= K.

    Args:
        g: `[B, T, HV, K]` by strides, the last 1. A_log: `[HV]`, dt_bias: `[HV * K]`; read with HAS_A and HAS_BIAS.
        G: written, running log decay in each chunk, float32 or float64 `[B, T, HV, K]`, contiguous.
        block_kind: written, int32 `[rows, HV, SIZE / BLOCK]`. WHOLE where no step of the chunk, in any channel, is further
            than `limit` from the chunk's middle step; else NEAR where no step of the block is further than `limit` from the
            block's middle step; else FAR.
        lower_bound: of the log decay, read with BOUNDED.
        LEAST, MOST: the range of kinds that the call can have. LEAST is WHOLE or MOST.
    """
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    first = start + c * SIZE
    count = tl.minimum(end - first, SIZE)
    cols = tl.arange(0, BK)
    in_cols = cols < K
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    g_row = g + batch64 * g_b + first64 * g_t + hv.to(tl.int64) * g_h + cols
    G_row = G + ((batch64 * T + first64) * HV + hv) * K + cols
    rate, bias = parameters(A_log, dt_bias, hv, cols, in_cols, K, HAS_A, HAS_BIAS)
    total = tl.zeros([BK], G.dtype.element_ty)
    middle = total
    highest = tl.full([BK], -float('inf'), G.dtype.element_ty)
    lowest = tl.full([BK], float('inf'), G.dtype.element_ty)
    blocks = tl.arange(0, SIZE // BLOCK)
    kinds = tl.full([SIZE // BLOCK], MOST, tl.int32)
    # Steps after the last one repeat its G.
    for block in range(SIZE // BLOCK):
        high = tl.full([BK], -float('inf'), G.dtype.element_ty)
        low = tl.full([BK], float('inf'), G.dtype.element_ty)
        block_middle = total
        loaded = ()
        for i in tl.static_range(BLOCK):
            mask = in_cols & (cols * 0 + block * BLOCK + i < count)
            loaded = loaded + (tl.load(g_row, mask=mask, other=0.0),)
            g_row += g_t
        for i in tl.static_range(BLOCK):
            mask = in_cols & (cols * 0 + block * BLOCK + i < count)
            gate = gate_of(loaded[i].to(tl.float32), rate, bias, lower_bound, GATE, BOUNDED)
            total += tl.where(mask, gate, 0.0).to(total.dtype)
            tl.store(G_row, total, mask=mask)
            G_row += HV * K
            if LEAST < MOST:
                high, low = tl.maximum(high, total), tl.minimum(low, total)
                middle = tl.where(block * BLOCK + i == count // 2, total, middle)
                if i == BLOCK // 2:
                    block_middle = total
        highest, lowest = tl.maximum(highest, high), tl.minimum(lowest, low)
        if LEAST + 1 < MOST:
            furthest = tl.max(tl.maximum(high - block_middle, block_middle - low), 0)
            kind = tl.where(furthest <= limit, NEAR, MOST)
            kinds = tl.where(blocks == block, kind, kinds)
    if LEAST < MOST:
        furthest = tl.max(tl.maximum(highest - middle, middle - lowest), 0)
        kinds = tl.where(furthest <= limit, LEAST, kinds)
    tl.store(block_kind + pid.to(tl.int64) * (SIZE // BLOCK) + blocks, kinds)


@triton.jit
def gate_backward(raw, dg, rate, bias, lower_bound, BOUNDED: tl.constexpr):
    """Returns the gradients of raw gates, and their contributions to the gradient of A_log (see `gate_of`)."""
    raw += bias
    if BOUNDED:
        x = rate * raw
        slope = dg * lower_bound * sigmoid(x) * sigmoid(-x)
        return slope * rate, slope * x
    return -rate * dg * sigmoid(raw), -rate * dg * softplus(raw)


@triton.jit(do_not_specialize=['T'])
def gates_backward(
    g,
    A_log,
    dt_bias,
    dG,
    block_kind,
    dG_chunk,
    dG_last_parts,
    dg,
    dA_log,
    ddt_bias,
    cu_seqlens,
    table,
    lower_bound,
    T,
    g_b,
    g_t,
    g_h,
    HV: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid (rows * HV,). Computes the gradient of the argument g in chunks that are not WHOLE. BK >= K.

    The log decay of a step gets the sum of dG of that step and of all later ones.

    Args:
        g: `[B, T, HV, K]` by strides, the last 1. A_log: `[HV]`, dt_bias: `[HV * K]`; read with HAS_A and HAS_BIAS.
        dG: of `blocks_backward`, float32 `[B, T, HV, K]`. block_kind: of `decays`.
        dG_chunk, dG_last_parts: of `products_with_states`, float32 `[rows, HV, K]`, and `blocks_backward`, float32
            `[rows, HV, SIZE / BLOCK, K]`; both are added to dG of the chunk's last step.
        dg: written, gradient of g, `[B, T, HV, K]`, contiguous.
        dA_log: written with HAS_A, each program's part and then zeros, float32 `[rows, HV, PARTS]`.
        ddt_bias: written with HAS_BIAS, each chunk's part, float32 `[rows, HV, K]`.
        WIDE: sums are float64.
    """
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(block_kind + pid.to(tl.int64) * (SIZE // BLOCK)) == WHOLE:
        return
    first = start + c * SIZE
    count = tl.minimum(end - first, SIZE)
    cols = tl.arange(0, BK)
    in_cols = cols < K
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    g_ptr = g + batch64 * g_b + first64 * g_t + hv.to(tl.int64) * g_h + cols
    token = ((batch64 * T + first64) * HV + hv) * K + cols
    at_chunk = row.to(tl.int64) * HV + hv
    rate, bias = parameters(A_log, dt_bias, hv, cols, in_cols, K, HAS_A, HAS_BIAS)
    BLOCKS: tl.constexpr = SIZE // BLOCK
    total = tl.load(dG_chunk + at_chunk * K + cols, mask=in_cols, other=0.0)
    if WIDE:
        total = total.to(tl.float64)
    for block in tl.static_range(BLOCKS):
        mask = in_cols & (cols * 0 + block * BLOCK < count)
        total += tl.load(dG_last_parts + (at_chunk * BLOCKS + block) * K + cols, mask=mask, other=0.0)
    dA_log_sum = tl.zeros([BK], tl.float32)
    ddt_bias_sum = tl.zeros([BK], tl.float32)
    for back in range(BLOCKS):
        begin = (BLOCKS - 1 - back) * BLOCK
        steps = ()
        raws = ()
        for i in tl.static_range(BLOCK):
            mask = in_cols & (cols * 0 + begin + i < count)
            steps = steps + (tl.load(dG + token + (begin + i).to(tl.int64) * HV * K, mask=mask, other=0.0),)
            if GATE:
                raws = raws + (tl.load(g_ptr + (begin + i).to(tl.int64) * g_t, mask=mask, other=0.0),)
        for i in tl.static_range(BLOCK):
            t = begin + BLOCK - 1 - i
            mask = in_cols & (cols * 0 + t < count)
            total += steps[BLOCK - 1 - i]
            gate = total.to(tl.float32)
            if GATE:
                raw = raws[BLOCK - 1 - i].to(tl.float32)
                gate, dA_log_tile = gate_backward(raw, gate, rate, bias, lower_bound, BOUNDED)
                dA_log_sum += tl.where(mask, dA_log_tile, 0.0)
                ddt_bias_sum += tl.where(mask, gate, 0.0)
            tl.store(dg + token + t.to(tl.int64) * HV * K, gate.to(dg.dtype.element_ty), mask=mask)
    if HAS_A:
        for part in tl.static_range(PARTS):
            tl.store(dA_log + at_chunk * PARTS + part, tl.sum(dA_log_sum, 0) if part == 0 else 0.0)
    if HAS_BIAS:
        tl.store(ddt_bias + at_chunk * K + cols, ddt_bias_sum, mask=in_cols)
