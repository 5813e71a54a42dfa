"""Policies, and the rules in them: frozen values that allow, order or force backends.

`precedence` decides which policies are in force for a function, and which of them wins.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fla.backends.backend.base import KINDS, BaseBackend
from fla.backends.policy.conditions import Condition
from fla.backends.policy.on_error import ON_ERROR, BreakerSettings, as_settings
from fla.utils.env import nearest

ALIASES = {'triton': 'default'}


def normalise(token: str) -> str:
    """Returns a token in the form that is compared: case-folded, `triton` as `default`."""
    word = token.strip().casefold()
    return ALIASES.get(word, word)


def matches(token: str, backend: BaseBackend) -> bool:
    """Whether a normalised token names the backend: its name, its kind, `vendor:NAME` or `impl:IMPL_ID`."""
    if token.startswith('vendor:'):
        return backend.vendor is not None and backend.vendor.casefold() == token[len('vendor:') :]
    if token.startswith('impl:'):
        return backend.impl_id.casefold() == token[len('impl:') :]
    return token in (backend.backend_type.casefold(), backend.kind)


def arrange(backends: Sequence[BaseBackend], tokens: Sequence[str]) -> list[BaseBackend]:
    """Returns the backends that a token names, in the order of the tokens; backends of one token keep their order."""
    chosen: list[BaseBackend] = []
    for token in tokens:
        chosen += [backend for backend in backends if matches(token, backend) and backend not in chosen]
    return chosen


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def _tokens(value: Iterable[str] | str | None, argument: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (Mapping, bytes)):
        raise TypeError(f'{argument} takes names, got {value!r}')
    words = tuple(value)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise TypeError(
                f'{argument} takes backend names, kinds ({", ".join(KINDS)}), vendor:NAME or impl:IMPL_ID; got {word!r}'
            )
    return tuple(dict.fromkeys(normalise(word) for word in words))


@dataclass(frozen=True)
class Rule:
    """An order for some functions, for calls on which a condition holds. The backends it names are asked first, if allowed,
    enabled and able; the others follow in the usual order.

    Attributes:
        ops: globs over 'operation.function' or the operation alone: 'kda.*', 'kda', '*'.
        use: backends, kinds, `vendor:NAME` or `impl:IMPL_ID` asked first, in this order.
        when: a condition over the function's parameters (see `fla.backends.policy.conditions`), or None for every call.
        priority: lower is asked earlier; ties keep their order.
        place: file and line, for messages.
    """

    ops: tuple[str, ...]
    use: tuple[str, ...]
    when: str | None = field(default=None, compare=False)
    priority: float = 0
    place: str = field(default='', compare=False)
    condition: Condition | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        ops: Any = self.ops
        words = (ops,) if isinstance(ops, str) else tuple(ops) if isinstance(ops, Iterable) else ()
        if not words or not all(isinstance(word, str) and word.strip() for word in words):
            raise TypeError(f"ops of a rule takes globs over functions, such as 'kda.*', got {self.ops!r}")
        put(self, 'ops', tuple(word.strip() for word in words))
        put(self, 'use', _tokens(self.use, 'use of a rule'))
        if not self.use:
            raise TypeError('use of a rule names at least one backend')
        if not _is_number(self.priority):
            raise TypeError(f'priority of a rule is a number, got {self.priority!r}')
        if self.when is not None:
            put(self, 'condition', Condition(self.when))

    @property
    def spec(self) -> tuple[Any, ...]:
        """The fields as constants: `Rule(*spec)` is an equal rule."""
        return self.ops, self.use, self.when, self.priority, self.place

    def concerns(self, operation: str, function: str) -> bool:
        """Whether this rule is about `function` of `operation`."""
        return any(covers(glob, operation, function) for glob in self.ops)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        found = {'ops': list(self.ops), 'use': list(self.use), 'when': self.when, 'priority': self.priority}
        return {name: value for name, value in found.items() if value is not None}


def covers(glob: str, operation: str, function: str) -> bool:
    """Whether a glob matches a function's whole name or its operation."""
    return any(fnmatch.fnmatchcase(name, glob) for name in (f'{operation}.{function}', operation))


def _rules(value: Any) -> tuple[Rule, ...]:
    """Reads rules that are given as such, as mappings of their fields, or as the constants of `Rule.spec`."""
    if isinstance(value, (str, Mapping, Rule)) or not isinstance(value, Iterable):
        raise TypeError(f'rules must be a list of Rule, or of mappings of its fields; got {value!r}')
    found = []
    for number, rule in enumerate(value):
        if isinstance(rule, Mapping):
            for name in rule:
                if name not in _RULE_FIELDS:
                    close = nearest(str(name), _RULE_FIELDS)
                    raise TypeError(f'rules[{number}] has no field {name!r}.{close} It has {", ".join(_RULE_FIELDS)}')
            for name in ('ops', 'use'):
                if name not in rule:
                    raise TypeError(f'rules[{number}] has no {name!r}: {dict(rule)!r}')
            rule = Rule(**rule)
        elif isinstance(rule, tuple) and 2 <= len(rule) <= len(_RULE_FIELDS):
            rule = Rule(*rule)
        if not isinstance(rule, Rule):
            raise TypeError(f'rules must be a list of Rule, or of mappings of its fields; {rule!r} is neither')
        found.append(rule)
    return tuple(found)


_RULE_FIELDS = tuple(f.name for f in fields(Rule) if f.init)


@dataclass(frozen=True)
class Policy:
    """Which backends are allowed, and in which order. Fields that are not set are left to the layers below.

    Attributes:
        use: the only backends that may run, tried in this order; overrides filters and toggles; if none can run, the call
            raises. Does not affect functions that none of them serves, unless `op` names them.
        prefer: backends, kinds, `vendor:NAME` or `impl:IMPL_ID` that are asked first.
        order: operation ('kda') or function ('kda.chunk_kda') → the only backends tried, in this order.
        allow: the only backends allowed; an empty tuple allows none; None is no restriction.
        deny: backends not allowed.
        op: operation or function that the whole policy is for, or None for all.
        strict: bugs and unmet wishes raise.
        require_first: anything but the first available and enabled candidate raises.
        check_values: checks may look at tensor values (synchronises).
        on_error: 'raise', or 'fallback' to try the next candidate after a failure that its backend declares retryable.
        breaker: when a backend that keeps failing is skipped: `BreakerSettings`, or a mapping of its fields.
        rules: orders for calls on which a condition holds, as `Rule`s or mappings of their fields.
        lock: as `order`; no layer above may give another one, except by `use_backend` and `bind(backend=…)`.
        boost: glob over functions → {backend, kind, …: number added to its priority}. Boosts of all layers add up.
        places: field, or field and key ('order.kda') → file and line, for messages.
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
    rules: tuple[Rule, ...] = ()
    lock: tuple[tuple[str, tuple[str, ...]], ...] = ()
    boost: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    places: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ('use', 'prefer', 'deny'):
            put(self, name, _tokens(getattr(self, name), name))
        put(self, 'allow', None if self.allow is None else _tokens(self.allow, 'allow'))
        for name in ('order', 'lock'):
            pairs = _pairs(getattr(self, name), name, "backends, such as {'kda': ['default']}")
            put(self, name, tuple((key.strip(), _tokens(tokens, f'{name}[{key!r}]')) for key, tokens in pairs))
        put(self, 'rules', _rules(self.rules))
        put(self, 'boost', _boosts(self.boost))
        put(self, 'breaker', as_settings(self.breaker))
        for name in ('strict', 'require_first', 'check_values'):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise TypeError(f'{name} must be True, False or None, got {getattr(self, name)!r}')
        if self.on_error not in (None, *ON_ERROR):
            close = nearest(self.on_error, ON_ERROR) if isinstance(self.on_error, str) else ''
            raise ValueError(f'on_error must be {", ".join(map(repr, ON_ERROR))} or None, got {self.on_error!r}.{close}')
        twice = sorted({name for name, _ in self.order} & {name for name, _ in self.lock})
        if twice:
            raise ValueError(f'order and lock both have {", ".join(map(repr, twice))}; a lock is an order: omit one of them')
        if self.use and self.lock:
            raise ValueError('use and lock contradict each other in one policy, where use would win: omit one of them')
        if self.op is not None and (not isinstance(self.op, str) or not self.op.strip()):
            raise TypeError(f"op must be an operation ('kda') or a function ('kda.chunk_kda'), got {self.op!r}")
        put(self, '_hash', hash(tuple(getattr(self, name) for name in _FIELDS if name != 'places')))

    def __hash__(self) -> int:
        return self._hash

    @property
    def spec(self) -> tuple[Any, ...]:
        """The fields as constants, which compiled code can carry: `Policy(*spec)` is an equal policy."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        found['breaker'] = None if self.breaker is None else self.breaker.spec
        found['rules'] = tuple(rule.spec for rule in self.rules)
        return tuple(found.values())

    def concerns(self, operation: str, function: str) -> bool:
        """Whether this policy is about `function` of `operation`."""
        return self.op is None or self.op in (operation, f'{operation}.{function}')

    def listed(self, operation: str, function: str) -> tuple[str, ...] | None:
        """Returns the exclusive order for a function from its most specific entry, or None."""
        return most_specific(self.order, operation, function)[1]

    def locked(self, operation: str, function: str) -> tuple[str, tuple[str, ...] | None]:
        """Returns the name and the locked order of a function's most specific entry; the order is None if there is none."""
        return most_specific(self.lock, operation, function)

    def place(self, field: str, default: str) -> str:
        """Returns where a field, or one of its keys, was written."""
        return dict(self.places).get(field, default)

    def tokens(self) -> tuple[str, ...]:
        """Returns every token that names a backend, from all fields."""
        words = [*self.use, *self.prefer, *(self.allow or ()), *self.deny]
        words += [token for _, tokens in (*self.order, *self.lock) for token in tokens]
        words += [token for rule in self.rules for token in rule.use]
        return tuple(dict.fromkeys(words + [token for _, amounts in self.boost for token, _ in amounts]))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are set, as JSON-ready values."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS if name != 'places'}
        for name in ('order', 'lock'):
            found[name] = {key: list(tokens) for key, tokens in found[name]}
        found['boost'] = {glob: dict(amounts) for glob, amounts in self.boost}
        found['rules'] = [rule.to_dict() for rule in self.rules]
        found['breaker'] = self.breaker.to_dict() if self.breaker else None
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
            if value not in ((), [], {}, None) or (name == 'allow' and value is not None)
        }


_FIELDS = tuple(f.name for f in fields(Policy) if f.init)


def most_specific(
    pairs: Sequence[tuple[str, tuple[str, ...]]], operation: str, function: str
) -> tuple[str, tuple[str, ...] | None]:
    """Returns the entry of a function, or else of its operation, as (name, tokens); tokens are None if there is neither."""
    listed = dict(pairs)
    name = f'{operation}.{function}' if f'{operation}.{function}' in listed else operation
    return name, listed.get(name)


def _pairs(value: Any, name: str, of_what: str) -> list[tuple[str, Any]]:
    """Returns the entries of a mapping by name, or of a sequence of such pairs."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    good = isinstance(pairs, (list, tuple)) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    if not good or not all(isinstance(key, str) and key.strip() for key, _ in pairs):
        raise TypeError(f'{name} is a mapping from names to {of_what}; got {value!r}')
    return list(pairs)


def _boosts(value: Any) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
    found = []
    example = "numbers by backend, such as {'kda': {'default': -10}}"
    for glob, amounts in _pairs(value, 'boost', example):
        pairs = _pairs(amounts, f'boost[{glob!r}]', 'numbers')
        for _, amount in pairs:
            if not _is_number(amount):
                raise TypeError(f'boost[{glob!r}] gives each backend a number to add to its priority, got {amount!r}')
        names = _tokens([token for token, _ in pairs], f'boost[{glob!r}]')
        if len(names) < len(pairs):
            raise ValueError(f'boost[{glob!r}] names a backend twice: {", ".join(token for token, _ in pairs)}')
        found.append((glob.strip(), tuple(zip(names, (amount for _, amount in pairs), strict=True))))
    return tuple(found)
