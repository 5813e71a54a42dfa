"""The policy variables of a prefix, and the policy layers they make.

They are read at the first plan and on `refresh()`, unlike toggles, which are live. A bad value counts as unset, with one
warning; an unknown name is one warning with the nearest match. Nothing here fails an import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

from fla.backends.core import logs
from fla.backends.policy.on_error import ON_ERROR
from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import Layer
from fla.backends.policy.toggles import as_stated, warn_retired
from fla.utils.env import LIVE, live_key, nearest, split_list, text_of

# name without prefix → (when it is read, effect). The documentation's table is generated from it.
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
        retired: old variable name → its replacement. Old names keep working, with a warning.
        others: variables of the prefix that the package reads itself.

    Attributes:
        tracing: DISPATCH_TRACE, as of the last `layers()`.
    """

    def __init__(self, prefix: str, retired: Mapping[str, str], others: Collection[str] = ()) -> None:
        self.prefix, self.retired, self.others = prefix, dict(retired), frozenset(others)
        self.tracing = False

    def name(self, short: str) -> str:
        """Returns the full name of one of `VARIABLES`."""
        return f'{self.prefix}_{short}'

    def _read(self, short: str) -> tuple[str, str | None]:
        """Returns the name that is set, the current or a retired one, and its value."""
        name = self.name(short)
        value = text_of(LIVE.get(live_key(name)))
        for old in [old for old, new in self.retired.items() if new == name]:
            old_value = text_of(LIVE.get(live_key(old)))
            if old_value is not None:
                warn_retired(old, self.name(short))
                name, value = (old, old_value) if value is None else (name, value)
        return name, value

    def text(self, short: str) -> str | None:
        """Returns its value, also under a retired name."""
        return self._read(short)[1]

    def boolean(self, short: str) -> bool | None:
        """Returns its value as a boolean; None if it is unset or (with a warning) not a boolean."""
        return as_stated(*self._read(short))

    def layers(self) -> tuple[Layer, ...]:
        """Returns the layers of the environment, highest first. Also reads DISPATCH_TRACE and LOG_LEVEL."""
        found = {
            'PER_OP': Policy(order=self._per_op()),
            'PREFER': Policy(prefer=self._list('PREFER') or ()),
            'ALLOW_BACKENDS': Policy(allow=self._list('ALLOW_BACKENDS')),
            'DENY_BACKENDS': Policy(deny=self._list('DENY_BACKENDS') or ()),
            'STRICT': Policy(strict=self.boolean('STRICT')),
            'REQUIRE_FIRST': Policy(require_first=self.boolean('REQUIRE_FIRST')),
            'CHECK_VALUES': Policy(check_values=self.boolean('CHECK_VALUES')),
            'ON_ERROR': Policy(on_error=self._on_error()),
        }
        self.tracing = bool(self.boolean('DISPATCH_TRACE'))
        self._log_level()
        return tuple(Layer(policy, self.name(short)) for short, policy in found.items() if policy != Policy())

    def _list(self, short: str) -> tuple[str, ...] | None:
        text = self.text(short)
        return None if text is None else split_list(text)

    def _per_op(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        order = {}
        for part in filter(None, map(str.strip, (self.text('PER_OP') or '').split(';'))):
            name, equals, tokens = part.partition('=')
            if equals and name.strip():
                order[name.strip()] = split_list(tokens)
                continue
            words = '%s: %r is ignored: write operation=backend|backend, or operation.function=…, separated by ;'
            logs.warn_once(('per op', part), words, self.name('PER_OP'), part)
        return tuple(order.items())

    def _on_error(self) -> str | None:
        text = self.text('ON_ERROR')
        word = text.strip().casefold() if text is not None else None
        if word is None or word in ON_ERROR:
            return word
        words, choices = '%s=%r is ignored: it must be %s.%s', ' or '.join(ON_ERROR)
        logs.warn_once(('on error', text), words, self.name('ON_ERROR'), text, choices, nearest(word, ON_ERROR))
        return None

    def _log_level(self) -> None:
        text = self.text('LOG_LEVEL')
        try:
            if text is not None:
                logs.set_threshold(int(text) if text.strip().isdecimal() else text)
        except ValueError as error:
            logs.warn_once(('log level', text), '%s is ignored: %s', self.name('LOG_LEVEL'), error)

    def warn_unknown(self, toggles: Callable[[], set[str]], load_all: Callable[[], None]) -> None:
        """Warns once about each variable of this prefix that nothing reads.

        Args:
            toggles: returns the variables of the backends loaded so far.
            load_all: loads every operation; called only if a variable is unknown without that.
        """
        present = {name for name in os.environ if name.startswith(f'{self.prefix}_')}
        known = {*map(self.name, VARIABLES), *self.retired, *self.others, *toggles()}
        if not present <= known:
            load_all()
            known |= toggles()
        words = 'environment variable %s is set, but nothing reads it.%s'
        for name in sorted(present - known):
            logs.warn_once(('unknown variable', name), words, name, nearest(name, known))
