"""The norm and the output gate of a linear-attention layer, in one function."""

from __future__ import annotations

import torch
from torch import nn

from fla.backends import dispatch
from fla.modules.checks import SILU, check_choice, check_eps, check_floating, check_launchable, check_shape, matches
from fla.modules.norm.layernorm import check_hidden_size, check_norm, is_common_case, norm_on_triton
from fla.ops.checks import check_given

ACTIVATIONS = (*SILU, 'sigmoid')


def _check(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    residual: torch.Tensor | None,
    eps: float,
) -> None:
    if activation in ACTIVATIONS and is_common_case(x, weight, bias, residual, eps) and matches(g, x.shape, x.device):
        return
    check_given(x=x, g=g)
    check_floating(x=x, g=g)
    check_norm(x, weight, bias, residual, eps)
    check_shape('g', g, x.shape, 'shaped like x')
    check_choice('activation', activation, ACTIVATIONS)


@dispatch('modules', check=_check, default_verifier=norm_on_triton)
def rms_norm_gated(
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
    """`rms_norm(x + residual) act(g)`, in at least float32 and rounded once.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64.
        g: the gate, shaped like x, any floating dtype.
        weight, bias, residual, prenorm, residual_in_fp32: as for `rms_norm`.
        activation: 'swish' (or 'silu'): `g sigmoid(g)`; 'sigmoid'.
        eps: added to the mean square. `FusedRMSNormGated` has another default, 1e-5.

    Returns:
        y in x's dtype; with `prenorm` the pair (y, x + residual).

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: the output gate of Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464 (swish), and of Kimi Team 2025,
    "Kimi Linear", arXiv 2510.26692 (sigmoid).
    """
    if x is None or g is None or not x.is_cuda:
        check_launchable('rms_norm_gated', x=x, g=g)
    from fla.modules.kernels.norms_autograd import normalize

    return normalize(  # type: ignore[no-any-return]
        'rms', x, weight, bias, residual, eps, prenorm, residual_in_fp32, g=g, activation=activation
    )


class FusedRMSNormGated(nn.Module):
    """`rms_norm_gated` with its weight.

    Args:
        hidden_size: D, the size of the last dimension.
        elementwise_affine: whether there is a weight `[D]`.
        eps: added to the mean square.
        activation: 'swish', 'silu' or 'sigmoid'.
        device, dtype: of the weight.

    Raises:
        TypeError, ValueError: for a size that is not an int, or an unknown activation.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = 'swish',
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice('activation', activation, ACTIVATIONS)
        check_hidden_size(hidden_size)
        check_eps(eps)
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter('weight', weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `rms_norm_gated`."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, residual, prenorm, residual_in_fp32, eps=self.eps)

    def extra_repr(self) -> str:
        return f'{self.hidden_size}, eps={self.eps}, activation={self.activation}'
