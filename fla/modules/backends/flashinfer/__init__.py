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
    """What of FlashInfer computes exactly what a function of ours says; it has no gradients."""

    backend_type = 'flashinfer'
    package_name = 'flashinfer'
    package_version = 'flashinfer-python>=0.6.14'  # the oldest that was looked at
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
        # without nvcc it imports, and cannot compile; this is what it compiles soonest
        return smallest_call(device, one_row, 0.731, self.needs)
