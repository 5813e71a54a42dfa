"""Finds other distributions with files under `fla/`, such as flash-linear-attention.

If both are installed, one has overwritten files of the other, and the errors that follow do not say so. This module adds it.
It runs only while an error is built: reading the metadata of all installed packages takes about 0.1 s.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

OURS, TOP = 'fla-dispatch', 'fla'
# Own files there even if their metadata lists none, as when installed by a Linux distribution.
_KNOWN = ('fla-core', 'flash-linear-attention')


@dataclass(frozen=True)
class Owner:
    """An installed distribution: its name, version and folder."""

    name: str
    version: str
    where: str

    def __str__(self) -> str:
        return f'{self.name} {self.version} (installed at {self.where})'


def other_owners() -> tuple[Owner, ...]:
    """The other distributions that own files under `fla/`. Read once per `sys.path`."""
    return _owners(tuple(sys.path))


@functools.lru_cache(maxsize=4)
def _owners(path: tuple[str, ...]) -> tuple[Owner, ...]:
    return tuple(dict.fromkeys(_read(path)))


def _read(path: tuple[str, ...]) -> Iterator[Owner]:
    for distribution in importlib.metadata.distributions(path=list(path)):
        try:
            name = distribution.metadata['Name'] or OURS  # skips one without a name, which pip cannot uninstall
            normal = re.sub(r'[-_.]+', '-', name).lower()
            if normal != OURS and (normal in _KNOWN or _owns(distribution)):
                yield Owner(name, distribution.version, str(distribution.locate_file('')))
        except Exception:
            # Another package's metadata is broken. That must not replace the error being built.
            continue


def _owns(distribution: importlib.metadata.Distribution) -> bool:
    if TOP in (distribution.read_text('top_level.txt') or '').split():
        return True
    record = distribution.read_text('RECORD') or ''
    return f'\n{record}'.find(f'\n{TOP}/') >= 0


def conflict() -> str | None:
    """A sentence that names the other owners and says what to do; None without other owners."""
    found = other_owners()
    if not found:
        return None
    s, them = ('s', 'them') if len(found) > 1 else ('', 'it')
    names = ' '.join(owner.name for owner in found)
    return (
        f'files under {TOP}/ also belong to the distribution{s} {", ".join(map(str, found))}; uninstall {them}: '
        f'pip uninstall {names}; then install {OURS} again, whose files may be overwritten or gone'
    )


def with_conflict(text: str) -> str:
    """`text`, with the conflict appended if there is one."""
    found = conflict()
    return text if found is None else f'{text}\nPossibly because {found}.'


def missing(module: str, name: str) -> Exception:
    """The error for the `__getattr__` of a package to raise, which names a conflict with another distribution.

    It is an AttributeError, except in `from module import name` with a conflict: Python would replace the message of an
    AttributeError there, so it is an ImportError.
    """
    text = f'module {module!r} has no attribute {name!r}'
    if name.startswith('_') or importlib.util.find_spec(f'{module}.{name}') is not None:
        # private, or a submodule that Python imports next
        return AttributeError(text)
    caller = sys._getframe(2).f_code
    if caller.co_name == '_handle_fromlist' and conflict() is not None:
        return ImportError(with_conflict(f'cannot import name {name!r} from {module!r}.'), name=module)
    return AttributeError(with_conflict(text))
