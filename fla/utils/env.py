"""Environment variables: strict values, and a live view that `torch.compile` can guard.

Dynamo traces `os.environ.get('X')` of an *unset* variable without a guard, so compiled code does not notice when X is set.
Reading the dictionary behind `os.environ` with a literal key gives exactly one guard, on that variable. The dictionary and
its key encoding are private names of CPython (stable since 3.2), used in this module only.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any

TRUE_LITERALS = ('1', 'true', 'yes', 'on')
FALSE_LITERALS = ('0', 'false', 'no', 'off')
BOOLEAN_CHOICES = ', '.join(TRUE_LITERALS) + ' or ' + ', '.join(FALSE_LITERALS)

# A Python without the private names uses the public mapping: right in eager code, stale under torch.compile.
_private = hasattr(os.environ, '_data') and hasattr(os.environ, 'encodekey') and hasattr(os.environ, 'decodevalue')
LIVE: Mapping[Any, Any] = os.environ._data if _private else os.environ  # type: ignore[attr-defined]


def live_key(name: str) -> Any:
    """The key of variable `name` in `LIVE`; its `repr` is a literal for generated code."""
    return os.environ.encodekey(name) if _private else name


def live_value(text: str) -> Any:
    """The form in which `LIVE` stores the value `text`."""
    return os.environ.encodevalue(text) if _private else text


def text_of(raw: Any) -> str | None:
    """A raw value of `LIVE` as text, None for an unset variable."""
    if raw is None:
        return None
    return str(os.environ.decodevalue(raw)) if _private else str(raw)


def parse_boolean(text: str) -> bool | None:
    """Parse `1/true/yes/on` or `0/false/no/off`, in any case, spaces stripped; None for anything else."""
    word = text.strip().lower()
    if word in TRUE_LITERALS:
        return True
    return False if word in FALSE_LITERALS else None


def split_list(text: str, separators: str = ',|') -> tuple[str, ...]:
    """The non-empty words of a list such as `a, b|c`, stripped and case-folded."""
    for separator in separators[1:]:
        text = text.replace(separator, separators[0])
    return tuple(word.strip().casefold() for word in text.split(separators[0]) if word.strip())


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest known name, or an empty string if none is close."""
    match = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ''
