"""The code of `explain`: the tests of a call. It reports every outcome to the collector `_d_c` and runs no kernel."""

from __future__ import annotations

from typing import Any

from fla.backends.codegen.generator import Generator, broken_text, unanswerable_text
from fla.backends.core.tensors import ANY
from fla.backends.plan.plan import Candidate, Case


class Explain(Generator):
    """Writes the code of `explain` for one platform, `only`."""

    stops_at_winner = False
    only = ANY

    def prelude(self) -> None:
        """Scopes and profilers change nothing here."""

    def new_toggle_value(self, c: Candidate, tag: str, word: str) -> None:
        """`again` reports it."""

    def platforms(self) -> None:
        self.cases(self.only)

    def again(self, line: str) -> None:
        self._stop('the environment changed while the call was explained; explain it again')

    def special_tensor(self, first: str) -> None:
        self.w.line(f'if _d_k == 1 and _d_has_override(({first},)): return _d_c.offered(_d_type({first}))')
        self.w.line(f'if _d_k == 2: _d_refuse({first!r}, _d_type({first}).__name__)')

    def _report(self, outcome: str, tag: str, *arguments: Any) -> str:
        """`_d_c.outcome(place, ...)`."""
        return f'_d_c.{outcome}({", ".join([tag.rsplit("_", 1)[1], *map(str, arguments)])})'

    def _stop(self, text: str) -> None:
        self.w.line(f'_d_c.stop({text!r})')

    def case(self, case: Case, number: int, platform: str) -> None:
        self.w.line(f'_d_c.case({number})')
        super().case(case, number, platform)
        self.w.line('return')

    def condition(self, case: Case, number: int) -> None:
        super().condition(case, number)
        self.w.line(f'_d_c.asked({number}, _d_w)')

    def unanswerable(self, case: Case, number: int) -> None:
        self.w.line(f'_d_c.unanswerable({number})')
        if self.plan.policy.strict:
            self._stop(unanswerable_text(case.conditional))

    def run(self, c: Candidate, tag: str) -> None:
        self._if_closed(c, tag, 'accept')

    def late(self, c: Candidate, tag: str) -> None:
        self._if_closed(c, tag, 'win')

    def _if_closed(self, c: Candidate, tag: str, outcome: str) -> None:
        """Reports the outcome of a candidate, unless its circuit breaker keeps it out."""
        if not self.plan.policy.falls_back or self.plan.policy.use is not None:
            self.w.line(self._report(outcome, tag))
            return
        self.w.line(f'_d_o = _d_refusal({c.member.name!r})')
        self.w.line(f'if _d_o is None: {self._report(outcome, tag)}')
        with self.w.block('else:'):
            self.w.line(self._report('reject', tag, '_d_o', "'breaker'"))
            if outcome == 'accept':
                self._passed_over()

    def reject(self, c: Candidate, tag: str, reason: str, source: str) -> None:
        self.w.line(self._report('reject', tag, reason, repr(source)))
        if source != 'availability':
            self._passed_over()

    def off(self, c: Candidate, tag: str) -> None:
        self.w.line(self._report('off', tag))

    def untraceable(self, c: Candidate, tag: str) -> None:
        """`explain` is never traced."""

    def broken(self, c: Candidate, tag: str, method: str, *, raised: bool) -> None:
        text = broken_text(c, method, raised=raised)
        self.w.line(self._report('broken', tag, repr(text), raised))
        if self.plan.policy.strict:
            self._stop(text)
        else:
            self._passed_over()

    def _passed_over(self) -> None:
        if self.plan.policy.require_first:
            self._stop('the first available and enabled candidate does not accept the call (require_first)')

    def demote(self, c: Candidate, tag: str) -> None:
        self.w.line(f'_d_late{tag} = True')
        self.w.line(self._report('demote', tag, '_d_y[1] if _d_len(_d_y) == 2 else None'))
        self._passed_over()

    def nothing(self) -> None:
        self._stop('no candidate accepts the call')

    def unmet_wish(self) -> None:
        self._stop('no preferred backend accepts the call (strict)')
