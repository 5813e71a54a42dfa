"""Circuit breakers: a backend that keeps failing is skipped for a while.

One per (function, backend):
    closed: calls go through, and failures in a row are counted; `threshold` of them open it;
    open: calls skip the backend; after `cooldown` seconds the next call becomes the probe;
    half_open: the probe is running, and all other calls still skip the backend. If it succeeds the breaker closes, if it
        fails the cooldown starts again. After `probe_timeout` seconds without a result another call may probe.
A breaker is not part of a plan: generated code reads `closed` and `failures` of one object that lives as long as the
dispatcher, in a branch that Dynamo never sees, so that a change of state never recompiles a compiled caller.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from fla.backends.core import logs
from fla.backends.core.execution import in_backward, in_capture
from fla.backends.core.locking import lock
from fla.backends.policy.on_error import BreakerSettings

CLOSED, OPEN, HALF_OPEN = 'closed', 'open', 'half_open'

# What `admit` returns besides the number of a probe.
REFUSED, AS_USUAL = -1, 0

_probe_numbers = itertools.count(1)


@dataclass(frozen=True)
class BreakerEvent:
    """A change of state, as listeners get it.

    Attributes:
        function: 'operation.function'.
        backend: its name.
        old, new: 'closed', 'open' or 'half_open'.
        reason: why it changed.
    """

    function: str
    backend: str
    old: str
    new: str
    reason: str


BreakerListener = Callable[[BreakerEvent], None]


@dataclass(frozen=True)
class Health:
    """The state of one backend's breaker for one function.

    Attributes:
        state: 'closed', 'open' or 'half_open'.
        forced: the state was set by `force_open()` or `force_close()`.
        failures: failures in a row.
        total_failures: failures since the process began, or since it was last reset or cleared.
        opened: how often it opened.
        retry_in: seconds until a call may probe; None if it is closed or forced.
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
        """Returns JSON-ready values."""
        return asdict(self)


class Breaker:
    """The circuit breaker of one backend for one function; see the module.

    Attributes:
        closed: calls go through. Read by generated code, as is `failures`.
        failures: failures in a row.
        state: 'closed', 'open' or 'half_open'.
    """

    def __init__(self, function: str, backend: str, owner: Breakers) -> None:
        self.function, self.backend = function, backend
        self._owner = owner
        self._forget()

    def __repr__(self) -> str:
        return f'<Breaker {self.function}[{self.backend}] {self.state}>'

    def _forget(self) -> None:
        self.state, self.forced = CLOSED, False
        self.closed, self.failures = True, 0
        self._total, self._opened = 0, 0
        self._last_error: str | None = None
        # times of the owner's clock at which a call may probe: after the cooldown, and after the current probe timed out
        self._until = self._probe_until = 0.0
        self._probe = 0
        # those of the call that opened it
        self._settings = BreakerSettings()

    def admit(self) -> int:
        """Returns the number of a probe, `REFUSED`, or `AS_USUAL` if the breaker has closed meanwhile.

        Called if the breaker was not closed. The caller reports a probe's number to `succeeded`, `failed` or `abandoned`.
        """
        # a first look without the lock: while the breaker is open, every call comes here
        if self._wait() or not may_probe():
            return REFUSED
        with lock:
            if self.closed:
                return AS_USUAL
            if self._wait():
                return REFUSED
            event = self._to(HALF_OPEN, 'a call probes the backend')
            # before the number, which other threads read without the lock
            self._probe_until = self._owner.clock() + self._settings.probe_timeout
            self._probe = number = next(_probe_numbers)
        self._owner.notify(event)
        return number

    def _wait(self) -> float:
        """Seconds until a call may probe: 0 if one may now, infinite if the breaker is forced."""
        if self.forced:
            return math.inf
        return max(0.0, (max(self._until, self._probe_until) if self._probe else self._until) - self._owner.clock())

    def succeeded(self, probe: int) -> None:
        """Records a call that succeeded. `probe` is its number, 0 for an ordinary call."""
        event = None
        with lock:
            # an ordinary call that began before the breaker opened changes nothing
            if probe == self._probe and (probe or self.closed):
                self.failures = 0
                event = self._to(CLOSED, 'the probe succeeded') if probe else None
        self._owner.notify(event)

    def failed(self, probe: int, error: str, settings: BreakerSettings) -> None:
        """Records a failure that is the backend's fault."""
        event = None
        with lock:
            self._total += 1
            self._last_error = error
            if not self.forced and probe == self._probe and (probe or self.closed):
                self.failures += 1
                if probe or self.failures >= settings.threshold:
                    self._settings = settings
                    self._until = self._owner.clock() + settings.cooldown
                    self._opened += 1
                    words = f'{_in_a_row(self.failures)}, the last {error}'
                    event = self._to(OPEN, f'the probe failed: {words}' if probe else words)
        self._owner.notify(event)

    def abandoned(self, probe: int) -> None:
        """Records a call that ended without a verdict on the backend: a bad argument, out of memory, an interrupt."""
        event = None
        with lock:
            if probe and probe == self._probe:
                event = self._to(OPEN, 'the probe ended undecided; the next call may probe')
        self._owner.notify(event)

    def _to(self, state: str, reason: str) -> BreakerEvent | None:
        """Changes the state. Called under the lock."""
        old, self.state = self.state, state
        self.closed = state == CLOSED
        self._probe = 0
        return BreakerEvent(self.function, self.backend, old, state, reason) if old != state else None

    @property
    def health(self) -> Health:
        """Returns a consistent snapshot."""
        with lock:
            retry_in = None if self.closed or self.forced else self._wait()
            return Health(self.state, self.forced, self.failures, self._total, self._opened, retry_in, self._last_error)

    def force_open(self) -> None:
        """Keeps the backend out until `reset()` or `force_close()`, whatever time passes or policy changes."""
        self._force(OPEN, 'force_open()')
        if not self._owner.asked(self.function):
            logs.logger.warning(
                "%s: force_open() of backend %r has no effect while on_error='raise' is in force for the function: "
                "breakers are asked under on_error='fallback' only. deny_backends() keeps a backend out under any policy",
                self.function,
                self.backend,
            )

    def force_close(self) -> None:
        """Lets every call through, whatever fails, until `reset()` or `force_open()`."""
        self._force(CLOSED, 'force_close()')

    def _force(self, state: str, reason: str) -> None:
        with lock:
            event = self._to(state, reason)
            self.forced, self.failures = True, 0
        self._owner.notify(event)

    def reset(self) -> None:
        """Closes the breaker, forced or not, and clears its counts."""
        self._reset('reset()', also_forced=True)

    def _reset(self, reason: str, *, also_forced: bool) -> None:
        event = None
        with lock:
            if also_forced or not self.forced:
                event = self._to(CLOSED, reason)
                self._forget()
        self._owner.notify(event)

    def refusal(self) -> str | None:
        """Returns why a call would skip the backend now, None if it would not. Changes nothing."""
        if self.closed:
            return None
        health = self.health
        if health.forced:
            return 'its circuit was forced open; reset() the breaker to close it'
        if not health.retry_in and may_probe():
            return None
        failures = f'{_in_a_row(health.failures)}, the last {health.last_error}'
        if health.state == HALF_OPEN:
            return f'its circuit is half open: another call is the probe ({failures})'
        return f'its circuit is open for {health.retry_in or 0:.1f} s more: {failures}'

    def note(self) -> str | None:
        """Returns what else `explain` shows about a backend that would not be skipped."""
        health = self.health
        if health.forced and health.state == CLOSED:
            return 'its circuit was forced closed'
        if health.state != CLOSED:
            return f'its circuit is {health.state.replace("_", " ")}; this call would be the probe'
        return f'its circuit is closed, {_in_a_row(health.failures)}' if health.failures else None


class Breakers:
    """The breakers of a dispatcher.

    Attributes:
        clock: monotonic seconds; tests replace it.
        asked: whether calls of a function look at their breakers under the policy in force.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.asked: Callable[[str], bool] = lambda function: True
        self._listeners: tuple[tuple[object, BreakerListener], ...] = ()
        self._breakers: dict[tuple[str, str], Breaker] = {}

    def of(self, function: str, backend: str) -> Breaker:
        """Returns the breaker of a backend for a function: the same object until the process ends."""
        key = function, backend.casefold()
        found = self._breakers.get(key)
        if found is None:
            with lock:
                found = self._breakers.setdefault(key, Breaker(function, backend, self))
        return found

    def _all(self) -> list[Breaker]:
        with lock:
            return list(self._breakers.values())

    def health(self) -> dict[tuple[str, str], Health]:
        """Returns (function, backend) → health for every breaker."""
        return {(breaker.function, breaker.backend): breaker.health for breaker in self._all()}

    def add_listener(self, listener: BreakerListener) -> Callable[[], None]:
        """Calls `listener(event)` after every change of state. Returns a function that removes the listener."""
        if not callable(listener):
            raise TypeError(f'a breaker listener is a function of a BreakerEvent, got {listener!r}')
        added = object(), listener  # the same listener may be added twice
        with lock:
            self._listeners = (*self._listeners, added)

        def end() -> None:
            with lock:
                self._listeners = tuple(one for one in self._listeners if one is not added)

        return end

    def notify(self, event: BreakerEvent | None) -> None:
        """Logs a change and calls the listeners. Must not be called under the lock."""
        if event is None:
            return
        level = logging.WARNING if event.new == OPEN and event.old == CLOSED else logging.INFO
        words = '%s: the circuit of backend %r is %s: %s'
        logs.logger.log(level, words, event.function, event.backend, event.new.replace('_', ' '), event.reason)
        for _, listener in self._listeners:
            try:
                listener(event)
            except (Exception, SystemExit):  # must not end the call
                logs.logger.exception('breaker listener %r raised for %s', listener, event)

    def clear(self, reason: str, operation: str | None = None, backends: Collection[str] | None = None) -> None:
        """Resets the breakers that are not forced: all, or those of one operation, or of some backends.

        Must not be called under the lock.
        """
        for breaker in self._all():
            if operation in (None, breaker.function.rpartition('.')[0]) and (
                backends is None or breaker.backend in backends
            ):
                breaker._reset(reason, also_forced=False)

    def reset(self) -> None:
        """Restores the state of a fresh process without calling listeners."""
        with lock:
            for breaker in self._breakers.values():
                breaker._forget()
            self._listeners, self.clock = (), time.monotonic


def _in_a_row(failures: int) -> str:
    return f'{failures} failure{"s" if failures != 1 else ""} in a row'


def may_probe() -> bool:
    """Whether this call may probe: not in a backward pass, where no fallback is possible, nor in a graph capture."""
    return not (in_backward() or in_capture())
