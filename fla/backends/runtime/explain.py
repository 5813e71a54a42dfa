"""Which backend a call would run, and why.

`explain` generates the tests of a call from the plan that a call would use, and collects each outcome. It runs no kernel, so
it also answers for meta and fake tensors, and for other hardware.
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
from fla.backends.core import tensors
from fla.backends.core.dynamo import never_a_frame
from fla.backends.core.errors import unknown_name
from fla.backends.core.tensors import ANY, NO_TENSOR
from fla.backends.plan.decision import CAN_RUN, CandidateReport, Decision
from fla.backends.plan.plan import Candidate, Case, Facts, Plan, build, unfit
from fla.backends.policy.precedence import Conditional, State
from fla.backends.runtime.dispatcher import LiveFunction, entry_of
from fla.backends.runtime.function import check_source
from fla.utils.devices import KNOWN_DEVICES, PLATFORMS, Device


class _Collector:
    """Collects the outcomes of one explained call. The first event that ends a call decides the result.

    The code written by `codegen.explain` calls its methods.
    """

    def __init__(self, chain: Sequence[Candidate], order: str, cases: Sequence[Case] = ()) -> None:
        self.chain, self.order, self.cases = chain, order, cases
        self.rules: list[str] = []
        self.verdicts: dict[int, tuple[str, Reason, str]] = {}
        self.winner: int | None = None
        self.error: str | None = None

    def case(self, number: int) -> None:
        """The call's order is that of a case."""
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

    def win(self, place: int) -> None:
        if self.winner is None and self.error is None:
            self.winner = place

    def stop(self, text: str) -> None:
        if self.winner is None and self.error is None:
            self.error = text

    def accept(self, place: int) -> None:
        source = 'verifier' if self.chain[place].member.verifier else 'accepts every call'
        self.verdicts[place] = 'eligible', None, source
        self.win(place)

    def reject(self, place: int, reason: Reason, source: str) -> None:
        verdict = {'availability': 'unavailable', 'breaker': 'open'}.get(source, 'rejected')
        self.verdicts[place] = verdict, reason, source

    def off(self, place: int) -> None:
        gate = self.chain[place].gate
        assert gate is not None
        self.verdicts[place] = 'disabled', gate.says_off, gate.source

    def demote(self, place: int, reason: Reason) -> None:
        self.verdicts[place] = 'demoted', reason, 'prefers'

    def broken(self, place: int, text: str, raised: bool) -> None:
        error = sys.exc_info()[1]
        detail = f': {type(error).__name__}: {error}' if raised and error is not None else ''
        self.verdicts[place] = 'bug', f'{text}{detail}', 'backend'

    def offered(self, cls: type) -> None:
        self.stop(f'the call is offered to {cls.__qualname__}.__torch_function__, which decides')


def _words(case: Conditional) -> str:
    when = f' when {case.condition.text}' if case.condition else ''
    return f'{case.order.source}{when} → {", ".join(case.order.tokens)}'


def decide(
    entry: LiveFunction, args: tuple[Any, ...], kwargs: dict[str, Any], platform: Any, state: State | None = None
) -> Decision:
    """`explain` for an entry point. `state` replaces the state in force."""
    signature, dispatcher = entry.spec.signature, entry.dispatcher
    bound = signature.signature.bind(*args, **kwargs)
    dispatcher.discovery.load(entry.spec.operation)
    if dispatcher.baseline:
        return _baseline(entry, bound.arguments)
    dispatcher.policies.check_environment_once()
    policy = entry.policy(entry.state() if state is None else state)
    members, facts = entry.members(), entry.facts(policy)
    assumed: set[int] = set()
    pretended = None
    if platform is None:
        where = tensors.platform_of(tensors.first_tensor([bound.arguments.get(name) for name in signature.tensors]))
    else:
        device = _device_named(platform)
        where = pretended = device.platform
        facts = _facts_elsewhere(facts, device, assumed)
        args, kwargs = _as_if_on(bound, where)
    plan = build(signature, members, policy, [where], facts)
    where = where if plan.by_platform else ANY
    collector = _Collector(plan.chains[where], policy.order_source, plan.cases.get(where, ()))
    problems = [(case, unfit(case, signature, members)) for case in policy.cases]
    collector.rules += [f'{_words(case)}: {problem}' for case, problem in problems if problem is not None]
    _run(entry, plan, where, collector, args, kwargs, pretended)
    return _decision(entry, collector, where, bound.arguments, assumed, breakers=policy.falls_back and pretended is None)


# in eager, from a frame that Dynamo gave up on, it would trace all of this
never_a_frame(decide, callees=True)


def _baseline(entry: LiveFunction, arguments: dict[str, Any]) -> Decision:
    """The undecorated function runs for every call."""
    variable = entry.dispatcher.environment.name('DISABLE_BACKEND_DISPATCH')
    out = 'excluded', f'{variable} was set at import, so that nothing is dispatched', variable
    members = sorted(entry.members(), key=lambda member: member.backend.kind != 'default')
    collector = _Collector([Candidate(m, None if m.backend.kind == 'default' else out) for m in members], variable)
    collector.accept(0)
    return _decision(entry, collector, ANY, arguments, set())


def _run(
    entry: LiveFunction, plan: Plan, platform: str, collector: _Collector, args: Any, kwargs: Any, pretended: str | None
) -> None:
    spec, breakers = entry.spec, entry.dispatcher.breakers
    generator = Explain(spec.signature, plan, 'e')
    generator.only = platform
    if pretended not in (None, NO_TENSOR):  # fake tensors may have to be on another device than the one they stand for
        generator.device_type = 'cuda' if pretended == 'rocm' else pretended
    source = generator.source(spec.name, check_source(spec, plan.policy), first='_d_c')
    namespace = {**entry.globals, **generator.w.bindings}
    namespace['_d_refusal'] = lambda backend: breakers.of(spec.key, backend).refusal()
    if pretended is not None:
        namespace['_d_platform'] = partial(_platform_if, pretended)
        namespace['_d_refusal'] = lambda backend: None  # breakers describe this machine
    made: dict[str, Any] = {}
    exec(compile(source, f'<fla dispatch {spec.key} explain>', 'exec'), namespace, made)
    function: types.FunctionType = made[spec.name]
    function.__defaults__, function.__kwdefaults__ = spec.signature.defaults()
    function(collector, *args, **kwargs)


def _platform_if(pretended: str, value: Any) -> str:
    """The platform of a value where fake tensors stand for another platform's."""
    if isinstance(value, torch.Tensor) and value.device.type == _stand_in(pretended):
        return pretended
    return tensors.platform_of(value)


def _decision(
    entry: LiveFunction,
    collector: _Collector,
    platform: str,
    arguments: dict[str, Any],
    assumed: set[int],
    *,
    breakers: bool = False,
) -> Decision:
    reports = []
    spec, chain, order = entry.spec, collector.chain, collector.order
    for place, c in enumerate(chain):
        backend = c.member.backend
        verdict, reason, source = c.out or collector.verdicts.get(place, ('rejected', 'not reached', 'order'))
        if place == collector.winner:
            verdict, source = 'chosen', order
        notes: list[str] = []
        if not backend.verified:
            notes.append('unverified: never run against its real package')
        if c.member.untraceable and verdict in CAN_RUN:
            notes.append(f'skipped in compiled code: {c.member.untraceable}')
        if id(backend) in assumed:
            notes.append('assumed to be installed')
        if breakers and verdict in CAN_RUN:
            notes += filter(None, [entry.dispatcher.breakers.of(spec.key, c.member.name).note()])
        if c.boosts:
            notes.append(f'priority {", ".join(c.boosts)}')
        if c.overridden:
            notes.append(f'forced by {order} although {c.overridden}')
        if verdict in CAN_RUN:
            notes += backend.explain_notes(spec.name, arguments)
        kind = backend.kind if c.member.implementation is not None else 'vendor'
        text = None if verdict in ('chosen', 'eligible') else format_reason(reason)
        reports.append(
            CandidateReport(c.member.name, backend.impl_id, kind, verdict, text, source, c.member.priority, tuple(notes))
        )
    winner = chain[collector.winner].member if collector.winner is not None else None
    return Decision(
        spec.key,
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
    """A short text: dtype, shape and device of a tensor, else a shortened `repr`."""
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
    """The facts of a machine with this device and every package installed."""

    def package(backend: BaseBackend) -> Verdict:
        verdict = here.package(backend)
        if not verdict[0]:
            assumed.add(id(backend))
        return True, None

    return Facts(package, capability_verdict, lambda _: (device,), here.gate)


def _stand_in(platform: str) -> str:
    """The device type of a fake tensor that stands for a platform's. NPU devices need torch_npu, and on a machine with one
    vendor's GPU, torch makes no fake tensors for another vendor's."""
    others = {'xpu': torch.cuda, 'cuda': torch.xpu}
    kind = {'rocm': 'cuda', 'npu': 'npu' if hasattr(torch, 'npu') else 'meta', NO_TENSOR: 'cpu'}.get(platform, platform)
    return 'meta' if kind in others and others[kind].is_available() else kind


def _as_if_on(bound: inspect.BoundArguments, platform: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with fake tensors on that platform. Arguments named `…_cpu` stay on the host."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    kind = _stand_in(platform)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=kind)
            return made.requires_grad_(tensor.requires_grad)

    for name, value in bound.arguments.items():
        if not name.endswith('_cpu'):
            bound.arguments[name] = tree_map_only(torch.Tensor, fake, value)
    return bound.args, bound.kwargs


def explain(
    function: Callable[..., Any], /, *args: Any, platform: str | torch.device | None = None, **kwargs: Any
) -> Decision:
    """Which backend the call `function(*args, **kwargs)` would run and why, without running it.

    Args:
        function: a dispatched function.
        *args, **kwargs: the call. Meta and fake tensors are accepted.
        platform: explain the call for other hardware: a platform ('cuda', 'rocm', …) or a device ('h100', 'mi300x', …).
            Packages that are missing here are assumed to be installed there, and marked so.

    Returns:
        A `Decision`: the winner, and every candidate with its verdict, its reason, and the source of the reason.

    Raises:
        TypeError: if `function` is not dispatched, or the arguments do not fit it.
        Exceptions of the operation's own check for a bad call.
    """
    entry = entry_of(function)
    if inspect.ismethod(function):
        args = (function.__self__, *args)
    if platform is not None and 'platform' in entry.spec.signature.names:
        # the call's own argument; such a function cannot be explained for other hardware
        kwargs, platform = {**kwargs, 'platform': platform}, None
    return decide(entry, args, kwargs, platform)
