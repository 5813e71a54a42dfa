"""Normalisation of rows or groups by the root mean square or the standard deviation, after an optional residual is added."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fla.backends import dispatch
from fla.backends.backend.base import Verdict
from fla.modules.checks import (
    check_dims,
    check_eps,
    check_floating,
    check_int,
    check_launchable,
    check_shape,
    is_dense_float,
    matches,
)
from fla.modules.on_triton import on_triton
from fla.ops.checks import check_given

norm_on_triton = on_triton('x', 'residual', 'g', 'weight', 'bias')


def is_common_case(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
) -> bool:
    """Whether the arguments are those of a common, valid call; see `fla.modules.checks`."""
    if not is_dense_float(x):
        return False
    shape, device = x.shape, x.device
    row = shape[-1:]
    return (
        len(row) == 1
        and type(eps) is float
        and 0 <= eps < math.inf
        and (weight is None or matches(weight, row, device))
        and (bias is None or matches(bias, row, device))
        and (residual is None or matches(residual, shape, device))
    )


def check_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
) -> None:
    """x `[..., D]`, weight and bias `[D]`, the residual shaped like x."""
    if is_common_case(x, weight, bias, residual, eps):
        return
    check_given(x=x)
    check_floating(x=x, weight=weight, bias=bias, residual=residual)
    check_dims('x', x, 1, '[..., D]')
    check_shape('weight', weight, x.shape[-1:], '[D]')
    check_shape('bias', bias, x.shape[-1:], '[D]')
    check_shape('residual', residual, x.shape, 'shaped like x')
    check_eps(eps)


@dispatch('modules', check=check_norm, default_verifier=norm_on_triton)
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
        residual: shaped like x, any floating dtype. The sum is not rounded before the norm.
        eps: added to the mean square.
        prenorm: also return s, the residual of the next layer.
        residual_in_fp32: without a residual, return s in float32 (float64 for float64) instead of x's dtype. With one, s has
            the dtype of the residual.

    Returns:
        y in x's dtype; with `prenorm` the pair (y, s).

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    return _normalized('rms_norm', 'rms', x, weight, bias, residual, eps, prenorm, residual_in_fp32)


@dispatch('modules', check=check_norm, default_verifier=norm_on_triton)
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`y = (s - mean s) rsqrt(var s + eps) weight + bias` with `s = x + residual`, over the last dimension, in at least
    float32; the variance is the mean square of `s - mean s`.

    Args:
        x, weight, bias, residual, prenorm, residual_in_fp32: as for `rms_norm`.
        eps: added to the variance.
        is_rms_norm: do not subtract the mean: `rms_norm`.

    Returns:
        y in x's dtype; with `prenorm` the pair (y, s).

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: Ba, Kiros and Hinton 2016, "Layer Normalization", arXiv 1607.06450.
    """
    kind = 'rms' if is_rms_norm else 'layer'
    return _normalized('layer_norm', kind, x, weight, bias, residual, eps, prenorm, residual_in_fp32)


def _check_group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    num_groups: int,
) -> None:
    check_norm(x, weight, bias, residual, eps)
    check_groups(num_groups, x.shape[-1])


def check_groups(num_groups: int, hidden_size: int | torch.SymInt) -> None:
    """`num_groups` divides D."""
    check_int('num_groups', num_groups)
    if num_groups < 1 or hidden_size % num_groups:
        raise ValueError(f'num_groups must be at least 1 and divide D = {hidden_size}, got {num_groups}')


def _groups_on_triton(num_groups: int) -> Verdict:
    if num_groups > 65535:
        return False, ('the kernels are launched on a grid of at most 65535 groups, got %s', num_groups)
    return True, None


@dispatch('modules', check=_check_group_norm, default_verifier=(norm_on_triton, _groups_on_triton))
def group_norm(
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
    """`layer_norm` of each of `num_groups` groups of adjacent elements in the last dimension, then weight and bias.

    Args:
        x, weight, bias, residual, prenorm, residual_in_fp32: as for `rms_norm`.
        eps: added to the variance of a group.
        is_rms_norm: do not subtract the mean.
        num_groups: divides D; 1 is `layer_norm`.

    Returns:
        y in x's dtype; with `prenorm` the pair (y, s).

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: Wu and He 2018, "Group Normalization", arXiv 1803.08494; per token, as Sun et al. 2023, "Retentive Network",
    arXiv 2307.08621, use it.
    """
    kind = 'rms' if is_rms_norm else 'layer'
    return _normalized('group_norm', kind, x, weight, bias, residual, eps, prenorm, residual_in_fp32, num_groups)


def _normalized(name: str, kind: str, x: torch.Tensor, *arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if x is None or not x.is_cuda:
        check_launchable(name, x=x)
    from fla.modules.kernels.norms_autograd import normalize

    return normalize(kind, x, *arguments)  # type: ignore[no-any-return]


def check_hidden_size(hidden_size: int) -> None:
    """An int from 0 on: a row may be empty."""
    check_int('hidden_size', hidden_size)
    if hidden_size < 0:
        raise ValueError(f'hidden_size must be at least 0, got {hidden_size}')


class _Affine(nn.Module):
    """Holds a weight and a bias `[hidden_size]`, each a parameter or None."""

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
        check_hidden_size(hidden_size)
        check_eps(eps)
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter('weight', weight)
        self.register_parameter('bias', nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f'{self.hidden_size}, eps={self.eps}, elementwise_affine={self.elementwise_affine}'


class RMSNorm(_Affine):
    """`rms_norm` with its parameters.

    Args:
        hidden_size: D, the size of the last dimension.
        elementwise_affine: whether there is a weight `[D]`.
        bias: whether there is a bias `[D]` too.
        eps: added to the mean square.
        device, dtype: of the parameters.
    """

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `rms_norm`."""
        return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class LayerNorm(_Affine):
    """`layer_norm` with its parameters. Unlike `torch.nn.LayerNorm` it has no bias by default.

    Args:
        hidden_size: D, the size of the last dimension.
        elementwise_affine: whether there is a weight `[D]`.
        bias: whether there is a bias `[D]` too.
        eps: added to the variance.
        device, dtype: of the parameters.
    """

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `layer_norm`."""
        return layer_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class GroupNorm(_Affine):
    """`group_norm` with its parameters.

    Args:
        num_groups: of one size each.
        hidden_size: D, the size of the last dimension; a multiple of num_groups.
        elementwise_affine: whether there is a weight `[D]`.
        bias: whether there is a bias `[D]` too.
        eps: added to the variance of a group.
        is_rms_norm: whether the mean is not subtracted.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: for sizes that are not ints, or a num_groups that does not divide hidden_size.
    """

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_hidden_size(hidden_size)
        check_groups(num_groups, hidden_size)
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups, self.is_rms_norm = num_groups, is_rms_norm

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `group_norm`."""
        options = (self.eps, prenorm, residual_in_fp32, self.is_rms_norm, self.num_groups)
        return group_norm(x, self.weight, self.bias, residual, *options)

    def extra_repr(self) -> str:
        return f'{self.num_groups}, {super().extra_repr()}, is_rms_norm={self.is_rms_norm}'
