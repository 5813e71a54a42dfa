"""Shared by the kernels of attention: block positions, loads of rows, masks of scores, and sums of decays."""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.attn import naive
from fla.ops.launch.kernels.layout import chunk_of, sequence_span

LOG2_E = tl.constexpr(1.4426950408889634)
STRONGEST = tl.constexpr(naive.STRONGEST)


@triton.jit
def locate_block(pid, table, cu_seqlens, T, HEADS: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Head, batch row, sequence (-1: no work), first step of the block in its sequence, start and length of the sequence.

    Blocks of one head are adjacent, so that concurrent programs read the same keys. Later blocks, which see more keys, come
    first.
    """
    if PACKED:
        # rows of the table
        count = tl.num_programs(0) // HEADS
        row = count - 1 - pid % count
        head = pid // count
    else:
        count = tl.cdiv(T, SIZE)
        head = pid // count % HEADS
        row = pid // (count * HEADS) * count + count - 1 - pid % count
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    # in 64 bits: the stride of heads may be a whole sequence
    return tl.cast(head, tl.int64), batch, n, c * SIZE, start, end - start


@triton.jit
def load_rows(x, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """`[ROWS, BD]` from row `first` of x on. Rows from `count` on are zero; with WHOLE there are none. ROWS times the stride
    must be below 2^31."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BD)
    at = x + first.to(tl.int64) * stride + row[:, None] * stride + col[None, :]
    if WHOLE:
        if BD == D:
            return tl.load(at)
        return tl.load(at, mask=col[None, :] < D, other=0.0)
    if BD == D:
        return tl.load(at, mask=(first + row < count)[:, None], other=0.0)
    return tl.load(at, mask=(first + row < count)[:, None] & (col < D)[None, :], other=0.0)


@triton.jit
def load_decays(sums, low, first, count, ROWS: tl.constexpr):
    """The sums of decays of ROWS steps, in two parts; see `decay_sums`."""
    row = first + tl.arange(0, ROWS)
    high = tl.load(sums + row, mask=row < count, other=0.0)
    return high, tl.load(low + row, mask=row < count, other=0.0)


@triton.jit
def mask_scores(s, i, j, window, WINDOW: tl.constexpr):
    """Scores of queries i `[rows, 1]` and keys j `[1, columns]`, or transposed; -inf where i does not see j."""
    visible = j <= i
    if WINDOW:
        visible = visible & (j > i - window)
    return tl.where(visible, s, float('-inf'))


@triton.jit
def key_ranges(first, length, past, window, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """For BM queries from `first` on, the first key and three ends. Keys up to the first end are outside of some queries'
    window, those up to the second are visible to all queries, and those up to the third come after some queries."""
    begin = first * 0
    window_end = first * 0
    end = tl.minimum(first + BM, length) + past
    if WINDOW:
        begin = tl.maximum(first + past - window + 1, 0) // BN * BN
        window_end = tl.minimum(tl.cdiv(tl.maximum(first + BM + past - window, 0), BN) * BN, end)
    diagonal = tl.maximum((first + past + 1) // BN * BN, window_end)
    return begin, window_end, diagonal, end


@triton.jit
def locate_sequence(cu_seqlens, T, HQ: tl.constexpr, PACKED: tl.constexpr):
    """Head, batch row, start and end of the sequence; the grid has a program for each sequence and head."""
    n = (tl.program_id(0) // HQ).to(tl.int64)
    if PACKED:
        start, end = sequence_span(cu_seqlens, n, T)
        batch = n * 0
    else:
        start, end = 0, T
        batch = n
    return tl.program_id(0) % HQ, batch, start, end


@triton.jit(do_not_specialize=['T', 'plane'])
def decay_sums(g, sums, cu_seqlens, T, plane, g_b, g_t, g_h, HQ: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Running sums of g along each sequence, in base 2, `[2, B, HQ, T]`: the float64 sum rounded to float32, and the rest.
    For two close steps the differences of both parts are exact, however large the sums.
    """
    head, batch, start, end = locate_sequence(cu_seqlens, T, HQ, PACKED)
    g += batch * g_b + head * g_h
    sums += (batch * HQ + head) * T
    total = tl.zeros([], tl.float64)
    for first in range(start, end, BLOCK):
        t = first + tl.arange(0, BLOCK)
        block = tl.load(g + t.to(tl.int64) * g_t, mask=t < end, other=0.0).to(tl.float64)
        block = tl.where(block < STRONGEST, STRONGEST, block) * LOG2_E
        running = total + tl.cumsum(block, 0)
        total += tl.sum(block, 0)
        high = running.to(tl.float32)
        tl.store(sums + t, high, mask=t < end)
        tl.store(sums + plane + t, (running - high.to(tl.float64)).to(tl.float32), mask=t < end)


@triton.jit(do_not_specialize=['T'])
def decay_gradient(
    g,
    row_sums,
    column_sums,
    dg,
    cu_seqlens,
    T,
    g_b,
    g_t,
    g_h,
    HQ: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dg `[B, T, HQ]`: sums of `row_sums - column_sums` `[B, HQ, T]` from a step to the end of its sequence; 0 where g is
    below STRONGEST."""
    head, batch, start, end = locate_sequence(cu_seqlens, T, HQ, PACKED)
    line = (batch * HQ + head) * T
    g += batch * g_b + head * g_h
    dg += batch * T * HQ + head
    total = tl.zeros([], tl.float64)
    for done in range(0, end - start, BLOCK):
        # backwards from the last step
        t = end - 1 - done - tl.arange(0, BLOCK)
        inside = t >= start
        row = tl.load(row_sums + line + t, mask=inside, other=0.0).to(tl.float64)
        difference = row - tl.load(column_sums + line + t, mask=inside, other=0.0).to(tl.float64)
        running = total + tl.cumsum(difference, 0)
        total += tl.sum(difference, 0)
        own = tl.load(g + t.to(tl.int64) * g_t, mask=inside, other=0.0).to(tl.float32)
        running = tl.where(own < STRONGEST, 0.0, running)
        tl.store(dg + t.to(tl.int64) * HQ, running.to(dg.dtype.element_ty), mask=inside)
