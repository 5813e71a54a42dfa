"""FlashInfer: kernels for serving language models."""

from __future__ import annotations

import torch

from fla.modules.backends.flashinfer.activations import FlashInferActivations
from fla.modules.backends.flashinfer.norms import FlashInferNorms
from fla.modules.backends.flashinfer.rotary import FlashInferRotary
from fla.ops.backends import BaseBackend


class FlashInferBackend(FlashInferNorms, FlashInferActivations, FlashInferRotary, BaseBackend):
    """What of FlashInfer computes exactly what a function of ours says; it has no gradients."""

    backend_type = 'flashinfer'
    package_name = 'flashinfer'
    package_version = 'flashinfer-python>=0.2'
    env_var = 'FLA_FLASHINFER'
    default_enable = False
    vendor = 'flashinfer'
    devices = ('cuda',)
    dtypes = (torch.float16, torch.bfloat16)
    grad = 'none'
    verified = False
