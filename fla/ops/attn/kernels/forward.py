"""The forward: a program takes a block of queries of one head, and loops over their visible keys with an online softmax.

Source: Dao 2023, "FlashAttention-2", arXiv 2307.08691; the softmax: Milakov and Gimelshein 2018, arXiv 1805.02867. Exponents
are in base 2 and at most 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.attn.kernels.common import LOG2_E, key_ranges, load_decays, load_rows, locate_block, mask_scores


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
    """Updates accumulator, maximum and sum of each query with keys from `begin` to `end`. MASKED: not all are visible."""
    for first in tl.range(begin, end, BN, num_stages=STAGES):
        s = tl.dot(q, tl.trans(load_rows(k, first, count, k_t, BN, K, BK, not MASKED)), input_precision=PRECISION) * scale
        if DECAY:
            j_high, j_low = load_decays(sums, low, first, count, BN)
            s += (i_high[:, None] - j_high[None, :]) + (i_low[:, None] - j_low[None, :])
        if MASKED:
            s = mask_scores(s, i[:, None], (first + tl.arange(0, BN))[None, :], window, WINDOW)
        new = tl.maximum(top, tl.max(s, 1))
        # avoids -inf - -inf while all scores of a query are -inf
        shift = tl.where(new == float('-inf'), 0.0, new)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        values = load_rows(v, first, count, v_t, BN, V, BV, not MASKED)
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
    """o `[B, T, HQ, V]` and lse `[B, HQ, T]`, the log-sum-exp of the scores in base 2."""
    head, batch, n, first, start, length = locate_block(tl.program_id(0), table, cu_seqlens, T, HQ, BM, PACKED)
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
    queries = load_rows(q, first, length, q_t, BM, K, BK, False)
    i_high = tl.zeros([BM], tl.float32)
    i_low = i_high
    if DECAY:
        i_high, i_low = load_decays(sums, sums + plane, first, length, BM)
    acc = tl.zeros([BM, BV], tl.float32)
    top = tl.full([BM], float('-inf'), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SINK:
        bias = tl.load(sink + head).to(tl.float32) * LOG2_E
        top = tl.zeros([BM], tl.float32) + bias
        total += 1.0
    begin, window_end, diagonal, end = key_ranges(first, length, past, window, BM, BN, WINDOW)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        part_begin = begin if part == 0 else window_end if part == 1 else diagonal
        part_end = window_end if part == 0 else diagonal if part == 1 else end
        acc, top, total = _attend(
            *(acc, top, total, queries, i, i_high, i_low, k, v, sums, sums + plane, part_begin, part_end, length + past),
            *(scale, window, k_t, v_t, K, V, BK, BV, BN, DECAY, WINDOW, part != 1, PRECISION, STAGES),
        )
    d = tl.arange(0, BV)
    inside = t < length
    o += ((batch * T + start + first) * HQ + head) * V
    at = o + tl.arange(0, BM)[:, None] * HQ * V + d[None, :]
    tl.store(at, (acc / total[:, None]).to(o.dtype.element_ty), mask=inside[:, None] & (d < V)[None, :])
    tl.store(lse + (batch * HQ + head) * T + start + t, top + tl.log2(total), mask=inside)
