"""Padded batches as packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor


def may_sync(x: torch.Tensor) -> bool:
    """Whether the host may wait for x's device and read a result.

    False in compiled code, in a CUDA graph capture, for tensors without data, and for tensors batched by a vmap.
    """
    if torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor) or _is_vmapped(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_vmapped(x: torch.Tensor) -> bool:
    """Whether a vmap, at any level, has batched x."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def packs_for_attention(x: torch.Tensor) -> bool:
    """Whether attention gets a padded batch packed. A mask is better on a CPU if the host may not wait.

    Padding would then be packed too, and on a CPU packed sequences become a mask, which would be larger.
    """
    return may_sync(x) or x.is_cuda


@dataclass(frozen=True)
class Packing:
    """The layout of a padded batch as packed sequences.

    If the host may not wait to learn how many steps there are, padding is packed too: after the steps of all rows, the
    padding of each row is a sequence of its own. No sequence is longer than a row, as attention's work is quadratic in it.

    Attributes:
        places: indices into the flattened `[B * T]` of the steps, then of the padding if it is packed.
        cu_seqlens: `[B + 1]`, or `[2 B + 1]` if padding is packed; int32.
        shape: (B, T).
        padding: `[B * T]`, whether each of `places` is padding; None if padding is not packed.
    """

    places: torch.Tensor
    cu_seqlens: torch.Tensor
    shape: tuple[int, int]
    padding: torch.Tensor | None = None

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> Packing:
        """The packing for a mask `[B, T]` with padding anywhere. Waits for the device if it may, which saves work."""
        is_step, shape = mask.bool(), (mask.shape[0], mask.shape[1])
        lengths = is_step.sum(1)
        if may_sync(mask):
            return cls(is_step.flatten().nonzero()[:, 0], _cumulative(lengths), shape)
        padding = ~is_step.flatten()
        # stable, so that rows stay in order among the steps and among the padding
        places = padding.to(torch.uint8).argsort(stable=True)
        return cls(places, _cumulative(torch.cat([lengths, shape[1] - lengths])), shape, padding[places])

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to `[1, rows, D]`, with zeros for padding."""
        rows = x.reshape(-1, x.shape[-1])[self.places]
        return rows[None] if self.padding is None else rows.masked_fill(self.padding[:, None], 0.0)[None]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, rows, …]` to `[B, T, …]`, with zeros for padding."""
        batch, length = self.shape
        rows = x[0]
        if self.padding is not None:
            rows = rows.masked_fill(self.padding.view(-1, *[1] * (rows.dim() - 1)), 0.0)
        flat = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, self.places, rows)
        return flat.view(batch, length, *rows.shape[1:])

    def pack_states(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """States `[B, …]` of the rows to states of all sequences: those of packed padding are zeros."""
        return x if x is None or self.padding is None else torch.cat([x, torch.zeros_like(x)])

    def unpack_states(self, x: torch.Tensor) -> torch.Tensor:
        """States of all sequences to states `[B, …]` of the rows."""
        return x if self.padding is None else x[: self.shape[0]]


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
