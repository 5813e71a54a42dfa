"""The ordered candidates of one function under one policy: a pure function of what is passed in.

A plan is data. `codegen` turns it into the code of a call and, from the same data, into the code of `explain`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fla.backends.backend.availability import capability_verdict
from fla.backends.backend.base import DEFAULT_PRIORITY, REFERENCE_PRIORITY, BaseBackend, Reason, Verdict, overrides
from fla.backends.core.signature import EMPTY, Callee, Signature
from fla.backends.core.tensors import ANY, NO_TENSOR
from fla.backends.policy.policy import arrange, matches
from fla.backends.policy.precedence import Boost, Conditional, Directive, ResolvedPolicy
from fla.backends.policy.toggles import Gate
from fla.utils.devices import Device


@dataclass(frozen=True)
class Test:
    """One generated test: a source expression that is true where the candidate cannot serve the call.

    `values` is source of the values that `reason` (a template) needs, evaluated only by those who show reasons; without a
    template it is the whole reason. `unavailable` tells a device that will not do from a call that will not do.
    """

    rejects: str
    reason: str
    values: str = ''
    bindings: Mapping[str, Any] = field(default_factory=dict)
    unavailable: bool = False

    @property
    def reason_source(self) -> str:
        """Source of the reason as a verifier would give it."""
        if not self.reason:
            return self.values
        return f'({self.reason!r}, {self.values})' if self.values else repr(self.reason)


@dataclass(frozen=True)
class Member:
    """A backend as a function sees it, before any policy and platform: its methods and how they are called."""

    backend: BaseBackend
    implementation: Callable[..., Any] | None
    call: Callee | None
    verifier: Callable[..., Any] | None = None
    verifier_call: Callee | None = None
    prefers: Callable[..., Any] | None = None
    prefers_call: Callee | None = None
    unusable: str | None = None
    untraceable: str | None = None
    origin: str = ''

    @property
    def name(self) -> str:
        """The name policy tokens use."""
        return self.backend.backend_type

    @property
    def priority(self) -> float:
        """Lower is asked earlier. A reference stands last unless its class says otherwise."""
        backend = self.backend
        if backend.kind == 'reference' and backend.priority == DEFAULT_PRIORITY:
            return REFERENCE_PRIORITY
        return backend.priority


@dataclass(frozen=True)
class Candidate:
    """A member in its place in the order, on one platform. `out` is why it cannot be reached at all: (verdict, reason,
    source); it is then shown by `explain` and absent from the code of a call. `overridden` is the filter or toggle that a
    forced choice ignores; `boosts` are what was added to its priority, and by whom."""

    member: Member
    out: tuple[str, Reason, str] | None = None
    gate: Gate | None = None
    tests: tuple[Test, ...] = ()
    wished: bool = False
    asks_preference: bool = True
    overridden: str = ''
    boosts: tuple[str, ...] = ()

    @property
    def accepts_always(self) -> bool:
        """Whether nothing after this candidate can ever be reached."""
        return not (self.out or self.gate or self.tests or self.member.verifier or self.member.untraceable or self.demotable)

    @property
    def demotable(self) -> bool:
        """Whether its own `<fn>_prefers` may put it behind the others."""
        return self.asks_preference and self.member.prefers is not None


@dataclass(frozen=True)
class Case:
    """The order of the calls that a condition holds for."""

    conditional: Conditional
    chain: tuple[Candidate, ...]


@dataclass(frozen=True)
class Plan:
    """What a function does on each platform seen so far.

    Attributes:
        chains: platform → every candidate, in order, those that are out included.
        cases: platform → what is asked first: where a condition holds, its chain is the call's. It has the same candidates
            as the platform's chain.
        by_platform: whether calls must be told apart by platform; if not, the one chain stands under `ANY`.
    """

    chains: Mapping[str, tuple[Candidate, ...]]
    by_platform: bool
    policy: ResolvedPolicy
    cases: Mapping[str, tuple[Case, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What planning asks of the world; tests and `explain(platform=…)` put another one in its place."""

    package: Callable[[BaseBackend], Verdict]
    device: Callable[[BaseBackend, Device], Verdict]
    devices: Callable[[str], Sequence[Device]]
    gate: Callable[[BaseBackend], Gate]


def build(
    signature: Signature, members: Sequence[Member], policy: ResolvedPolicy, platforms: Sequence[str], facts: Facts
) -> Plan:
    """The plan of a function whose members are given in order of priority."""
    # what no package can change is decided before anything asks for a platform
    alive = [m for m in members if m.unusable is None and facts.package(m.backend)[0]]
    by_platform = any(m.backend.kind == 'reference' or _depends_on_device(m.backend) for m in alive)
    names = list(platforms) if by_platform else [ANY]
    cases = [case for case in policy.cases if unfit(case, signature, members) is None]
    return Plan(
        {name: _chain(signature, members, policy, name, facts) for name in names},
        by_platform,
        policy,
        {name: tuple(Case(c, _chain(signature, members, policy, name, facts, c)) for c in cases) for name in names if cases},
    )


def unfit(case: Conditional, signature: Signature, members: Sequence[Member]) -> str | None:
    """Why an order that is for many functions is not for this one; None if it is."""
    if not any(matches(token, member.backend) for token in case.order.tokens for member in members):
        return f'no candidate is {" or ".join(case.order.tokens)}'
    problems = case.condition.problems(signature) if case.condition is not None else []
    return '; '.join(problems) or None


def _depends_on_device(backend: BaseBackend) -> bool:
    return bool(backend.devices) or backend.min_capability is not None or overrides(backend, 'probe')


def _chain(
    signature: Signature,
    members: Sequence[Member],
    policy: ResolvedPolicy,
    platform: str,
    facts: Facts,
    case: Conditional | None = None,
) -> tuple[Candidate, ...]:
    by_backend = {id(m.backend): m for m in members}
    ordered = [m.backend for m in sorted(members, key=lambda m: m.priority + sum(b.amount for b in _boosts(policy, m)))]
    rest: list[BaseBackend] = []
    verb = policy.use or policy.only
    if verb is not None:
        chosen = arrange(ordered, verb.tokens)
        rest = [b for b in ordered if b not in chosen]
        ordered = chosen
    elif policy.prefer is not None:
        chosen = arrange(ordered, policy.prefer.tokens)
        ordered = chosen + [b for b in ordered if b not in chosen]
    if case is not None:
        chosen = arrange(ordered, case.order.tokens)
        ordered = chosen + [b for b in ordered if b not in chosen]
        # a rule is a choice, not a wish: nobody is warned where it falls through, and it takes the place of a preference
        policy = replace(policy, prefer=None)
    if platform == 'meta' and policy.use is None and policy.only is None:
        # nothing can run on meta tensors but what is plain PyTorch: the reference first
        ordered.sort(key=lambda backend: backend.kind != 'reference')
    chain = [_candidate(signature, by_backend[id(b)], policy, platform, facts) for b in ordered]
    for backend in rest:
        assert verb is not None
        reason = f'not listed: only {", ".join(verb.tokens) or "nothing"}'
        chain.append(Candidate(by_backend[id(backend)], out=('excluded', reason, verb.source)))
    return tuple(chain)


def _boosts(policy: ResolvedPolicy, member: Member) -> list[Boost]:
    return [boost for boost in policy.boosts if matches(boost.token, member.backend)]


def _candidate(signature: Signature, member: Member, policy: ResolvedPolicy, platform: str, facts: Facts) -> Candidate:
    backend = member.backend
    wished = policy.prefer is not None and _is_named(policy.prefer, backend)
    wished = wished or (policy.only is not None and _is_named(policy.only, backend))
    out, tests = _availability(signature, member, platform, facts, lambda: _is_off(policy, backend, facts))
    gate = None
    overridden = _overridden(policy, backend, facts) if out is None and policy.use is not None else ''
    if out is None and policy.use is None:
        out = _filtered(policy, backend)
        if out is None:
            gate = facts.gate(backend)
            if not (gate.variables or gate.ask) or policy.env is not None:
                out = None if gate.is_on else ('disabled', gate.says_off, gate.source)
                gate = None
            elif not (gate.is_on or gate.ask) and overrides(backend, 'probe'):
                # not probed while it is off: whatever switches it on makes the function plan again
                gate = replace(gate, on=())
    if out is None:
        tests += (*_declared_tests(signature, backend), *_missing_tests(signature, member))
    boosts = tuple(f'{b.amount:+g} by {b.source}' for b in _boosts(policy, member))
    return Candidate(member, out, gate, tests, wished, policy.use is None, overridden, boosts)


def _is_off(policy: ResolvedPolicy, backend: BaseBackend, facts: Facts) -> bool:
    """Whether no call can reach the backend before somebody changes the policy or its toggle."""
    if policy.use is not None:
        return False
    if _filtered(policy, backend) is not None:
        return True
    gate = facts.gate(backend)
    return not gate.is_on and gate.ask is None


def _overridden(policy: ResolvedPolicy, backend: BaseBackend, facts: Facts) -> str:
    """What would keep a backend out if it were not forced."""
    filtered = _filtered(policy, backend)
    if filtered is not None:
        return str(filtered[1])
    gate = facts.gate(backend)
    return '' if gate.is_on else gate.says_off


def _is_named(verb: Directive, backend: BaseBackend) -> bool:
    """Whether a policy asks for this very backend, not only for its kind."""
    names = (backend.backend_type.casefold(), f'impl:{backend.impl_id.casefold()}')
    return any(token in names and token not in ('default', 'reference') for token in verb.tokens)


def _filtered(policy: ResolvedPolicy, backend: BaseBackend) -> tuple[str, Reason, str] | None:
    for verb in policy.deny:
        if any(matches(token, backend) for token in verb.tokens):
            return 'excluded', f'denied by {verb.source}', verb.source
    for verb in policy.allow:
        if not any(matches(token, backend) for token in verb.tokens):
            return (
                'excluded',
                f'not on the allow list of {verb.source}: {", ".join(verb.tokens) or "nothing"}',
                verb.source,
            )
    return None


def _availability(
    signature: Signature, member: Member, platform: str, facts: Facts, is_off: Callable[[], bool]
) -> tuple[tuple[str, Reason, str] | None, tuple[Test, ...]]:
    """Why a member is out on this platform, or the tests that tell this platform's devices apart. What is off is not
    probed, which may import a package and compile for minutes."""
    backend = member.backend
    if member.unusable is not None:
        return ('unavailable', member.unusable, member.origin), ()
    usable, reason = facts.package(backend)
    if not usable:
        return ('unavailable', reason, 'availability'), ()
    if platform == ANY:
        return None, ()
    first = signature.tensors[0] if signature.tensors else None
    allowed = backend.devices if not isinstance(backend.devices, Mapping) else backend.devices.get(first or '')
    if platform == 'meta' and backend.kind in ('vendor', 'native') and 'meta' not in (allowed or ()):
        return ('unavailable', 'meta tensors have no data to run on', 'devices'), ()
    if platform == NO_TENSOR:
        return (('unavailable', 'the call has no tensor argument', 'devices'), ()) if allowed else (None, ())
    if allowed and platform not in allowed:
        return ('unavailable', f'runs on {", ".join(allowed)}; {first!r} is on {platform}', 'devices'), ()
    if not _depends_on_device(backend) or platform == 'meta':
        return None, ()
    ask = capability_verdict if overrides(backend, 'probe') and is_off() else facts.device
    return _per_device(backend, platform, facts, ask)


def _per_device(
    backend: BaseBackend, platform: str, facts: Facts, ask: Callable[[BaseBackend, Device], Verdict]
) -> tuple[tuple[str, Reason, str] | None, tuple[Test, ...]]:
    devices = facts.devices(platform) or (Device(platform),)
    verdicts = {device.index: ask(backend, device) for device in devices}
    bad = {index: reason for index, (usable, reason) in verdicts.items() if not usable}
    if not bad:
        return None, ()
    first = next(iter(bad.values()))
    if len(bad) == len(verdicts) and all(reason == first for reason in bad.values()):
        return ('unavailable', first, 'availability'), ()
    name = f'_d_bad_{backend.backend_type}_{platform}'
    name = ''.join(c if c.isascii() and c.isalnum() else '_' for c in name)
    reads = f'{name}[_d_x.get_device()]'
    return None, (Test(f'_d_x.get_device() in {name}', '', reads, {name: bad}, unavailable=True),)


def _declared_tests(signature: Signature, backend: BaseBackend) -> list[Test]:
    """Tests for the facts a backend declares: other devices, dtypes, grad."""
    tests = []
    if backend.grad == 'none' and (signature.tensors or signature.tensor_groups or signature.unknown):
        tests += _grad_tests(signature)
    for name, allowed in _per_parameter(signature, backend.dtypes).items():
        binding = _binding('dtypes', backend, name)
        words = ', '.join(map(str, allowed))
        read = name if not signature.is_optional_tensor(name) else f'_d_getattr({name}, "dtype", None)'
        read = f'{name}.dtype' if read == name else read
        absent = f'{name} is not None and ' if read != f'{name}.dtype' else ''
        reason = f'dtype of {name!r} must be {words}, got %s'
        tests.append(Test(f'{absent}{read} not in {binding}', reason, read, {binding: tuple(allowed)}))
    if isinstance(backend.devices, Mapping):
        for name, platforms in backend.devices.items():
            if name not in signature.names or name == (signature.tensors or (None,))[0]:
                continue
            binding = _binding('devices', backend, name)
            reason = f'{name!r} must be on {", ".join(platforms)}, is on %s'
            tests.append(
                Test(
                    f'{name} is not None and _d_platform({name}) not in {binding}',
                    reason,
                    f'_d_platform({name})',
                    {binding: tuple(platforms)},
                )
            )
    return tests


def _binding(what: str, backend: BaseBackend, parameter: str) -> str:
    text = f'_d_{what}_{backend.backend_type}_{parameter}'
    return ''.join(c if c.isascii() and c.isalnum() else '_' for c in text)


def _per_parameter(
    signature: Signature, declared: Sequence[torch.dtype] | Mapping[str, Sequence[torch.dtype]] | None
) -> Mapping[str, Sequence[torch.dtype]]:
    if declared is None:
        return {}
    if isinstance(declared, Mapping):
        return {name: dtypes for name, dtypes in declared.items() if name in signature.names}
    return {signature.tensors[0]: declared} if signature.tensors else {}


def _grad_tests(signature: Signature) -> list[Test]:
    """An inference-only backend must not serve a call whose result is differentiated, in reverse or forward mode."""
    needs = []
    for name in signature.tensors:
        if not signature.annotated:
            needs.append(f'_d_getattr({name}, "requires_grad", False)')
        elif signature.is_optional_tensor(name):
            # `Tensor | float` may be a float
            needs.append(f'({name} is not None and _d_getattr({name}, "requires_grad", False))')
        else:
            needs.append(f'{name}.requires_grad')
    needs += [f'_d_any_grad({name})' for name in (*signature.tensor_groups, *signature.unknown)]
    backward = f'_d_grad_enabled() and ({" or ".join(needs)})'
    return [
        Test(backward, 'inference only, and a tensor argument requires grad'),
        Test('_d_forward_ad._current_level >= 0', 'inference only, and forward-mode AD is active'),
        # inside torch.func.grad Dynamo (2.13) says that an argument does not require grad
        Test('_d_in_func()', 'inference only, and a torch.func transform is active'),
    ]


def _missing_tests(signature: Signature, member: Member) -> list[Test]:
    """A parameter that the method does not name must hold its default."""
    tests = []
    for name in member.call.missing if member.call else ():
        default = signature.default(name)
        reason = f'argument {name} is not supported'
        if default is EMPTY:
            tests.append(Test('True', f'{reason}, and it is required'))
        elif default is None:
            tests.append(Test(f'{name} is not None', reason))
        else:
            binding = f'_d_default_{name}'
            fast = f'{name} is not {default!r} and ' if isinstance(default, bool) else ''
            tests.append(Test(f'{fast}not _d_same({name}, {binding})', reason, bindings={binding: default}))
    for rest, prefix in ((signature.var_positional, '*'), (signature.var_keyword, '**')):
        if rest and member.call and f'{prefix}{rest}' not in member.call.arguments:
            tests.append(Test(rest, f'arguments {prefix}{rest} are not supported'))
    return tests
