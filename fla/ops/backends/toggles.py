"""Toggles: the environment variable of a backend, tested in line on every call.

The generated code compares the raw value with the spellings known so far; only a spelling never seen before makes a
function re-plan, and is then known. So any number of flips costs a compiled caller two frames, and a flip costs an eager
caller nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fla.ops.backends import logs
from fla.ops.backends.backend import BaseBackend, enabled_by_default
from fla.ops.backends.plan import Gate, overrides
from fla.ops.backends.untraceable import codes_of
from fla.utils.env import (
    BOOLEAN_CHOICES,
    FALSE_LITERALS,
    LIVE,
    TRUE_LITERALS,
    live_key,
    live_value,
    parse_boolean,
    text_of,
)

_VARIABLE = re.compile(r'[A-Z][A-Z0-9]*(_[A-Z0-9]+)+')


class Toggles:
    """What is known of raw values. Grows by a value at a time and is shared by all functions of a dispatcher."""

    def __init__(self) -> None:
        self._spellings: dict[str, set[Any]] = {}
        self._answers: dict[tuple[int, tuple[str, ...]], dict[tuple[Any, ...], bool]] = {}

    def variables(self, backend: BaseBackend) -> tuple[str, ...]:
        """The variables that decide whether a backend is enabled."""
        own = (backend.env_var,) if backend.env_var else ()
        if not overrides(backend, 'is_enabled'):
            return own
        found = tuple(backend.extra_env) or _literal_names(backend.is_enabled)
        return tuple(dict.fromkeys(own + found))

    def gate(self, backend: BaseBackend, env: Mapping[str, str | None] | None = None) -> Gate:
        """The gate of a backend under the live environment, or under the fixed values `env`."""
        names = self.variables(backend)
        if overrides(backend, 'is_enabled'):
            if not names and _reads_anything(backend.is_enabled):
                return Gate(ask=backend.is_enabled, is_on=bool(backend.is_enabled()))
            return self._overridden(backend, names, env)
        if not names:
            return Gate(is_on=enabled_by_default(backend))
        return self._boolean(names[0], backend, env)

    def _boolean(self, name: str, backend: BaseBackend, env: Mapping[str, str | None] | None) -> Gate:
        unset_means = enabled_by_default(backend)
        current = _raw(name, env)
        known = self._spellings.setdefault(name, {None, *map(live_value, TRUE_LITERALS + FALSE_LITERALS)})
        known.add(current)

        def means(raw: Any) -> bool:
            stated = parse_boolean(text_of(raw) or '') if raw is not None else None
            if stated is None and raw is not None:
                warn_not_boolean(name, text_of(raw) or '')
            return unset_means if stated is None else stated

        # the current value first: it is the one compared on most calls
        ordered = [current, *sorted(known - {current}, key=lambda raw: (raw is not None, str(raw)))]
        on = tuple((raw,) for raw in ordered if means(raw))
        off = tuple((raw,) for raw in ordered if not means(raw))
        return Gate((name,), on, off, means(current))

    def _overridden(self, backend: BaseBackend, names: tuple[str, ...], env: Mapping[str, str | None] | None) -> Gate:
        if not names or env is not None:
            return Gate(is_on=bool(backend.is_enabled()))
        answers = self._answers.setdefault((id(backend), names), {})
        current = tuple(_raw(name, None) for name in names)
        answers[current] = bool(backend.is_enabled())
        ordered = [current, *(values for values in answers if values != current)]
        on = tuple(values for values in ordered if answers[values])
        off = tuple(values for values in ordered if not answers[values])
        return Gate(names, on, off, answers[current])

    def forget(self) -> None:
        """Only the canonical spellings are known."""
        self._spellings, self._answers = {}, {}


def _raw(name: str, env: Mapping[str, str | None] | None) -> Any:
    if env is None:
        return LIVE.get(live_key(name))
    text = env.get(name)
    return None if text is None else live_value(text)


def warn_not_boolean(name: str, text: str) -> None:
    """One warning for a value that is no boolean."""
    logs.warn_once(
        ('not boolean', name, text), '%s=%r is not a boolean: use %s. It counts as unset.', name, text, BOOLEAN_CHOICES
    )


def read_boolean(name: str) -> bool | None:
    """The variable `name` as a boolean, None if it is unset or (with a warning) no boolean."""
    text = text_of(LIVE.get(live_key(name)))
    if text is None:
        return None
    stated = parse_boolean(text)
    if stated is None:
        warn_not_boolean(name, text)
    return stated


def _literal_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Environment variables whose names stand as literals in a function that reads the environment."""
    codes = codes_of(function)
    if not any({'environ', 'getenv'} & set(code.co_names) for code in codes):
        return ()
    words = [constant for code in codes for constant in code.co_consts if isinstance(constant, str)]
    return tuple(word for word in words if _VARIABLE.fullmatch(word))


def _reads_anything(function: Callable[..., Any]) -> bool:
    """Whether a function's answer may change from call to call: it names a global, an attribute or a closure."""
    codes = codes_of(function)
    return not codes or any(code.co_names or code.co_freevars for code in codes)
