"""Backward of chunked Kimi delta attention: what is parallel over chunks.

In a chunk, T = (I + L)^-1 diag(beta), W = T (e^G K), U' = T V - W S, O = (scale e^G Q) S + M U' and
S' = e^{G_C} S + (e^{G_C - G} K)^T U'. `states_backward` has given the gradients of S' and of U'. `pairs_backward`
gives those of everything that has two steps (M, T, L) and of v and beta; then `channels_backward`, or for chunks that are
not WHOLE what is in blocks.py, gives those of q, k and the gate, in which channels are independent.

The log decay appears in no gradient but through products with q and k: a term x e^{G_i - G_j} y gives itself to dG_i and
minus itself to dG_j. Terms of one step with itself are left out: under strong decays they are the largest, and what
remained of their difference would be rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.kda.kernels.forward import from_middle
from fla.ops.kda.kernels.gates import BLOCK, WHOLE, gate_backward, parameters
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import beta_of, exp32, inverse_norm


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
    d_selves,
    d_lower,
    d_grown,
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
    """Grid (rows * HV,). Everything written is `[B, T, HV, ·]` and contiguous.

    Args:
        lower (float32), inverse (SIZE), v_new (V), h: of the forward. do, du: gradients of o and v_new, contiguous (V).
        d_attend: written, scale * (dM + dM^T), of use outside of its diagonal (SIZE); of 16 bits, what these hold of it and
            then what they hold of the rest (2 * SIZE). May be the memory of `lower`.
        d_selves: written, the diagonal of scale * dM, float32. May be `selves`.
        d_lower: written, dA + dA^T for A = `lower` (SIZE). May be `inverse`.
        d_grown: written, the gradient of e^G k, k normalised (K).
        dv: written (V). May be `du`: each tile of that has been read for the last time when it is overwritten.
        dbeta: written, of beta as given. rq, rk: written with NORMALISE, 1 / norm of q and k, float32.
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
    own = steps[:, None].to(tl.int64) * HV
    own1 = steps.to(tl.int64) * HV
    time = steps[:, None].to(tl.int64)
    h_ptr = h + (row.to(tl.int64) * HV + hv) * K * V
    square = token * SIZE + own * SIZE + steps[None, :]
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
        k_norm = inverse_norm(k_ptr, k_t, time, inside, K, BK)
        tl.store(rk + token + own1, k_norm, mask=inside)
        tl.store(rq + token + own1, inverse_norm(q_ptr, q_t, time, inside, K, BK), mask=inside)
    bt = tl.load(beta + batch64 * b_b + first64 * b_t + hv64 * b_h + steps.to(tl.int64) * b_t, mask=inside, other=0.0)
    bt = tl.where(inside, beta_of(bt.to(tl.float32), SIGMOID, DOUBLE), 0.0)
    X = tl.load(inverse + square, mask=inside[:, None], other=0.0)
    Xt = tl.trans(X)
    dT = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        minus_dW = tl.zeros([SIZE, BK], tl.float32)
        for j in range(0, V, BV):
            vc = j + tl.arange(0, BV)
            dU = tl.load(du + token * V + own * V + vc[None, :], mask=inside[:, None] & (vc[None, :] < V), other=0.0)
            S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=(cols[:, None] < K) & (vc[None, :] < V), other=0.0)
            minus_dW += tl.dot(dU, tl.trans(S), input_precision=PRECISION)
        dW = (-minus_dW).to(X.dtype)
        Gc = tl.load(G + token * K + own * K + cols[None, :], mask=mask, other=0.0)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        grown = (keys * exp32(Gc) * k_norm[:, None]).to(X.dtype)
        dT += tl.dot(dW, tl.trans(grown), input_precision=PRECISION)
        d_keys = bt[:, None] * tl.dot(Xt, dW, input_precision=PRECISION)
        tl.store(d_grown + token * K + own * K + cols[None, :], d_keys.to(d_grown.dtype.element_ty), mask=mask)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        mask = inside[:, None] & (vc[None, :] < V)
        at = token * V + own * V + vc[None, :]
        dU = tl.load(du + at, mask=mask, other=0.0)
        values = tl.load(v_ptr + time * v_t + vc[None, :], mask=mask, other=0.0)
        dT += tl.dot(dU, tl.trans(values), input_precision=PRECISION)
        d_values = bt[:, None] * tl.dot(Xt, dU, input_precision=PRECISION)
        tl.store(dv + at, d_values.to(dv.dtype.element_ty), mask=mask)
    # L = diag(beta) A; of the inverse X, dL = -X^T dX X^T below the diagonal. X again, not to hold registers all along
    X = tl.load(inverse + square, mask=inside[:, None], other=0.0)
    strict = steps[:, None] > steps[None, :]
    db = tl.sum(dT * X.to(tl.float32), 0)
    dX = tl.where(strict, dT * bt[None, :], 0.0).to(X.dtype)
    half_way = tl.dot(tl.trans(X), dX, input_precision=PRECISION)
    dL = -tl.dot(half_way.to(X.dtype), tl.trans(X), input_precision=PRECISION)
    dL = tl.where(strict, dL, 0.0)
    A = tl.load(lower + square, mask=inside[:, None], other=0.0)
    db += tl.sum(dL * A, 1)
    if SIGMOID:
        db *= bt * (1.0 - bt * 0.5) if DOUBLE else bt * (1.0 - bt)
    tl.store(dbeta + token + own1, db.to(dbeta.dtype.element_ty), mask=inside)
    dA = dL * bt[:, None]
    dA += tl.trans(dA)
    # `inverse` and `lower` were read by other threads
    tl.debug_barrier()
    tl.store(d_lower + square, dA.to(d_lower.dtype.element_ty), mask=inside[:, None])
    dM = tl.zeros([SIZE, SIZE], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        mask = inside[:, None] & (vc[None, :] < V)
        at = token * V + own * V + vc[None, :]
        dO = tl.load(do + at, mask=mask, other=0.0)
        U = tl.load(v_new + at, mask=mask, other=0.0)
        dM += tl.dot(dO, tl.trans(U), input_precision=PRECISION)
    dM *= scale
    itself = tl.sum(tl.where(steps[:, None] == steps[None, :], dM, 0.0), 1)
    tl.store(d_selves + token + own1, itself, mask=inside)
    dM = tl.where(steps[:, None] >= steps[None, :], dM, tl.trans(dM))
    high = dM.to(d_attend.dtype.element_ty)
    # not one float32: rounded in the registers of a product in a loop, it came out as NaN on a Hopper with Triton 3.6
    PARTS: tl.constexpr = 1 if d_attend.dtype.element_ty == tl.float32 else 2
    at = (token + own) * SIZE * PARTS + steps[None, :]
    tl.store(d_attend + at, high, mask=inside[:, None])
    if PARTS == 2:
        tl.store(d_attend + at + SIZE, (dM - high.to(tl.float32)).to(high.dtype), mask=inside[:, None])


@triton.jit
def dot_of_parts(x, y, PRECISION: tl.constexpr):
    """x y for a float32 y, of which rounding to x's 16 bits would leave too little: what is left is multiplied as well."""
    high = y.to(x.dtype)
    product = tl.dot(x, high, input_precision=PRECISION)
    if x.dtype != tl.float32:
        product = tl.dot(x, (y - high.to(tl.float32)).to(x.dtype), product, input_precision=PRECISION)
    return product


@triton.jit
def middle_backward(
    unit_Q,
    unit_keys,
    away,
    steps,
    inside,
    square,
    in_parts,
    d_attend,
    d_lower,
    PRECISION: tl.constexpr,
):
    """Gradients by pairs of steps, through the step that they are `away` from: of the later of the two, a query or a key,
    and of the sooner, a key."""
    # `exp32` was no quicker here, and made it spill more
    later, sooner = tl.exp(away), tl.exp(-away)
    before = (steps[:, None] > steps[None, :]) & inside[:, None]
    # of these the first part will do
    dM = tl.load(d_attend + in_parts, mask=before, other=0.0)
    dA = tl.load(d_lower + square, mask=before, other=0.0)
    dy = dot_of_parts(tl.trans(dM), unit_Q * later, PRECISION)
    dy += dot_of_parts(tl.trans(dA), unit_keys * later, PRECISION)
    y = unit_keys * sooner
    dx_q = dot_of_parts(dM, y, PRECISION) * later
    dx_k = dot_of_parts(dA, y, PRECISION) * later
    return dx_q, dx_k, dy * sooner


@triton.jit
def through_states(
    do_ptr,
    v_new_ptr,
    h_ptr,
    dh_ptr,
    d_grown,
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
    """What reaches q, k and G through the states before and after the chunk. d_grown: a tile, the others: pointers."""
    own = steps[:, None].to(tl.int64) * HV
    d_queries = tl.zeros([SIZE, BK], tl.float32)
    d_left = tl.zeros([SIZE, BK], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        v_mask = inside[:, None] & (vc[None, :] < V)
        s_mask = (cols[:, None] < K) & (vc[None, :] < V)
        dO = tl.load(do_ptr + own * V + vc[None, :], mask=v_mask, other=0.0)
        U = tl.load(v_new_ptr + own * V + vc[None, :], mask=v_mask, other=0.0)
        S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0)
        dS = tl.load(dh_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0)
        d_queries += tl.dot(dO, tl.trans(S), input_precision=PRECISION)
        d_left += tl.dot(U, tl.trans(dS), input_precision=PRECISION)
    # a loop of its own: see `inverse_norm`
    kept = tl.zeros([BK], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        s_mask = (cols[:, None] < K) & (vc[None, :] < V)
        S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0).to(tl.float32)
        dS = tl.load(dh_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0).to(tl.float32)
        kept += tl.sum(S * dS, 1)
    grown = exp32(Gc)
    d_query = d_queries * grown * scale
    d_key = d_grown.to(tl.float32) * grown
    dG = unit_Q * d_query + unit_keys * d_key
    left = d_left * exp32(G_last[None, :] - Gc)
    # the keys that the next state takes carry e^{G_C - G}, of the last step 1 whatever G is
    carried = tl.where((steps < count - 1)[:, None], unit_keys * left, 0.0)
    at_last = tl.sum(carried, 0) + kept * exp32(G_last)
    dG += tl.where((steps == count - 1)[:, None], at_last[None, :], -carried)
    return d_query, d_key + left, dG


@triton.jit(do_not_specialize=['T'])
def channels_backward(
    q,
    k,
    g,
    A_log,
    dt_bias,
    G,
    kinds,
    v_new,
    h,
    dh,
    do,
    d_attend,
    d_selves,
    d_lower,
    d_grown,
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
    """Grid (rows * HV * ceil(K / BK),). Of chunks that are WHOLE.

    Args:
        kinds: of `decays`.
        do: contiguous. dh: `[rows, HV, K, V]`, gradient of the state after each chunk.
        d_attend, d_selves, d_lower, d_grown: of `pairs_backward`.
        dq, dk: written, of q and k per value head and, with NORMALISE, as normalised, `[B, T, HV, K]`.
        dg: written, of g as given `[B, T, HV, K]`. May be the memory of `G`.
        dA_log: written with HAS_A, each program's part, float32 `[rows, HV, ceil(K / BK)]`.
        ddt_bias: written with HAS_BIAS, each chunk's part, float32 `[rows, HV, K]`.
    """
    kb, pid = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(kinds + pid.to(tl.int64) * (SIZE // BLOCK)) != WHOLE:
        return
    first = start + c * SIZE
    count = tl.minimum(end - first, SIZE)
    steps = tl.arange(0, SIZE)
    inside = steps < count
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    head = (hv // (HV // H)).to(tl.int64)
    hv64 = hv.to(tl.int64)
    token = (batch64 * T + first64) * HV + hv
    own = steps[:, None].to(tl.int64) * HV
    own1 = steps.to(tl.int64) * HV
    time = steps[:, None].to(tl.int64)
    cols = kb * BK + tl.arange(0, BK)
    mask = inside[:, None] & (cols[None, :] < K)
    at = token * K + own * K + cols[None, :]
    state_at = (row.to(tl.int64) * HV + hv) * K * V
    Q = tl.load(q + batch64 * q_b + first64 * q_t + head * q_h + time * q_t + cols[None, :], mask=mask, other=0.0)
    keys = tl.load(k + batch64 * k_b + first64 * k_t + head * k_h + time * k_t + cols[None, :], mask=mask, other=0.0)
    q_norm = tl.full([SIZE], 1.0, tl.float32)
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        q_norm = tl.load(rq + token + own1, mask=inside, other=0.0)
        k_norm = tl.load(rk + token + own1, mask=inside, other=0.0)
    unit_Q, unit_keys = Q.to(tl.float32) * q_norm[:, None], keys.to(tl.float32) * k_norm[:, None]
    Gc = tl.load(G + at, mask=mask, other=0.0)
    G_last = tl.load(G + token * K + (count - 1).to(tl.int64) * HV * K + cols, mask=cols < K, other=0.0)
    # a step with itself
    diagonal = tl.load(d_selves + token + own1, mask=inside, other=0.0)[:, None]
    square = (token + own) * SIZE + steps[None, :]
    PARTS: tl.constexpr = 1 if d_attend.dtype.element_ty == tl.float32 else 2
    in_parts = (token + own) * SIZE * PARTS + steps[None, :]
    away = from_middle(Gc, G + token * K, cols, cols < K, mask, count, HV, K)
    dx_q, dx_k, dy = middle_backward(unit_Q, unit_keys, away, steps, inside, square, in_parts, d_attend, d_lower, PRECISION)
    dG = unit_Q * dx_q + unit_keys * (dx_k - dy)
    d_query = diagonal * unit_keys + dx_q
    d_key = diagonal * unit_Q + dx_k + dy
    to_query, to_key, to_G = through_states(
        do + token * V,
        v_new + token * V,
        h + state_at,
        dh + state_at,
        tl.load(d_grown + at, mask=mask, other=0.0),
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
    d_query += to_query
    d_key += to_key
    dG += to_G
    d_gate = tl.cumsum(tl.where(mask, dG, 0.0), 0, reverse=True)
    if GATE:
        raw = tl.load(g + batch64 * g_b + first64 * g_t + hv64 * g_h + time * g_t + cols[None, :], mask=mask, other=0.0)
        rate, bias = parameters(A_log, dt_bias, hv, cols, cols < K, K, HAS_A, HAS_BIAS)
        d_gate, for_rate = gate_backward(raw.to(tl.float32), d_gate, rate, bias[None, :], lower_bound, BOUNDED)
        if HAS_A:
            part = tl.sum(tl.sum(tl.where(mask, for_rate, 0.0), 1), 0)
            tl.store(dA_log + (row.to(tl.int64) * HV + hv) * tl.cdiv(K, BK) + kb, part)
        if HAS_BIAS:
            part_bias = tl.sum(tl.where(mask, d_gate, 0.0), 0)
            tl.store(ddt_bias + (row.to(tl.int64) * HV + hv) * K + cols, part_bias, mask=cols < K)
    tl.store(dq + at, d_query.to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + at, d_key.to(dk.dtype.element_ty), mask=mask)
    # the last step and the middle of G were read by other threads
    tl.debug_barrier()
    tl.store(dg + at, d_gate.to(dg.dtype.element_ty), mask=mask)


@triton.jit
def sum_heads(
    x,
    dy,
    dx,
    row,
    in_rows,
    T,
    x_b,
    x_t,
    x_h,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """dx of x `[B, T, H, K]` by strides, from dy `[B, T, H * GROUPS, K]`."""
    cols = tl.arange(0, BK)
    mask = in_rows[:, None] & (cols[None, :] < K)
    total = tl.zeros([row.shape[0], BK], tl.float32)
    for group in range(GROUPS):
        at = (row[:, None] * GROUPS + group) * K + cols[None, :]
        total += tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if NORMALISE:
        head, step = row % H, row // H
        x_at = (step // T) * x_b + (step % T) * x_t + head * x_h
        values = tl.load(x + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        norm = tl.rsqrt(tl.sum(values * values, 1) + 1e-6)[:, None]
        values *= norm
        total = norm * (total - values * tl.sum(values * total, 1)[:, None])
    tl.store(dx + row[:, None] * K + cols[None, :], total.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=['T', 'count'])
def heads_backward(
    q,
    k,
    dq_heads,
    dk_heads,
    dq,
    dk,
    count,
    T,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Grid (ceil(count / ROWS), 2) for count = B * T * H: the gradients of q and of k, summed over the value heads that
    share them and taken through the normalisation. Without groups the results may be the memory of the parts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < count
    if tl.program_id(1) == 0:
        sum_heads(q, dq_heads, dq, row, in_rows, T, q_b, q_t, q_h, H, GROUPS, K, BK, NORMALISE)
    else:
        sum_heads(k, dk_heads, dk, row, in_rows, T, k_b, k_t, k_h, H, GROUPS, K, BK, NORMALISE)
