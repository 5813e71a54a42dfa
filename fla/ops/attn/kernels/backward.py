"""The backward: `of_queries` goes over the keys of a block of queries, `of_keys` over the queries of a block of keys and of
all heads that read them. Nothing is added by two programs, so the order of sums is fixed.

p is repeated from the scores and lse. With delta_i = o_i do_i and dp_ij = do_i v_j the gradient of a score is
ds_ij = p_ij (dp_ij - delta_i); of the sink's logit it is minus the sum of its weights times delta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.attn.kernels.common import LOG2_E, decays_of, keep_seen, place_of, rows_of


@triton.jit
def _over_keys(
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
        keys = rows_of(k, first, count, k_t, BN, K, BK, not MASKED)
        s = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if DECAY:
            j_high, j_low = decays_of(sums, low, first, count, BN)
            s += (i_high[:, None] - j_high[None, :]) + (i_low[:, None] - j_low[None, :])
        if MASKED:
            s = keep_seen(s, i[:, None], (first + tl.arange(0, BN))[None, :], window, WINDOW)
        p = tl.exp2(s - lse[:, None])
        values = rows_of(v, first, count, v_t, BN, V, BV, not MASKED)
        ds = p * (tl.dot(do, tl.trans(values), input_precision=PRECISION) - delta[:, None])
        if DECAY:
            row += tl.sum(ds, 1)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq, row


@triton.jit(do_not_specialize=['T', 'S', 'window', 'plane'])
def of_queries(
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
    """dq `[B, T, HQ, K]`; delta and, with decays, the sums of the rows of ds `[B, HQ, T]`; of the sink what each program
    adds `[programs]`. o and do are contiguous."""
    pid = tl.program_id(0)
    head, batch, n, first, start, length = place_of(pid, table, cu_seqlens, T, HQ, BM, PACKED)
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
    queries = rows_of(q, first, length, q_t, BM, K, BK, False)
    results = ((batch * T + start) * HQ + head) * V
    gradient = rows_of(do + results, first, length, HQ * V, BM, V, BV, False)
    of_row = rows_of(o + results, first, length, HQ * V, BM, V, BV, False).to(tl.float32)
    of_row = tl.sum(of_row * gradient.to(tl.float32), 1)
    tl.store(delta + line + t, of_row, mask=inside)
    # rows that do not exist: no weights
    normaliser = tl.load(lse + line + t, mask=inside, other=float('inf'))
    if SINK:
        bias = tl.load(sink + head).to(tl.float32) * LOG2_E
        tl.store(dsink + pid, -tl.sum(tl.exp2(bias - normaliser) * of_row, 0))
    i_high = tl.zeros([BM], tl.float32)
    i_low = i_high
    if DECAY:
        i_high, i_low = decays_of(sums, sums + plane, first, length, BM)
    acc = tl.zeros([BM, BK], tl.float32)
    row = tl.zeros([BM], tl.float32)
    # as in the forward
    begin = first * 0
    whole = first * 0
    end = tl.minimum(first + BM, length) + past
    if WINDOW:
        begin = tl.maximum(first + past - window + 1, 0) // BN * BN
        whole = tl.minimum(tl.cdiv(tl.maximum(first + BM + past - window, 0), BN) * BN, end)
    diagonal = tl.maximum((first + past + 1) // BN * BN, whole)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        acc, row = _over_keys(
            acc,
            row,
            queries,
            gradient,
            i,
            i_high,
            i_low,
            normaliser,
            of_row,
            k,
            v,
            sums,
            sums + plane,
            begin if part == 0 else whole if part == 1 else diagonal,
            whole if part == 0 else diagonal if part == 1 else end,
            length + past,
            scale,
            window,
            k_t,
            v_t,
            K,
            V,
            BK,
            BV,
            BN,
            DECAY,
            WINDOW,
            part != 1,
            PRECISION,
            STAGES,
        )
    d = tl.arange(0, BK)
    dq += ((batch * T + start + first) * HQ + head) * K
    at = dq + tl.arange(0, BM)[:, None] * HQ * K + d[None, :]
    tl.store(at, (acc * scale_dq).to(dq.dtype.element_ty), mask=inside[:, None] & (d < K)[None, :])
    if DECAY:
        tl.store(rows + line + t, row, mask=inside)


@triton.jit
def _over_queries(
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
    """Scores are transposed: rows are keys. Queries that do not exist have no weights."""
    for first in tl.range(begin, end, BM, num_stages=STAGES):
        t = first + tl.arange(0, BM)
        queries = rows_of(q, first, count, q_t, BM, K, BK, False)
        s = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale
        if DECAY:
            i_high, i_low = decays_of(sums, low, first, count, BM)
            s += (i_high[None, :] - j_high[:, None]) + (i_low[None, :] - j_low[:, None])
        if MASKED:
            s = keep_seen(s, (t + past)[None, :], j[:, None], window, WINDOW)
        p = tl.exp2(s - tl.load(lse + t, mask=t < count, other=float('inf'))[None, :])
        gradient = rows_of(do, first, count, do_t, BM, V, BV, False)
        dv = tl.dot(p.to(gradient.dtype), gradient, dv, input_precision=PRECISION)
        of_row = tl.load(delta + t, mask=t < count, other=0.0)
        ds = p * (tl.dot(values, tl.trans(gradient), input_precision=PRECISION) - of_row[None, :])
        if DECAY:
            column += tl.sum(ds, 1)
        dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv, column


@triton.jit(do_not_specialize=['T', 'S', 'window', 'plane'])
def of_keys(
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
    """dk `[B, S, H, K]`, dv `[B, S, H, V]` and, with decays, the sums of the columns of ds `[B, HQ, S]`."""
    group, batch, n, first, start, length = place_of(tl.program_id(0), table, cu_seqlens, S, H, BN, PACKED)
    if n < 0:
        return
    batch, start = tl.cast(batch, tl.int64), tl.cast(start, tl.int64)
    past = 0 if PACKED else S - T
    k += batch * k_b + start * k_t + group * k_h
    v += batch * v_b + start * v_t + group * v_h
    row = tl.arange(0, BN)
    j = first + row
    inside = j < length
    keys = rows_of(k, first, length, k_t, BN, K, BK, False)
    values = rows_of(v, first, length, v_t, BN, V, BV, False)
    acc_k = tl.zeros([BN, BK], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    # queries: before `whole` some do not see the last keys, from `edge` on some no longer see the first ones
    last = tl.minimum(first + BN, length) - 1
    begin = tl.maximum(first - past, 0) // BM * BM
    end = length - past
    whole = tl.minimum(tl.cdiv(tl.maximum(last - past, 0), BM) * BM, end)
    edge = end
    if WINDOW:
        end = tl.minimum(end, tl.maximum(last + window - past, 0))
        whole = tl.minimum(whole, end)
        edge = tl.maximum(tl.maximum(first + window - past, 0) // BM * BM, whole)
        edge = tl.minimum(edge, end)
    for g in range(HQ // H):
        head = group * (HQ // H) + g
        line = (batch * HQ + head) * T + start
        queries = q + batch * q_b + start * q_t + head * q_h
        gradients = do + ((batch * T + start) * HQ + head) * V
        column = tl.zeros([BN], tl.float32)
        j_high = column
        j_low = column
        if DECAY:
            j_high, j_low = decays_of(sums + line, sums + line + plane, first, length, BN)
        for part in tl.static_range(3 if WINDOW else 2):
            acc_k, acc_v, column = _over_queries(
                acc_k,
                acc_v,
                column,
                keys,
                values,
                j,
                j_high,
                j_low,
                queries,
                gradients,
                lse + line,
                delta + line,
                sums + line,
                sums + line + plane,
                begin if part == 0 else whole if part == 1 else edge,
                whole if part == 0 else edge if part == 1 else end,
                length - past,
                past,
                scale,
                window,
                q_t,
                HQ * V,
                K,
                V,
                BK,
                BV,
                BM,
                DECAY,
                WINDOW,
                part != 1,
                PRECISION,
                STAGES,
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
