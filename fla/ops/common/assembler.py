"""Which of Hopper's instructions the kernels may be compiled to.

Triton before 3.9 assembles for Hopper with ptxas 12.8 or 12.9, which miscompiles some kernels that have several asynchronous
products (wgmma): wrong numbers, or accesses outside of memory, while their neighbours are right (flash-linear-attention #640
and #1262, Triton #11366 and #11781; mended in CUDA 13.1 and 13.3). Kernels that a card has shown to be right keep wgmma
there. The others are compiled to the products of an A100, which Triton does while DISABLE_MMA_V3 is set; its caches on disk
know the variable.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import threading
from collections.abc import Iterator

import torch

from fla.ops.backends.discovery import in_forked_children
from fla.ops.common.triton_call import triton_version
from fla.utils.devices import capability_of

_VARIABLE = 'DISABLE_MMA_V3'
# Compilation reads the variable: one thread at a time has it set.
_lock = threading.RLock()


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


# another thread may hold it during a fork, and does not exist in the child
in_forked_children(_new_lock)


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
    after one that shares it: only slower.
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
    with _lock:
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = '1'
        try:
            yield
        finally:
            # '0' instead of deleting it: a thread that copies the environment meanwhile must not miss a name
            os.environ[_VARIABLE] = '0' if before is None else before
