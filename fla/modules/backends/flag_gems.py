"""FlagGems: operators in Triton for many accelerators, by BAAI."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.modules.backends.norms import NormsWithoutResidual
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import smallest_call
from fla.utils.devices import Device


def _rms_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    with on_device_of(x):
        from flag_gems.ops import rms_norm

        return rms_norm(x.contiguous(), x.shape[-1:], weight.contiguous(), eps)


_rms_norm = opaque(
    'fla::flag_gems_rms_norm',
    schema='(Tensor x, Tensor weight, float eps) -> (Tensor y)',
    forward=_rms_forward,
    fake=lambda x, weight, eps: x.new_empty(x.shape),
)


def _layer_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
    with on_device_of(x):
        from flag_gems.ops import layer_norm

        return layer_norm(x.contiguous(), x.shape[-1:], weight.contiguous(), bias.contiguous(), eps)[0]


_layer_norm = opaque(
    'fla::flag_gems_layer_norm',
    schema='(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y)',
    forward=_layer_forward,
    fake=lambda x, weight, bias, eps: x.new_empty(x.shape),
)


class FlagGemsBackend(NormsWithoutResidual, BaseBackend):
    """`rms_norm` and `layer_norm` with parameters in the dtype of x, without a residual, for inference."""

    _rms_kernel = staticmethod(_rms_norm)
    _layer_kernel = staticmethod(_layer_norm)

    backend_type = 'flag_gems'
    package_name = 'flag_gems'
    package_version = 'flag-gems>=5'
    env_var = 'FLA_FLAG_GEMS'
    default_enable = False
    vendor = 'baai'
    devices = ('cuda',)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    grad = 'none'
    verified = True
    needs = ('flag_gems.ops:rms_norm', 'flag_gems.ops:layer_norm')

    def probe(self, device: Device) -> Verdict:
        # the import needs the GPU, and packages that may be missing
        return smallest_call(device, _one_row, 1.0, self.needs)

    def _takes(self, x: torch.Tensor, *parameters: torch.Tensor | None) -> Verdict:
        if any(p is None or p.dtype != x.dtype for p in parameters):
            return False, 'weight, and bias of layer_norm, must be given in the dtype of x'
        return check_size(x)

    def rms_norm_verifier(self, x: torch.Tensor, weight: torch.Tensor | None) -> Verdict:
        return self._takes(x, weight)

    def layer_norm_verifier(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Verdict:
        return self._takes(x, weight, bias)


def _one_row(device: torch.device) -> Any:
    """The norm of ones, which is ones."""
    x = torch.ones(1, 16, dtype=torch.bfloat16, device=device)
    return _rms_forward(x, x[0], 1e-5)
