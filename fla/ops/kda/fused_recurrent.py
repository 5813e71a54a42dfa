"""Kimi delta attention step by step in one kernel, for decoding."""

from __future__ import annotations

import torch

from fla.backends import dispatch
from fla.backends.core.tensors import any_requires_grad
from fla.ops.kda.checks import check_fused_recurrent
from fla.ops.kda.chunk import chunk_kda
from fla.ops.launch.triton_call import require_triton
from fla.ops.recurrence.arguments import Options
from fla.ops.recurrence.on_triton import StepsOnTriton, steps_on_triton


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
    return steps_on_triton(q, k, v, g, beta, initial_state, A_log, dt_bias)


@dispatch('kda', check=check_fused_recurrent, default_verifier=(StepsOnTriton, _on_triton))
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
    """Kimi delta attention step by step in one kernel, for decoding and short sequences.

    The order differs from the chunked form: A_log, dt_bias and scale follow beta. The kernel has no gradient: with gradients
    the default calls `chunk_kda`, which computes the same.

    Args:
        As for `chunk_kda`.

    Returns:
        o `[B, T, HV, V]` in v's dtype, contiguous; the final state, laid out like the initial one, in float32 (float64 for
        float64 inputs), or None.

    Raises:
        TypeError, ValueError: for wrong arguments, before a backend is chosen.

    Source: as for `chunk_kda`.
    """
    # the time of a decode step counts: no further checks on CUDA
    if not q.is_cuda:
        require_triton('fused_recurrent_kda', q)
    if torch.is_grad_enabled() and any_requires_grad((q, k, v, g, beta, A_log, dt_bias, initial_state)):
        results = chunk_kda(
            *(q, k, v, g, beta),
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
            A_log=A_log,
            dt_bias=dt_bias,
        )
        return results[0], results[1]
    from fla.ops.recurrence.kernels.decode import decode

    options = Options(
        scale=scale,
        lower_bound=lower_bound,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    return decode(q, k, v, None, g, None, beta, A_log, dt_bias, initial_state, cu_seqlens, options)
