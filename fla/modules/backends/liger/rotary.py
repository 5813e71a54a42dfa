"""Liger-Kernel: the rotary embedding.

Its kernel rotates queries `[B, H, T, D]` and keys in place if they are transposed views of `[B, T, H, D]`. It gets x or a
copy of it as queries, and one head of unused memory as keys.
"""

from __future__ import annotations

import torch

from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offset: int, back: bool) -> torch.Tensor:
    """Rotates a contiguous x in place."""
    with on_device_of(x):
        from liger_kernel.ops.rope import rope_backward, rope_forward

        rows = slice(offset, offset + x.shape[1])
        # Liger's tables have both halves of a row, and a batch dimension of 1
        doubled = (torch.cat([table[rows], table[rows]], -1)[None] for table in (cos, sin))
        keys = x.new_empty(x.shape[0], x.shape[1], 1, x.shape[3])
        y = (rope_backward if back else rope_forward)(x.transpose(1, 2), keys.transpose(1, 2), *doubled)[0].transpose(1, 2)
        return x if y.data_ptr() == x.data_ptr() else x.copy_(y)


def _forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offset: int) -> torch.Tensor:
    return _rotate(x.clone(memory_format=torch.contiguous_format), cos, sin, offset, False)


def _backward(cos: torch.Tensor, sin: torch.Tensor, offset: int, dy: torch.Tensor) -> torch.Tensor:
    # a copy: other code may use the incoming gradient
    return _rotate(dy.clone(memory_format=torch.contiguous_format), cos, sin, offset, True)


def _in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, offset: int) -> None:
    _rotate(x, cos, sin, offset, False)


_rotary = opaque(
    'fla::liger_rotary_embedding',
    schema='(Tensor x, Tensor cos, Tensor sin, SymInt offset) -> (Tensor y)',
    forward=_forward,
    fake=lambda x, cos, sin, offset: x.new_empty(x.shape),
    backward=_backward,
    fake_backward=lambda cos, sin, offset, dy: dy.new_empty(dy.shape),
    grads=('x',),
)

_rotary_in_place = opaque(
    'fla::liger_rotary_embedding_in_place',
    schema='(Tensor(a!) x, Tensor cos, Tensor sin, SymInt offset) -> ()',
    forward=_in_place,
    fake=lambda x, cos, sin, offset: None,
)


class LigerRotary:
    """Methods of `LigerBackend` for the rotary embedding: one sequence per batch row, one position for all, all channels
    rotated in halves."""

    def rotary_embedding_verifier(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inplace: bool, seqlen_offsets: int | torch.Tensor
    ) -> Verdict:
        if isinstance(seqlen_offsets, torch.Tensor):
            return False, 'Liger takes one position for all sequences: seqlen_offsets must be an int'
        if cos.dtype != torch.float32 or sin.dtype != torch.float32:
            return False, 'Liger computes in the dtype of the tables: cos and sin must be float32'
        if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
            return False, 'Liger has no gradient of cos and sin'
        if 2 * cos.shape[1] != x.shape[3]:
            return False, ('Liger rotates all channels: R must be D, got %s and %s', 2 * cos.shape[1], x.shape[3])
        if inplace and not x.is_contiguous():
            return False, 'Liger would write into a copy of x: x must be contiguous with inplace=True'
        return check_size(x)

    def rotary_embedding(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inplace: bool = False,
        seqlen_offsets: int | torch.Tensor = 0,
    ) -> torch.Tensor:
        if inplace and not (torch.is_grad_enabled() and x.requires_grad):
            _rotary_in_place(x, cos, sin, seqlen_offsets)
            return x
        y: torch.Tensor = _rotary(x, cos, sin, seqlen_offsets)
        return x.copy_(y) if inplace else y
