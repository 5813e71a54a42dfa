"""Who is allowed for a function, and who said so.

Policies stand in layers, highest first: call scopes (innermost first), code (`set_policy`), environment per function
(`FLA_PER_OP`), environment for all (`FLA_PREFER`, …), the policy file, what was measured. Two halves:
    filters accumulate over all layers: not on an allow list, or on a deny list, is out;
    order: the first layer that speaks for the function wins, as a whole.
Only a forced choice overrides a filter, and only that of a scope or a binding (`use_backend`, `bind`) overrides a lock.
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
    """A policy and who said it. The source is for people: two layers of one policy select alike.

    Attributes:
        of_call: a scope around the call, or a binding: what it forces, no lock stands against.
    """

    policy: Policy
    source: str = field(compare=False)
    of_call: bool = False


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
class Directive:
    """One sentence of the policy in force for a function, with who said it (for `explain`)."""

    tokens: tuple[str, ...]
    source: str = field(compare=False)


@dataclass(frozen=True)
class Conditional:
    """An order for the calls that a condition holds for; None: for all that come this far."""

    condition: Condition | None
    order: Directive


@dataclass(frozen=True)
class Boost:
    """What is added to the priority of the backends that a token names."""

    token: str
    amount: float
    source: str = field(compare=False)


@dataclass(frozen=True)
class ResolvedPolicy:
    """The policy in force for one function: what its plan is built from, and the key under which it is kept."""

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
        """Whether failures move on, and breakers are asked."""
        return self.on_error == 'fallback'

    @property
    def order_source(self) -> str:
        """Which layer decided the order."""
        verb = self.use or self.only or self.prefer
        return verb.source if verb else 'priority'


def effective(state: State, operation: str, function: str, serves: Callable[[tuple[str, ...]], bool]) -> ResolvedPolicy:
    """The policy in force for a function: filters of all layers, order of the highest layer that speaks.

    Args:
        serves: whether any of these tokens names a candidate of the function. A forced choice without an address leaves
            alone what it cannot serve.
    """
    order: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    allow: list[Directive] = []
    deny: list[Directive] = []
    cases: list[Conditional] = []
    boosts: list[Boost] = []
    layers = [layer for layer in state.layers if layer.policy.concerns(operation, function)]
    for layer, spoken in _speakers(layers, operation, function, serves):
        if layer.policy.locked(operation, function)[1] is None:
            cases += _cases_of(layer, operation, function)
        if spoken:
            order = spoken
            break
    for layer in layers:
        policy = layer.policy
        if policy.allow is not None:
            allow.append(Directive(policy.allow, policy.place('allow', layer.source)))
        if policy.deny:
            deny.append(Directive(policy.deny, policy.place('deny', layer.source)))
        boosts += _boosts_of(layer, operation, function)
        for name in ('strict', 'require_first', 'check_values', 'on_error', 'breaker'):
            value = getattr(policy, name)
            if value is not None:
                flags.setdefault(name, value)
    if 'use' in order:
        cases = []
    if flags.get('on_error') != 'fallback':
        flags.pop('breaker', None)  # nothing reads it: one plan for all
    return ResolvedPolicy(
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
    return [Conditional(rule.condition, Directive(rule.use, f'rule at {rule.place or layer.source}')) for rule in rules]


def _boosts_of(layer: Layer, operation: str, function: str) -> list[Boost]:
    return [
        Boost(token, amount, layer.policy.place(f'boost.{glob}', layer.source))
        for glob, amounts in layer.policy.boost
        if covers(glob, operation, function)
        for token, amount in amounts
    ]


def _order_of(
    layer: Layer, operation: str, function: str, serves: Callable[[tuple[str, ...]], bool]
) -> dict[str, Directive]:
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


def _speakers(
    layers: Sequence[Layer], operation: str, function: str, serves: Callable[[tuple[str, ...]], bool]
) -> list[tuple[Layer, dict[str, Directive]]]:
    """The layers that may order a function, highest first, each with the order it gives (empty for none). Of what stands
    above the lowest lock, that is only what a scope or a binding forces."""
    lock = max((at for at, layer in enumerate(layers) if layer.policy.locked(operation, function)[1] is not None), default=0)
    spoken = [(layer, _order_of(layer, operation, function, serves)) for layer in layers]
    return [(layer, order) for at, (layer, order) in enumerate(spoken) if at >= lock or (layer.of_call and 'use' in order)]


def overruled(
    state: State, operation: str, function: str, serves: Callable[[tuple[str, ...]], bool]
) -> tuple[Layer, Layer] | None:
    """A layer whose order hides an exclusive order further down, or a lock that hides an order of the function by its name
    further up: (the layer, the hidden one)."""
    layers = [layer for layer in state.layers if layer.policy.concerns(operation, function)]
    speakers = [layer for layer, order in _speakers(layers, operation, function, serves) if order]
    if not speakers:
        return None
    at = layers.index(speakers[0])
    if speakers[0].policy.locked(operation, function)[1] is not None:
        hidden = [layer for layer in layers[:at] if _orders_by_name(layer.policy, operation, function)]
    else:
        hidden = [layer for layer in layers[at + 1 :] if layer.policy.listed(operation, function) is not None]
    return (speakers[0], hidden[0]) if hidden else None


def _orders_by_name(policy: Policy, operation: str, function: str) -> bool:
    """Whether a policy orders this function among few, rather than all there are."""
    rules = [rule for rule in policy.rules if rule.concerns(operation, function)]
    globs = [glob for rule in rules for glob in rule.ops if not _is_everything(glob)]
    exclusive = policy.listed(operation, function), policy.locked(operation, function)[1]
    if globs or policy.use or exclusive != (None, None):
        return True
    return policy.op is not None and bool(policy.prefer or policy.rules)


def refuse_if_locked(policy: Policy, below: Sequence[Layer], *, of_call: bool) -> None:
    """Raise for an order that a lock further down stands against.

    Raises:
        DispatchError: names the lock, with its place.
    """
    named: list[tuple[str, tuple[str, ...] | None]] = [*policy.order, *policy.lock]
    named += [(glob, None) for rule in policy.rules for glob in rule.ops if not _is_everything(glob)]
    forces = bool(policy.use) and not of_call
    if policy.op and (policy.prefer or policy.rules or forces):
        named.append((policy.op, None))
    for layer in below:
        for lock in layer.policy.lock:
            others = [key for key, tokens in named if (key, tokens) != lock]  # the same order is no other one
            if (forces and not policy.op) or any(_speaks_of(key, lock[0]) for key in others):
                raise DispatchError(
                    f'the order of {lock[0]!r} is locked by {layer.policy.place(f"lock.{lock[0]}", layer.source)}: only '
                    f'use_backend() and bind(backend=...) may choose another backend'
                    f'{"; use without op speaks of every function" if forces and not policy.op else ""}'
                )


def _speaks_of(glob: str, name: str) -> bool:
    """Whether a glob and the name of an operation or function have a function in common."""
    of_glob, of_name = glob.rpartition('.')[0], name.rpartition('.')[0]
    # `kda.*` speaks of functions of the operation `kda`; the star of `k*.f` is that of an operation's name
    of_operation = of_glob.count('.') == name.count('.') and fnmatch.fnmatchcase(name, of_glob)
    return of_operation or fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(of_name, glob)


def _is_everything(glob: str) -> bool:
    return set(glob) <= {'*', '.'}
