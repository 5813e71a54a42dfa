"""What the kernels of attention share: places, rows, scores, sums of decays."""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.attn import naive
from fla.ops.launch.kernels.layout import chunk_of, sequence_span

LOG2_E = tl.constexpr(1.4426950408889634)
STRONGEST = tl.constexpr(naive.STRONGEST)


@triton.jit
def place_of(pid, table, cu_seqlens, T, HEADS: tl.constexpr, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Head, batch row, sequence (-1: nothing to do), first step of the block within it, start and length of the sequence.

    Blocks of one head are neighbours, so that those that run together read the same keys; later ones, which see more keys,
    come first.
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
    # heads may be the outer dimension of what is read: a head's stride is then a sequence long
    return tl.cast(head, tl.int64), batch, n, c * SIZE, start, end - start


@triton.jit
def rows_of(x, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr):
    """`[ROWS, BD]` from row `first` of x on; rows from `count` on, of which WHOLE says that there are none, are zero. ROWS
    times the stride must be below 2^31."""
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
def decays_of(sums, low, first, count, ROWS: tl.constexpr):
    """Sums of decays of some steps, in two parts: see `decay_sums`."""
    row = first + tl.arange(0, ROWS)
    high = tl.load(sums + row, mask=row < count, other=0.0)
    return high, tl.load(low + row, mask=row < count, other=0.0)


@triton.jit
def keep_seen(s, i, j, window, WINDOW: tl.constexpr):
    """Scores of places i `[rows, 1]` and j `[1, columns]`, or the other way round; -inf where i does not see j."""
    seen = j <= i
    if WINDOW:
        seen = seen & (j > i - window)
    return tl.where(seen, s, float('-inf'))


@triton.jit
def sequence_of_program(cu_seqlens, T, HQ: tl.constexpr, PACKED: tl.constexpr):
    """Head, batch row, start and end of the sequence, of one program for each sequence and head."""
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
    """Running sums of g along the time of each sequence, in base 2, `[2, B, HQ, T]`: what float32 holds of the float64
    number, and the rest. Differences of the parts of two steps that are near each other are exact, however large the sums.
    """
    head, batch, start, end = sequence_of_program(cu_seqlens, T, HQ, PACKED)
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
    of_rows,
    of_columns,
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
    """dg `[B, T, HQ]`: sums from a step to the end of its sequence of what its rows `[B, HQ, T]` add and columns take; 0 for
    a g below the strongest decay."""
    head, batch, start, end = sequence_of_program(cu_seqlens, T, HQ, PACKED)
    line = (batch * HQ + head) * T
    g += batch * g_b + head * g_h
    dg += batch * T * HQ + head
    total = tl.zeros([], tl.float64)
    for done in range(0, end - start, BLOCK):
        # from the end on
        t = end - 1 - done - tl.arange(0, BLOCK)
        inside = t >= start
        row = tl.load(of_rows + line + t, mask=inside, other=0.0).to(tl.float64)
        both = row - tl.load(of_columns + line + t, mask=inside, other=0.0).to(tl.float64)
        running = total + tl.cumsum(both, 0)
        total += tl.sum(both, 0)
        own = tl.load(g + t.to(tl.int64) * g_t, mask=inside, other=0.0).to(tl.float32)
        running = tl.where(own < STRONGEST, 0.0, running)
        tl.store(dg + t.to(tl.int64) * HQ, running.to(dg.dtype.element_ty), mask=inside)
