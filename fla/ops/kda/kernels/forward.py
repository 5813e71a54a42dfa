# mypy: disable-error-code="assignment, unreachable, misc"
# Tuples grow in `decays`, which Python's types cannot follow.
"""Forward of chunked Kimi delta attention: what is parallel over chunks, each of which goes into its WY form.

With one decay per channel, the scores of a chunk, sum_c x_ic e^{G_ic - G_jc} k_jc for j < i, are a product only through a
step r between them, e^{G_i - G_r} e^{G_r - G_j}. How far apart the steps of a chunk are decides through which, its `kind`:

- WHOLE: the middle of the chunk for all i and j. While no step is further from it than e^60, both factors, and every term
  that is wanted, are well inside of the range of floats, whatever they are multiplied with: twelve digits either way.
- BLOCKS: the middle of each block of 16 steps for pairs within it, with the same limit, which gates of at least -5 stay well
  within; and for the others, with exponents of at most 0, the boundary between the halves of the chunk, or of a half.
- LEVELS: at level s a chunk falls into pairs of blocks of s steps, and a step i of the second block sees a step j of the
  first one through the boundary between them. Each pair i > j meets at exactly one of the six levels 32, 16, …, 1, so that
  six products give all scores, with every exponent at most 0.

Each kind has a kernel of its own, because the last takes all registers there are; its programs find nothing to do for
chunks of another kind.

Sums over a row stand in loops of their own: see `gates.inverse_norm`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.common.kernels.gates import beta_of, exp32, sigmoid, softplus
from fla.ops.common.kernels.layout import chunk_of
from fla.ops.common.kernels.solve import below, spread, unit_lower_inverse

WHOLE, BLOCKS, LEVELS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def gate_of(g, rate, bias, lower_bound, GATE: tl.constexpr, BOUNDED: tl.constexpr):
    """The log decay of a step: g itself, or the gate of raw values. At least -1000, because -inf - -inf is NaN."""
    if GATE:
        g += bias
        g = lower_bound * sigmoid(rate * g) if BOUNDED else -rate * softplus(g)
    return tl.where(g < -1000.0, -1000.0, g)


@triton.jit
def from_middle(G_tile, G_ptr, cols, in_cols, inside, count, HV: tl.constexpr, K: tl.constexpr):
    """G_t - G_r for r in the middle of the chunk."""
    at = tl.load(G_ptr + (count // 2).to(tl.int64) * HV * K + cols, mask=in_cols, other=0.0)
    return tl.where(inside, (G_tile - at[None, :]).to(tl.float32), 0.0)


@triton.jit
def decay_at(G_ptr, t, cols, in_cols, count, HV: tl.constexpr, K: tl.constexpr):
    """G of one step of the chunk, the last one if t is beyond."""
    return tl.load(G_ptr + tl.minimum(t, count - 1).to(tl.int64) * HV * K + cols, mask=in_cols, other=0.0)


@triton.jit
def of_block(x0, x1, x2, x3, block):
    """One of four rows for each step, by which block of 16 it is in."""
    first = tl.where((block == 0)[:, None], x0[None, :], x1[None, :])
    second = tl.where((block == 2)[:, None], x2[None, :], x3[None, :])
    return tl.where((block < 2)[:, None], first, second)


@triton.jit
def from_middles(G_tile, G_ptr, steps, cols, in_cols, inside, count, HV: tl.constexpr, K: tl.constexpr):
    """G_t - G_r for r in the middle of t's block of 16 steps."""
    at = of_block(
        decay_at(G_ptr, 8, cols, in_cols, count, HV, K),
        decay_at(G_ptr, 24, cols, in_cols, count, HV, K),
        decay_at(G_ptr, 40, cols, in_cols, count, HV, K),
        decay_at(G_ptr, 56, cols, in_cols, count, HV, K),
        steps // 16,
    )
    return tl.where(inside, (G_tile - at).to(tl.float32), 0.0)


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
def turned(x):
    """With the last two dimensions exchanged."""
    return tl.permute(x, (0, 2, 1))


@triton.jit
def corner_scores(
    q_ptr,
    q_t,
    k_ptr,
    k_t,
    G_ptr,
    cols,
    in_cols,
    count,
    for_q,
    for_k,
    HV: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The scores of the second blocks of pairs of blocks against the keys of the first, `[pairs, HALF, HALF]`, with those of
    some channels added: through the boundary between the two."""
    PAIRS: tl.constexpr = for_q.shape[0]
    HALF: tl.constexpr = for_q.shape[1]
    begin = tl.arange(0, PAIRS)[:, None, None] * (2 * HALF)
    sooner = begin + tl.arange(0, HALF)[None, :, None]
    later = sooner + HALF
    col = cols[None, None, :]
    here, there = (sooner < count) & in_cols[None, None, :], (later < count) & in_cols[None, None, :]
    # where there is no boundary, there is nothing behind it
    known = (begin + HALF < count) & in_cols[None, None, :]
    boundary = tl.load(G_ptr + (begin + HALF).to(tl.int64) * HV * K + col, mask=known, other=0.0)
    G_later = tl.load(G_ptr + later.to(tl.int64) * HV * K + col, mask=there, other=0.0)
    G_sooner = tl.load(G_ptr + sooner.to(tl.int64) * HV * K + col, mask=here, other=0.0)
    decay = exp32(-tl.abs(G_later - boundary))
    keys = tl.load(k_ptr + sooner.to(tl.int64) * k_t + col, mask=here, other=0.0)
    keys = turned((keys.to(tl.float32) * exp32(-tl.abs(boundary - G_sooner))).to(keys.dtype))
    Q = tl.load(q_ptr + later.to(tl.int64) * q_t + col, mask=there, other=0.0)
    rows = tl.load(k_ptr + later.to(tl.int64) * k_t + col, mask=there, other=0.0)
    for_k += tl.dot((rows.to(tl.float32) * decay).to(keys.dtype), keys, input_precision=PRECISION)
    for_q += tl.dot((Q.to(tl.float32) * decay).to(keys.dtype), keys, input_precision=PRECISION)
    return for_q, for_k


@triton.jit
def with_corners(scores, corners):
    """`[64, 64]` scores, those of second blocks against first ones replaced by `corners` `[pairs, HALF, HALF]`."""
    PAIRS: tl.constexpr = corners.shape[0]
    HALF: tl.constexpr = corners.shape[1]
    pair = tl.arange(0, PAIRS)[:, None, None]
    second = tl.arange(0, 2)[None, :, None]
    block = tl.arange(0, 2 * PAIRS)[None, None, :]
    place = ((second == 1) & (block == 2 * pair))[:, :, :, None, None]
    # by pair, block of the pair, block of columns
    spread = tl.where(place, corners[:, None, None, :, :], 0.0)
    spread = tl.permute(tl.reshape(spread, (2 * PAIRS, 2 * PAIRS, HALF, HALF)), (0, 2, 1, 3))
    steps = tl.arange(0, scores.shape[0])
    across = below(steps, HALF)
    return tl.where(across, tl.reshape(spread, scores.shape), scores)


@triton.jit
def level_decay(G_tile, G_ptr, steps, cols, inside, count, half, HV: tl.constexpr, K: tl.constexpr):
    """e^{-|G_t - G_r|}, r the boundary of t's pair of blocks: what carries t to r, from either side."""
    boundary = (steps // (2 * half)) * (2 * half) + half
    known = inside & (boundary[:, None] < count)
    at = tl.load(G_ptr + boundary[:, None].to(tl.int64) * HV * K + cols[None, :], mask=known, other=0.0)
    return exp32(-tl.abs(G_tile - at))


@triton.jit
def level_scores(
    Q,
    keys,
    G_tile,
    G_ptr,
    steps,
    cols,
    inside,
    count,
    half,
    for_q,
    for_k,
    HV: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The scores of q and of k against k, with those of one level added."""
    decay = level_decay(G_tile, G_ptr, steps, cols, inside, count, half, HV, K)
    meet = below(steps, half)
    ke = (keys.to(tl.float32) * decay).to(keys.dtype)
    qe = (Q.to(tl.float32) * decay).to(Q.dtype)
    for_k += tl.where(meet, tl.dot(ke, tl.trans(ke), input_precision=PRECISION), 0.0)
    for_q += tl.where(meet, tl.dot(qe, tl.trans(ke), input_precision=PRECISION), 0.0)
    return for_q, for_k


@triton.jit(do_not_specialize=['T'])
def decays(
    g,
    A_log,
    dt_bias,
    G,
    kinds,
    cu_seqlens,
    table,
    lower_bound,
    near,
    T,
    g_b,
    g_t,
    g_h,
    HV: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid (rows * HV,). Written: the running log decay G of each chunk, float32 or float64 `[B, T, HV, K]`, contiguous; and
    `kinds`, int32 `[rows, HV]`: WHOLE where in no channel a step is further than `near` from the middle of its chunk, BLOCKS
    where none is from that of its block of 16, else LEVELS; between LEAST and MOST, of which the former is WHOLE or the
    latter.

    Programs walk along time, a block at a time, with all channels of a head: a scan would take more instructions than
    everything else. A kernel of its own, because such a walk has no place between products."""
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    first = start + c * SIZE
    count = tl.minimum(end - first, SIZE)
    cols = tl.arange(0, BK)
    in_cols = cols < K
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    g_row = g + batch64 * g_b + first64 * g_t + hv.to(tl.int64) * g_h + cols
    G_row = G + ((batch64 * T + first64) * HV + hv) * K + cols
    rate = 1.0
    bias = tl.zeros([BK], tl.float32)
    if HAS_A:
        rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
    if HAS_BIAS:
        bias += tl.load(dt_bias + hv * K + cols, mask=in_cols, other=0.0).to(tl.float32)
    total = tl.zeros([BK], G.dtype.element_ty)
    middle = total
    highest = tl.full([BK], -float('inf'), G.dtype.element_ty)
    lowest = tl.full([BK], float('inf'), G.dtype.element_ty)
    in_blocks = tl.zeros([BK], G.dtype.element_ty)
    # G stays what it is after the last step
    for block in range(SIZE // 16):
        its_middle = total
        high = tl.full([BK], -float('inf'), G.dtype.element_ty)
        low = tl.full([BK], float('inf'), G.dtype.element_ty)
        loaded = ()
        for i in tl.static_range(16):
            mask = in_cols & (cols * 0 + block * 16 + i < count)
            loaded = loaded + (tl.load(g_row, mask=mask, other=0.0),)
            g_row += g_t
        for i in tl.static_range(16):
            mask = in_cols & (cols * 0 + block * 16 + i < count)
            gate = gate_of(loaded[i].to(tl.float32), rate, bias, lower_bound, GATE, BOUNDED)
            total += tl.where(mask, gate, 0.0).to(total.dtype)
            tl.store(G_row, total, mask=mask)
            G_row += HV * K
            if LEAST < MOST:
                high, low = tl.maximum(high, total), tl.minimum(low, total)
                middle = tl.where(block * 16 + i == count // 2, total, middle)
                if i == 8:
                    its_middle = total
        highest, lowest = tl.maximum(highest, high), tl.minimum(lowest, low)
        in_blocks = tl.maximum(in_blocks, tl.maximum(high - its_middle, its_middle - low))
    kind = MOST
    if LEAST < MOST:
        furthest = tl.max(tl.maximum(highest - middle, middle - lowest), 0)
        kind = tl.where(furthest <= near, LEAST, MOST)
        if LEAST + 1 < MOST:
            kind = tl.where((kind == MOST) & (tl.max(in_blocks, 0) <= near), LEAST + 1, kind)
    tl.store(kinds + pid, kind)


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
    KIND: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    FULL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV,). Written, of chunks of KIND, WHOLE or BLOCKS, `[B, T, HV, ·]` and contiguous: w (K), u (V), kg (K),
    qg (K), and the scores scale q k of each step with those before it, `attend` (SIZE), and with itself, `selves` (float32).
    With FULL also the scores `lower` = tril(k k, -1) in float32 (SIZE), and the inverse (I + beta lower)^-1 (SIZE).
    G, kinds: of `decays`. BK_ROWS: channels that `rows`, which has no products, reads at once."""
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(kinds + pid) != KIND:
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
    if KIND == BLOCKS:
        halves_k = tl.zeros([1, SIZE // 2, SIZE // 2], tl.float32)
        halves_q = tl.zeros([1, SIZE // 2, SIZE // 2], tl.float32)
        quarters_k = tl.zeros([2, SIZE // 4, SIZE // 4], tl.float32)
        quarters_q = tl.zeros([2, SIZE // 4, SIZE // 4], tl.float32)
        # in a loop of their own, for the registers
        for i in range(0, K, BK):
            cols = i + tl.arange(0, BK)
            halves_q, halves_k = corner_scores(
                q_ptr, q_t, k_ptr, k_t, G_ptr, cols, cols < K, count, halves_q, halves_k, HV, K, PRECISION
            )
            quarters_q, quarters_k = corner_scores(
                q_ptr, q_t, k_ptr, k_t, G_ptr, cols, cols < K, count, quarters_q, quarters_k, HV, K, PRECISION
            )
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        at = own * K + cols[None, :]
        Gc = tl.load(G_ptr + at, mask=mask, other=0.0)
        G_last = tl.load(G_ptr + (count - 1).to(tl.int64) * HV * K + cols, mask=cols < K, other=0.0)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0)
        Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0)
        if KIND == BLOCKS:
            away = from_middles(Gc, G_ptr, steps, cols, cols < K, mask, count, HV, K)
        else:
            away = from_middle(Gc, G_ptr, cols, cols < K, mask, count, HV, K)
        for_q, for_k = middle_scores(Q, keys, away, for_q, for_k, PRECISION)
        store_decayed(Q, keys, Gc, G_last, q_norm * scale, k_norm, at, mask, w + token * K, kg + token * K, qg + token * K)
    if KIND == BLOCKS:
        for_q = with_corners(with_corners(for_q, halves_q), quarters_q)
        for_k = with_corners(with_corners(for_k, halves_k), quarters_k)
    A = store_scores(
        for_q, for_k, diagonal, q_norm * scale, k_norm, steps, inside, attend, selves, lower, token, HV, SIZE, FULL
    )
    bt = tl.load(b_ptr + steps.to(tl.int64) * b_t, mask=inside, other=0.0)
    bt = tl.where(inside, beta_of(bt.to(tl.float32), SIGMOID, DOUBLE), 0.0)
    store_updates(A, bt, k_norm, v_ptr, v_t, steps, inside, inverse, w, u, token, HV, K, V, SIZE, BK, BV, FULL, PRECISION)


@triton.jit(do_not_specialize=['T'])
def prepare_by_levels(
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
    BV: tl.constexpr,
    NORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    FULL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (rows * HV,). What `prepare` writes, of chunks of the kind LEVELS."""
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(kinds + pid) != LEVELS:
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
    diagonal, q_norm, k_norm = rows(q_ptr, q_t, k_ptr, k_t, time, inside, K, BK, NORMALISE)
    for_k = tl.zeros([SIZE, SIZE], tl.float32)
    for_q = tl.zeros([SIZE, SIZE], tl.float32)
    G_ptr = G + token * K
    near_k = tl.zeros([4, 16, 16], tl.float32)
    near_q = tl.zeros([4, 16, 16], tl.float32)
    steps3 = tl.arange(0, 4)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        at = own * K + cols[None, :]
        Gc = tl.load(G_ptr + at, mask=mask, other=0.0)
        G_last = tl.load(G_ptr + (count - 1).to(tl.int64) * HV * K + cols, mask=cols < K, other=0.0)
        Q = tl.load(q_ptr + time * q_t + cols[None, :], mask=mask, other=0.0)
        keys = tl.load(k_ptr + time * k_t + cols[None, :], mask=mask, other=0.0)
        store_decayed(Q, keys, Gc, G_last, q_norm * scale, k_norm, at, mask, w + token * K, kg + token * K, qg + token * K)
        for level in range(2):
            for_q, for_k = level_scores(
                Q, keys, Gc, G_ptr, steps, cols, mask, count, 32 >> level, for_q, for_k, HV, K, PRECISION
            )
        in3 = (steps3 < count) & (cols[None, None, :] < K)
        at3 = steps3.to(tl.int64)
        Q3 = tl.load(q_ptr + at3 * q_t + cols[None, None, :], mask=in3, other=0.0)
        keys3 = tl.load(k_ptr + at3 * k_t + cols[None, None, :], mask=in3, other=0.0)
        G3 = tl.load(G_ptr + at3 * HV * K + cols[None, None, :], mask=in3, other=0.0)
        for level in range(4):
            near_q, near_k = near_scores(
                Q3, keys3, G3, G_ptr, steps3, cols, in3, count, 8 >> level, near_q, near_k, HV, K, PRECISION
            )
    for_q += spread(near_q)
    for_k += spread(near_k)
    A = store_scores(
        for_q, for_k, diagonal, q_norm * scale, k_norm, steps, inside, attend, selves, lower, token, HV, SIZE, FULL
    )
    bt = tl.load(b_ptr + steps.to(tl.int64) * b_t, mask=inside, other=0.0)
    bt = tl.where(inside, beta_of(bt.to(tl.float32), SIGMOID, DOUBLE), 0.0)
    store_updates(A, bt, k_norm, v_ptr, v_t, steps, inside, inverse, w, u, token, HV, K, V, SIZE, BK, BV, FULL, PRECISION)


@triton.jit
def near_scores(
    Q,
    keys,
    G_tile,
    G_ptr,
    steps,
    cols,
    inside,
    count,
    half,
    near_q,
    near_k,
    HV: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`level_scores` for levels below 16, on the four 16 x 16 blocks of the diagonal: `[4, 16, ·]` tiles."""
    boundary = (steps // (2 * half)) * (2 * half) + half
    known = inside & (boundary < count)
    at = tl.load(G_ptr + boundary.to(tl.int64) * HV * K + cols[None, None, :], mask=known, other=0.0)
    decay = exp32(-tl.abs(G_tile - at))
    t = tl.arange(0, 16)
    meet = below(t, half)[None, :, :]
    ke = (keys.to(tl.float32) * decay).to(keys.dtype)
    qe = (Q.to(tl.float32) * decay).to(Q.dtype)
    near_k += tl.where(meet, tl.dot(ke, turned(ke), input_precision=PRECISION), 0.0)
    near_q += tl.where(meet, tl.dot(qe, turned(ke), input_precision=PRECISION), 0.0)
    return near_q, near_k


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
