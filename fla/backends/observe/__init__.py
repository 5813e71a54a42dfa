"""Traces, counters, telemetry and tables: the calls that ran and the backends that are registered.

`trace`, `telemetry` and `describe` are in the door, `fla.backends`."""

from fla.backends.observe.describe import snapshot
from fla.backends.observe.records import Record
from fla.backends.observe.telemetry import CallEvent, Telemetry, add_observer
from fla.backends.observe.trace import Trace, counters, last_backend

__all__ = ['CallEvent', 'Record', 'Telemetry', 'Trace', 'add_observer', 'counters', 'last_backend', 'snapshot']
