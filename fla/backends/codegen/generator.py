"""A plan's source text.

`Generator` writes the tests of a call; a subclass writes what happens at each outcome. `call.Call` writes straight-line code
without loops, locks or formatting; `explain.Explain` writes the same tests and reports every outcome.

Names that begin with `_d_` belong to the generator, builtins included: a parameter may be called `type`. Implementations,
verifiers and declared values get fresh names for each plan, because Dynamo snapshots a namespace within a trace, and because
a thread may still be running an older plan.

The code of a call, for one backend with a toggle and a verifier, on a machine that has only seen CPU tensors:

    def chunk_kda(q, k, v, ...):
        if _d_virtual.layers: return ...                 # a policy scope entered inside a compiled region
        if _d_dyn():
            pass
        elif _d_profiler._is_profiler_enabled: return _d_ranged(q, k, v, ...)
        _d_x = q
        if _d_type(q) is not _d_Tensor: ...              # Parameter, FakeTensor, override, DTensor, no tensor
        _d_check(q, k, v)
        if _d_x.is_cpu:
            _d_r0 = _d_env.get(b'FLA_FLASH_KDA')
            if _d_r0 is None or _d_r0 == b'1' ...:
                try: _d_o = _d_v7_0(q, v)[0]
                except _d_Exception: _d_bug7_0()
                else:
                    if _d_o is True: return _d_i7_0(q, k, v, ...)
                    elif _d_o is not False: _d_bad7_0()
            elif not (_d_r0 == b'0' ...): _d_cold('7'); return _d_self(q, k, v, ...)
            return _d_i7_1(q, k, v, ...)
        else: _d_need('7', _d_platform(_d_x)); return _d_self(q, k, v, ...)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from fla.backends.core.signature import Signature
from fla.backends.core.tensors import ANY, NO_TENSOR
from fla.backends.plan.plan import Candidate, Case, Plan
from fla.backends.policy.precedence import Conditional
from fla.backends.policy.toggles import Gate
from fla.utils.env import live_key

# Fast tests for the platform of a tensor; other platforms go through `_d_platform`, which is slower.
_PLATFORM_TESTS = {
    'cpu': '_d_x.is_cpu',
    'cuda': '_d_x.is_cuda',
    'rocm': '_d_x.is_cuda',
    'xpu': '_d_x.is_xpu',
    'meta': '_d_x.is_meta',
}


class Writer:
    """Indented lines of source, and the objects that their names are bound to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bindings: dict[str, Any] = {}
        self._depth = 1

    def line(self, text: str) -> None:
        self.lines.append('    ' * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(head)
        self._depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line('pass')
        self._depth -= 1

    def bind(self, name: str, value: Any) -> str:
        self.bindings[name] = value
        return name


class Generator(ABC):
    """Writes the body of one function for one plan. Subclasses write what happens at each outcome.

    Attributes:
        device_type: the device type that conditions assume for every tensor; None for the tensor's own.
        stops_at_winner: candidates behind one that accepts every call are left out.
        keeps_answer: reasons are shown, so the code stores a verifier's whole answer, not only its first half.
        asks: the serial with which the code asks for a new plan.
    """

    device_type: str | None = None
    stops_at_winner = True
    keeps_answer = True

    def __init__(self, signature: Signature, plan: Plan, serial: str) -> None:
        self.signature, self.plan, self.serial = signature, plan, serial
        self.asks = serial
        self.w = Writer()
        self.place, self.platform = '0', ANY
        self.forward = signature.forward_all()
        self._knows_if_traced = False

    # -- outcomes -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, c: Candidate, tag: str) -> None: ...
    @abstractmethod
    def reject(self, c: Candidate, tag: str, reason: str, source: str) -> None: ...
    @abstractmethod
    def off(self, c: Candidate, tag: str) -> None: ...
    @abstractmethod
    def untraceable(self, c: Candidate, tag: str) -> None: ...
    @abstractmethod
    def broken(self, c: Candidate, tag: str, method: str, *, raised: bool) -> None: ...
    @abstractmethod
    def demote(self, c: Candidate, tag: str) -> None: ...
    @abstractmethod
    def late(self, c: Candidate, tag: str) -> None: ...
    @abstractmethod
    def unanswerable(self, case: Case, number: int) -> None: ...
    @abstractmethod
    def nothing(self) -> None: ...
    @abstractmethod
    def unmet_wish(self) -> None: ...

    @abstractmethod
    def prelude(self) -> None:
        """Writes the code before everything else."""

    @abstractmethod
    def new_toggle_value(self, c: Candidate, tag: str, word: str) -> None:
        """Writes tests before planning again for a toggle value that the plan does not list; `word` begins the first."""

    def again(self, line: str) -> None:
        self.w.line(f'if {line} and _d_dyn(): _d_restart()')
        self.w.line(f'return _d_self({self.forward})')

    # -- structure ----------------------------------------------------------------------------------------------------

    def source(self, name: str, check: str | None, first: str = '') -> str:
        """The whole function, with `first` as an extra first parameter. `check`: arguments of the function's check."""
        self.prelude()
        self._tensor_class()
        if check is not None:
            self.w.line(f'_d_check({check})')
        self.platforms()
        return '\n'.join([self.signature.header(name, first), *self.w.lines]) + '\n'

    def platforms(self) -> None:
        """The chain of the call's platform."""
        if not self.plan.by_platform:
            self.cases(ANY)
            return
        new_platform = f'_d_need({self.asks!r}, _d_platform(_d_x))'
        if not self.plan.chains:  # no call yet: an `else` would belong to the `if` above
            self.again(new_platform)
            return
        for place, platform in enumerate(self.plan.chains):
            self.place = str(place)
            if platform == NO_TENSOR:
                test = '_d_x is _d_NoTensor'
            else:
                test = _PLATFORM_TESTS.get(platform, f'_d_platform(_d_x) == {platform!r}')
            with self.w.block(f'{"elif" if place else "if"} {test}:'):
                self.cases(platform)
        with self.w.block('else:'):
            self.again(new_platform)

    def _tensor_class(self) -> None:
        """The first tensor's type: plain tensors go on, overrides are offered the call, DTensors are refused."""
        tensors = self.signature.tensors
        if not tensors:
            if self.plan.by_platform:
                self.w.line('_d_x = _d_NoTensor')
            return
        first = tensors[0]
        if self.plan.by_platform:
            self.w.line(f'_d_x = {first}')
        with self.w.block(f'if _d_type({first}) is not _d_Tensor:'):
            self.w.line(f'_d_k = _d_classify(_d_type({first}))')
            with self.w.block('if _d_k != 0:'):
                self.special_tensor(first)
                if self.plan.by_platform:
                    others = ', '.join(tensors[1:])
                    self.w.line(f'if _d_k == 3: _d_x = _d_first_tensor(({others}{"," if others else ""}))')

    def special_tensor(self, first: str) -> None:
        with self.w.block(f'if _d_k == 1 and _d_has_override(({first},)):'):
            self.w.line(f'return _d_offer(({first},), {self.forward})')
        self.w.line(f'if _d_k == 2: _d_refuse({first!r}, _d_type({first}).__name__)')

    def cases(self, platform: str) -> None:
        """The first case whose condition holds, else the usual order."""
        place = self.place
        self._knows_if_traced = False
        for number, case in enumerate(self.plan.cases.get(platform, ())):
            self.place = f'{place}c{number}'
            if case.conditional.condition is None:
                self.case(case, number, platform)
                return
            self.condition(case, number)
            with self.w.block('if _d_w:'):
                self.case(case, number, platform)
        self.place = place
        self.chain(self.plan.chains[platform], platform)

    def case(self, case: Case, number: int, platform: str) -> None:
        """The chain of a case that holds."""
        self.chain(case.chain, platform)

    def condition(self, case: Case, number: int) -> None:
        """Sets `_d_w` to whether the condition holds.

        A condition without an answer raises, also where its value is neither true nor false (an array compared with a
        number). A `try` costs nothing where the condition holds.
        """
        condition = case.conditional.condition
        assert condition is not None
        bind = lambda name, value: self.w.bind(f'_d_w{self.serial}_{self.place}_{name}', value)  # noqa: E731
        with self.w.block('try:'):
            eager = condition.source(bind, device_type=self.device_type)
            traced = condition.source(bind, traced=True, device_type=self.device_type)
            if eager == traced:
                self.w.line(f'_d_w = True if {eager} else False')
            else:
                # asked once per call: asking again would be a tenth of a condition's cost
                dyn = '_d_t' if self._knows_if_traced else '(_d_t := _d_dyn())'
                self._knows_if_traced = True
                self.w.line(f'_d_w = True if (({traced}) if {dyn} else ({eager})) else False')
        with self.w.block(self._except):
            self.w.line('_d_w = False')
            self.unanswerable(case, number)

    @property
    def _except(self) -> str:
        return 'except _d_Exception as _d_error:' if self.plan.policy.strict else 'except _d_Exception:'

    def chain(self, chain: tuple[Candidate, ...], platform: str) -> None:
        self.platform = platform
        tagged = [(c, f'{self.serial}_{self.place}_{i}') for i, c in enumerate(chain)]
        for c, tag in tagged:
            if not c.out and c.demotable:
                self.w.line(f'_d_late{tag} = False')
        late: list[tuple[Candidate, str]] = []
        wishes = [c for c in chain if c.wished] if self.plan.policy.prefer else []
        last_wish = wishes[-1] if wishes and self.plan.policy.strict else None
        for c, tag in tagged:
            if c.member.backend.kind == 'reference' and late:
                self._late(late)
                late = []
            if not c.out:
                self._candidate(c, tag)
                if self.stops_at_winner and c.accepts_always and not self.plan.policy.falls_back:
                    return
                if c.demotable:
                    late.append((c, tag))
            if c is last_wish:
                self.unmet_wish()
                if self.stops_at_winner:
                    return
        self._late(late)
        self.nothing()

    def _late(self, late: list[tuple[Candidate, str]]) -> None:
        for c, tag in late:
            with self.w.block(f'if _d_late{tag}:'):
                self.late(c, tag)

    def _candidate(self, c: Candidate, tag: str) -> None:
        if c.member.untraceable:
            with self.w.block('if _d_dyn():'):
                self.untraceable(c, tag)
        with self._else_if(c.member.untraceable):
            self._gate(c, tag)

    def _else_if(self, tested: object) -> AbstractContextManager[None]:
        """A block `else:` if there were tests before."""
        return self.w.block('else:') if tested else nullcontext()

    def _gate(self, c: Candidate, tag: str) -> None:
        gate = c.gate
        if gate is None:
            self._tests(c, tag)
        elif gate.ask is not None:
            self.w.bind(f'_d_on{tag}', gate.ask)
            with self.w.block(f'if _d_on{tag}():'):
                self._tests(c, tag)
            with self.w.block('else:'):
                self.off(c, tag)
        else:
            self._inline_gate(c, tag, gate)

    def _inline_gate(self, c: Candidate, tag: str, gate: Gate) -> None:
        raws = [f'_d_r{i}' for i in range(len(gate.variables))]
        for raw, name in zip(raws, gate.variables, strict=True):
            self.w.line(f'{raw} = _d_env.get({live_key(name)!r})')
        groups = [(gate.on, self._tests), (gate.off, self.off)]
        word = 'if'
        for group, write in groups if gate.is_on else reversed(groups):
            if not group:
                continue
            with self.w.block(f'{word} {_any_of(raws, group)}:'):
                write(c, tag)
            word = 'elif'
        self.new_toggle_value(c, tag, word)
        with self.w.block('else:'):
            self.again(f'_d_cold({self.asks!r})')

    def _tests(self, c: Candidate, tag: str) -> None:
        for place, test in enumerate(c.tests):
            rejects, reason = test.rejects, test.reason_source
            for name, value in test.bindings.items():
                fresh = self.w.bind(f'{name}{tag}_{place}', value)
                rejects, reason = rejects.replace(name, fresh), reason.replace(name, fresh)
            with self.w.block(f'{"elif" if place else "if"} {rejects}:'):
                self.reject(c, tag, reason, 'availability' if test.unavailable else 'declared')
        with self._else_if(c.tests):
            self._verify(c, tag)

    def _verify(self, c: Candidate, tag: str) -> None:
        member = c.member
        if member.verifier is None or member.verifier_call is None:
            self._prefer(c, tag)
            return
        name = self.w.bind(f'_d_v{tag}', member.verifier)
        self._ask(c, tag, f'{name}({member.verifier_call.arguments})', 'verifier', self._prefer, self._verifier_rejects)

    def _verifier_rejects(self, c: Candidate, tag: str) -> None:
        self.reject(c, tag, '_d_y[1] if _d_len(_d_y) == 2 else None', 'verifier')

    def _prefer(self, c: Candidate, tag: str) -> None:
        member = c.member
        if not c.demotable or member.prefers_call is None:
            self.run(c, tag)
            return
        name = self.w.bind(f'_d_p{tag}', member.prefers)
        self._ask(c, tag, f'{name}({member.prefers_call.arguments})', 'prefers', self.run, self.demote)

    def _ask(
        self,
        c: Candidate,
        tag: str,
        call: str,
        method: str,
        yes: Callable[[Candidate, str], None],
        no: Callable[[Candidate, str], None],
    ) -> None:
        with self.w.block('try:'):
            if self.keeps_answer:
                self.w.line(f'_d_y = {call}')
                self.w.line('_d_o = _d_y[0]')
            else:
                self.w.line(f'_d_o = {call}[0]')
            # a comparison of a dynamic size is a SymBool, which is not a bug
            self.w.line('if _d_o is not True and _d_o is not False: _d_o = _d_decide(_d_o)')
        with self.w.block(self._except):
            self.broken(c, tag, method, raised=True)
        with self.w.block('else:'):
            with self.w.block('if _d_o is True:'):
                yes(c, tag)
            with self.w.block('elif _d_o is False:'):
                no(c, tag)
            with self.w.block('else:'):
                self.broken(c, tag, method, raised=False)


def _any_of(raws: list[str], group: tuple[tuple[Any, ...], ...]) -> str:
    def one(values: tuple[Any, ...]) -> str:
        pairs = zip(raws, values, strict=True)
        test = ' and '.join(f'{raw} is None' if value is None else f'{raw} == {value!r}' for raw, value in pairs)
        return test if len(raws) < 2 else f'({test})'

    return ' or '.join(map(one, group))


def unanswerable_text(case: Conditional) -> str:
    """Says that a condition has no answer for this call."""
    assert case.condition is not None
    return f'the condition {case.condition.text!r} ({case.order.source}) has no answer for this call'


def broken_text(c: Candidate, method: str, *, raised: bool) -> str:
    """Says that a verifier or `prefers` raised, or returned something else than an answer."""
    wrong = 'raised' if raised else 'must return (True, None) or (False, reason)'
    return f'{method} of backend {c.member.name!r} {wrong}'
