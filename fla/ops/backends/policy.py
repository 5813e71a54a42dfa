"""Who is allowed, and who said so.

A `Policy` is a frozen value. Policies stand in layers, highest first: call scopes (innermost first), code (`set_policy`),
environment per function (`FLA_PER_OP`), environment for all (`FLA_PREFER`, …). Two halves:
    filters accumulate over all layers: not on an allow list, or on a deny list, is out;
    order: the first layer that speaks for the function wins, as a whole.
Only a forced choice (`use_backend`, `bind`) overrides a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fla.ops.backends.backend import KINDS, BaseBackend
from fla.ops.backends.breaker import BreakerSettings, as_settings
from fla.ops.backends.failure import ON_ERROR
from fla.utils.env import nearest

ALIASES = {'triton': 'default'}


def normalise(token: str) -> str:
    """A token as it is compared: case-folded, `triton` as `default`."""
    word = token.strip().casefold()
    return ALIASES.get(word, word)


def matches(token: str, backend: BaseBackend) -> bool:
    """Whether a (normalised) token names the backend: its name, its kind, `vendor:NAME` or `impl:IMPL_ID`."""
    if token.startswith('vendor:'):
        return backend.vendor is not None and backend.vendor.casefold() == token[len('vendor:') :]
    if token.startswith('impl:'):
        return backend.impl_id.casefold() == token[len('impl:') :]
    return token in (backend.backend_type.casefold(), backend.kind)


def _tokens(value: Iterable[str] | str | None, argument: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f'{argument} takes names, got {value!r}')
    words = tuple(value)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise TypeError(
                f'{argument} takes backend names, kinds ({", ".join(KINDS)}), vendor:NAME or impl:IMPL_ID; got {word!r}'
            )
    return tuple(dict.fromkeys(normalise(word) for word in words))


@dataclass(frozen=True)
class Policy:
    """What is allowed and in which order. Every field that is not set leaves the question to the layers below.

    Attributes:
        use: the only backends that may run, tried in this order; overrides filters and toggles; if none can run, the call
            raises. Functions that none of them serves are left alone unless `op` names them.
        prefer: backends, kinds, `vendor:NAME` or `impl:IMPL_ID` that are asked first.
        order: operation ('kda') or function ('kda.chunk_kda') → the only backends tried, in this order.
        allow: the only backends allowed; an empty tuple allows none. None: no such list.
        deny: backends not allowed.
        op: operation or function the whole policy is for. None: all.
        strict: bugs and unmet wishes raise.
        require_first: anything but the first available and enabled candidate raises.
        check_values: checks may look at tensor values (synchronises).
        on_error: 'raise', or 'fallback' to try the next candidate after a failure that its backend declares retryable.
        breaker: when a backend that keeps failing is left alone: `BreakerSettings`, or a mapping of its fields.
    """

    use: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    op: str | None = None
    strict: bool | None = None
    require_first: bool | None = None
    check_values: bool | None = None
    on_error: str | None = None
    breaker: BreakerSettings | None = None
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, 'use', _tokens(self.use, 'use'))
        put(self, 'prefer', _tokens(self.prefer, 'prefer'))
        put(self, 'deny', _tokens(self.deny, 'deny'))
        put(self, 'allow', None if self.allow is None else _tokens(self.allow, 'allow'))
        pairs = self.order.items() if isinstance(self.order, Mapping) else self.order
        put(self, 'order', tuple((name.strip(), _tokens(tokens, f'order[{name!r}]')) for name, tokens in pairs))
        for name in ('strict', 'require_first', 'check_values'):
            if getattr(self, name) not in (None, True, False):
                raise TypeError(f'{name} must be True, False or None, got {getattr(self, name)!r}')
        if self.on_error not in (None, *ON_ERROR):
            words = ', '.join(map(repr, ON_ERROR))
            raise ValueError(
                f'on_error must be {words} or None, got {self.on_error!r}{nearest(str(self.on_error), ON_ERROR)}'
            )
        put(self, 'breaker', as_settings(self.breaker))
        if self.op is not None and (not isinstance(self.op, str) or not self.op.strip()):
            raise TypeError(f"op must be an operation ('kda') or a function ('kda.chunk_kda'), got {self.op!r}")
        values = (self.use, self.prefer, self.order, self.allow, self.deny, self.op)
        flags = (self.strict, self.require_first, self.check_values, self.on_error, self.breaker)
        put(self, '_hash', hash((values, flags)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def spec(self) -> tuple[Any, ...]:
        """The fields as plain constants, which is what compiled code can carry. `Policy(*spec)` is this policy again."""
        return (
            self.use,
            self.prefer,
            self.order,
            self.allow,
            self.deny,
            self.op,
            self.strict,
            self.require_first,
            self.check_values,
            self.on_error,
            None if self.breaker is None else self.breaker.spec,
        )

    def concerns(self, operation: str, function: str) -> bool:
        """Whether this policy speaks about `function` of `operation` at all."""
        return self.op is None or self.op in (operation, f'{operation}.{function}')

    def listed(self, operation: str, function: str) -> tuple[str, ...] | None:
        """The exclusive order for a function, the most specific entry first; None where there is none."""
        pairs = dict(self.order)
        return pairs.get(f'{operation}.{function}', pairs.get(operation))

    def tokens(self) -> tuple[str, ...]:
        """Every token that names a backend, wherever it stands."""
        words = [*self.use, *self.prefer, *(self.allow or ()), *self.deny]
        return tuple(dict.fromkeys(words + [token for _, tokens in self.order for token in tokens]))

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as JSON-ready values."""
        fields = ('use', 'prefer', 'order', 'allow', 'deny', 'op', 'strict', 'require_first', 'check_values', 'on_error')
        found = {name: getattr(self, name) for name in fields}
        found['order'] = {name: list(tokens) for name, tokens in self.order}
        found['breaker'] = self.breaker.to_dict() if self.breaker else None
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
            if value not in ((), {}, None) or (name == 'allow' and value is not None)
        }


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
class Effective:
    """The policy in force for one function: what its plan is built from, and the key under which it is kept."""

    use: Verb | None = None
    only: Verb | None = None
    prefer: Verb | None = None
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
    for layer in state.layers:
        policy = layer.policy
        if not policy.concerns(operation, function):
            continue
        if not order:
            order = _order_of(layer, operation, function, serves)
        if policy.allow is not None:
            allow.append(Verb(policy.allow, layer.source))
        if policy.deny:
            deny.append(Verb(policy.deny, layer.source))
        for name in ('strict', 'require_first', 'check_values', 'on_error', 'breaker'):
            value = getattr(policy, name)
            if value is not None:
                flags.setdefault(name, value)
    if flags.get('on_error') != 'fallback':
        flags.pop('breaker', None)  # nothing reads it: one plan for all
    return Effective(
        allow=tuple(allow),
        deny=tuple(deny),
        tracing=state.tracing,
        telemetry=state.telemetry,
        env=state.env,
        **order,
        **flags,
    )


def _order_of(layer: Layer, operation: str, function: str, serves: Callable[[tuple[str, ...]], bool]) -> dict[str, Verb]:
    policy = layer.policy
    if policy.use and (policy.op is not None or serves(policy.use)):
        return {'use': Verb(policy.use, layer.source)}
    listed = policy.listed(operation, function)
    if listed is not None:
        return {'only': Verb(listed, layer.source)}
    return {'prefer': Verb(policy.prefer, layer.source)} if policy.prefer else {}


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


def arrange(backends: Sequence[BaseBackend], tokens: Sequence[str]) -> list[BaseBackend]:
    """Backends that a token names, in the order of the tokens; order within a token is kept."""
    chosen: list[BaseBackend] = []
    for token in tokens:
        chosen += [backend for backend in backends if matches(token, backend) and backend not in chosen]
    return chosen
