"""Chunked Kimi delta attention."""

from __future__ import annotations

import torch

from fla.backends import dispatch
from fla.ops.kda.checks import check_chunk
from fla.ops.launch.triton_call import require_triton
from fla.ops.recurrence.arguments import Inputs, Options
from fla.ops.recurrence.on_triton import ChunksOnTriton, chunks_of_64


@dispatch('kda', check=check_chunk, default_verifier=(ChunksOnTriton, chunks_of_64))
def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Kimi delta attention over whole sequences, for training and prefill.

    Per head and step: `S <- diag(e^g) S; S <- S + k (beta (v - S^T k))^T; o = scale S^T q`.

    Args:
        q, k: `[B, T, H, K]`, float16, bfloat16 or float32 (float64 on the reference), K at most 256.
        v: `[B, T, HV, V]`, the dtype of q; HV a multiple of H: value head i reads head i // (HV // H).
        g: log decay per channel `[B, T, HV, K]`, at most 0, the dtype of q or float32; raw with `use_gate_in_kernel`.
        beta: `[B, T, HV]`, the dtype of q or float32; logits with `use_beta_sigmoid_in_kernel`.
        scale: finite factor of q. Default: K ** -0.5.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; not changed.
        output_final_state: return the state after the last step.
        use_qk_l2norm_in_kernel: q and k are divided by their norms, `x rsqrt(sum x^2 + 1e-6)`.
        use_gate_in_kernel: the log decay is `-exp(A_log) softplus(g + dt_bias)`, with A_log `[HV]` and dt_bias `[HV * K]`;
            with a negative `lower_bound` it is `lower_bound sigmoid(exp(A_log) (g + dt_bias))`, and A_log may be None.
        use_beta_sigmoid_in_kernel: `sigmoid(beta)` replaces beta, times 2 with `allow_neg_eigval`.
        safe_gate: a promise that g >= -5 at every step, which some backends need; raw gates need `lower_bound` for it.
        disable_recompute: save the intermediates for the backward pass, which is then faster and takes more memory.
        return_intermediate_states: also return the state before each chunk (inference only).
        cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1. `cu_seqlens_cpu` is the same on the host.
        cp_context: context-parallel context, not supported yet: None.
        chunk_size: 32 or 64 steps; None: the backend's choice.

    Returns:
        o `[B, T, HV, V]` in v's dtype, contiguous; the final state, laid out like the initial one, in float32 (float64 for
        float64 inputs), or None; with `return_intermediate_states` also h `[B, chunks, HV, K, V]` (or `[…, V, K]`) in
        float32.

    Raises:
        TypeError, ValueError: for wrong arguments, before a backend is chosen.
        NotImplementedError: for a `cp_context`.

    Source: Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv 2510.26692.
    """
    require_triton('chunk_kda', q)
    from fla.ops.kda.autograd import chunk

    options = Options(
        scale=scale,
        lower_bound=lower_bound,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
    )
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    result: tuple[torch.Tensor, torch.Tensor | None] = chunk(inputs, options, cu_seqlens_cpu)
    return result
