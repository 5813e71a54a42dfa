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
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from fla.backends.core import logs
from fla.backends.core.error_kinds import chain_of, is_of_caller, is_of_device
from fla.backends.core.errors import error_text
from fla.backends.core.execution import in_backward, in_capture, is_traced
from fla.backends.core.spec import FunctionSpec
from fla.backends.fallback.breaker import Breaker
from fla.backends.plan.plan import Candidate
from fla.backends.policy.on_error import BreakerSettings

# Who failed in a call so far, and with what.
Failures = list[tuple[str, BaseException]]
Handler = Callable[[BaseException, Failures | None, int, Any], Failures | None]


def handler(spec: FunctionSpec, c: Candidate, breaker: Breaker, settings: BreakerSettings, *, last: bool) -> Handler:
    """What generated code calls with an exception of a candidate's implementation.

    Args:
        last: no other candidate is there, or may be tried, whatever happens.

    Returns:
        A function of (the exception, those of earlier candidates of this call, the probe's number, the first tensor). It
        returns all exceptions so far if the next candidate may be tried, and None if the exception is to be raised; the
        earlier ones are then in its context.
    """
    name, key, backend = c.member.name, spec.key, c.member.backend

    def handle(error: BaseException, earlier: Failures | None, probe: int, first: Any) -> Failures | None:
        caller = sys._getframe(1).f_back
        retryable = tuple(backend.retryable)
        undecided = (
            not isinstance(error, retryable)
            or is_of_caller(error, retryable)
            or is_of_device(error, caller)
            or in_capture()
            or is_traced(first)
        )
        if undecided:
            breaker.abandoned(probe)
        else:
            breaker.failed(probe, error_text(error), settings)
        if undecided or last or spec.mutates or in_backward():
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
        led_to_it = {id(one) for one in chain_of(later, outside)}
        led_to_earlier = {id(one) for one in chain_of(earlier, outside)}
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
