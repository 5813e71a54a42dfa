"""Access to Dynamo's internals without importing Dynamo: most processes never compile."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch


def while_tracing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a bound method in a plain function that Dynamo runs at trace time instead of tracing it.

    Does what torch.compiler.assume_constant_result does, without importing all of Dynamo.
    """

    def run(*args: Any) -> Any:
        return method(*args)

    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    never_a_frame(run, callees=True)
    return run


def trace_anew() -> None:
    """Restarts Dynamo's trace, after a function in it got other code. Called while tracing.

    A trace may be attempted a second time anyway (after a graph break), and Dynamo then requires what it saw the first time:
    without the restart, the second attempt fails with a SpeculationLogDivergence.
    """
    from torch._dynamo import exc

    raise exc.UnspecializeRestartAnalysis(restart_reason='a dispatched function was planned')


_replaced: weakref.WeakSet[Any] = weakref.WeakSet()


def another_thread_compiles() -> bool:
    """Whether Dynamo is compiling in another thread."""
    # another thread may be importing the module, which is then listed without the lock: nothing was compiled yet
    lock: Any = getattr(sys.modules.get('torch._dynamo.convert_frame'), 'compile_lock', None)
    if lock is None:
        return False
    mine = bool(lock.acquire(blocking=False))
    if mine:
        lock.release()
    return not mine


def renew_after_compiling(owner: Any) -> None:
    """Calls `owner.renew()`, which must run the same code as another object, once the current compilation has ended.

    Dynamo traces a function's code first and reads its identity for the guard last. A trace of the old code would be guarded
    by the identity of the new code, and serve for ever.
    """
    from torch._dynamo.callback import callback_handler

    _replaced.add(owner)
    if _renew_all not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_renew_all)


def _renew_all(*_: Any) -> None:
    while _replaced:
        with contextlib.suppress(KeyError):  # collected meanwhile
            _replaced.pop().renew()


def never_a_frame(function: Any, *, callees: bool = False) -> None:
    """Keeps Dynamo from tracing a function as a frame of its own; it may still inline it.

    Dynamo tries to trace whatever is called from a frame that it gave up on.

    Args:
        callees: applies to what the function calls, too.
    """
    frames: Any = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError, TypeError):  # a torch without these names traces the function: slower, correct
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if callees else default)
        frames.set_code_exec_strategy(function.__code__, strategy)
