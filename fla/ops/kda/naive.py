"""Kimi delta attention step by step: its definition, for tests and readers."""

from __future__ import annotations

import torch

from fla.ops.recurrence.naive import delta_rule_steps


def naive_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`S <- diag(e^g) S; S <- S + k (beta (v - S^T k))^T; o = scale S^T q`, step by step.

    Args:
        q, k: `[B, T, H, K]`. v: `[B, T, HV, V]`, HV a multiple of H.
        g: log decay per channel `[B, T, HV, K]`, at most 0. beta: `[B, T, HV]`.
        scale: default K ** -0.5.
        initial_state: `[N, HV, K, V]`.
        cu_seqlens: `[N + 1]` for packed sequences, B == 1.

    Returns:
        o `[B, T, HV, V]` and the final state `[N, HV, K, V]` or None; float64 for float64 inputs, else float32.

    Source: Kimi Team 2025, "Kimi Linear", arXiv 2510.26692.
    """
    o, state = delta_rule_steps(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    return o, state if output_final_state else None
