"""FlashInfer: activations."""

from __future__ import annotations

import torch

from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import for_tma


def _forward(x: torch.Tensor) -> torch.Tensor:
    with on_device_of(x):
        import flashinfer.activation

        z: torch.Tensor = flashinfer.activation.silu_and_mul(for_tma(x).view(-1, x.shape[-1]))
        return z.view(*x.shape[:-1], x.shape[-1] // 2)


_silu_and_mul = opaque(
    'fla::flashinfer_silu_and_mul',
    schema='(Tensor x) -> (Tensor z)',
    forward=_forward,
    fake=lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
)


class FlashInferActivations:
    """Methods of `FlashInferBackend` for activations."""

    def silu_and_mul_verifier(self, x: torch.Tensor) -> Verdict:
        if x.shape[-1] % 16:
            return False, ('halves are read 16 bytes at a time: 2D must be a multiple of 16, got %s', x.shape[-1])
        return check_size(x)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = _silu_and_mul(x)
        return z


def one_row(device: torch.device) -> torch.Tensor:
    """silu(1) * 1 = 0.731, from ones."""
    return _forward(torch.ones(1, 16, dtype=torch.bfloat16, device=device))
