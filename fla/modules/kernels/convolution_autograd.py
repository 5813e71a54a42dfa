"""The Triton defaults of the short convolution, as differentiable functions that compiled code can call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fla.modules.kernels.convolution_backward import launch_backward
from fla.modules.kernels.convolution_forward import launch_forward
from fla.modules.kernels.convolution_step import launch_update
from fla.opaque import opaque
from fla.ops.launch.triton_call import DEVICES


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
) -> Any:
    final = None
    if output_final_state:
        count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dtype = x.dtype if initial_state is None else initial_state.dtype
        final = x.new_empty((count, *weight.shape), dtype=dtype)
    return x.new_empty(x.shape), final


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
    dy: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    needs_input_grad: Sequence[bool],
) -> Any:
    needs = dict(zip(('x', 'weight', 'bias', 'residual', 'initial_state'), needs_input_grad, strict=True))
    dx = dweight = dbias = dresidual = dstate = None
    if any(need for name, need in needs.items() if name != 'residual'):
        dx, dweight, dbias, dstate = launch_backward(
            x, weight, bias, initial_state, activation, cu_seqlens, dy, dfinal_state
        )
    if residual is not None and needs['residual']:
        dresidual = dy.to(residual.dtype, copy=True)  # an operator must not return an argument
    gradients = (dx, dweight, dbias, dresidual, dstate)
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs_input_grad, strict=True))


convolution = opaque(
    'fla::causal_conv1d',
    schema=(
        '(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? initial_state, bool output_final_state, '
        'str? activation, Tensor? cu_seqlens) -> (Tensor y, Tensor? final_state)'
    ),
    forward=launch_forward,
    fake=_fake,
    backward=_backward,
    grads=('x', 'weight', 'bias', 'residual', 'initial_state'),
    devices=DEVICES,
)

update = opaque(
    'fla::causal_conv1d_update',
    schema='(Tensor x, Tensor(a!) cache, Tensor? residual, Tensor weight, Tensor? bias, str? activation) -> Tensor y',
    forward=launch_update,
    fake=lambda x, *_: x.new_empty(x.shape),
    devices=DEVICES,
)
