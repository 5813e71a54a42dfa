"""Padded batches as packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def may_wait(x: torch.Tensor) -> bool:
    """Whether the host can read what x's device computes: not in compiled code, nor in a CUDA graph capture."""
    return not (torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


@dataclass(frozen=True)
class Packing:
    """Where the steps of a padded batch are.

    Attributes:
        places: of the steps in the flat `[B * T]`.
        cu_seqlens: `[B + 1]`, int32.
        shape: (B, T).
    """

    places: torch.Tensor
    cu_seqlens: torch.Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: torch.Tensor) -> Packing:
        """Of a mask `[B, T]`, padding anywhere. Waits for the device: how many steps there are decides the shapes."""
        kept = mask.bool()
        cu_seqlens = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
        return cls(kept.flatten().nonzero()[:, 0], cu_seqlens, (mask.shape[0], mask.shape[1]))

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to `[1, steps, D]`."""
        return x.reshape(-1, x.shape[-1])[self.places][None]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, steps, …]` to `[B, T, …]`, zeros for padding."""
        batch, length = self.shape
        flat = x.new_zeros(batch * length, *x.shape[2:]).index_copy(0, self.places, x[0])
        return flat.view(batch, length, *x.shape[2:])
