"""Cumulative sums over the steps of a chunk or of a sequence."""

from __future__ import annotations

import torch

from fla.ops.checks import check_output_dtype, check_scale
from fla.ops.recurrence.gates import wide
from fla.ops.utils.chunks import check_steps, join, split
from fla.ops.utils.index import check_chunk_size, prepare_lens

_STEPS = '[B, T, H] or [B, T, H, D]'


def chunk_local_cumsum(
    g: torch.Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
    chunk_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cumulative sums from the first step of each chunk.

    Args:
        g: `[B, T, H]` or `[B, T, H, D]`, floating; summed in at least float32.
        chunk_size: steps of a chunk.
        reverse: sum from each step to the last of its chunk.
        scale: a factor of the sums.
        cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1, each of which starts a chunk. Synchronises.
        output_dtype: dtype of the sums; None: that of g.
        chunk_indices: accepted for compatibility, without effect; it follows from `cu_seqlens`.

    Returns:
        The sums, shaped like g.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """
    check_steps('g', g, (3, 4), _STEPS, cu_seqlens, chunk_indices)
    check_output_dtype(output_dtype)
    check_chunk_size(chunk_size)
    check_scale(scale)
    size = min(chunk_size, max(g.shape[1], 1))
    sums = _cumsum(split(wide(g), size, cu_seqlens), 2, reverse)
    return _scaled(join(sums, g.shape[1], cu_seqlens), scale, output_dtype or g.dtype)


def chunk_global_cumsum(
    s: torch.Tensor,
    reverse: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """Cumulative sums from the first step of each sequence.

    Args:
        s: `[B, T, H]` or `[B, T, H, D]`, floating; summed in at least float32.
        reverse: sum from each step to the last of its sequence.
        cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1. Synchronises.
        scale: a factor of the sums.
        output_dtype: dtype of the sums; None: that of s.

    Returns:
        The sums, shaped like s.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """
    check_steps('s', s, (3, 4), _STEPS, cu_seqlens)
    check_output_dtype(output_dtype)
    check_scale(scale)
    parts = [wide(s)] if cu_seqlens is None else torch.split(wide(s), prepare_lens(cu_seqlens).tolist(), 1)
    sums = torch.cat([_cumsum(part, 1, reverse) for part in parts], 1) if parts else wide(s)
    return _scaled(sums, scale, output_dtype or s.dtype)


def _cumsum(x: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


def _scaled(sums: torch.Tensor, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
    return (sums if scale is None else sums * scale).to(dtype)
