"""The ordered candidates of one function under one policy: a pure function of its arguments.

A plan is data. `codegen` turns it into the code of a call, and into the code of `explain`.
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

# Why a candidate cannot be reached: (verdict, reason, source).
Out = tuple[str, Reason, str]


@dataclass(frozen=True)
class Test:
    """One generated test.

    Attributes:
        rejects: source of an expression that is true if the candidate cannot serve the call.
        reason: the reason, a template for `values`.
        values: source of the template's values, or of the whole reason if `reason` is empty. Evaluated only to show it.
        bindings: objects that the sources name.
        unavailable: the device is unsuitable, not the call.
    """

    rejects: str
    reason: str
    values: str = ''
    bindings: Mapping[str, Any] = field(default_factory=dict)
    unavailable: bool = False

    @property
    def reason_source(self) -> str:
        """Source of the reason, in the form that verifiers return."""
        if not self.reason:
            return self.values
        return f'({self.reason!r}, {self.values})' if self.values else repr(self.reason)


@dataclass(frozen=True)
class Member:
    """A backend of a function, independent of policy and platform: its methods and how they are called."""

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
        """The name in policy tokens."""
        return self.backend.backend_type

    @property
    def priority(self) -> float:
        """Lower is asked earlier. A reference is last unless its class declares a priority."""
        own, kind = self.backend.priority, self.backend.kind
        return REFERENCE_PRIORITY if kind == 'reference' and own == DEFAULT_PRIORITY else own


@dataclass(frozen=True)
class Candidate:
    """A member at its place in the order, on one platform.

    Attributes:
        out: (verdict, reason, source) if no call can reach it: `explain` shows it, and the code of a call leaves it out.
        wished: the policy names it; a warning says when it does not take a call.
        overridden: the filter or toggle that a forced choice ignores.
        boosts: additions to its priority, and their sources.
    """

    member: Member
    out: Out | None = None
    gate: Gate | None = None
    tests: tuple[Test, ...] = ()
    wished: bool = False
    asks_preference: bool = True
    overridden: str = ''
    boosts: tuple[str, ...] = ()

    @property
    def accepts_always(self) -> bool:
        """Whether no later candidate can be reached."""
        return not (self.out or self.gate or self.tests or self.member.verifier or self.member.untraceable or self.demotable)

    @property
    def demotable(self) -> bool:
        """Whether its `<fn>_prefers` may put it behind the others."""
        return self.asks_preference and self.member.prefers is not None


@dataclass(frozen=True)
class Case:
    """The order for calls that satisfy a condition."""

    conditional: Conditional
    chain: tuple[Candidate, ...]


@dataclass(frozen=True)
class Plan:
    """The candidates of a function on each platform of the calls so far.

    Attributes:
        chains: platform → every candidate in order, including those that are out.
        by_platform: whether chains depend on the platform; if not, the only chain has the key `ANY`.
        cases: platform → conditional orders, tested first. Each has the same candidates as the platform's chain.
    """

    chains: Mapping[str, tuple[Candidate, ...]]
    by_platform: bool
    policy: ResolvedPolicy
    cases: Mapping[str, tuple[Case, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """Facts about the machine. Tests and `explain(platform=…)` replace them."""

    package: Callable[[BaseBackend], Verdict]
    device: Callable[[BaseBackend, Device], Verdict]
    devices: Callable[[str], Sequence[Device]]
    gate: Callable[[BaseBackend], Gate]


def build(
    signature: Signature, members: Sequence[Member], policy: ResolvedPolicy, platforms: Sequence[str], facts: Facts
) -> Plan:
    """The plan of a function. `members` are sorted by priority."""
    # packages first: members without theirs must not make the plan depend on the platform
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
    """Why an order does not fit this function; None if it does."""
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
        ordered = _first(ordered, policy.prefer)
    if case is not None:
        ordered = _first(ordered, case.order)
        # a rule that falls through gives no warning, and it replaces a preference
        policy = replace(policy, prefer=None)
    if platform == 'meta' and verb is None:
        # the reference first: only plain PyTorch runs on meta tensors
        ordered.sort(key=lambda backend: backend.kind != 'reference')
    chain = [_candidate(signature, by_backend[id(b)], policy, platform, facts) for b in ordered]
    if verb is not None:
        out = 'excluded', f'not listed: only {", ".join(verb.tokens) or "nothing"}', verb.source
        chain += [Candidate(by_backend[id(b)], out=out) for b in rest]
    return tuple(chain)


def _first(ordered: list[BaseBackend], order: Directive) -> list[BaseBackend]:
    """The backends that an order names, then the others."""
    chosen = arrange(ordered, order.tokens)
    return chosen + [b for b in ordered if b not in chosen]


def _boosts(policy: ResolvedPolicy, member: Member) -> list[Boost]:
    return [boost for boost in policy.boosts if matches(boost.token, member.backend)]


def _candidate(signature: Signature, member: Member, policy: ResolvedPolicy, platform: str, facts: Facts) -> Candidate:
    backend = member.backend
    wished = any(order is not None and _is_named(order, backend) for order in (policy.prefer, policy.only))
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
                # off, so not probed yet: a value that switches it on makes the function plan again
                gate = replace(gate, on=())
    if out is None:
        tests += (*_declared_tests(signature, backend), *_missing_tests(signature, member))
    boosts = tuple(f'{b.amount:+g} by {b.source}' for b in _boosts(policy, member))
    return Candidate(member, out, gate, tests, wished, policy.use is None, overridden, boosts)


def _is_off(policy: ResolvedPolicy, backend: BaseBackend, facts: Facts) -> bool:
    """Whether the backend is unreachable until the policy or its toggle changes."""
    if policy.use is not None:
        return False
    if _filtered(policy, backend) is not None:
        return True
    gate = facts.gate(backend)
    return not gate.is_on and gate.ask is None


def _overridden(policy: ResolvedPolicy, backend: BaseBackend, facts: Facts) -> str:
    """The filter or toggle that would exclude a backend if it were not forced."""
    filtered = _filtered(policy, backend)
    if filtered is not None:
        return str(filtered[1])
    gate = facts.gate(backend)
    return '' if gate.is_on else gate.says_off


def _is_named(verb: Directive, backend: BaseBackend) -> bool:
    """Whether a policy names this backend itself, not only its kind."""
    names = (backend.backend_type.casefold(), f'impl:{backend.impl_id.casefold()}')
    return any(token in names and token not in ('default', 'reference') for token in verb.tokens)


def _filtered(policy: ResolvedPolicy, backend: BaseBackend) -> Out | None:
    for verb in policy.deny:
        if any(matches(token, backend) for token in verb.tokens):
            return 'excluded', f'denied by {verb.source}', verb.source
    for verb in policy.allow:
        if not any(matches(token, backend) for token in verb.tokens):
            allowed = ', '.join(verb.tokens) or 'nothing'
            return 'excluded', f'not on the allow list of {verb.source}: {allowed}', verb.source
    return None


def _availability(
    signature: Signature, member: Member, platform: str, facts: Facts, is_off: Callable[[], bool]
) -> tuple[Out | None, tuple[Test, ...]]:
    """Why a member is out on this platform, or the tests for this platform's devices. A backend that is off is not probed:
    a probe may import a package and compile for minutes."""
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
) -> tuple[Out | None, tuple[Test, ...]]:
    devices = facts.devices(platform) or (Device(platform),)
    verdicts = {device.index: ask(backend, device) for device in devices}
    bad = {index: reason for index, (usable, reason) in verdicts.items() if not usable}
    if not bad:
        return None, ()
    first = next(iter(bad.values()))
    if len(bad) == len(verdicts) and all(reason == first for reason in bad.values()):
        return ('unavailable', first, 'availability'), ()
    name = _identifier('bad', backend, platform)
    reads = f'{name}[_d_x.get_device()]'
    return None, (Test(f'_d_x.get_device() in {name}', '', reads, {name: bad}, unavailable=True),)


def _declared_tests(signature: Signature, backend: BaseBackend) -> list[Test]:
    """Tests for declared facts: grad, dtypes, devices of other tensors than the first."""
    tests = []
    if backend.grad == 'none' and (signature.tensors or signature.tensor_groups or signature.unknown):
        tests += _grad_tests(signature)
    for name, allowed in _per_parameter(signature, backend.dtypes).items():
        binding = _identifier('dtypes', backend, name)
        given, read = '', f'{name}.dtype'
        if signature.is_optional_tensor(name):
            given, read = f'{name} is not None and ', f'_d_getattr({name}, "dtype", None)'
        reason = f'dtype of {name!r} must be {", ".join(map(str, allowed))}, got %s'
        tests.append(Test(f'{given}{read} not in {binding}', reason, read, {binding: tuple(allowed)}))
    for name, platforms in backend.devices.items() if isinstance(backend.devices, Mapping) else ():
        if name in signature.names and name not in signature.tensors[:1]:
            binding, read = _identifier('devices', backend, name), f'_d_platform({name})'
            reason = f'{name!r} must be on {", ".join(platforms)}, is on %s'
            tests.append(Test(f'{name} is not None and {read} not in {binding}', reason, read, {binding: tuple(platforms)}))
    return tests


def _identifier(what: str, backend: BaseBackend, of: str) -> str:
    text = f'_d_{what}_{backend.backend_type}_{of}'
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
    """Tests that keep an inference-only backend from calls that are differentiated, in reverse or forward mode."""
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
    """Tests that parameters which the method does not name have their default."""
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
