"""Tensors as the kernels of vendors' packages read them, and the probe of a package by its smallest call."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fla.backends.backend.base import Verdict
from fla.backends.core.execution import in_capture
from fla.utils.devices import Device


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, at an address that is a multiple of 16 bytes. In compiled code x: an address would be traced as a
    constant."""
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter) or x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def for_tma(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, as Hopper's bulk copies (TMA) read it: contiguous, aligned to 16 bytes, with the strides of its shape.

    PyTorch calls a tensor contiguous whatever the stride of a dimension of size 1, but TMA descriptors include it.
    """
    x = aligned(x.contiguous())
    return x.view(-1).view(x.shape) if 1 in x.shape else x


def in_pieces(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy, for kernels that read rows in pieces of 16 bytes."""
    piece = 16 // x.element_size()
    if x.stride(-1) != 1 or any(stride % piece for stride in x.stride()[:-1]):
        return for_tma(x)
    return aligned(x)


def ordered(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """`cu_seqlens` in int32, clamped to [0, `length`] and made non-decreasing, for kernels that do not check their bounds.
    Takes two small launches and no synchronisation."""
    return cu_seqlens.clamp(0, length).cummax(0).values.int()


def captured() -> bool:
    """Whether this call is being captured into a CUDA graph, which allows no copy from the host, for example. False in
    compiled code: no graph is captured while it is traced."""
    return not torch.compiler.is_compiling() and in_capture()


def smallest_call(
    device: Device, call: Callable[[torch.device], torch.Tensor], expected: float, needs: Sequence[str] = ()
) -> Verdict:
    """Whether a package's smallest real call works on a CUDA device: every number of the result is within 2 % of `expected`.

    A package that imports may still be unusable (built for another PyTorch, no kernel for this GPU, no compiler), and may
    then compute nonsense without an error. An exception, also of an import, propagates: the caller of `probe()` makes it the
    reason.

    Args:
        needs: `module:name` of everything that the backend imports from the package.
    """
    if torch.cuda.is_current_stream_capturing():
        return False, 'asked for inside a CUDA graph capture, where it cannot be tried: call it once before, then refresh()'
    # a plan may be made inside a trace or under FakeTensorMode
    with _disable_current_modes(), _imported(needs), torch.inference_mode():
        result = call(_place(device))
        worst = float((result.double() - expected).abs().max())
    if worst <= 0.02 * abs(expected):
        return True, None
    return False, ('its smallest call is off by %s where %s is right', worst, expected)


def _place(device: Device) -> torch.device:
    return torch.device(device.platform, device.index)


@contextlib.contextmanager
def _imported(needs: Sequence[str]) -> Iterator[None]:
    """Imports `needs`, and delays the package's log records and import warnings until the body has succeeded. On failure
    they are dropped: another backend serves, and the exception is the reason."""
    logger = logging.getLogger(needs[0].partition(':')[0].partition('.')[0] if needs else __name__)
    handler = _Collecting()
    logger.addHandler(handler)
    propagate = _hold(logger, 1)
    try:
        # not around the body, which may compile for minutes: these settings are process-wide
        # and not in inference mode, for tensors that the package creates and caches
        with _lock, warnings.catch_warnings(record=True) as warned, torch.inference_mode(False):
            for path in needs:
                _import(path)
        yield
    finally:
        _hold(logger, -1)
        logger.removeHandler(handler)
    if propagate and logger.parent is not None:
        for record in handler.records:
            logger.parent.handle(record)
    for one in warned:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


# guards process-wide settings, which threads that probe at the same time would restore in the wrong order
_lock = threading.RLock()
# name of a logger: its hold count, and its original `propagate`
_held: dict[str, tuple[int, bool]] = {}


def _hold(logger: logging.Logger, by: int) -> bool:
    """Adjusts the logger's hold count; it propagates at 0 only. Returns its original `propagate`."""
    with _lock:
        count, propagate = _held.pop(logger.name, (0, logger.propagate))
        # in the child of a fork the count is 0
        count = max(count + by, 0)
        if count:
            _held[logger.name] = count, propagate
        logger.propagate = propagate and not count
    return propagate


def _clean_up_child() -> None:
    """Undoes the holds of threads that do not exist in the child of a fork."""
    global _lock
    _lock = threading.RLock()
    for name, (_, propagate) in _held.items():
        logging.getLogger(name).propagate = propagate
    _held.clear()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_clean_up_child)


def _import(path: str) -> None:
    module, _, name = path.partition(':')
    if not hasattr(importlib.import_module(module), name):
        raise ImportError(f'cannot import name {name!r} from {module!r}', name=module)


class _Collecting(logging.Handler):
    """Collects log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
