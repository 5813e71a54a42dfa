"""Gradients of q and k: sums over the value heads that share them, and the backward of the normalisation."""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import inverse_norm


@triton.jit
def sum_group(
    x_ptr,
    x_t,
    dx_heads,
    token,
    dx,
    time,
    inside,
    GROUP: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Writes the gradient of rows of q or k, summed over the value heads of a group, and with NORMALISE before the norm.

    Args:
        x_ptr: q or k at the first step and head, with stride x_t between steps, read with NORMALISE.
        dx_heads: gradients for each value head at the group's first, `[B, T, HV, K]`. dx: at the head, `[B, T, H, K]`.
        token: first step of the chunk. time: steps `[SIZE, 1]` int64. inside: mask of steps `[SIZE]`.
    """
    head_row = (token * HV + time * HV) * K
    radial = tl.zeros([inside.shape[0]], tl.float32)
    if NORMALISE:
        norm = inverse_norm(x_ptr, x_t, time, inside, K, BK)
        dot = tl.zeros([inside.shape[0]], tl.float32)
        for i in range(0, K, BK):
            cols = i + tl.arange(0, BK)
            mask = inside[:, None] & (cols[None, :] < K)
            x = tl.load(x_ptr + time * x_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            for r in range(GROUP):
                dx_head = tl.load(dx_heads + head_row + r * K + cols[None, :], mask=mask, other=0.0)
                dot += tl.sum(x * dx_head.to(tl.float32), 1)
        radial = dot * norm * norm
        # `dx` may be the memory of `dx_heads`.
        tl.debug_barrier()
    at = (token * (HV // GROUP) + time * (HV // GROUP)) * K
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        mask = inside[:, None] & (cols[None, :] < K)
        total = tl.zeros([inside.shape[0], BK], tl.float32)
        for r in range(GROUP):
            total += tl.load(dx_heads + head_row + r * K + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORMALISE:
            x = tl.load(x_ptr + time * x_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            total -= x * radial[:, None]
        tl.store(dx + at + cols[None, :], total.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=['T'])
def heads_backward(
    q,
    k,
    dq_heads,
    dk_heads,
    dq,
    dk,
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
    NORMALISE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid (rows * H,). Sums the gradients of q and k over the value heads that share them.

    Args:
        q, k: `[B, T, H, K]` by strides, the last 1; read with NORMALISE.
        dq_heads, dk_heads: gradients for each value head, `[B, T, HV, K]`, contiguous; with NORMALISE at constant norms.
        dq, dk: written, `[B, T, H, K]`, contiguous. May be the memory of dq_heads and dk_heads if HV == H.
    """
    pid = tl.program_id(0)
    row, h = pid // H, pid % H
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    first = start + c * SIZE
    steps = tl.arange(0, SIZE)
    inside = first + steps < end
    time = steps[:, None].to(tl.int64)
    batch64, first64, h64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64), h.to(tl.int64)
    token = batch64 * T + first64
    group: tl.constexpr = HV // H
    q_ptr = q + batch64 * q_b + first64 * q_t + h64 * q_h
    k_ptr = k + batch64 * k_b + first64 * k_t + h64 * k_h
    head_at = h64 * group * K
    sum_group(q_ptr, q_t, dq_heads + head_at, token, dq + h64 * K, time, inside, group, HV, K, BK, NORMALISE)
    sum_group(k_ptr, k_t, dk_heads + head_at, token, dk + h64 * K, time, inside, group, HV, K, BK, NORMALISE)
