"""A decision is a value: who would run, every candidate with its verdict and reason, and the error where none would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fla.backends.core.errors import DispatchError, unknown_name
from fla.backends.plan.plan import Member
from fla.backends.policy.policy import normalise
from fla.utils.owners import with_conflict

CAN_RUN = ('chosen', 'eligible', 'demoted')


@dataclass(frozen=True)
class CandidateReport:
    """One candidate of a decision.

    Attributes:
        name, impl_id, kind: which one.
        verdict: 'chosen', 'eligible' (would also serve the call), 'demoted' (can, but says it should not), 'rejected' (by a
            test or its verifier), 'open' (kept out by its circuit breaker), 'disabled' (toggle), 'excluded' (policy),
            'unavailable', or 'bug'.
        reason: why, None for the chosen and the eligible.
        source: who says so: a policy layer, a variable, 'availability', 'verifier', 'priority' …
        priority: lower is asked earlier.
        notes: what else is worth knowing: never verified on its real package, skipped in compiled code, assumed installed.
    """

    name: str
    impl_id: str
    kind: str
    verdict: str
    reason: str | None
    source: str
    priority: float
    notes: tuple[str, ...] = ()

    @property
    def can_run(self) -> bool:
        """Whether it would serve the call, first or where those before it do not."""
        return self.verdict in CAN_RUN

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {**self.__dict__, 'notes': list(self.notes)}


@dataclass(frozen=True)
class Decision:
    """What a call would do, and why. `str()` of it is a table.

    Attributes:
        function: 'operation.function'.
        winner: name of the backend that would run, None if the call would raise.
        error: why the call would raise, None if it would not.
        candidates: every candidate in the order they are asked.
        order: which policy layer decided the order ('priority' where none did).
        platform: platform of the call ('any' where the decision does not depend on it).
        arguments: name → what came, for tensors dtype, shape and device.
        member: the chosen candidate as the framework holds it.
        rules: the conditional orders that were asked, each with its answer, and those that the function cannot answer.
    """

    function: str
    winner: str | None
    error: str | None
    candidates: tuple[CandidateReport, ...]
    order: str
    platform: str
    arguments: dict[str, str]
    member: Member | None = field(default=None, repr=False, compare=False)
    rules: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> CandidateReport:
        for candidate in self.candidates:
            if candidate.name.casefold() == normalise(name):
                return candidate
        raise unknown_name('candidate', name, [c.name for c in self.candidates], f' of {self.function}')

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {
            'function': self.function,
            'winner': self.winner,
            'error': self.error,
            'order': self.order,
            'platform': self.platform,
            'arguments': dict(self.arguments),
            'rules': list(self.rules),
            'candidates': [candidate.to_dict() for candidate in self.candidates],
        }

    def __str__(self) -> str:
        head = f'{self.function} on {self.platform}: {self.winner or "raises: " + str(self.error)} (order: {self.order})'
        return '\n'.join([head, *self._table()])

    def _table(self) -> list[str]:
        width = max((len(c.name) for c in self.candidates), default=0)
        lines = []
        for c in self.candidates:
            reason = f'{c.reason} [{c.source}]' if c.reason else f'[{c.source}]'
            notes = f' ({"; ".join(c.notes)})' if c.notes else ''
            lines.append(f'  {c.name:<{width}}  {c.verdict:<11}  {reason}{notes}')
        return lines + [f'  {rule}' for rule in self.rules]

    def error_text(self) -> str:
        """The message of NoBackendError: every candidate with its reason, the arguments, and what to do."""
        arguments = ', '.join(f'{name}: {text}' for name, text in self.arguments.items())
        return with_conflict(
            '\n'.join(
                [
                    f'{self.function}: {self.error or "no candidate accepts the call"}',
                    *self._table(),
                    f'  arguments: {arguments}',
                    f'  {self._advice()}',
                ]
            )
        )

    def _advice(self) -> str:
        verdicts = {c.verdict for c in self.candidates}
        advice = []
        if 'excluded' in verdicts:
            advice.append('relax the policy named in brackets')
        if 'disabled' in verdicts:
            advice.append('switch a disabled backend on')
        if 'unavailable' in verdicts:
            advice.append('install what is missing or move the tensors to a device that is supported')
        if 'rejected' in verdicts:
            advice.append('change the argument that a candidate names')
        if 'open' in verdicts:
            advice.append('wait for a circuit to close, or reset() its breaker()')
        return f'What to do: {", or ".join(advice) or "register a backend for this operation"}.'


class NoBackendError(DispatchError, NotImplementedError):
    """No candidate accepts this call. `decision` holds every candidate with its reason; None inside compiled code."""

    # no __init__ of its own: Dynamo could not trace it, nor an `except NoBackendError` in compiled code
    decision: Decision | None = None

    @classmethod
    def of(cls, decision: Decision) -> NoBackendError:
        """The error of a decision without a winner."""
        error = cls(decision.error_text())
        error.decision = decision
        return error
