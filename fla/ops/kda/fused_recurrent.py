"""Kimi delta attention step by step, in one kernel: decoding."""

from __future__ import annotations

import torch

from fla.backends import dispatch
from fla.ops.kda.checks import check_fused_recurrent
from fla.ops.launch.triton_call import require_triton
from fla.ops.recurrence.on_triton import DeltaRuleOnTriton, recurrent_on_triton


def _on_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> tuple[bool, str | None]:
    return recurrent_on_triton(q, k, v, g, beta, initial_state, A_log, dt_bias)


@dispatch('kda', check=check_fused_recurrent, default_verifier=(DeltaRuleOnTriton, _on_triton))
def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention one step after the other, for decoding and short sequences.

    Mind the order: A_log, dt_bias and scale follow beta, unlike in the chunked form.

    Args:
        As for `chunk_kda`.

    Returns:
        o `[B, T, HV, V]` in v's dtype, contiguous, and the final state in float32, of float64 inputs in float64 (laid out
        like the initial one), or None.

    Raises:
        TypeError, ValueError: for arguments that do not fit, before any backend is asked.

    Source: as for `chunk_kda`.
    """
    # a decode step waits for every question
    if not q.is_cuda:
        require_triton('fused_recurrent_kda', q)
    from fla.ops.kda.autograd import fused_recurrent

    return fused_recurrent(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
