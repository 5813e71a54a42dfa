"""Plain PyTorch: the rotary embedding."""

from __future__ import annotations

import torch

from fla.modules.backends.reference.overwrite import overwrite
from fla.modules.rotary.ops import rotary_embedding_ref
from fla.modules.rotary.positions import positions


class ReferenceRotary:
    """Methods of `ModulesReference` for the rotary embedding."""

    def rotary_embedding(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if cu_seqlens is None and isinstance(seqlen_offsets, int):
            rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
            cos, sin = cos[rows], sin[rows]
        elif cos.shape[0]:
            place = positions(x, seqlen_offsets, cu_seqlens).clamp(0, cos.shape[0] - 1)
            cos, sin = cos[place], sin[place]
        y = rotary_embedding_ref(x, cos, sin, interleaved)
        return overwrite(x, y) if inplace else y
