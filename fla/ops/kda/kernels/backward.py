"""Backward of chunked Kimi delta attention, the parts that are parallel over chunks.

Per chunk, with A = tril(k k, -1) the scores of k, L = diag(beta) A, M the scores of q, and T = (I + L)^-1 diag(beta):

    W = T (e^G K);   U' = T V - W S;   O = (scale e^G Q) S + M U';   S' = e^{G_C} S + (e^{G_C - G} K)^T U'

`states_backward` has computed the gradients of S' and of U'. `pairs_backward` computes the gradients of everything that has
two steps (M, T, L), and of v and beta. Then `channels_backward`, or blocks_backward.py for chunks that are not WHOLE,
computes those of q, k and the gate, in which channels are independent.

The log decay appears in gradients only in products with q and k: a term x e^{G_i - G_j} y adds itself to dG_i and subtracts
itself from dG_j. Terms of a step with itself are left out. Under strong decays they are the largest terms, and their
difference would be rounding error.

In the shapes below, rows is the number of rows of the chunk table (`fla.ops.launch.kernels.layout`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.kda.kernels.forward import relative_to_middle
from fla.ops.kda.kernels.gates import BLOCK, WHOLE, gate_backward, parameters
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import exp32, inverse_norm, load_beta


@triton.jit(do_not_specialize=['T'])
def pairs_backward(
    q,
    k,
    v,
    beta,
    G,
    lower,
    inverse,
    v_new,
    h,
    do,
    du,
    d_attend,
    d_diag_scores,
    d_lower,
    d_k_start,
    dv,
    dbeta,
    rq,
    rk,
    cu_seqlens,
    table,
    scale,
    T,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    b_b,
    b_t,
    b_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV,). Computes the gradients of scores, v and beta.

    Tensors are contiguous, and in k's dtype unless a dtype is given.

    Args:
        q, k: `[B, T, H, K]`, v: `[B, T, HV, V]`, by strides, the last 1. beta: `[B, T, HV]` by strides.
        G: running log decay, float32 or float64 `[B, T, HV, K]`.
        lower: A, float32 `[B, T, HV, SIZE]`. inverse: (I + L)^-1, `[B, T, HV, SIZE]`.
        v_new: U', `[B, T, HV, V]`. h: state before each chunk, `[rows, HV, K, V]`.
        do, du: gradients of o and U', `[B, T, HV, V]`.
        d_attend: written, scale * (dM + dM^T), valid outside the diagonal. float32 `[B, T, HV, SIZE]`, or in 16 bits
            `[B, T, HV, 2 * SIZE]`: the rounded numbers, then the rounded remainders. May be the memory of `lower`.
        d_diag_scores: written, the diagonal of scale * dM, float32 `[B, T, HV]`. May be the memory of `diag_scores`.
        d_lower: written, dA + dA^T, `[B, T, HV, SIZE]`. May be the memory of `inverse`.
        d_k_start: written, gradient of e^G k for normalised k, `[B, T, HV, K]`.
        dv: written, `[B, T, HV, V]`. May be the memory of du: a tile is overwritten after it was read for the last time.
        dbeta: written, gradient of the argument beta, `[B, T, HV]`.
        rq, rk: written with NORMALISE, 1 / norm of q and k, float32 `[B, T, HV]`.
    """
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    first = start + c * SIZE
    steps = tl.arange(0, SIZE)
    inside = first + steps < end
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    head = (hv // (HV // H)).to(tl.int64)
    hv64 = hv.to(tl.int64)
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    v_ptr = v + batch64 * v_b + first64 * v_t + hv64 * v_h
    token = (batch64 * T + first64) * HV + hv
    step_row = steps[:, None].to(tl.int64) * HV
    step_row1 = steps.to(tl.int64) * HV
    time = steps[:, None].to(tl.int64)
    h_ptr = h + (row.to(tl.int64) * HV + hv) * K * V
    square = token * SIZE + step_row * SIZE + steps[None, :]
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
        k_norm = inverse_norm(k_ptr, k_t, time, inside, K, BK)
        tl.store(rk + token + step_row1, k_norm, mask=inside)
        tl.store(rq + token + step_row1, inverse_norm(q_ptr, q_t, time, inside, K, BK), mask=inside)
    bt = load_beta(beta + batch64 * b_b + first64 * b_t + hv64 * b_h, b_t, steps, inside, SIGMOID, DOUBLE)
    X = tl.load(inverse + square, mask=inside[:, None], other=0.0)
    Xt = tl.trans(X)
    dT = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        minus_dW = tl.zeros([SIZE, BK], tl.float32)
        for j in range(0, V, BV):
            vc = j + tl.arange(0, BV)
            dU = tl.load(du + token * V + step_row * V + vc[None, :], mask=inside[:, None] & (vc[None, :] < V), other=0.0)
            S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=(cols[:, None] < K) & (vc[None, :] < V), other=0.0)
            minus_dW += tl.dot(dU, tl.trans(S), input_precision=PRECISION)
        dW = (-minus_dW).to(X.dtype)
        Gc = tl.load(G + token * K + step_row * K + cols[None, :], mask=mask, other=0.0)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        k_start = (keys * exp32(Gc) * k_norm[:, None]).to(X.dtype)
        dT += tl.dot(dW, tl.trans(k_start), input_precision=PRECISION)
        d_keys = bt[:, None] * tl.dot(Xt, dW, input_precision=PRECISION)
        tl.store(d_k_start + token * K + step_row * K + cols[None, :], d_keys.to(d_k_start.dtype.element_ty), mask=mask)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        mask = inside[:, None] & (vc[None, :] < V)
        at = token * V + step_row * V + vc[None, :]
        dU = tl.load(du + at, mask=mask, other=0.0)
        values = tl.load(v_ptr + time * v_t + vc[None, :], mask=mask, other=0.0)
        dT += tl.dot(dU, tl.trans(values), input_precision=PRECISION)
        d_values = bt[:, None] * tl.dot(Xt, dU, input_precision=PRECISION)
        tl.store(dv + at, d_values.to(dv.dtype.element_ty), mask=mask)
    # For the inverse X of I + L, dL = -X^T dX X^T below the diagonal. X is loaded again to free its registers before.
    X = tl.load(inverse + square, mask=inside[:, None], other=0.0)
    strict = steps[:, None] > steps[None, :]
    db = tl.sum(dT * X.to(tl.float32), 0)
    dX = tl.where(strict, dT * bt[None, :], 0.0).to(X.dtype)
    product = tl.dot(tl.trans(X), dX, input_precision=PRECISION)
    dL = -tl.dot(product.to(X.dtype), tl.trans(X), input_precision=PRECISION)
    dL = tl.where(strict, dL, 0.0)
    A = tl.load(lower + square, mask=inside[:, None], other=0.0)
    db += tl.sum(dL * A, 1)
    if SIGMOID:
        db *= bt * (1.0 - bt * 0.5) if DOUBLE else bt * (1.0 - bt)
    tl.store(dbeta + token + step_row1, db.to(dbeta.dtype.element_ty), mask=inside)
    dA = dL * bt[:, None]
    dA += tl.trans(dA)
    # Other threads have read `inverse` and `lower`.
    tl.debug_barrier()
    tl.store(d_lower + square, dA.to(d_lower.dtype.element_ty), mask=inside[:, None])
    dM = tl.zeros([SIZE, SIZE], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        mask = inside[:, None] & (vc[None, :] < V)
        at = token * V + step_row * V + vc[None, :]
        dO = tl.load(do + at, mask=mask, other=0.0)
        U = tl.load(v_new + at, mask=mask, other=0.0)
        dM += tl.dot(dO, tl.trans(U), input_precision=PRECISION)
    dM *= scale
    d_diagonal = tl.sum(tl.where(steps[:, None] == steps[None, :], dM, 0.0), 1)
    tl.store(d_diag_scores + token + step_row1, d_diagonal, mask=inside)
    dM = tl.where(steps[:, None] >= steps[None, :], dM, tl.trans(dM))
    high = dM.to(d_attend.dtype.element_ty)
    # Two 16-bit numbers, because one float32, rounded in the registers of a product in a loop, was NaN on a Hopper with
    # Triton 3.6.
    PARTS: tl.constexpr = 1 if d_attend.dtype.element_ty == tl.float32 else 2
    at = (token + step_row) * SIZE * PARTS + steps[None, :]
    tl.store(d_attend + at, high, mask=inside[:, None])
    if PARTS == 2:
        tl.store(d_attend + at + SIZE, (dM - high.to(tl.float32)).to(high.dtype), mask=inside[:, None])


@triton.jit
def dot_split(x, y, PRECISION: tl.constexpr):
    """Returns x y for a float32 y. For a 16-bit x it multiplies the rounded y and the remainder of its rounding."""
    high = y.to(x.dtype)
    product = tl.dot(x, high, input_precision=PRECISION)
    if x.dtype != tl.float32:
        product = tl.dot(x, (y - high.to(tl.float32)).to(x.dtype), product, input_precision=PRECISION)
    return product


@triton.jit
def middle_backward(
    unit_Q,
    unit_keys,
    G_rel,
    steps,
    inside,
    square,
    parts_at,
    d_attend,
    d_lower,
    PRECISION: tl.constexpr,
):
    """Returns the gradients of pairs of steps, given G_rel, G relative to a reference step: those of the later step's query
    and key, and of the earlier step's key."""
    # `exp32` was not faster here, and spilled more.
    later, earlier = tl.exp(G_rel), tl.exp(-G_rel)
    strict = (steps[:, None] > steps[None, :]) & inside[:, None]
    # The rounded numbers alone are exact enough here.
    dM = tl.load(d_attend + parts_at, mask=strict, other=0.0)
    dA = tl.load(d_lower + square, mask=strict, other=0.0)
    dk_earlier = dot_split(tl.trans(dM), unit_Q * later, PRECISION)
    dk_earlier += dot_split(tl.trans(dA), unit_keys * later, PRECISION)
    k_earlier = unit_keys * earlier
    dq_intra = dot_split(dM, k_earlier, PRECISION) * later
    dk_later = dot_split(dA, k_earlier, PRECISION) * later
    return dq_intra, dk_later, dk_earlier * earlier


@triton.jit
def state_dot(h_ptr, dh_ptr, cols, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Returns the sums of S dS over value columns, for some channels. In a loop of its own: see `inverse_norm`."""
    total = tl.zeros([cols.shape[0]], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        s_mask = (cols[:, None] < K) & (vc[None, :] < V)
        S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0).to(tl.float32)
        dS = tl.load(dh_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0).to(tl.float32)
        total += tl.sum(S * dS, 1)
    return total


@triton.jit
def inter_chunk_bwd(
    do_ptr,
    v_new_ptr,
    h_ptr,
    dh_ptr,
    d_k_start,
    unit_Q,
    unit_keys,
    Gc,
    G_last,
    steps,
    cols,
    mask,
    inside,
    count,
    scale,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns the terms of the gradients of q, k and G that pass the states before and after the chunk.

    Args:
        do_ptr, v_new_ptr, h_ptr, dh_ptr: gradient of o, U', state before and gradient of the state after the chunk; at the
            chunk's first step and head.
        d_k_start: tile of the gradient of e^G k. unit_Q, unit_keys, Gc: tiles of q, k and G. G_last: G of the last step.
    """
    step_row = steps[:, None].to(tl.int64) * HV
    d_q_start = tl.zeros([SIZE, BK], tl.float32)
    d_k_end = tl.zeros([SIZE, BK], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        v_mask = inside[:, None] & (vc[None, :] < V)
        s_mask = (cols[:, None] < K) & (vc[None, :] < V)
        dO = tl.load(do_ptr + step_row * V + vc[None, :], mask=v_mask, other=0.0)
        U = tl.load(v_new_ptr + step_row * V + vc[None, :], mask=v_mask, other=0.0)
        S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0)
        dS = tl.load(dh_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0)
        d_q_start += tl.dot(dO, tl.trans(S), input_precision=PRECISION)
        d_k_end += tl.dot(U, tl.trans(dS), input_precision=PRECISION)
    dG_chunk = state_dot(h_ptr, dh_ptr, cols, K, V, BV)
    from_start = exp32(Gc)
    d_query = d_q_start * from_start * scale
    d_key = d_k_start.to(tl.float32) * from_start
    dG = unit_Q * d_query + unit_keys * d_key
    dk_to_end = d_k_end * exp32(G_last[None, :] - Gc)
    # The keys that enter the next state have the factor e^{G_C - G}, which is 1 at the last step for any G.
    dG_to_end = tl.where((steps < count - 1)[:, None], unit_keys * dk_to_end, 0.0)
    dG_last = tl.sum(dG_to_end, 0) + dG_chunk * exp32(G_last)
    dG += tl.where((steps == count - 1)[:, None], dG_last[None, :], -dG_to_end)
    return d_query, d_key + dk_to_end, dG


@triton.jit(do_not_specialize=['T'])
def channels_backward(
    q,
    k,
    g,
    A_log,
    dt_bias,
    G,
    block_kind,
    v_new,
    h,
    dh,
    do,
    d_attend,
    d_diag_scores,
    d_lower,
    d_k_start,
    rq,
    rk,
    dq,
    dk,
    dg,
    dA_log,
    ddt_bias,
    cu_seqlens,
    table,
    scale,
    lower_bound,
    T,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    g_b,
    g_t,
    g_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV * ceil(K / BK),). Computes the gradients of q, k and the gate in chunks that are WHOLE.

    Args:
        q, k: `[B, T, H, K]`, g: `[B, T, HV, K]`, by strides, the last 1. A_log: `[HV]`, dt_bias: `[HV * K]`.
        G: running log decay, float32 or float64 `[B, T, HV, K]`, and block_kind: int32 `[rows, HV, SIZE / BLOCK]`; of
            `decays`.
        v_new: U', `[B, T, HV, V]` in k's dtype. do: gradient of o, `[B, T, HV, V]`, contiguous.
        h, dh: state before and gradient of the state after each chunk, `[rows, HV, K, V]` in k's dtype.
        d_attend, d_diag_scores, d_lower, d_k_start: of `pairs_backward`.
        rq, rk: 1 / norm of q and k, float32 `[B, T, HV]`, read with NORMALISE.
        dq, dk: written, gradients of q and k for each value head, with NORMALISE of the normalised rows, `[B, T, HV, K]`.
        dg: written, gradient of the argument g, `[B, T, HV, K]`. May be the memory of `G`.
        dA_log: written with HAS_A, each program's part, float32 `[rows, HV, ceil(K / BK)]`.
        ddt_bias: written with HAS_BIAS, each chunk's part, float32 `[rows, HV, K]`.
    """
    kb, pid = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(block_kind + pid.to(tl.int64) * (SIZE // BLOCK)) != WHOLE:
        return
    first = start + c * SIZE
    count = tl.minimum(end - first, SIZE)
    steps = tl.arange(0, SIZE)
    inside = steps < count
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    head = (hv // (HV // H)).to(tl.int64)
    hv64 = hv.to(tl.int64)
    token = (batch64 * T + first64) * HV + hv
    step_row = steps[:, None].to(tl.int64) * HV
    step_row1 = steps.to(tl.int64) * HV
    time = steps[:, None].to(tl.int64)
    cols = kb * BK + tl.arange(0, BK)
    mask = inside[:, None] & (cols[None, :] < K)
    at = token * K + step_row * K + cols[None, :]
    state_at = (row.to(tl.int64) * HV + hv) * K * V
    Q = tl.load(q + batch64 * q_b + first64 * q_t + head * q_h + time * q_t + cols[None, :], mask=mask, other=0.0)
    keys = tl.load(k + batch64 * k_b + first64 * k_t + head * k_h + time * k_t + cols[None, :], mask=mask, other=0.0)
    q_norm = tl.full([SIZE], 1.0, tl.float32)
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        q_norm = tl.load(rq + token + step_row1, mask=inside, other=0.0)
        k_norm = tl.load(rk + token + step_row1, mask=inside, other=0.0)
    unit_Q, unit_keys = Q.to(tl.float32) * q_norm[:, None], keys.to(tl.float32) * k_norm[:, None]
    Gc = tl.load(G + at, mask=mask, other=0.0)
    G_last = tl.load(G + token * K + (count - 1).to(tl.int64) * HV * K + cols, mask=cols < K, other=0.0)
    # Gradient of the score of each step with itself.
    d_diagonal = tl.load(d_diag_scores + token + step_row1, mask=inside, other=0.0)[:, None]
    square = (token + step_row) * SIZE + steps[None, :]
    PARTS: tl.constexpr = 1 if d_attend.dtype.element_ty == tl.float32 else 2
    parts_at = (token + step_row) * SIZE * PARTS + steps[None, :]
    G_rel = relative_to_middle(Gc, G + token * K, cols, cols < K, mask, count, HV, K)
    dq_intra, dk_later, dk_earlier = middle_backward(
        unit_Q, unit_keys, G_rel, steps, inside, square, parts_at, d_attend, d_lower, PRECISION
    )
    dG = unit_Q * dq_intra + unit_keys * (dk_later - dk_earlier)
    d_query = d_diagonal * unit_keys + dq_intra
    d_key = d_diagonal * unit_Q + dk_later + dk_earlier
    dq_inter, dk_inter, dG_inter = inter_chunk_bwd(
        do + token * V,
        v_new + token * V,
        h + state_at,
        dh + state_at,
        tl.load(d_k_start + at, mask=mask, other=0.0),
        unit_Q,
        unit_keys,
        Gc,
        G_last,
        steps,
        cols,
        mask,
        inside,
        count,
        scale,
        HV,
        K,
        V,
        SIZE,
        BK,
        BV,
        PRECISION,
    )
    d_query += dq_inter
    d_key += dk_inter
    dG += dG_inter
    d_gate = tl.cumsum(tl.where(mask, dG, 0.0), 0, reverse=True)
    if GATE:
        raw = tl.load(g + batch64 * g_b + first64 * g_t + hv64 * g_h + time * g_t + cols[None, :], mask=mask, other=0.0)
        rate, bias = parameters(A_log, dt_bias, hv, cols, cols < K, K, HAS_A, HAS_BIAS)
        d_gate, dA_log_tile = gate_backward(raw.to(tl.float32), d_gate, rate, bias[None, :], lower_bound, BOUNDED)
        if HAS_A:
            dA_log_part = tl.sum(tl.sum(tl.where(mask, dA_log_tile, 0.0), 1), 0)
            tl.store(dA_log + (row.to(tl.int64) * HV + hv) * tl.cdiv(K, BK) + kb, dA_log_part)
        if HAS_BIAS:
            ddt_bias_part = tl.sum(tl.where(mask, d_gate, 0.0), 0)
            tl.store(ddt_bias + (row.to(tl.int64) * HV + hv) * K + cols, ddt_bias_part, mask=cols < K)
    tl.store(dq + at, d_query.to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + at, d_key.to(dk.dtype.element_ty), mask=mask)
    # Other threads have read G of the last and the middle step.
    tl.debug_barrier()
    tl.store(dg + at, d_gate.to(dg.dtype.element_ty), mask=mask)
