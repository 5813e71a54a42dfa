"""The gated delta rule step by step: its definition, for tests and readers."""

from __future__ import annotations

import torch

from fla.ops.recurrence.naive import delta_rule_steps


def naive_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`S <- e^g S + k (beta (v - (e^g S)^T k))^T; o = scale S^T q`, step by step.

    Args:
        q, k: `[B, T, H, K]`. v: `[B, T, HV, V]`, HV a multiple of H.
        beta: `[B, T, HV]`. g: log decay `[B, T, HV]`, at most 0.
        scale: default K ** -0.5.
        initial_state: `[N, HV, K, V]`.
        cu_seqlens: `[N + 1]` for packed sequences, B == 1.

    Returns:
        o `[B, T, HV, V]` and the final state `[N, HV, K, V]` or None; float64 for float64 inputs, else float32.

    Source: Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464.
    """
    o, state = delta_rule_steps(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    return o, state if output_final_state else None
