"""The code of a call. It contains only what the policy asks for: `try` for `on_error='fallback'`, counters for telemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fla.backends.codegen.generator import Generator, broken_text, unanswerable_text
from fla.backends.core.signature import Signature
from fla.backends.plan.plan import Candidate, Case, Plan


class Call(Generator):
    """Writes the code of a call.

    Args:
        hooks: `RuntimeHooks`, which lives in a higher room.
        key: 'operation.function', for errors.
        label: the same for profilers. With `ranges`, every implementation runs inside a profiler range.
        virtual: the code looks at scopes that were entered in a compiled region.
    """

    def __init__(
        self, signature: Signature, plan: Plan, serial: str, hooks: Any, *, key: str, label: str, ranges: bool, virtual: bool
    ) -> None:
        super().__init__(signature, plan, serial)
        self.hooks, self.key, self.label = hooks, key, label
        self.ranges, self.virtual = ranges, virtual
        self.keeps_answer = hooks.shows_reasons
        self.asked: tuple[Candidate, ...] = ()

    def prelude(self) -> None:
        if self.ranges:
            return
        if self.virtual:
            # in eager, too: a graph break, or an entered scope that is not left, hands the virtual scopes to eager code
            self.w.line(f'if _d_virtual.layers: return _d_getattr(_d_box, _d_select(_d_virtual.layers))({self.forward})')
        with self.w.block('if _d_dyn():'):
            pass
        self.w.line(f'elif _d_profiler._is_profiler_enabled: return _d_ranged{self.serial}({self.forward})')

    def _do(self, name: str, action: Callable[[], None]) -> None:
        """Call an action that Dynamo may trace, and which therefore takes no arguments."""
        self.w.line(f'{self.w.bind(name, action)}()')

    def chain(self, chain: tuple[Candidate, ...], platform: str) -> None:
        if self.plan.policy.falls_back:
            self.w.line('_d_failures = None')
        self.asked = tuple(c for c in chain if not c.out)
        super().chain(chain, platform)

    def _is_last(self, c: Candidate) -> bool:
        """Whether no candidate is asked after this one, for any call."""
        others = self.asked[self.asked.index(c) + 1 :]
        return not others and not any(other.demotable for other in self.asked if other is not c)

    def run(self, c: Candidate, tag: str) -> None:
        policy = self.plan.policy
        if not (policy.falls_back or policy.telemetry):
            self._announce(c, tag)
            self._implementation(c, tag, 'return ')
            return
        # Dynamo does not see the code below: a change in it never recompiles a caller
        with self.w.block('if _d_dyn():'):
            self._announce(c, tag)
            if policy.telemetry:
                self._do(f'_d_compiled{tag}', self.hooks.count_compiled(c))
            self._implementation(c, tag, 'return ')
        if policy.falls_back and policy.use is None:
            breaker = self.w.bind(f'_d_breaker{tag}', self.hooks.breaker(c))
            self.w.line('_d_probe = 0')
            with self.w.block(f'if {breaker}.closed or (_d_probe := {breaker}.admit()) >= 0:'):
                self._guarded(c, tag)
            with self.w.block('else:'):
                self._count(c, tag, "'open'")
                self._passed_over(c, tag)
        else:
            self._guarded(c, tag)

    def _guarded(self, c: Candidate, tag: str) -> None:
        """Run the implementation and handle its outcome."""
        policy = self.plan.policy
        first = (*self.signature.tensors, 'None')[0]
        timed = []
        with self.w.block('try:'):
            self._announce(c, tag)  # inside: any exception from here on ends a probe
            if policy.telemetry == 'time':
                begin = self.w.bind(f'_d_begin{self.serial}', self.hooks.begin)
                elapsed = self.w.bind(f'_d_elapsed{self.serial}', self.hooks.elapsed)
                self.w.line(f'_d_start = {begin}({first})')
                timed = [f'{elapsed}(_d_start, {first})']
            self._implementation(c, tag, '_d_result = ')
        with self.w.block('except _d_BaseException as _d_error:'):
            if policy.falls_back:
                failed = self.w.bind(f'_d_failed{tag}', self.hooks.failed(c, policy, is_last=self._is_last(c)))
                self.w.line(f'_d_failures = {failed}(_d_error, _d_failures, {self._probe}, {first})')
            if policy.telemetry:
                # not timed: no event may be recorded on a device that has just failed
                outcome = "'raised' if _d_failures is None else 'failed'" if policy.falls_back else "'raised'"
                self._count(c, tag, outcome, 'None', '_d_error')
            self.w.line('if _d_failures is None: raise' if policy.falls_back else 'raise')
        with self.w.block('else:'):
            if policy.falls_back:
                breaker = self.w.bind(f'_d_breaker{tag}', self.hooks.breaker(c))
                self.w.line(f'if {self._probe} or {breaker}.failures: {breaker}.succeeded({self._probe})')
                # its exceptions hold this frame
                self.w.line('if _d_failures is not None: _d_failures.clear()')
            self._count(c, tag, "'served'", *timed)
            self.w.line('return _d_result')

    def new_toggle_value(self, c: Candidate, tag: str, word: str) -> None:
        if self.plan.policy.falls_back:
            # a new plan would run again a backend that has failed in this call
            now = self.w.bind(f'_d_now{tag}', self.hooks.is_on_now(c))
            with self.w.block(f'{word} _d_failures and {now}():'):
                self._tests(c, tag)
            with self.w.block('elif _d_failures:'):
                self.off(c, tag)

    @property
    def _probe(self) -> str:
        """A forced choice is not a probe: it does not ask the breaker."""
        return '_d_probe' if self.plan.policy.use is None else '0'

    def _count(self, c: Candidate | None, tag: str, *arguments: str) -> None:
        if self.plan.policy.telemetry:
            count = self.w.bind(f'_d_count{tag}', self.hooks.count(c))
            self.w.line(f'{count}({", ".join(arguments)})')

    def unanswerable(self, case: Case, number: int) -> None:
        if self.plan.policy.strict:
            text = f'{self.key}: {unanswerable_text(case.conditional)}'
            self.w.line(f'raise _d_Bug({text!r}) from _d_error')
        else:
            self._do(f'_d_unanswerable{self.serial}_{self.place}', self.hooks.unanswerable(case.conditional))

    def _announce(self, c: Candidate, tag: str) -> None:
        first_use = self.hooks.first_use(c, self.platform)
        if first_use is not None:
            self._do(f'_d_use{tag}', first_use)
        if self.plan.policy.tracing:
            with self.w.block('if _d_dyn():'):
                self._do(f'_d_traced{tag}', self.hooks.traced(c))
            with self.w.block('else:'):
                record = self.w.bind(f'_d_record{tag}', self.hooks.record(c))
                rest = (self.signature.var_positional, self.signature.var_keyword)
                named = [f'{n}={n}' for n in (*self.signature.names, *filter(None, rest))]
                self.w.line(f'{record}(_d_dict({", ".join(named)}))')

    def _implementation(self, c: Candidate, tag: str, to: str) -> None:
        name = self.w.bind(f'_d_i{tag}', c.member.implementation)
        assert c.member.call is not None
        call = f'{to}{name}({c.member.call.arguments})'
        if self.ranges:
            with self.w.block(f'with _d_range({f"{self.label}[{c.member.name}]"!r}):'):
                self.w.line(call)
        else:
            self.w.line(call)

    def reject(self, c: Candidate, tag: str, reason: str, source: str) -> None:
        show = self.hooks.reason(c)
        if show is not None:
            self.w.line(f'if not _d_dyn(): {self.w.bind(f"_d_why{tag}", show)}({reason})')
        if source == 'availability':
            self.off(c, tag)
        else:
            self._passed_over(c, tag)

    def _passed_over(self, c: Candidate, tag: str) -> None:
        if self.plan.policy.require_first:
            self.nothing()
        else:
            self.off(c, tag)

    def off(self, c: Candidate, tag: str) -> None:
        if c.wished:
            self._do(f'_d_unmet{tag}', self.hooks.unmet(c))

    def untraceable(self, c: Candidate, tag: str) -> None:
        self._do(f'_d_untraceable{tag}', self.hooks.untraceable(c))
        self._passed_over(c, tag)

    def broken(self, c: Candidate, tag: str, method: str, *, raised: bool) -> None:
        if self.plan.policy.strict:
            text = f'{self.key}: {broken_text(c, method, raised=raised)}'
            self.w.line(f'raise _d_Bug({text!r}){" from _d_error" if raised else ""}')
            return
        self._do(f'_d_{"bug" if raised else "bad"}{tag}_{method}', self.hooks.broken(c, method, raised=raised))
        self._passed_over(c, tag)

    def demote(self, c: Candidate, tag: str) -> None:
        self.w.line(f'_d_late{tag} = True')
        if self.plan.policy.require_first:
            self.nothing()

    def late(self, c: Candidate, tag: str) -> None:
        self.run(c, tag)

    def nothing(self) -> None:
        message = f'{self.key}: no backend accepts this call; run it outside torch.compile, or explain() it, for the reasons'
        self.w.line(f'if _d_dyn(): raise _d_NoBackend({message!r})')
        if self.plan.policy.falls_back:
            exhausted = self.w.bind(f'_d_exhausted{self.serial}', self.hooks.exhausted())
            with self.w.block('if _d_failures:'):
                self._count(None, f'{self.serial}_none', "'raised'", 'None', '_d_failures[-1][1]')
                self.w.line(f'{exhausted}(_d_failures)')
        self._count(None, f'{self.serial}_none', "'no_backend'")
        self.w.line(f'return _d_none({self.forward})')

    def unmet_wish(self) -> None:
        self.nothing()
