"""Splits steps into chunks, and joins them again."""

from __future__ import annotations

import torch

from fla.backends import check_tensors
from fla.ops.checks import FLOATS, check_chunk_indices, check_cu_seqlens, check_given
from fla.ops.utils.index import prepare_chunk_indices


def split(x: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Splits x `[B, T, ...]` into `[B, chunks, chunk_size, ...]`. Each sequence starts a chunk; its last is zero-padded."""
    if cu_seqlens is None:
        padded = torch.cat([x, x.new_zeros(x.shape[0], -x.shape[1] % chunk_size, *x.shape[2:])], 1)
        return padded.view(x.shape[0], padded.shape[1] // chunk_size, chunk_size, *x.shape[2:])
    steps, valid = _steps(cu_seqlens, chunk_size)
    chunks = x.new_zeros(*steps.shape, *x.shape[2:])
    return chunks.index_put((valid,), x[0, steps[valid]])[None]


def join(chunks: torch.Tensor, length: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The reverse of `split`: `[B, length, ...]`."""
    if cu_seqlens is None:
        return chunks.flatten(1, 2)[:, :length]
    steps, valid = _steps(cu_seqlens, chunks.shape[2])
    x = chunks.new_zeros(length, *chunks.shape[3:])
    return x.index_put((steps[valid],), chunks[0, valid])[None]


def _steps(cu_seqlens: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps of each chunk, `[chunks, chunk_size]`, and which of them are in its sequence."""
    sequence, number = prepare_chunk_indices(cu_seqlens.long(), chunk_size).unbind(1)
    offsets = torch.arange(chunk_size, device=cu_seqlens.device)
    steps = cu_seqlens[sequence, None] + number[:, None] * chunk_size + offsets
    return steps, steps < cu_seqlens[sequence + 1, None]


def check_steps(
    name: str,
    x: torch.Tensor,
    dims: tuple[int, ...],
    meaning: str,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None = None,
) -> None:
    """Checks a floating tensor `[B, T, ...]` whose number of dimensions is in `dims`; B = 1 with `cu_seqlens`."""
    check_given(**{name: x})
    check_tensors(**{name: x}, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    if x.dim() not in dims:
        raise ValueError(f'{name} must be {meaning}, got shape {list(x.shape)}')
    if x.dtype not in FLOATS:
        raise TypeError(f'{name} must be float16, bfloat16, float32 or float64, got {x.dtype}')
    check_chunk_indices(chunk_indices)
    check_cu_seqlens(x, cu_seqlens)
