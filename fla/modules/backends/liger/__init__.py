"""Liger-Kernel: Triton kernels for training, by LinkedIn."""

from __future__ import annotations

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.modules.backends.liger.activations import LigerActivations
from fla.modules.backends.liger.losses import LigerLosses
from fla.modules.backends.liger.norms import LigerNorms, one_row
from fla.modules.backends.liger.rotary import LigerRotary
from fla.ops.launch.vendor import smallest_call
from fla.utils.devices import Device


class LigerBackend(LigerNorms, LigerActivations, LigerRotary, LigerLosses, BaseBackend):
    """The kernels of Liger-Kernel that compute what a function here specifies."""

    backend_type = 'liger'
    package_name = 'liger_kernel'
    package_version = 'liger-kernel>=0.6'
    env_var = 'FLA_LIGER'
    default_enable = False
    vendor = 'linkedin'
    devices = ('cuda',)
    dtypes = dict.fromkeys(('x', 'weight', 'bias'), (torch.float16, torch.bfloat16, torch.float32))
    verified = True
    needs = (
        'liger_kernel.ops.cross_entropy:cross_entropy_forward',
        'liger_kernel.ops.fused_linear_cross_entropy:fused_linear_cross_entropy_forward',
        'liger_kernel.ops.layer_norm:layer_norm_backward',
        'liger_kernel.ops.layer_norm:layer_norm_forward',
        'liger_kernel.ops.rms_norm:rms_norm_backward',
        'liger_kernel.ops.rms_norm:rms_norm_forward',
        'liger_kernel.ops.rope:rope_backward',
        'liger_kernel.ops.rope:rope_forward',
        'liger_kernel.ops.swiglu:swiglu_backward',
        'liger_kernel.ops.swiglu:swiglu_forward',
        'liger_kernel.ops.utils:calculate_settings',
    )

    def probe(self, device: Device) -> Verdict:
        # with another Triton the package imports, but may not compile
        return smallest_call(device, one_row, 1.0, self.needs)
