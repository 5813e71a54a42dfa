"""The recurrence of the gated delta rule over chunks, the only sequential part of the forward.

    U' = (I + X) beta (V - e^G K S);   S <- e^{G_C} S + (e^{G_C - G} K)^T U'

with I + X = (I + L)^-1. One program owns a block of value columns of one head of one sequence and holds that part of the
state in registers. Either it writes each S and U' for other kernels, or it writes the outputs

    O = scale e^G Q S + M U',

which saves two tensors and a kernel, but needs enough shared memory for the tiles that it loads ahead.
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
def states_forward(
    q,
    k,
    v,
    beta32,
    attend,
    diag_scores,
    inverse,
    G,
    rq,
    rk,
    h,
    v_new,
    o,
    initial,
    final,
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
    v_b,
    v_t,
    v_h,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NORMALISED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    TURNS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (N * HV * ceil(V / BV),), or with TURNS > 1 (programs_of(N * HV, ceil(V / BV), TURNS),). BK >= K.

    The grid has one axis, because the others end at 65,535.

    Args:
        q, k: `[B, T, H, K]`, v: `[B, T, HV, V]`, by strides; the last is 1, and SIZE times the second fits in 32 bits.
            q is read with OUTPUTS.
        beta32: beta after sigmoid and doubling, float32 `[B, T, HV]`.
        attend, diag_scores: M below its diagonal, `[B, T, HV, SIZE]` in k's dtype, and on it, float32 `[B, T, HV]`;
            contiguous, read with OUTPUTS.
        inverse: X, strictly lower triangular, `[B, T, HV, SIZE]` in k's dtype, contiguous.
        G: running log decay, float32 or float64 `[B, T, HV]`.
        rq, rk: 1 / norm of q and k, float32 `[B, T, HV]`, read with NORMALISED.
        h: written without OUTPUTS, state before each chunk, `[rows, HV, K, V]` in k's dtype.
        v_new: written without OUTPUTS, U', `[B, T, HV, V]` in k's dtype.
        o: written with OUTPUTS, `[B, T, HV, V]`.
        initial, final: `[N, HV, K, V]` or, with V_FIRST, `[N, HV, V, K]`; read with HAS_INITIAL, written with HAS_FINAL.
        carried: state between one turn and the next, float32 `[N, HV, K, V]`; with TURNS > 1, for equal lengths only.
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
    start64, hv64, head = start.to(tl.int64), hv.to(tl.int64), (hv // (HV // H)).to(tl.int64)
    rows, cv, state_mask, state_at = state_tile(nh, vb, K, V, BK, BV, V_FIRST)
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial + state_at, mask=state_mask, other=0.0).to(tl.float32)
    if TURNS > 1:
        carried_at = carried + nh.to(tl.int64) * K * V + (rows[:, None] * V + cv[None, :])
        if begin > 0:
            S = tl.load(carried_at, mask=state_mask, other=0.0)
    token = (batch * T + start64) * HV + hv
    # Offsets inside a chunk fit in int32; offsets of the chunk are int64.
    steps = tl.arange(0, SIZE)
    step_row = steps * HV
    of_v = steps[:, None] * HV * V + cv[None, :]
    of_m = steps[:, None] * HV * SIZE + steps[None, :]
    time = steps[:, None]
    q_ptr = q + batch * q_b + start64 * q_t + head * q_h
    k_ptr = k + batch * k_b + start64 * k_t + head * k_h
    v_ptr = v + batch * v_b + start64 * v_t + hv64 * v_h
    h_ptr = h
    if not OUTPUTS:
        h_ptr = h + (row * HV + hv) * K * V + (rows[:, None] * V + cv[None, :])
        has_chunk = (rows * 0 + begin < stop)[:, None]
        tl.store(h_ptr + begin.to(tl.int64) * HV * K * V, S.to(h.dtype.element_ty), mask=state_mask & has_chunk)
    for c in tl.range(begin, stop, num_stages=STAGES):
        first = c.to(tl.int64) * SIZE
        chunk_row = token + first * HV
        count = tl.minimum(length - c * SIZE, SIZE)
        inside = steps < count
        k_mask = inside[:, None] & (rows[None, :] < K)
        v_mask = inside[:, None] & (cv[None, :] < V)
        before = S.to(k.dtype.element_ty)
        at_keys = k_ptr + first * k_t + (time * k_t + rows[None, :])
        keys = tl.load(at_keys, mask=k_mask, other=0.0)
        Gc = tl.load(G + chunk_row + step_row, mask=inside, other=0.0)
        G_last = tl.load(G + chunk_row + (count - 1) * HV)
        from_start, to_end = exp32(Gc), tl.where(inside, exp32(tl.where(inside, G_last - Gc, 0.0)), 0.0)
        k_factor = -from_start
        if NORMALISED:
            k_norm = tl.load(rk + chunk_row + step_row, mask=inside, other=0.0)
            k_factor *= k_norm
            to_end *= k_norm
        R = tl.dot(keys, before, input_precision=PRECISION) * k_factor[:, None]
        values = tl.load(v_ptr + first * v_t + (time * v_t + cv[None, :]), mask=v_mask, other=0.0)
        bt = tl.load(beta32 + chunk_row + step_row, mask=inside, other=0.0)
        R = (R + values.to(tl.float32)) * bt[:, None]
        X = tl.load(inverse + chunk_row * SIZE + of_m, mask=inside[:, None], other=0.0)
        U = apply_inverse(X, R, PRECISION)
        if not OUTPUTS:
            tl.store(v_new + chunk_row * V + of_v, U.to(v_new.dtype.element_ty), mask=v_mask)
        update = U.to(k.dtype.element_ty)
        if keys.dtype == tl.float32:
            # A float32 tile is loaded again, because it does not fit in registers until here.
            keys = tl.load(at_keys, mask=k_mask, other=0.0)
        S = S * exp32(G_last)
        S += tl.dot(tl.trans(keys), (U * to_end[:, None]).to(keys.dtype), input_precision=PRECISION)
        if not OUTPUTS:
            # The state before the next chunk. Its store goes through shared memory, which is free only at a chunk's end.
            next_mask = state_mask & (rows * 0 + (count + c * SIZE) < length)[:, None]
            tl.store(h_ptr + (c + 1).to(tl.int64) * HV * K * V, S.to(h.dtype.element_ty), mask=next_mask)
        if OUTPUTS:
            Q = tl.load(q_ptr + first * q_t + (time * q_t + rows[None, :]), mask=k_mask, other=0.0)
            q_factor = from_start * scale
            if NORMALISED:
                q_factor *= tl.load(rq + chunk_row + step_row, mask=inside, other=0.0)
            out = tl.dot(Q, before, input_precision=PRECISION) * q_factor[:, None]
            out += tl.load(diag_scores + chunk_row + step_row, mask=inside, other=0.0)[:, None] * U
            M = tl.load(attend + chunk_row * SIZE + of_m, mask=inside[:, None], other=0.0)
            out = tl.dot(M, update, out, input_precision=PRECISION)
            tl.store(o + chunk_row * V + of_v, out.to(o.dtype.element_ty), mask=v_mask)
    if TURNS > 1:
        tl.store(carried_at, S, mask=state_mask)
    if HAS_FINAL:
        # Each turn overwrites it.
        tl.store(final + state_at, S.to(final.dtype.element_ty), mask=state_mask)
