"""The recurrence of `states` in reverse: what comes back through the states, from the last chunk to the first.

    dU' = M^T dO + (e^{G_C - G} K) dS;   D = (I + X)^T dU'
    dS <- e^{G_C} dS + (scale e^G Q)^T dO - K^T (e^G beta D)

One program owns a block of value columns of one head of one sequence and keeps the state's gradient in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.gated_delta_rule.kernels.forward import solved
from fla.ops.gated_delta_rule.kernels.turns import of_turn
from fla.ops.launch.kernels.layout import sequence_rows
from fla.ops.recurrence.kernels.gates import exp32


@triton.jit(do_not_specialize=['T', 'heads', 'turn'])
def states_backward(
    q,
    k,
    beta32,
    attend,
    selves,
    inverse,
    do,
    G,
    rq,
    rk,
    D,
    dh,
    d_final,
    d_initial,
    carried,
    cu_seqlens,
    offsets,
    scale,
    T,
    heads,
    turn,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    TURNS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (N * HV * ceil(V / BV),), or, in TURNS, of `programs_of`. BK >= K.

    Args:
        q, k: `[B, T, H, K]`, by strides: the last is 1, and SIZE times the second fits in 32 bits.
        beta32: beta as it is applied, float32 `[B, T, HV]`.
        attend, selves: M below and on its diagonal, `[B, T, HV, SIZE]` in k's dtype and float32 `[B, T, HV]`, contiguous.
        inverse: X, strictly triangular, `[B, T, HV, SIZE]`, do `[B, T, HV, V]`: contiguous, in k's dtype.
        G: running log decay, float32 or float64 `[B, T, HV]`.
        rq, rk: 1 / norm of q and k, float32 `[B, T, HV]`, read with NORMALISED.
        D: `[B, T, HV, V]` in k's dtype, written.
        dh: `[rows, HV, K, V]` in k's dtype, written: the gradient of the state after each chunk.
        d_final, d_initial: `[N, HV, K, V]` or, V_FIRST, `[N, HV, V, K]`; read if HAS_FINAL, written if HAS_INITIAL.
        carried: float32 `[N, HV, K, V]`, gradients between one turn and the next; TURNS of equal lengths only.
    """
    pid = tl.program_id(0)
    nh, vb, begin, stop = of_turn(pid, turn, tl.cdiv(T, SIZE), tl.cdiv(V, BV), TURNS)
    if TURNS > 1 and nh >= heads:
        return
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
    if PACKED:
        stop = chunks
    start64, head = start.to(tl.int64), (hv // (HV // H)).to(tl.int64)
    token = (batch * T + start64) * HV + hv
    rows = tl.arange(0, BK)
    cv = vb * BV + tl.arange(0, BV)
    state_mask = (rows[:, None] < K) & (cv[None, :] < V)
    state_at = nh.to(tl.int64) * K * V + (cv[None, :] * K + rows[:, None] if V_FIRST else rows[:, None] * V + cv[None, :])
    dS = tl.zeros([BK, BV], tl.float32)
    if HAS_FINAL:
        dS = tl.load(d_final + state_at, mask=state_mask, other=0.0).to(tl.float32)
    if TURNS > 1:
        carried_at = carried + nh.to(tl.int64) * K * V + (rows[:, None] * V + cv[None, :])
        if begin > 0:
            dS = tl.load(carried_at, mask=state_mask, other=0.0)
    # of the steps within a chunk; int64 is for what comes before them
    steps = tl.arange(0, SIZE)
    of_one = steps * HV
    of_v = steps[:, None] * HV * V + cv[None, :]
    of_m = steps[:, None] * HV * SIZE + steps[None, :]
    time = steps[:, None]
    q_ptr = q + batch * q_b + start64 * q_t + head * q_h
    k_ptr = k + batch * k_b + start64 * k_t + head * k_h
    dh_ptr = dh + (row * HV + hv) * K * V + (rows[:, None] * V + cv[None, :])
    for i in tl.range(begin, stop, num_stages=STAGES):
        c = chunks - 1 - i
        first = c.to(tl.int64) * SIZE
        own = token + first * HV
        count = tl.minimum(length - c * SIZE, SIZE)
        inside = steps < count
        tl.store(dh_ptr + c.to(tl.int64) * HV * K * V, dS.to(dh.dtype.element_ty), mask=state_mask)
        k_mask = inside[:, None] & (rows[None, :] < K)
        v_mask = inside[:, None] & (cv[None, :] < V)
        at_keys = k_ptr + first * k_t + (time * k_t + rows[None, :])
        keys = tl.load(at_keys, mask=k_mask, other=0.0)
        G_last = tl.load(G + own + (count - 1) * HV)
        Gc = tl.load(G + own + of_one, mask=inside, other=0.0)
        left = tl.where(inside, exp32(tl.where(inside, G_last - Gc, 0.0)), 0.0)
        q_factor = exp32(Gc) * scale
        k_factor = -exp32(Gc)
        if NORMALISED:
            k_norm = tl.load(rk + own + of_one, mask=inside, other=0.0)
            left *= k_norm
            k_factor *= k_norm
            q_factor *= tl.load(rq + own + of_one, mask=inside, other=0.0)
        dU = tl.dot(keys, dS.to(keys.dtype), input_precision=PRECISION) * left[:, None]
        dO = tl.load(do + own * V + of_v, mask=v_mask, other=0.0)
        dU += tl.load(selves + own + of_one, mask=inside, other=0.0)[:, None] * dO.to(tl.float32)
        M = tl.load(attend + own * SIZE + of_m, mask=inside[:, None], other=0.0)
        dU = tl.dot(tl.trans(M), dO, dU, input_precision=PRECISION)
        X = tl.load(inverse + own * SIZE + of_m, mask=inside[:, None], other=0.0)
        dE = solved(tl.trans(X), dU, PRECISION)
        tl.store(D + own * V + of_v, dE.to(D.dtype.element_ty), mask=v_mask)
        k_factor *= tl.load(beta32 + own + of_one, mask=inside, other=0.0)
        dS = dS * exp32(G_last)
        if keys.dtype == tl.float32:
            # of float32 there are not the registers to keep all of it until here
            keys = tl.load(at_keys, mask=k_mask, other=0.0)
        # added, since a product that is subtracted gets registers of its own
        dS += tl.dot(tl.trans(keys), (dE * k_factor[:, None]).to(keys.dtype), input_precision=PRECISION)
        Q = tl.load(q_ptr + first * q_t + (time * q_t + rows[None, :]), mask=k_mask, other=0.0)
        dO = (dO.to(tl.float32) * q_factor[:, None]).to(do.dtype.element_ty)
        dS += tl.dot(tl.trans(Q), dO, input_precision=PRECISION)
    if TURNS > 1:
        tl.store(carried_at, dS, mask=state_mask)
    if HAS_INITIAL:
        # each turn writes over it
        tl.store(d_initial + state_at, dS.to(d_initial.dtype.element_ty), mask=state_mask)
