"""Which of Hopper's instructions the kernels may be compiled to.

Triton before 3.9 assembles for Hopper with ptxas 12.8 or 12.9, which miscompiles some kernels that have several asynchronous
products (wgmma): wrong numbers, or accesses outside of memory, while their neighbours are right (flash-linear-attention #640
and #1262, Triton #11366 and #11781; mended in CUDA 13.1 and 13.3). Kernels that a card has shown to be right keep wgmma
there. The others are launched with Triton's option `arch`, which makes them for an A100 up to the assembler; that makes
Hopper's code of them all the same. `avoid_wgmma_if_unsafe` says it of all kernels of a call.
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


class _Here(threading.local):
    """Whether what this thread launches is to be made for an A100."""

    as_for_an_a100 = False


_here = _Here()


def launch_options() -> dict[str, str]:
    """Options of a launch on this thread."""
    return {'arch': 'sm80'} if _here.as_for_an_a100 else {}


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


def keeps_wgmma(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels of this call may use wgmma where there is one.

    With bfloat16, K = V = 128, Triton 3.6 and the assembler that it comes with a card has shown them right: those of the
    delta rules were held against float64 on an H200, and for sequences of one length on an H100, those of attention on an
    H200, in every case of its tests on a GPU.
    """
    if not is_nvidia_hopper(k.device) or is_sound():
        return True
    shown = triton_version() == (3, 6) and os.environ.get('TRITON_PTXAS_PATH') is None
    return shown and k.dtype == torch.bfloat16 and k.shape[-1] == v.shape[-1] == 128


@contextlib.contextmanager
def avoid_wgmma_if_unsafe(k: torch.Tensor, v: torch.Tensor) -> Iterator[None]:
    """Within it, the kernels of such a call may be launched, by this thread."""
    before = _here.as_for_an_a100
    # a call within another one may be of another kind, and is on its own
    _here.as_for_an_a100 = not keeps_wgmma(k, v)
    try:
        yield
    finally:
        _here.as_for_an_a100 = before
