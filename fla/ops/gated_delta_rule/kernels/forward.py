"""Forward of the chunked gated delta rule, the parts that are parallel over chunks (Yang et al. 2024, arXiv 2412.06464).

With G the running log decay of a chunk, L = tril(beta k k^T e^{G - G'}, -1) and M = scale tril(q k^T e^{G - G'}), `prepare`
inverts the system I + L of each chunk. `states_forward` then solves with the inverse, one chunk after the other. Either it
also writes the outputs, from the scores M that `prepare` stores, or `outputs` reads the states back.

In the shapes below, rows is the number of rows of the chunk table (`fla.ops.launch.kernels.layout`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.gated_delta_rule.kernels.gates import gate_of
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import exp32, inverse_norm, load_beta
from fla.ops.recurrence.kernels.solve import unit_lower_inverse


@triton.jit
def apply_inverse(X, R, PRECISION: tl.constexpr):
    """Returns (I + X) R for a strictly lower-triangular X `[SIZE, SIZE]`. R is rounded in the product X R only."""
    return tl.dot(X, R.to(X.dtype), R, input_precision=PRECISION)


@triton.jit
def store_scores(
    qk, q_factor, k_factor, Gc, steps, inside, attend, diag_scores, token, HV: tl.constexpr, SIZE: tl.constexpr
):
    """Writes the scores M = scale tril(q k^T e^{G - G'}) from the products `qk` = q k^T.

    `attend` `[B, T, HV, SIZE]`, in k's dtype, gets M below the diagonal, and `diag_scores`, float32 `[B, T, HV]`, the
    diagonal. The diagonal is most of the outputs, and rounding it would change the outputs more than all other roundings."""
    i, j = steps[:, None], steps[None, :]
    step_row = steps.to(tl.int64) * HV
    qk *= q_factor[:, None] * k_factor[None, :]
    tl.store(diag_scores + token + step_row, tl.sum(tl.where(i == j, qk, 0.0), 1), mask=inside)
    M = tl.where(i > j, qk * exp32(tl.where(i > j, Gc[:, None] - Gc[None, :], 0.0)), 0.0)
    at = token * SIZE + step_row[:, None] * SIZE + j
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
    diag_scores,
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
    """Grid (rows * HV,). Inverts the system I + L of each chunk.

    Args:
        q, k: `[B, T, H, K]` by strides, the last 1. g, beta: `[B, T, HV]` by strides. A_log, dt_bias: `[HV]`, read with
            GATE.
        G: written, running log decay, float32 or float64 `[B, T, HV]`.
        beta32: written, beta after SIGMOID and DOUBLE, float32 `[B, T, HV]`.
        rk: written with NORMALISE, 1 / norm of k, float32 `[B, T, HV]`. rq: that of q, written with ATTEND and NORMALISE.
        attend, diag_scores: written with ATTEND, the scores: see `store_scores`.
        inverse: written, (I + L)^-1 - I, `[B, T, HV, SIZE]` in k's dtype.
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
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    token = (batch64 * T + first64) * HV + hv
    step_row = steps.to(tl.int64) * HV
    gate = tl.load(g + batch64 * g_b + first64 * g_t + hv * g_h + steps.to(tl.int64) * g_t, mask=inside, other=0.0)
    gate = gate_of(gate.to(tl.float32), hv, A_log, dt_bias, GATE, HAS_BIAS)
    Gc = tl.cumsum(tl.where(inside, gate, 0.0).to(G.dtype.element_ty), 0)
    tl.store(G + token + step_row, Gc, mask=inside)
    bt = load_beta(beta + (batch64 * b_b + first64 * b_t + hv.to(tl.int64) * b_h), b_t, steps, inside, SIGMOID, DOUBLE)
    # The recurrences load beta ahead. Asynchronous copies take at least 32 bits, which strided 16-bit numbers are not.
    tl.store(beta32 + token + step_row, bt, mask=inside)
    kk = tl.zeros([SIZE, SIZE], tl.float32)
    qk = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        keys = tl.load(k_ptr + steps[:, None].to(tl.int64) * k_t + cols[None, :], mask=mask, other=0.0)
        kk += tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        if ATTEND:
            Q = tl.load(q_ptr + steps[:, None].to(tl.int64) * q_t + cols[None, :], mask=mask, other=0.0)
            qk += tl.dot(Q, tl.trans(keys), input_precision=PRECISION)
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        k_norm = inverse_norm(k_ptr, k_t, steps[:, None].to(tl.int64), inside, K, BK)
        tl.store(rk + token + step_row, k_norm, mask=inside)
        kk *= k_norm[:, None] * k_norm[None, :]
    strict = steps[:, None] > steps[None, :]
    decay = exp32(tl.where(strict, Gc[:, None] - Gc[None, :], 0.0))
    square = token * SIZE + step_row[:, None] * SIZE + steps[None, :]
    if ATTEND:
        q_factor = tl.zeros([SIZE], tl.float32) + scale
        if NORMALISE:
            q_norm = inverse_norm(q_ptr, q_t, steps[:, None].to(tl.int64), inside, K, BK)
            tl.store(rq + token + step_row, q_norm, mask=inside)
            q_factor *= q_norm
        store_scores(qk, q_factor, k_norm, Gc, steps, inside, attend, diag_scores, token, HV, SIZE)
    X = unit_lower_inverse(tl.where(strict, kk * decay * bt[:, None], 0.0), INVERSE_PRECISION)
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
    """Grid (rows * HV * ceil(V / BV),). Computes o = scale (e^G Q S + tril(Q K^T e^{G - G'}) U').

    Args:
        q, k: `[B, T, H, K]` by strides, the last 1.
        v_new: U', `[B, T, HV, V]` in k's dtype, contiguous.
        G: running log decay, float32 or float64 `[B, T, HV]`.
        rk: 1 / norm of k, float32 `[B, T, HV]`, read with NORMALISE.
        h: state S before each chunk, `[rows, HV, K, V]` in k's dtype.
        o: written, `[B, T, HV, V]`, contiguous.
    """
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
    step_row = steps.to(tl.int64) * HV
    vc = vb * BV + tl.arange(0, BV)
    v_mask = inside[:, None] & (vc[None, :] < V)
    acc = tl.zeros([SIZE, BV], tl.float32)
    qk = tl.zeros([SIZE, SIZE], tl.float32)
    h_ptr = h + (row.to(tl.int64) * HV + hv) * K * V
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        Q = tl.load(q_ptr + steps[:, None].to(tl.int64) * q_t + cols[None, :], mask=mask, other=0.0)
        keys = tl.load(k_ptr + steps[:, None].to(tl.int64) * k_t + cols[None, :], mask=mask, other=0.0)
        S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=(cols[:, None] < K) & (vc[None, :] < V), other=0.0)
        acc += tl.dot(Q, S, input_precision=PRECISION)
        qk += tl.dot(Q, tl.trans(keys), input_precision=PRECISION)
    Gc = tl.load(G + token + step_row, mask=inside, other=0.0)
    causal = (steps[:, None] > steps[None, :]) & inside[None, :]
    qk *= exp32(tl.where(causal, Gc[:, None] - Gc[None, :], 0.0))
    from_start = exp32(Gc)
    if NORMALISE:
        qk *= tl.load(rk + token + step_row, mask=inside, other=0.0)[None, :]
    diagonal = tl.sum(tl.where(steps[:, None] == steps[None, :], qk, 0.0), 1)
    qk = tl.where(causal, qk, 0.0)
    update = tl.load(v_new + token * V + step_row[:, None] * V + vc[None, :], mask=v_mask, other=0.0)
    acc = acc * from_start[:, None] + diagonal[:, None] * update.to(tl.float32)
    acc += tl.dot(qk.to(update.dtype), update, input_precision=PRECISION)
    q_factor = tl.zeros([SIZE], tl.float32) + scale
    if NORMALISE:
        q_factor *= inverse_norm(q_ptr, q_t, steps[:, None].to(tl.int64), inside, K, BK)
    acc *= q_factor[:, None]
    tl.store(o + token * V + step_row[:, None] * V + vc[None, :], acc.to(o.dtype.element_ty), mask=v_mask)
