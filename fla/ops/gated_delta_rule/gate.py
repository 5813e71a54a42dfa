"""The gate of the gated delta rule: from raw values to log decays."""

from __future__ import annotations

import torch

from fla.ops.checks import check_output_dtype
from fla.ops.recurrence.checks import check_raw_gate
from fla.ops.recurrence.gates import gdn_gate


def naive_gdn_gate(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None = None) -> torch.Tensor:
    """`-exp(A_log) * softplus(g + dt_bias)`, in float32 (float64 for float64).

    Args:
        g: raw gate `[..., HV]`.
        A_log, dt_bias: `[HV]`.

    Raises:
        TypeError, ValueError: for wrong arguments.
    """
    check_raw_gate(g, A_log, dt_bias, per_channel=False)
    return gdn_gate(g, A_log, dt_bias)


def fused_gdn_gate(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """`naive_gdn_gate` in `output_dtype` (None: the dtype of g). The operations' `use_gate_in_kernel=True` makes this pass
    unnecessary."""
    check_raw_gate(g, A_log, dt_bias, per_channel=False)
    check_output_dtype(output_dtype)
    return gdn_gate(g, A_log, dt_bias).to(output_dtype or g.dtype)
