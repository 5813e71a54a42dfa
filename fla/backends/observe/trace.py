"""Traces: a record of every dispatched call.

A plan contains recording code only while a trace runs. Compiled regions run no Python: a dispatched call in one is recorded
once, when it is traced, and marked `compiled`.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.core.locking import lock
from fla.backends.core.spec import FunctionSpec
from fla.backends.observe.recording import Recording
from fla.backends.observe.records import Record, record_of
from fla.backends.runtime.dispatcher import Dispatcher, owner_of


class Trace(Recording):
    """Records the dispatched calls of the whole process inside `with`, or between `start()` and `stop()`.

    Args:
        limit: number of newest records that are stored. Counters count all calls.
        dispatcher: the namespace; default: fla's own.
    """

    verb, wants_calls = 'trace', True

    def __init__(self, limit: int = 100_000, dispatcher: Dispatcher | None = None) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= sys.maxsize:
            raise ValueError(f'limit must be a whole number from 1, got {limit!r}')
        self.dispatcher = owner_of(dispatcher)
        self.records: deque[Record] = deque(maxlen=limit)
        self.counters: Counter[tuple[str, str]] = Counter()

    def __iter__(self) -> Iterator[Record]:
        with lock:  # other threads record meanwhile
            return iter(tuple(self.records))

    def __len__(self) -> int:
        return len(self.records)

    def call(self, spec: FunctionSpec, backend: str, arguments: Mapping[str, Any] | None) -> None:
        """Record a call."""
        made = record_of(spec, backend, arguments)
        with lock:
            self.records.append(made)
            self.counters[spec.key, backend] += 1

    def last_backend(self, function: str) -> str:
        """The backend that ran last for a function ('kda.chunk_kda') or an operation ('kda'). Raises LookupError if no such
        call was recorded."""
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

    def clear(self) -> None:
        """Forget what was recorded."""
        with lock:
            self.records.clear()
            self.counters.clear()

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
    """The backend that ran last, while a trace is running. Raises DispatchError without a trace, LookupError if no such call
    was recorded."""
    return _running(dispatcher).last_backend(function)


def counters(dispatcher: Dispatcher | None = None) -> dict[tuple[str, str], int]:
    """Number of calls by (function, backend), while a trace is running. Raises DispatchError without a trace."""
    return dict(_running(dispatcher).counters)


def environment_trace(dispatcher: Dispatcher) -> Trace:
    """The trace for FLA_DISPATCH_TRACE=1, which prints its counters at exit."""
    made = Trace(dispatcher=dispatcher)

    def report() -> None:
        if made.counters:
            print(f'dispatched calls of {dispatcher.namespace}:\n{made.summary()}', file=sys.stderr)

    atexit.register(report)
    return made
