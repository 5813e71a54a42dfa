"""Counters and times of dispatched calls, for dashboards.

The code that counts is part of the plan of a state in which somebody counts; otherwise it does not exist. Outcomes:
    served: the backend ran and returned;
    raised: it raised, and so did the call; of backend 'none': those before it had failed, and nobody else took the call;
    failed: it raised, and the call went on to the next candidate (on_error=fallback);
    open: its circuit breaker kept it out;
    no_backend: nobody took the call; the backend is then 'none';
    compiled: the call was traced by torch.compile. Compiled regions run no Python, so it is counted once per trace.

Times are opt-in, and of served calls only. One on CUDA tensors is timed with a pair of events that are read when somebody
asks, never waited for; any other by the host's clock.
"""

from __future__ import annotations

import bisect
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, unknown_name
from fla.backends.core.execution import in_capture
from fla.backends.core.locking import lock
from fla.backends.core.spec import FunctionSpec
from fla.backends.fallback.breaker import CLOSED, HALF_OPEN, OPEN
from fla.backends.policy.policy import normalise
from fla.backends.runtime.dispatcher import Dispatcher, entry_of, owner_of
from fla.backends.runtime.recorders import OUTCOMES

# Upper bounds in seconds of the histogram's buckets, from a decode step to a long prefill.
BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

HOST, CUDA = 'host', 'cuda'


@dataclass(frozen=True)
class CallEvent:
    """What one backend did in one call, as observers get it.

    Attributes:
        function: 'operation.function'.
        backend: its name; 'none' where no candidate was left.
        outcome: one of `OUTCOMES`.
        seconds: time on the host's clock, where it was taken: of served calls. CUDA events are read later.
        error: what was raised.
    """

    function: str
    backend: str
    outcome: str
    seconds: float | None = None
    error: BaseException | None = None


Observer = Callable[[CallEvent], None]


@dataclass
class Histogram:
    """Durations of one (function, backend, clock): how many, their sum, smallest and largest, and per bucket."""

    count: int = 0
    seconds: float = 0.0
    min: float = float('inf')
    max: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.seconds += seconds
        self.min, self.max = min(self.min, seconds), max(self.max, seconds)
        self.buckets[bisect.bisect_left(BUCKETS, seconds)] += 1


class Telemetry:
    """Counts the dispatched calls of the whole process while it is entered, or between `start()` and `stop()`.

    Args:
        timing: take times, too.
        pending: how many CUDA timings may wait to be read; what comes beyond is dropped, and counted as dropped.
        dispatcher: the namespace; default: fla's own.
    """

    wants_calls, wants_outcomes = False, True

    def __init__(self, timing: bool = False, pending: int = 10_000, dispatcher: Dispatcher | None = None) -> None:
        if not isinstance(timing, bool):
            raise TypeError(f'timing must be True or False, got {timing!r}')
        if isinstance(pending, bool) or not isinstance(pending, int) or pending < 1:
            raise ValueError(f'pending must be a whole number from 1, got {pending!r}')
        self.timing = self.wants_times = timing
        self.dispatcher = owner_of(dispatcher)
        self.dropped = self._times_cleared = 0
        self._most_pending = pending
        self._calls: dict[tuple[str, str, str], int] = {}
        self._timings: dict[tuple[str, str, str], Histogram] = {}
        self._pending: deque[tuple[str, str, Any, Any]] = deque()

    def __enter__(self) -> Telemetry:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Telemetry:
        """Begin to count; returns itself, as in `t = telemetry().start()`.

        Raises:
            DispatchError: if it is counting already; a call would count twice.
        """
        self.dispatcher.policies.warn_in_baseline('telemetry()')
        if not self.dispatcher.start_recording(self):
            raise DispatchError('this telemetry is counting already: use another one, `with telemetry() as t:`')
        return self

    def stop(self) -> None:
        """End counting; the counts stay."""
        self.dispatcher.stop_recording(self)

    def clear(self) -> None:
        """Count from zero."""
        with lock:
            self._calls, self._timings, self.dropped = {}, {}, 0
            self._pending = deque()
            self._times_cleared += 1  # what `collect` is reading at this moment does not come back

    # -- called for generated code ------------------------------------------------------------------------------------

    def call(self, spec: FunctionSpec, backend: str, arguments: Mapping[str, Any] | None) -> None:
        """Not asked for."""

    def outcome(self, key: tuple[str, str, str], took: Any, error: BaseException | None) -> None:
        """Count one (function, backend, outcome); `took` is a time in seconds, or a pair of CUDA events."""
        with lock:
            self._calls[key] = self._calls.get(key, 0) + 1
            if took is None or not self.timing:
                return
            if isinstance(took, float):
                self._timing(key[0], key[1], HOST).add(took)
            elif len(self._pending) < self._most_pending:
                self._pending.append((key[0], key[1], *took))
            else:
                self.dropped += 1

    def _timing(self, function: str, backend: str, clock: str) -> Histogram:
        found = self._timings.get((function, backend, clock))
        if found is None:
            found = self._timings[function, backend, clock] = Histogram()
        return found

    # -- for people ---------------------------------------------------------------------------------------------------

    def collect(self) -> int:
        """Read the CUDA events that the device has passed, without waiting for any; returns how many still wait.

        Not on the way of a call, because asking an event is not allowed while a CUDA graph is captured; then this does
        nothing.
        """
        if not self._pending or in_capture():
            return len(self._pending)
        with lock:
            waiting, self._pending = self._pending, deque()
            begun = self._times_cleared
        done = []
        still: deque[tuple[str, str, Any, Any]] = deque()
        try:
            while waiting:
                function, backend, start, end = waiting.popleft()
                if end.query():
                    done.append((function, backend, start.elapsed_time(end) / 1e3))
                else:
                    still.append((function, backend, start, end))
        finally:
            with lock:
                if self._times_cleared == begun:
                    for function, backend, seconds in done:
                        self._timing(function, backend, CUDA).add(seconds)
                    self._pending.extendleft(reversed(still + waiting))
        return len(self._pending)

    def after_fork_in_child(self) -> None:
        """The child cannot read the parent's CUDA events."""
        self._pending.clear()

    def count(
        self, function: str | Callable[..., Any] | None = None, backend: str | None = None, outcome: str | None = None
    ) -> int:
        """How many calls are counted under these, None for any.

        Raises:
            UnknownNameError: for a function, backend or outcome that nobody knows.
        """
        if callable(function):
            function = entry_of(function).spec.key
        name = None if backend is None else normalise(backend)
        with lock:
            calls = list(self._calls.items())
        if function is not None and not any(function == key[0] for key, _ in calls):
            self.dispatcher.catalogue.entry(function)
        if name is not None and name != 'none' and not any(name == normalise(key[1]) for key, _ in calls):
            self.dispatcher.catalogue.check_tokens((name,), function)
        if outcome is not None and outcome not in OUTCOMES:
            raise unknown_name('outcome', outcome, OUTCOMES)
        wanted = function, name, outcome
        named = [((key[0], normalise(key[1]), key[2]), n) for key, n in calls]
        return sum(n for key, n in named if all(w in (None, k) for w, k in zip(wanted, key, strict=True)))

    def snapshot(self) -> dict[str, Any]:
        """Everything as JSON-ready values: `calls`, `timings`, `breakers`, `pending` and `dropped` timings."""
        pending = self.collect()
        with lock:
            calls = sorted(self._calls.items())
            timings = sorted((key, t.count, t.seconds, t.min, t.max, tuple(t.buckets)) for key, t in self._timings.items())
            dropped = self.dropped
        return {
            'namespace': self.dispatcher.namespace,
            'calls': [{'function': f, 'backend': b, 'outcome': o, 'count': n} for (f, b, o), n in calls],
            'timings': [
                {
                    'function': f,
                    'backend': b,
                    'clock': clock,
                    'count': count,
                    'seconds': seconds,
                    'min': least,
                    'max': most,
                    'buckets': [[bound, n] for bound, n in zip((*BUCKETS, None), buckets, strict=True)],
                }
                for (f, b, clock), count, seconds, least, most, buckets in timings
            ],
            'breakers': [
                {'function': f, 'backend': b, **health.to_dict()}
                for (f, b), health in sorted(self.dispatcher.health().items())
            ],
            'pending': pending,
            'dropped': dropped,
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The snapshot as JSON, also written to `path` if given."""
        text = json.dumps(self.snapshot(), indent=1)
        if path is not None:
            Path(path).write_text(text + '\n', encoding='utf-8')
        return text

    def to_prometheus(self) -> str:
        """The snapshot in Prometheus' text exposition format, version 0.0.4."""
        return prometheus_text(self.snapshot(), self.dispatcher.env_prefix)


def telemetry(timing: bool = False, pending: int = 10_000, dispatcher: Dispatcher | None = None) -> Telemetry:
    """`with telemetry() as t:` counts every dispatched call of the process; see `Telemetry`."""
    return Telemetry(timing, pending, dispatcher)


def add_observer(observer: Observer, dispatcher: Dispatcher | None = None) -> Callable[[], None]:
    """Call `observer(event)` with a `CallEvent` after every dispatched call, in the call's thread; returns what ends it.

    What an observer raises is logged once and harms no call.
    """
    owner = owner_of(dispatcher)
    if not callable(observer):
        raise TypeError(f'an observer is a function of a CallEvent, got {observer!r}')
    owner.policies.warn_in_baseline('add_observer()')
    recorder = _Observing(observer)  # a new one: the same observer may be added twice
    owner.start_recording(recorder)
    return lambda: owner.stop_recording(recorder)


class _Observing:
    """Tells an observer of each outcome."""

    wants_calls, wants_outcomes, wants_times = False, True, False

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def call(self, spec: FunctionSpec, backend: str, arguments: Mapping[str, Any] | None) -> None:
        """Not asked for."""

    def outcome(self, key: tuple[str, str, str], took: Any, error: BaseException | None) -> None:
        """Call the observer with an event."""
        event = CallEvent(*key, took if isinstance(took, float) else None, error)
        try:
            self.observer(event)
        except (Exception, SystemExit):  # an observer's error is not the call's
            logged = 'observer', id(self.observer)
            logs.once(logged, logging.ERROR, 'observer %r raised for %s', self.observer, event, exc_info=True)

    def after_fork_in_child(self) -> None:
        """A forked child keeps its observers."""


# -- Prometheus ---------------------------------------------------------------------------------------------------------


def prometheus_text(snapshot: Mapping[str, Any], prefix: str) -> str:
    """A snapshot in Prometheus' text exposition format."""
    prefix = re.sub(r'[^a-z0-9_]', '_', prefix.lower())
    prefix = f'{"_" if prefix[:1].isdigit() else ""}{prefix}_dispatch'
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterable[tuple[str, Mapping[str, str], float | int]]) -> None:
        full = f'{prefix}_{name}'
        lines.append(f'# HELP {full} {_escape_help(text)}')
        lines.append(f'# TYPE {full} {kind}')
        for suffix, labels, value in samples:
            lines.append(f'{full}{suffix}{_labels(labels)} {_number(value)}')

    family(
        'calls_total',
        'counter',
        'Dispatched calls by function, backend and outcome.',
        (('', _pick(row, 'function', 'backend', 'outcome'), row['count']) for row in snapshot['calls']),
    )
    family(
        'duration_seconds',
        'histogram',
        'Time of dispatched calls, by the clock that took it: CUDA events or the host.',
        (sample for row in snapshot['timings'] for sample in _histogram(row)),
    )
    family(
        'timings_dropped_total',
        'counter',
        'Timings that were not kept because too many waited to be read.',
        [('', {}, snapshot['dropped'])],
    )
    family(
        'circuit_state',
        'gauge',
        'State of the circuit breakers: 1 for the state that holds.',
        (
            ('', {**_pick(row, 'function', 'backend'), 'state': state}, int(row['state'] == state))
            for row in snapshot['breakers']
            for state in (CLOSED, OPEN, HALF_OPEN)
        ),
    )
    family(
        'circuit_failures_total',
        'counter',
        'Failures that count for the circuit breakers.',
        (('', _pick(row, 'function', 'backend'), row['total_failures']) for row in snapshot['breakers']),
    )
    return '\n'.join(lines) + '\n'


def _histogram(row: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, str], float | int]]:
    labels, total = _pick(row, 'function', 'backend', 'clock'), 0
    for bound, count in row['buckets']:
        total += count
        yield '_bucket', {**labels, 'le': '+Inf' if bound is None else _number(bound)}, total
    yield '_sum', labels, row['seconds']
    yield '_count', labels, row['count']


def _pick(row: Mapping[str, Any], *names: str) -> dict[str, str]:
    return {name: str(row[name]) for name in names}


def _labels(labels: Mapping[str, str]) -> str:
    inner = ','.join(f'{name}="{_escape_label(value)}"' for name, value in labels.items())
    return f'{{{inner}}}' if inner else ''


def _escape_help(text: str) -> str:
    return text.replace('\\', r'\\').replace('\n', r'\n')


def _escape_label(text: str) -> str:
    return _escape_help(text).replace('"', r'\"')


def _number(value: float | int) -> str:
    return repr(value)
