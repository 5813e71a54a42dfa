"""Gated activations."""

from __future__ import annotations

import torch

from fla.backends import dispatch
from fla.modules.checks import (
    check_dims,
    check_floating,
    check_launchable,
    check_same,
    check_shape,
    check_weights,
    is_dense_float,
    matches,
    under_autocast,
)
from fla.modules.on_triton import on_triton
from fla.ops.checks import check_given


def _is_common_case(x: torch.Tensor, y: torch.Tensor) -> bool:
    return is_dense_float(x) and x.dim() > 0 and matches(y, x.shape, x.device) and y.dtype == x.dtype


def _check_swiglu(x: torch.Tensor, y: torch.Tensor) -> None:
    if _is_common_case(x, y):
        return
    check_given(x=x, y=y)
    check_floating(x=x, y=y)
    check_dims('x', x, 1, '[..., D]')
    check_same('y', y, 'x', x)


@dispatch('modules', check=_check_swiglu, default_verifier=on_triton('x'))
def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`silu(x) y`, computed in at least float32 and rounded once.

    Args:
        x, y: `[..., D]`, tensors of one shape and dtype: float16, bfloat16, float32 or float64.

    Returns:
        A tensor like x.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    check_launchable('swiglu', x=x, y=y)
    from fla.modules.kernels import activations

    out: torch.Tensor = activations.swiglu(x, y)
    return out


def _check_silu_and_mul(x: torch.Tensor) -> None:
    if is_dense_float(x) and x.dim() and x.shape[-1] % 2 == 0:
        return
    check_given(x=x)
    check_floating(x=x)
    check_dims('x', x, 1, '[..., 2D]')
    if x.shape[-1] % 2:
        raise ValueError(f'the last dimension of x must be even, [..., 2D], got shape {list(x.shape)}')


@dispatch('modules', check=_check_silu_and_mul, default_verifier=on_triton('x'))
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(first half) second half` of the last dimension, computed in at least float32 and rounded once.

    Args:
        x: `[..., 2D]`, float16, bfloat16, float32 or float64.

    Returns:
        `[..., D]` in x's dtype.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: as for `swiglu`.
    """
    check_launchable('silu_and_mul', x=x)
    from fla.modules.kernels import activations

    out: torch.Tensor = activations.silu_and_mul(x)
    return out


def _is_common_linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if not (_is_common_case(x, y) and is_dense_float(weight)):
        return False
    shape, dtype, device = weight.shape, x.dtype, x.device
    return (
        len(shape) == 2
        and shape[1] == x.shape[-1]
        and weight.dtype == dtype
        and weight.device == device
        and (bias is None or (matches(bias, shape[:1], device) and bias.dtype == dtype))
    )


def _check_swiglu_linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if _is_common_linear(x, y, weight, bias):
        return
    check_given(x=x, y=y, weight=weight)
    check_floating(x=x, y=y, weight=weight, bias=bias)
    check_dims('x', x, 1, '[..., D]')
    check_same('y', y, 'x', x)
    if weight.dim() != 2:
        raise ValueError(f'weight must be [out, D], got shape {list(weight.shape)}')
    check_shape('weight', weight, (weight.shape[0], x.shape[-1]), '[out, D]')
    check_shape('bias', bias, weight.shape[:1], '[out]')
    check_weights(x, weight=weight, bias=bias)


@dispatch('modules', check=_check_swiglu_linear, default_verifier=on_triton('x'))
def swiglu_linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear(swiglu(x, y), weight, bias)`: the second half of a SwiGLU feed-forward layer.

    The backward saves x, y and the weight, and computes `swiglu(x, y)` again.

    Args:
        x, y: `[..., D]`, tensors of one shape and dtype: float16, bfloat16, float32 or float64.
        weight: `[out, D]`; bias: `[out]` or None. Both have the dtype of x. Under autocast they may differ, unless one of
            the dtypes is float64.

    Returns:
        `[..., out]` in x's dtype. Under autocast in autocast's dtype, except that float64 stays float64.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: as for `swiglu`.
    """
    check_launchable('swiglu_linear', x=x, y=y, weight=weight)
    from fla.modules.kernels import activations

    if under_autocast(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    out: torch.Tensor = activations.swiglu_linear(x, y, weight, bias)
    return out
