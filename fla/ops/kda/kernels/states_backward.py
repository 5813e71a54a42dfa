"""The recurrence of `states` in reverse: what comes back through the states, from the last chunk to the first.

    dU' = M^T dO + K' dS;   dS <- decay dS + Q'^T dO - W^T dU'

with Q' = scale e^G Q and K' = e^{G_C - G} K. One program owns a block of value columns of one head of one sequence and keeps
the state's gradient in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import sequence_rows
from fla.ops.recurrence.kernels.gates import exp32


@triton.jit(do_not_specialize=['T'])
def states_backward(
    q,
    k,
    attend,
    selves,
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
        q, k: scale e^G q and e^{G_C - G} k, `[B, T, HV, K]`, contiguous.
        attend, selves: M below and on its diagonal, `[B, T, HV, SIZE]` in k's dtype and float32 `[B, T, HV]`, contiguous.
        w `[B, T, HV, K]`, do `[B, T, HV, V]`: contiguous, in k's dtype.
        G: running log decay, float32 or float64 `[B, T, HV, K]`.
        du: `[B, T, HV, V]` in k's dtype, written: the gradient of U'.
        dh: `[rows, HV, K, V]` in k's dtype, written: the gradient of the state after each chunk.
        d_final, d_initial: `[N, HV, K, V]` or, V_FIRST, `[N, HV, V, K]`; read if HAS_FINAL, written if HAS_INITIAL.
    """
    pid = tl.program_id(0)
    vb, nh = pid % tl.cdiv(V, BV), pid // tl.cdiv(V, BV)
    n, hv = nh // HV, nh % HV
    if PACKED:
        start, end, row = sequence_rows(cu_seqlens, offsets, n, T, SIZE)
        batch = (n * 0).to(tl.int64)
    else:
        start, end = n * 0, T
        row = (n * tl.cdiv(T, SIZE)).to(tl.int64)
        batch = n.to(tl.int64)
    length = end - start
    chunks = tl.cdiv(length, SIZE)
    token = batch * T + start
    rows = tl.arange(0, BK)
    cv = vb * BV + tl.arange(0, BV)
    state_mask = (rows[:, None] < K) & (cv[None, :] < V)
    state_at = nh.to(tl.int64) * K * V + (cv[None, :] * K + rows[:, None] if V_FIRST else rows[:, None] * V + cv[None, :])
    dS = tl.zeros([BK, BV], tl.float32)
    if HAS_FINAL:
        dS = tl.load(d_final + state_at, mask=state_mask, other=0.0).to(tl.float32)
    # of the steps within a chunk; int64 is for what comes before them
    steps = tl.arange(0, SIZE)
    of_k = steps[:, None] * HV * K + rows[None, :]
    of_v = steps[:, None] * HV * V + cv[None, :]
    of_m = steps[:, None] * HV * SIZE + steps[None, :]
    w_ptr = w + (token * HV + hv) * K
    do_ptr = do + (token * HV + hv) * V
    du_ptr = du + (token * HV + hv) * V
    m_ptr = attend + (token * HV + hv) * SIZE
    s_ptr = selves + token * HV + hv
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
        # added, since a product that is subtracted gets registers of its own
        dS += tl.dot(tl.trans(W), -dU, input_precision=PRECISION)
    if HAS_INITIAL:
        tl.store(d_initial + state_at, dS.to(d_initial.dtype.element_ty), mask=state_mask)
