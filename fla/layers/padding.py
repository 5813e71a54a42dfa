"""Padded batches as packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor


def may_wait(x: torch.Tensor) -> bool:
    """Whether the host can read what x's device computes: not in compiled code, nor in a CUDA graph capture, nor where x has
    no data, or those of all samples of a vmap."""
    if torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor) or _has_samples(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _has_samples(x: torch.Tensor) -> bool:
    """Whether a vmap is around it, at any level."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def may_pack(x: torch.Tensor) -> bool:
    """Whether attention gets a padded batch packed. Not where nobody may wait, so that padding is packed as well, and packed
    sequences are a mask after all, which is larger then."""
    return may_wait(x) or x.is_cuda


@dataclass(frozen=True)
class Packing:
    """Where the steps of a padded batch are.

    Where nobody may wait for how many steps there are, the padding of each row is a sequence of its own, after those of all
    rows: no longer than a row, as what attention computes grows with the square of that.

    Attributes:
        places: of the steps in the flat `[B * T]`; of the padding after them, if that is packed as well.
        cu_seqlens: `[B + 1]`, int32, or `[2 B + 1]`.
        shape: (B, T).
        padding: `[B * T]`, which of the places are padding; None: none of them is.
    """

    places: torch.Tensor
    cu_seqlens: torch.Tensor
    shape: tuple[int, int]
    padding: torch.Tensor | None = None

    @classmethod
    def of(cls, mask: torch.Tensor) -> Packing:
        """Of a mask `[B, T]`, padding anywhere. Waits for the device where that may be, as fewer rows are less work."""
        kept, shape = mask.bool(), (mask.shape[0], mask.shape[1])
        lengths = kept.sum(1)
        if may_wait(mask):
            return cls(kept.flatten().nonzero()[:, 0], _ends(lengths), shape)
        padding = ~kept.flatten()
        # stable: row after row, of the steps and of the padding
        places = padding.to(torch.uint8).argsort(stable=True)
        return cls(places, _ends(torch.cat([lengths, shape[1] - lengths])), shape, padding[places])

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to `[1, rows, D]`, zeros for padding."""
        rows = x.reshape(-1, x.shape[-1])[self.places]
        return rows[None] if self.padding is None else rows.masked_fill(self.padding[:, None], 0.0)[None]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, rows, …]` to `[B, T, …]`, zeros for padding."""
        batch, length = self.shape
        rows = x[0]
        if self.padding is not None:
            rows = rows.masked_fill(self.padding.view(-1, *[1] * (rows.dim() - 1)), 0.0)
        flat = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, self.places, rows)
        return flat.view(batch, length, *rows.shape[1:])

    def states(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """States of the rows `[B, …]`, and zeros for padding, where that is packed as well."""
        return x if x is None or self.padding is None else torch.cat([x, torch.zeros_like(x)])

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Of the states of all sequences those of the rows."""
        return x if self.padding is None else x[: self.shape[0]]


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
