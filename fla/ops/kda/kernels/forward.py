"""Forward of chunked Kimi delta attention, the parts that are parallel over chunks (Kimi Team 2025, arXiv 2510.26692).

`prepare` brings each chunk into its WY form, `states_forward` runs over the chunks, and `outputs` reads the states back.

With one decay per channel, the scores of a chunk are sum_c x_ic e^{G_ic - G_jc} k_jc for j < i. They are a product only
relative to a reference step r between j and i: e^{G_i - G_r} e^{G_r - G_j}. The decays inside a chunk decide which reference
steps keep both factors finite. Each block of 16 steps has a kind:

- WHOLE: the reference is the middle of the chunk for all i and j. It is used while no step's decay is further than e^60
  from that of the middle. Both factors and all terms below the diagonal then stay far inside the range of floats, with
  twelve digits to spare on either side.
- NEAR: the reference is the middle of the block for pairs inside the block, with the same limit. Gates of at least -7.5 stay
  below it.
- FAR: at level s the block is cut into pairs of parts of s steps. The pair of a step i of the second part and a step j of
  the first one is relative to the boundary between the parts. Each pair i > j of the block is in exactly one of the levels
  8, 4, 2, 1, and every exponent is at most 0.

Pairs of a NEAR or FAR block with earlier blocks are relative to a boundary between the two blocks. Either all blocks of a
chunk are WHOLE, or none is. The kernels of this file are for chunks that are WHOLE, those of blocks_forward.py for the
others; a program returns at once if its chunk is of the other kind.

Sums over rows stand in loops of their own: see `inverse_norm`. In the shapes below, rows is the number of rows of the chunk
table (`fla.ops.launch.kernels.layout`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.kda.kernels.gates import BLOCK, WHOLE
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import exp32, load_beta
from fla.ops.recurrence.kernels.solve import unit_lower_inverse


@triton.jit
def relative_to_middle(G_tile, G_ptr, cols, in_cols, inside, count, HV: tl.constexpr, K: tl.constexpr):
    """Returns G_t - G_r in float32, for the chunk's middle step r; 0 outside the mask `inside`."""
    at = tl.load(G_ptr + (count // 2).to(tl.int64) * HV * K + cols, mask=in_cols, other=0.0)
    return tl.where(inside, (G_tile - at[None, :]).to(tl.float32), 0.0)


@triton.jit
def middle_scores(Q, keys, G_rel, qk, kk, PRECISION: tl.constexpr):
    """Returns the products `qk` and `kk` plus those of some channels, given G_rel, G relative to a reference step.

    Only pairs below the diagonal that share a reference step are valid; the others may be infinite or NaN."""
    later = exp32(G_rel)
    earlier = keys.to(tl.float32) * exp32(-G_rel)
    high = earlier.to(keys.dtype)
    queries = (Q.to(tl.float32) * later).to(Q.dtype)
    kk += tl.dot((keys.to(tl.float32) * later).to(keys.dtype), tl.trans(high), input_precision=PRECISION)
    qk += tl.dot(queries, tl.trans(high), input_precision=PRECISION)
    if Q.dtype != tl.float32:
        # Rounding of these factors would cause most of the error in the gradient of beta, and much of the error in o.
        low = (earlier - high.to(tl.float32)).to(Q.dtype)
        qk += tl.dot(queries, tl.trans(low), input_precision=PRECISION)
    return qk, kk


@triton.jit
def row_sums(q_ptr, q_t, k_ptr, k_t, time, inside, K: tl.constexpr, BK: tl.constexpr, NORMALISE: tl.constexpr):
    """Returns q k of each step with itself, and 1 / norm of q and of k (1 without NORMALISE)."""
    diagonal = tl.zeros([inside.shape[0]], tl.float32)
    q_squares = tl.zeros([inside.shape[0]], tl.float32)
    k_squares = tl.zeros([inside.shape[0]], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        diagonal += tl.sum(Q * keys, 1)
        if NORMALISE:
            q_squares += tl.sum(Q * Q, 1)
            k_squares += tl.sum(keys * keys, 1)
    q_norm = tl.full([inside.shape[0]], 1.0, tl.float32)
    k_norm = tl.full([inside.shape[0]], 1.0, tl.float32)
    if NORMALISE:
        q_norm = tl.rsqrt(q_squares + 1e-6)
        k_norm = tl.rsqrt(k_squares + 1e-6)
    return diagonal, q_norm, k_norm


@triton.jit
def store_decayed(Q, keys, Gc, G_last, q_factor, k_norm, at, mask, w_ptr, kg_ptr, qg_ptr):
    """Writes kg = e^{G_C - G} k and qg = scale e^G q for the recurrence, and e^G k in w's place for `store_updates`."""
    from_start = exp32(Gc)
    keys, Q = keys.to(tl.float32), Q.to(tl.float32)
    tl.store(kg_ptr + at, (keys * exp32(G_last[None, :] - Gc) * k_norm[:, None]).to(kg_ptr.dtype.element_ty), mask=mask)
    tl.store(qg_ptr + at, (Q * from_start * q_factor[:, None]).to(qg_ptr.dtype.element_ty), mask=mask)
    tl.store(w_ptr + at, (keys * from_start).to(w_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_scores(
    qk,
    kk,
    diagonal,
    q_factor,
    k_norm,
    steps,
    inside,
    attend,
    diag_scores,
    lower,
    token,
    HV: tl.constexpr,
    SIZE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Writes the scores below the diagonal, and the diagonal of q's. Returns the lower scores of k, normalised.

    On and above the diagonal, qk and kk may be infinite or NaN. The diagonal of q's scores is most of the outputs, so it
    stays in float32: rounding it would change the outputs more than all other roundings."""
    i, j = steps[:, None], steps[None, :]
    at = (token + i.to(tl.int64) * HV) * SIZE + j
    M = tl.where(i > j, qk * (q_factor[:, None] * k_norm[None, :]), 0.0)
    tl.store(attend + at, M.to(attend.dtype.element_ty), mask=inside[:, None])
    tl.store(diag_scores + token + steps.to(tl.int64) * HV, diagonal * q_factor * k_norm, mask=inside)
    A = tl.where(i > j, kk * (k_norm[:, None] * k_norm[None, :]), 0.0)
    if FULL:
        tl.store(lower + at, A, mask=inside[:, None])
    return A


@triton.jit
def store_updates(
    A,
    bt,
    k_norm,
    v_ptr,
    v_t,
    steps,
    inside,
    inverse,
    w,
    u,
    token,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Writes X = (I + beta A)^-1, u = X beta v, and w = X beta e^G k, from e^G k that `store_decayed` has left in w.

    The diagonal of X beta is beta. It gives most of u, so it stays in float32."""
    token_rows = token + steps[:, None].to(tl.int64) * HV
    # Rolled, because half of a first call is compiling the kernels that contain the inverse.
    X = unit_lower_inverse(A * bt[:, None], PRECISION, ROLLED=True)
    if FULL:
        tl.store(inverse + token_rows * SIZE + steps[None, :], X.to(inverse.dtype.element_ty), mask=inside[:, None])
    X *= bt[None, :]
    X_strict = tl.where(steps[:, None] > steps[None, :], X, 0.0).to(u.dtype.element_ty)
    for i in range(0, V, BV):
        cols = i + tl.arange(0, BV)
        mask = inside[:, None] & (cols[None, :] < V)
        values = tl.load(v_ptr + steps[:, None].to(tl.int64) * v_t + cols[None, :], mask=mask, other=0.0)
        U = tl.dot(X_strict, values, input_precision=PRECISION) + bt[:, None] * values.to(tl.float32)
        tl.store(u + token_rows * V + cols[None, :], U.to(u.dtype.element_ty), mask=mask)
    # Other threads have written the keys in w.
    tl.debug_barrier()
    X_cast = (X * k_norm[None, :]).to(w.dtype.element_ty)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        from_start = tl.load(w + token_rows * K + cols[None, :], mask=mask, other=0.0)
        W = tl.dot(X_cast, from_start, input_precision=PRECISION)
        # All threads have read the tile.
        tl.debug_barrier()
        tl.store(w + token_rows * K + cols[None, :], W.to(w.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=['T'])
def prepare(
    q,
    k,
    v,
    beta,
    G,
    block_kind,
    attend,
    diag_scores,
    lower,
    inverse,
    w,
    u,
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
    BK_ROWS: tl.constexpr,
    BV: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    FULL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV,). Brings chunks that are WHOLE into WY form.

    Written tensors are contiguous, and in k's dtype unless a dtype is given.

    Args:
        q, k: `[B, T, H, K]`, v: `[B, T, HV, V]`, by strides, the last 1. beta: `[B, T, HV]` by strides.
        G: running log decay, float32 or float64 `[B, T, HV, K]`, and block_kind: int32 `[rows, HV, SIZE / BLOCK]`; of
            `decays`.
        attend: written, M below its diagonal, scale q k of each step with earlier ones, `[B, T, HV, SIZE]`.
        diag_scores: written, the diagonal of M, float32 `[B, T, HV]`.
        lower: written with FULL, A = tril(k k, -1), float32 `[B, T, HV, SIZE]`.
        inverse: written with FULL, (I + beta A)^-1, `[B, T, HV, SIZE]`.
        w, u: written, (I + beta A)^-1 beta times e^G k, `[B, T, HV, K]`, and v, `[B, T, HV, V]`.
        kg, qg: written, e^{G_C - G} k and scale e^G q, `[B, T, HV, K]`.
        BK_ROWS: channels that `row_sums`, which has no products, reads at once.
    """
    pid = tl.program_id(0)
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
    head, hv64 = (hv // (HV // H)).to(tl.int64), hv.to(tl.int64)
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    v_ptr = v + batch64 * v_b + first64 * v_t + hv64 * v_h
    b_ptr = beta + batch64 * b_b + first64 * b_t + hv64 * b_h
    token = (batch64 * T + first64) * HV + hv
    step_row = steps[:, None].to(tl.int64) * HV
    time = steps[:, None].to(tl.int64)
    diagonal, q_norm, k_norm = row_sums(q_ptr, q_t, k_ptr, k_t, time, inside, K, BK_ROWS, NORMALISE)
    kk = tl.zeros([SIZE, SIZE], tl.float32)
    qk = tl.zeros([SIZE, SIZE], tl.float32)
    G_ptr = G + token * K
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        at = step_row * K + cols[None, :]
        Gc = tl.load(G_ptr + at, mask=mask, other=0.0)
        G_last = tl.load(G_ptr + (count - 1).to(tl.int64) * HV * K + cols, mask=cols < K, other=0.0)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0)
        Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0)
        G_rel = relative_to_middle(Gc, G_ptr, cols, cols < K, mask, count, HV, K)
        qk, kk = middle_scores(Q, keys, G_rel, qk, kk, PRECISION)
        store_decayed(Q, keys, Gc, G_last, q_norm * scale, k_norm, at, mask, w + token * K, kg + token * K, qg + token * K)
    A = store_scores(
        qk, kk, diagonal, q_norm * scale, k_norm, steps, inside, attend, diag_scores, lower, token, HV, SIZE, FULL
    )
    bt = load_beta(b_ptr, b_t, steps, inside, SIGMOID, DOUBLE)
    store_updates(A, bt, k_norm, v_ptr, v_t, steps, inside, inverse, w, u, token, HV, K, V, SIZE, BK, BV, FULL, PRECISION)


@triton.jit(do_not_specialize=['T'])
def outputs(
    qg,
    attend,
    diag_scores,
    v_new,
    h,
    o,
    cu_seqlens,
    table,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV * ceil(V / BV),). Computes o = qg S + M U'.

    Args:
        qg: scale e^G q, `[B, T, HV, K]` in k's dtype, contiguous.
        attend, diag_scores: M below its diagonal, `[B, T, HV, SIZE]` in k's dtype, and on it, float32 `[B, T, HV]`.
        v_new: U', `[B, T, HV, V]` in k's dtype, contiguous.
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
    token = (batch64 * T + first64) * HV + hv
    step_row = steps[:, None].to(tl.int64) * HV
    vc = vb * BV + tl.arange(0, BV)
    v_mask = inside[:, None] & (vc[None, :] < V)
    h_ptr = h + (row.to(tl.int64) * HV + hv) * K * V
    M = tl.load(attend + token * SIZE + step_row * SIZE + steps[None, :], mask=inside[:, None] & inside[None, :], other=0.0)
    update = tl.load(v_new + token * V + step_row * V + vc[None, :], mask=v_mask, other=0.0)
    diagonal = tl.load(diag_scores + token + steps.to(tl.int64) * HV, mask=inside, other=0.0)
    acc = diagonal[:, None] * update.to(tl.float32)
    acc += tl.dot(M, update, input_precision=PRECISION)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        Q = tl.load(qg + token * K + step_row * K + cols[None, :], mask=inside[:, None] & (cols[None, :] < K), other=0.0)
        S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=(cols[:, None] < K) & (vc[None, :] < V), other=0.0)
        acc += tl.dot(Q, S, input_precision=PRECISION)
    tl.store(o + token * V + step_row * V + vc[None, :], acc.to(o.dtype.element_ty), mask=v_mask)
