"""Compiles all kernels of a call in parallel, before the first of them is launched.

Triton compiles a kernel when it is launched, one after the other, and builds a launcher in C for each: most of the time of
an operation's first call, while other cores idle. Here the first call with a new key starts with a dry run, which collects
its kernels instead of launching them; threads compile them; then the call runs.
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


class _DryRun(threading.local):
    """The compilations that this thread's dry run has collected; None outside a dry run."""

    collected: list[Callable[[], Any]] | None = None


_dry_run = _DryRun()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, which a dry run collects instead of launching."""
    more = launch_options()
    collected = _dry_run.collected
    if collected is None:
        return functools.partial(launch_kernel, kernel, grid, **more)

    def collect(*args: Any, **options: Any) -> None:
        # options in the order of the launch: Triton's key of a compiled kernel depends on it
        collected.append(functools.partial(kernel.warmup, *args, grid=grid, **more, **options))

    return collect


def is_dry_run() -> bool:
    """Whether this is a dry run, in which one of several launches of the same compiled kernel is enough."""
    return _dry_run.collected is not None


def precompile_parallel(key: Callable[P, Hashable]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that launches kernels by `launch`. It may first run as a dry run on uninitialised tensors, so it
    must not read values.

    Args:
        key: takes the same arguments; returns the facts that decide which kernels are compiled. Called on every call. A
            kernel that differs for equal keys is compiled when it is launched.

    The function raises RuntimeError for a new key inside a CUDA graph capture, which allows no loading of kernels.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        seen: set[Hashable] = set()

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            this = key(*args, **kwargs)
            if this not in seen:
                refuse_in_capture()
                if not _INTERPRETED:
                    _compile_all(functools.partial(function, *args, **kwargs))
                seen.add(this)
            return function(*args, **kwargs)

        return call

    return decorate


def _on_cuda() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def _is_capturing() -> bool:
    return _on_cuda() and torch.cuda.is_current_stream_capturing()


def refuse_in_capture() -> None:
    """Called before kernels are compiled.

    Raises:
        RuntimeError: inside a CUDA graph capture.
    """
    if _is_capturing():
        raise RuntimeError('Triton kernels would be compiled inside a CUDA graph capture: make the same call once before')


def _compile_all(function: Callable[[], Any]) -> None:
    outer, _dry_run.collected = _dry_run.collected, []
    try:
        function()
        calls = _dry_run.collected
    finally:
        _dry_run.collected = outer
    if len(calls) < 2:
        return
    device = torch.cuda.current_device() if _on_cuda() else None
    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1)) as pool:
        for call in calls:
            pool.submit(_compile, call, device)


def _compile(call: Callable[[], Any], device: int | None) -> None:
    # an error is raised again, to the caller, when the kernel is launched
    with contextlib.suppress(Exception):
        if device is None:
            call()
            return
        with torch.cuda.device(device):
            compiled = call()
            # loads the kernel and builds its launcher; Triton has no public function for that
            if hasattr(compiled, '_init_handles'):
                compiled._init_handles()
