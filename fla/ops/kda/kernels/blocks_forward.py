"""Forward of chunked Kimi delta attention in chunks whose decays are too strong for products of whole chunks.

A program of `scores` has a block of 16 steps. Pairs with steps of another block are relative to a boundary between the two
blocks, and pairs of the block's own steps to its middle or at four levels: see forward.py for the kinds of blocks.

Decays are masked although no code reads them outside the mask. Without the mask Triton computes them in the layouts of
products, all of them in each warp, and programs spill (1.2 KiB a thread in `scores`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.kda.kernels.forward import middle_scores
from fla.ops.kda.kernels.gates import BLOCK, FAR, WHOLE
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import exp32, load_beta
from fla.ops.recurrence.kernels.solve import pair_mask, unit_lower_inverse


@triton.jit
def decay_at(G_ptr, t, cols, in_cols, count, HV: tl.constexpr, K: tl.constexpr):
    """Returns G of step t of the chunk, or of the last step if t is past it."""
    return tl.load(G_ptr + tl.minimum(t, count - 1).to(tl.int64) * HV * K + cols, mask=in_cols, other=0.0)


@triton.jit
def level_decay(Gc, G_ptr, t, half, cols, in_cols, count, HV: tl.constexpr, K: tl.constexpr):
    """Returns e^{-|G_t - G_r|} for the boundary r of the pair of parts that t is in; 0 where r is past the chunk's end."""
    boundary = (t // (2 * half)) * (2 * half) + half
    valid = (boundary < count)[:, None]
    at_boundary = G_ptr + boundary[:, None].to(tl.int64) * HV * K + cols[None, :]
    G_boundary = tl.load(at_boundary, mask=valid & in_cols[None, :], other=0.0)
    return tl.where(valid, exp32(-tl.abs(Gc - G_boundary)), 0.0)


@triton.jit
def level_scores(Q, keys, Gc, G_ptr, t, cols, in_cols, count, HV: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the products of q and of k with k below the diagonal of a block, at four levels (FAR)."""
    qk = tl.zeros([BLOCK, BLOCK], tl.float32)
    kk = tl.zeros([BLOCK, BLOCK], tl.float32)
    for level in range(4):
        half = (BLOCK // 2) >> level
        decay = level_decay(Gc, G_ptr, t, half, cols, in_cols, count, HV, K)
        pairs = pair_mask(tl.arange(0, BLOCK), half)
        k_decayed, q_decayed = (keys.to(tl.float32) * decay).to(keys.dtype), (Q.to(tl.float32) * decay).to(Q.dtype)
        kk += tl.where(pairs, tl.dot(k_decayed, tl.trans(k_decayed), input_precision=PRECISION), 0.0)
        qk += tl.where(pairs, tl.dot(q_decayed, tl.trans(k_decayed), input_precision=PRECISION), 0.0)
    return qk, kk


@triton.jit
def norm_of(x, NORMALISE: tl.constexpr):
    """Returns 1 / norm of the rows of x, or 1 without NORMALISE."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6) if NORMALISE else tl.full([x.shape[0]], 1.0, tl.float32)


@triton.jit
def block_of(pid, SIZE: tl.constexpr):
    """Returns the block of a program in its chunk, and the chunk's program id."""
    return pid % (SIZE // BLOCK), pid // (SIZE // BLOCK)


@triton.jit(do_not_specialize=['T'])
def scores(
    q,
    k,
    G,
    block_kind,
    attend,
    diag_scores,
    lower,
    k_start,
    kg,
    qg,
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
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    NORMALISE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV * SIZE / BLOCK,). Computes the scores in chunks that are not WHOLE.

    A program has a block of steps with all channels, BK >= K. Written tensors are contiguous, and in k's dtype unless a
    dtype is given; q and k are normalised in all of them.

    Args:
        q, k: `[B, T, H, K]` by strides, the last 1.
        G: running log decay, float32 or float64 `[B, T, HV, K]`, and block_kind: int32 `[rows, HV, SIZE / BLOCK]`; of
            `decays`, and so are LEAST and MOST.
        attend: written, M below its diagonal and 0 elsewhere, `[B, T, HV, SIZE]`.
        diag_scores: written, the diagonal of M, float32 `[B, T, HV]`.
        lower: written, A = tril(k k, -1), float32 `[B, T, HV, SIZE]`.
        k_start, kg, qg: written, e^G k, e^{G_C - G} k and scale e^G q, `[B, T, HV, K]`.
    """
    pid = tl.program_id(0)
    block, pid = block_of(pid, SIZE)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    kind = tl.load(block_kind + pid.to(tl.int64) * (SIZE // BLOCK) + block) if LEAST < MOST else MOST
    if kind == WHOLE:
        return
    far = kind == FAR if MOST == FAR else False
    first = start + c * SIZE
    count = tl.minimum(end - first, SIZE)
    begin = block * BLOCK
    if begin >= count:
        return
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    head = (hv // (HV // H)).to(tl.int64)
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    token = (batch64 * T + first64) * HV + hv
    G_ptr = G + token * K
    block_steps = tl.arange(0, BLOCK)
    t = begin + block_steps
    inside = t < count
    cols = tl.arange(0, BK)
    in_cols = cols < K
    mask = inside[:, None] & in_cols[None, :]
    time = t[:, None].to(tl.int64)
    Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0)
    keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0)
    Gc = tl.load(G_ptr + time * HV * K + cols[None, :], mask=mask, other=0.0)
    q_norm, k_norm = norm_of(Q, NORMALISE) * scale, norm_of(keys, NORMALISE)
    wide_Q, wide_keys = Q.to(tl.float32), keys.to(tl.float32)
    tl.store(diag_scores + token + t.to(tl.int64) * HV, tl.sum(wide_Q * wide_keys, 1) * q_norm * k_norm, mask=inside)

    # Factors of the terms that pass the states before and after the chunk.
    at = token * K + time * HV * K + cols[None, :]
    from_start, to_end = exp32(Gc), exp32(decay_at(G_ptr, count - 1, cols, in_cols, count, HV, K)[None, :] - Gc)
    tl.store(kg + at, (wide_keys * to_end * k_norm[:, None]).to(kg.dtype.element_ty), mask=mask)
    tl.store(qg + at, (wide_Q * from_start * q_norm[:, None]).to(qg.dtype.element_ty), mask=mask)
    tl.store(k_start + at, (wide_keys * from_start * k_norm[:, None]).to(k_start.dtype.element_ty), mask=mask)

    # Scores with the steps of earlier blocks.
    score_rows = (token + time * HV) * SIZE
    G_begin = decay_at(G_ptr, begin, cols, in_cols, count, HV, K)
    from_begin = exp32(tl.where(mask, (Gc - G_begin[None, :]).to(tl.float32), 0.0))
    later_q, later_k = (wide_Q * from_begin).to(Q.dtype), (wide_keys * from_begin).to(keys.dtype)
    for j in tl.range(0, begin, BLOCK, num_stages=1):
        s = j + block_steps
        valid = (s < begin)[:, None] & in_cols[None, :]
        keys_s = tl.load(k_ptr + s[:, None].to(tl.int64) * k_t + cols[None, :], mask=valid, other=0.0)
        G_s = tl.load(G_ptr + s[:, None].to(tl.int64) * HV * K + cols[None, :], mask=valid, other=0.0)
        norm_s = norm_of(keys_s, NORMALISE)
        decay_s = exp32(tl.where(valid, (G_begin[None, :] - G_s).to(tl.float32), 0.0))
        earlier_k = tl.trans((keys_s.to(tl.float32) * decay_s).to(keys.dtype))
        pairs = inside[:, None] & (s < begin)[None, :]
        scores_q = tl.dot(later_q, earlier_k, input_precision=PRECISION) * (q_norm[:, None] * norm_s[None, :])
        tl.store(attend + score_rows + s[None, :], scores_q.to(attend.dtype.element_ty), mask=pairs)
        scores_k = tl.dot(later_k, earlier_k, input_precision=PRECISION) * (k_norm[:, None] * norm_s[None, :])
        tl.store(lower + score_rows + s[None, :], scores_k, mask=pairs)
    zeros = tl.zeros([BLOCK, BLOCK], tl.float32)
    for j in tl.range(begin + BLOCK, SIZE, BLOCK, num_stages=1):
        tl.store(attend + score_rows + j + block_steps[None, :], zeros.to(attend.dtype.element_ty), mask=inside[:, None])
        tl.store(lower + score_rows + j + block_steps[None, :], zeros, mask=inside[:, None])

    # Scores among the block's own steps.
    if far:
        qk, kk = level_scores(Q, keys, Gc, G_ptr, t, cols, in_cols, count, HV, K, PRECISION)
    else:
        G_middle = decay_at(G_ptr, begin + BLOCK // 2, cols, in_cols, count, HV, K)
        G_rel = tl.where(mask, (Gc - G_middle[None, :]).to(tl.float32), 0.0)
        qk, kk = middle_scores(Q, keys, G_rel, zeros, zeros, PRECISION)
    strict = block_steps[:, None] > block_steps[None, :]
    qk = tl.where(strict, qk * (q_norm[:, None] * k_norm[None, :]), 0.0)
    kk = tl.where(strict, kk * (k_norm[:, None] * k_norm[None, :]), 0.0)
    tl.store(attend + score_rows + t[None, :], qk.to(attend.dtype.element_ty), mask=inside[:, None])
    tl.store(lower + score_rows + t[None, :], kk, mask=inside[:, None])


@triton.jit(do_not_specialize=['T'])
def updates(
    v,
    beta,
    block_kind,
    lower,
    inverse,
    w,
    u,
    cu_seqlens,
    table,
    T,
    v_b,
    v_t,
    v_h,
    b_b,
    b_t,
    b_h,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    FULL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV,). Computes w and u in chunks that are not WHOLE, with X = (I + beta A)^-1.

    Tensors are contiguous, and in k's dtype unless a dtype is given.

    Args:
        v: `[B, T, HV, V]` by strides, the last 1. beta: `[B, T, HV]` by strides.
        block_kind: of `decays`. lower: A, float32 `[B, T, HV, SIZE]`, of `scores`.
        inverse: written with FULL, X, `[B, T, HV, SIZE]`.
        w: holds e^G k, overwritten with X beta e^G k, `[B, T, HV, K]`.
        u: written, X beta v, `[B, T, HV, V]`. May be the memory of `lower` if a step has the same number of bytes in both.
    """
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(block_kind + pid.to(tl.int64) * (SIZE // BLOCK)) == WHOLE:
        return
    first = start + c * SIZE
    steps = tl.arange(0, SIZE)
    inside = first + steps < end
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    hv64 = hv.to(tl.int64)
    v_ptr = v + batch64 * v_b + first64 * v_t + hv64 * v_h
    b_ptr = beta + batch64 * b_b + first64 * b_t + hv64 * b_h
    step_row = (batch64 * T + first64) * HV + hv + steps[:, None].to(tl.int64) * HV
    bt = load_beta(b_ptr, b_t, steps, inside, SIGMOID, DOUBLE)
    strict = steps[:, None] > steps[None, :]
    A = tl.load(lower + step_row * SIZE + steps[None, :], mask=inside[:, None] & strict, other=0.0)
    X = unit_lower_inverse(A * bt[:, None], PRECISION, ROLLED=True)
    if FULL:
        tl.store(inverse + step_row * SIZE + steps[None, :], X.to(inverse.dtype.element_ty), mask=inside[:, None])
    X *= bt[None, :]
    # Other threads have read `lower`.
    tl.debug_barrier()
    # The diagonal of X beta is beta. It gives most of u, so it stays in float32.
    X_strict = tl.where(strict, X, 0.0).to(u.dtype.element_ty)
    for i in tl.range(0, V, BV, num_stages=1):
        cols = i + tl.arange(0, BV)
        mask = inside[:, None] & (cols[None, :] < V)
        values = tl.load(v_ptr + steps[:, None].to(tl.int64) * v_t + cols[None, :], mask=mask, other=0.0)
        U = tl.dot(X_strict, values, input_precision=PRECISION) + bt[:, None] * values.to(tl.float32)
        tl.store(u + step_row * V + cols[None, :], U.to(u.dtype.element_ty), mask=mask)
    X_cast = X.to(w.dtype.element_ty)
    for i in tl.range(0, K, BK, num_stages=1):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        keys = tl.load(w + step_row * K + cols[None, :], mask=mask, other=0.0)
        W = tl.dot(X_cast, keys, input_precision=PRECISION)
        # All threads have read the tile.
        tl.debug_barrier()
        tl.store(w + step_row * K + cols[None, :], W.to(w.dtype.element_ty), mask=mask)
