"""The chunk table, which maps chunks to sequences.

A row of the table is the unit of work of kernels that are parallel over chunks, and the index of everything stored per
chunk. The table of packed sequences is built on the device in each call, and its size follows from shapes alone. A call
therefore never synchronises, and a captured graph follows new lengths. Lengths are clamped to [0, T] and to the rows of the
table, so that invalid lengths give wrong numbers but no access outside the tensors.
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
    """The chunks of one call.

    Attributes:
        size: steps per chunk.
        count: number of sequences N.
        rows: number of table rows; an upper bound on the chunks of packed sequences.
        table: int32 `[rows, 2]`, sequence (-1 in an unused row) and chunk of that sequence; None for equal lengths.
        offsets: int32 `[N + 1]`, first row of each sequence; None for equal lengths.
        cu_seqlens: the argument of the call.
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
    """Returns the layout of a call whose `length` steps are cut into chunks of `size`."""
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
    """Returns start and end of packed sequence n, clamped to 0 <= start <= end <= T."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int32), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int32), start), T)
    return start, end


@triton.jit
def sequence_rows(n, cu_seqlens, offsets, T, SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Returns batch row (int64), start, end and first table row (int64) of sequence n.

    A packed sequence ends after as many steps as it has table rows for, because sequences that overlap may lack some."""
    if PACKED:
        start, end = sequence_span(cu_seqlens, n, T)
        row, after = tl.load(offsets + n), tl.load(offsets + n + 1)
        end = tl.minimum(end, start + (after - row) * SIZE)
        batch = (n * 0).to(tl.int64)
        row = row.to(tl.int64)
    else:
        start, end = n * 0, T
        row = (n * tl.cdiv(T, SIZE)).to(tl.int64)
        batch = n.to(tl.int64)
    return batch, start, end, row


@triton.jit
def sequence_of(t, cu_seqlens, N, levels):
    """Returns which of N packed sequences each step t is in, in [0, N - 1] for any `cu_seqlens`. The bisection takes
    `levels` steps, as many as N has bits."""
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
    """Grid (count + 1,). Program n < count writes the table rows of sequence n; the last program marks the other rows as
    unused. Arguments are those of `Layout`; cu_seqlens is int32 or int64 `[count + 1]`."""
    n = tl.program_id(0)
    before = 0
    for first in range(0, n, BLOCK):
        m = first + tl.arange(0, BLOCK)
        mask = m < n
        starts = tl.minimum(tl.maximum(tl.load(cu_seqlens + m, mask=mask, other=0).to(tl.int32), 0), T)
        ends = tl.minimum(tl.maximum(tl.load(cu_seqlens + m + 1, mask=mask, other=0).to(tl.int32), starts), T)
        chunks = tl.where(mask, (ends - starts + SIZE - 1) // SIZE, 0).to(tl.int64)
        # only sequences that overlap have more chunks than rows, maybe more than int32 holds
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
    """Returns sequence (-1 if unused), chunk in it, batch row, and the sequence's start and end, for a table row."""
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
