"""Avoids asynchronous products (wgmma) on Hopper where its assembler may miscompile them.

Triton before 3.9 assembles for Hopper with ptxas 12.8 or 12.9, which miscompiles some kernels with several wgmma
instructions: wrong numbers or invalid memory accesses, while similar kernels are correct (flash-linear-attention #640 and
#1262, Triton #11366 and #11781; fixed in CUDA 13.1 and 13.3). Kernels that were verified on a GPU keep wgmma. The others are
launched with Triton's option `arch`: Triton compiles them for an A100 up to the assembler, which still makes Hopper code.
`avoid_wgmma_if_unsafe` sets that option for all kernels of a call.
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

from fla.ops.launch.triton_call import triton_version
from fla.utils.devices import is_nvidia_hopper


class _Thread(threading.local):
    """Whether this thread's launches avoid wgmma."""

    avoids_wgmma = False


_thread = _Thread()


def launch_options() -> dict[str, str]:
    """Triton's options for launches on this thread."""
    return {'arch': 'sm80'} if _thread.avoids_wgmma else {}


def is_sound() -> bool:
    """Whether the assembler that Triton runs for Hopper is free of these faults."""
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


def keeps_wgmma(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels of this call may use wgmma, on any GPU.

    With bfloat16, K = V = 128, Triton 3.6 and its own assembler they were verified against float64: those of the delta rules
    on an H200, and for sequences of equal length on an H100; those of attention on an H200, in all its GPU tests.
    """
    if not is_nvidia_hopper(k.device) or is_sound():
        return True
    verified = triton_version() == (3, 6) and os.environ.get('TRITON_PTXAS_PATH') is None
    return verified and k.dtype == torch.bfloat16 and k.shape[-1] == v.shape[-1] == 128


@contextlib.contextmanager
def avoid_wgmma_if_unsafe(k: torch.Tensor, v: torch.Tensor) -> Iterator[None]:
    """A context in which this thread may launch the kernels of a call on k and v."""
    before = _thread.avoids_wgmma
    # a nested call is judged on its own
    _thread.avoids_wgmma = not keeps_wgmma(k, v)
    try:
        yield
    finally:
        _thread.avoids_wgmma = before
