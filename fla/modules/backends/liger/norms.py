"""Liger-Kernel: norms."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.modules.backends.norms import NormsWithoutResidual
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of

# The number of Liger's casting mode that computes rms_norm in float32 and rounds once. Its default 'llama' rounds the
# normalized row before the product with the weight; 'none' computes in x's dtype.
CASTING_MODE = 1
# One row at a time. Otherwise Liger 0.8.5 takes many short rows in blocks. The gradient of the weight then includes rows
# past the last one, which are loaded without a default and may hold anything.
ROW_MODE = True


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _rms_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    with on_device_of(x):
        from liger_kernel.ops.rms_norm import rms_norm_forward

        y, _, scale, *_ = rms_norm_forward(_rows(x), weight.contiguous(), eps, 0.0, CASTING_MODE, ROW_MODE)
        return y.view(x.shape), scale


def _rms_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return x.new_empty(x.shape), x.new_empty((x.numel() // x.shape[-1],), dtype=torch.float32)


def _rms_backward(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dy: torch.Tensor) -> Any:
    with on_device_of(x):
        from liger_kernel.ops.rms_norm import rms_norm_backward
        from liger_kernel.ops.utils import calculate_settings

        # not in place: other code may use the incoming gradient
        dx, dweight = rms_norm_backward(
            *(_rows(dy), _rows(x), weight.contiguous(), scale, 0.0, CASTING_MODE),
            *(*calculate_settings(x.shape[-1]), False, ROW_MODE),
        )
        return dx.view(x.shape), dweight


_rms_norm = opaque(
    'fla::liger_rms_norm',
    schema='(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor scale)',
    forward=_rms_forward,
    fake=_rms_fake,
    backward=_rms_backward,
    grads=('x', 'weight'),
    intermediates=('scale',),
)


def _layer_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
    with on_device_of(x):
        from liger_kernel.ops.layer_norm import layer_norm_forward

        y, _, mean, scale, *_ = layer_norm_forward(_rows(x), weight.contiguous(), bias.contiguous(), eps)
        return y.view(x.shape), mean, scale


def _layer_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
    return x.new_empty(x.shape), *(x.new_empty((x.numel() // x.shape[-1],), dtype=torch.float32) for _ in range(2))


def _layer_backward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, dy: torch.Tensor
) -> Any:
    with on_device_of(x):
        from liger_kernel.ops.layer_norm import layer_norm_backward

        dx, dweight, dbias = layer_norm_backward(_rows(dy), _rows(x), weight.contiguous(), bias.contiguous(), mean, scale)
        return dx.view(x.shape), dweight, dbias


_layer_norm = opaque(
    'fla::liger_layer_norm',
    schema='(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor mean, Tensor scale)',
    forward=_layer_forward,
    fake=_layer_fake,
    backward=_layer_backward,
    grads=('x', 'weight', 'bias'),
    intermediates=('mean', 'scale'),
)


def _takes(x: torch.Tensor) -> Verdict:
    """Whether Liger's kernels take x of this size."""
    if x.shape[-1] > 65536:
        return False, ('a row must have at most 65536 elements, got %s', x.shape[-1])
    return check_size(x)


class LigerNorms(NormsWithoutResidual):
    """Methods of `LigerBackend` for norms, without a residual: Liger rounds the sum before the norm."""

    _rms_kernel = staticmethod(_rms_norm)
    _layer_kernel = staticmethod(_layer_norm)

    def rms_norm_verifier(self, x: torch.Tensor, weight: torch.Tensor | None) -> Verdict:
        if weight is None:
            return False, 'rms_norm needs a weight'
        return _takes(x)

    def layer_norm_verifier(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Verdict:
        if weight is None or bias is None:
            return False, 'layer_norm needs a weight and a bias'
        return _takes(x)


def one_row(device: torch.device) -> torch.Tensor:
    """The norm of ones, which is ones."""
    x = torch.ones(1, 16, dtype=torch.bfloat16, device=device)
    y: torch.Tensor = _rms_forward(x, x[0], 1e-5)[0]
    return y
