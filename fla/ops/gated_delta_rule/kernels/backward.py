"""Backward of the chunked gated delta rule.

Per chunk, with I + X = (I + L)^-1, and D the gradient of the system's right-hand side beta (V - e^G K S):

    U' = (I + X) beta (V - e^G K S);   O = scale e^G Q S + M U';   S' = e^{G_C} S + (e^{G_C - G} K)^T U'

    D  = (I + X)^T dU';   dV = beta D;   dL = -tril(D U'^T, -1);   dM = tril(dO U'^T)
    dbeta_i = <D_i, (V - e^G K S)_i> + sum_j dL_ij L_ij / beta_i

`scores` repeats M of the forward, beta32 and norms; `states_forward` gives the states and U', `states_backward` their
gradients and D; `within` does what stays within a chunk, dV among it, `through` what goes through the states;
`finish_gates` and `finish_heads` sum over steps, channels and groups of heads. Nothing is added atomically.

Norms: where q and k are normalised, products are of raw rows and 1 / norm stands among the factors. A gradient that is left
by `through` is that of q or k with the norm held constant, and `finish_heads` takes out what lies along the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.gated_delta_rule.kernels.forward import load_beta, store_scores
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import exp32, inverse_norm, sigmoid, softplus


@triton.jit(do_not_specialize=['T'])
def scores(
    q,
    k,
    beta,
    G,
    beta32,
    rq,
    rk,
    attend,
    selves,
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
    b_b,
    b_t,
    b_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV,). Written, again: `beta32` and, NORMALISE, rq and rk, as by `prepare`, and what `store_scores`
    writes."""
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
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    token = (batch64 * T + first64) * HV + hv
    time = steps[:, None].to(tl.int64)
    one = token + steps * HV
    Gc = tl.load(G + one, mask=inside, other=0.0)
    bt = load_beta(beta, batch64 * b_b + first64 * b_t + hv.to(tl.int64) * b_h, b_t, steps, inside, SIGMOID, DOUBLE)
    tl.store(beta32 + one, bt, mask=inside)
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    q_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        k_norm = inverse_norm(k_ptr, k_t, time, inside, K, BK)
        q_norm = inverse_norm(q_ptr, q_t, time, inside, K, BK)
        tl.store(rk + one, k_norm, mask=inside)
        tl.store(rq + one, q_norm, mask=inside)
    product = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0)
        product += tl.dot(Q, tl.trans(keys), input_precision=PRECISION)
    store_scores(product, q_norm * scale, k_norm, Gc, steps, inside, attend, selves, token, HV, SIZE)


@triton.jit(do_not_specialize=['T'])
def within(
    q,
    k,
    v,
    beta,
    do,
    G,
    rq,
    rk,
    v_new,
    D,
    dv,
    from_q,
    from_k,
    d_G,
    d_beta,
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
    """Grid (rows * HV,).

    Args:
        v_new, D, dv: `[B, T, HV, V]`, contiguous; dv, the gradient of v, is written.
        from_q, from_k: `[B, T, HV, SIZE]` in k's dtype, written: the gradients of the plain products q k^T and k k^T, the
            second plus its transpose.
        d_G, d_beta: float32 `[·, B, T, HV]`, of which the first `[B, T, HV]` are written: shares in the gradients of the
            running log decay and of beta.
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
    head, hv64 = (hv // (HV // H)).to(tl.int64), hv.to(tl.int64)
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    v_ptr = v + batch64 * v_b + first64 * v_t + hv64 * v_h
    token = (batch64 * T + first64) * HV + hv
    own = steps[:, None] * HV
    time = steps[:, None].to(tl.int64)
    one = token + steps * HV
    square = token * SIZE + (own * SIZE + steps[None, :])
    Gc = tl.load(G + one, mask=inside, other=0.0)
    strict = (steps[:, None] > steps[None, :]) & inside[:, None]
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    q_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        k_norm = tl.load(rk + one, mask=inside, other=0.0)
        q_norm = tl.load(rq + one, mask=inside, other=0.0)
    bt = load_beta(beta, batch64 * b_b + first64 * b_t + hv64 * b_h, b_t, steps, inside, SIGMOID, DOUBLE)
    # of the scores of q, and of the system
    to_M = tl.zeros([SIZE, SIZE], tl.float32)
    to_L = tl.zeros([SIZE, SIZE], tl.float32)
    along = tl.zeros([SIZE, BV], tl.float32)
    for i in range(0, V, BV):
        cols = i + tl.arange(0, BV)
        mask = inside[:, None] & (cols[None, :] < V)
        at = token * V + (own * V + cols[None, :])
        update = tl.load(v_new + at, mask=mask, other=0.0)
        dO = tl.load(do + at, mask=mask, other=0.0)
        dE = tl.load(D + at, mask=mask, other=0.0)
        values = tl.load(v_ptr + time * v_t + cols[None, :], mask=mask, other=0.0)
        tl.store(dv + at, (dE.to(tl.float32) * bt[:, None]).to(dv.dtype.element_ty), mask=mask)
        # a sum over rows in each step would wait for all threads of a row
        along += dE.to(tl.float32) * values.to(tl.float32)
        to_M += tl.dot(dO, tl.trans(update), input_precision=PRECISION)
        to_L += tl.dot(dE, tl.trans(update), input_precision=PRECISION)
    to_beta = tl.sum(along, 1)
    qk = tl.zeros([SIZE, SIZE], tl.float32)
    kk = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0)
        Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0)
        qk += tl.dot(Q, tl.trans(keys), input_precision=PRECISION)
        kk += tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    decay = tl.where(strict, exp32(tl.where(strict, Gc[:, None] - Gc[None, :], 0.0)), 0.0)
    to_M *= tl.where(steps[:, None] == steps[None, :], 1.0, decay) * (q_norm * scale)[:, None] * k_norm[None, :]
    tl.store(from_q + square, to_M.to(from_q.dtype.element_ty), mask=inside[:, None])
    to_L *= -decay * k_norm[:, None] * k_norm[None, :]
    flow = kk * to_L
    to_beta += tl.sum(flow, 1)
    tl.store(d_beta + one, to_beta, mask=inside)
    to_L *= bt[:, None]
    tl.store(from_k + square, (to_L + tl.trans(to_L)).to(from_k.dtype.element_ty), mask=inside[:, None])
    # what decays from j to i counts for G_i and against G_j; on the diagonal nothing decays
    flow = flow * bt[:, None] + tl.where(strict, qk * to_M, 0.0)
    tl.store(d_G + one, tl.sum(flow, 1) - tl.sum(flow, 0), mask=inside)


@triton.jit(do_not_specialize=['T', 'tokens'])
def through(
    q,
    k,
    beta,
    do,
    G,
    rq,
    rk,
    v_new,
    D,
    h,
    dh,
    from_q,
    from_k,
    dq,
    dk,
    d_G,
    d_beta,
    cu_seqlens,
    table,
    scale,
    T,
    tokens,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
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
    """Grid (ceil(K / BK) * rows * HV,): one dimension, since a second one ends at 65535.

    Args:
        h, dh: `[rows, HV, K, V]`: the state before and the gradient of the state after each chunk.
        D, from_q, from_k: of `states_backward` and `within`.
        dq, dk: `[B, T, HV, K]`, written.
        d_G, d_beta: float32 `[1 + ceil(K / BK), B, T, HV]`: block i of channels writes share 1 + i.
        tokens: B * T.
    """
    kb, pid = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    first = start + c * SIZE
    steps = tl.arange(0, SIZE)
    inside = first + steps < end
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    head, hv64 = (hv // (HV // H)).to(tl.int64), hv.to(tl.int64)
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    token = (batch64 * T + first64) * HV + hv
    own = steps[:, None] * HV
    time = steps[:, None].to(tl.int64)
    one = token + steps * HV
    square = token * SIZE + (own * SIZE + steps[None, :])
    channels = kb * BK + tl.arange(0, BK)
    in_k = channels < K
    state = (row.to(tl.int64) * HV + hv) * K * V + channels[:, None] * V
    last = tl.minimum(end - first, SIZE) - 1
    G_last = tl.load(G + token + last.to(tl.int64) * HV)
    Gc = tl.load(G + one, mask=inside, other=0.0)
    grown = exp32(Gc)
    left = exp32(tl.where(inside, G_last - Gc, 0.0))
    q_factor = grown * scale
    if NORMALISE:
        k_norm = tl.load(rk + one, mask=inside, other=0.0)
        q_factor *= tl.load(rq + one, mask=inside, other=0.0)
        grown *= k_norm
        left *= k_norm
    # from the state before the chunk, and into the one after it
    to_q = tl.zeros([SIZE, BK], tl.float32)
    to_k = tl.zeros([SIZE, BK], tl.float32)
    to_left = tl.zeros([SIZE, BK], tl.float32)
    kept = tl.zeros([BK, BK], tl.float32)
    for i in range(0, V, BV):
        cols = i + tl.arange(0, BV)
        mask = inside[:, None] & (cols[None, :] < V)
        state_mask = in_k[:, None] & (cols[None, :] < V)
        at = token * V + (own * V + cols[None, :])
        S = tl.load(h + state + cols[None, :], mask=state_mask, other=0.0)
        dS = tl.load(dh + state + cols[None, :], mask=state_mask, other=0.0)
        dO = tl.load(do + at, mask=mask, other=0.0)
        dE = tl.load(D + at, mask=mask, other=0.0)
        update = tl.load(v_new + at, mask=mask, other=0.0)
        to_q += tl.dot(dO, tl.trans(S), input_precision=PRECISION)
        to_k += tl.dot(dE, tl.trans(S), input_precision=PRECISION)
        to_left += tl.dot(update, tl.trans(dS), input_precision=PRECISION)
        # of which the trace is wanted: tiles that are read by products alone may be loaded ahead (docs/kernels.md)
        kept += tl.dot(S, tl.trans(dS), input_precision=PRECISION)
    of_block = tl.arange(0, BK)
    kept = tl.where(of_block[:, None] == of_block[None, :], kept, 0.0)
    at_end = exp32(G_last) * tl.sum(tl.sum(kept, 1), 0)
    mask = inside[:, None] & in_k[None, :]
    Q = tl.load(q_ptr + time * q_t + channels[None, :], mask=mask, other=0.0)
    keys = tl.load(k_ptr + time * k_t + channels[None, :], mask=mask, other=0.0)
    P = tl.load(from_q + square, mask=inside[:, None], other=0.0)
    to_q *= q_factor[:, None]
    flow = tl.sum(Q.to(tl.float32) * to_q, 1)
    to_q += tl.dot(P, keys, input_precision=PRECISION)
    at = token * K + (own * K + channels[None, :])
    tl.store(dq + at, to_q.to(dq.dtype.element_ty), mask=mask)
    bt = load_beta(beta, batch64 * b_b + first64 * b_t + hv64 * b_h, b_t, steps, inside, SIGMOID, DOUBLE)
    to_k *= -grown[:, None]
    to_beta = tl.sum(keys.to(tl.float32) * to_k, 1)
    share = (1 + kb).to(tl.int64) * tokens * HV
    tl.store(d_beta + share + one, to_beta, mask=inside)
    flow += bt * to_beta
    to_k *= bt[:, None]
    to_left *= left[:, None]
    left_along = tl.sum(keys.to(tl.float32) * to_left, 1)
    at_end += tl.sum(left_along, 0)
    flow += tl.where(steps == last, at_end, 0.0) - left_along
    tl.store(d_G + share + one, flow, mask=inside)
    to_k += to_left
    to_k += tl.dot(tl.trans(P), Q, input_precision=PRECISION)
    R = tl.load(from_k + square, mask=inside[:, None], other=0.0)
    to_k += tl.dot(R, keys, input_precision=PRECISION)
    tl.store(dk + at, to_k.to(dk.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=['T', 'tokens'])
def finish_gates(
    g,
    beta,
    A_log,
    dt_bias,
    d_G,
    d_beta,
    dg,
    db,
    dA,
    cu_seqlens,
    table,
    T,
    tokens,
    g_b,
    g_t,
    g_h,
    b_b,
    b_t,
    b_h,
    SHARES: tl.constexpr,
    HV: tl.constexpr,
    SIZE: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid (rows * HV,): the gradients of g and beta as given, from SHARES shares in those of G and beta.

    With GATE, `dg` is that of the raw gate, of which dt_bias's is the sum, and `dA` (float32) is to be summed to A_log's.
    dg, db, dA: `[B, T, HV]`, contiguous.
    """
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    first = start + c * SIZE
    steps = tl.arange(0, SIZE)
    inside = first + steps < end
    batch64, first64, hv64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64), hv.to(tl.int64)
    one = (batch64 * T + first64) * HV + hv + steps.to(tl.int64) * HV
    flow = tl.zeros([SIZE], tl.float32)
    slope = tl.zeros([SIZE], tl.float32)
    for share in range(SHARES):
        at = one + (pid * 0 + share).to(tl.int64) * tokens * HV
        flow += tl.load(d_G + at, mask=inside, other=0.0)
        slope += tl.load(d_beta + at, mask=inside, other=0.0)
    # G_i is the sum of g_j up to i
    slope_g = tl.sum(tl.where(steps[:, None] >= steps[None, :], flow[:, None], 0.0), 0)
    if GATE:
        raw = tl.load(g + batch64 * g_b + first64 * g_t + hv64 * g_h + steps.to(tl.int64) * g_t, mask=inside, other=0.0)
        raw = raw.to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(dt_bias + hv).to(tl.float32)
        slope_g *= -tl.exp(tl.load(A_log + hv).to(tl.float32))
        tl.store(dA + one, slope_g * softplus(raw), mask=inside)
        slope_g *= sigmoid(raw)
    tl.store(dg + one, slope_g.to(dg.dtype.element_ty), mask=inside)
    if SIGMOID:
        logit = tl.load(beta + batch64 * b_b + first64 * b_t + hv64 * b_h + steps.to(tl.int64) * b_t, mask=inside, other=0.0)
        logit = logit.to(tl.float32)
        slope *= sigmoid(logit) * sigmoid(-logit)
        if DOUBLE:
            slope *= 2.0
    tl.store(db + one, slope.to(db.dtype.element_ty), mask=inside)


@triton.jit
def finish_rows(
    x_ptr,
    x_t,
    each,
    token,
    out,
    time,
    inside,
    GROUP: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Sums the gradients of the rows of q or k over a group of heads, and through their normalisation."""
    own = (token * HV + time * HV) * K
    factor = tl.zeros([inside.shape[0]], tl.float32)
    if NORMALISE:
        norm = inverse_norm(x_ptr, x_t, time, inside, K, BK)
        along = tl.zeros([inside.shape[0]], tl.float32)
        for i in range(0, K, BK):
            cols = i + tl.arange(0, BK)
            mask = inside[:, None] & (cols[None, :] < K)
            x = tl.load(x_ptr + time * x_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            for r in range(GROUP):
                along += tl.sum(x * tl.load(each + own + r * K + cols[None, :], mask=mask, other=0.0).to(tl.float32), 1)
        factor = along * norm * norm
        # `out` may be `each`
        tl.debug_barrier()
    at = (token * (HV // GROUP) + time * (HV // GROUP)) * K
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        total = tl.zeros([inside.shape[0], BK], tl.float32)
        for r in range(GROUP):
            total += tl.load(each + own + r * K + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORMALISE:
            x = tl.load(x_ptr + time * x_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            total -= x * factor[:, None]
        tl.store(out + at + cols[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=['T'])
def finish_heads(
    q,
    k,
    dq_each,
    dk_each,
    dq,
    dk,
    cu_seqlens,
    table,
    T,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    NORMALISE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid (rows * H,): dq, dk `[B, T, H, K]` from those of each value head `[B, T, HV, K]`, which may be the same memory if
    HV == H. All contiguous, except for q and k."""
    pid = tl.program_id(0)
    row, h = pid // H, pid % H
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    first = start + c * SIZE
    steps = tl.arange(0, SIZE)
    inside = first + steps < end
    time = steps[:, None].to(tl.int64)
    batch64, first64, h64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64), h.to(tl.int64)
    token = batch64 * T + first64
    group: tl.constexpr = HV // H
    q_ptr = q + batch64 * q_b + first64 * q_t + h64 * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + h64 * k_h
    each = h64 * group * K
    finish_rows(q_ptr, q_t, dq_each + each, token, dq + h64 * K, time, inside, group, HV, K, BK, NORMALISE)
    finish_rows(k_ptr, k_t, dk_each + each, token, dk + h64 * K, time, inside, group, HV, K, BK, NORMALISE)
