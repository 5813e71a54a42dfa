"""Counters and times of dispatched calls, for dashboards.

A plan contains counting code only while telemetry or an observer runs. Outcomes:
    served: the backend ran and returned;
    raised: it raised, and so did the call; backend 'none': every candidate that was tried had failed;
    failed: it raised, and the call went on to the next candidate (on_error=fallback);
    open: its circuit breaker excluded it;
    no_backend: no candidate accepted the call; the backend is 'none';
    compiled: torch.compile traced the call. Compiled regions run no Python, so each trace counts once.

Timing is optional and covers served calls. Calls with CUDA tensors are timed by a pair of events, which are read on demand
and never waited for; other calls by the host's clock.
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
from typing import Any

from fla.backends.core import logs
from fla.backends.core.errors import unknown_name
from fla.backends.core.execution import in_capture
from fla.backends.core.locking import lock
from fla.backends.fallback.breaker import CLOSED, HALF_OPEN, OPEN
from fla.backends.observe.recording import Recording
from fla.backends.policy.policy import normalise
from fla.backends.runtime.dispatcher import Dispatcher, entry_of, owner_of
from fla.backends.runtime.recorders import OUTCOMES, Recorder

# Upper bounds in seconds of the histogram's buckets, from a decode step to a long prefill.
BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

HOST, CUDA = 'host', 'cuda'


@dataclass(frozen=True)
class CallEvent:
    """The outcome of one backend in one call, for observers.

    Attributes:
        function: 'operation.function'.
        backend: its name; 'none' if no candidate was left.
        outcome: one of `OUTCOMES`.
        seconds: host time of a served call, if it was timed. CUDA events are read later.
        error: the exception that was raised.
    """

    function: str
    backend: str
    outcome: str
    seconds: float | None = None
    error: BaseException | None = None


Observer = Callable[[CallEvent], None]


@dataclass
class Histogram:
    """Durations in seconds of one (function, backend, clock): count, sum, minimum, maximum, and a count per bucket."""

    count: int = 0
    seconds: float = 0.0
    min: float = float('inf')
    max: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.min, self.max = min(self.min, seconds), max(self.max, seconds)
        self.buckets[bisect.bisect_left(BUCKETS, seconds)] += 1


class Telemetry(Recording):
    """Counts the dispatched calls of the whole process inside `with`, or between `start()` and `stop()`.

    Args:
        timing: time served calls, too.
        pending: most CUDA timings that may wait to be read; more are dropped, and counted in `dropped`.
        dispatcher: the namespace; default: fla's own.
    """

    verb, wants_outcomes = 'telemetry', True

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

    def clear(self) -> None:
        """Count from zero."""
        with lock:
            self._calls, self._timings, self.dropped = {}, {}, 0
            self._pending = deque()
            self._times_cleared += 1  # so that a `collect` on another thread drops the events that it is reading

    def outcome(self, key: tuple[str, str, str], took: Any, error: BaseException | None) -> None:
        """Count one (function, backend, outcome)."""
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
        return self._timings.setdefault((function, backend, clock), Histogram())

    def collect(self) -> int:
        """Read the CUDA events that the device has passed, without waiting; returns how many are still pending.

        Calls never do this, because an event may not be queried during CUDA graph capture; there this does nothing.
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
        """Drops the parent's CUDA events, which the child cannot read."""
        self._pending.clear()

    def count(
        self, function: str | Callable[..., Any] | None = None, backend: str | None = None, outcome: str | None = None
    ) -> int:
        """Number of calls with this function, backend and outcome; None means any. Raises UnknownNameError."""
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
        """JSON-ready values: `calls`, `timings`, `breakers`, `pending` and `dropped` timings."""
        pending = self.collect()
        with lock:
            calls = sorted(self._calls.items())
            # `vars`: count, seconds, min, max, buckets
            timings = sorted((key, {**vars(t), 'buckets': list(t.buckets)}) for key, t in self._timings.items())
            dropped = self.dropped
        return {
            'namespace': self.dispatcher.namespace,
            'calls': [{'function': f, 'backend': b, 'outcome': o, 'count': n} for (f, b, o), n in calls],
            'timings': [
                {
                    'function': f,
                    'backend': b,
                    'clock': clock,
                    **t,
                    'buckets': [[bound, n] for bound, n in zip((*BUCKETS, None), t['buckets'], strict=True)],
                }
                for (f, b, clock), t in timings
            ],
            'breakers': [
                {'function': f, 'backend': b, **health.to_dict()}
                for (f, b), health in sorted(self.dispatcher.breakers.health().items())
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
        """The snapshot in Prometheus' text format, version 0.0.4."""
        return prometheus_text(self.snapshot(), self.dispatcher.env_prefix)


def telemetry(timing: bool = False, pending: int = 10_000, dispatcher: Dispatcher | None = None) -> Telemetry:
    """`with telemetry() as t:` counts every dispatched call of the process; see `Telemetry`."""
    return Telemetry(timing, pending, dispatcher)


def add_observer(observer: Observer, dispatcher: Dispatcher | None = None) -> Callable[[], None]:
    """Call `observer(event)` with a `CallEvent` after every dispatched call, in the call's thread. Returns a function that
    removes the observer. An exception from an observer is logged once and does not reach the call."""
    owner = owner_of(dispatcher)
    if not callable(observer):
        raise TypeError(f'an observer is a function of a CallEvent, got {observer!r}')
    owner.policies.warn_in_baseline('add_observer()')
    recorder = _ObserverRecorder(observer)  # a new one: the same observer may be added twice
    owner.start_recording(recorder)
    return lambda: owner.stop_recording(recorder)


class _ObserverRecorder(Recorder):
    wants_outcomes = True

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def outcome(self, key: tuple[str, str, str], took: Any, error: BaseException | None) -> None:
        event = CallEvent(*key, took if isinstance(took, float) else None, error)
        try:
            self.observer(event)
        except (Exception, SystemExit):  # an observer's error is not the call's
            logged = 'observer', id(self.observer)
            logs.once(logged, logging.ERROR, 'observer %r raised for %s', self.observer, event, exc_info=True)


# -- Prometheus ---------------------------------------------------------------------------------------------------------

Sample = tuple[str, Mapping[str, str], float]


def prometheus_text(snapshot: Mapping[str, Any], prefix: str) -> str:
    """A snapshot in Prometheus' text format."""
    prefix = re.sub(r'[^a-z0-9_]', '_', prefix.lower())
    prefix = f'{"_" if prefix[:1].isdigit() else ""}{prefix}_dispatch'
    breakers, states = snapshot['breakers'], (CLOSED, OPEN, HALF_OPEN)
    calls = [('', _pick(row, 'outcome'), row['count']) for row in snapshot['calls']]
    times = [sample for row in snapshot['timings'] for sample in _histogram(row)]
    circuits = [('', {**_pick(row), 'state': s}, int(row['state'] == s)) for row in breakers for s in states]
    failures = [('', _pick(row), row['total_failures']) for row in breakers]
    dropped: list[Sample] = [('', {}, snapshot['dropped'])]
    families: list[tuple[str, str, str, Iterable[Sample]]] = [
        ('calls_total', 'counter', 'Dispatched calls by function, backend and outcome.', calls),
        ('duration_seconds', 'histogram', 'Time of dispatched calls, by its clock: CUDA events or the host.', times),
        ('timings_dropped_total', 'counter', 'Timings that were dropped because too many were pending.', dropped),
        ('circuit_state', 'gauge', 'State of the circuit breakers: 1 for the state that holds.', circuits),
        ('circuit_failures_total', 'counter', 'Failures that count for the circuit breakers.', failures),
    ]
    lines = []
    for name, kind, text, samples in families:
        full = f'{prefix}_{name}'
        lines += [f'# HELP {full} {text}', f'# TYPE {full} {kind}']
        lines += [f'{full}{suffix}{_labels(labels)} {value!r}' for suffix, labels, value in samples]
    return '\n'.join(lines) + '\n'


def _histogram(row: Mapping[str, Any]) -> Iterable[Sample]:
    labels, total = _pick(row, 'clock'), 0
    for bound, count in row['buckets']:
        total += count
        yield '_bucket', {**labels, 'le': '+Inf' if bound is None else repr(bound)}, total
    yield '_sum', labels, row['seconds']
    yield '_count', labels, row['count']


def _pick(row: Mapping[str, Any], *more: str) -> dict[str, str]:
    return {name: str(row[name]) for name in ('function', 'backend', *more)}


def _labels(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({'\\': r'\\', '\n': r'\n', '"': r'\"'})
    inner = ','.join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
    return f'{{{inner}}}' if inner else ''
