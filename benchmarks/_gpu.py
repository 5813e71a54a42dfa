"""Times and peak memory of calls on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from _results import error_line

# clock of a Hopper GPU
_CYCLES_PER_MS = 1_750_000


def gpu_ms(function: Callable[[], object], repeats: int = 30, head_start_ms: float = 4.0) -> float:
    """Median GPU time of a call, from a cold cache, with all its kernels launched before the first one starts.

    The head start must be longer than launching takes. `wall_ms` includes the cost of launching.
    """
    for _ in range(3):
        function()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    flush = torch.empty(64 << 20, dtype=torch.int32, device='cuda')
    for start, end in zip(starts, ends, strict=True):
        flush.zero_()
        torch.cuda._sleep(int(head_start_ms * _CYCLES_PER_MS))
        start.record()
        function()
        end.record()
        # a call launched while this one runs could not reuse the memory that this one frees
        torch.cuda.synchronize()
    return sorted(s.elapsed_time(e) for s, e in zip(starts, ends, strict=True))[repeats // 2]


def wall_ms(function: Callable[[], object], calls: int, rounds: int = 20) -> float:
    """Mean wall time of `calls` consecutive calls, until the GPU is done; the minimum over rounds."""
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
    """Peak GPU memory in MiB while `function` runs, beyond what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_call(name: str, call: Callable[[], object], calls: int = 20) -> dict[str, float | str]:
    """Measures a call: `{name}_first_s`, `{name}_ms`, `{name}_wall_ms` and `{name}_peak_mib`, or `{name}_refused`.

    Args:
        name: prefix of the keys.
        call: the measured call; an error of its first call becomes `{name}_refused`.
        calls: consecutive calls in a round of `wall_ms`.
    """
    try:
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
    except Exception as error:
        return {f'{name}_refused': error_line(error)}
    return {
        f'{name}_first_s': time.perf_counter() - began,
        f'{name}_ms': gpu_ms(call),
        f'{name}_wall_ms': wall_ms(call, calls=calls, rounds=5),
        f'{name}_peak_mib': peak_mib(call),
    }
