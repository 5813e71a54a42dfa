"""Launching `recurrent`: one kernel, no copy, no intermediate."""

from __future__ import annotations

import torch
import triton

from fla.ops.common.kernels.recurrent import recurrent

_NONE = (0, 0, 0)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    gv: torch.Tensor | None,
    beta: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float | None,
    *,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o `[B, T, HV, V]` in v's dtype and the final state in float32 or None; arguments as for the operations, checked."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    gk = None if gk is None else _rows(gk)
    gv = None if gv is None else _rows(gv)
    initial_state = None if initial_state is None else initial_state.contiguous()
    batch, length, heads, dim = q.shape
    value_heads, value_dim = v.shape[2:]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = torch.empty((batch, length, value_heads, value_dim), dtype=v.dtype, device=v.device)
    final = None
    if output_final_state:
        shape = (count, value_heads, value_dim, dim) if state_v_first else (count, value_heads, dim, value_dim)
        final = torch.empty(shape, dtype=torch.float32, device=v.device)
    if count == 0 or value_heads == 0:
        return o, final
    block_k = triton.next_power_of_2(dim)
    block_v = _value_block(count * value_heads, value_dim, block_k)
    recurrent[(count * value_heads * triton.cdiv(value_dim, block_v),)](
        *(q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, o, final, cu_seqlens),
        *(dim**-0.5 if scale is None else scale, lower_bound or 0.0, length),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(_NONE if g is None else g.stride()),
        *(_NONE if gk is None else gk.stride()[:3]),
        *(_NONE if gv is None else gv.stride()[:3]),
        *(_NONE if beta is None else beta.stride()),
        H=heads,
        HV=value_heads,
        K=dim,
        V=value_dim,
        BK=block_k,
        BV=block_v,
        HAS_G=g is not None,
        HAS_GK=gk is not None,
        HAS_GV=gv is not None,
        HAS_BETA=beta is not None,
        GATE=use_gate_in_kernel,
        HAS_A=A_log is not None,
        HAS_BIAS=dt_bias is not None,
        BOUNDED=lower_bound is not None,
        SIGMOID=use_beta_sigmoid_in_kernel,
        DOUBLE=allow_neg_eigval,
        NORMALISE=use_qk_l2norm_in_kernel,
        HAS_INITIAL=initial_state is not None,
        HAS_FINAL=final is not None,
        V_FIRST=state_v_first,
        PACKED=cu_seqlens is not None,
        num_warps=4 if block_k * block_v >= 2048 else 1,
        num_stages=1,
    )
    return o, final


def _value_block(programs: int, value_dim: int, block_k: int) -> int:
    """Few heads: narrow blocks, so that every multiprocessor has work; many: 32 columns, whole cache lines."""
    most = max(8, min(32, 8192 // block_k))
    return int(min(triton.next_power_of_2(value_dim), 8 if programs <= 64 else most))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """With the last dimension contiguous; it nearly always is."""
    return x if x.stride(-1) == 1 else x.contiguous()
