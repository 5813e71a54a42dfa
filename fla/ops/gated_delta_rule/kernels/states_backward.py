"""The recurrence of `states` in reverse: gradients of states and updates, from the last chunk to the first.

    dU' = M^T dO + (e^{G_C - G} K) dS;   D = (I + X)^T dU'
    dS <- e^{G_C} dS + (scale e^G Q)^T dO - K^T (e^G beta D)

One program owns a block of value columns of one head of one sequence and holds that part of the state's gradient in
registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.gated_delta_rule.kernels.forward import apply_inverse
from fla.ops.gated_delta_rule.kernels.turns import of_turn
from fla.ops.launch.kernels.layout import sequence_rows
from fla.ops.recurrence.kernels.gates import exp32
from fla.ops.recurrence.kernels.state import state_tile


@triton.jit(do_not_specialize=['T', 'heads', 'turn'])
def states_backward(
    q,
    k,
    beta32,
    attend,
    diag_scores,
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
    """Grid (N * HV * ceil(V / BV),), or with TURNS > 1 (programs_of(N * HV, ceil(V / BV), TURNS),). BK >= K.

    Args:
        q, k: `[B, T, H, K]`, by strides; the last is 1, and SIZE times the second fits in 32 bits.
        beta32: beta after sigmoid and doubling, float32 `[B, T, HV]`.
        attend, diag_scores: M below its diagonal, `[B, T, HV, SIZE]` in k's dtype, and on it, float32 `[B, T, HV]`;
            contiguous.
        inverse: X, strictly lower triangular, `[B, T, HV, SIZE]` in k's dtype, contiguous.
        do: gradient of o, `[B, T, HV, V]` in k's dtype, contiguous.
        G: running log decay, float32 or float64 `[B, T, HV]`.
        rq, rk: 1 / norm of q and k, float32 `[B, T, HV]`, read with NORMALISED.
        D: written, `[B, T, HV, V]` in k's dtype.
        dh: written, gradient of the state after each chunk, `[rows, HV, K, V]` in k's dtype.
        d_final, d_initial: `[N, HV, K, V]` or, with V_FIRST, `[N, HV, V, K]`; read with HAS_FINAL, written with HAS_INITIAL.
        carried: gradient of the state between one turn and the next, float32 `[N, HV, K, V]`; with TURNS > 1, for equal
            lengths only.
        heads: N * HV. turn: index of this turn.
    """
    pid = tl.program_id(0)
    nh, vb, begin, stop = of_turn(pid, turn, tl.cdiv(T, SIZE), tl.cdiv(V, BV), TURNS)
    if TURNS > 1 and nh >= heads:
        return
    n, hv = nh // HV, nh % HV
    batch, start, end, row = sequence_rows(n, cu_seqlens, offsets, T, SIZE, PACKED)
    length = end - start
    chunks = tl.cdiv(length, SIZE)
    if PACKED:
        stop = chunks
    start64, head = start.to(tl.int64), (hv // (HV // H)).to(tl.int64)
    token = (batch * T + start64) * HV + hv
    rows, cv, state_mask, state_at = state_tile(nh, vb, K, V, BK, BV, V_FIRST)
    dS = tl.zeros([BK, BV], tl.float32)
    if HAS_FINAL:
        dS = tl.load(d_final + state_at, mask=state_mask, other=0.0).to(tl.float32)
    if TURNS > 1:
        carried_at = carried + nh.to(tl.int64) * K * V + (rows[:, None] * V + cv[None, :])
        if begin > 0:
            dS = tl.load(carried_at, mask=state_mask, other=0.0)
    # Offsets inside a chunk fit in int32; offsets of the chunk are int64.
    steps = tl.arange(0, SIZE)
    step_row = steps * HV
    of_v = steps[:, None] * HV * V + cv[None, :]
    of_m = steps[:, None] * HV * SIZE + steps[None, :]
    time = steps[:, None]
    q_ptr = q + batch * q_b + start64 * q_t + head * q_h
    k_ptr = k + batch * k_b + start64 * k_t + head * k_h
    dh_ptr = dh + (row * HV + hv) * K * V + (rows[:, None] * V + cv[None, :])
    for i in tl.range(begin, stop, num_stages=STAGES):
        c = chunks - 1 - i
        first = c.to(tl.int64) * SIZE
        chunk_row = token + first * HV
        count = tl.minimum(length - c * SIZE, SIZE)
        inside = steps < count
        tl.store(dh_ptr + c.to(tl.int64) * HV * K * V, dS.to(dh.dtype.element_ty), mask=state_mask)
        k_mask = inside[:, None] & (rows[None, :] < K)
        v_mask = inside[:, None] & (cv[None, :] < V)
        at_keys = k_ptr + first * k_t + (time * k_t + rows[None, :])
        keys = tl.load(at_keys, mask=k_mask, other=0.0)
        G_last = tl.load(G + chunk_row + (count - 1) * HV)
        Gc = tl.load(G + chunk_row + step_row, mask=inside, other=0.0)
        to_end = tl.where(inside, exp32(tl.where(inside, G_last - Gc, 0.0)), 0.0)
        q_factor = exp32(Gc) * scale
        k_factor = -exp32(Gc)
        if NORMALISED:
            k_norm = tl.load(rk + chunk_row + step_row, mask=inside, other=0.0)
            to_end *= k_norm
            k_factor *= k_norm
            q_factor *= tl.load(rq + chunk_row + step_row, mask=inside, other=0.0)
        dU = tl.dot(keys, dS.to(keys.dtype), input_precision=PRECISION) * to_end[:, None]
        dO = tl.load(do + chunk_row * V + of_v, mask=v_mask, other=0.0)
        dU += tl.load(diag_scores + chunk_row + step_row, mask=inside, other=0.0)[:, None] * dO.to(tl.float32)
        M = tl.load(attend + chunk_row * SIZE + of_m, mask=inside[:, None], other=0.0)
        dU = tl.dot(tl.trans(M), dO, dU, input_precision=PRECISION)
        X = tl.load(inverse + chunk_row * SIZE + of_m, mask=inside[:, None], other=0.0)
        D_tile = apply_inverse(tl.trans(X), dU, PRECISION)
        tl.store(D + chunk_row * V + of_v, D_tile.to(D.dtype.element_ty), mask=v_mask)
        k_factor *= tl.load(beta32 + chunk_row + step_row, mask=inside, other=0.0)
        dS = dS * exp32(G_last)
        if keys.dtype == tl.float32:
            # A float32 tile is loaded again, because it does not fit in registers until here.
            keys = tl.load(at_keys, mask=k_mask, other=0.0)
        # Added, because a product that is subtracted gets registers of its own.
        dS += tl.dot(tl.trans(keys), (D_tile * k_factor[:, None]).to(keys.dtype), input_precision=PRECISION)
        Q = tl.load(q_ptr + first * q_t + (time * q_t + rows[None, :]), mask=k_mask, other=0.0)
        dO = (dO.to(tl.float32) * q_factor[:, None]).to(do.dtype.element_ty)
        dS += tl.dot(tl.trans(Q), dO, input_precision=PRECISION)
    if TURNS > 1:
        tl.store(carried_at, dS, mask=state_mask)
    if HAS_INITIAL:
        # Each turn overwrites it.
        tl.store(d_initial + state_at, dS.to(d_initial.dtype.element_ty), mask=state_mask)
