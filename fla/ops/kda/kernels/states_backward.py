"""The recurrence of `states` in reverse: gradients of states and updates, from the last chunk to the first.

    dU' = M^T dO + K' dS;   dS <- decay dS + Q'^T dO - W^T dU'

with Q' = scale e^G Q, K' = e^{G_C - G} K and decay = e^{G_C}. One program owns a block of value columns of one head of one
sequence and holds that part of the state's gradient in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import sequence_rows
from fla.ops.recurrence.kernels.gates import exp32
from fla.ops.recurrence.kernels.state import state_tile


@triton.jit(do_not_specialize=['T'])
def states_backward(
    q,
    k,
    attend,
    diag_scores,
    w,
    do,
    G,
    du,
    dh,
    d_final,
    d_initial,
    cu_seqlens,
    offsets,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (N * HV * ceil(V / BV),). BK >= K.

    Args:
        q, k: Q' = scale e^G q and K' = e^{G_C - G} k, `[B, T, HV, K]`, contiguous.
        attend, diag_scores: M below its diagonal, `[B, T, HV, SIZE]` in k's dtype, and on it, float32 `[B, T, HV]`;
            contiguous.
        w, do: W `[B, T, HV, K]` and the gradient of o `[B, T, HV, V]` in k's dtype, contiguous.
        G: running log decay, float32 or float64 `[B, T, HV, K]`.
        du: written, gradient of U', `[B, T, HV, V]` in k's dtype.
        dh: written, gradient of the state after each chunk, `[rows, HV, K, V]` in k's dtype.
        d_final, d_initial: `[N, HV, K, V]` or, with V_FIRST, `[N, HV, V, K]`; read with HAS_FINAL, written with HAS_INITIAL.
    """
    pid = tl.program_id(0)
    vb, nh = pid % tl.cdiv(V, BV), pid // tl.cdiv(V, BV)
    n, hv = nh // HV, nh % HV
    batch, start, end, row = sequence_rows(n, cu_seqlens, offsets, T, SIZE, PACKED)
    length = end - start
    chunks = tl.cdiv(length, SIZE)
    token = batch * T + start
    rows, cv, state_mask, state_at = state_tile(nh, vb, K, V, BK, BV, V_FIRST)
    dS = tl.zeros([BK, BV], tl.float32)
    if HAS_FINAL:
        dS = tl.load(d_final + state_at, mask=state_mask, other=0.0).to(tl.float32)
    # Offsets inside a chunk fit in int32; offsets of the chunk are int64.
    steps = tl.arange(0, SIZE)
    of_k = steps[:, None] * HV * K + rows[None, :]
    of_v = steps[:, None] * HV * V + cv[None, :]
    of_m = steps[:, None] * HV * SIZE + steps[None, :]
    w_ptr = w + (token * HV + hv) * K
    do_ptr = do + (token * HV + hv) * V
    du_ptr = du + (token * HV + hv) * V
    m_ptr = attend + (token * HV + hv) * SIZE
    s_ptr = diag_scores + token * HV + hv
    q_ptr = q + (token * HV + hv) * K
    k_ptr = k + (token * HV + hv) * K
    G_ptr = G + (token * HV + hv) * K
    dh_ptr = dh + (row * HV + hv) * K * V + (rows[:, None] * V + cv[None, :])
    for i in tl.range(0, chunks, num_stages=STAGES):
        c = chunks - 1 - i
        first = c.to(tl.int64) * SIZE
        count = tl.minimum(length - c * SIZE, SIZE)
        inside = steps < count
        tl.store(dh_ptr + c.to(tl.int64) * HV * K * V, dS.to(dh.dtype.element_ty), mask=state_mask)
        k_mask = inside[:, None] & (rows[None, :] < K)
        v_mask = inside[:, None] & (cv[None, :] < V)
        dO = tl.load(do_ptr + first * HV * V + of_v, mask=v_mask, other=0.0)
        M = tl.load(m_ptr + first * HV * SIZE + of_m, mask=inside[:, None], other=0.0)
        dU = tl.dot(tl.trans(M), dO, input_precision=PRECISION)
        dU += tl.load(s_ptr + first * HV + steps * HV, mask=inside, other=0.0)[:, None] * dO.to(tl.float32)
        keys = tl.load(k_ptr + first * HV * K + of_k, mask=k_mask, other=0.0)
        Q = tl.load(q_ptr + first * HV * K + of_k, mask=k_mask, other=0.0)
        dU = tl.dot(keys, dS.to(keys.dtype), dU, input_precision=PRECISION)
        decay = exp32(tl.load(G_ptr + (first + count - 1) * HV * K + rows, mask=rows < K, other=0.0))
        dS = dS * decay[:, None]
        dU = dU.to(du.dtype.element_ty)
        tl.store(du_ptr + first * HV * V + of_v, dU, mask=v_mask)
        W = tl.load(w_ptr + first * HV * K + of_k, mask=k_mask, other=0.0)
        dS += tl.dot(tl.trans(Q), dO, input_precision=PRECISION)
        # Added, because a product that is subtracted gets registers of its own.
        dS += tl.dot(tl.trans(W), -dU, input_precision=PRECISION)
    if HAS_INITIAL:
        tl.store(d_initial + state_at, dS.to(d_initial.dtype.element_ty), mask=state_mask)
