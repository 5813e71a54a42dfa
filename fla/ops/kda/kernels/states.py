"""The recurrence of Kimi delta attention over chunks: the only part that is sequential.

    U' = U - W S;   S <- decay S + K'^T U'

One program owns a block of value columns of one head of one sequence and keeps its state in registers. Either it writes each
S and U' for other kernels to read, or, where shared memory holds what it loads ahead, the outputs that follow from them,

    O = Q' S + M U',

which saves two tensors and a kernel. Q' and K' are queries and keys with their decays from the chunk's start and to its end,
and decay is that of the whole chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import sequence_rows
from fla.ops.recurrence.kernels.gates import exp32


@triton.jit(do_not_specialize=['T'])
def states_forward(
    q,
    k,
    attend,
    selves,
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
    """Grid (N * HV * ceil(V / BV),): one axis, because the others end at 65,535.

    Args:
        q, k: scale e^G q and e^{G_C - G} k, `[B, T, HV, K]`, contiguous.
        attend, selves: M below and on its diagonal, `[B, T, HV, SIZE]` in k's dtype and float32 `[B, T, HV]`, contiguous.
            They and q are read with OUTPUTS.
        w `[B, T, HV, K]`, u `[B, T, HV, V]`: contiguous, in k's dtype.
        G: running log decay, float32 or float64 `[B, T, HV, K]`.
        h: `[rows, HV, K, V]`, states before each chunk; v_new: `[B, T, HV, V]`; both written, in k's dtype, but with OUTPUTS
            o `[B, T, HV, V]` instead.
        initial, final: `[N, HV, K, V]` or, V_FIRST, `[N, HV, V, K]`.
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
    token = batch * T + start
    rows = tl.arange(0, BK)
    cv = vb * BV + tl.arange(0, BV)
    state_mask = (rows[:, None] < K) & (cv[None, :] < V)
    state_at = nh.to(tl.int64) * K * V + (cv[None, :] * K + rows[:, None] if V_FIRST else rows[:, None] * V + cv[None, :])
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial + state_at, mask=state_mask, other=0.0).to(tl.float32)
    steps = tl.arange(0, SIZE)
    w_ptr = w + (token * HV + hv) * K
    u_ptr = u + (token * HV + hv) * V
    if OUTPUTS:
        m_ptr = attend + (token * HV + hv) * SIZE
        o_ptr = o + (token * HV + hv) * V
        s_ptr = selves + token * HV + hv
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
        tile = t[:, None].to(tl.int64) * HV
        k_mask = inside[:, None] & (rows[None, :] < K)
        v_mask = inside[:, None] & (cv[None, :] < V)
        before = S.to(w.dtype.element_ty)
        if not OUTPUTS:
            tl.store(h_ptr + c.to(tl.int64) * HV * K * V, before, mask=state_mask)
        W = tl.load(w_ptr + tile * K + rows[None, :], mask=k_mask, other=0.0)
        U = tl.load(u_ptr + tile * V + cv[None, :], mask=v_mask, other=0.0).to(tl.float32)
        U -= tl.dot(W, before, input_precision=PRECISION)
        if OUTPUTS:
            M = tl.load(m_ptr + tile * SIZE + steps[None, :], mask=inside[:, None], other=0.0)
            Q = tl.load(q_ptr + tile * K + rows[None, :], mask=k_mask, other=0.0)
            out = tl.dot(Q, before, input_precision=PRECISION)
            update = U.to(M.dtype)
            out += tl.dot(M, update, input_precision=PRECISION)
            out += tl.load(s_ptr + t.to(tl.int64) * HV, mask=inside, other=0.0)[:, None] * update.to(tl.float32)
            tl.store(o_ptr + tile * V + cv[None, :], out.to(o.dtype.element_ty), mask=v_mask)
        else:
            tl.store(n_ptr + tile * V + cv[None, :], U.to(v_new.dtype.element_ty), mask=v_mask)
        keys = tl.load(k_ptr + tile * K + rows[None, :], mask=k_mask, other=0.0)
        decay = exp32(tl.load(G_ptr + last.to(tl.int64) * HV * K + rows, mask=rows < K, other=0.0))
        S = S * decay[:, None]
        S += tl.dot(tl.trans(keys), U.to(keys.dtype), input_precision=PRECISION)
    if HAS_FINAL:
        tl.store(final + state_at, S.to(final.dtype.element_ty), mask=state_mask)
