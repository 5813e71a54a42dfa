"""Gradients of q and k: sums over the value heads that share them, and the backward of the normalisation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_heads(
    x,
    dy,
    dx,
    row,
    in_rows,
    T,
    x_b,
    x_t,
    x_h,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Writes dx `[B, T, H, K]` for rows of x `[B, T, H, K]` (by strides), from dy `[B, T, H * GROUPS, K]`."""
    cols = tl.arange(0, BK)
    mask = in_rows[:, None] & (cols[None, :] < K)
    total = tl.zeros([row.shape[0], BK], tl.float32)
    for group in range(GROUPS):
        at = (row[:, None] * GROUPS + group) * K + cols[None, :]
        total += tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if NORMALISE:
        head, step = row % H, row // H
        x_at = (step // T) * x_b + (step % T) * x_t + head * x_h
        values = tl.load(x + x_at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        norm = tl.rsqrt(tl.sum(values * values, 1) + 1e-6)[:, None]
        values *= norm
        total = norm * (total - values * tl.sum(values * total, 1)[:, None])
    tl.store(dx + row[:, None] * K + cols[None, :], total.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=['T', 'count'])
def heads_backward(
    q,
    k,
    dq_heads,
    dk_heads,
    dq,
    dk,
    count,
    T,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Grid (ceil(count / ROWS), 2), the second axis for q and k. Sums gradients over the value heads that share q and k.

    Args:
        q, k: `[B, T, H, K]` by strides, the last 1; read with NORMALISE.
        dq_heads, dk_heads: gradients for each value head, `[B, T, H * GROUPS, K]`, contiguous; with NORMALISE those of the
            normalised rows.
        dq, dk: written, `[B, T, H, K]`, contiguous. May be the memory of dq_heads and dk_heads if GROUPS is 1.
        count: B * T * H.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < count
    if tl.program_id(1) == 0:
        sum_heads(q, dq_heads, dq, row, in_rows, T, q_b, q_t, q_h, H, GROUPS, K, BK, NORMALISE)
    else:
        sum_heads(k, dk_heads, dk, row, in_rows, T, k_b, k_t, k_h, H, GROUPS, K, BK, NORMALISE)
