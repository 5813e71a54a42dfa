"""FlagGems: operators in Triton for many accelerators, by BAAI."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import smallest_call
from fla.ops.recurrence.gates import wide
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


class FlagGemsBackend(BaseBackend):
    """`rms_norm` and `layer_norm` with parameters in the dtype of x, without a residual, for inference."""

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
        # importing it asks for the GPU, and for packages that may be missing
        return smallest_call(device, _one_row, 1.0, self.needs)

    def _takes(self, x: torch.Tensor, *parameters: torch.Tensor | None) -> Verdict:
        if any(p is None or p.dtype != x.dtype for p in parameters):
            return False, 'weight, and bias of layer_norm, must be given in the dtype of x'
        if x.numel() == 0:
            return False, 'there are no rows, and the kernels cannot be launched on nothing'
        if x.numel() >= 2**31:
            return False, ('not known to count in 64 bits: x must have fewer than 2^31 elements, got %s', x.numel())
        return True, None

    def rms_norm_verifier(self, x: torch.Tensor, weight: torch.Tensor | None) -> Verdict:
        return self._takes(x, weight)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y: torch.Tensor = _rms_norm(x, weight, float(eps))
        return (y, wide(x) if residual_in_fp32 else x) if prenorm else y

    def layer_norm_verifier(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Verdict:
        return self._takes(x, weight, bias)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y: torch.Tensor = _layer_norm(x, weight, bias, float(eps))
        return (y, wide(x) if residual_in_fp32 else x) if prenorm else y


def _one_row(device: torch.device) -> Any:
    """Of ones, whose root mean square is 1."""
    x = torch.ones(1, 16, dtype=torch.bfloat16, device=device)
    return _rms_forward(x, x[0], 1e-5)
