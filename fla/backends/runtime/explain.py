"""Why a call would run what it runs.

`explain` runs the tests of a call, written by the same generator from the same plan, and notes each outcome. It runs no
kernel, so it also answers for meta and fake tensors, and for hardware this machine does not have.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fla.backends.backend.availability import capability_verdict
from fla.backends.backend.base import BaseBackend, Reason, Verdict, format_reason
from fla.backends.codegen.explain import Explain
from fla.backends.codegen.generator import source_of
from fla.backends.core import tensors
from fla.backends.core.dynamo import never_a_frame
from fla.backends.core.errors import unknown_name
from fla.backends.fallback.breaker import Breakers
from fla.backends.plan.plan import ANY, NO_TENSOR, Candidate, Case, Facts, Member, build, unfit
from fla.backends.policy.policy import normalise
from fla.backends.policy.precedence import Conditional, ResolvedPolicy, State
from fla.backends.runtime.function import check_source
from fla.utils.devices import KNOWN_DEVICES, PLATFORMS, Device
from fla.utils.owners import with_conflict

if TYPE_CHECKING:
    from fla.backends.runtime.entry import Entry


_CAN_RUN = ('chosen', 'eligible', 'demoted')


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
        return self.verdict in _CAN_RUN

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


class _Collector:
    """Takes the notes of one explained call. The first event that ends a call decides its outcome."""

    def __init__(self, chain: Sequence[Candidate], order: str = '', cases: Sequence[Case] = ()) -> None:
        self.chain, self.order, self.cases = chain, order, cases
        self.rules: list[str] = []
        self.verdicts: dict[int, tuple[str, Reason, str]] = {}
        self.winner: int | None = None
        self.error: str | None = None

    def case(self, number: int) -> None:
        """This call's order is that of a case."""
        case = self.cases[number]
        self.chain, self.order = case.chain, case.conditional.order.source
        if case.conditional.condition is None:
            self.rules.append(f'{_words(case.conditional)}: holds for every call')

    def asked(self, number: int, holds: bool) -> None:
        words = _words(self.cases[number].conditional)
        if not (self.rules and self.rules[-1].startswith(f'{words}: has no answer')):
            self.rules.append(f'{words}: {"holds" if holds else "does not hold"}')

    def unanswerable(self, number: int) -> None:
        error = sys.exc_info()[1]
        self.rules.append(f'{_words(self.cases[number].conditional)}: has no answer ({type(error).__name__}: {error})')

    def _open(self) -> bool:
        return self.winner is None and self.error is None

    def accept(self, place: int) -> None:
        self.verdicts[place] = (
            'eligible',
            None,
            'verifier' if self.chain[place].member.verifier else 'accepts every call',
        )
        if self._open():
            self.winner = place

    def reject(self, place: int, reason: Reason, source: str) -> None:
        verdict = {'availability': 'unavailable', 'breaker': 'open'}.get(source, 'rejected')
        self.verdicts[place] = verdict, reason, source

    def off(self, place: int) -> None:
        gate = self.chain[place].gate
        assert gate is not None
        self.verdicts[place] = ('disabled', gate.says_off, gate.source)

    def demote(self, place: int, reason: Reason) -> None:
        self.verdicts[place] = ('demoted', reason, 'prefers')

    def late(self, place: int) -> None:
        if self._open():
            self.winner = place

    def bug(self, place: int, text: str, raised: bool) -> None:
        error = sys.exc_info()[1]
        detail = f': {type(error).__name__}: {error}' if raised and error is not None else ''
        self.verdicts[place] = ('bug', f'{text}{detail}', 'backend')

    def stop(self, text: str) -> None:
        if self._open():
            self.error = text

    def stale(self) -> None:
        if self._open():
            self.error = 'the environment changed while the call was explained; explain it again'

    def offered(self, cls: type) -> None:
        if self._open():
            self.error = f'the call is offered to {cls.__qualname__}.__torch_function__, which decides'


def _words(case: Conditional) -> str:
    when = f' when {case.condition.text}' if case.condition else ''
    return f'{case.order.source}{when} → {", ".join(case.order.tokens)}'


def _unfit(entry: Entry, policy: ResolvedPolicy) -> list[str]:
    """The rules that are not for this function, which has no such candidate or parameter."""
    problems = [(case, unfit(case, entry.signature, entry.members())) for case in policy.cases]
    return [f'{_words(case)}: {problem}' for case, problem in problems if problem is not None]


def explain_entry(
    entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], platform: Any, state: State | None = None
) -> Decision:
    """`explain` for an entry point, under another state than the one in force where one is given."""
    bound = entry.signature.signature.bind(*args, **kwargs)
    if entry.dispatcher.baseline:
        return _baseline(entry, bound.arguments)
    entry.dispatcher.discovery.load(entry.operation)
    entry.dispatcher.check_environment_once()
    policy = entry.policy(entry.state() if state is None else state)
    facts = entry._facts(policy)
    assumed: set[int] = set()
    if platform is None:
        where = _platform_of_call(entry, bound.arguments)
    else:
        device = _device_named(platform)
        where = device.platform
        facts = _facts_elsewhere(facts, device, assumed)
        args, kwargs = _as_if_on(bound, where)
    pretended = None if platform is None else where
    plan = build(entry.signature, entry.members(), policy, [where], facts)
    where = where if plan.by_platform else ANY
    chain = plan.chains[where]
    collector = _Collector(chain, policy.order_source, plan.cases.get(where, ()))
    collector.rules += _unfit(entry, policy)
    _run(entry, plan, where, collector, args, kwargs, pretended)
    breakers = entry.dispatcher.breakers if policy.falls_back and pretended is None else None
    return _decision(entry, collector, where, bound.arguments, assumed, breakers)


# in eager, from a frame that Dynamo gave up on, it would trace all of this
never_a_frame(explain_entry, callees=True)


def _baseline(entry: Entry, arguments: dict[str, Any]) -> Decision:
    """Nothing is dispatched: the undecorated function runs, whatever it is given."""
    entry.dispatcher.discovery.load(entry.operation)
    variable = entry.dispatcher.environment.name('DISABLE_BACKEND_DISPATCH')
    out = 'excluded', f'{variable} was set at import, so that nothing is dispatched', variable
    members = sorted(entry.members(), key=lambda member: member.backend.kind != 'default')
    chain = [Candidate(member, None if member.backend.kind == 'default' else out) for member in members]
    collector = _Collector(chain, variable)
    collector.accept(0)
    return _decision(entry, collector, ANY, arguments, set())


def _run(
    entry: Entry, plan: Any, platform: str, collector: _Collector, args: Any, kwargs: Any, pretended: str | None
) -> None:
    generator = Explain(entry.signature, plan, 'e')
    generator.only = platform
    if pretended not in (None, NO_TENSOR):  # fake tensors may have to be on another device than the one they stand for
        generator.device_type = 'cuda' if pretended == 'rocm' else pretended
    source = source_of(generator, entry.name, check_source(entry, plan.policy), first='_d_c')
    namespace = {**entry._namespace, **generator.w.bindings, '_d_refusal': partial(_refusal, entry)}
    if pretended is not None:
        namespace['_d_platform'] = partial(_platform_if, pretended)
        namespace['_d_refusal'] = lambda backend: None  # what failed, failed on this machine
    made: dict[str, Any] = {}
    exec(compile(source, f'<fla dispatch {entry.key} explain>', 'exec'), namespace, made)
    function: types.FunctionType = made[entry.name]
    positional, function.__kwdefaults__ = entry.signature.defaults()
    function.__defaults__ = positional
    function(collector, *args, **kwargs)


def _refusal(entry: Entry, backend: str) -> str | None:
    return entry.dispatcher.breakers.of(entry.key, backend).refusal()


def _platform_if(pretended: str, value: Any) -> str:
    """The platform of a value where fake tensors stand for another platform's."""
    if isinstance(value, torch.Tensor) and value.device.type == _stand_in(pretended):
        return pretended
    return tensors.platform_of(value)


def _platform_of_call(entry: Entry, arguments: dict[str, Any]) -> str:
    values = [arguments.get(name) for name in entry.signature.tensors]
    return tensors.platform_of(tensors.first_tensor(values))


def _decision(
    entry: Entry,
    collector: _Collector,
    platform: str,
    arguments: dict[str, Any],
    assumed: set[int],
    breakers: Breakers | None = None,
) -> Decision:
    reports = []
    chain, order = collector.chain, collector.order
    for place, c in enumerate(chain):
        backend = c.member.backend
        verdict, reason, source = c.out or collector.verdicts.get(place, ('rejected', 'not reached', 'order'))
        if place == collector.winner:
            verdict, source = 'chosen', order
            reason = None
        notes = []
        if not backend.verified:
            notes.append('unverified: never run against its real package')
        if c.member.untraceable and verdict in _CAN_RUN:
            notes.append(f'skipped in compiled code: {c.member.untraceable}')
        if id(backend) in assumed:
            notes.append('assumed to be installed')
        circuit = breakers.of(entry.key, c.member.name).note() if breakers and verdict in _CAN_RUN else None
        if circuit is not None:
            notes.append(circuit)
        if c.boosts:
            notes.append(f'priority {", ".join(c.boosts)}')
        if c.overridden:
            notes.append(f'forced by {order} although {c.overridden}')
        if verdict in _CAN_RUN:
            notes.extend(backend.explain_notes(entry.name, arguments))
        kind = backend.kind if c.member.implementation is not None else 'vendor'
        reports.append(
            CandidateReport(
                c.member.name,
                backend.impl_id,
                kind,
                verdict,
                None if verdict in ('chosen', 'eligible') else format_reason(reason),
                source,
                c.member.priority,
                tuple(notes),
            )
        )
    winner = chain[collector.winner].member if collector.winner is not None else None
    return Decision(
        entry.key,
        winner.name if winner else None,
        collector.error if winner is None else None,
        tuple(reports),
        order,
        platform,
        {name: describe_argument(value) for name, value in arguments.items()},
        winner,
        tuple(collector.rules),
    )


def describe_argument(value: Any) -> str:
    """A value in a few words: a tensor's dtype, shape and device."""
    if isinstance(value, torch.Tensor):
        grad = ', requires grad' if value.requires_grad else ''
        try:
            shape = str(list(value.shape))
        except RuntimeError:  # a nested tensor has none
            shape = '[nested]'
        return f'{str(value.dtype).removeprefix("torch.")}{shape} on {value.device}{grad}'
    if isinstance(value, (list, tuple)):
        inner = ', '.join(describe_argument(item) for item in value[:4])
        return f'{type(value).__name__}({inner}{", …" if len(value) > 4 else ""})'
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:57]}…'


# -- another platform -----------------------------------------------------------------------------------------------------


def _device_named(name: str | torch.device) -> Device:
    word = str(name).strip().casefold().partition(':')[0]
    if word in KNOWN_DEVICES:
        return KNOWN_DEVICES[word]
    if word in PLATFORMS:
        return Device(word)
    raise unknown_name('platform', str(name), {*KNOWN_DEVICES, *PLATFORMS})


def _facts_elsewhere(here: Facts, device: Device, assumed: set[int]) -> Facts:
    """The facts of a machine with one such device, on which every package is installed."""

    def package(backend: BaseBackend) -> Verdict:
        verdict = here.package(backend)
        if not verdict[0]:
            assumed.add(id(backend))
        return True, None

    return Facts(package, lambda backend, where: capability_verdict(backend, where), lambda _: (device,), here.gate)


def _stand_in(platform: str) -> str:
    """The device type of a fake tensor that stands for one on a platform. Only torch_npu has a device for NPUs, and where
    there is a GPU of one make, torch makes no fake tensors for another."""
    others = {'xpu': torch.cuda, 'cuda': torch.xpu}
    kind = {'rocm': 'cuda', 'npu': 'npu' if hasattr(torch, 'npu') else 'meta', NO_TENSOR: 'cpu'}.get(platform, platform)
    return 'meta' if kind in others and others[kind].is_available() else kind


def _as_if_on(bound: inspect.BoundArguments, platform: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every tensor replaced by a fake one on that platform. Arguments named `…_cpu` stay on the host."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    kind = _stand_in(platform)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=kind)
            return made.requires_grad_(tensor.requires_grad)

    moved: Callable[[Any], Any] = lambda value: tree_map_only(torch.Tensor, fake, value)  # noqa: E731
    for name, value in bound.arguments.items():
        if not name.endswith('_cpu'):
            bound.arguments[name] = moved(value)
    return bound.args, bound.kwargs


def explain(
    function: Callable[..., Any], /, *args: Any, platform: str | torch.device | None = None, **kwargs: Any
) -> Decision:
    """What the call `function(*args, **kwargs)` would run and why, without running it.

    Args:
        function: a dispatched function.
        *args, **kwargs: the call. Meta and fake tensors serve as well as real ones.
        platform: answer for other hardware: a platform ('cuda', 'rocm', …) or a device ('h100', 'mi300x', …). Packages that
            are missing here are assumed to be installed there, and marked so.

    Returns:
        A `Decision`: the winner, and every candidate with its verdict, reason and who says so.

    Raises:
        TypeError: if `function` is not dispatched, or the arguments do not fit it.
        Whatever the operation's own check raises for a bad call.
    """
    from fla.backends.observe.describe import entry_of

    entry = entry_of(function)
    if inspect.ismethod(function):
        args = (function.__self__, *args)
    if 'platform' in entry.signature.names:
        # the call's own argument; such a function cannot be explained for other hardware
        kwargs, platform = ({**kwargs, 'platform': platform} if platform is not None else kwargs), None
    return explain_entry(entry, args, kwargs, platform)
