"""The gated delta rule step by step in one kernel, for decoding."""

from __future__ import annotations

import torch

from fla.backends import dispatch
from fla.backends.core.tensors import any_requires_grad
from fla.ops.gated_delta_rule.checks import check_fused_recurrent
from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule
from fla.ops.launch.triton_call import require_triton
from fla.ops.recurrence.arguments import Options
from fla.ops.recurrence.on_triton import StepsOnTriton, steps_on_triton


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
    return steps_on_triton(*given)


@dispatch('gated_delta_rule', check=check_fused_recurrent, default_verifier=(StepsOnTriton, _on_triton))
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
    """The gated delta rule step by step in one kernel, for decoding and short sequences.

    The order differs from the chunked form: the fifth parameter is `gk`, not `beta`. The kernel has no gradient: with
    gradients the default calls `chunk_gated_delta_rule`, which computes the same.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens and the flags: as for `chunk_gated_delta_rule`.
        g: log decay `[B, T, HV]`, at most 0, or None for no decay; raw with `use_gate_in_kernel`.
        gk: log decay per key channel `[B, T, HV, K]`, added to g. gv: per value channel `[B, T, HV, V]`.
        beta: `[B, T, HV]`, or None for 1.

    Returns:
        o `[B, T, HV, V]` in v's dtype, contiguous; the final state, laid out like the initial one, in float32 (float64 for
        float64 inputs), or None.

    Raises:
        TypeError, ValueError: for wrong arguments, before a backend is chosen.

    Source: as for `chunk_gated_delta_rule`.
    """
    # the time of a decode step counts: no further checks on CUDA
    if not q.is_cuda:
        require_triton('fused_recurrent_gated_delta_rule', q)
    if torch.is_grad_enabled() and any_requires_grad((q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias)):
        if gk is not None or gv is not None:
            # reached without dispatch only, where the verifier does not run
            raise RuntimeError(
                'fused_recurrent_gated_delta_rule: gk and gv have no gradient in Triton: leave backends on, so that the '
                'reference serves the call, or make it under torch.no_grad()'
            )
        return chunk_gated_delta_rule(
            *(q, k, v),
            torch.zeros_like(v[..., 0]) if g is None else g,
            torch.ones_like(v[..., 0]) if beta is None else beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel and beta is not None,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
        )
    from fla.ops.recurrence.kernels.decode import decode

    options = Options(
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )
    return decode(q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, cu_seqlens, options)
