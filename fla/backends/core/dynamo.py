"""Arrangements with Dynamo, without importing it: most processes never compile anything."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


def while_tracing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function around a bound method that Dynamo runs at trace time instead of tracing it. What
    torch.compiler.assume_constant_result does, without importing all of Dynamo."""

    def run(*args: Any) -> Any:
        return method(*args)

    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    never_a_frame(run, callees=True)
    return run


def trace_anew() -> None:
    """Have Dynamo begin its trace again, after a function in it got other code. Run while tracing.

    A trace may be attempted a second time anyway (after a graph break), and Dynamo then wants to see what it saw the first
    time; without this the second attempt dies of a SpeculationLogDivergence.
    """
    from torch._dynamo import exc

    raise exc.UnspecializeRestartAnalysis(restart_reason='a dispatched function was planned')


class Renewable(Protocol):
    """Somebody whose code was replaced while another thread compiled."""

    def renew(self) -> None:
        """Have the same code as another object."""


_replaced: weakref.WeakSet[Any] = weakref.WeakSet()


def another_thread_compiles() -> bool:
    """Whether Dynamo is at work in another thread."""
    # a module is listed before it is imported to its end: another thread may be at it, and then nothing was compiled yet
    lock: Any = getattr(sys.modules.get('torch._dynamo.convert_frame'), 'compile_lock', None)
    if lock is None:
        return False
    mine = bool(lock.acquire(blocking=False))
    if mine:
        lock.release()
    return not mine


def renew_after_compiling(owner: Renewable) -> None:
    """Once the compilation that is going on has ended, have `owner` run its code as another object.

    Dynamo traces a function's code first and reads its identity for the guard last. What was traced before the code was
    replaced would be guarded by the code that replaced it, and serve for ever.
    """
    from torch._dynamo.callback import callback_handler

    _replaced.add(owner)
    if _renew_all not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_renew_all)


def _renew_all(*_: Any) -> None:
    while _replaced:
        with contextlib.suppress(KeyError):  # it is gone
            _replaced.pop().renew()


def never_a_frame(function: Any, *, callees: bool = False) -> None:
    """Have Dynamo inline a function where it likes, but never trace it as a frame of its own, which it tries for whatever is
    called from a frame that it gave up on; with `callees`, nor what the function calls."""
    frames: Any = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError, TypeError):  # a torch without these names traces it: slower, and still right
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if callees else default)
        frames.set_code_exec_strategy(function.__code__, strategy)
