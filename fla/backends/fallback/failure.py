"""Retries after a failed implementation, under `on_error='fallback'`.

By default an exception reaches the caller: generated code has no `try` around an implementation. With 'fallback', an
exception raised by the forward call itself moves on to the next candidate if all of this holds:
    the backend declares its type in `retryable`;
    it is not the caller's fault (TypeError, ValueError, an error of dispatch);
    it is not an error of the device (out of memory, CUDA): those are reported late, blame a later call and leave nothing to
        retry on;
    a second run is harmless: the function changes none of its arguments, no graph is being captured, nothing is being
        traced, and this is not a backward pass.
If no candidate is left, the last exception is raised, with a note that lists the earlier ones in order.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from fla.backends.core import logs
from fla.backends.core.error_kinds import is_of_caller, is_of_device
from fla.backends.core.errors import error_text
from fla.backends.core.execution import in_backward, in_capture, is_traced
from fla.backends.core.spec import FunctionSpec
from fla.backends.fallback.breaker import Breaker
from fla.backends.plan.plan import Candidate
from fla.backends.policy.on_error import BreakerSettings

# (backend, exception) of each failed candidate of a call
Failures = list[tuple[str, BaseException]]
Handler = Callable[[BaseException, Failures | None, int, Any], Failures | None]


def handler(spec: FunctionSpec, c: Candidate, breaker: Breaker, settings: BreakerSettings, *, last: bool) -> Handler:
    """Returns the function that generated code calls with an exception of a candidate's implementation.

    Args:
        last: no other candidate may be tried.

    Returns:
        A function of (exception, earlier failures of this call, number of the probe, first tensor). It returns all failures
        so far if the next candidate may be tried, and None if the exception must be raised.
    """
    name, key, backend = c.member.name, spec.key, c.member.backend

    def handle(error: BaseException, earlier: Failures | None, probe: int, first: Any) -> Failures | None:
        retryable = tuple(backend.retryable)
        undecided = (
            not isinstance(error, retryable)
            or is_of_caller(error, retryable)
            or is_of_device(error, sys._getframe(1).f_back)
            or in_capture()
            or is_traced(first)
        )
        if undecided:
            breaker.abandoned(probe)
        else:
            breaker.failed(probe, error_text(error), settings)
        failures = earlier if earlier is not None else []
        failures.append((name, error))
        if undecided or last or spec.mutates or in_backward():
            _last_of(key, failures)
            return None
        logs.warn_once(
            ('failed', key, name, type(error)),
            '%s: backend %r failed; the next candidate is tried (on_error=fallback): %s',
            key,
            name,
            error_text(error),
        )
        # frees the tensors of the failed attempt; the traceback keeps its lines
        traceback.clear_frames(error.__traceback__)
        return failures

    return handle


def _last_of(function: str, failures: Failures) -> BaseException:
    """Empties the list and returns its last exception, with a note of the earlier ones.

    The exceptions' tracebacks hold the frames that hold the list: a full list would be a cycle.
    """
    last = failures[-1][1]
    if len(failures) > 1:
        tried = ', '.join(name for name, _ in failures)
        earlier = '; '.join(f'{name}: {error_text(error)}' for name, error in failures[:-1])
        note = f'{function}: tried {tried}, in this order. Earlier failures: {earlier}'
        if hasattr(last, 'add_note'):
            last.add_note(note)
        else:  # Python 3.10
            last.__notes__ = [*getattr(last, '__notes__', ()), note]
    failures.clear()
    return last


def exhausted(function: str, failures: Failures) -> NoReturn:
    """Raises the last exception of a call whose every candidate failed or refused."""
    last = _last_of(function, failures)
    try:
        raise last
    finally:
        del last  # or this frame and the exception would be a cycle
