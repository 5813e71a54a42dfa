"""Why a call would run what it runs.

`explain` runs the tests of a call, written by the same generator from the same plan, and notes each outcome. It runs no
kernel, so it also answers for meta and fake tensors, and for hardware this machine does not have.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fla.backends.backend.availability import capability_verdict
from fla.backends.backend.base import BaseBackend, Reason, Verdict, format_reason
from fla.backends.codegen.explain import Explain
from fla.backends.codegen.generator import source_of
from fla.backends.core import tensors
from fla.backends.core.dynamo import never_a_frame
from fla.backends.core.errors import unknown_name
from fla.backends.core.tensors import ANY, NO_TENSOR
from fla.backends.fallback.breaker import Breakers
from fla.backends.plan.decision import CAN_RUN, CandidateReport, Decision
from fla.backends.plan.plan import Candidate, Case, Facts, build, unfit
from fla.backends.policy.precedence import Conditional, ResolvedPolicy, State
from fla.backends.runtime.dispatcher import LiveFunction, entry_of
from fla.backends.runtime.function import check_source
from fla.utils.devices import KNOWN_DEVICES, PLATFORMS, Device


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


def _unfit(entry: LiveFunction, policy: ResolvedPolicy) -> list[str]:
    """The rules that are not for this function, which has no such candidate or parameter."""
    problems = [(case, unfit(case, entry.spec.signature, entry.members())) for case in policy.cases]
    return [f'{_words(case)}: {problem}' for case, problem in problems if problem is not None]


def decide(
    entry: LiveFunction, args: tuple[Any, ...], kwargs: dict[str, Any], platform: Any, state: State | None = None
) -> Decision:
    """`explain` for an entry point, under another state than the one in force where one is given."""
    bound = entry.spec.signature.signature.bind(*args, **kwargs)
    if entry.dispatcher.baseline:
        return _baseline(entry, bound.arguments)
    entry.dispatcher.discovery.load(entry.spec.operation)
    entry.dispatcher.policies.check_environment_once()
    policy = entry.policy(entry.state() if state is None else state)
    facts = entry.facts(policy)
    assumed: set[int] = set()
    if platform is None:
        where = _platform_of_call(entry, bound.arguments)
    else:
        device = _device_named(platform)
        where = device.platform
        facts = _facts_elsewhere(facts, device, assumed)
        args, kwargs = _as_if_on(bound, where)
    pretended = None if platform is None else where
    plan = build(entry.spec.signature, entry.members(), policy, [where], facts)
    where = where if plan.by_platform else ANY
    chain = plan.chains[where]
    collector = _Collector(chain, policy.order_source, plan.cases.get(where, ()))
    collector.rules += _unfit(entry, policy)
    _run(entry, plan, where, collector, args, kwargs, pretended)
    breakers = entry.dispatcher.breakers if policy.falls_back and pretended is None else None
    return _decision(entry, collector, where, bound.arguments, assumed, breakers)


# in eager, from a frame that Dynamo gave up on, it would trace all of this
never_a_frame(decide, callees=True)


def _baseline(entry: LiveFunction, arguments: dict[str, Any]) -> Decision:
    """Nothing is dispatched: the undecorated function runs, whatever it is given."""
    entry.dispatcher.discovery.load(entry.spec.operation)
    variable = entry.dispatcher.environment.name('DISABLE_BACKEND_DISPATCH')
    out = 'excluded', f'{variable} was set at import, so that nothing is dispatched', variable
    members = sorted(entry.members(), key=lambda member: member.backend.kind != 'default')
    chain = [Candidate(member, None if member.backend.kind == 'default' else out) for member in members]
    collector = _Collector(chain, variable)
    collector.accept(0)
    return _decision(entry, collector, ANY, arguments, set())


def _run(
    entry: LiveFunction, plan: Any, platform: str, collector: _Collector, args: Any, kwargs: Any, pretended: str | None
) -> None:
    generator = Explain(entry.spec.signature, plan, 'e')
    generator.only = platform
    if pretended not in (None, NO_TENSOR):  # fake tensors may have to be on another device than the one they stand for
        generator.device_type = 'cuda' if pretended == 'rocm' else pretended
    source = source_of(generator, entry.spec.name, check_source(entry.spec, plan.policy), first='_d_c')
    namespace = {**entry.globals, **generator.w.bindings, '_d_refusal': partial(_refusal, entry)}
    if pretended is not None:
        namespace['_d_platform'] = partial(_platform_if, pretended)
        namespace['_d_refusal'] = lambda backend: None  # what failed, failed on this machine
    made: dict[str, Any] = {}
    exec(compile(source, f'<fla dispatch {entry.spec.key} explain>', 'exec'), namespace, made)
    function: types.FunctionType = made[entry.spec.name]
    positional, function.__kwdefaults__ = entry.spec.signature.defaults()
    function.__defaults__ = positional
    function(collector, *args, **kwargs)


def _refusal(entry: LiveFunction, backend: str) -> str | None:
    return entry.dispatcher.breakers.of(entry.spec.key, backend).refusal()


def _platform_if(pretended: str, value: Any) -> str:
    """The platform of a value where fake tensors stand for another platform's."""
    if isinstance(value, torch.Tensor) and value.device.type == _stand_in(pretended):
        return pretended
    return tensors.platform_of(value)


def _platform_of_call(entry: LiveFunction, arguments: dict[str, Any]) -> str:
    values = [arguments.get(name) for name in entry.spec.signature.tensors]
    return tensors.platform_of(tensors.first_tensor(values))


def _decision(
    entry: LiveFunction,
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
        if c.member.untraceable and verdict in CAN_RUN:
            notes.append(f'skipped in compiled code: {c.member.untraceable}')
        if id(backend) in assumed:
            notes.append('assumed to be installed')
        circuit = breakers.of(entry.spec.key, c.member.name).note() if breakers and verdict in CAN_RUN else None
        if circuit is not None:
            notes.append(circuit)
        if c.boosts:
            notes.append(f'priority {", ".join(c.boosts)}')
        if c.overridden:
            notes.append(f'forced by {order} although {c.overridden}')
        if verdict in CAN_RUN:
            notes.extend(backend.explain_notes(entry.spec.name, arguments))
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
        entry.spec.key,
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
    entry = entry_of(function)
    if inspect.ismethod(function):
        args = (function.__self__, *args)
    if 'platform' in entry.spec.signature.names:
        # the call's own argument; such a function cannot be explained for other hardware
        kwargs, platform = ({**kwargs, 'platform': platform} if platform is not None else kwargs), None
    return decide(entry, args, kwargs, platform)
