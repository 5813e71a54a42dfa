"""Backward of the chunked gated delta rule, the parts that are parallel over chunks.

Per chunk, with I + X = (I + L)^-1, M = scale tril(Q K^T e^{G - G'}), and D the gradient of the right-hand side
beta (V - e^G K S) of the system:

    U' = (I + X) beta (V - e^G K S);   O = scale e^G Q S + M U';   S' = e^{G_C} S + (e^{G_C - G} K)^T U'

    D  = (I + X)^T dU';   dV = beta D;   dL = -tril(D U'^T, -1);   dM = tril(dO U'^T)
    dbeta_i = <D_i, (V - e^G K S)_i> + sum_j dL_ij L_ij / beta_i

The kernels run in this order:

- `scores` computes M, beta32 and the norms again, and `states_forward` the states and U';
- `states_backward` computes the gradients of states and updates, and D;
- `intra_chunk_bwd` computes dV, and the terms of pairs of steps in a chunk;
- `inter_chunk_bwd` adds the terms of the states before and after a chunk;
- `gates_backward` and `heads_backward` sum over steps, blocks of channels and groups of heads. No sum is atomic.

In the shapes below, rows is the number of rows of the chunk table (`fla.ops.launch.kernels.layout`).

Norms: where q and k are normalised, products are of raw rows, and 1 / norm is among the factors. The gradients that
`inter_chunk_bwd` writes hold the norm constant, and `heads_backward` removes their component along the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.gated_delta_rule.kernels.forward import store_scores
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import exp32, inverse_norm, load_beta


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
    diag_scores,
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
    """Grid (rows * HV,). Computes what the forward did not save.

    Args:
        q, k: `[B, T, H, K]` by strides, the last 1. beta: `[B, T, HV]` by strides.
        G: running log decay, float32 or float64 `[B, T, HV]`.
        beta32, rq, rk: written, float32 `[B, T, HV]`, as in `prepare`; the last two with NORMALISE.
        attend, diag_scores: written, the scores M: see `store_scores`.
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
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    token = (batch64 * T + first64) * HV + hv
    time = steps[:, None].to(tl.int64)
    token_rows = token + steps * HV
    Gc = tl.load(G + token_rows, mask=inside, other=0.0)
    bt = load_beta(beta + (batch64 * b_b + first64 * b_t + hv.to(tl.int64) * b_h), b_t, steps, inside, SIGMOID, DOUBLE)
    tl.store(beta32 + token_rows, bt, mask=inside)
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    q_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        k_norm = inverse_norm(k_ptr, k_t, time, inside, K, BK)
        q_norm = inverse_norm(q_ptr, q_t, time, inside, K, BK)
        tl.store(rk + token_rows, k_norm, mask=inside)
        tl.store(rq + token_rows, q_norm, mask=inside)
    qk = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0)
        qk += tl.dot(Q, tl.trans(keys), input_precision=PRECISION)
    store_scores(qk, q_norm * scale, k_norm, Gc, steps, inside, attend, diag_scores, token, HV, SIZE)


@triton.jit(do_not_specialize=['T'])
def intra_chunk_bwd(
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
    d_qk,
    d_kk,
    dG_parts,
    dbeta_parts,
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
    """Grid (rows * HV,). Computes the gradients of v and of pairs of steps of a chunk.

    Args:
        q, k: `[B, T, H, K]`, v: `[B, T, HV, V]`, by strides, the last 1. beta: `[B, T, HV]` by strides.
        do: gradient of o, `[B, T, HV, V]`, contiguous.
        G: running log decay, float32 or float64 `[B, T, HV]`.
        rq, rk: 1 / norm of q and k, float32 `[B, T, HV]`, read with NORMALISE.
        v_new, D: U' and D, `[B, T, HV, V]` in k's dtype, contiguous.
        dv: written, gradient of v, `[B, T, HV, V]`, contiguous.
        d_qk, d_kk: written, gradients of the plain products q k^T and, plus its transpose, k k^T, `[B, T, HV, SIZE]` in k's
            dtype.
        dG_parts, dbeta_parts: float32 `[·, B, T, HV]`; index 0 is written, a part of the gradients of G and beta.
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
    step_row = steps[:, None] * HV
    time = steps[:, None].to(tl.int64)
    token_rows = token + steps * HV
    square = token * SIZE + (step_row * SIZE + steps[None, :])
    Gc = tl.load(G + token_rows, mask=inside, other=0.0)
    strict = (steps[:, None] > steps[None, :]) & inside[:, None]
    k_norm = tl.full([SIZE], 1.0, tl.float32)
    q_norm = tl.full([SIZE], 1.0, tl.float32)
    if NORMALISE:
        k_norm = tl.load(rk + token_rows, mask=inside, other=0.0)
        q_norm = tl.load(rq + token_rows, mask=inside, other=0.0)
    bt = load_beta(beta + (batch64 * b_b + first64 * b_t + hv64 * b_h), b_t, steps, inside, SIGMOID, DOUBLE)
    dM = tl.zeros([SIZE, SIZE], tl.float32)
    dL = tl.zeros([SIZE, SIZE], tl.float32)
    D_dot_v = tl.zeros([SIZE, BV], tl.float32)
    for i in range(0, V, BV):
        cols = i + tl.arange(0, BV)
        mask = inside[:, None] & (cols[None, :] < V)
        at = token * V + (step_row * V + cols[None, :])
        update = tl.load(v_new + at, mask=mask, other=0.0)
        dO = tl.load(do + at, mask=mask, other=0.0)
        D_tile = tl.load(D + at, mask=mask, other=0.0)
        values = tl.load(v_ptr + time * v_t + cols[None, :], mask=mask, other=0.0)
        tl.store(dv + at, (D_tile.to(tl.float32) * bt[:, None]).to(dv.dtype.element_ty), mask=mask)
        # A sum over each row in every iteration would wait for all threads of that row.
        D_dot_v += D_tile.to(tl.float32) * values.to(tl.float32)
        dM += tl.dot(dO, tl.trans(update), input_precision=PRECISION)
        dL += tl.dot(D_tile, tl.trans(update), input_precision=PRECISION)
    dbeta = tl.sum(D_dot_v, 1)
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
    dM *= tl.where(steps[:, None] == steps[None, :], 1.0, decay) * (q_norm * scale)[:, None] * k_norm[None, :]
    tl.store(d_qk + square, dM.to(d_qk.dtype.element_ty), mask=inside[:, None])
    dL *= -decay * k_norm[:, None] * k_norm[None, :]
    dG = kk * dL
    dbeta += tl.sum(dG, 1)
    tl.store(dbeta_parts + token_rows, dbeta, mask=inside)
    dL *= bt[:, None]
    tl.store(d_kk + square, (dL + tl.trans(dL)).to(d_kk.dtype.element_ty), mask=inside[:, None])
    # A term with e^{G_i - G_j} adds itself to dG_i and subtracts itself from dG_j. The diagonal has no decay.
    dG = dG * bt[:, None] + tl.where(strict, qk * dM, 0.0)
    tl.store(dG_parts + token_rows, tl.sum(dG, 1) - tl.sum(dG, 0), mask=inside)


@triton.jit(do_not_specialize=['T', 'tokens'])
def inter_chunk_bwd(
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
    d_qk,
    d_kk,
    dq,
    dk,
    dG_parts,
    dbeta_parts,
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
    """Grid (ceil(K / BK) * rows * HV,). Computes the gradients of q and k, and the terms of the states of G and beta.

    The grid has one axis, because a second one ends at 65,535.

    Args:
        q, k: `[B, T, H, K]` by strides, the last 1. beta: `[B, T, HV]` by strides.
        do: gradient of o, `[B, T, HV, V]`, contiguous.
        G: running log decay, float32 or float64 `[B, T, HV]`.
        rq, rk: 1 / norm of q and k, float32 `[B, T, HV]`, read with NORMALISE.
        v_new, D: U' and D, `[B, T, HV, V]` in k's dtype, contiguous.
        h, dh: state before and gradient of the state after each chunk, `[rows, HV, K, V]` in k's dtype.
        d_qk, d_kk: gradients of q k^T and k k^T, of `intra_chunk_bwd`.
        dq, dk: written, for each value head and at constant norms, `[B, T, HV, K]`, contiguous.
        dG_parts, dbeta_parts: float32 `[1 + ceil(K / BK), B, T, HV]`; block i of channels writes index 1 + i.
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
    step_row = steps[:, None] * HV
    time = steps[:, None].to(tl.int64)
    token_rows = token + steps * HV
    square = token * SIZE + (step_row * SIZE + steps[None, :])
    channels = kb * BK + tl.arange(0, BK)
    in_k = channels < K
    state = (row.to(tl.int64) * HV + hv) * K * V + channels[:, None] * V
    last = tl.minimum(end - first, SIZE) - 1
    G_last = tl.load(G + token + last.to(tl.int64) * HV)
    Gc = tl.load(G + token_rows, mask=inside, other=0.0)
    from_start = exp32(Gc)
    to_end = exp32(tl.where(inside, G_last - Gc, 0.0))
    q_factor = from_start * scale
    if NORMALISE:
        k_norm = tl.load(rk + token_rows, mask=inside, other=0.0)
        q_factor *= tl.load(rq + token_rows, mask=inside, other=0.0)
        from_start *= k_norm
        to_end *= k_norm
    # Terms of the state before the chunk and of the state after it.
    dq_tile = tl.zeros([SIZE, BK], tl.float32)
    dk_tile = tl.zeros([SIZE, BK], tl.float32)
    dk_to_end = tl.zeros([SIZE, BK], tl.float32)
    state_dot = tl.zeros([BK, BK], tl.float32)
    for i in range(0, V, BV):
        cols = i + tl.arange(0, BV)
        mask = inside[:, None] & (cols[None, :] < V)
        state_mask = in_k[:, None] & (cols[None, :] < V)
        at = token * V + (step_row * V + cols[None, :])
        S = tl.load(h + state + cols[None, :], mask=state_mask, other=0.0)
        dS = tl.load(dh + state + cols[None, :], mask=state_mask, other=0.0)
        dO = tl.load(do + at, mask=mask, other=0.0)
        D_tile = tl.load(D + at, mask=mask, other=0.0)
        update = tl.load(v_new + at, mask=mask, other=0.0)
        dq_tile += tl.dot(dO, tl.trans(S), input_precision=PRECISION)
        dk_tile += tl.dot(D_tile, tl.trans(S), input_precision=PRECISION)
        dk_to_end += tl.dot(update, tl.trans(dS), input_precision=PRECISION)
        # Only the trace is used. A product, because only tiles that nothing but products read may be loaded ahead
        # (docs/kernels.md).
        state_dot += tl.dot(S, tl.trans(dS), input_precision=PRECISION)
    block_cols = tl.arange(0, BK)
    state_dot = tl.where(block_cols[:, None] == block_cols[None, :], state_dot, 0.0)
    dG_last = exp32(G_last) * tl.sum(tl.sum(state_dot, 1), 0)
    mask = inside[:, None] & in_k[None, :]
    Q = tl.load(q_ptr + time * q_t + channels[None, :], mask=mask, other=0.0)
    keys = tl.load(k_ptr + time * k_t + channels[None, :], mask=mask, other=0.0)
    P = tl.load(d_qk + square, mask=inside[:, None], other=0.0)
    dq_tile *= q_factor[:, None]
    dG = tl.sum(Q.to(tl.float32) * dq_tile, 1)
    dq_tile += tl.dot(P, keys, input_precision=PRECISION)
    at = token * K + (step_row * K + channels[None, :])
    tl.store(dq + at, dq_tile.to(dq.dtype.element_ty), mask=mask)
    bt = load_beta(beta + (batch64 * b_b + first64 * b_t + hv64 * b_h), b_t, steps, inside, SIGMOID, DOUBLE)
    dk_tile *= -from_start[:, None]
    dbeta = tl.sum(keys.to(tl.float32) * dk_tile, 1)
    part = (1 + kb).to(tl.int64) * tokens * HV
    tl.store(dbeta_parts + part + token_rows, dbeta, mask=inside)
    dG += bt * dbeta
    dk_tile *= bt[:, None]
    dk_to_end *= to_end[:, None]
    dG_to_end = tl.sum(keys.to(tl.float32) * dk_to_end, 1)
    dG_last += tl.sum(dG_to_end, 0)
    dG += tl.where(steps == last, dG_last, 0.0) - dG_to_end
    tl.store(dG_parts + part + token_rows, dG, mask=inside)
    dk_tile += dk_to_end
    dk_tile += tl.dot(tl.trans(P), Q, input_precision=PRECISION)
    R = tl.load(d_kk + square, mask=inside[:, None], other=0.0)
    dk_tile += tl.dot(R, keys, input_precision=PRECISION)
    tl.store(dk + at, dk_tile.to(dk.dtype.element_ty), mask=mask)
