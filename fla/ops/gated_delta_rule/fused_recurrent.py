"""The gated delta rule step by step, in one kernel: decoding."""

from __future__ import annotations

import torch

from fla.backends import dispatch
from fla.backends.core.tensors import any_requires_grad
from fla.ops.gated_delta_rule.checks import check_fused_recurrent
from fla.ops.launch.triton_call import require_triton
from fla.ops.recurrence.on_triton import DeltaRuleOnTriton, recurrent_on_triton


def _on_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    gv: torch.Tensor | None,
    beta: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> tuple[bool, str | None]:
    given = (q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias)
    if (gk is not None or gv is not None) and torch.is_grad_enabled() and any_requires_grad(given):
        return False, 'gk and gv have no gradient in Triton'
    return recurrent_on_triton(*given)


@dispatch('gated_delta_rule', check=check_fused_recurrent, default_verifier=(DeltaRuleOnTriton, _on_triton))
def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule one step after the other, for decoding and short sequences.

    Mind the order: the fifth parameter is `gk`, not `beta` as in the chunked form.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens and the flags: as for `chunk_gated_delta_rule`.
        g: log decay `[B, T, HV]`, at most 0, or None for no decay; raw with `use_gate_in_kernel`.
        gk: log decay per key channel `[B, T, HV, K]`, beside g. gv: per value channel `[B, T, HV, V]`.
        beta: `[B, T, HV]`, or None for 1.

    Returns:
        o `[B, T, HV, V]` in v's dtype, contiguous, and the final state in float32, of float64 inputs in float64 (laid out
        like the initial one), or None.

    Raises:
        TypeError, ValueError: for arguments that do not fit, before any backend is asked.

    Source: as for `chunk_gated_delta_rule`.
    """
    # a decode step waits for every question
    if not q.is_cuda:
        require_triton('fused_recurrent_gated_delta_rule', q)
    from fla.ops.gated_delta_rule.autograd import fused_recurrent

    return fused_recurrent(
        q,
        k,
        v,
        g,
        gk,
        gv,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
    )
