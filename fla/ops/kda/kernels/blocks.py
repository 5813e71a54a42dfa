"""Chunked Kimi delta attention where decays are too strong for a product of whole chunks: a program has a block of 16 steps.

Steps of a block see those of another one through a boundary between the two, and each other through its middle or at four
levels: see forward.py for the kinds of blocks, and backward.py for the gradients.

Decays are masked though nothing reads them outside: without that Triton computes them in the layouts of products, all of
them in each warp, and programs spill (1.2 KiB a thread in `scores`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.kda.kernels.backward import dot_of_parts
from fla.ops.kda.kernels.forward import middle_scores
from fla.ops.kda.kernels.gates import BLOCK, FAR, WHOLE
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import beta_of, exp32
from fla.ops.recurrence.kernels.solve import below, unit_lower_inverse


@triton.jit
def decay_at(G_ptr, t, cols, in_cols, count, HV: tl.constexpr, K: tl.constexpr):
    """G of one step of the chunk, the last one if t is beyond."""
    return tl.load(G_ptr + tl.minimum(t, count - 1).to(tl.int64) * HV * K + cols, mask=in_cols, other=0.0)


@triton.jit
def level_decay(Gc, G_ptr, t, half, cols, in_cols, count, HV: tl.constexpr, K: tl.constexpr):
    """e^{-|G_t - G_r|}, r the boundary of t's pair of parts: what carries t to r from either side. 0 without one."""
    boundary = (t // (2 * half)) * (2 * half) + half
    known = (boundary < count)[:, None]
    at_boundary = G_ptr + boundary[:, None].to(tl.int64) * HV * K + cols[None, :]
    G_boundary = tl.load(at_boundary, mask=known & in_cols[None, :], other=0.0)
    return tl.where(known, exp32(-tl.abs(Gc - G_boundary)), 0.0)


@triton.jit
def level_scores(Q, keys, Gc, G_ptr, t, cols, in_cols, count, HV: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """The scores of q and of k against k below the diagonal, at four levels."""
    for_q = tl.zeros([BLOCK, BLOCK], tl.float32)
    for_k = tl.zeros([BLOCK, BLOCK], tl.float32)
    for level in range(4):
        half = (BLOCK // 2) >> level
        decay = level_decay(Gc, G_ptr, t, half, cols, in_cols, count, HV, K)
        meet = below(tl.arange(0, BLOCK), half)
        ke, qe = (keys.to(tl.float32) * decay).to(keys.dtype), (Q.to(tl.float32) * decay).to(Q.dtype)
        for_k += tl.where(meet, tl.dot(ke, tl.trans(ke), input_precision=PRECISION), 0.0)
        for_q += tl.where(meet, tl.dot(qe, tl.trans(ke), input_precision=PRECISION), 0.0)
    return for_q, for_k


@triton.jit
def norm_of(x, NORMALISE: tl.constexpr):
    """1 / norm of the rows of x, or 1."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6) if NORMALISE else tl.full([x.shape[0]], 1.0, tl.float32)


@triton.jit
def block_of(pid, SIZE: tl.constexpr):
    """Which block of its chunk a program has, and the program that a kernel of chunks would be."""
    return pid % (SIZE // BLOCK), pid // (SIZE // BLOCK)


@triton.jit(do_not_specialize=['T'])
def scores(
    q,
    k,
    G,
    kinds,
    attend,
    selves,
    lower,
    grown,
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
    """Grid (rows * HV * SIZE / BLOCK,). Of chunks that are not WHOLE; a program has a block of them with all channels,
    BK >= K.

    Written, `[B, T, HV, ·]` and contiguous: what the recurrence reads, kg = e^{G_C - G} k and qg = scale e^G q (K), and what
    its w is made of, `grown` = e^G k (K); the scores scale q k of each step with those before it, `attend` (SIZE), which
    is 0 elsewhere, and with itself, `selves` (float32); and those of k with k before it, `lower` (float32, SIZE), 0
    elsewhere. q and k are normalised in all of them. G, kinds: of `decays`, and so are LEAST and MOST.
    """
    pid = tl.program_id(0)
    block, pid = block_of(pid, SIZE)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    kind = tl.load(kinds + pid.to(tl.int64) * (SIZE // BLOCK) + block) if LEAST < MOST else MOST
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
    within = tl.arange(0, BLOCK)
    t = begin + within
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
    tl.store(selves + token + t.to(tl.int64) * HV, tl.sum(wide_Q * wide_keys, 1) * q_norm * k_norm, mask=inside)

    # through the states before and after the chunk
    at = token * K + time * HV * K + cols[None, :]
    since, left = exp32(Gc), exp32(decay_at(G_ptr, count - 1, cols, in_cols, count, HV, K)[None, :] - Gc)
    tl.store(kg + at, (wide_keys * left * k_norm[:, None]).to(kg.dtype.element_ty), mask=mask)
    tl.store(qg + at, (wide_Q * since * q_norm[:, None]).to(qg.dtype.element_ty), mask=mask)
    tl.store(grown + at, (wide_keys * since * k_norm[:, None]).to(grown.dtype.element_ty), mask=mask)

    # with sooner blocks
    rows = (token + time * HV) * SIZE
    G_begin = decay_at(G_ptr, begin, cols, in_cols, count, HV, K)
    after = exp32(tl.where(mask, (Gc - G_begin[None, :]).to(tl.float32), 0.0))
    later_q, later_k = (wide_Q * after).to(Q.dtype), (wide_keys * after).to(keys.dtype)
    for j in tl.range(0, begin, BLOCK, num_stages=1):
        s = j + within
        known = (s < begin)[:, None] & in_cols[None, :]
        keys_s = tl.load(k_ptr + s[:, None].to(tl.int64) * k_t + cols[None, :], mask=known, other=0.0)
        G_s = tl.load(G_ptr + s[:, None].to(tl.int64) * HV * K + cols[None, :], mask=known, other=0.0)
        norm_s = norm_of(keys_s, NORMALISE)
        decay_s = exp32(tl.where(known, (G_begin[None, :] - G_s).to(tl.float32), 0.0))
        sooner_k = tl.trans((keys_s.to(tl.float32) * decay_s).to(keys.dtype))
        there = inside[:, None] & (s < begin)[None, :]
        scores_q = tl.dot(later_q, sooner_k, input_precision=PRECISION) * (q_norm[:, None] * norm_s[None, :])
        tl.store(attend + rows + s[None, :], scores_q.to(attend.dtype.element_ty), mask=there)
        scores_k = tl.dot(later_k, sooner_k, input_precision=PRECISION) * (k_norm[:, None] * norm_s[None, :])
        tl.store(lower + rows + s[None, :], scores_k, mask=there)
    nothing = tl.zeros([BLOCK, BLOCK], tl.float32)
    for j in tl.range(begin + BLOCK, SIZE, BLOCK, num_stages=1):
        tl.store(attend + rows + j + within[None, :], nothing.to(attend.dtype.element_ty), mask=inside[:, None])
        tl.store(lower + rows + j + within[None, :], nothing, mask=inside[:, None])

    # among its own
    if far:
        for_q, for_k = level_scores(Q, keys, Gc, G_ptr, t, cols, in_cols, count, HV, K, PRECISION)
    else:
        G_middle = decay_at(G_ptr, begin + BLOCK // 2, cols, in_cols, count, HV, K)
        away = tl.where(mask, (Gc - G_middle[None, :]).to(tl.float32), 0.0)
        for_q, for_k = middle_scores(Q, keys, away, nothing, nothing, PRECISION)
    strict = within[:, None] > within[None, :]
    for_q = tl.where(strict, for_q * (q_norm[:, None] * k_norm[None, :]), 0.0)
    for_k = tl.where(strict, for_k * (k_norm[:, None] * k_norm[None, :]), 0.0)
    tl.store(attend + rows + t[None, :], for_q.to(attend.dtype.element_ty), mask=inside[:, None])
    tl.store(lower + rows + t[None, :], for_k, mask=inside[:, None])


@triton.jit(do_not_specialize=['T'])
def updates(
    v,
    beta,
    kinds,
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
    """Grid (rows * HV,). Of chunks that are not WHOLE, with X = (I + beta lower)^-1 for `lower` of `scores`: u = X beta v
    and w = X beta `grown`, which is in w's place; `[B, T, HV, ·]`, contiguous. u may be the memory of `lower` if a step has
    as many bytes of either. With FULL the inverse is written as well (SIZE). The diagonal of X beta is beta, most of u,
    which rounding would change more than all the rest does."""
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(kinds + pid.to(tl.int64) * (SIZE // BLOCK)) == WHOLE:
        return
    first = start + c * SIZE
    steps = tl.arange(0, SIZE)
    inside = first + steps < end
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    hv64 = hv.to(tl.int64)
    v_ptr = v + batch64 * v_b + first64 * v_t + hv64 * v_h
    b_ptr = beta + batch64 * b_b + first64 * b_t + hv64 * b_h
    own = (batch64 * T + first64) * HV + hv + steps[:, None].to(tl.int64) * HV
    bt = tl.load(b_ptr + steps.to(tl.int64) * b_t, mask=inside, other=0.0)
    bt = tl.where(inside, beta_of(bt.to(tl.float32), SIGMOID, DOUBLE), 0.0)
    before = steps[:, None] > steps[None, :]
    A = tl.load(lower + own * SIZE + steps[None, :], mask=inside[:, None] & before, other=0.0)
    X = unit_lower_inverse(A * bt[:, None], PRECISION, ROLLED=True)
    if FULL:
        tl.store(inverse + own * SIZE + steps[None, :], X.to(inverse.dtype.element_ty), mask=inside[:, None])
    X *= bt[None, :]
    # `lower` was read by other threads
    tl.debug_barrier()
    for_u = tl.where(before, X, 0.0).to(u.dtype.element_ty)
    for i in tl.range(0, V, BV, num_stages=1):
        cols = i + tl.arange(0, BV)
        mask = inside[:, None] & (cols[None, :] < V)
        values = tl.load(v_ptr + steps[:, None].to(tl.int64) * v_t + cols[None, :], mask=mask, other=0.0)
        U = tl.dot(for_u, values, input_precision=PRECISION) + bt[:, None] * values.to(tl.float32)
        tl.store(u + own * V + cols[None, :], U.to(u.dtype.element_ty), mask=mask)
    for_w = X.to(w.dtype.element_ty)
    for i in tl.range(0, K, BK, num_stages=1):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        keys = tl.load(w + own * K + cols[None, :], mask=mask, other=0.0)
        W = tl.dot(for_w, keys, input_precision=PRECISION)
        # all of the tile has been read
        tl.debug_barrier()
        tl.store(w + own * K + cols[None, :], W.to(w.dtype.element_ty), mask=mask)


@triton.jit
def product_with_state(
    x_ptr, state_ptr, own, cols, inside, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr
):
    """x S^T of some channels, x `[SIZE, V]`."""
    product = tl.zeros([inside.shape[0], cols.shape[0]], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        x = tl.load(x_ptr + own * V + vc[None, :], mask=inside[:, None] & (vc[None, :] < V), other=0.0)
        s_mask = (cols[:, None] < K) & (vc[None, :] < V)
        S = tl.load(state_ptr + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0)
        product += tl.dot(x, tl.trans(S), input_precision=PRECISION)
    return product


@triton.jit(do_not_specialize=['T'])
def products_with_states(
    G,
    v_new,
    h,
    do,
    dh,
    kinds,
    dqg,
    dkg,
    kept,
    cu_seqlens,
    table,
    scale,
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
    """Grid (rows * HV * ceil(K / BK),). Of chunks that are not WHOLE.

    Args:
        G, v_new, h: of the forward. do, dh: gradients of o and of the state after each chunk. All contiguous.
        dqg, dkg: written, the gradients of scale e^G q, times scale, and of e^{G_C - G} k, `[B, T, HV, K]`.
        kept: written, what the decay of the whole chunk gives the log decay of its last step, float32 `[rows, HV, K]`.
    """
    kb, pid = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(kinds + pid.to(tl.int64) * (SIZE // BLOCK)) == WHOLE:
        return
    first = start + c * SIZE
    count = tl.minimum(end - first, SIZE)
    steps = tl.arange(0, SIZE)
    inside = steps < count
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    token = (batch64 * T + first64) * HV + hv
    own = steps[:, None].to(tl.int64) * HV
    cols = kb * BK + tl.arange(0, BK)
    mask = inside[:, None] & (cols[None, :] < K)
    at = token * K + own * K + cols[None, :]
    state_at = (row.to(tl.int64) * HV + hv) * K * V
    product = product_with_state(do + token * V, h + state_at, own, cols, inside, K, V, BV, PRECISION)
    tl.store(dqg + at, (product * scale).to(dqg.dtype.element_ty), mask=mask)
    product = product_with_state(v_new + token * V, dh + state_at, own, cols, inside, K, V, BV, PRECISION)
    tl.store(dkg + at, product.to(dkg.dtype.element_ty), mask=mask)
    # a loop of its own: see `inverse_norm`
    total = tl.zeros([BK], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        s_mask = (cols[:, None] < K) & (vc[None, :] < V)
        S = tl.load(h + state_at + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0).to(tl.float32)
        dS = tl.load(dh + state_at + cols[:, None] * V + vc[None, :], mask=s_mask, other=0.0).to(tl.float32)
        total += tl.sum(S * dS, 1)
    G_last = tl.load(G + token * K + (count - 1).to(tl.int64) * HV * K + cols, mask=cols < K, other=0.0)
    tl.store(kept + (row.to(tl.int64) * HV + hv) * K + cols, total * exp32(G_last), mask=cols < K)


@triton.jit
def dot_of_both(x, rest, y, PRECISION: tl.constexpr):
    """(x + rest) y, x and rest what 16 bits hold of a float32 and of what that leaves."""
    product = dot_of_parts(x, y, PRECISION)
    if x.dtype != tl.float32:
        product = tl.dot(rest, y.to(rest.dtype), product, input_precision=PRECISION)
    return product


@triton.jit
def middle_gradients(dM, rest, dA, unit_Q, unit_keys, away, PRECISION: tl.constexpr):
    """Gradients of q, k and G by pairs of steps of a block, through a step that they are `away` from. dM and rest, dA: of
    the scores of q and k, 0 but below the diagonal."""
    later, sooner = exp32(away), exp32(-away)
    x_q, x_k, y = unit_Q * later, unit_keys * later, unit_keys * sooner
    dx_q, dx_k = dot_of_both(dM, rest, y, PRECISION), dot_of_parts(dA, y, PRECISION)
    dy = dot_of_both(tl.trans(dM), tl.trans(rest), x_q, PRECISION) + dot_of_parts(tl.trans(dA), x_k, PRECISION)
    return dx_q * later, dx_k * later + dy * sooner, x_q * dx_q + x_k * dx_k - y * dy


@triton.jit
def level_gradients(
    dM,
    rest,
    dA,
    unit_Q,
    unit_keys,
    Gc,
    G_ptr,
    t,
    cols,
    in_cols,
    count,
    HV: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `middle_gradients`, at four levels."""
    d_query = tl.zeros(unit_Q.shape, tl.float32)
    d_key = tl.zeros(unit_Q.shape, tl.float32)
    dG = tl.zeros(unit_Q.shape, tl.float32)
    for level in range(4):
        half = (BLOCK // 2) >> level
        decay = level_decay(Gc, G_ptr, t, half, cols, in_cols, count, HV, K)
        meet = below(tl.arange(0, BLOCK), half)
        dM_here, dA_here = tl.where(meet, dM, 0.0).to(dM.dtype), tl.where(meet, dA, 0.0).to(dA.dtype)
        rest_here = tl.where(meet, rest, 0.0).to(rest.dtype)
        x, y = unit_Q * decay, unit_keys * decay
        dx, dy_later = dot_of_both(dM_here, rest_here, y, PRECISION), dot_of_parts(dA_here, y, PRECISION)
        dy = dot_of_both(tl.trans(dM_here), tl.trans(rest_here), x, PRECISION) + dot_of_parts(
            tl.trans(dA_here), y, PRECISION
        )
        d_query += dx * decay
        d_key += (dy_later + dy) * decay
        dG += x * dx + y * (dy_later - dy)
    return d_query, d_key, dG


@triton.jit
def unit_rows(x_ptr, x_t, norms, token, t, inside, cols, in_cols, HV: tl.constexpr, NORMALISE: tl.constexpr):
    """Rows of q or k in float32, with NORMALISE of length 1."""
    mask = inside[:, None] & in_cols[None, :]
    x = tl.load(x_ptr + t[:, None].to(tl.int64) * x_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMALISE:
        x *= tl.load(norms + token + t.to(tl.int64) * HV, mask=inside, other=0.0)[:, None]
    return x


@triton.jit(do_not_specialize=['T'])
def blocks_backward(
    q,
    k,
    G,
    kinds,
    d_attend,
    d_selves,
    d_lower,
    d_grown,
    dqg,
    dkg,
    rq,
    rk,
    dq,
    dk,
    dG,
    carried,
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
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    NORMALISE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV * SIZE / BLOCK * ceil(K / BK),). Of chunks that are not WHOLE; a program has a block of them.

    Args:
        kinds: of `decays`, and so are LEAST and MOST.
        d_attend, d_selves, d_lower, d_grown: of `pairs_backward`. dqg, dkg: of `products_with_states`.
        dq, dk: written, of q and k per value head and, with NORMALISE, as normalised, `[B, T, HV, K]`. May be dqg and dkg.
        dG: written, of the log decay, float32 `[B, T, HV, K]`.
        carried: written, what the steps of each block give the log decay of the last of the chunk, float32
            `[rows, HV, SIZE / BLOCK, K]`.
    """
    kb, pid = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    block, pid = block_of(pid, SIZE)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    kind = tl.load(kinds + pid.to(tl.int64) * (SIZE // BLOCK) + block) if LEAST < MOST else MOST
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
    within = tl.arange(0, BLOCK)
    t = begin + within
    inside = t < count
    cols = kb * BK + tl.arange(0, BK)
    in_cols = cols < K
    mask = inside[:, None] & in_cols[None, :]
    own = t.to(tl.int64) * HV
    at = token * K + own[:, None] * K + cols[None, :]
    square = (token + own[:, None]) * SIZE
    PARTS: tl.constexpr = 1 if d_attend.dtype.element_ty == tl.float32 else 2
    in_parts = square * PARTS

    unit_Q = unit_rows(q_ptr, q_t, rq, token, t, inside, cols, in_cols, HV, NORMALISE)
    unit_keys = unit_rows(k_ptr, k_t, rk, token, t, inside, cols, in_cols, HV, NORMALISE)
    Gc = tl.load(G + at, mask=mask, other=0.0)

    # with steps before the block, of which it has the queries; k itself is one too
    G_begin = decay_at(G_ptr, begin, cols, in_cols, count, HV, K)
    after = exp32(tl.where(mask, (Gc - G_begin[None, :]).to(tl.float32), 0.0))
    d_query = tl.zeros([BLOCK, BK], tl.float32)
    d_key = tl.zeros([BLOCK, BK], tl.float32)
    for j in tl.range(0, begin, BLOCK, num_stages=1):
        s = j + within
        dM = tl.load(d_attend + in_parts + s[None, :], mask=inside[:, None], other=0.0)
        dA = tl.load(d_lower + square + s[None, :], mask=inside[:, None], other=0.0)
        keys_s = unit_rows(k_ptr, k_t, rk, token, s, s < begin, cols, in_cols, HV, NORMALISE)
        known = (s < begin)[:, None] & in_cols[None, :]
        G_s = tl.load(G_ptr + s[:, None].to(tl.int64) * HV * K + cols[None, :], mask=known, other=0.0)
        G_next = decay_at(G_ptr, j + BLOCK, cols, in_cols, count, HV, K)
        y = (keys_s * exp32(tl.where(known, (G_next[None, :] - G_s).to(tl.float32), 0.0))).to(dM.dtype)
        between = exp32(G_begin - G_next)[None, :]
        d_query += tl.dot(dM, y, input_precision=PRECISION) * between
        d_key += tl.dot(dA, y, input_precision=PRECISION) * between
    # of the same rounded factors as what the other step gets, so that outside of the two they cancel
    narrow: tl.constexpr = d_attend.dtype.element_ty
    d_gate = (unit_Q * after).to(narrow).to(tl.float32) * d_query + (unit_keys * after).to(narrow).to(tl.float32) * d_key
    d_query *= after
    d_key *= after

    # with steps behind it, of which it has the keys
    G_next = decay_at(G_ptr, begin + BLOCK, cols, in_cols, count, HV, K)
    before = exp32(tl.where(mask, (G_next[None, :] - Gc).to(tl.float32), 0.0))
    from_later = tl.zeros([BLOCK, BK], tl.float32)
    for j in tl.range(begin + BLOCK, count, BLOCK, num_stages=1):
        s = j + within
        there = inside[:, None] & (s < count)[None, :]
        dM = tl.load(d_attend + in_parts + s[None, :], mask=there, other=0.0)
        dA = tl.load(d_lower + square + s[None, :], mask=there, other=0.0)
        known = (s < count)[:, None] & in_cols[None, :]
        G_s = tl.load(G_ptr + s[:, None].to(tl.int64) * HV * K + cols[None, :], mask=known, other=0.0)
        G_j = decay_at(G_ptr, j, cols, in_cols, count, HV, K)
        carry = exp32(tl.where(known, (G_s - G_j[None, :]).to(tl.float32), 0.0))
        x = (unit_rows(q_ptr, q_t, rq, token, s, s < count, cols, in_cols, HV, NORMALISE) * carry).to(dM.dtype)
        product = tl.dot(dM, x, input_precision=PRECISION)
        x = (unit_rows(k_ptr, k_t, rk, token, s, s < count, cols, in_cols, HV, NORMALISE) * carry).to(dM.dtype)
        product = tl.dot(dA, x, product, input_precision=PRECISION)
        from_later += product * exp32(G_j - G_next)[None, :]
    d_gate -= (unit_keys * before).to(narrow).to(tl.float32) * from_later
    d_key += from_later * before

    # among its own
    strict = inside[:, None] & (within[:, None] > within[None, :])
    dM = tl.load(d_attend + in_parts + t[None, :], mask=strict, other=0.0)
    rest = dM
    if PARTS == 2:
        rest = tl.load(d_attend + in_parts + SIZE + t[None, :], mask=strict, other=0.0)
    dA = tl.load(d_lower + square + t[None, :], mask=strict, other=0.0)
    if far:
        to_query, to_key, to_gate = level_gradients(
            dM, rest, dA, unit_Q, unit_keys, Gc, G_ptr, t, cols, in_cols, count, HV, K, PRECISION
        )
    else:
        G_middle = decay_at(G_ptr, begin + BLOCK // 2, cols, in_cols, count, HV, K)
        away = tl.where(mask, (Gc - G_middle[None, :]).to(tl.float32), 0.0)
        to_query, to_key, to_gate = middle_gradients(dM, rest, dA, unit_Q, unit_keys, away, PRECISION)
    d_query += to_query
    d_key += to_key
    d_gate += to_gate

    # through the states before and after the chunk
    since = exp32(Gc)
    to_query = tl.load(dqg + at, mask=mask, other=0.0).to(tl.float32) * since
    to_key = tl.load(d_grown + at, mask=mask, other=0.0).to(tl.float32) * since
    left = exp32(decay_at(G_ptr, count - 1, cols, in_cols, count, HV, K)[None, :] - Gc)
    left *= tl.load(dkg + at, mask=mask, other=0.0).to(tl.float32)
    # the keys that the next state takes carry e^{G_C - G}, of the last step 1 whatever G is
    to_last = tl.where((t < count - 1)[:, None], unit_keys * left, 0.0)
    tl.store(carried + ((row.to(tl.int64) * HV + hv) * (SIZE // BLOCK) + block) * K + cols, tl.sum(to_last, 0), mask=in_cols)
    tl.store(dG + at, d_gate + unit_Q * to_query + unit_keys * to_key - to_last, mask=mask)
    itself = tl.load(d_selves + token + own, mask=inside, other=0.0)[:, None]
    d_query += to_query + itself * unit_keys
    d_key += to_key + left + itself * unit_Q
    # all of the tiles have been read
    tl.debug_barrier()
    tl.store(dq + at, d_query.to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + at, d_key.to(dk.dtype.element_ty), mask=mask)
