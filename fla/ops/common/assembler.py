"""Which of Hopper's instructions the kernels may be compiled to.

Triton before 3.9 assembles for Hopper with ptxas 12.8 or 12.9, which miscompiles some kernels that have several asynchronous
products (wgmma): wrong numbers, or accesses outside of memory, while their neighbours are right (flash-linear-attention #640
and #1262, Triton #11366 and #11781; mended in CUDA 13.1 and 13.3). Kernels that a card has shown to be right keep wgmma
there. The others are compiled to the products of an A100, which Triton does while DISABLE_MMA_V3 is set; its caches on disk
know the variable. `sound_products` says it of all kernels of a call, `without_wgmma` of one kernel.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from fla.ops.backends.discovery import in_forked_children
from fla.ops.common.triton_call import triton_version
from fla.utils.devices import capability_of

_VARIABLE = 'DISABLE_MMA_V3'

Kernel = TypeVar('Kernel')


class _Asking:
    """How often each thread wants the variable set, and what it was before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.times: Counter[int] = Counter()
        self.before: str | None = None

    def restore(self) -> None:
        # '0' instead of deleting it: a thread that copies the environment meanwhile must not miss a name
        os.environ[_VARIABLE] = self.before or '0'


_asking = _Asking()


def _only_this_thread() -> None:
    """In a forked child. Another thread may have held the lock, or had the variable set, and does not exist here."""
    _asking.lock = threading.Lock()
    own = _asking.times[threading.get_ident()]
    if _asking.times.total() > own == 0:
        _asking.restore()
    _asking.times = Counter({threading.get_ident(): own} if own else ())


in_forked_children(_only_this_thread)


@contextlib.contextmanager
def products_of_an_a100() -> Iterator[None]:
    """Within it, on whichever thread, what is compiled for Hopper has no wgmma."""
    thread = threading.get_ident()
    with _asking.lock:
        if not _asking.times.total():
            _asking.before = os.environ.get(_VARIABLE)
        # counted before it is set, and until it is put back: a fork of another thread may come in between
        _asking.times[thread] += 1
        os.environ[_VARIABLE] = '1'
    try:
        yield
    finally:
        with _asking.lock:
            if _asking.times.total() == 1:
                _asking.restore()
            _asking.times[thread] -= 1
            if not _asking.times[thread]:
                del _asking.times[thread]


def without_wgmma(kernel: Kernel) -> Kernel:
    """For a kernel of `triton.jit` that an assembler with these faults got wrong, or may: from then on it is compiled by
    such a one to the products of an A100, whichever call it is part of. See `is_without_wgmma`. Triton's AsyncCompileMode
    compiles later, and is not supported."""
    # private, but of releases that will not change: a later Triton's assembler has none of these faults
    compile_one: Any = getattr(kernel, '_do_compile', None)
    if compile_one is not None:  # not under Triton's interpreter

        @functools.wraps(compile_one)
        def compiled(*args: Any, **options: Any) -> Any:
            if not _is_at_risk():
                return compile_one(*args, **options)
            with products_of_an_a100():
                return compile_one(*args, **options)

        kernel._do_compile = compiled  # type: ignore[attr-defined]
        kernel._without_wgmma = True  # type: ignore[attr-defined]
    return kernel


def is_without_wgmma(kernel: object) -> bool:
    """Whether compiling it now disturbs what another thread compiles meanwhile, which would lose wgmma too."""
    return getattr(kernel, '_without_wgmma', False) and _is_at_risk() and os.environ.get(_VARIABLE) != '1'


def _is_at_risk() -> bool:
    """Whether what is compiled for the current device may be miscompiled wgmma."""
    return (capability_of() or (0, 0))[0] == 9 and not is_sound()


def is_sound() -> bool:
    """Whether the assembler that Triton runs for Hopper is one without these faults."""
    return _is_sound(os.environ.get('TRITON_PTXAS_PATH'))


@functools.cache
def _is_sound(path: str | None) -> bool:
    if path is None:
        return triton_version() >= (3, 9)
    try:
        answer = subprocess.run([path, '--version'], check=False, capture_output=True, text=True).stdout
    except OSError:
        return False
    release = re.search(r'release (\d+)\.(\d+)', answer)
    return release is not None and (int(release[1]), int(release[2])) >= (13, 3)


def keeps_wgmma(k: torch.Tensor, v: torch.Tensor, shown: bool) -> bool:
    """Whether the kernels of this call may use wgmma where there is one.

    `shown` says that a card has shown such kernels right, with bfloat16, K = V = 128 and Triton 3.6. Those of the delta
    rules, for sequences of one length, were held against float64 on an H100 and an H200, those of attention, in every case
    of its tests on a GPU, on an H200. A kernel that may use it can be compiled without, beside a call on another thread or
    after one that shares it: only slower, but as long as Triton keeps it on disk.
    """
    capability = capability_of(k.device)
    if capability is None or capability[0] != 9 or torch.version.hip is not None:
        return True
    if is_sound():
        return True
    return k.dtype == torch.bfloat16 and k.shape[-1] == v.shape[-1] == 128 and shown and triton_version() == (3, 6)


@contextlib.contextmanager
def sound_products(k: torch.Tensor, v: torch.Tensor, shown: bool) -> Iterator[None]:
    """Within it, the kernels of such a call may be launched."""
    if keeps_wgmma(k, v, shown):
        yield
        return
    with products_of_an_a100():
        yield
