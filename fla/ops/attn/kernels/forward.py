"""The forward: one program for a block of queries of a head, which goes over the keys that they see with an online softmax.

Dao 2023, "FlashAttention-2", arXiv 2307.08691; the softmax: Milakov and Gimelshein 2018, arXiv 1805.02867. Exponents are in
base 2 and at most 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.attn.kernels.common import LOG2_E, decays_of, keep_seen, place_of, rows_of


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    i,
    i_high,
    i_low,
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
    """Keys from `begin` to `end`; with MASKED some queries do not see some of them."""
    for first in tl.range(begin, end, BN, num_stages=STAGES):
        s = tl.dot(q, tl.trans(rows_of(k, first, count, k_t, BN, K, BK, not MASKED)), input_precision=PRECISION) * scale
        if DECAY:
            j_high, j_low = decays_of(sums, low, first, count, BN)
            s += (i_high[:, None] - j_high[None, :]) + (i_low[:, None] - j_low[None, :])
        if MASKED:
            s = keep_seen(s, i[:, None], (first + tl.arange(0, BN))[None, :], window, WINDOW)
        new = tl.maximum(top, tl.max(s, 1))
        # a query that has not met a key yet, or scores of -inf alone, has nothing to scale
        shift = tl.where(new == float('-inf'), 0.0, new)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        values = rows_of(v, first, count, v_t, BN, V, BV, not MASKED)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit(do_not_specialize=['T', 'S', 'window', 'plane'])
def forward(
    q,
    k,
    v,
    sums,
    sink,
    o,
    lse,
    cu_seqlens,
    table,
    scale,
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
    """o `[B, T, HQ, V]` and lse `[B, HQ, T]`, the logarithm of the normaliser in base 2."""
    head, batch, n, first, start, length = place_of(tl.program_id(0), table, cu_seqlens, T, HQ, BM, PACKED)
    if n < 0:
        return
    batch, start = tl.cast(batch, tl.int64), tl.cast(start, tl.int64)
    past = 0 if PACKED else S - T  # keys before the first query
    q += batch * q_b + start * q_t + head * q_h
    k += batch * k_b + start * k_t + head // (HQ // H) * k_h
    v += batch * v_b + start * v_t + head // (HQ // H) * v_h
    sums += (batch * HQ + head) * T + start
    t = first + tl.arange(0, BM)
    i = t + past
    queries = rows_of(q, first, length, q_t, BM, K, BK, False)
    i_high = tl.zeros([BM], tl.float32)
    i_low = i_high
    if DECAY:
        i_high, i_low = decays_of(sums, sums + plane, first, length, BM)
    acc = tl.zeros([BM, BV], tl.float32)
    top = tl.full([BM], float('-inf'), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SINK:
        bias = tl.load(sink + head).to(tl.float32) * LOG2_E
        top = tl.zeros([BM], tl.float32) + bias
        total += tl.where(bias == float('-inf'), 0.0, 1.0)
    # keys: left of `whole` some are behind a window, up to `diagonal` all are seen, and from there on not by the first ones
    begin = first * 0
    whole = first * 0
    end = tl.minimum(first + BM, length) + past
    if WINDOW:
        begin = tl.maximum(first + past - window + 1, 0) // BN * BN
        whole = tl.minimum(tl.cdiv(tl.maximum(first + BM + past - window, 0), BN) * BN, end)
    diagonal = tl.maximum((first + past + 1) // BN * BN, whole)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        acc, top, total = _attend(
            acc,
            top,
            total,
            queries,
            i,
            i_high,
            i_low,
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
    d = tl.arange(0, BV)
    inside = t < length
    o += ((batch * T + start + first) * HQ + head) * V
    at = o + tl.arange(0, BM)[:, None] * HQ * V + d[None, :]
    tl.store(at, (acc / total[:, None]).to(o.dtype.element_ty), mask=inside[:, None] & (d < V)[None, :])
    tl.store(lse + (batch * HQ + head) * T + start + t, top + tl.log2(total), mask=inside)
