"""What backends of vendors' packages share."""

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
    """x, or a copy, at an address that 16 bytes at a time can be read from. In compiled code, where an address would be
    traced as a constant, x."""
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter) or x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def for_tma(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, contiguous, at an address that Hopper's bulk copies can read from, and with the strides of its shape:
    PyTorch calls a tensor contiguous whatever the stride of a dimension of size 1 is, and kernels look at that too."""
    x = aligned(x.contiguous())
    return x.view(-1).view(x.shape) if 1 in x.shape else x


def in_pieces(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy, for kernels that read its last dimension, and every row, in pieces of 16 bytes."""
    piece = 16 // x.element_size()
    if x.stride(-1) != 1 or any(stride % piece for stride in x.stride()[:-1]):
        return for_tma(x)
    return aligned(x)


def ordered(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """`cu_seqlens` in int32, within [0, `length`] and never falling, for kernels that trust them: whatever they hold,
    nothing is read or written out of bounds. Two small launches, and nothing waits for the GPU."""
    return cu_seqlens.clamp(0, length).cummax(0).values.int()


def captured() -> bool:
    """Whether this call is being captured into a CUDA graph. For what a package does only with packed sequences, say, and no
    capture allows, such as a copy from the host. Compiled code does not ask: no graph is captured while it is traced."""
    return not torch.compiler.is_compiling() and in_capture()


def smallest_call(
    device: Device, call: Callable[[torch.device], torch.Tensor], expected: float, needs: Sequence[str] = ()
) -> Verdict:
    """Whether a package's smallest real call works on a CUDA device: every number of the result is within 2 % of `expected`.

    A package that imports may still be unusable (built for another PyTorch, no kernel for this GPU, no compiler), and may
    then compute nonsense without an error. An exception, of an import too, is left to whoever asks `probe()`, and becomes a
    reason.

    Args:
        needs: `module:name` of all that the backend's calls take from the package.
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
    """With `needs` imported. What their package logs meanwhile, and warns of on import, is held back, and said if all ends
    well: else another backend serves, and the exception says why."""
    logger = logging.getLogger(needs[0].partition(':')[0].partition('.')[0] if needs else __name__)
    kept = _Kept()
    logger.addHandler(kept)
    propagate = _hold_back(logger, 1)
    try:
        # not around the call, which may compile for minutes: it holds for all threads
        with _lock, warnings.catch_warnings(record=True) as warned, torch.inference_mode(False):  # for tensors that it keeps
            for path in needs:
                _import(path)
        yield
    finally:
        _hold_back(logger, -1)
        logger.removeHandler(kept)
    if propagate and logger.parent is not None:
        for record in kept.records:
            logger.parent.handle(record)
    for one in warned:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


# Of process-wide settings, which threads that probe at once would otherwise put back in the wrong order.
_lock = threading.RLock()
# Name of a logger: how many hold it back, and whether it hands on what it is given.
_held_back: dict[str, tuple[int, bool]] = {}


def _hold_back(logger: logging.Logger, by: int) -> bool:
    """One more or one fewer holds a logger back. Returns whether it hands on what it is given where nobody does."""
    with _lock:
        count, propagate = _held_back.pop(logger.name, (0, logger.propagate))
        # none is left in the child of a fork
        count = max(count + by, 0)
        if count:
            _held_back[logger.name] = count, propagate
        logger.propagate = propagate and not count
    return propagate


def _clean_up_child() -> None:
    """Of what threads were at that a fork left behind."""
    global _lock
    _lock = threading.RLock()
    for name, (_, propagate) in _held_back.items():
        logging.getLogger(name).propagate = propagate
    _held_back.clear()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_clean_up_child)


def _import(path: str) -> None:
    module, _, name = path.partition(':')
    if not hasattr(importlib.import_module(module), name):
        raise ImportError(f'cannot import name {name!r} from {module!r}', name=module)


class _Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
