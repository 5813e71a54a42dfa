"""Positions of the steps, and the tables and positions as the kernels' arguments."""

from __future__ import annotations

import torch

# Operators take the arguments in this order and form: a schema cannot say that seqlen_offsets is an int or a tensor.
TABLES_AND_POSITIONS = 'Tensor cos, Tensor sin, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, bool interleaved'


def tables_and_positions(
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, bool]:
    """Arguments of `rotary_embedding` in the form of `TABLES_AND_POSITIONS`."""
    if isinstance(seqlen_offsets, torch.Tensor):
        return cos, sin, seqlen_offsets, cu_seqlens, 0, interleaved
    return cos, sin, None, cu_seqlens, seqlen_offsets, interleaved


def positions(x: torch.Tensor, offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The position of each step of x `[B, T, ...]` in its sequence: `[T]`, or `[B, T]` with a tensor of offsets."""
    if cu_seqlens is None and not isinstance(offsets, torch.Tensor):
        return torch.arange(offsets, offsets + x.shape[1], device=x.device)
    time = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        assert isinstance(offsets, torch.Tensor)
        return time + offsets[:, None]
    count = cu_seqlens.shape[0] - 1
    if count == 0:
        return time
    # the clamp matters only for invalid cu_seqlens
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), time.to(cu_seqlens.dtype), right=True).clamp(max=count - 1)
    return time - cu_seqlens[sequence] + (offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets)
