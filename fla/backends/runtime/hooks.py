"""Functions that generated code calls to report: bugs, unmet wishes, first uses, reasons. Each message is given once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fla.backends.backend.base import format_reason
from fla.backends.codegen.call import Actions
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


class RuntimeHooks(Actions):
    """The reports of one function's code."""

    def __init__(self, spec: FunctionSpec, dispatcher: Dispatcher) -> None:
        self.spec, self.dispatcher = spec, dispatcher
        self.shows_reasons = logs.logger.isEnabledFor(logging.DEBUG)

    def _log_once(
        self, kind: str, c: Candidate, level: int, text: str, *args: object, trace: bool = False
    ) -> Callable[[], None]:
        key = (kind, self.spec.key, c.member.name, text)

        def say() -> None:
            logs.once(key, level, text, *args, exc_info=trace)

        return while_tracing(say)

    def bug(self, c: Candidate, method: str) -> Callable[[], None]:
        return self._log_once(
            'bug',
            c,
            logging.ERROR,
            '%s: %s of backend %r (%s) raised; the backend is skipped. This is a bug in the backend.',
            self.spec.key,
            method,
            c.member.name,
            self._where(c, method),
            trace=True,
        )

    def bad_return(self, c: Candidate, method: str) -> Callable[[], None]:
        return self._log_once(
            'bad',
            c,
            logging.ERROR,
            '%s: %s of backend %r (%s) must return (True, None) or (False, reason) and did not; the backend is skipped.',
            self.spec.key,
            method,
            c.member.name,
            self._where(c, method),
        )

    def _where(self, c: Candidate, method: str) -> str:
        found = c.member.verifier if method == 'verifier' else c.member.prefers
        return location(found)

    def unmet(self, c: Candidate) -> Callable[[], None]:
        return self._log_once(
            'unmet',
            c,
            logging.WARNING,
            '%s: backend %r was asked for and does not take this call; see explain() for the reason',
            self.spec.key,
            c.member.name,
        )

    def untraceable(self, c: Candidate) -> Callable[[], None]:
        return self._log_once(
            'untraceable',
            c,
            logging.WARNING,
            '%s: backend %r is skipped in compiled code: %s',
            self.spec.key,
            c.member.name,
            c.member.untraceable,
        )

    def first_use(self, c: Candidate, platform: str) -> Callable[[], None] | None:
        slow = c.member.backend.kind == 'reference' and platform not in ('any', 'cpu', 'meta', 'none')
        if slow:
            return self._log_once(
                'slow',
                c,
                logging.WARNING,
                '%s: the reference (plain PyTorch) serves tensors on %s; see explain() for why',
                self.spec.key,
                platform,
            )
        if not logs.logger.isEnabledFor(logging.INFO):
            return None
        return self._log_once('use', c, logging.INFO, '%s: backend %r is used', self.spec.key, c.member.name)

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
        text = f'{unanswerable_text(case, self.spec.key)} and does not hold: {advice}'

        def say() -> None:
            logs.warn_once(('unanswerable', text), '%s', text)

        return while_tracing(say)

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

    def clock(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return begin, elapsed

    def reason(self, c: Candidate) -> Callable[[Any], None] | None:
        if not self.shows_reasons:
            return None
        key, name = self.spec.key, c.member.name

        def say(reason: Any) -> None:
            text = format_reason(reason)
            logs.once(
                ('reason', key, name, text),
                logging.DEBUG,
                '%s: backend %r does not take this call: %s',
                key,
                name,
                text,
            )

        return say
