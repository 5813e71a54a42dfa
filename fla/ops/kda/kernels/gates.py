# mypy: disable-error-code="assignment, unreachable, misc, var-annotated"
# Tuples grow in the walks, which Python's types cannot follow.
"""Gates of chunked Kimi delta attention: their running sums, and the gradient of what they were given as.

Programs walk along the steps of a chunk with all channels of a head, a block at a time: a scan would take more instructions
than everything else. Kernels of their own, because such a walk has no place between products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import sigmoid, softplus

# Steps of a block, and its kinds: see forward.py.
BLOCK = tl.constexpr(16)
WHOLE, NEAR, FAR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def gate_of(g, rate, bias, lower_bound, GATE: tl.constexpr, BOUNDED: tl.constexpr):
    """The log decay of a step: g itself, or the gate of raw values. At least -1000, because -inf - -inf is NaN."""
    if GATE:
        g += bias
        g = lower_bound * sigmoid(rate * g) if BOUNDED else -rate * softplus(g)
    return tl.where(g < -1000.0, -1000.0, g)


@triton.jit
def parameters(A_log, dt_bias, hv, cols, in_cols, K: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr):
    """e^A_log of a head, and its bias of each channel."""
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
    kinds,
    cu_seqlens,
    table,
    lower_bound,
    near,
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
    """Grid (rows * HV,). Written: the running log decay G of each chunk, float32 or float64 `[B, T, HV, K]`, contiguous; and
    `kinds` of its blocks, int32 `[rows, HV, SIZE / BLOCK]`: WHOLE where in no channel of the chunk a step is further than
    `near` from its middle, NEAR where in none of the block one is from the middle of that, else FAR; between LEAST and MOST,
    of which the former is WHOLE or the latter."""
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
    found = tl.full([SIZE // BLOCK], MOST, tl.int32)
    # G stays what it is after the last step
    for block in range(SIZE // BLOCK):
        high = tl.full([BK], -float('inf'), G.dtype.element_ty)
        low = tl.full([BK], float('inf'), G.dtype.element_ty)
        its_middle = total
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
                    its_middle = total
        highest, lowest = tl.maximum(highest, high), tl.minimum(lowest, low)
        if LEAST + 1 < MOST:
            furthest = tl.max(tl.maximum(high - its_middle, its_middle - low), 0)
            kind = tl.where(furthest <= near, NEAR, MOST)
            found = tl.where(blocks == block, kind, found)
    if LEAST < MOST:
        furthest = tl.max(tl.maximum(highest - middle, middle - lowest), 0)
        found = tl.where(furthest <= near, LEAST, found)
    tl.store(kinds + pid.to(tl.int64) * (SIZE // BLOCK) + blocks, found)


@triton.jit
def gate_backward(raw, dg, rate, bias, lower_bound, BOUNDED: tl.constexpr):
    """Gradients of raw gates, and their contributions to that of A_log (see `gate_of`)."""
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
    kinds,
    kept,
    carried,
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
    """Grid (rows * HV,). Of chunks that are not WHOLE: g of a step gets what G of that step and of all later ones get.

    Args:
        dG: of `blocks_backward`. kinds: of `decays`.
        kept, carried: of `products_with_states` and `blocks_backward`, to be added to dG of the last step of the chunk.
        dg: written, of g as given, `[B, T, HV, K]`.
        dA_log: written with HAS_A, each program's part and then zeros, float32 `[rows, HV, PARTS]`.
        ddt_bias: written with HAS_BIAS, each chunk's part, float32 `[rows, HV, K]`.
        WIDE: sums are float64.
    """
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(kinds + pid.to(tl.int64) * (SIZE // BLOCK)) == WHOLE:
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
    total = tl.load(kept + at_chunk * K + cols, mask=in_cols, other=0.0)
    if WIDE:
        total = total.to(tl.float64)
    for block in tl.static_range(BLOCKS):
        mask = in_cols & (cols * 0 + block * BLOCK < count)
        total += tl.load(carried + (at_chunk * BLOCKS + block) * K + cols, mask=mask, other=0.0)
    for_rate = tl.zeros([BK], tl.float32)
    for_bias = tl.zeros([BK], tl.float32)
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
                gate, of_rate = gate_backward(raw, gate, rate, bias, lower_bound, BOUNDED)
                for_rate += tl.where(mask, of_rate, 0.0)
                for_bias += tl.where(mask, gate, 0.0)
            tl.store(dg + token + t.to(tl.int64) * HV * K, gate.to(dg.dtype.element_ty), mask=mask)
    if HAS_A:
        for part in tl.static_range(PARTS):
            tl.store(dA_log + at_chunk * PARTS + part, tl.sum(for_rate, 0) if part == 0 else 0.0)
    if HAS_BIAS:
        tl.store(ddt_bias + at_chunk * K + cols, for_bias, mask=in_cols)
