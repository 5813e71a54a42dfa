"""The delta rules step by step in one launch, for decoding, with gates, norms and the update of the state inside.

    S <- decay S;   u = beta (v - k^T S);   S <- S + k u^T;   o = (scale q)^T S

Sources: Yang et al. 2024, arXiv 2412.06464 (a decay per head), and Kimi Team 2025, arXiv 2510.26692 (a decay per channel).
One program owns a block of value columns of one head of one sequence, and holds that part of the state in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import sequence_span
from fla.ops.recurrence.kernels.gates import beta_of, sigmoid, softplus

# Numbers have fixed types, and nothing is specialised but the alignment of the states, which are most of what a step reads
# and writes. `decode` can therefore select the compiled kernel from dtypes and flags alone.
_TENSORS = ['q', 'k', 'v', 'g', 'gk', 'gv', 'beta', 'A_log', 'dt_bias', 'o', 'cu_seqlens']
_NUMBERS = ['scale', 'lower_bound', 'T', *(f'{x}_{axis}' for x in ('q', 'k', 'v', 'g', 'gk', 'gv', 'b') for axis in 'bth')]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TENSORS)
def recurrent(
    q,
    k,
    v,
    g,
    gk,
    gv,
    beta,
    A_log,
    dt_bias,
    initial,
    o,
    final,
    cu_seqlens,
    scale: tl.float32,
    lower_bound: tl.float32,
    T: tl.int64,
    q_b: tl.int64,
    q_t: tl.int64,
    q_h: tl.int64,
    k_b: tl.int64,
    k_t: tl.int64,
    k_h: tl.int64,
    v_b: tl.int64,
    v_t: tl.int64,
    v_h: tl.int64,
    g_b: tl.int64,
    g_t: tl.int64,
    g_h: tl.int64,
    gk_b: tl.int64,
    gk_t: tl.int64,
    gk_h: tl.int64,
    gv_b: tl.int64,
    gv_t: tl.int64,
    gv_h: tl.int64,
    b_b: tl.int64,
    b_t: tl.int64,
    b_h: tl.int64,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_G: tl.constexpr,
    HAS_GK: tl.constexpr,
    HAS_GV: tl.constexpr,
    HAS_BETA: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid (N * HV * ceil(V / BV),): one axis, because the others end at 65,535. BK >= K.

    Args:
        q, k: `[B, T, H, K]`, v: `[B, T, HV, V]`, by strides, the last 1. Divided by their norms with NORMALISE.
        g, gk, gv: log decays `[B, T, HV]`, `[B, T, HV, K]` and `[B, T, HV, V]`, by strides; read with HAS_G, HAS_GK and
            HAS_GV. With GATE, g (or gk without g) is a raw gate.
        beta: `[B, T, HV]` by strides, read with HAS_BETA.
        A_log, dt_bias: `[HV]`, and `[HV]` or, for gk, `[HV * K]`; read with GATE and HAS_A or HAS_BIAS.
        initial, final: `[N, HV, K, V]` or, with V_FIRST, `[N, HV, V, K]`; read with HAS_INITIAL, written with HAS_FINAL.
        o: written, `[B, T, HV, V]`, contiguous.
        cu_seqlens: int32 or int64 `[N + 1]`, read with PACKED.
        lower_bound: of the log decay of gk, read with GATE and BOUNDED.
    """
    pid = tl.program_id(0)
    vb, nh = pid % tl.cdiv(V, BV), pid // tl.cdiv(V, BV)
    n, hv = (nh // HV).to(tl.int64), (nh % HV).to(tl.int64)
    h = hv // (HV // H)
    if PACKED:
        start, end = sequence_span(cu_seqlens, n, T)
        batch = n * 0
    else:
        start, end = (nh * 0), T
        batch = n
    ks = tl.arange(0, BK)
    vs = vb * BV + tl.arange(0, BV)
    in_k, in_v = ks < K, vs < V
    in_state = in_k[:, None] & in_v[None, :]
    at = nh.to(tl.int64) * K * V + (vs[None, :] * K + ks[:, None] if V_FIRST else ks[:, None] * V + vs[None, :])
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial + at, mask=in_state, other=0.0).to(tl.float32)
    rate = 1.0
    if GATE:
        if HAS_A:
            rate = tl.exp(tl.load(A_log + hv).to(tl.float32))
    for t in range(start, end):
        token = (batch * T + t).to(tl.int64)
        t64 = (t + nh * 0).to(tl.int64)
        Q = tl.load(q + batch * q_b + t64 * q_t + h * q_h + ks, mask=in_k, other=0.0).to(tl.float32)
        key = tl.load(k + batch * k_b + t64 * k_t + h * k_h + ks, mask=in_k, other=0.0).to(tl.float32)
        value = tl.load(v + batch * v_b + t64 * v_t + hv * v_h + vs, mask=in_v, other=0.0).to(tl.float32)
        if NORMALISE:
            Q *= tl.rsqrt(tl.sum(Q * Q, 0) + 1e-6)
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        if HAS_G:
            decay = tl.load(g + batch * g_b + t64 * g_t + hv * g_h).to(tl.float32)
            if GATE:
                if HAS_BIAS:
                    decay += tl.load(dt_bias + hv).to(tl.float32)
                decay = -rate * softplus(decay)
            S *= tl.exp(decay)
        if HAS_GK:
            decays = tl.load(gk + batch * gk_b + t64 * gk_t + hv * gk_h + ks, mask=in_k, other=0.0).to(tl.float32)
            if GATE and not HAS_G:
                if HAS_BIAS:
                    decays += tl.load(dt_bias + hv * K + ks, mask=in_k, other=0.0).to(tl.float32)
                decays = lower_bound * sigmoid(rate * decays) if BOUNDED else -rate * softplus(decays)
            S *= tl.exp(decays)[:, None]
        if HAS_GV:
            decays_v = tl.load(gv + batch * gv_b + t64 * gv_t + hv * gv_h + vs, mask=in_v, other=0.0).to(tl.float32)
            S *= tl.exp(decays_v)[None, :]
        update = value - tl.sum(S * key[:, None], 0)
        if HAS_BETA:
            update *= beta_of(tl.load(beta + batch * b_b + t64 * b_t + hv * b_h).to(tl.float32), SIGMOID, DOUBLE)
        S += key[:, None] * update[None, :]
        out = tl.sum(S * (Q * scale)[:, None], 0)
        tl.store(o + (token * HV + hv) * V + vs, out.to(o.dtype.element_ty), mask=in_v)
    if HAS_FINAL:
        tl.store(final + at, S.to(final.dtype.element_ty), mask=in_state)
