"""The Triton default of the norms: two differentiable operators that compiled code can call.

`_norm` returns y; its backward reads x and residual, which the caller holds anyway. `_norm_prenorm` also returns their sum,
which the next layer keeps; its backward reads that sum, in the dtype in which it was returned.
"""

from __future__ import annotations

from typing import Any

import torch

from fla.modules.kernels import norms
from fla.opaque import opaque, takes_eager_path
from fla.ops.launch.triton_call import DEVICES, on_device_of
from fla.ops.recurrence.gates import wide

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
    output_dtype: torch.dtype,
    shares: bool,
) -> torch.Tensor:
    norm = norms.Norm(kind, eps, activation, num_groups)
    with on_device_of(x):
        return norms.forward(x, residual, g, weight, bias, norm, output_dtype, False)[0]


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
    norm = norms.Norm(kind, eps, activation, num_groups)
    with on_device_of(x):
        gradients = norms.backward(x, residual, g, weight, bias, dy, None, norm, dtypes, needs_input_grad[3:])
    return _needed(gradients, needs_input_grad, shares)


def _needed(gradients: norms.Gradients, needs: list[bool], shares: bool) -> list[torch.Tensor | None]:
    """The gradients that are needed. With `shares`, x and residual get the same tensor."""
    if shares:
        gradients = gradients._replace(residual=gradients.x)
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


_norm = opaque(
    'fla::norm',
    schema=(
        '(Tensor x, Tensor? residual, Tensor? g, Tensor? weight, Tensor? bias, str kind, float eps, str activation, '
        'int num_groups, ScalarType output_dtype, bool shares) -> (Tensor y)'
    ),
    forward=_forward,
    fake=lambda x, *others: x.new_empty(x.shape, dtype=others[-2]),
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
    norm = norms.Norm(kind, eps, activation, num_groups)
    with on_device_of(x):
        return norms.forward(x, residual, g, weight, bias, norm, x.dtype, True)


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
    # y has the dtype of x, total that of residual
    dtypes = dy.dtype, total.dtype if needs_input_grad[1] and not shares else None
    norm = norms.Norm(kind, eps, activation, num_groups)
    with on_device_of(total):
        gradients = norms.backward(total, None, g, weight, bias, dy, dtotal, norm, dtypes, needs_input_grad[3:])
    return _needed(gradients, needs_input_grad, shares)


def _fake_backward_prenorm(*arguments: Any) -> Any:
    """Takes the arguments of `_backward_prenorm`."""
    total, g, weight, bias, *_, dy, _, needs_input_grad = arguments
    likes = (total.new_empty(total.shape, dtype=dy.dtype), total, g, weight, bias)
    return tuple(
        like.new_empty(like.shape) if like is not None and need else None
        for like, need in zip(likes, needs_input_grad, strict=True)
    )


_norm_prenorm = opaque(
    'fla::norm_prenorm',
    schema=(
        '(Tensor x, Tensor residual, Tensor? g, Tensor? weight, Tensor? bias, str kind, float eps, str activation, '
        'int num_groups, bool shares) -> (Tensor y, Tensor total)'
    ),
    forward=_forward_prenorm,
    fake=lambda x, residual, *_: (x.new_empty(x.shape), residual.new_empty(x.shape)),
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
    output_dtype: torch.dtype | None = None,
) -> Any:
    """A norm on Triton; for `kind` see `norms.Norm`."""
    activation = 'swish' if activation == 'silu' else activation
    # If x and residual have one dtype, so do their gradients, which are equal. Eager autograd may return one tensor for
    # both; an operator must return two.
    shares = residual is not None and residual.dtype == x.dtype and takes_eager_path(x, residual, g, weight, bias)
    options = (kind, float(eps), activation, num_groups)  # float: Triton takes no NumPy scalar
    if not prenorm:
        return _norm(x, residual, g, weight, bias, *options, output_dtype or x.dtype, shares)
    if residual is not None:
        return _norm_prenorm(x, residual, g, weight, bias, *options, shares)
    return _norm(x, None, g, weight, bias, *options, x.dtype, False), wide(x) if residual_in_fp32 else x
