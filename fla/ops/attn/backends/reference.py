"""Plain PyTorch, with which every other backend is compared."""

from __future__ import annotations

import torch

from fla.backends import BaseBackend
from fla.ops.attn.naive import naive_parallel_attn


class AttentionReference(BaseBackend):
    """Takes every device, dtype and argument, and is differentiable twice. All scores are in memory."""

    backend_type = 'reference'
    kind = 'reference'

    def parallel_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        scale: float | None = None,
        window_size: int | None = None,
        cu_seqlens: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,  # lint: allow ignored-argument because they follow from cu_seqlens
        *,
        sink_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return naive_parallel_attn(q, k, v, g, scale, window_size, cu_seqlens, sink_bias=sink_bias)
