"""`torch.nn.functional.scaled_dot_product_attention`, which chooses among PyTorch's own fused kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla.ops.attn.naive import visible
from fla.ops.backends import BaseBackend
from fla.ops.common.reference import without_autocast


class SDPABackend(BaseBackend):
    """No gates and no sinks: as an additive mask they would put all scores into memory, as the default does."""

    backend_type = 'sdpa'
    kind = 'native'
    env_var = 'FLA_SDPA'

    def parallel_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window_size: int | None = None,
        cu_seqlens: torch.Tensor | None = None,
        # lint: allow ignored-argument because chunk_indices says nothing that cu_seqlens does not
        chunk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        seen, causal = None, q.shape[1] == k.shape[1]
        if window_size is not None or cu_seqlens is not None or not (causal or q.shape[1] == 1):
            seen, causal = visible(q, k, window_size, cu_seqlens), False
        with without_autocast(q.device):
            o = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=seen,
                is_causal=causal,
                scale=scale,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return o.transpose(1, 2).contiguous()
