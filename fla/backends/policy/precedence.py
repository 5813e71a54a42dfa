"""Which backends the policies in force allow for a function, in which order, and which layer decided.

Layers of policies, highest first: call scopes (innermost first), code (`set_policy`), environment per function
(`FLA_PER_OP`), environment for all (`FLA_PREFER`, …), the policy file, measurements.
    filters accumulate over all layers: a backend that an allow list lacks or a deny list has is out;
    order: the first layer with an order for the function wins, as a whole.
Only a forced choice overrides a filter, and only a scope's or a binding's (`use_backend`, `bind`) overrides a lock.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.policy.conditions import Condition
from fla.backends.policy.on_error import BreakerSettings
from fla.backends.policy.policy import Policy, covers, most_specific


@dataclass(frozen=True)
class Layer:
    """A policy and its source. The source is for messages: two layers of equal policies are equal.

    Attributes:
        of_call: it is a scope around the call, or a binding: its forced choice overrides locks.
    """

    policy: Policy
    source: str = field(compare=False)
    of_call: bool = False


@dataclass(frozen=True)
class State:
    """Everything that selection depends on besides the registry. Equal states have equal plans.

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
        """Returns this state with more layers on top."""
        return replace(self, layers=layers + self.layers)


@dataclass(frozen=True)
class Directive:
    """One directive of the policy in force for a function, and its source (for `explain`)."""

    tokens: tuple[str, ...]
    source: str = field(compare=False)


@dataclass(frozen=True)
class Conditional:
    """An order for calls on which a condition holds; None is for all that remain."""

    condition: Condition | None
    order: Directive


@dataclass(frozen=True)
class Boost:
    """An amount that is added to the priority of the backends that a token names."""

    token: str
    amount: float
    source: str = field(compare=False)


@dataclass(frozen=True)
class ResolvedPolicy:
    """The policy in force for one function: the input and the cache key of its plan."""

    use: Directive | None = None
    only: Directive | None = None
    prefer: Directive | None = None
    cases: tuple[Conditional, ...] = ()
    boosts: tuple[Boost, ...] = ()
    allow: tuple[Directive, ...] = ()
    deny: tuple[Directive, ...] = ()
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
        """Whether failures fall back and breakers are asked."""
        return self.on_error == 'fallback'

    @property
    def order_source(self) -> str:
        """The layer that decided the order."""
        order = self.use or self.only or self.prefer
        return order.source if order else 'priority'


Serves = Callable[[tuple[str, ...]], bool]


def effective(state: State, operation: str, function: str, serves: Serves) -> ResolvedPolicy:
    """Returns the policy in force for a function: filters of all layers, order of the highest layer that has one.

    Args:
        serves: whether any of the tokens names a candidate of the function. A forced choice without `op` does not affect
            functions that it cannot serve.
    """
    order: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    allow: list[Directive] = []
    deny: list[Directive] = []
    cases: list[Conditional] = []
    boosts: list[Boost] = []
    layers = [layer for layer in state.layers if layer.policy.concerns(operation, function)]
    for layer, order in _orders(layers, operation, function, serves):
        if layer.policy.locked(operation, function)[1] is None:
            rules = [rule for rule in layer.policy.rules if rule.concerns(operation, function)]
            for rule in sorted(rules, key=lambda rule: rule.priority):
                cases.append(Conditional(rule.condition, Directive(rule.use, f'rule at {rule.place or layer.source}')))
        if order:
            break
    for layer in layers:
        policy = layer.policy
        if policy.allow is not None:
            allow.append(Directive(policy.allow, policy.place('allow', layer.source)))
        if policy.deny:
            deny.append(Directive(policy.deny, policy.place('deny', layer.source)))
        for glob, amounts in policy.boost:
            if covers(glob, operation, function):
                boosts += [Boost(token, amount, policy.place(f'boost.{glob}', layer.source)) for token, amount in amounts]
        for name in ('strict', 'require_first', 'check_values', 'on_error', 'breaker'):
            value = getattr(policy, name)
            if value is not None:
                flags.setdefault(name, value)
    if flags.get('on_error') != 'fallback':
        flags.pop('breaker', None)  # unused: it must not make another plan
    return ResolvedPolicy(
        cases=() if 'use' in order else tuple(cases),
        boosts=tuple(boosts),
        allow=tuple(allow),
        deny=tuple(deny),
        tracing=state.tracing,
        telemetry=state.telemetry,
        env=state.env,
        **order,
        **flags,
    )


def _order_of(layer: Layer, operation: str, function: str, serves: Serves) -> dict[str, Directive]:
    """Returns {field of `ResolvedPolicy`: directive} for the order that a layer gives, or {}."""
    policy = layer.policy
    if policy.use and (policy.op is not None or serves(policy.use)):
        return {'use': Directive(policy.use, policy.place('use', layer.source))}
    name, locked = policy.locked(operation, function)
    if locked is not None:
        return {'only': Directive(locked, f'lock at {policy.place(f"lock.{name}", layer.source)}')}
    name, listed = most_specific(policy.order, operation, function)
    if listed is not None:
        return {'only': Directive(listed, policy.place(f'order.{name}', layer.source))}
    return {'prefer': Directive(policy.prefer, policy.place('prefer', layer.source))} if policy.prefer else {}


def _orders(
    layers: Sequence[Layer], operation: str, function: str, serves: Serves
) -> list[tuple[Layer, dict[str, Directive]]]:
    """Returns the layers that may order a function, highest first, each with its order or {}. Above the lowest lock, these
    are only the forced choices of a scope or a binding."""
    lock = max((at for at, layer in enumerate(layers) if layer.policy.locked(operation, function)[1] is not None), default=0)
    orders = [(layer, _order_of(layer, operation, function, serves)) for layer in layers]
    return [(layer, order) for at, (layer, order) in enumerate(orders) if at >= lock or (layer.of_call and 'use' in order)]


def overruled(state: State, operation: str, function: str, serves: Serves) -> tuple[Layer, Layer] | None:
    """Returns (layer, hidden layer) if a layer's order hides an exclusive order below it, or if its lock hides an order
    above it that names the function."""
    layers = [layer for layer in state.layers if layer.policy.concerns(operation, function)]
    decides = next((layer for layer, order in _orders(layers, operation, function, serves) if order), None)
    if decides is None:
        return None
    at = layers.index(decides)
    if decides.policy.locked(operation, function)[1] is not None:
        hidden = [layer for layer in layers[:at] if _orders_by_name(layer.policy, operation, function)]
    else:
        hidden = [layer for layer in layers[at + 1 :] if layer.policy.listed(operation, function) is not None]
    return (decides, hidden[0]) if hidden else None


def _orders_by_name(policy: Policy, operation: str, function: str) -> bool:
    """Whether a policy orders this function in particular, rather than all functions."""
    rules = [rule for rule in policy.rules if rule.concerns(operation, function)]
    return bool(
        policy.use
        or policy.listed(operation, function) is not None
        or policy.locked(operation, function)[1] is not None
        or any(not _is_everything(glob) for rule in rules for glob in rule.ops)
        or (policy.op is not None and (policy.prefer or policy.rules))
    )


def refuse_if_locked(policy: Policy, below: Sequence[Layer], *, of_call: bool) -> None:
    """Raises DispatchError, which names the lock and its place, if a policy orders what a layer below has locked."""
    named: list[tuple[str, tuple[str, ...] | None]] = [*policy.order, *policy.lock]
    named += [(glob, None) for rule in policy.rules for glob in rule.ops if not _is_everything(glob)]
    forces = bool(policy.use) and not of_call
    if policy.op and (policy.prefer or policy.rules or forces):
        named.append((policy.op, None))
    for layer in below:
        for lock in layer.policy.lock:
            others = [key for key, tokens in named if (key, tokens) != lock]  # an equal order is allowed
            if (forces and not policy.op) or any(_overlaps(key, lock[0]) for key in others):
                raise DispatchError(
                    f'the order of {lock[0]!r} is locked by {layer.policy.place(f"lock.{lock[0]}", layer.source)}: only '
                    f'use_backend() and bind(backend=...) may choose another backend'
                    f'{"; use without op covers every function" if forces and not policy.op else ""}'
                )


def _overlaps(glob: str, name: str) -> bool:
    """Whether a glob and the name of an operation or function share a function."""
    of_glob, of_name = glob.rpartition('.')[0], name.rpartition('.')[0]
    # `kda.*` covers the functions of operation `kda`; the star in `k*.f` is part of an operation's name
    of_operation = of_glob.count('.') == name.count('.') and fnmatch.fnmatchcase(name, of_glob)
    return of_operation or fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(of_name, glob)


def _is_everything(glob: str) -> bool:
    return set(glob) <= {'*', '.'}
