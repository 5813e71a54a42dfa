"""Argument checks of the gated delta rule."""

from __future__ import annotations

import torch

from fla.backends import check_tensors
from fla.ops.checks import check_cu_seqlens, check_given, check_log_gate, check_scale, is_finite_float
from fla.ops.recurrence.checks import (
    check_chunk_options,
    check_common_gates,
    check_gate_parameters,
    check_per_token,
    check_qkv,
    check_state,
    is_common_case,
)


def check_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    cp_context: object,
    use_gate_in_kernel: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    chunk_size: int | None,
    check_values: bool,
) -> None:
    """Checks a call of `chunk_gated_delta_rule`, whose docstring says what is allowed."""
    common = cu_seqlens is cu_seqlens_cpu is chunk_indices is None and cp_context is None and chunk_size is None
    if (
        common
        and (scale is None or is_finite_float(scale))
        and not check_values
        and is_common_case(q, k, v, g, beta, initial_state, state_v_first, False)
    ):
        return check_common_gates(q, v, use_gate_in_kernel, A_log, dt_bias, per_channel=False)
    check_scale(scale)
    check_given(q=q, k=k, v=v, g=g, beta=beta)
    check_tensors(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias
    )
    check_qkv(q, k, v)
    check_per_token('g', g, q, v)
    check_per_token('beta', beta, q, v)
    count = check_cu_seqlens(q, cu_seqlens, cu_seqlens_cpu, check_values)
    check_state(initial_state, q, v, count, state_v_first)
    check_gate_parameters(q, v, use_gate_in_kernel, A_log, dt_bias, per_channel=False)
    check_chunk_options(chunk_size, (16, 32, 64), chunk_indices, cp_context)
    if check_values and not use_gate_in_kernel:
        check_log_gate('g', g)


def check_fused_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    gv: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    use_gate_in_kernel: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    check_values: bool,
) -> None:
    """Checks a call of `fused_recurrent_gated_delta_rule`, whose docstring says what is allowed."""
    common = gk is gv is cu_seqlens is None
    if (
        common
        and (scale is None or is_finite_float(scale))
        and g is not None
        and beta is not None
        and not check_values
        and is_common_case(q, k, v, g, beta, initial_state, state_v_first, False)
    ):
        return check_common_gates(q, v, use_gate_in_kernel, A_log, dt_bias, per_channel=False)
    check_scale(scale)
    check_given(q=q, k=k, v=v)
    check_tensors(
        q=q,
        k=k,
        v=v,
        g=g,
        gk=gk,
        gv=gv,
        beta=beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    check_qkv(q, k, v)
    for name, gate, dim in (('g', g, None), ('gk', gk, q.shape[3]), ('gv', gv, v.shape[3])):
        if gate is not None:
            check_per_token(name, gate, q, v, channels=dim)
            if check_values and not (use_gate_in_kernel and name == 'g'):
                check_log_gate(name, gate)
    if beta is not None:
        check_per_token('beta', beta, q, v)
    count = check_cu_seqlens(q, cu_seqlens, None, check_values)
    check_state(initial_state, q, v, count, state_v_first)
    if use_gate_in_kernel and g is None:
        raise ValueError('use_gate_in_kernel=True needs the raw gate g [B, T, HV], got None')
    check_gate_parameters(q, v, use_gate_in_kernel, A_log, dt_bias, per_channel=False)
