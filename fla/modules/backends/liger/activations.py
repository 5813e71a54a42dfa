"""Liger-Kernel: activations."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with on_device_of(x):
        from liger_kernel.ops.swiglu import swiglu_forward

        z: torch.Tensor = swiglu_forward(_rows(x), _rows(y))[2]
        return z.view(x.shape)


def _backward(x: torch.Tensor, y: torch.Tensor, dz: torch.Tensor) -> Any:
    with on_device_of(x):
        from liger_kernel.ops.swiglu import swiglu_backward

        # copies: Liger writes the gradients over x and y, which belong to the caller
        x_rows, y_rows = (one.clone(memory_format=torch.contiguous_format).view(-1, one.shape[-1]) for one in (x, y))
        dx, dy = swiglu_backward(x_rows, y_rows, _rows(dz))
        return dx.view(x.shape), dy.view(y.shape)


_swiglu = opaque(
    'fla::liger_swiglu',
    schema='(Tensor x, Tensor y) -> (Tensor z)',
    forward=_forward,
    fake=lambda x, y: x.new_empty(x.shape),
    backward=_backward,
    grads=('x', 'y'),
)


class LigerActivations:
    """Methods of `LigerBackend` for activations."""

    def swiglu_verifier(self, x: torch.Tensor) -> Verdict:
        if x.dtype != torch.float32:
            return False, ('Liger rounds silu(x) to the dtype of y before the product: x must be float32, got %s', x.dtype)
        if x.shape[-1] > 65536:
            return False, ('a row must have at most 65536 elements, got %s', x.shape[-1])
        return check_size(x)

    def swiglu(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = _swiglu(x, y)
        return z
