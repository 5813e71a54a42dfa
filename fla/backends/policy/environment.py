"""The policy variables of one prefix: what they are, and the layers they make.

They are read with the policy (at the first plan and on `refresh()`), unlike toggles, which are live. A bad value is one
warning and counts as unset; an unknown name is one warning with the nearest match. Nothing here ever fails an import.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping

from fla.backends.core import logs
from fla.backends.policy.on_error import ON_ERROR
from fla.backends.policy.policy import Policy, normalise
from fla.backends.policy.precedence import Layer
from fla.backends.policy.toggles import read_boolean, warn_retired
from fla.utils.env import LIVE, live_key, nearest, split_list, text_of

# name without prefix → (when it is read, what it does). The documentation's table is made from this one.
VARIABLES = {
    'DISABLE_BACKEND_DISPATCH': ('import', 'boolean: decorators return the undecorated functions'),
    'PER_OP': ('policy', '`op=a|b;op.function=c`: exclusive order per operation or function'),
    'PREFER': ('policy', '`a|b`: backends or kinds asked first'),
    'ALLOW_BACKENDS': ('policy', '`a,b`: the only backends allowed'),
    'DENY_BACKENDS': ('policy', '`a,b`: backends not allowed'),
    'DISPATCH_CONFIG': ('policy', 'a policy file (docs/policy.md), below every other variable'),
    'STRICT': ('policy', 'boolean: backend bugs and unmet wishes raise'),
    'REQUIRE_FIRST': ('policy', 'boolean: anything but the first available and enabled candidate raises'),
    'CHECK_VALUES': ('policy', 'boolean: checks look at tensor values (synchronises)'),
    'ON_ERROR': ('policy', '`raise` or `fallback`: whether a failure that its backend declares retryable moves on'),
    'DISPATCH_TRACE': ('policy', 'boolean: record every call, print a summary at exit'),
    'LOG_LEVEL': ('policy', 'DEBUG, INFO, WARNING, ERROR: level of the logger'),
    'PLUGIN_MODULES': ('first call', '`a.b,c`: modules with a function register(registries)'),
}


class Environment:
    """Reads the variables of a prefix.

    Args:
        prefix: 'FLA' for FLA_PER_OP and so on.
        retired: old variable name → the one that replaced it. Old names keep working and say so.
        others: variables of the prefix that the package reads itself.
    """

    def __init__(self, prefix: str, retired: Mapping[str, str], others: Collection[str] = ()) -> None:
        self.prefix, self.retired, self.others = prefix, dict(retired), frozenset(others)
        self.tracing = False

    def name(self, short: str) -> str:
        """The full name of one of `VARIABLES`."""
        return f'{self.prefix}_{short}'

    def text(self, short: str) -> str | None:
        """Its value, also under a retired name."""
        name = self.name(short)
        value = text_of(LIVE.get(live_key(name)))
        for old, new in self.retired.items():
            old_value = text_of(LIVE.get(live_key(old))) if new == name else None
            if old_value is not None:
                warn_retired(old, new)
                value = old_value if value is None else value
        return value

    def boolean(self, short: str) -> bool | None:
        """Its value as a boolean, None where unset or (with a warning) malformed."""
        name = self.name(short)
        if text_of(LIVE.get(live_key(name))) is None:
            name = next((old for old, new in self.retired.items() if new == name and self.text(short) is not None), name)
        return read_boolean(name)

    def layers(self) -> tuple[Layer, ...]:
        """The layers of the environment, highest first."""
        found: list[tuple[str, Policy]] = []
        order = self._per_op()
        if order:
            found.append(('PER_OP', Policy(order=tuple(order.items()))))
        prefer = self._list('PREFER')
        if prefer:
            found.append(('PREFER', Policy(prefer=prefer)))
        allow = self._list('ALLOW_BACKENDS')
        if allow is not None:
            found.append(('ALLOW_BACKENDS', Policy(allow=allow)))
        deny = self._list('DENY_BACKENDS')
        if deny:
            found.append(('DENY_BACKENDS', Policy(deny=deny)))
        for short, policy in (
            ('STRICT', Policy(strict=self.boolean('STRICT'))),
            ('REQUIRE_FIRST', Policy(require_first=self.boolean('REQUIRE_FIRST'))),
            ('CHECK_VALUES', Policy(check_values=self.boolean('CHECK_VALUES'))),
            ('ON_ERROR', Policy(on_error=self._on_error())),
        ):
            if policy != Policy():
                found.append((short, policy))
        self.tracing = bool(self.boolean('DISPATCH_TRACE'))
        self._log_level()
        return tuple(Layer(policy, self.name(short)) for short, policy in found)

    def _list(self, short: str) -> tuple[str, ...] | None:
        text = self.text(short)
        return None if text is None else tuple(normalise(word) for word in split_list(text))

    def _per_op(self) -> dict[str, tuple[str, ...]]:
        order: dict[str, tuple[str, ...]] = {}
        text = self.text('PER_OP') or ''
        for part in filter(None, (p.strip() for p in text.split(';'))):
            name, equals, tokens = part.partition('=')
            if not equals or not name.strip():
                logs.warn_once(
                    ('per op', part),
                    '%s: %r is left out: write operation=backend|backend, or operation.function=…, separated by ;',
                    self.name('PER_OP'),
                    part,
                )
                continue
            order[name.strip()] = split_list(tokens)
        return order

    def _on_error(self) -> str | None:
        text = self.text('ON_ERROR')
        word = text.strip().casefold() if text is not None else None
        if word is None or word in ON_ERROR:
            return word
        logs.warn_once(
            ('on error', text),
            '%s=%r is left out: it must be %s.%s',
            self.name('ON_ERROR'),
            text,
            ' or '.join(ON_ERROR),
            nearest(word, ON_ERROR),
        )
        return None

    def _log_level(self) -> None:
        text = self.text('LOG_LEVEL')
        if text is None:
            return
        try:
            logs.set_threshold(int(text) if text.strip().isdecimal() else text)
        except ValueError as error:
            logs.warn_once(('log level', text), '%s is left out: %s', self.name('LOG_LEVEL'), error)

    def warn_unknown(self, toggles: Callable[[], set[str]], load_all: Callable[[], None]) -> None:
        """Warn once about each variable of this prefix that nothing reads.

        Args:
            toggles: variables of the backends loaded so far.
            load_all: loads every operation; called only if a variable is unknown without that.
        """
        present = [name for name in os.environ if name.startswith(f'{self.prefix}_')]
        known = {self.name(short) for short in VARIABLES} | {*self.retired, *self.others}
        known |= toggles()
        if not set(present) <= known:
            load_all()
            known |= toggles()
        for name in sorted(present):
            if name not in known:
                logs.once(
                    ('unknown variable', name),
                    logging.WARNING,
                    'environment variable %s is set, but nothing reads it.%s',
                    name,
                    nearest(name, known),
                )
