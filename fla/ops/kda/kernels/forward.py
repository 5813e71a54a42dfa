"""Forward of chunked Kimi delta attention: what is parallel over chunks, each of which goes into its WY form.

With one decay per channel, the scores of a chunk, sum_c x_ic e^{G_ic - G_jc} k_jc for j < i, are a product only through a
step r between them, e^{G_i - G_r} e^{G_r - G_j}. How far apart the steps of a chunk are decides through which; the `kind` of
each of its blocks of 16 steps says it:

- WHOLE: the middle of the chunk for all i and j. While no step is further from it than e^60, both factors, and every term
  that is wanted, are well inside of the range of floats, whatever they are multiplied with: twelve digits either way.
- NEAR: the middle of the block for pairs within it, with the same limit, which gates of at least -7.5 stay within.
- FAR: at level s the block falls into pairs of parts of s steps, and a step i of the second part sees a step j of the first
  one through the boundary between them. Each pair i > j of the block meets at exactly one of the levels 8, 4, 2, 1, with
  every exponent at most 0.

Blocks of the last two kinds see sooner blocks of the chunk through a boundary between the two. All blocks of a chunk are
WHOLE, or none is. Kernels here are for chunks that are, those of blocks.py for the others; programs find nothing to do for
chunks of another kind.

Sums over a row stand in loops of their own: see `gates.inverse_norm`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.kda.kernels.gates import BLOCK, WHOLE
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import beta_of, exp32
from fla.ops.recurrence.kernels.solve import unit_lower_inverse


@triton.jit
def from_middle(G_tile, G_ptr, cols, in_cols, inside, count, HV: tl.constexpr, K: tl.constexpr):
    """G_t - G_r for r in the middle of the chunk."""
    at = tl.load(G_ptr + (count // 2).to(tl.int64) * HV * K + cols, mask=in_cols, other=0.0)
    return tl.where(inside, (G_tile - at[None, :]).to(tl.float32), 0.0)


@triton.jit
def middle_scores(Q, keys, away, for_q, for_k, PRECISION: tl.constexpr):
    """The scores of q and of k against k, with those of some channels added, through steps that they are `away` from. Only
    those below the diagonal, between steps that share such a step, are any use: others may be infinite, or NaN."""
    later = exp32(away)
    sooner = keys.to(tl.float32) * exp32(-away)
    high = sooner.to(keys.dtype)
    queries = (Q.to(tl.float32) * later).to(Q.dtype)
    for_k += tl.dot((keys.to(tl.float32) * later).to(keys.dtype), tl.trans(high), input_precision=PRECISION)
    for_q += tl.dot(queries, tl.trans(high), input_precision=PRECISION)
    if Q.dtype != tl.float32:
        # what rounding takes from these is most of the error in the gradient of beta, and much of that in o
        low = (sooner - high.to(tl.float32)).to(Q.dtype)
        for_q += tl.dot(queries, tl.trans(low), input_precision=PRECISION)
    return for_q, for_k


@triton.jit
def rows(q_ptr, q_t, k_ptr, k_t, time, inside, K: tl.constexpr, BK: tl.constexpr, NORMALISE: tl.constexpr):
    """q k of each step with itself, and 1 / norm of q and of k."""
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
    """kg = e^{G_C - G} k and qg = scale e^G q, as the recurrence reads them, and in w's place what w is made of: e^G k."""
    grown = exp32(Gc)
    keys, Q = keys.to(tl.float32), Q.to(tl.float32)
    tl.store(kg_ptr + at, (keys * exp32(G_last[None, :] - Gc) * k_norm[:, None]).to(kg_ptr.dtype.element_ty), mask=mask)
    tl.store(qg_ptr + at, (Q * grown * q_factor[:, None]).to(qg_ptr.dtype.element_ty), mask=mask)
    tl.store(w_ptr + at, (keys * grown).to(w_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_scores(
    for_q,
    for_k,
    diagonal,
    q_factor,
    k_norm,
    steps,
    inside,
    attend,
    selves,
    lower,
    token,
    HV: tl.constexpr,
    SIZE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Of what two products gave, the parts below the diagonal: the rest may be anything, infinite too. The diagonal of q's
    stands apart: it is most of the outputs, and rounding it would change those more than all the rest does. Returns the
    lower scores of k, normalised."""
    i, j = steps[:, None], steps[None, :]
    at = (token + i.to(tl.int64) * HV) * SIZE + j
    M = tl.where(i > j, for_q * (q_factor[:, None] * k_norm[None, :]), 0.0)
    tl.store(attend + at, M.to(attend.dtype.element_ty), mask=inside[:, None])
    tl.store(selves + token + steps.to(tl.int64) * HV, diagonal * q_factor * k_norm, mask=inside)
    A = tl.where(i > j, for_k * (k_norm[:, None] * k_norm[None, :]), 0.0)
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
    """X = (I + beta A)^-1, u = X beta v, and w = X beta k from what `store_decayed` has left in its place. The diagonal of X
    beta is beta, most of u, which rounding would change more than all the rest does."""
    own = token + steps[:, None].to(tl.int64) * HV
    # half of a first call is compiling the kernels that contain this
    X = unit_lower_inverse(A * bt[:, None], PRECISION, ROLLED=True)
    if FULL:
        tl.store(inverse + own * SIZE + steps[None, :], X.to(inverse.dtype.element_ty), mask=inside[:, None])
    X *= bt[None, :]
    for_u = tl.where(steps[:, None] > steps[None, :], X, 0.0).to(u.dtype.element_ty)
    for i in range(0, V, BV):
        cols = i + tl.arange(0, BV)
        mask = inside[:, None] & (cols[None, :] < V)
        values = tl.load(v_ptr + steps[:, None].to(tl.int64) * v_t + cols[None, :], mask=mask, other=0.0)
        U = tl.dot(for_u, values, input_precision=PRECISION) + bt[:, None] * values.to(tl.float32)
        tl.store(u + own * V + cols[None, :], U.to(u.dtype.element_ty), mask=mask)
    # the keys have been written by other threads
    tl.debug_barrier()
    for_w = (X * k_norm[None, :]).to(w.dtype.element_ty)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        grown = tl.load(w + own * K + cols[None, :], mask=mask, other=0.0)
        W = tl.dot(for_w, grown, input_precision=PRECISION)
        # all of the tile has been read
        tl.debug_barrier()
        tl.store(w + own * K + cols[None, :], W.to(w.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=['T'])
def prepare(
    q,
    k,
    v,
    beta,
    G,
    kinds,
    attend,
    selves,
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
    """Grid (rows * HV,). Written, of chunks that are WHOLE, `[B, T, HV, ·]` and contiguous: w (K), u (V), kg (K),
    qg (K), and the scores scale q k of each step with those before it, `attend` (SIZE), and with itself, `selves` (float32).
    With FULL also the scores `lower` = tril(k k, -1) in float32 (SIZE), and the inverse (I + beta lower)^-1 (SIZE).
    G, kinds: of `decays`. BK_ROWS: channels that `rows`, which has no products, reads at once."""
    pid = tl.program_id(0)
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
    head, hv64 = (hv // (HV // H)).to(tl.int64), hv.to(tl.int64)
    q_ptr = q + batch64 * q_b + first64 * q_t + head * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + head * k_h
    v_ptr = v + batch64 * v_b + first64 * v_t + hv64 * v_h
    b_ptr = beta + batch64 * b_b + first64 * b_t + hv64 * b_h
    token = (batch64 * T + first64) * HV + hv
    own = steps[:, None].to(tl.int64) * HV
    time = steps[:, None].to(tl.int64)
    diagonal, q_norm, k_norm = rows(q_ptr, q_t, k_ptr, k_t, time, inside, K, BK_ROWS, NORMALISE)
    for_k = tl.zeros([SIZE, SIZE], tl.float32)
    for_q = tl.zeros([SIZE, SIZE], tl.float32)
    G_ptr = G + token * K
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        at = own * K + cols[None, :]
        Gc = tl.load(G_ptr + at, mask=mask, other=0.0)
        G_last = tl.load(G_ptr + (count - 1).to(tl.int64) * HV * K + cols, mask=cols < K, other=0.0)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0)
        Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0)
        away = from_middle(Gc, G_ptr, cols, cols < K, mask, count, HV, K)
        for_q, for_k = middle_scores(Q, keys, away, for_q, for_k, PRECISION)
        store_decayed(Q, keys, Gc, G_last, q_norm * scale, k_norm, at, mask, w + token * K, kg + token * K, qg + token * K)
    A = store_scores(
        for_q, for_k, diagonal, q_norm * scale, k_norm, steps, inside, attend, selves, lower, token, HV, SIZE, FULL
    )
    bt = tl.load(b_ptr + steps.to(tl.int64) * b_t, mask=inside, other=0.0)
    bt = tl.where(inside, beta_of(bt.to(tl.float32), SIGMOID, DOUBLE), 0.0)
    store_updates(A, bt, k_norm, v_ptr, v_t, steps, inside, inverse, w, u, token, HV, K, V, SIZE, BK, BV, FULL, PRECISION)


@triton.jit(do_not_specialize=['T'])
def outputs(
    qg,
    attend,
    selves,
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
    """Grid (rows * HV * ceil(V / BV),): o = qg S + M U', M made of `attend` and `selves`."""
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
    own = steps[:, None].to(tl.int64) * HV
    vc = vb * BV + tl.arange(0, BV)
    v_mask = inside[:, None] & (vc[None, :] < V)
    h_ptr = h + (row.to(tl.int64) * HV + hv) * K * V
    M = tl.load(attend + token * SIZE + own * SIZE + steps[None, :], mask=inside[:, None] & inside[None, :], other=0.0)
    update = tl.load(v_new + token * V + own * V + vc[None, :], mask=v_mask, other=0.0)
    itself = tl.load(selves + token + steps.to(tl.int64) * HV, mask=inside, other=0.0)
    acc = itself[:, None] * update.to(tl.float32)
    acc += tl.dot(M, update, input_precision=PRECISION)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        Q = tl.load(qg + token * K + own * K + cols[None, :], mask=inside[:, None] & (cols[None, :] < K), other=0.0)
        S = tl.load(h_ptr + cols[:, None] * V + vc[None, :], mask=(cols[:, None] < K) & (vc[None, :] < V), other=0.0)
        acc += tl.dot(Q, S, input_precision=PRECISION)
    tl.store(o + token * V + own * V + vc[None, :], acc.to(o.dtype.element_ty), mask=v_mask)
