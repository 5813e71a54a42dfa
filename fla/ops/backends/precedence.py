"""Who is allowed for a function, and who said so.

Policies stand in layers, highest first: call scopes (innermost first), code (`set_policy`), environment per function
(`FLA_PER_OP`), environment for all (`FLA_PREFER`, …), the policy file, what was measured. Two halves:
    filters accumulate over all layers: not on an allow list, or on a deny list, is out;
    order: the first layer that speaks for the function wins, as a whole.
Only a forced choice (`use_backend`, `bind`) overrides a filter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fla.ops.backends.breaker import BreakerSettings
from fla.ops.backends.conditions import Condition
from fla.ops.backends.policy import Policy, covers, most_specific


@dataclass(frozen=True)
class Layer:
    """A policy and who said it. The source is for people: two layers of one policy select alike."""

    policy: Policy
    source: str = field(compare=False)


@dataclass(frozen=True)
class State:
    """Everything besides the registry that selection depends on. Equal states have equal plans.

    Attributes:
        layers: policies, highest first.
        tracing: calls are recorded.
        telemetry: calls are counted ('count') and timed ('time'), or neither ('').
        env: frozen or pinned values of the toggles, None for the live environment.
    """

    layers: tuple[Layer, ...] = ()
    tracing: bool = False
    env: tuple[tuple[str, str | None], ...] | None = None
    telemetry: str = ''
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, '_hash', hash((self.layers, self.tracing, self.env, self.telemetry)))

    def __hash__(self) -> int:
        return self._hash

    def above(self, *layers: Layer) -> State:
        """This state with more layers on top."""
        return replace(self, layers=layers + self.layers)


@dataclass(frozen=True)
class Verb:
    """One sentence of the policy in force for a function, with who said it (for `explain`)."""

    tokens: tuple[str, ...]
    source: str = field(compare=False)


@dataclass(frozen=True)
class Conditional:
    """An order for the calls that a condition holds for; None: for all that come this far."""

    condition: Condition | None
    order: Verb


@dataclass(frozen=True)
class Boost:
    """What is added to the priority of the backends that a token names."""

    token: str
    amount: float
    source: str = field(compare=False)


@dataclass(frozen=True)
class Effective:
    """The policy in force for one function: what its plan is built from, and the key under which it is kept."""

    use: Verb | None = None
    only: Verb | None = None
    prefer: Verb | None = None
    cases: tuple[Conditional, ...] = ()
    boosts: tuple[Boost, ...] = ()
    allow: tuple[Verb, ...] = ()
    deny: tuple[Verb, ...] = ()
    strict: bool = False
    require_first: bool = False
    check_values: bool = False
    on_error: str = 'raise'
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    tracing: bool = False
    telemetry: str = ''
    env: tuple[tuple[str, str | None], ...] | None = None

    @property
    def falls_back(self) -> bool:
        """Whether failures move on, and breakers are asked."""
        return self.on_error == 'fallback'

    @property
    def order_source(self) -> str:
        """Which layer decided the order."""
        verb = self.use or self.only or self.prefer
        return verb.source if verb else 'priority'


def effective(state: State, operation: str, function: str, serves: Callable[[tuple[str, ...]], bool]) -> Effective:
    """The policy in force for a function: filters of all layers, order of the highest layer that speaks.

    Args:
        serves: whether any of these tokens names a candidate of the function. A forced choice without an address leaves
            alone what it cannot serve.
    """
    order: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    allow: list[Verb] = []
    deny: list[Verb] = []
    cases: list[Conditional] = []
    boosts: list[Boost] = []
    layers = [layer for layer in state.layers if layer.policy.concerns(operation, function)]
    locked_by = next((layer for layer in layers if layer.policy.locked(operation, function)[1] is not None), None)
    may_order = locked_by is None
    for layer in layers:
        policy = layer.policy
        may_order = may_order or layer is locked_by
        if not order:
            if may_order and locked_by is not layer:
                cases += _cases_of(layer, operation, function)
            spoken = _order_of(layer, operation, function, serves)
            if may_order or 'use' in spoken:
                order = spoken
        if policy.allow is not None:
            allow.append(Verb(policy.allow, policy.place('allow', layer.source)))
        if policy.deny:
            deny.append(Verb(policy.deny, policy.place('deny', layer.source)))
        boosts += _boosts_of(layer, operation, function)
        for name in ('strict', 'require_first', 'check_values', 'on_error', 'breaker'):
            value = getattr(policy, name)
            if value is not None:
                flags.setdefault(name, value)
    if 'use' in order:
        cases = []
    if flags.get('on_error') != 'fallback':
        flags.pop('breaker', None)  # nothing reads it: one plan for all
    return Effective(
        cases=tuple(cases),
        boosts=tuple(boosts),
        allow=tuple(allow),
        deny=tuple(deny),
        tracing=state.tracing,
        telemetry=state.telemetry,
        env=state.env,
        **order,
        **flags,
    )


def _cases_of(layer: Layer, operation: str, function: str) -> list[Conditional]:
    rules = [rule for rule in layer.policy.rules if rule.concerns(operation, function)]
    rules.sort(key=lambda rule: rule.priority)
    return [Conditional(rule.condition, Verb(rule.use, f'rule at {rule.place or layer.source}')) for rule in rules]


def _boosts_of(layer: Layer, operation: str, function: str) -> list[Boost]:
    return [
        Boost(token, amount, layer.policy.place(f'boost.{glob}', layer.source))
        for glob, amounts in layer.policy.boost
        if covers(glob, operation, function)
        for token, amount in amounts
    ]


def _order_of(layer: Layer, operation: str, function: str, serves: Callable[[tuple[str, ...]], bool]) -> dict[str, Verb]:
    policy = layer.policy
    if policy.use and (policy.op is not None or serves(policy.use)):
        return {'use': Verb(policy.use, policy.place('use', layer.source))}
    name, locked = policy.locked(operation, function)
    if locked is not None:
        return {'only': Verb(locked, f'lock at {policy.place(f"lock.{name}", layer.source)}')}
    name, listed = most_specific(policy.order, operation, function)
    if listed is not None:
        return {'only': Verb(listed, policy.place(f'order.{name}', layer.source))}
    return {'prefer': Verb(policy.prefer, policy.place('prefer', layer.source))} if policy.prefer else {}


def overruled(
    state: State, operation: str, function: str, serves: Callable[[tuple[str, ...]], bool]
) -> tuple[Layer, Layer] | None:
    """A scope or code layer whose order hides an exclusive order further down: (that layer, the hidden one)."""
    speaker = None
    for layer in state.layers:
        if not layer.policy.concerns(operation, function):
            continue
        if speaker is not None and layer.policy.listed(operation, function) is not None:
            return speaker, layer
        if speaker is None and _order_of(layer, operation, function, serves):
            speaker = layer
    return None
