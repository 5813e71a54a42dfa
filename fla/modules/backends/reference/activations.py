"""Plain PyTorch: activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla.ops.recurrence.gates import wide


def _gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (F.silu(wide(x)) * wide(y)).to(x.dtype)


class ReferenceActivations:
    """Methods of `ModulesReference` for activations."""

    def swiglu(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _gated(x, y)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return _gated(first, second)

    def swiglu_linear(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(_gated(x, y), weight, bias)
