"""The Triton default of the norms: their kernels as differentiable functions that compiled code can call.

There are two. Without `prenorm` the gradient reads x and residual again, which are there anyway. With it the sum of both is
a result that the next layer keeps, so the gradient reads that, in the dtype it was returned in.
"""

from __future__ import annotations

from typing import Any

import torch

from fla.modules.kernels import norms
from fla.opaque import opaque, takes_eager_path
from fla.ops.launch.triton_call import DEVICES, on_device_of
from fla.ops.recurrence.gates import wide

_FLAGS = 'str kind, float eps, str activation, int num_groups'
_GRADS = ('x', 'residual', 'g', 'weight', 'bias')


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    eps: float,
    activation: str,
    num_groups: int,
    dtype: torch.dtype,
    shares: bool,
) -> torch.Tensor:
    with on_device_of(x):
        norm = norms.Norm(kind, eps, activation, num_groups)
        return norms.forward(x, residual, g, weight, bias, norm, dtype, False)[0]


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    eps: float,
    activation: str,
    num_groups: int,
    dtype: torch.dtype,
    shares: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _backward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    eps: float,
    activation: str,
    num_groups: int,
    shares: bool,
    dy: torch.Tensor,
    needs_input_grad: list[bool],
) -> Any:
    dtypes = x.dtype, residual.dtype if residual is not None and needs_input_grad[1] and not shares else None
    with on_device_of(x):
        norm = norms.Norm(kind, eps, activation, num_groups)
        return _needed(
            norms.backward(x, residual, g, weight, bias, dy, None, norm, dtypes, needs_input_grad[3:]),
            needs_input_grad,
            shares,
        )


def _needed(gradients: norms.Gradients, needs: list[bool], shares: bool) -> list[torch.Tensor | None]:
    """Where x and residual share a gradient, autograd gets it twice."""
    if shares:
        gradients = gradients._replace(residual=gradients.x)
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


_norm = opaque(
    'fla::norm',
    schema=(
        f'(Tensor x, Tensor? residual, Tensor? g, Tensor? weight, Tensor? bias, {_FLAGS}, ScalarType dtype, bool shares) '
        '-> (Tensor y)'
    ),
    forward=_forward,
    fake=_fake,
    backward=_backward,
    grads=_GRADS,
    devices=DEVICES,
)


def _forward_prenorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    eps: float,
    activation: str,
    num_groups: int,
    shares: bool,
) -> Any:
    with on_device_of(x):
        norm = norms.Norm(kind, eps, activation, num_groups)
        return norms.forward(x, residual, g, weight, bias, norm, x.dtype, True)


def _fake_prenorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    eps: float,
    activation: str,
    num_groups: int,
    shares: bool,
) -> Any:
    return x.new_empty(x.shape), residual.new_empty(x.shape)


def _backward_prenorm(
    total: torch.Tensor,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    eps: float,
    activation: str,
    num_groups: int,
    shares: bool,
    dy: torch.Tensor,
    dtotal: torch.Tensor,
    needs_input_grad: list[bool],
) -> Any:
    # y has the dtype of x, and the sum that of residual
    dtypes = dy.dtype, total.dtype if needs_input_grad[1] and not shares else None
    with on_device_of(total):
        norm = norms.Norm(kind, eps, activation, num_groups)
        return _needed(
            norms.backward(total, None, g, weight, bias, dy, dtotal, norm, dtypes, needs_input_grad[3:]),
            needs_input_grad,
            shares,
        )


def _fake_backward_prenorm(
    total: torch.Tensor,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    eps: float,
    activation: str,
    num_groups: int,
    shares: bool,
    dy: torch.Tensor,
    dtotal: torch.Tensor,
    needs_input_grad: list[bool],
) -> Any:
    likes = (total.new_empty(total.shape, dtype=dy.dtype), total, g, weight, bias)
    return tuple(
        like.new_empty(like.shape) if like is not None and need else None
        for like, need in zip(likes, needs_input_grad, strict=True)
    )


_norm_prenorm = opaque(
    'fla::norm_prenorm',
    schema=(
        f'(Tensor x, Tensor residual, Tensor? g, Tensor? weight, Tensor? bias, {_FLAGS}, bool shares) '
        '-> (Tensor y, Tensor total)'
    ),
    forward=_forward_prenorm,
    fake=_fake_prenorm,
    backward=_backward_prenorm,
    fake_backward=_fake_backward_prenorm,
    grads=_GRADS,
    devices=DEVICES,
)


def normalize(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    num_groups: int = 1,
    g: torch.Tensor | None = None,
    activation: str = '',
    dtype: torch.dtype | None = None,
) -> Any:
    """A norm on Triton; see `norms.Norm`."""
    activation = 'swish' if activation == 'silu' else activation
    # Gradients of one dtype are the same numbers. Eager autograd takes one tensor for both, an operator must return two.
    shares = residual is not None and residual.dtype == x.dtype and takes_eager_path(x, residual, g, weight, bias)
    flags = (kind, float(eps), activation, num_groups)  # Triton takes no number of NumPy's
    if not prenorm:
        return _norm(x, residual, g, weight, bias, *flags, dtype or x.dtype, shares)
    if residual is not None:
        return _norm_prenorm(x, residual, g, weight, bias, *flags, shares)
    return _norm(x, None, g, weight, bias, *flags, x.dtype, False), wide(x) if residual_in_fp32 else x
