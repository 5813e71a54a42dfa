"""The base class of traces, telemetry and observers, and the clock of timed calls.

A plan contains recording code only while a recorder asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from fla.backends.core.execution import in_capture
from fla.backends.core.spec import FunctionSpec

SERVED, RAISED, FAILED, KEPT_OUT, NO_BACKEND, COMPILED = 'served', 'raised', 'failed', 'open', 'no_backend', 'compiled'
OUTCOMES = (SERVED, RAISED, FAILED, KEPT_OUT, NO_BACKEND, COMPILED)


class Recorder:
    """Records the dispatched calls of a namespace between `dispatcher.start_recording(self)` and `stop_recording(self)`.

    Attributes:
        wants_calls: it implements `call`.
        wants_outcomes: it implements `outcome`.
        wants_times: `outcome` gets the time of each served call.
    """

    wants_calls = wants_outcomes = wants_times = False

    def call(self, spec: FunctionSpec, backend: str, arguments: Mapping[str, Any] | None) -> None:
        """A backend is about to run. `arguments` is None for a call that is being compiled."""

    def outcome(self, key: tuple[str, str, str], took: Any, error: BaseException | None) -> None:
        """The (function, backend, outcome) of a call. `took`: seconds, a pair of CUDA events, or None."""

    def clear(self) -> None:
        """Forget what was recorded."""

    def after_fork_in_child(self) -> None:
        """Called in a forked child."""


def begin(first: Any) -> Any:
    """The start of a timed call: a CUDA event on the current stream of the first tensor's device, or the host's time.
    None in a capture, where an event would become part of the graph."""
    # a fake CUDA tensor needs no CUDA
    if isinstance(first, torch.Tensor) and first.is_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None if in_capture() else _recorded_event(first)
    return time.perf_counter()


def elapsed(start: Any, first: Any) -> float | tuple[Any, Any] | None:
    """The time of a call since `start`: seconds, or a pair of CUDA events."""
    if start is None or isinstance(start, float):
        return None if start is None else time.perf_counter() - start
    return start, _recorded_event(first)


def _recorded_event(first: torch.Tensor) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(first.device))
    return event
