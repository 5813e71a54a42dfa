"""Other distributions with files under `fla/`, such as flash-linear-attention. Installed together, one overwrites files of
the other, and what then fails does not say why.

Asked only while an error is being built: the metadata of everything that is installed takes about 0.1 s to read.
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
# Known to own files there even where they came without a list of them, as from a Linux distribution.
_KNOWN = ('fla-core', 'flash-linear-attention')


@dataclass(frozen=True)
class Owner:
    """A distribution: its name, its version, and the folder it is installed in."""

    name: str
    version: str
    where: str

    def __str__(self) -> str:
        return f'{self.name} {self.version} (installed at {self.where})'


def other_owners() -> tuple[Owner, ...]:
    """The distributions, besides this one, that own files under `fla/`. Read once per `sys.path`."""
    return _owners(tuple(sys.path))


@functools.lru_cache(maxsize=4)
def _owners(path: tuple[str, ...]) -> tuple[Owner, ...]:
    return tuple(dict.fromkeys(_read(path)))


def _read(path: tuple[str, ...]) -> Iterator[Owner]:
    for distribution in importlib.metadata.distributions(path=list(path)):
        try:
            name = distribution.metadata['Name'] or OURS  # one without a name could not be uninstalled
            normal = re.sub(r'[-_.]+', '-', name).lower()
            if normal != OURS and (normal in _KNOWN or _owns(distribution)):
                yield Owner(name, distribution.version, str(distribution.locate_file('')))
        except Exception:
            # broken metadata of some package: a conflict that cannot be seen is no reason to lose the error being built
            continue


def _owns(distribution: importlib.metadata.Distribution) -> bool:
    if TOP in (distribution.read_text('top_level.txt') or '').split():
        return True
    record = distribution.read_text('RECORD') or ''
    return f'\n{record}'.find(f'\n{TOP}/') >= 0


def conflict() -> str | None:
    """A sentence that names them and says what to do; None where there is no other owner."""
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
    """A message, and the conflict if there is one."""
    found = conflict()
    return text if found is None else f'{text}\nPossibly because {found}.'


def missing(module: str, name: str) -> Exception:
    """What the `__getattr__` of a package raises: an AttributeError; in `from module import name`, where Python would put
    its own words in place of one, an ImportError that names the conflict, if there is one."""
    text = f'module {module!r} has no attribute {name!r}'
    if name.startswith('_') or importlib.util.find_spec(f'{module}.{name}') is not None:
        # a submodule that is about to be imported
        return AttributeError(text)
    caller = sys._getframe(2).f_code
    if caller.co_name == '_handle_fromlist' and conflict() is not None:
        return ImportError(with_conflict(f'cannot import name {name!r} from {module!r}.'), name=module)
    return AttributeError(with_conflict(text))
