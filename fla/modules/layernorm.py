"""Normalisation by the root mean square, with a residual added before."""

from __future__ import annotations

import torch
from torch import nn

from fla.modules.checks import check_dims, check_eps, check_floating, check_shape
from fla.ops.backends import dispatch
from fla.ops.common.gates import wide


def check_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
) -> None:
    """x `[..., D]`, weight and bias `[D]`, the residual shaped like x."""
    check_floating(x=x, weight=weight, bias=bias, residual=residual)
    check_dims('x', x, 1, '[..., D]')
    check_shape('weight', weight, x.shape[-1:], '[D]')
    check_shape('bias', bias, x.shape[-1:], '[D]')
    check_shape('residual', residual, x.shape, 'shaped like x')
    check_eps(eps)


def normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    residual_in_fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, wide, and that sum as the next layer's residual."""
    total = wide(x) if residual is None else wide(x) + wide(residual)
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * wide(weight)
    y = y if bias is None else y + wide(bias)
    if residual is not None:
        return y, total.to(residual.dtype)
    return y, total if residual_in_fp32 else x


@dispatch('modules', check=check_norm)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`y = s rsqrt(mean s^2 + eps) weight + bias` with `s = x + residual`, over the last dimension, in at least float32.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64.
        weight, bias: `[D]`, any floating dtype; None: 1 and 0.
        residual: shaped like x, any floating dtype; added before the norm and not rounded in between.
        eps: added to the mean square.
        prenorm: also return s, the residual of the next layer.
        residual_in_fp32: with no residual given, s is returned in float32 (float64 for float64) rather than in x's dtype.
            A residual that is given keeps its dtype.

    Returns:
        y in x's dtype; with `prenorm` the pair (y, s).

    Raises:
        TypeError, ValueError: for arguments that do not fit, before any backend is asked.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    y, total = normalized(x, weight, bias, residual, eps, residual_in_fp32)
    return (y.to(x.dtype), total) if prenorm else y.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its parameters.

    Args:
        hidden_size: D, the size of the last dimension.
        elementwise_affine: whether there is a weight `[D]`.
        bias: whether there is a bias `[D]` too.
        eps: added to the mean square.
        device, dtype: of the parameters.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if bias and not elementwise_affine:
            raise ValueError('bias=True needs elementwise_affine=True')
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter('weight', weight)
        self.register_parameter('bias', nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1, bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `rms_norm`."""
        return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)

    def extra_repr(self) -> str:
        return f'{self.hidden_size}, eps={self.eps}, elementwise_affine={self.elementwise_affine}'
