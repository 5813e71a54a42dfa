"""Backward of chunked Kimi delta attention in chunks whose decays are too strong for products of whole chunks.

A program of `blocks_backward` has a block of 16 steps. See forward.py for the kinds of blocks, backward.py for the
gradients, and blocks_forward.py for why decays are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.kda.kernels.backward import dot_split, state_dot
from fla.ops.kda.kernels.blocks_forward import block_of, decay_at, level_decay
from fla.ops.kda.kernels.gates import BLOCK, FAR, WHOLE
from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import exp32
from fla.ops.recurrence.kernels.solve import pair_mask


@triton.jit
def product_with_state(
    x_ptr, state_ptr, step_row, cols, inside, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr
):
    """Returns x S^T for some channels of the state S `[K, V]`, with x `[SIZE, V]`."""
    product = tl.zeros([inside.shape[0], cols.shape[0]], tl.float32)
    for j in range(0, V, BV):
        vc = j + tl.arange(0, BV)
        x = tl.load(x_ptr + step_row * V + vc[None, :], mask=inside[:, None] & (vc[None, :] < V), other=0.0)
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
    block_kind,
    d_q_start,
    d_k_end,
    dG_chunk,
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
    """Grid (rows * HV * ceil(K / BK),). Multiplies with the states, in chunks that are not WHOLE.

    Tensors are contiguous, and in k's dtype unless a dtype is given.

    Args:
        G: running log decay, float32 or float64 `[B, T, HV, K]`. block_kind: of `decays`.
        v_new, do: U' and the gradient of o, `[B, T, HV, V]`.
        h, dh: state before and gradient of the state after each chunk, `[rows, HV, K, V]`.
        d_q_start, d_k_end: written, gradients of scale e^G q, times scale, and of e^{G_C - G} k, `[B, T, HV, K]`.
        dG_chunk: written, the term of the chunk's whole decay in dG of the chunk's last step, float32 `[rows, HV, K]`.
    """
    kb, pid = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    if tl.load(block_kind + pid.to(tl.int64) * (SIZE // BLOCK)) == WHOLE:
        return
    first = start + c * SIZE
    count = tl.minimum(end - first, SIZE)
    steps = tl.arange(0, SIZE)
    inside = steps < count
    batch64, first64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64)
    token = (batch64 * T + first64) * HV + hv
    step_row = steps[:, None].to(tl.int64) * HV
    cols = kb * BK + tl.arange(0, BK)
    mask = inside[:, None] & (cols[None, :] < K)
    at = token * K + step_row * K + cols[None, :]
    state_at = (row.to(tl.int64) * HV + hv) * K * V
    product = product_with_state(do + token * V, h + state_at, step_row, cols, inside, K, V, BV, PRECISION)
    tl.store(d_q_start + at, (product * scale).to(d_q_start.dtype.element_ty), mask=mask)
    product = product_with_state(v_new + token * V, dh + state_at, step_row, cols, inside, K, V, BV, PRECISION)
    tl.store(d_k_end + at, product.to(d_k_end.dtype.element_ty), mask=mask)
    total = state_dot(h + state_at, dh + state_at, cols, K, V, BV)
    G_last = tl.load(G + token * K + (count - 1).to(tl.int64) * HV * K + cols, mask=cols < K, other=0.0)
    tl.store(dG_chunk + (row.to(tl.int64) * HV + hv) * K + cols, total * exp32(G_last), mask=cols < K)


@triton.jit
def dot_split_both(x, low, y, PRECISION: tl.constexpr):
    """Returns x y for a float32 x, or (x + low) y for the 16-bit rounded value x and remainder low of a float32."""
    product = dot_split(x, y, PRECISION)
    if x.dtype != tl.float32:
        product = tl.dot(low, y.to(low.dtype), product, input_precision=PRECISION)
    return product


@triton.jit
def middle_gradients(dM, low, dA, unit_Q, unit_keys, G_rel, PRECISION: tl.constexpr):
    """Returns the gradients of q, k and G from pairs of steps of a block, given G_rel, G relative to a reference step.

    dM, low and dA are the gradients of the scores of q (value and remainder) and of k, 0 on and above the diagonal."""
    later, earlier = exp32(G_rel), exp32(-G_rel)
    x_q, x_k, y = unit_Q * later, unit_keys * later, unit_keys * earlier
    dq_tile, dk_tile = dot_split_both(dM, low, y, PRECISION), dot_split(dA, y, PRECISION)
    dy = dot_split_both(tl.trans(dM), tl.trans(low), x_q, PRECISION) + dot_split(tl.trans(dA), x_k, PRECISION)
    return dq_tile * later, dk_tile * later + dy * earlier, x_q * dq_tile + x_k * dk_tile - y * dy


@triton.jit
def level_gradients(
    dM,
    low,
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
    """Returns what `middle_gradients` returns, at four levels (FAR)."""
    d_query = tl.zeros(unit_Q.shape, tl.float32)
    d_key = tl.zeros(unit_Q.shape, tl.float32)
    dG = tl.zeros(unit_Q.shape, tl.float32)
    for level in range(4):
        half = (BLOCK // 2) >> level
        decay = level_decay(Gc, G_ptr, t, half, cols, in_cols, count, HV, K)
        pairs = pair_mask(tl.arange(0, BLOCK), half)
        dM_pairs, dA_pairs = tl.where(pairs, dM, 0.0).to(dM.dtype), tl.where(pairs, dA, 0.0).to(dA.dtype)
        low_pairs = tl.where(pairs, low, 0.0).to(low.dtype)
        x, y = unit_Q * decay, unit_keys * decay
        dx, dy_later = dot_split_both(dM_pairs, low_pairs, y, PRECISION), dot_split(dA_pairs, y, PRECISION)
        dy = dot_split_both(tl.trans(dM_pairs), tl.trans(low_pairs), x, PRECISION) + dot_split(
            tl.trans(dA_pairs), y, PRECISION
        )
        d_query += dx * decay
        d_key += (dy_later + dy) * decay
        dG += x * dx + y * (dy_later - dy)
    return d_query, d_key, dG


@triton.jit
def unit_rows(x_ptr, x_t, norms, token, t, inside, cols, in_cols, HV: tl.constexpr, NORMALISE: tl.constexpr):
    """Returns rows of q or k in float32, with NORMALISE divided by their norms."""
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
    block_kind,
    d_attend,
    d_diag_scores,
    d_lower,
    d_k_start,
    d_q_start,
    d_k_end,
    rq,
    rk,
    dq,
    dk,
    dG,
    dG_last_parts,
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
    """Grid (rows * HV * SIZE / BLOCK * ceil(K / BK),). Computes the gradients of q, k and G in chunks that are not WHOLE.

    A program has a block of steps and BK channels.

    Args:
        q, k: `[B, T, H, K]` by strides, the last 1.
        G: running log decay, float32 or float64 `[B, T, HV, K]`, and block_kind: int32 `[rows, HV, SIZE / BLOCK]`; of
            `decays`, and so are LEAST and MOST.
        d_attend, d_diag_scores, d_lower, d_k_start: of `pairs_backward`. d_q_start, d_k_end: of `products_with_states`.
        rq, rk: 1 / norm of q and k, float32 `[B, T, HV]`, read with NORMALISE.
        dq, dk: written, gradients of q and k for each value head, with NORMALISE of the normalised rows, `[B, T, HV, K]`.
            May be the memory of d_q_start and d_k_end.
        dG: written, gradient of G, float32 `[B, T, HV, K]`, without the terms of `dG_chunk` and `dG_last_parts`.
        dG_last_parts: written, the terms of each block in dG of the chunk's last step, float32 `[rows, HV, SIZE / BLOCK,
            K]`.
    """
    kb, pid = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK)
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
    cols = kb * BK + tl.arange(0, BK)
    in_cols = cols < K
    mask = inside[:, None] & in_cols[None, :]
    step_row = t.to(tl.int64) * HV
    at = token * K + step_row[:, None] * K + cols[None, :]
    square = (token + step_row[:, None]) * SIZE
    PARTS: tl.constexpr = 1 if d_attend.dtype.element_ty == tl.float32 else 2
    parts_at = square * PARTS

    unit_Q = unit_rows(q_ptr, q_t, rq, token, t, inside, cols, in_cols, HV, NORMALISE)
    unit_keys = unit_rows(k_ptr, k_t, rk, token, t, inside, cols, in_cols, HV, NORMALISE)
    Gc = tl.load(G + at, mask=mask, other=0.0)

    # Pairs with steps of earlier blocks: this block has their queries, which for the scores of k are keys.
    G_begin = decay_at(G_ptr, begin, cols, in_cols, count, HV, K)
    from_begin = exp32(tl.where(mask, (Gc - G_begin[None, :]).to(tl.float32), 0.0))
    d_query = tl.zeros([BLOCK, BK], tl.float32)
    d_key = tl.zeros([BLOCK, BK], tl.float32)
    for j in tl.range(0, begin, BLOCK, num_stages=1):
        s = j + block_steps
        dM = tl.load(d_attend + parts_at + s[None, :], mask=inside[:, None], other=0.0)
        dA = tl.load(d_lower + square + s[None, :], mask=inside[:, None], other=0.0)
        keys_s = unit_rows(k_ptr, k_t, rk, token, s, s < begin, cols, in_cols, HV, NORMALISE)
        valid = (s < begin)[:, None] & in_cols[None, :]
        G_s = tl.load(G_ptr + s[:, None].to(tl.int64) * HV * K + cols[None, :], mask=valid, other=0.0)
        G_next = decay_at(G_ptr, j + BLOCK, cols, in_cols, count, HV, K)
        y = (keys_s * exp32(tl.where(valid, (G_next[None, :] - G_s).to(tl.float32), 0.0))).to(dM.dtype)
        between = exp32(G_begin - G_next)[None, :]
        d_query += tl.dot(dM, y, input_precision=PRECISION) * between
        d_key += tl.dot(dA, y, input_precision=PRECISION) * between
    # The factors are rounded as for the other step, so that the terms of both cancel in sums over steps outside the pair.
    dtype: tl.constexpr = d_attend.dtype.element_ty
    dG_tile = (unit_Q * from_begin).to(dtype).to(tl.float32) * d_query
    dG_tile += (unit_keys * from_begin).to(dtype).to(tl.float32) * d_key
    d_query *= from_begin
    d_key *= from_begin

    # Pairs with steps of later blocks: this block has their keys.
    G_next = decay_at(G_ptr, begin + BLOCK, cols, in_cols, count, HV, K)
    to_next = exp32(tl.where(mask, (G_next[None, :] - Gc).to(tl.float32), 0.0))
    dk_later = tl.zeros([BLOCK, BK], tl.float32)
    for j in tl.range(begin + BLOCK, count, BLOCK, num_stages=1):
        s = j + block_steps
        pairs = inside[:, None] & (s < count)[None, :]
        dM = tl.load(d_attend + parts_at + s[None, :], mask=pairs, other=0.0)
        dA = tl.load(d_lower + square + s[None, :], mask=pairs, other=0.0)
        valid = (s < count)[:, None] & in_cols[None, :]
        G_s = tl.load(G_ptr + s[:, None].to(tl.int64) * HV * K + cols[None, :], mask=valid, other=0.0)
        G_j = decay_at(G_ptr, j, cols, in_cols, count, HV, K)
        from_begin_s = exp32(tl.where(valid, (G_s - G_j[None, :]).to(tl.float32), 0.0))
        x = (unit_rows(q_ptr, q_t, rq, token, s, s < count, cols, in_cols, HV, NORMALISE) * from_begin_s).to(dM.dtype)
        product = tl.dot(dM, x, input_precision=PRECISION)
        x = (unit_rows(k_ptr, k_t, rk, token, s, s < count, cols, in_cols, HV, NORMALISE) * from_begin_s).to(dM.dtype)
        product = tl.dot(dA, x, product, input_precision=PRECISION)
        dk_later += product * exp32(G_j - G_next)[None, :]
    dG_tile -= (unit_keys * to_next).to(dtype).to(tl.float32) * dk_later
    d_key += dk_later * to_next

    # Pairs of the block's own steps.
    strict = inside[:, None] & (block_steps[:, None] > block_steps[None, :])
    dM = tl.load(d_attend + parts_at + t[None, :], mask=strict, other=0.0)
    low = dM
    if PARTS == 2:
        low = tl.load(d_attend + parts_at + SIZE + t[None, :], mask=strict, other=0.0)
    dA = tl.load(d_lower + square + t[None, :], mask=strict, other=0.0)
    if far:
        dq_part, dk_part, dG_part = level_gradients(
            dM, low, dA, unit_Q, unit_keys, Gc, G_ptr, t, cols, in_cols, count, HV, K, PRECISION
        )
    else:
        G_middle = decay_at(G_ptr, begin + BLOCK // 2, cols, in_cols, count, HV, K)
        G_rel = tl.where(mask, (Gc - G_middle[None, :]).to(tl.float32), 0.0)
        dq_part, dk_part, dG_part = middle_gradients(dM, low, dA, unit_Q, unit_keys, G_rel, PRECISION)
    d_query += dq_part
    d_key += dk_part
    dG_tile += dG_part

    # Terms that pass the states before and after the chunk.
    from_start = exp32(Gc)
    dq_part = tl.load(d_q_start + at, mask=mask, other=0.0).to(tl.float32) * from_start
    dk_part = tl.load(d_k_start + at, mask=mask, other=0.0).to(tl.float32) * from_start
    dk_end = exp32(decay_at(G_ptr, count - 1, cols, in_cols, count, HV, K)[None, :] - Gc)
    dk_end *= tl.load(d_k_end + at, mask=mask, other=0.0).to(tl.float32)
    # The keys that enter the next state have the factor e^{G_C - G}, which is 1 at the last step for any G.
    dG_last = tl.where((t < count - 1)[:, None], unit_keys * dk_end, 0.0)
    dG_last_ptr = dG_last_parts + ((row.to(tl.int64) * HV + hv) * (SIZE // BLOCK) + block) * K
    tl.store(dG_last_ptr + cols, tl.sum(dG_last, 0), mask=in_cols)
    tl.store(dG + at, dG_tile + unit_Q * dq_part + unit_keys * dk_part - dG_last, mask=mask)
    d_diagonal = tl.load(d_diag_scores + token + step_row, mask=inside, other=0.0)[:, None]
    d_query += dq_part + d_diagonal * unit_keys
    d_key += dk_part + dk_end + d_diagonal * unit_Q
    # All threads have read the tiles.
    tl.debug_barrier()
    tl.store(dq + at, d_query.to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + at, d_key.to(dk.dtype.element_ty), mask=mask)
