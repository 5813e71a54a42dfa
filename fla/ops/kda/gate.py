"""The gates of Kimi delta attention: from raw values to log decays per channel."""

from __future__ import annotations

import torch

from fla.ops.checks import check_output_dtype
from fla.ops.recurrence.checks import check_raw_gate
from fla.ops.recurrence.gates import kda_gate


def naive_kda_gate(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None = None) -> torch.Tensor:
    """`-exp(A_log) * softplus(g + dt_bias)`, in float32 (float64 for float64).

    Args:
        g: raw gate `[..., HV, K]`.
        A_log: `[HV]`. dt_bias: `[HV * K]`.

    Raises:
        TypeError, ValueError: for wrong arguments.
    """
    check_raw_gate(g, A_log, dt_bias, per_channel=True)
    return kda_gate(g, A_log, dt_bias)


def naive_kda_lowerbound_gate(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None = None, lower_bound: float = -5.0
) -> torch.Tensor:
    """`lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, with factor 1 for A_log None. Shapes and errors as for
    `naive_kda_gate`."""
    check_raw_gate(g, A_log, dt_bias, lower_bound, per_channel=True)
    return kda_gate(g, A_log, dt_bias, lower_bound)


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """`naive_kda_gate`, or with `lower_bound` `naive_kda_lowerbound_gate`, in `output_dtype` (None: the dtype of g). The
    operations' `use_gate_in_kernel=True` makes this pass unnecessary."""
    check_raw_gate(g, A_log, dt_bias, lower_bound, per_channel=True)
    check_output_dtype(output_dtype)
    return kda_gate(g, A_log, dt_bias, lower_bound).to(output_dtype or g.dtype)
