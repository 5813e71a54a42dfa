"""Toggles: the environment variable of a backend, tested in line on every call.

The generated code compares the raw value with the spellings known so far; only a spelling never seen before makes a
function re-plan, and is then known. So any number of flips costs a compiled caller two frames, and a flip costs an eager
caller nothing.
"""

from __future__ import annotations

import builtins
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fla.backends.backend.base import BaseBackend, as_boolean, enabled_by_default, overrides
from fla.backends.backend.untraceable import codes_of
from fla.backends.core import logs
from fla.backends.core.errors import BackendBugError
from fla.backends.core.signature import location
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

# Spellings remembered per toggle: more than anybody has on purpose.
_MOST_SPELLINGS = 64

_VARIABLE = re.compile(r'[A-Z][A-Z0-9_]+')


@dataclass(frozen=True)
class Gate:
    """The toggle of a backend, tested in line.

    Attributes:
        variables: environment variables whose raw values decide.
        on, off: the combinations of raw values known to mean so; any other one makes the function re-plan.
        is_on: what the values meant when the plan was built (that group is tested first).
        ask: instead of all that, an `is_enabled` whose variables nobody knows: asked on each call, never in compiled code.
        problem: what is wrong with the backend's own code, which could not say whether it is on; it then counts as off.
    """

    variables: tuple[str, ...] = ()
    on: tuple[tuple[Any, ...], ...] = ()
    off: tuple[tuple[Any, ...], ...] = ()
    is_on: bool = True
    ask: Callable[[], bool] | None = None
    problem: str | None = None

    @property
    def source(self) -> str:
        """Who decides, for `explain`."""
        return ', '.join(self.variables) or ('is_enabled()' if self.ask else 'default_enable')

    @property
    def says_off(self) -> str:
        """The reason when it is off."""
        return self.problem or f'switched off by {self.source}'


class Toggles:
    """What is known of raw values. Grows by a value at a time and is shared by all functions of a dispatcher.

    Args:
        retired: old variable name → the one that replaced it; an old toggle keeps working where the new one is unset.
    """

    def __init__(self, retired: Mapping[str, str] | None = None) -> None:
        self._retired = dict(retired or {})
        self._spellings: dict[tuple[str, ...], set[tuple[Any, ...]]] = {}
        # by backend and not by its id, which a later one may get
        self._answers: dict[tuple[BaseBackend, tuple[str, ...]], dict[tuple[Any, ...], bool]] = {}

    def variables(self, backend: BaseBackend) -> tuple[str, ...]:
        """The variables that decide whether a backend is enabled."""
        own = (backend.env_var, *self._old_names(backend.env_var)) if backend.env_var else ()
        if not overrides(backend, 'is_enabled'):
            return own
        found = tuple(backend.extra_env) or _literal_names(backend.is_enabled)
        return tuple(dict.fromkeys(own + found))

    def _old_names(self, name: str) -> tuple[str, ...]:
        return tuple(old for old, new in self._retired.items() if new == name)

    def gate(self, backend: BaseBackend, env: Mapping[str, str | None] | None = None, *, strict: bool = False) -> Gate:
        """The gate of a backend under the live environment, or under the fixed values `env`.

        Raises:
            BackendBugError: under strict, if the backend's own `is_enabled` or `default_enable` raises. Else that is logged
                and counts as off.
        """
        names = self.variables(backend)
        if overrides(backend, 'is_enabled'):
            asked = partial(_ask, backend, 'is_enabled', backend.is_enabled, strict)
            if not backend.extra_env and not _literal_names(backend.is_enabled) and _reads_more(backend.is_enabled):
                return Gate(ask=lambda: asked()[0], is_on=asked()[0])
            return self._overridden(backend, names, env, asked)
        unset_means, problem = _ask(backend, 'default_enable', partial(enabled_by_default, backend), strict)
        if not names:
            return Gate(is_on=unset_means, problem=problem)
        return self._boolean(names, unset_means, problem, env)

    def _boolean(
        self, names: tuple[str, ...], unset_means: bool, problem: str | None, env: Mapping[str, str | None] | None
    ) -> Gate:
        """The first name is the toggle; the others are its retired names, which speak where it is unset."""
        current = tuple(_raw(name, env) for name in names)
        start = {(None,), *((live_value(text),) for text in TRUE_LITERALS + FALSE_LITERALS)} if len(names) == 1 else set()
        known = self._spellings.setdefault(names, start)
        if len(known) >= _MOST_SPELLINGS and current not in known:
            known.clear()
            known.update(start)
        known.add(current)

        def states(values: tuple[Any, ...]) -> bool | None:
            name, raw = next(((n, v) for n, v in zip(names, values, strict=True) if v is not None), (names[0], None))
            stated = None if raw is None else parse_boolean(text_of(raw) or '')
            if stated is None and raw is not None:
                warn_not_boolean(name, text_of(raw) or '')
            return stated

        for old, raw in zip(names[1:], current[1:], strict=True):
            if raw is not None:
                warn_retired(old, names[0])
        # the current value first: it is the one compared on most calls
        ordered = [current, *sorted(known - {current}, key=lambda values: (values != (None,) * len(names), str(values)))]
        means = {values: unset_means if (stated := states(values)) is None else stated for values in ordered}
        on = tuple(values for values in ordered if means[values])
        off = tuple(values for values in ordered if not means[values])
        return Gate(names, on, off, means[current], problem=problem if states(current) is None else None)

    def _overridden(
        self,
        backend: BaseBackend,
        names: tuple[str, ...],
        env: Mapping[str, str | None] | None,
        asked: Callable[[], tuple[bool, str | None]],
    ) -> Gate:
        answers = self._answers.setdefault((backend, names), {})
        while True:
            current = tuple(_raw(name, env) for name in names)
            if env is not None and current in answers:
                return Gate(is_on=answers[current])
            is_on, problem = asked()
            # another thread may have set a variable while the question was answered
            if current == tuple(_raw(name, env) for name in names):
                break
        if not names or env is not None:
            return Gate(is_on=is_on, problem=problem)
        known = {**answers, current: is_on}
        if problem is None:
            answers[current] = is_on
        ordered = [current, *(values for values in known if values != current)]
        on = tuple(values for values in ordered if known[values])
        off = tuple(values for values in ordered if not known[values])
        return Gate(names, on, off, is_on, problem=problem)

    def forget(self, owner: Any = None) -> None:
        """What backends said is asked again: everything, or what concerns one backend instance or class. Without an owner,
        only the canonical spellings remain known."""
        if owner is None:
            self._spellings, self._answers = {}, {}
            return
        concerned = [
            key for key in list(self._answers) if key[0] is owner or (isinstance(owner, type) and isinstance(key[0], owner))
        ]
        for key in concerned:
            self._answers.pop(key, None)


def _ask(backend: BaseBackend, what: str, question: Callable[[], Any], strict: bool) -> tuple[bool, str | None]:
    """The answer of `is_enabled` or `default_enable`, and what is wrong with it: raising is a bug, and counts as off.

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
        logs.once(
            ('enabled', id(backend), problem),
            logging.ERROR,
            '%s; the backend is switched off. This is a bug in the backend.',
            text,
            exc_info=True,
        )
        return False, problem


def _raw(name: str, env: Mapping[str, str | None] | None) -> Any:
    if env is None:
        return LIVE.get(live_key(name))
    text = env.get(name)
    return None if text is None else live_value(text)


def warn_not_boolean(name: str, text: str) -> None:
    """One warning for a value that is no boolean."""
    logs.warn_once(
        ('not boolean', name, text[:80]),
        '%s=%.80r is not a boolean: use %s. It counts as unset.',
        name,
        text,
        BOOLEAN_CHOICES,
    )


def warn_retired(old: str, new: str) -> None:
    """One warning for a variable that has a new name."""
    logs.warn_once(('retired', old), '%s is retired: it still works, set %s instead', old, new)


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
    constants = [constant for code in codes for constant in code.co_consts]
    constants += [inner for constant in constants if isinstance(constant, (tuple, frozenset)) for inner in constant]
    return tuple(dict.fromkeys(word for word in constants if isinstance(word, str) and _VARIABLE.fullmatch(word)))


# What an `is_enabled` may name and still hang on its own toggle alone.
_OWN = {'os', 'environ', 'get', 'getenv', 'env_var', 'default_enable', 'is_enabled', '__class__', *dir(str), *dir(builtins)}


def _reads_more(function: Callable[..., Any]) -> bool:
    """Whether a function's answer may change with something else than the backend's own toggle."""
    codes = codes_of(function)
    names = {name for code in codes for name in (*code.co_names, *code.co_freevars)}
    if {'environ', 'getenv'} & names and 'env_var' not in names:
        return True
    return not codes or bool(names - _OWN)
