"""Gates of the chunked gated delta rule, and the gradients of their arguments."""

from __future__ import annotations

import triton
import triton.language as tl

from fla.ops.launch.kernels.layout import chunk_of
from fla.ops.recurrence.kernels.gates import sigmoid, softplus


@triton.jit
def gate_of(g, hv, A_log, dt_bias, GATE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Returns the log decay g, or with GATE -exp(A_log) softplus(g + dt_bias); at least -1000: -inf - -inf is NaN."""
    if GATE:
        if HAS_BIAS:
            g += tl.load(dt_bias + hv).to(tl.float32)
        g = -tl.exp(tl.load(A_log + hv).to(tl.float32)) * softplus(g)
    return tl.where(g < -1000.0, -1000.0, g)


@triton.jit(do_not_specialize=['T', 'tokens'])
def gates_backward(
    g,
    beta,
    A_log,
    dt_bias,
    dG_parts,
    dbeta_parts,
    dg,
    dbeta,
    dA_log_parts,
    cu_seqlens,
    table,
    T,
    tokens,
    g_b,
    g_t,
    g_h,
    b_b,
    b_t,
    b_h,
    SHARES: tl.constexpr,
    HV: tl.constexpr,
    SIZE: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid (rows * HV,). Sums the gradients of G and beta over parts, and computes those of the arguments g and beta.

    Args:
        g, beta: `[B, T, HV]` by strides. A_log, dt_bias: `[HV]`, read with GATE.
        dG_parts, dbeta_parts: float32 `[SHARES, B, T, HV]`, of `intra_chunk_bwd` and `inter_chunk_bwd`.
        dg: written, `[B, T, HV]`, contiguous. With GATE it is the gradient of the raw gate, and its sum that of dt_bias.
        dbeta: written, `[B, T, HV]`, contiguous.
        dA_log_parts: written with GATE, each step's part of the gradient of A_log, float32 `[B, T, HV]`, contiguous.
        tokens: B * T.
    """
    pid = tl.program_id(0)
    row, hv = pid // HV, pid % HV
    n, c, batch, start, end = chunk_of(row, table, cu_seqlens, T, SIZE, PACKED)
    if n < 0:
        return
    first = start + c * SIZE
    steps = tl.arange(0, SIZE)
    inside = first + steps < end
    batch64, first64, hv64 = (batch + pid * 0).to(tl.int64), (first + pid * 0).to(tl.int64), hv.to(tl.int64)
    token_rows = (batch64 * T + first64) * HV + hv + steps.to(tl.int64) * HV
    dG_tile = tl.zeros([SIZE], tl.float32)
    dbeta_tile = tl.zeros([SIZE], tl.float32)
    for part in range(SHARES):
        at = token_rows + (pid * 0 + part).to(tl.int64) * tokens * HV
        dG_tile += tl.load(dG_parts + at, mask=inside, other=0.0)
        dbeta_tile += tl.load(dbeta_parts + at, mask=inside, other=0.0)
    # G_i is the sum of g_j for j <= i.
    dg_tile = tl.sum(tl.where(steps[:, None] >= steps[None, :], dG_tile[:, None], 0.0), 0)
    if GATE:
        raw = tl.load(g + batch64 * g_b + first64 * g_t + hv64 * g_h + steps.to(tl.int64) * g_t, mask=inside, other=0.0)
        raw = raw.to(tl.float32)
        if HAS_BIAS:
            raw += tl.load(dt_bias + hv).to(tl.float32)
        dg_tile *= -tl.exp(tl.load(A_log + hv).to(tl.float32))
        tl.store(dA_log_parts + token_rows, dg_tile * softplus(raw), mask=inside)
        dg_tile *= sigmoid(raw)
    tl.store(dg + token_rows, dg_tile.to(dg.dtype.element_ty), mask=inside)
    if SIGMOID:
        logit = tl.load(beta + batch64 * b_b + first64 * b_t + hv64 * b_h + steps.to(tl.int64) * b_t, mask=inside, other=0.0)
        logit = logit.to(tl.float32)
        dbeta_tile *= sigmoid(logit) * sigmoid(-logit)
        if DOUBLE:
            dbeta_tile *= 2.0
    tl.store(dbeta + token_rows, dbeta_tile.to(dbeta.dtype.element_ty), mask=inside)
