"""Liger-Kernel: Triton kernels for training, by LinkedIn."""

from __future__ import annotations

import torch

from fla.modules.backends.liger.activations import LigerActivations
from fla.modules.backends.liger.losses import LigerLosses
from fla.modules.backends.liger.norms import LigerNorms
from fla.modules.backends.liger.rotary import LigerRotary
from fla.ops.backends import BaseBackend


class LigerBackend(LigerNorms, LigerActivations, LigerRotary, LigerLosses, BaseBackend):
    """What of Liger-Kernel computes exactly what a function of ours says."""

    backend_type = 'liger'
    package_name = 'liger_kernel'
    package_version = 'liger-kernel>=0.6'
    env_var = 'FLA_LIGER'
    default_enable = False
    vendor = 'linkedin'
    devices = ('cuda',)
    dtypes = dict.fromkeys(('x', 'weight', 'bias'), (torch.float16, torch.bfloat16, torch.float32))
    verified = False
