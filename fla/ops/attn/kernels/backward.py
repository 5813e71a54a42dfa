"""The backward. `query_gradients` loops over the keys of a block of queries. `key_gradients` loops over the queries of a
block of keys, for all heads that read them. No two programs add to one number, so the order of sums is fixed.

p is recomputed from the scores and lse. With delta_i = o_i do_i and dp_ij = do_i v_j, the gradient of a score is
ds_ij = p_ij (dp_ij - delta_i). The gradient of the sink's logit is minus the sum of its weights times delta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.attn.kernels.common import LOG2_E, key_ranges, load_decays, load_rows, locate_block, mask_scores


@triton.jit
def _loop_over_keys(
    dq,
    row,
    q,
    do,
    i,
    i_high,
    i_low,
    lse,
    delta,
    k,
    v,
    sums,
    low,
    begin,
    end,
    count,
    scale,
    window,
    k_t,
    v_t,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    DECAY: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    for first in tl.range(begin, end, BN, num_stages=STAGES):
        keys = load_rows(k, first, count, k_t, BN, K, BK, not MASKED)
        s = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if DECAY:
            j_high, j_low = load_decays(sums, low, first, count, BN)
            s += (i_high[:, None] - j_high[None, :]) + (i_low[:, None] - j_low[None, :])
        if MASKED:
            s = mask_scores(s, i[:, None], (first + tl.arange(0, BN))[None, :], window, WINDOW)
        p = tl.exp2(s - lse[:, None])
        values = load_rows(v, first, count, v_t, BN, V, BV, not MASKED)
        ds = p * (tl.dot(do, tl.trans(values), input_precision=PRECISION) - delta[:, None])
        if DECAY:
            row += tl.sum(ds, 1)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq, row


@triton.jit(do_not_specialize=['T', 'S', 'window', 'plane'])
def query_gradients(
    q,
    k,
    v,
    sums,
    sink,
    o,
    lse,
    do,
    dq,
    delta,
    rows,
    dsink,
    cu_seqlens,
    table,
    scale,
    scale_dq,
    T,
    S,
    window,
    plane,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    H: tl.constexpr,
    HQ: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DECAY: tl.constexpr,
    SINK: tl.constexpr,
    WINDOW: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq `[B, T, HQ, K]`, delta `[B, HQ, T]`, with DECAY the row sums of ds `[B, HQ, T]`, with SINK each program's part of
    the sink's gradient `[programs]`. o and do are contiguous."""
    pid = tl.program_id(0)
    head, batch, n, first, start, length = locate_block(pid, table, cu_seqlens, T, HQ, BM, PACKED)
    if n < 0:
        if SINK:
            tl.store(dsink + pid, 0.0)
        return
    batch, start = tl.cast(batch, tl.int64), tl.cast(start, tl.int64)
    past = 0 if PACKED else S - T
    q += batch * q_b + start * q_t + head * q_h
    k += batch * k_b + start * k_t + head // (HQ // H) * k_h
    v += batch * v_b + start * v_t + head // (HQ // H) * v_h
    line = (batch * HQ + head) * T + start
    sums += line
    t = first + tl.arange(0, BM)
    i = t + past
    inside = t < length
    queries = load_rows(q, first, length, q_t, BM, K, BK, False)
    results = ((batch * T + start) * HQ + head) * V
    gradient = load_rows(do + results, first, length, HQ * V, BM, V, BV, False)
    row_delta = load_rows(o + results, first, length, HQ * V, BM, V, BV, False).to(tl.float32)
    row_delta = tl.sum(row_delta * gradient.to(tl.float32), 1)
    tl.store(delta + line + t, row_delta, mask=inside)
    # inf: rows past the end have weights of 0
    normaliser = tl.load(lse + line + t, mask=inside, other=float('inf'))
    if SINK:
        bias = tl.load(sink + head).to(tl.float32) * LOG2_E
        tl.store(dsink + pid, -tl.sum(tl.exp2(bias - normaliser) * row_delta, 0))
    i_high = tl.zeros([BM], tl.float32)
    i_low = i_high
    if DECAY:
        i_high, i_low = load_decays(sums, sums + plane, first, length, BM)
    acc = tl.zeros([BM, BK], tl.float32)
    row = tl.zeros([BM], tl.float32)
    begin, window_end, diagonal, end = key_ranges(first, length, past, window, BM, BN, WINDOW)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        part_begin = begin if part == 0 else window_end if part == 1 else diagonal
        part_end = window_end if part == 0 else diagonal if part == 1 else end
        acc, row = _loop_over_keys(
            *(acc, row, queries, gradient, i, i_high, i_low, normaliser, row_delta, k, v, sums, sums + plane),
            *(part_begin, part_end, length + past, scale, window, k_t, v_t),
            *(K, V, BK, BV, BN, DECAY, WINDOW, part != 1, PRECISION, STAGES),
        )
    d = tl.arange(0, BK)
    dq += ((batch * T + start + first) * HQ + head) * K
    at = dq + tl.arange(0, BM)[:, None] * HQ * K + d[None, :]
    tl.store(at, (acc * scale_dq).to(dq.dtype.element_ty), mask=inside[:, None] & (d < K)[None, :])
    if DECAY:
        tl.store(rows + line + t, row, mask=inside)


@triton.jit
def _loop_over_queries(
    dk,
    dv,
    column,
    keys,
    values,
    j,
    j_high,
    j_low,
    q,
    do,
    lse,
    delta,
    sums,
    low,
    begin,
    end,
    count,
    past,
    scale,
    window,
    q_t,
    do_t,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    DECAY: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores are transposed: rows are keys. Queries past the end have weights of 0."""
    for first in tl.range(begin, end, BM, num_stages=STAGES):
        t = first + tl.arange(0, BM)
        queries = load_rows(q, first, count, q_t, BM, K, BK, False)
        s = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale
        if DECAY:
            i_high, i_low = load_decays(sums, low, first, count, BM)
            s += (i_high[None, :] - j_high[:, None]) + (i_low[None, :] - j_low[:, None])
        if MASKED:
            s = mask_scores(s, (t + past)[None, :], j[:, None], window, WINDOW)
        p = tl.exp2(s - tl.load(lse + t, mask=t < count, other=float('inf'))[None, :])
        gradient = load_rows(do, first, count, do_t, BM, V, BV, False)
        dv = tl.dot(p.to(gradient.dtype), gradient, dv, input_precision=PRECISION)
        row_delta = tl.load(delta + t, mask=t < count, other=0.0)
        ds = p * (tl.dot(values, tl.trans(gradient), input_precision=PRECISION) - row_delta[None, :])
        if DECAY:
            column += tl.sum(ds, 1)
        dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv, column


@triton.jit(do_not_specialize=['T', 'S', 'window', 'plane'])
def key_gradients(
    q,
    k,
    v,
    sums,
    lse,
    do,
    delta,
    dk,
    dv,
    columns,
    cu_seqlens,
    table,
    scale,
    scale_dk,
    T,
    S,
    window,
    plane,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    H: tl.constexpr,
    HQ: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DECAY: tl.constexpr,
    WINDOW: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk `[B, S, H, K]`, dv `[B, S, H, V]`, and with DECAY the column sums of ds `[B, HQ, S]`."""
    group, batch, n, first, start, length = locate_block(tl.program_id(0), table, cu_seqlens, S, H, BN, PACKED)
    if n < 0:
        return
    batch, start = tl.cast(batch, tl.int64), tl.cast(start, tl.int64)
    past = 0 if PACKED else S - T
    k += batch * k_b + start * k_t + group * k_h
    v += batch * v_b + start * v_t + group * v_h
    row = tl.arange(0, BN)
    j = first + row
    inside = j < length
    keys = load_rows(k, first, length, k_t, BN, K, BK, False)
    values = load_rows(v, first, length, v_t, BN, V, BV, False)
    acc_k = tl.zeros([BN, BK], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    # Queries up to `diagonal` come before some of the keys, those up to `window_begin` see all of them, and for later ones
    # some keys are outside of the window.
    last = tl.minimum(first + BN, length) - 1
    begin = tl.maximum(first - past, 0) // BM * BM
    end = length - past
    diagonal = tl.minimum(tl.cdiv(tl.maximum(last - past, 0), BM) * BM, end)
    window_begin = end
    if WINDOW:
        end = tl.minimum(end, tl.maximum(last + window - past, 0))
        diagonal = tl.minimum(diagonal, end)
        window_begin = tl.maximum(tl.maximum(first + window - past, 0) // BM * BM, diagonal)
        window_begin = tl.minimum(window_begin, end)
    for g in range(HQ // H):
        head = group * (HQ // H) + g
        line = (batch * HQ + head) * T + start
        queries = q + batch * q_b + start * q_t + head * q_h
        gradients = do + ((batch * T + start) * HQ + head) * V
        column = tl.zeros([BN], tl.float32)
        j_high = column
        j_low = column
        if DECAY:
            j_high, j_low = load_decays(sums + line, sums + line + plane, first, length, BN)
        for part in tl.static_range(3 if WINDOW else 2):
            part_begin = begin if part == 0 else diagonal if part == 1 else window_begin
            part_end = diagonal if part == 0 else window_begin if part == 1 else end
            acc_k, acc_v, column = _loop_over_queries(
                *(acc_k, acc_v, column, keys, values, j, j_high, j_low, queries, gradients, lse + line, delta + line),
                *(sums + line, sums + line + plane, part_begin, part_end, length - past, past, scale, window, q_t, HQ * V),
                *(K, V, BK, BV, BM, DECAY, WINDOW, part != 1, PRECISION, STAGES),
            )
        if DECAY:
            tl.store(columns + line + j, column, mask=inside)
    d = tl.arange(0, BK)
    dk += ((batch * S + start + first) * H + group) * K
    at = dk + row[:, None] * H * K + d[None, :]
    tl.store(at, (acc_k * scale_dk).to(dk.dtype.element_ty), mask=inside[:, None] & (d < K)[None, :])
    d = tl.arange(0, BV)
    dv += ((batch * S + start + first) * H + group) * V
    at = dv + row[:, None] * H * V + d[None, :]
    tl.store(at, acc_v.to(dv.dtype.element_ty), mask=inside[:, None] & (d < V)[None, :])
