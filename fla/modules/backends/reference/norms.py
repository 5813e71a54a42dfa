"""Plain PyTorch: norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla.ops.recurrence import gates
from fla.ops.recurrence.gates import wide


def normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    residual_in_fp32: bool,
    centered: bool = False,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual in at least float32, and the sum as the next layer's residual."""
    total = wide(x) if residual is None else wide(x) + wide(residual)
    y = total if num_groups == 1 else total.reshape(*x.shape[:-1], num_groups, x.shape[-1] // num_groups)
    if centered:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y.reshape(x.shape)
    y = y if weight is None else y * wide(weight)
    y = y if bias is None else y + wide(bias)
    if residual is not None:
        return y, total.to(residual.dtype)
    return y, total if residual_in_fp32 else x


class ReferenceNorms:
    """Methods of `ModulesReference` for norms."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y, total = normalized(x, weight, bias, residual, eps, residual_in_fp32)
        return (y.to(x.dtype), total) if prenorm else y.to(x.dtype)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        is_rms_norm: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y, total = normalized(x, weight, bias, residual, eps, residual_in_fp32, not is_rms_norm)
        return (y.to(x.dtype), total) if prenorm else y.to(x.dtype)

    def group_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        is_rms_norm: bool = False,
        num_groups: int = 1,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y, total = normalized(x, weight, bias, residual, eps, residual_in_fp32, not is_rms_norm, num_groups)
        return (y.to(x.dtype), total) if prenorm else y.to(x.dtype)

    def rms_norm_gated(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        activation: str = 'swish',
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        eps: float = 1e-6,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y, total = normalized(x, weight, bias, residual, eps, residual_in_fp32)
        gate = wide(g)
        y = y * (gate.sigmoid() if activation == 'sigmoid' else F.silu(gate))
        return (y.to(x.dtype), total) if prenorm else y.to(x.dtype)

    def l2norm(self, x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
        return gates.l2norm(x, eps).to(output_dtype or x.dtype)
