"""Whose fault an exception is: the caller's, the device's, or the backend's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from fla.backends.core.errors import DispatchError, plain_text

# The caller's fault. A backend may declare subclasses as retryable.
_ARGUMENTS = (TypeError, ValueError)

_DEVICE_TYPES: tuple[type[BaseException], ...] = (
    MemoryError,
    torch.OutOfMemoryError,
    # names that older versions of PyTorch lack
    *(vars(place)[name] for place, name in ((torch, 'AcceleratorError'), (torch._C, '_DistError')) if hasattr(place, name)),
)

# PyTorch raises plain RuntimeErrors for most of these, and vendors' packages raise types of their own.
_DEVICE_WORDS = re.compile(
    r'out of memory|(can.t|cannot) allocate memory|not enough memory|uncorrectable ECC'
    r'|device-side assert|illegal memory access|illegal instruction|misaligned address|launch failure'
    r'|\b(CUDA|HIP|XPU|NPU|MPS|NCCL|RCCL|cuBLAS(Lt)?|cuDNN|cuSOLVER|cuSPARSE|cuFFT|cuRAND|hipBLAS(Lt)?|hipFFT|hipSPARSE|'
    r'MIOpen|rocBLAS|rocSOLVER) (driver |runtime |kernel )?(error|failure)\b'
    r'|\b(CUDA_ERROR|cudaError|hipError|CUBLAS_STATUS|CUDNN_STATUS|CUSOLVER_STATUS|CUSPARSE_STATUS|CUFFT_|miopenStatus|'
    r'rocblas_status|HIPBLAS_STATUS|ncclInternal|ncclUnhandled|ncclSystem|ncclRemote|UR_RESULT_ERROR|ZE_RESULT_ERROR)'
    r'|Triton Error \[',
    re.IGNORECASE,
)


def may_be_declared(kind: Any) -> bool:
    """Whether `retryable` may name a type: errors of the caller, of dispatch and of the device are never retried."""
    if not isinstance(kind, type) or not issubclass(kind, Exception) or kind in _ARGUMENTS:
        return False
    return not issubclass(kind, (DispatchError, *_DEVICE_TYPES))


def is_of_device(error: BaseException, frame: FrameType | None = None) -> bool:
    """Whether an exception, or one that led to it, is an error of the device.

    Args:
        frame: the caller's. Exceptions that were being handled when it was called are ignored: they did not lead to `error`.
    """
    return any(isinstance(one, _DEVICE_TYPES) or _DEVICE_WORDS.search(plain_text(one)) for one in _chain(error, frame))


def is_of_caller(error: BaseException, retryable: tuple[type[BaseException], ...]) -> bool:
    """Whether an exception is about the arguments or about dispatch.

    A subclass of ValueError or TypeError is the backend's if the backend declares that very class.
    """
    if isinstance(error, DispatchError):
        return True
    declared = tuple(kind for kind in retryable if issubclass(kind, _ARGUMENTS))
    return isinstance(error, _ARGUMENTS) and not isinstance(error, declared)


def _chain(error: BaseException, frame: FrameType | None) -> Iterator[BaseException]:
    """An exception, those that led to it and the members of groups, except those handled when `frame` was called."""
    outside = set()
    while frame is not None:
        outside.add(frame)
        frame = frame.f_back
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        trace = one.__traceback__
        if one is not error and trace is not None and trace.tb_frame in outside:
            continue
        seen.add(id(one))
        yield one
        pending += [one.__context__, one.__cause__]
        parts = getattr(one, 'exceptions', None)  # of a group; another class may hold anything under this name
        pending += [part for part in parts if isinstance(part, BaseException)] if isinstance(parts, (list, tuple)) else []
