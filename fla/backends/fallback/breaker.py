"""Circuit breakers: a backend that keeps failing is left alone for a while.

One per (function, backend):
    closed: calls go through, failures in a row are counted; `threshold` of them open it;
    open: calls pass the backend over; after `cooldown` seconds the next call becomes the probe;
    half_open: that one call is under way, all others still pass the backend over. If it succeeds the breaker closes, if it
        fails the cooldown begins again.
A breaker is no part of a plan: generated code reads `closed` and `failures` of one object that lives as long as the
dispatcher, in a branch that Dynamo never sees, so that no change of state makes a compiled caller compile again.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from fla.backends.core import logs
from fla.backends.core.execution import in_backward, in_capture
from fla.backends.core.locking import lock
from fla.backends.policy.on_error import BreakerSettings

CLOSED, OPEN, HALF_OPEN = 'closed', 'open', 'half_open'

# What `admit` answers besides the number of a probe.
REFUSED, AS_USUAL = -1, 0


@dataclass(frozen=True)
class BreakerEvent:
    """A change of state, as listeners get it.

    Attributes:
        function: 'operation.function'.
        backend: its name.
        old, new: 'closed', 'open' or 'half_open'.
        reason: what led to it.
    """

    function: str
    backend: str
    old: str
    new: str
    reason: str


BreakerListener = Callable[[BreakerEvent], None]


@dataclass(frozen=True)
class Health:
    """What is known of one backend for one function.

    Attributes:
        state: 'closed', 'open' or 'half_open'.
        forced: the state was set by `force_open()` or `force_close()`.
        failures: failures in a row.
        total_failures: failures since the process began, or since it was last reset or cleared.
        opened: how often it opened.
        retry_in: seconds until a call may probe; None where no time will help or none is needed.
        last_error: the last failure in one line.
    """

    state: str
    forced: bool
    failures: int
    total_failures: int
    opened: int
    retry_in: float | None
    last_error: str | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return dict(self.__dict__)


class Breaker:
    """The circuit breaker of one backend for one function; see the module.

    Attributes:
        closed: calls go through. Read by generated code, as is `failures`.
        failures: failures in a row.
    """

    def __init__(self, function: str, backend: str, owner: Breakers) -> None:
        self.function, self.backend = function, backend
        self._owner = owner
        self._forget()

    def __repr__(self) -> str:
        return f'<Breaker {self.function}[{self.backend}] {self.state}>'

    def _forget(self) -> None:
        self._state, self.forced = CLOSED, False
        self.closed, self.failures = True, 0
        self._total, self._opened = 0, 0
        self._last_error: str | None = None
        self._until = self._probe_until = 0.0
        self._probe, self._prober = 0, (threading.current_thread(), os.getpid())
        # of the call that opened it
        self._settings = BreakerSettings()

    # -- the way of a call --------------------------------------------------------------------------------------------

    def admit(self) -> int:
        """Asked by a call that finds the breaker not closed: the number of its probe, `REFUSED`, or `AS_USUAL` where the
        breaker has closed meanwhile. Whoever gets a number reports it with `succeeded`, `failed` or `abandoned`."""
        # without the lock: while it is open, every call comes here
        if self._refuses() is not None or not may_probe():
            return REFUSED
        with lock:
            if self.closed:
                return AS_USUAL
            if self._refuses() is not None:
                return REFUSED
            event = self._to(HALF_OPEN, 'a call probes the backend')
            # before the number, which others look at without the lock
            self._prober = threading.current_thread(), os.getpid()
            self._probe_until = self._owner.clock() + self._settings.probe_timeout
            self._probe = number = self._owner.new_number()
        self._owner.tell(event)
        return number

    def _refuses(self) -> float | None:
        """None if a call might probe now, else the seconds until one might (infinite if it was forced open).

        Without the lock that is a first look: whoever may probe asks again under it.
        """
        if self.forced:
            return math.inf
        now = self._owner.clock()
        if now < self._until:
            return self._until - now
        # a probe ends with its thread, whatever it did: after a fork, there are none of the parent's
        if self._probe and now < self._probe_until and self._prober_lives():
            return self._probe_until - now
        return None

    def _prober_lives(self) -> bool:
        thread, process = self._prober
        return process == os.getpid() and thread.is_alive()

    def succeeded(self, probe: int) -> None:
        """A call ended well. `probe` is its number, 0 for an ordinary call."""
        event = None
        with lock:
            if not probe:  # one that began before the breaker opened says nothing of what opened it
                self.failures = 0 if self.closed else self.failures
            elif probe == self._probe:
                self.failures = 0
                event = self._to(CLOSED, 'the probe succeeded')
        self._owner.tell(event)

    def failed(self, probe: int, error: str, settings: BreakerSettings) -> None:
        """A call failed in a way that is the backend's fault."""
        event = None
        with lock:
            self._total += 1
            self._last_error = error
            if self.forced or (probe and probe != self._probe):
                pass
            elif probe or self.closed:
                self.failures += 1
                if probe or self.failures >= settings.threshold:
                    self._settings = settings
                    self._until = self._owner.clock() + settings.cooldown
                    self._opened += 1
                    words = f'{_row(self.failures)}, the last {error}'
                    event = self._to(OPEN, f'the probe failed: {words}' if probe else words)
        self._owner.tell(event)

    def abandoned(self, probe: int) -> None:
        """A call ended without a word on the backend: a bad argument, out of memory, an interrupt."""
        event = None
        with lock:
            if probe and probe == self._probe:
                event = self._to(OPEN, 'the probe ended undecided; the next call may probe')
        self._owner.tell(event)

    def _to(self, state: str, reason: str) -> BreakerEvent | None:
        """Called under the lock."""
        old, self._state = self._state, state
        self.closed = state == CLOSED
        self._probe = 0
        return BreakerEvent(self.function, self.backend, old, state, reason) if old != state else None

    # -- for people ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """'closed', 'open' or 'half_open'."""
        return self._state

    @property
    def health(self) -> Health:
        """Everything that is known, at one moment."""
        with lock:
            wait = None if self.closed else self._refuses()
            retry_in = 0.0 if wait is None and not self.closed else wait
            return Health(
                self._state,
                self.forced,
                self.failures,
                self._total,
                self._opened,
                None if retry_in == math.inf else retry_in,
                self._last_error,
            )

    def force_open(self) -> None:
        """Keep the backend out until `reset()` or `force_close()`; no time and no policy change ends that."""
        self._force(OPEN, 'force_open()')
        if not self._owner.asked(self.function):
            logs.logger.warning(
                "%s: force_open() of backend %r has no effect while on_error='raise' is in force for the function, because "
                "breakers are asked under on_error='fallback' only; deny_backends() keeps a backend out under any policy",
                self.function,
                self.backend,
            )

    def force_close(self) -> None:
        """Let every call through, whatever fails, until `reset()` or `force_open()`."""
        self._force(CLOSED, 'force_close()')

    def _force(self, state: str, reason: str) -> None:
        with lock:
            event = self._to(state, reason)
            self.forced, self.failures = True, 0
        self._owner.tell(event)

    def reset(self) -> None:
        """Closed, not forced, nothing counted."""
        self._reset('reset()')

    def clear(self, reason: str) -> None:
        """As `reset()`, except that what was forced stays so."""
        self._reset(reason, also_forced=False)

    def _reset(self, reason: str, *, also_forced: bool = True) -> None:
        event = None
        with lock:
            if also_forced or not self.forced:
                event = self._to(CLOSED, reason)
                self._forget()
        self._owner.tell(event)

    # -- for explain --------------------------------------------------------------------------------------------------

    def refusal(self) -> str | None:
        """Why a call would pass the backend over now; None if it would not. Asking changes nothing."""
        if self.closed:
            return None
        health = self.health
        if health.forced:
            return 'its circuit was forced open; reset() the breaker to close it'
        if health.retry_in == 0.0 and may_probe():
            return None
        failures = _row(health.failures)
        if health.state == HALF_OPEN:
            return f'its circuit is half open: another call is the probe ({failures}, the last {health.last_error})'
        return f'its circuit is open for {health.retry_in or 0:.1f} s more: {failures}, the last {health.last_error}'

    def note(self) -> str | None:
        """What else `explain` says of a backend that is not passed over."""
        health = self.health
        if health.forced and health.state == CLOSED:
            return 'its circuit was forced closed'
        if health.state != CLOSED:
            return f'its circuit is {health.state.replace("_", " ")}; this call would be the probe'
        return f'its circuit is closed, {_row(health.failures)}' if health.failures else None


class Breakers:
    """The breakers of a dispatcher.

    Attributes:
        clock: seconds, steadily increasing; tests put their own in its place.
        asked: whether calls of a function look at their breakers under the policy in force.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.listeners: tuple[tuple[object, BreakerListener], ...] = ()
        self.asked: Callable[[str], bool] = lambda function: True
        self._known: dict[tuple[str, str], Breaker] = {}
        self._numbers = itertools.count(1)

    def of(self, function: str, backend: str) -> Breaker:
        """The breaker of a backend for a function; the same object until the process ends."""
        key = function, backend.casefold()
        found = self._known.get(key)
        if found is None:
            with lock:
                found = self._known.setdefault(key, Breaker(function, backend, self))
        return found

    def new_number(self) -> int:
        """A number that no other probe has."""
        return next(self._numbers)

    def health(self) -> dict[tuple[str, str], Health]:
        """(function, backend) → what is known, of every breaker."""
        with lock:
            known = list(self._known.values())
        return {(breaker.function, breaker.backend): breaker.health for breaker in known}

    def add_listener(self, listener: BreakerListener) -> Callable[[], None]:
        """Call `listener(event)` after every change of state; returns what ends it."""
        if not callable(listener):
            raise TypeError(f'a breaker listener is a function of a BreakerEvent, got {listener!r}')
        token = object()  # the same one may be added twice
        with lock:
            self.listeners = (*self.listeners, (token, listener))

        def end() -> None:
            with lock:
                self.listeners = tuple(known for known in self.listeners if known[0] is not token)

        return end

    def tell(self, event: BreakerEvent | None) -> None:
        """Log a change and tell the listeners. Never called under the lock: a listener may do what it likes."""
        if event is None:
            return
        level = logging.WARNING if event.new == OPEN and event.old == CLOSED else logging.INFO
        words = '%s: the circuit of backend %r is %s: %s'
        logs.logger.log(level, words, event.function, event.backend, event.new.replace('_', ' '), event.reason)
        for _, listener in self.listeners:
            try:
                listener(event)
            except (Exception, SystemExit):  # a listener's error is not the call's
                logs.logger.exception('breaker listener %r raised for %s', listener, event)

    def clear(self, reason: str, operation: str | None = None, backends: Collection[str] | None = None) -> None:
        """Forget what failed, of all or of one operation's functions, of all or some backends. What was forced stays.

        Never called under the lock.
        """
        with lock:
            known = list(self._known.values())
        for breaker in known:
            concerned = operation in (None, breaker.function.rpartition('.')[0])
            if concerned and (backends is None or breaker.backend in backends):
                breaker.clear(reason)

    def reset(self) -> None:
        """As in a fresh process; nobody is told."""
        with lock:
            for breaker in self._known.values():
                breaker._forget()
            self.listeners, self.clock = (), time.monotonic


def _row(failures: int) -> str:
    return f'{failures} failure{"s" if failures != 1 else ""} in a row'


def may_probe() -> bool:
    """Not in a backward pass, whose failure nothing can take over, nor in a capture, which a failure would spoil."""
    return not (in_backward() or in_capture())
