"""The code of `explain`: the tests of a call, with every outcome noted and nothing run."""

from __future__ import annotations

from fla.backends.codegen.generator import Generator, bad_text, bug_text, unanswerable_text
from fla.backends.core.tensors import ANY
from fla.backends.plan.plan import Candidate, Case


class Explain(Generator):
    """The code of `explain`: the tests of a call, each outcome noted in the collector `_d_c`, and no kernel run."""

    stops_at_winner = False
    only = ANY

    def platforms(self) -> None:
        self.cases(self.only)

    def again(self, line: str) -> None:
        self.w.line('_d_c.stale()')

    def odd_tensor(self, first: str) -> None:
        self.w.line(f'if _d_k == 1 and _d_has_override(({first},)): return _d_c.offered(_d_type({first}))')
        self.w.line(f'if _d_k == 2: _d_refuse({first!r}, _d_type({first}).__name__)')

    def _place(self, tag: str) -> str:
        return tag.rsplit('_', 1)[1]

    def case(self, case: Case, number: int, platform: str) -> None:
        self.w.line(f'_d_c.case({number})')
        super().case(case, number, platform)
        self.w.line('return')

    def _condition(self, case: Case, number: int) -> None:
        super()._condition(case, number)
        self.w.line(f'_d_c.asked({number}, _d_w)')

    def unanswerable(self, case: Case, number: int) -> None:
        self.w.line(f'_d_c.unanswerable({number})')
        if self.plan.policy.strict:
            self.w.line(f'_d_c.stop({unanswerable_text(case.conditional, "")!r})')

    def run(self, c: Candidate, tag: str) -> None:
        if not self.plan.policy.falls_back or self.plan.policy.use is not None:
            self.w.line(f'_d_c.accept({self._place(tag)})')
            return
        self.w.line(f'_d_o = _d_refusal({c.member.name!r})')
        with self.w.block('if _d_o is None:'):
            self.w.line(f'_d_c.accept({self._place(tag)})')
        with self.w.block('else:'):
            self.w.line(f'_d_c.reject({self._place(tag)}, _d_o, "breaker")')
            self._passed_over()

    def reject(self, c: Candidate, tag: str, reason: str, source: str) -> None:
        self.w.line(f'_d_c.reject({self._place(tag)}, {reason}, {source!r})')
        if source != 'availability':
            self._passed_over()

    def off(self, c: Candidate, tag: str) -> None:
        self.w.line(f'_d_c.off({self._place(tag)})')

    def untraceable(self, c: Candidate, tag: str) -> None:
        self.w.line('pass')

    def bug(self, c: Candidate, tag: str, method: str) -> None:
        self._broken(tag, bug_text(c, '', method), 'True')

    def bad_return(self, c: Candidate, tag: str, method: str) -> None:
        self._broken(tag, bad_text(c, '', method), 'False')

    def _broken(self, tag: str, text: str, raised: str) -> None:
        self.w.line(f'_d_c.bug({self._place(tag)}, {text!r}, {raised})')
        if self.plan.policy.strict:
            self.w.line(f'_d_c.stop({text!r})')
        else:
            self._passed_over()

    def _passed_over(self) -> None:
        if self.plan.policy.require_first:
            self.w.line("_d_c.stop('the first available and enabled candidate does not accept the call (require_first)')")

    def demote(self, c: Candidate, tag: str) -> None:
        self.w.line(f'_d_late{tag} = True')
        self.w.line(f'_d_c.demote({self._place(tag)}, _d_y[1] if _d_len(_d_y) == 2 else None)')
        self._passed_over()

    def late(self, c: Candidate, tag: str) -> None:
        if self.plan.policy.falls_back and self.plan.policy.use is None:
            self.w.line(f'_d_o = _d_refusal({c.member.name!r})')
            self.w.line(f'if _d_o is None: _d_c.late({self._place(tag)})')
            self.w.line(f'else: _d_c.reject({self._place(tag)}, _d_o, "breaker")')
        else:
            self.w.line(f'_d_c.late({self._place(tag)})')

    def nothing(self) -> None:
        self.w.line("_d_c.stop('no candidate accepts the call')")

    def unmet_wish(self) -> None:
        self.w.line("_d_c.stop('no preferred backend accepts the call (strict)')")
