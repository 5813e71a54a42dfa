"""Tables of packed sequences and their chunks."""

from __future__ import annotations

import torch

from fla.backends import check_tensors
from fla.ops.recurrence.checks import check_64_bits, check_given, check_rising, check_same, readable


def prepare_lens(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Lengths `[N]` of the sequences between `cu_seqlens` `[N + 1]`, int32 or int64; of that dtype, on its device.

    Raises:
        TypeError, ValueError: for another tensor.
    """
    check_lens(cu_seqlens)
    return cu_seqlens.diff()


def prepare_chunk_offsets(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """How many chunks of `chunk_size` steps there are before each sequence, and at last in all: `[N + 1]`, as `cu_seqlens`.
    The last chunk of a sequence may be short; an empty sequence has none.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """
    check_lens(cu_seqlens)
    check_chunk_size(chunk_size)
    return torch.nn.functional.pad(_chunks(cu_seqlens, chunk_size).cumsum(0, dtype=cu_seqlens.dtype), (1, 0))


def prepare_chunk_indices(
    cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None = None
) -> torch.Tensor:
    """The number of its sequence and its number within it, of each chunk: `[chunks, 2]`, as `cu_seqlens`. Empty sequences
    count, and have no row.

    Args:
        cu_seqlens: `[N + 1]`, int32 or int64.
        chunk_size: steps of a chunk.
        cu_seqlens_cpu: the same on the host: with it nothing waits for the device.

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
    """How many chunks each sequence has."""
    lens = cu_seqlens.diff()
    # a longer one is not to overflow: no sequence is
    size = min(chunk_size, torch.iinfo(lens.dtype).max)
    return lens.div(size, rounding_mode='floor') + (lens.remainder(size) > 0)


def check_lens(cu_seqlens: torch.Tensor, name: str = 'cu_seqlens') -> None:
    """`[N + 1]`, int32 or int64."""
    check_given(**{name: cu_seqlens})
    check_tensors(**{name: cu_seqlens})
    if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
        raise ValueError(f'{name} must be [N + 1], the ends of N sequences after a 0, got shape {list(cu_seqlens.shape)}')
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f'{name} must be int32 or int64, got {cu_seqlens.dtype}')
    if readable(cu_seqlens):
        check_rising(name, cu_seqlens.tolist())


def check_chunk_size(chunk_size: object) -> None:
    """A whole number from 1 on."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f'chunk_size must be an int, got {type(chunk_size).__name__}')
    check_64_bits('chunk_size', chunk_size)
    if chunk_size < 1:
        raise ValueError(f'chunk_size must be at least 1, got {chunk_size}')
