"""Tables of packed sequences and their chunks."""

from __future__ import annotations

import torch

from fla.backends import check_tensors
from fla.ops.checks import check_64_bits, check_given, check_rising, check_same, readable


def prepare_lens(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Returns the lengths `[N]` of packed sequences, with dtype and device of `cu_seqlens` `[N + 1]`, int32 or int64.

    Raises:
        TypeError, ValueError: for an invalid `cu_seqlens`.
    """
    check_lens(cu_seqlens)
    return cu_seqlens.diff()


def prepare_chunk_offsets(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Returns the number of chunks of `chunk_size` steps before each sequence, then the total: `[N + 1]`, like `cu_seqlens`.
    The last chunk of a sequence may be short; an empty sequence has no chunk.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """
    check_lens(cu_seqlens)
    check_chunk_size(chunk_size)
    return torch.nn.functional.pad(_chunks(cu_seqlens, chunk_size).cumsum(0, dtype=cu_seqlens.dtype), (1, 0))


def prepare_chunk_indices(
    cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns for each chunk the index of its sequence and its index in that sequence: `[chunks, 2]`, with dtype and device
    of `cu_seqlens`. An empty sequence has an index, but no row.

    Args:
        cu_seqlens: `[N + 1]`, int32 or int64.
        chunk_size: steps of a chunk.
        cu_seqlens_cpu: the same on the CPU, which avoids a synchronisation.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """
    check_lens(cu_seqlens)
    check_chunk_size(chunk_size)
    if cu_seqlens_cpu is not None:
        check_lens(cu_seqlens_cpu, 'cu_seqlens_cpu')
        if not cu_seqlens_cpu.is_cpu or cu_seqlens_cpu.shape != cu_seqlens.shape:
            raise ValueError(
                f'cu_seqlens_cpu must be cu_seqlens {list(cu_seqlens.shape)} on the CPU, got {list(cu_seqlens_cpu.shape)} '
                f'on {cu_seqlens_cpu.device}'
            )
        if readable(cu_seqlens) and readable(cu_seqlens_cpu):
            check_same(cu_seqlens, cu_seqlens_cpu)
    lens = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    counts = _chunks(lens, chunk_size)
    sequence = torch.arange(len(counts), device=lens.device).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[sequence]
    table = torch.stack([sequence, torch.arange(len(sequence), device=lens.device) - first], 1)
    return table.to(cu_seqlens.device, cu_seqlens.dtype, non_blocking=True)


def _chunks(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """The number of chunks of each sequence."""
    lens = cu_seqlens.diff()
    # no sequence is longer than this, and a larger chunk_size would overflow
    size = min(chunk_size, torch.iinfo(lens.dtype).max)
    return lens.div(size, rounding_mode='floor') + (lens.remainder(size) > 0)


def check_lens(cu_seqlens: torch.Tensor, name: str = 'cu_seqlens') -> None:
    """Checks `cu_seqlens` `[N + 1]`, int32 or int64."""
    check_given(**{name: cu_seqlens})
    check_tensors(**{name: cu_seqlens})
    if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
        raise ValueError(f'{name} must be [N + 1], the ends of N sequences after a 0, got shape {list(cu_seqlens.shape)}')
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f'{name} must be int32 or int64, got {cu_seqlens.dtype}')
    if readable(cu_seqlens):
        check_rising(name, cu_seqlens.tolist())


def check_chunk_size(chunk_size: object) -> None:
    """An int from 1 on."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f'chunk_size must be an int, got {type(chunk_size).__name__}')
    check_64_bits('chunk_size', chunk_size)
    if chunk_size < 1:
        raise ValueError(f'chunk_size must be at least 1, got {chunk_size}')
