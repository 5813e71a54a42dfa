"""What ran: a record of calls while somebody asks for it.

The code that records is part of the plan of a tracing state; without a trace it does not exist. Compiled regions run no
Python: each dispatched call in them is recorded once, when it is traced, and marked so.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.core.locking import lock
from fla.backends.core.spec import FunctionSpec
from fla.backends.observe.records import Record, record_of
from fla.backends.runtime.dispatcher import Dispatcher, owner_of


class Trace:
    """Records the dispatched calls of the whole process while it is entered.

    Args:
        limit: how many records are kept, the newest. Counters count all.
        dispatcher: the namespace; default: fla's own.
    """

    wants_calls, wants_outcomes, wants_times = True, False, False

    def __init__(self, limit: int = 100_000, dispatcher: Dispatcher | None = None) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= sys.maxsize:
            raise ValueError(f'limit must be a whole number from 1, got {limit!r}')
        self.dispatcher = owner_of(dispatcher)
        self.records: deque[Record] = deque(maxlen=limit)
        self.counters: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Trace:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to record.

        Raises:
            DispatchError: if it is recording already; a call would count twice.
        """
        self.dispatcher.policies.warn_in_baseline('trace()')
        if not self.dispatcher.start_recording(self):
            raise DispatchError('this trace is recording already: use another one, `with trace() as t:`')

    def stop(self) -> None:
        """End recording; the records stay."""
        self.dispatcher.stop_recording(self)

    def __iter__(self) -> Iterator[Record]:
        with lock:  # calls go on
            return iter(tuple(self.records))

    def __len__(self) -> int:
        return len(self.records)

    def call(self, spec: FunctionSpec, backend: str, arguments: Mapping[str, Any] | None) -> None:
        """Called by generated code; `arguments` is None for a call that is being compiled."""
        made = record_of(spec, backend, arguments)
        with lock:
            self.records.append(made)
            self.counters[spec.key, backend] += 1

    def outcome(self, key: tuple[str, str, str], took: Any, error: BaseException | None) -> None:
        """Not asked for."""

    def after_fork_in_child(self) -> None:
        """A forked child keeps the records."""

    def last_backend(self, function: str) -> str:
        """The backend that ran last for a function ('kda.chunk_kda', or 'kda' for any of the operation).

        Raises:
            LookupError: if no such call was recorded.
        """
        for record in reversed(tuple(self)):
            if record.function == function or record.function.rpartition('.')[0] == function:
                return record.backend
        raise LookupError(f'no call of {function!r} was recorded; recorded: {sorted({r.function for r in self})}')

    def to_json(self, path: str | Path | None = None) -> str:
        """The records and counters as JSON, also written to `path` if given."""
        counters = [{'function': f, 'backend': b, 'calls': n} for (f, b), n in sorted(dict(self.counters).items())]
        text = json.dumps({'records': [r.to_dict() for r in self], 'counters': counters}, indent=1)
        if path is not None:
            Path(path).write_text(text, encoding='utf-8')
        return text

    def summary(self) -> str:
        """A table of the counters."""
        return '\n'.join(f'{f:<48} {b:<16} {n:>8}' for (f, b), n in sorted(dict(self.counters).items()))


def trace(limit: int = 100_000, dispatcher: Dispatcher | None = None) -> Trace:
    """`with trace() as t:` records every dispatched call of the process; see `Trace`."""
    return Trace(limit, dispatcher)


def _running(dispatcher: Dispatcher | None) -> Trace:
    owner = owner_of(dispatcher)
    found = [recorder for recorder in owner.recorders if isinstance(recorder, Trace)]
    if not found:
        variable = owner.environment.name('DISPATCH_TRACE')
        raise DispatchError(f'nothing is recorded: use `with trace() as t:`, or set {variable}=1 before the first call')
    return found[-1]


def last_backend(function: str, dispatcher: Dispatcher | None = None) -> str:
    """The backend that ran last, while a trace is running.

    Raises:
        DispatchError: if none is.
        LookupError: if no such call was recorded.
    """
    return _running(dispatcher).last_backend(function)


def counters(dispatcher: Dispatcher | None = None) -> dict[tuple[str, str], int]:
    """Calls by (function, backend), while a trace is running.

    Raises:
        DispatchError: if none is.
    """
    return dict(_running(dispatcher).counters)


def environment_trace(dispatcher: Dispatcher) -> Trace:
    """The trace for FLA_DISPATCH_TRACE=1, which prints its counters at exit."""
    made = Trace(dispatcher=dispatcher)

    def report() -> None:
        if made.counters:
            print(f'dispatched calls of {dispatcher.namespace}:\n{made.summary()}', file=sys.stderr)

    atexit.register(report)
    return made


def forget_environment_trace(dispatcher: Dispatcher) -> None:
    """For `reset()`: the calls recorded for FLA_DISPATCH_TRACE so far are not reported."""
    started = dispatcher.policies.environment_recorder
    if isinstance(started, Trace):
        started.counters.clear()
