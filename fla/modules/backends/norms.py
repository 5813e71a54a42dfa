"""`rms_norm` and `layer_norm` by a vendor's kernels, which have no residual."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fla.ops.recurrence.gates import wide


class NormsWithoutResidual:
    """Methods of a backend whose class has `_rms_kernel(x, weight, eps)` and `_layer_kernel(x, weight, bias, eps)`."""

    _rms_kernel: Callable[..., torch.Tensor]
    _layer_kernel: Callable[..., torch.Tensor]

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y = self._rms_kernel(x, weight, float(eps))
        return (y, wide(x) if residual_in_fp32 else x) if prenorm else y

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y = self._layer_kernel(x, weight, bias, float(eps))
        return (y, wide(x) if residual_in_fp32 else x) if prenorm else y
