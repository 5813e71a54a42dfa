"""Argument checks of Kimi delta attention."""

from __future__ import annotations

import torch

from fla.backends import check_tensors
from fla.ops.checks import check_cu_seqlens, check_given, check_log_gate, check_scale, is_finite_float
from fla.ops.recurrence.checks import (
    check_chunk_options,
    check_common_gates,
    check_gate_parameters,
    check_lower_bound,
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
    use_gate_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
    return_intermediate_states: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    cp_context: object,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    chunk_size: int | None,
    check_values: bool,
) -> None:
    """Checks a call of `chunk_kda`, whose docstring says what is allowed."""
    common = cu_seqlens is cu_seqlens_cpu is None and cp_context is None and lower_bound is None and chunk_size is None
    common = common and (scale is None or is_finite_float(scale))
    if (
        common
        and not ((safe_gate and use_gate_in_kernel) or return_intermediate_states or check_values)
        and is_common_case(q, k, v, g, beta, initial_state, state_v_first, True)
    ):
        return check_common_gates(q, v, use_gate_in_kernel, A_log, dt_bias, per_channel=True)
    check_scale(scale)
    _check(q, k, v, g, beta, initial_state, use_gate_in_kernel, lower_bound, A_log, dt_bias, cu_seqlens)
    check_lower_bound(safe_gate, use_gate_in_kernel, lower_bound)
    count = check_cu_seqlens(q, cu_seqlens, cu_seqlens_cpu, check_values)
    check_state(initial_state, q, v, count, state_v_first)
    check_chunk_options(chunk_size, (32, 64), None, cp_context)
    if return_intermediate_states:
        _check_intermediate_states((q, k, v, g, beta, initial_state, A_log, dt_bias), cu_seqlens, cu_seqlens_cpu)
    if check_values and not use_gate_in_kernel:
        check_log_gate('g', g)


def check_fused_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    check_values: bool,
) -> None:
    """Checks a call of `fused_recurrent_kda`, whose docstring says what is allowed."""
    common = cu_seqlens is None and lower_bound is None and (scale is None or is_finite_float(scale))
    if common and not check_values and is_common_case(q, k, v, g, beta, initial_state, state_v_first, True):
        return check_common_gates(q, v, use_gate_in_kernel, A_log, dt_bias, per_channel=True)
    check_scale(scale)
    _check(q, k, v, g, beta, initial_state, use_gate_in_kernel, lower_bound, A_log, dt_bias, cu_seqlens)
    check_lower_bound(False, use_gate_in_kernel, lower_bound)
    count = check_cu_seqlens(q, cu_seqlens, None, check_values)
    check_state(initial_state, q, v, count, state_v_first)
    if check_values and not use_gate_in_kernel:
        check_log_gate('g', g)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    check_given(q=q, k=k, v=v, g=g, beta=beta)
    check_tensors(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias
    )
    check_qkv(q, k, v)
    check_per_token('g', g, q, v, channels=q.shape[3])
    check_per_token('beta', beta, q, v)
    check_gate_parameters(q, v, use_gate_in_kernel, A_log, dt_bias, per_channel=True, lower_bound=lower_bound)


def _check_intermediate_states(
    given: tuple[torch.Tensor | None, ...], cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None
) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        raise ValueError('return_intermediate_states is for inference: call it under torch.no_grad()')
    if cu_seqlens is not None and cu_seqlens_cpu is None:
        raise ValueError(
            'return_intermediate_states with cu_seqlens needs cu_seqlens_cpu, which says how many chunks there are'
        )
