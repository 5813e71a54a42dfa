"""The recurrence of Kimi delta attention over chunks, the only sequential part of the forward.

    U' = U - W S;   S <- decay S + K'^T U'

Q' = scale e^G Q and K' = e^{G_C - G} K are queries and keys with their decays from the chunk's start and to its end, and
decay = e^{G_C} is that of the whole chunk. One program owns a block of value columns of one head of one sequence and holds
that part of the state in registers. Either it writes each S and U' for other kernels, or it writes the outputs

    O = Q' S + M U',

which saves two tensors and a kernel, but needs enough shared memory for the tiles that it loads ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import sequence_rows
from fla.ops.recurrence.kernels.gates import exp32
from fla.ops.recurrence.kernels.state import state_tile


@triton.jit(do_not_specialize=['T'])
def states_forward(
    q,
    k,
    attend,
    diag_scores,
    w,
    u,
    G,
    h,
    v_new,
    o,
    initial,
    final,
    cu_seqlens,
    offsets,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (N * HV * ceil(V / BV),): one axis, because the others end at 65,535. BK >= K.

    Args:
        q, k: Q' = scale e^G q and K' = e^{G_C - G} k, `[B, T, HV, K]`, contiguous. q is read with OUTPUTS.
        attend, diag_scores: M below its diagonal, `[B, T, HV, SIZE]` in k's dtype, and on it, float32 `[B, T, HV]`;
            contiguous, read with OUTPUTS.
        w, u: W `[B, T, HV, K]` and U `[B, T, HV, V]` in k's dtype, contiguous.
        G: running log decay, float32 or float64 `[B, T, HV, K]`.
        h: written without OUTPUTS, state before each chunk, `[rows, HV, K, V]` in k's dtype.
        v_new: written without OUTPUTS, U', `[B, T, HV, V]` in k's dtype. May be the memory of u.
        o: written with OUTPUTS, `[B, T, HV, V]`.
        initial, final: `[N, HV, K, V]` or, with V_FIRST, `[N, HV, V, K]`; read with HAS_INITIAL, written with HAS_FINAL.
    """
    pid = tl.program_id(0)
    vb, nh = pid % tl.cdiv(V, BV), pid // tl.cdiv(V, BV)
    n, hv = nh // HV, nh % HV
    batch, start, end, row = sequence_rows(n, cu_seqlens, offsets, T, SIZE, PACKED)
    length = end - start
    token = batch * T + start
    rows, cv, state_mask, state_at = state_tile(nh, vb, K, V, BK, BV, V_FIRST)
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial + state_at, mask=state_mask, other=0.0).to(tl.float32)
    steps = tl.arange(0, SIZE)
    w_ptr = w + (token * HV + hv) * K
    u_ptr = u + (token * HV + hv) * V
    if OUTPUTS:
        m_ptr = attend + (token * HV + hv) * SIZE
        o_ptr = o + (token * HV + hv) * V
        s_ptr = diag_scores + token * HV + hv
    else:
        n_ptr = v_new + (token * HV + hv) * V
        h_ptr = h + (row * HV + hv) * K * V + rows[:, None] * V + cv[None, :]
    k_ptr = k + (token * HV + hv) * K
    q_ptr = q + (token * HV + hv) * K
    G_ptr = G + (token * HV + hv) * K
    for c in tl.range(0, tl.cdiv(length, SIZE), num_stages=STAGES):
        t = c * SIZE + steps
        inside = t < length
        last = tl.minimum(c * SIZE + SIZE, length) - 1
        step_row = t[:, None].to(tl.int64) * HV
        k_mask = inside[:, None] & (rows[None, :] < K)
        v_mask = inside[:, None] & (cv[None, :] < V)
        before = S.to(w.dtype.element_ty)
        if not OUTPUTS:
            tl.store(h_ptr + c.to(tl.int64) * HV * K * V, before, mask=state_mask)
        W = tl.load(w_ptr + step_row * K + rows[None, :], mask=k_mask, other=0.0)
        U = tl.load(u_ptr + step_row * V + cv[None, :], mask=v_mask, other=0.0).to(tl.float32)
        U -= tl.dot(W, before, input_precision=PRECISION)
        if OUTPUTS:
            M = tl.load(m_ptr + step_row * SIZE + steps[None, :], mask=inside[:, None], other=0.0)
            Q = tl.load(q_ptr + step_row * K + rows[None, :], mask=k_mask, other=0.0)
            out = tl.dot(Q, before, input_precision=PRECISION)
            update = U.to(M.dtype)
            out += tl.dot(M, update, input_precision=PRECISION)
            out += tl.load(s_ptr + t.to(tl.int64) * HV, mask=inside, other=0.0)[:, None] * update.to(tl.float32)
            tl.store(o_ptr + step_row * V + cv[None, :], out.to(o.dtype.element_ty), mask=v_mask)
        else:
            tl.store(n_ptr + step_row * V + cv[None, :], U.to(v_new.dtype.element_ty), mask=v_mask)
        keys = tl.load(k_ptr + step_row * K + rows[None, :], mask=k_mask, other=0.0)
        decay = exp32(tl.load(G_ptr + last.to(tl.int64) * HV * K + rows, mask=rows < K, other=0.0))
        S = S * decay[:, None]
        S += tl.dot(tl.trans(keys), U.to(keys.dtype), input_precision=PRECISION)
    if HAS_FINAL:
        tl.store(final + state_at, S.to(final.dtype.element_ty), mask=state_mask)
