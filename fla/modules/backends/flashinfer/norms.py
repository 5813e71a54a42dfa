"""FlashInfer: norms."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.modules.backends.norms import NormsWithoutResidual
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import for_tma


def _rows(x: torch.Tensor) -> torch.Tensor:
    return for_tma(x).view(-1, x.shape[-1])


def _rms_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    with on_device_of(x):
        import flashinfer.norm

        return flashinfer.norm.rmsnorm(_rows(x), for_tma(weight), eps).view(x.shape)


_rms_norm = opaque(
    'fla::flashinfer_rms_norm',
    schema='(Tensor x, Tensor weight, float eps) -> (Tensor y)',
    forward=_rms_forward,
    fake=lambda x, weight, eps: x.new_empty(x.shape),
)


def _layer_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
    with on_device_of(x):
        import flashinfer.norm

        return flashinfer.norm.layernorm(_rows(x), for_tma(weight), for_tma(bias), eps).view(x.shape)


_layer_norm = opaque(
    'fla::flashinfer_layer_norm',
    schema='(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y)',
    forward=_layer_forward,
    fake=lambda x, weight, bias, eps: x.new_empty(x.shape),
)


def _takes(x: torch.Tensor) -> Verdict:
    """Whether FlashInfer's kernels take x of this size."""
    if x.shape[-1] % 8:
        return False, ('rows are read 16 bytes at a time: D must be a multiple of 8, got %s', x.shape[-1])
    return check_size(x)


class FlashInferNorms(NormsWithoutResidual):
    """Methods of `FlashInferBackend` for norms, without a residual: FlashInfer writes the sum into its arguments."""

    _rms_kernel = staticmethod(_rms_norm)
    _layer_kernel = staticmethod(_layer_norm)

    def rms_norm_verifier(self, x: torch.Tensor, weight: torch.Tensor | None) -> Verdict:
        if weight is None or weight.dtype != x.dtype:
            return False, 'rmsnorm needs a weight in the dtype of x'
        return _takes(x)

    def layer_norm_verifier(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Verdict:
        if x.dtype != torch.bfloat16:
            return False, ('layernorm is for bfloat16, got %s', x.dtype)
        if weight is None or bias is None or weight.dtype != torch.float32 or bias.dtype != torch.float32:
            return False, 'layernorm needs a weight and a bias in float32'
        return _takes(x)
