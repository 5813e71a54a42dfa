"""FlashInfer: kernels for serving language models."""

from __future__ import annotations

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.modules.backends.flashinfer.activations import FlashInferActivations, one_row
from fla.modules.backends.flashinfer.norms import FlashInferNorms
from fla.modules.backends.flashinfer.rotary import FlashInferRotary
from fla.ops.launch.vendor import smallest_call
from fla.utils.devices import Device


class FlashInferBackend(FlashInferNorms, FlashInferActivations, FlashInferRotary, BaseBackend):
    """The kernels of FlashInfer that compute what a function here specifies. They have no gradients."""

    backend_type = 'flashinfer'
    package_name = 'flashinfer'
    package_version = 'flashinfer-python>=0.6.14'  # the oldest tested
    env_var = 'FLA_FLASHINFER'
    default_enable = False
    vendor = 'flashinfer'
    devices = ('cuda',)
    dtypes = (torch.float16, torch.bfloat16)
    grad = 'none'
    verified = True
    needs = (
        'flashinfer.activation:silu_and_mul',
        'flashinfer.norm:layernorm',
        'flashinfer.norm:rmsnorm',
        'flashinfer.rope:apply_rope_with_cos_sin_cache_inplace',
    )

    def probe(self, device: Device) -> Verdict:
        # without nvcc the package imports but cannot compile; this kernel compiles fastest
        return smallest_call(device, one_row, 0.731, self.needs)
