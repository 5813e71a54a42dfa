"""Functions that generated code calls to log, record and count. Each message is logged once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fla.backends.backend.base import format_reason
from fla.backends.codegen.generator import unanswerable_text
from fla.backends.core import logs
from fla.backends.core.dynamo import while_tracing
from fla.backends.core.signature import location
from fla.backends.core.spec import FunctionSpec
from fla.backends.fallback.breaker import Breaker
from fla.backends.fallback.failure import exhausted, handler
from fla.backends.plan.plan import Candidate
from fla.backends.policy.precedence import Conditional, ResolvedPolicy
from fla.backends.runtime.dispatcher import Dispatcher
from fla.backends.runtime.recorders import COMPILED, OUTCOMES, begin, elapsed


class RuntimeHooks:
    """Makes the functions for one dispatched function's code.

    A function that Dynamo may meet takes no arguments: it is marked constant and runs while tracing.
    """

    begin, elapsed = staticmethod(begin), staticmethod(elapsed)

    def __init__(self, spec: FunctionSpec, dispatcher: Dispatcher) -> None:
        self.spec, self.dispatcher = spec, dispatcher
        self.shows_reasons = logs.logger.isEnabledFor(logging.DEBUG)

    def _log_once(self, c: Candidate, level: int, text: str, *args: object, trace: bool = False) -> Callable[[], None]:
        """A function that logs `text`, which begins with the function's key and the backend's name."""
        key, name = self.spec.key, c.member.name

        def log() -> None:
            logs.once((key, name, text), level, f'%s: backend %r {text}', key, name, *args, exc_info=trace)

        return while_tracing(log)

    def broken(self, c: Candidate, method: str, *, raised: bool) -> Callable[[], None]:
        where = location(c.member.verifier if method == 'verifier' else c.member.prefers)
        wrong = 'raised' if raised else 'must return (True, None) or (False, reason) and did not'
        text = f'is skipped: its {method} (%s) {wrong}. This is a bug in the backend.'
        return self._log_once(c, logging.ERROR, text, where, trace=raised)

    def unmet(self, c: Candidate) -> Callable[[], None]:
        text = 'was asked for and does not take this call; see explain() for the reason'
        return self._log_once(c, logging.WARNING, text)

    def untraceable(self, c: Candidate) -> Callable[[], None]:
        return self._log_once(c, logging.WARNING, 'is skipped in compiled code: %s', c.member.untraceable)

    def first_use(self, c: Candidate, platform: str) -> Callable[[], None] | None:
        if c.member.backend.kind == 'reference' and platform not in ('any', 'cpu', 'meta', 'none'):
            text = '(a plain PyTorch reference) serves tensors on %s; see explain() for why'
            return self._log_once(c, logging.WARNING, text, platform)
        return self._log_once(c, logging.INFO, 'is used') if logs.logger.isEnabledFor(logging.INFO) else None

    def traced(self, c: Candidate) -> Callable[[], None]:
        record = self.record(c)
        return while_tracing(lambda: record(None))

    def record(self, c: Candidate) -> Callable[[Mapping[str, Any] | None], None]:
        spec, control, name = self.spec, self.dispatcher.control, c.member.name

        def note(arguments: Mapping[str, Any] | None) -> None:
            for recorder in control.now.recorders:
                if recorder.wants_calls:
                    recorder.call(spec, name, arguments)

        return note

    def unanswerable(self, case: Conditional) -> Callable[[], None]:
        advice = 'explain() says why; calls without x are excluded by "x is not None and"'
        text = f'{self.spec.key}: {unanswerable_text(case)} and does not hold: {advice}'
        return while_tracing(lambda: logs.warn_once(('unanswerable', text), '%s', text))

    def breaker(self, c: Candidate) -> Breaker:
        return self.dispatcher.breakers.of(self.spec.key, c.member.name)

    def failed(self, c: Candidate, policy: ResolvedPolicy, *, is_last: bool) -> Callable[..., Any]:
        return handler(self.spec, c, self.breaker(c), policy.breaker, last=is_last or bool(policy.require_first))

    def exhausted(self) -> Callable[[Any], NoReturn]:
        return functools.partial(exhausted, self.spec.key)

    def count(self, c: Candidate | None) -> Callable[..., None]:
        control, name = self.dispatcher.control, 'none' if c is None else c.member.name
        keys = {outcome: (self.spec.key, name, outcome) for outcome in OUTCOMES}

        def report(outcome: str, took: Any = None, error: BaseException | None = None) -> None:
            for recorder in control.now.recorders:
                if recorder.wants_outcomes:
                    recorder.outcome(keys[outcome], took, error)

        return report

    def count_compiled(self, c: Candidate) -> Callable[[], None]:
        return while_tracing(functools.partial(self.count(c), COMPILED))

    def is_on_now(self, c: Candidate) -> Callable[[], bool]:
        toggles = self.dispatcher.toggles
        return lambda: toggles.gate(c.member.backend).is_on

    def reason(self, c: Candidate) -> Callable[[Any], None] | None:
        key, name = self.spec.key, c.member.name

        def log(reason: Any) -> None:
            text = format_reason(reason)
            logs.once(
                ('reason', key, name, text), logging.DEBUG, '%s: backend %r does not take this call: %s', key, name, text
            )

        return log if self.shows_reasons else None
