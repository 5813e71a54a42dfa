"""All kernels of a call compiled side by side, before the first of them is launched.

Triton compiles a kernel when it is launched, one after the other, and builds a launcher in C for each: most of the first
call of an operation, while other cores idle. Here a call of a kind that is new runs once without launching anything, which
collects its kernels; they are compiled by threads; then it runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch

from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.ptxas_workaround import launch_options

P = ParamSpec('P')
R = TypeVar('R')

_INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'


class _Collected(threading.local):
    """What this thread would have launched, kernel by kernel; None where it launches."""

    calls: list[Callable[[], Any]] | None = None


_collected = _Collected()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, which a call that only collects does not launch."""
    more = launch_options()
    calls = _collected.calls
    if calls is None:
        return functools.partial(launch_kernel, kernel, grid, **more)

    def collect(*args: Any, **options: Any) -> None:
        # in the order of a launch: Triton's key of a compiled kernel depends on it
        calls.append(functools.partial(kernel.warmup, *args, grid=grid, **more, **options))

    return collect


def is_dry_run() -> bool:
    """Whether this thread only collects: of launches that differ only in what is not compiled in, one is enough."""
    return _collected.calls is not None


def precompile_parallel(kind: Callable[P, Hashable]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that launches kernels by `launch`. It may run a first time on memory that no kernel has written, so it
    must not look at numbers.

    Args:
        kind: of the same arguments, what decides which kernels are compiled. Asked on every call. A difference that it
            overlooks is compiled when it is launched.

    The function raises RuntimeError for a kind that is new within a CUDA graph capture, where nothing may be loaded.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        seen: set[Hashable] = set()

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            this = kind(*args, **kwargs)
            if this not in seen:
                refuse_in_capture()
                if not _INTERPRETED:
                    _compile_all(functools.partial(function, *args, **kwargs))
                seen.add(this)
            return function(*args, **kwargs)

        return call

    return decorate


def kind_of_step(
    q: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *options: Hashable
) -> tuple[Hashable, ...]:
    """What the kernels of a delta rule are compiled for: sizes of a step, dtypes, and of the other arguments the dtypes of
    those that are tensors, and the values of the rest."""
    given = [one.dtype if isinstance(one, torch.Tensor) else one for one in options]
    return (q.dtype, q.device, q.shape[2:], v.shape[2:], g.dtype, beta.dtype, *given)


def _on_cuda() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def _is_capturing() -> bool:
    return _on_cuda() and torch.cuda.is_current_stream_capturing()


def refuse_in_capture() -> None:
    """Before kernels are compiled.

    Raises:
        RuntimeError: within a CUDA graph capture.
    """
    if _is_capturing():
        raise RuntimeError('Triton kernels would be compiled inside a CUDA graph capture: make the same call once before')


def _compile_all(function: Callable[[], Any]) -> None:
    outer, _collected.calls = _collected.calls, []
    try:
        function()
        calls = _collected.calls
    finally:
        _collected.calls = outer
    if len(calls) < 2:
        return
    device = torch.cuda.current_device() if _on_cuda() else None
    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1)) as pool:
        for call in calls:
            pool.submit(_compile, call, device)


def _compile(call: Callable[[], Any], device: int | None) -> None:
    # An error comes again, and reaches the caller, when the kernel is launched.
    with contextlib.suppress(Exception):
        if device is None:
            call()
            return
        with torch.cuda.device(device):
            compiled = call()
            # loads the kernel, and builds its launcher, which no public function does
            if hasattr(compiled, '_init_handles'):
                compiled._init_handles()
