"""Forward of the chunked gated delta rule: what is parallel over chunks.

`prepare` inverts the system of each chunk; `states_forward` solves with it, one chunk after the other. That gives the
outputs, for which `prepare` leaves the scores, or `outputs` reads the states back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import beta_of, exp32, inverse_norm, softplus
from fla.ops.recurrence.kernels.solve import unit_lower_inverse


@triton.jit
def gate_of(g, hv, A_log, dt_bias, GATE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The log decay: g itself, or -exp(A_log) softplus(g + dt_bias); at least -1000, because -inf - -inf is NaN."""
    if GATE:
        if HAS_BIAS:
            g += tl.load(dt_bias + hv).to(tl.float32)
        g = -tl.exp(tl.load(A_log + hv).to(tl.float32)) * softplus(g)
    return tl.where(g < -1000.0, -1000.0, g)


@triton.jit
def load_beta(beta, beta_at, b_t, steps, inside, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """beta of the steps of a chunk, 0 outside it."""
    raw = tl.load(beta + beta_at + steps.to(tl.int64) * b_t, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, beta_of(raw, SIGMOID, DOUBLE), 0.0)


@triton.jit
def solved(X, R, PRECISION: tl.constexpr):
    """(I + X) R: R itself, not rounded, and what the strictly triangular X `[SIZE, SIZE]` adds."""
    return tl.dot(X, R.to(X.dtype), R, input_precision=PRECISION)


@triton.jit
def store_scores(scores, q_factor, k_factor, Gc, steps, inside, attend, selves, token, HV: tl.constexpr, SIZE: tl.constexpr):
    """Written, of the scores M = scale tril(q k^T e^{G - G'}): those of each step with the ones before it, `attend` in k's
    dtype `[B, T, HV, SIZE]`, and with itself, `selves` in float32 `[B, T, HV]`. The latter are most of the outputs, and
    rounding them would change those more than all the rest does."""
    i, j = steps[:, None], steps[None, :]
    own = steps.to(tl.int64) * HV
    scores *= q_factor[:, None] * k_factor[None, :]
    tl.store(selves + token + own, tl.sum(tl.where(i == j, scores, 0.0), 1), mask=inside)
    M = tl.where(i > j, scores * exp32(tl.where(i > j, Gc[:, None] - Gc[None, :], 0.0)), 0.0)
    at = token * SIZE + own[:, None] * SIZE + j
    tl.store(attend + at, M.to(attend.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=['T'])
def prepare(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    G,
    beta32,
    rq,
    rk,
    attend,
    selves,
    inverse,
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
    g_b,
    g_t,
    g_h,
    b_b,
    b_t,
    b_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    ATTEND: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):
    """Grid (rows * HV,). Written: G, wide, `beta32`, which is beta after SIGMOID and DOUBLE, and rk, float32, `[B, T, HV]`;
    (I + L)^-1 - I as `inverse` `[B, T, HV, SIZE]` in k's dtype, L = tril(beta k k^T e^{G - G'}, -1); with ATTEND also rq and
    what `store_scores` writes."""
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
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    token = (batch64 * T + first64) * HV + hv
    own = steps.to(tl.int64) * HV
    gate = tl.load(g + batch64 * g_b + first64 * g_t + hv * g_h + steps.to(tl.int64) * g_t, mask=inside, other=0.0)
    gate = gate_of(gate.to(tl.float32), hv, A_log, dt_bias, GATE, HAS_BIAS)
    Gc = tl.cumsum(tl.where(inside, gate, 0.0).to(G.dtype.element_ty), 0)
    tl.store(G + token + own, Gc, mask=inside)
    bt = load_beta(beta, batch64 * b_b + first64 * b_t + hv.to(tl.int64) * b_h, b_t, steps, inside, SIGMOID, DOUBLE)
    # for the recurrences: ahead are loaded 32 bits at least, which scattered numbers in 16 bits are not
    tl.store(beta32 + token + own, bt, mask=inside)
    scores = tl.zeros([SIZE, SIZE], tl.float32)
    for_q = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        keys = tl.load(k_ptr + steps[:, None].to(tl.int64) * k_t + cols[None, :], mask=mask, other=0.0)
        scores += tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        if ATTEND:
            Q = tl.load(q_ptr + steps[:, None].to(tl.int64) * q_t + cols[None, :], mask=mask, other=0.0)
            for_q += tl.dot(Q, tl.trans(keys), input_precision=PRECISION)
    norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        norm = inverse_norm(k_ptr, k_t, steps[:, None].to(tl.int64), inside, K, BK)
        tl.store(rk + token + own, norm, mask=inside)
        scores *= norm[:, None] * norm[None, :]
    strict = steps[:, None] > steps[None, :]
    decay = exp32(tl.where(strict, Gc[:, None] - Gc[None, :], 0.0))
    square = token * SIZE + own[:, None] * SIZE + steps[None, :]
    if ATTEND:
        factor = tl.zeros([SIZE], tl.float32) + scale
        if NORMALISE:
            q_norm = inverse_norm(q_ptr, q_t, steps[:, None].to(tl.int64), inside, K, BK)
            tl.store(rq + token + own, q_norm, mask=inside)
            factor *= q_norm
        store_scores(for_q, factor, norm, Gc, steps, inside, attend, selves, token, HV, SIZE)
    X = unit_lower_inverse(tl.where(strict, scores * decay * bt[:, None], 0.0), INVERSE_PRECISION)
    tl.store(inverse + square, tl.where(strict, X, 0.0).to(inverse.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=['T'])
def outputs(
    q,
    k,
    v_new,
    G,
    rk,
    h,
    o,
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
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORMALISE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV * ceil(V / BV),): o = scale (e^G Q S + tril(Q K^T e^{G - G'}) U')."""
    vb, pid = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
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
    own = steps.to(tl.int64) * HV
    vc = vb * BV + tl.arange(0, BV)
    v_mask = inside[:, None] & (vc[None, :] < V)
    acc = tl.zeros([SIZE, BV], tl.float32)
    scores = tl.zeros([SIZE, SIZE], tl.float32)
    h_ptr = h + (row.to(tl.int64) * HV + hv) * K * V
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        Q = tl.load(q_ptr + steps[:, None].to(tl.int64) * q_t + cols[None, :], mask=mask, other=0.0)
        keys = tl.load(k_ptr + steps[:, None].to(tl.int64) * k_t + cols[None, :], mask=mask, other=0.0)
        S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=(cols[:, None] < K) & (vc[None, :] < V), other=0.0)
        acc += tl.dot(Q, S, input_precision=PRECISION)
        scores += tl.dot(Q, tl.trans(keys), input_precision=PRECISION)
    Gc = tl.load(G + token + own, mask=inside, other=0.0)
    causal = (steps[:, None] > steps[None, :]) & inside[None, :]
    scores *= exp32(tl.where(causal, Gc[:, None] - Gc[None, :], 0.0))
    grown = exp32(Gc)
    if NORMALISE:
        scores *= tl.load(rk + token + own, mask=inside, other=0.0)[None, :]
    itself = tl.sum(tl.where(steps[:, None] == steps[None, :], scores, 0.0), 1)
    scores = tl.where(causal, scores, 0.0)
    update = tl.load(v_new + token * V + own[:, None] * V + vc[None, :], mask=v_mask, other=0.0)
    acc = acc * grown[:, None] + itself[:, None] * update.to(tl.float32)
    acc += tl.dot(scores.to(update.dtype), update, input_precision=PRECISION)
    factor = tl.zeros([SIZE], tl.float32) + scale
    if NORMALISE:
        factor *= inverse_norm(q_ptr, q_t, steps[:, None].to(tl.int64), inside, K, BK)
    tl.store(o + token * V + own[:, None] * V + vc[None, :], (acc * factor[:, None]).to(o.dtype.element_ty), mask=v_mask)
