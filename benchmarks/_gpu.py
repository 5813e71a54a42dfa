"""Times on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# of a Hopper's clock
_CYCLES_A_MS = 1_750_000


def gpu_ms(function: Callable[[], object], repeats: int = 30, head_start_ms: float = 4.0) -> float:
    """Median of the time that the GPU takes, from a cold cache, with everything launched before it starts: what launching
    costs is `wall_ms`. The head start is to be longer than launching takes."""
    for _ in range(3):
        function()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    flush = torch.empty(64 << 20, dtype=torch.int32, device='cuda')
    for start, end in zip(starts, ends, strict=True):
        flush.zero_()
        torch.cuda._sleep(int(head_start_ms * _CYCLES_A_MS))
        start.record()
        function()
        end.record()
        # the next one must not be launched while this one runs: memory that is freed here could not be used again
        torch.cuda.synchronize()
    return sorted(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True))[repeats // 2]


def wall_ms(function: Callable[[], object], calls: int, rounds: int = 20) -> float:
    """Least mean time of a call among `calls` in a row, to the end of the last one on the GPU."""
    best = float('inf')
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / calls)
    return best * 1e3


def peak_mib(function: Callable[[], object]) -> float:
    """Memory in use at most while `function` runs, beyond what is in use before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
