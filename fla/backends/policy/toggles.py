"""Toggles: the environment variable of a backend, tested in line on every call.

Generated code compares the raw value with the spellings seen so far. A new spelling makes a function re-plan once. So any
number of flips costs a compiled caller two frames, and a flip costs an eager caller nothing.
"""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fla.backends.backend.base import BaseBackend, as_boolean, belongs_to, enabled_by_default, overrides
from fla.backends.backend.untraceable import codes_of
from fla.backends.core import logs
from fla.backends.core.errors import BackendBugError
from fla.backends.core.signature import location
from fla.utils.env import BOOLEAN_CHOICES, FALSE_LITERALS, LIVE, TRUE_LITERALS, live_key, live_value, parse_boolean, text_of

# spellings per toggle: more than anyone uses on purpose
_MOST_SPELLINGS = 64

_VARIABLE = re.compile(r'[A-Z][A-Z0-9_]+')
# the raw value of each variable, None if unset
Raw = tuple[Any, ...]


@dataclass(frozen=True)
class Gate:
    """The toggle of a backend, tested in line.

    Attributes:
        variables: environment variables that decide.
        on, off: known raw values that enable or disable; any other value makes the function re-plan.
        is_on: the state when the plan was built (that group is tested first).
        ask: replaces all that for an `is_enabled` whose variables are unknown: asked on each call, never in compiled code.
        problem: why the backend's own code could not answer; it then counts as off.
    """

    variables: tuple[str, ...] = ()
    on: tuple[Raw, ...] = ()
    off: tuple[Raw, ...] = ()
    is_on: bool = True
    ask: Callable[[], bool] | None = None
    problem: str | None = None

    @property
    def source(self) -> str:
        """The names of what decides, for `explain`."""
        return ', '.join(self.variables) or ('is_enabled()' if self.ask else 'default_enable')

    @property
    def says_off(self) -> str:
        """The reason if it is off."""
        return self.problem or f'switched off by {self.source}'


def _gate(names: tuple[str, ...], means: Mapping[Raw, bool], current: Raw, problem: str | None) -> Gate:
    # the current value first: most calls compare no other
    ordered = [current, *(values for values in means if values != current)]
    on = tuple(values for values in ordered if means[values])
    return Gate(names, on, tuple(values for values in ordered if not means[values]), means[current], problem=problem)


class Toggles:
    """The raw values seen so far, and their meaning. Shared by all functions of a dispatcher.

    Args:
        retired: old variable name → its replacement. An old toggle counts where the new one is unset.
    """

    def __init__(self, retired: Mapping[str, str] | None = None) -> None:
        self._retired = dict(retired or {})
        self._spellings: dict[tuple[str, ...], set[Raw]] = {}
        # the key holds the backend, whose id another one might get
        self._answers: dict[tuple[BaseBackend, tuple[str, ...]], dict[Raw, bool]] = {}

    def variables(self, backend: BaseBackend) -> tuple[str, ...]:
        """Returns the variables that decide whether a backend is enabled."""
        own = [backend.env_var, *(old for old, new in self._retired.items() if new == backend.env_var)]
        found = tuple(name for name in own if name)
        if overrides(backend, 'is_enabled'):
            found += tuple(backend.extra_env) or _literal_names(backend.is_enabled)
        return tuple(dict.fromkeys(found))

    def gate(self, backend: BaseBackend, env: Mapping[str, str | None] | None = None, *, strict: bool = False) -> Gate:
        """Returns the gate of a backend under the live environment, or under the fixed values `env`.

        Raises:
            BackendBugError: under strict, if the backend's own `is_enabled` or `default_enable` raises. Otherwise the error
                is logged and counts as off.
        """
        names = self.variables(backend)
        if overrides(backend, 'is_enabled'):
            return self._overridden(backend, names, env, strict)
        unset_means, problem = _ask(backend, 'default_enable', partial(enabled_by_default, backend), strict)
        if not names:
            return Gate(is_on=unset_means, problem=problem)
        return self._boolean(names, unset_means, problem, env)

    def _boolean(
        self, names: tuple[str, ...], unset_means: bool, problem: str | None, env: Mapping[str, str | None] | None
    ) -> Gate:
        """The first name is the toggle; the others are its retired names, which count where it is unset."""
        current = _raw(names, env)
        start = {(None,), *((live_value(text),) for text in TRUE_LITERALS + FALSE_LITERALS)} if len(names) == 1 else set()
        known = self._spellings.setdefault(names, start)
        if len(known) >= _MOST_SPELLINGS and current not in known:
            known.clear()
            known.update(start)
        known.add(current)
        for old, raw in zip(names[1:], current[1:], strict=True):
            if raw is not None:
                warn_retired(old, names[0])
        unset = (None,) * len(names)
        stated = {
            values: next((as_stated(n, text_of(raw)) for n, raw in zip(names, values, strict=True) if raw is not None), None)
            for values in sorted(known, key=lambda values: (values != unset, str(values)))
        }
        means = {values: unset_means if answer is None else answer for values, answer in stated.items()}
        return _gate(names, means, current, problem if stated[current] is None else None)

    def _overridden(
        self, backend: BaseBackend, names: tuple[str, ...], env: Mapping[str, str | None] | None, strict: bool
    ) -> Gate:
        asked = partial(_ask, backend, 'is_enabled', backend.is_enabled, strict)
        if not backend.extra_env and not _literal_names(backend.is_enabled) and _reads_more(backend.is_enabled):
            return Gate(ask=lambda: asked()[0], is_on=asked()[0])
        answers = self._answers.setdefault((backend, names), {})
        while True:
            current = _raw(names, env)
            if env is not None and current in answers:
                return Gate(is_on=answers[current])
            is_on, problem = asked()
            if current == _raw(names, env):  # else another thread has set a variable meanwhile
                break
        if not names or env is not None:
            return Gate(is_on=is_on, problem=problem)
        means = {**answers, current: is_on}
        if problem is None:
            answers[current] = is_on
        return _gate(names, means, current, problem)

    def forget(self, owner: Any = None) -> None:
        """Drops the answers of one backend instance or class; without an owner, all answers and spellings."""
        if owner is None:
            self._spellings, self._answers = {}, {}
            return
        for key in list(self._answers):
            if belongs_to(key[0], owner):
                self._answers.pop(key, None)


def _ask(backend: BaseBackend, what: str, question: Callable[[], Any], strict: bool) -> tuple[bool, str | None]:
    """Returns the answer of `is_enabled` or `default_enable`, and its problem: an exception is a bug, and counts as off.

    Raises:
        BackendBugError: under strict.
    """
    try:
        return as_boolean(question()), None
    except Exception as error:
        problem = f'{what} raised {type(error).__name__}: {error}'
        text = f'{what} of backend {backend.backend_type!r} ({location(type(backend))}) raised'
        if strict:
            raise BackendBugError(text) from error
        words = '%s; the backend is switched off. This is a bug in the backend.'
        logs.once(('enabled', id(backend), problem), logging.ERROR, words, text, exc_info=True)
        return False, problem


def _raw(names: tuple[str, ...], env: Mapping[str, str | None] | None) -> Raw:
    if env is None:
        return tuple(LIVE.get(live_key(name)) for name in names)
    return tuple(None if (text := env.get(name)) is None else live_value(text) for name in names)


def as_stated(name: str, text: str | None) -> bool | None:
    """Returns a variable's value as a boolean; None if it is unset or (with one warning) not a boolean."""
    stated = None if text is None else parse_boolean(text)
    if stated is None and text is not None:
        words = '%s=%.80r is not a boolean: use %s. It counts as unset.'
        logs.warn_once(('not boolean', name, text[:80]), words, name, text, BOOLEAN_CHOICES)
    return stated


def warn_retired(old: str, new: str) -> None:
    """Warns once about a variable that has a new name."""
    logs.warn_once(('retired', old), '%s is retired: it still works, set %s instead', old, new)


def _literal_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the variable names among the literals of a function that reads the environment."""
    codes = codes_of(function)
    if not any({'environ', 'getenv'} & set(code.co_names) for code in codes):
        return ()
    constants = [constant for code in codes for constant in code.co_consts]
    constants += [inner for constant in constants if isinstance(constant, (tuple, frozenset)) for inner in constant]
    return tuple(dict.fromkeys(word for word in constants if isinstance(word, str) and _VARIABLE.fullmatch(word)))


# names that an `is_enabled` may use and still depend on its own toggle alone
_OWN = {'os', 'environ', 'get', 'getenv', 'env_var', 'default_enable', 'is_enabled', '__class__', *dir(str), *dir(builtins)}


def _reads_more(function: Callable[..., Any]) -> bool:
    """Whether a function's answer may depend on more than the backend's own toggle."""
    codes = codes_of(function)
    names = {name for code in codes for name in (*code.co_names, *code.co_freevars)}
    if {'environ', 'getenv'} & names and 'env_var' not in names:
        return True
    return not codes or bool(names - _OWN)
