"""FlashInfer: the rotary embedding with tables of cosines and sines.

Its kernel rotates queries `[steps, H D]` and keys in place. It gets a copy of x (with `inplace`, x itself) as queries, and
one head of zeros as keys.
"""

from __future__ import annotations

from typing import Any

import torch

from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.modules.rotary.positions import TABLES_AND_POSITIONS, positions, tables_and_positions
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import aligned

# head dims that its kernels are instantiated for
DIMS = (64, 128, 256, 512)


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offsets: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offset: int,
    interleaved: bool,
) -> torch.Tensor:
    """Rotates a contiguous x in place."""
    with on_device_of(x):
        import flashinfer.rope

        batch, length, _, dim = x.shape
        place = positions(x, offset if offsets is None else offsets, cu_seqlens).expand(batch, length).reshape(-1)
        queries = x.view(batch * length, -1)
        flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(
            place.clamp(0, cos.shape[0] - 1),
            queries,
            queries.new_zeros(batch * length, dim),
            dim,
            torch.cat([cos, sin], -1),
            not interleaved,
        )
    return x


def _forward(x: torch.Tensor, *tables_and_positions: Any) -> torch.Tensor:
    return _rotate(x.clone(memory_format=torch.contiguous_format), *tables_and_positions)


def _in_place(x: torch.Tensor, *tables_and_positions: Any) -> None:
    rotated = _rotate(aligned(x), *tables_and_positions)
    if rotated is not x:  # x was unaligned
        x.copy_(rotated)


_rotary = opaque(
    'fla::flashinfer_rotary_embedding',
    schema=f'(Tensor x, {TABLES_AND_POSITIONS}) -> (Tensor y)',
    forward=_forward,
    fake=lambda x, *_: x.new_empty(x.shape),
)

_rotary_in_place = opaque(
    'fla::flashinfer_rotary_embedding_in_place',
    schema=f'(Tensor(a!) x, {TABLES_AND_POSITIONS}) -> ()',
    forward=_in_place,
    fake=lambda *_: None,
)


class FlashInferRotary:
    """Methods of `FlashInferBackend` for the rotary embedding."""

    def rotary_embedding_verifier(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inplace: bool) -> Verdict:
        if x.shape[3] not in DIMS:
            return False, ('the head dim must be 64, 128, 256 or 512, got %s', x.shape[3])
        if cos.dtype != torch.float32 or sin.dtype != torch.float32:
            return False, 'FlashInfer has tables in float32: cos and sin must be float32'
        if cos.shape[1] == 0 or cos.shape[1] % 8:
            return False, ('channels are read 16 bytes at a time: R / 2 must be a multiple of 8, got %s', cos.shape[1])
        if inplace and not x.is_contiguous():
            return False, 'FlashInfer takes contiguous queries: x must be contiguous with inplace=True'
        return check_size(x)

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
        given = tables_and_positions(cos, sin, interleaved, seqlen_offsets, cu_seqlens)
        if inplace:
            _rotary_in_place(x, *given)
            return x
        y: torch.Tensor = _rotary(x, *given)
        return y
