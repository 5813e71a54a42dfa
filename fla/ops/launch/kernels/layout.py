"""Which chunk belongs to which sequence.

Rows of the chunk table are the unit of the parallel kernels and the index of everything stored per chunk. For packed
sequences the table is built on the device on each call, from shapes alone: no synchronisation, nothing kept between calls,
so that a captured graph follows new lengths. Lengths are clamped to [0, T] and to the rows of the table: bad ones give
wrong numbers, no wild accesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fla.ops.launch.launch_cache import launch_kernel
from fla.utils.sizes import cdiv


@dataclass(frozen=True)
class Layout:
    """Chunks of one call.

    Attributes:
        size: steps per chunk.
        count: sequences N.
        rows: chunk rows, an upper bound for packed sequences.
        table: `[rows, 2]` int32: sequence (-1: unused row) and chunk within it. None for equal lengths.
        offsets: `[N + 1]` int32: first row of each sequence. None for equal lengths.
        cu_seqlens: as given.
    """

    size: int
    count: int
    rows: int
    table: torch.Tensor | None
    offsets: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    @property
    def packed(self) -> bool:
        """Whether sequences are packed along time."""
        return self.cu_seqlens is not None


def layout_of(batch: int, length: int, size: int, cu_seqlens: torch.Tensor | None) -> Layout:
    """The layout of a call: T steps in chunks of `size`."""
    if cu_seqlens is None:
        return Layout(size, batch, batch * cdiv(length, size), None, None, None)
    count = cu_seqlens.shape[0] - 1
    rows = cdiv(length, size) + count
    table = torch.empty(rows, 2, dtype=torch.int32, device=cu_seqlens.device)
    offsets = torch.empty(count + 1, dtype=torch.int32, device=cu_seqlens.device)
    launch_kernel(_fill_table, (count + 1,), cu_seqlens, table, offsets, length, count, rows, SIZE=size, BLOCK=256)
    return Layout(size, count, rows, table, offsets, cu_seqlens)


@triton.jit
def sequence_span(cu_seqlens, n, T):
    """Start and end of sequence n, clamped to [0, T] and to an end that is not before the start."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int32), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int32), start), T)
    return start, end


@triton.jit
def sequence_rows(cu_seqlens, offsets, n, T, SIZE: tl.constexpr):
    """Start and end of sequence n, and its first row of the chunk table: no more steps than it has rows for, of which
    sequences that overlap may lack some."""
    start, end = sequence_span(cu_seqlens, n, T)
    row, after = tl.load(offsets + n), tl.load(offsets + n + 1)
    return start, tl.minimum(end, start + (after - row) * SIZE), row.to(tl.int64)


@triton.jit
def sequence_of(t, cu_seqlens, N, levels):
    """Which of N packed sequences each step t is in, by bisection in as many levels as N has bits; in range for any
    `cu_seqlens`."""
    low = tl.zeros_like(t)
    high = low + N
    for _ in range(levels):
        middle = (low + high) // 2
        open_ = low < high
        past = open_ & (tl.load(cu_seqlens + middle + 1, mask=open_, other=0) <= t)
        low = tl.where(past, middle + 1, low)
        high = tl.where(open_ & ~past, middle, high)
    return tl.minimum(low, N - 1)


@triton.jit(do_not_specialize=['T', 'count', 'rows'])
def _fill_table(cu_seqlens, table, offsets, T, count, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program n < count writes the rows of sequence n; the last program marks the rows that are left as unused."""
    n = tl.program_id(0)
    before = 0
    for first in range(0, n, BLOCK):
        m = first + tl.arange(0, BLOCK)
        mask = m < n
        starts = tl.minimum(tl.maximum(tl.load(cu_seqlens + m, mask=mask, other=0).to(tl.int32), 0), T)
        ends = tl.minimum(tl.maximum(tl.load(cu_seqlens + m + 1, mask=mask, other=0).to(tl.int32), starts), T)
        chunks = tl.where(mask, (ends - starts + SIZE - 1) // SIZE, 0).to(tl.int64)
        # more chunks than rows, beyond int32 even, can only come from lengths that overlap
        before = tl.minimum(before + tl.sum(chunks), rows).to(tl.int32)
    tl.store(offsets + n, before)
    if n < count:
        start, end = sequence_span(cu_seqlens, n, T)
        chunks = tl.minimum((end - start + SIZE - 1) // SIZE, rows - before)
        for first in range(0, chunks, BLOCK):
            c = first + tl.arange(0, BLOCK)
            row = before + c
            mask = c < chunks
            tl.store(table + row * 2, tl.zeros([BLOCK], tl.int32) + n, mask=mask)
            tl.store(table + row * 2 + 1, c, mask=mask)
    else:
        for first in range(before, rows, BLOCK):
            row = first + tl.arange(0, BLOCK)
            tl.store(table + row * 2, tl.full([BLOCK], -1, tl.int32), mask=row < rows)


@triton.jit
def chunk_of(row, table, cu_seqlens, T, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Of a chunk row: sequence (-1: unused), chunk within it, batch row, first step of the sequence, end of it."""
    if PACKED:
        n = tl.load(table + row * 2)
        c = tl.load(table + row * 2 + 1)
        start, end = sequence_span(cu_seqlens, tl.maximum(n, 0), T)
        batch = 0
    else:
        chunks = tl.cdiv(T, SIZE)
        n = row // chunks
        c = row % chunks
        batch = n
        start, end = 0, T
    return n, c, batch, start, end
