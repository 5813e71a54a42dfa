"""Inverses of the triangular systems of chunks."""

from __future__ import annotations

import torch

from fla.ops.checks import check_output_dtype
from fla.ops.recurrence.gates import wide
from fla.ops.utils.chunks import check_steps, join, split


def solve_tril(
    A: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """`(I + A)^-1` of each chunk and head.

    Args:
        A: `[B, T, H, C]`, floating. `A[:, t]` is step t's row in the matrix of its chunk of C steps. Only entries strictly
            below the diagonal are read. Solved in at least float32.
        cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1, each of which starts a chunk. Synchronises.
        chunk_indices: accepted for compatibility, without effect; it follows from `cu_seqlens`.
        output_dtype: dtype of the inverse; None: that of A.

    Returns:
        The inverses, shaped like A. In a short last chunk, columns without a step are 0.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """
    check_steps('A', A, (4,), '[B, T, H, C]', cu_seqlens, chunk_indices)
    check_output_dtype(output_dtype)
    size = A.shape[3]
    if not size:
        raise ValueError(f'A must have chunks of at least one step, got shape {list(A.shape)}')
    # [B, chunks, H, C, C]
    lower = split(wide(A), size, cu_seqlens).transpose(2, 3).tril(-1)
    eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(eye + lower, eye.expand_as(lower), upper=False, unitriangular=True)
    return join(inverse.transpose(2, 3), A.shape[1], cu_seqlens).to(output_dtype or A.dtype)
