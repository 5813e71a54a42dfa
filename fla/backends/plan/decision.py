"""A decision is a value: the selected backend, every candidate with its verdict and reason, or the error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fla.backends.core.errors import DispatchError, unknown_name
from fla.backends.plan.plan import Member
from fla.backends.policy.policy import normalise
from fla.utils.owners import with_conflict

CAN_RUN = ('chosen', 'eligible', 'demoted')

# verdict → what to do
_ADVICE = {
    'excluded': 'relax the policy named in brackets',
    'disabled': 'switch a disabled backend on',
    'unavailable': 'install what is missing or move the tensors to a device that is supported',
    'rejected': 'change the argument that a candidate names',
    'open': 'wait for a circuit to close, or reset() its breaker()',
}


@dataclass(frozen=True)
class CandidateReport:
    """One candidate of a decision.

    Attributes:
        name, impl_id, kind: identity of the backend.
        verdict: 'chosen', 'eligible' (also accepts the call), 'demoted' (accepts it, but its `prefers` does not),
            'rejected' (by a test or its verifier), 'open' (excluded by its circuit breaker), 'disabled' (toggle),
            'excluded' (policy), 'unavailable', or 'bug'.
        reason: None if chosen or eligible.
        source: origin of the verdict: a policy layer, a variable, 'availability', 'verifier', 'priority' …
        priority: lower is asked earlier.
        notes: such as: never verified on its real package, skipped in compiled code, assumed installed.
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
        """Whether it accepts the call."""
        return self.verdict in CAN_RUN

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {**self.__dict__, 'notes': list(self.notes)}


@dataclass(frozen=True)
class Decision:
    """Which backend a call would run, and why. `str()` gives a table.

    Attributes:
        function: 'operation.function'.
        winner: name of the backend that would run; None if the call would raise.
        error: why the call would raise, or None.
        candidates: every candidate in the order in which they are asked.
        order: the policy layer that decided the order; 'priority' if none did.
        platform: platform of the call; 'any' if the decision does not depend on it.
        arguments: name → short text; dtype, shape and device of tensors.
        member: the chosen candidate, for the framework.
        rules: the conditional orders with their answers, and those that do not fit the function.
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
        """JSON-ready values."""
        fields = {name: getattr(self, name) for name in ('function', 'winner', 'error', 'order', 'platform')}
        candidates = [candidate.to_dict() for candidate in self.candidates]
        return {**fields, 'arguments': dict(self.arguments), 'rules': list(self.rules), 'candidates': candidates}

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
        """The message of NoBackendError: every candidate with its reason, the arguments, and advice."""
        head = f'{self.function}: {self.error or "no candidate accepts the call"}'
        arguments = ', '.join(f'{name}: {text}' for name, text in self.arguments.items())
        verdicts = {c.verdict for c in self.candidates}
        advice = ', or '.join(text for verdict, text in _ADVICE.items() if verdict in verdicts)
        advice = f'What to do: {advice or "register a backend for this operation"}.'
        return with_conflict('\n'.join([head, *self._table(), f'  arguments: {arguments}', f'  {advice}']))


class NoBackendError(DispatchError, NotImplementedError):
    """No candidate accepts this call. `decision` holds every candidate with its reason; None inside compiled code."""

    # without an __init__, which Dynamo could not trace, nor an `except NoBackendError` in compiled code
    decision: Decision | None = None

    @classmethod
    def of(cls, decision: Decision) -> NoBackendError:
        """The error of a decision without a winner."""
        error = cls(decision.error_text())
        error.decision = decision
        return error
