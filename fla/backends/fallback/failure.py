"""What happens when an implementation raises, under `on_error='fallback'`.

By default nothing does: generated code has no `try` around an implementation. With 'fallback', an exception that the forward
call raised itself moves on to the next candidate, but only if all of this holds:
    the backend declares its type in `retryable`;
    it is nobody else's fault: not the caller's (TypeError, ValueError, an error of dispatch), and no error of the device
        (out of memory, CUDA), which is reported late, blames whichever call comes next, and leaves nothing to retry on;
    a second run is harmless: the function changes none of its arguments, no graph is being captured, nothing is being
        traced, and this is no backward pass.
Where no candidate is left, the last exception is raised, with the earlier ones as its context, in order.
"""

from __future__ import annotations

import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, error_text, plain_text
from fla.backends.fallback.breaker import Breaker, BreakerSettings, in_backward, in_capture

if TYPE_CHECKING:
    from fla.backends.plan.plan import Candidate
    from fla.backends.runtime.entry import Entry

ON_ERROR = ('raise', 'fallback')

# Errors of the caller. Subclasses may be declared retryable by name.
_ARGUMENTS = (TypeError, ValueError)

_DEVICE_TYPES: tuple[type[BaseException], ...] = (
    MemoryError,
    torch.OutOfMemoryError,
    *(kind for kind in (getattr(torch, 'AcceleratorError', None),) if kind is not None),
    *(kind for kind in (getattr(torch._C, '_DistError', None),) if kind is not None),
)

# PyTorch raises plain RuntimeErrors for most of these, and vendors' packages types of their own.
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
    """Whether `retryable` may name an exception type: errors of the caller, of dispatch and of the device are never retried,
    so that naming them would promise what is not kept."""
    if not isinstance(kind, type) or not issubclass(kind, Exception) or kind in _ARGUMENTS:
        return False
    return not issubclass(kind, (DispatchError, *_DEVICE_TYPES))


def is_of_device(error: BaseException, frame: FrameType | None = None) -> bool:
    """Whether an exception, or one that led to it, is an error of the device.

    Args:
        frame: the caller's; what was already being handled when it was called did not lead to `error`.
    """
    return any(isinstance(one, _DEVICE_TYPES) or _DEVICE_WORDS.search(plain_text(one)) for one in _chain(error, frame))


def is_of_caller(error: BaseException, retryable: tuple[type[BaseException], ...]) -> bool:
    """Whether an exception speaks of the arguments, or of dispatch, rather than of the backend. A class that derives from
    ValueError or TypeError speaks of the backend if the backend declares that very class."""
    if isinstance(error, DispatchError):
        return True
    declared = tuple(kind for kind in retryable if issubclass(kind, _ARGUMENTS))
    return isinstance(error, _ARGUMENTS) and not isinstance(error, declared)


def _chain(error: BaseException, frame: FrameType | None = None) -> Iterator[BaseException]:
    """An exception, what led to it and what it is a group of, up to what was already being handled when `frame` was
    called."""
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
        parts = getattr(one, 'exceptions', None)  # of a group; anybody else's attribute may hold anything
        pending += [part for part in parts if isinstance(part, BaseException)] if isinstance(parts, (list, tuple)) else []


def _is_traced(first: Any) -> bool:
    """Whether a call is only being traced: its failure says nothing of the backend, and its choice would be kept."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    fake = sys.modules.get('torch._subclasses.fake_tensor')
    if isinstance(first, torch.Tensor) and (first.is_meta or (fake is not None and isinstance(first, fake.FakeTensor))):
        return True
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    return mode(keys.FAKE) is not None or mode(keys.PROXY) is not None


# Who failed in a call so far, and with what.
Failures = list[tuple[str, BaseException]]
Handler = Callable[[BaseException, Failures | None, int, Any], Failures | None]


def handler(entry: Entry, c: Candidate, breaker: Breaker, settings: BreakerSettings, *, last: bool) -> Handler:
    """What generated code calls with an exception of a candidate's implementation.

    Args:
        last: no other candidate is there, or may be tried, whatever happens.

    Returns:
        A function of (the exception, those of earlier candidates of this call, the probe's number, the first tensor). It
        returns all exceptions so far if the next candidate may be tried, and None if the exception is to be raised; the
        earlier ones are then in its context.
    """
    name, key, backend = c.member.name, entry.key, c.member.backend

    def handle(error: BaseException, earlier: Failures | None, probe: int, first: Any) -> Failures | None:
        caller = sys._getframe(1).f_back
        retryable = tuple(backend.retryable)
        undecided = (
            not isinstance(error, retryable)
            or is_of_caller(error, retryable)
            or is_of_device(error, caller)
            or in_capture()
            or _is_traced(first)
        )
        if undecided:
            breaker.abandoned(probe)
        else:
            breaker.failed(probe, error_text(error), settings)
        if undecided or last or entry.mutates or in_backward():
            if earlier:
                _give_up(key, [*earlier, (name, error)], caller)
                earlier.clear()
            return None
        logs.warn_once(
            ('failed', key, name, type(error)),
            '%s: backend %r failed, and the next candidate that takes the call is tried (on_error=fallback): %s',
            key,
            name,
            error_text(error),
        )
        # what the failed attempt allocated is not wanted any more; its lines stay in the traceback
        traceback.clear_frames(error.__traceback__)
        failures = earlier if earlier is not None else []
        failures.append((name, error))
        return failures

    return handle


def _give_up(function: str, failures: Failures, outside: FrameType | None) -> BaseException:
    """The last of several exceptions, with the earlier ones as its context, so that a traceback shows them in order."""
    for (_, earlier), (_, later) in itertools.pairwise(failures):
        led_to_it = {id(one) for one in _chain(later, outside)}
        led_to_earlier = {id(one) for one in _chain(earlier, outside)}
        # at the end of what led to `later`, so that nothing of this call is hidden by it
        end, following = later, _shown_before(later)
        unseen = led_to_it - {id(later)}
        while following is not None and id(following) in unseen:
            unseen.discard(id(following))
            end, following = following, _shown_before(following)
        if id(earlier) not in led_to_it and not {id(later), id(end)} & led_to_earlier:  # no circle
            end.__context__, end.__suppress_context__ = earlier, False
    last = failures[-1][1]
    if hasattr(last, 'add_note'):
        last.add_note(f'{function}: tried {", ".join(name for name, _ in failures)}, in this order')
    return last


def _shown_before(error: BaseException) -> BaseException | None:
    """What a traceback shows before an exception."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def exhausted(function: str, failures: Failures) -> NoReturn:
    """Raises the last exception where every candidate of a call has failed or does not take it."""
    last: BaseException | None = _give_up(function, list(failures), sys._getframe(1).f_back)
    assert last is not None
    context = last.__context__
    # the frames that hold the list and the exception are in the exceptions' tracebacks
    failures.clear()
    try:
        raise last
    except BaseException:
        # where the caller is handling an exception, `raise` has put that one in place of the earlier failures
        last.__context__ = context
        raise
    finally:
        last = context = None
