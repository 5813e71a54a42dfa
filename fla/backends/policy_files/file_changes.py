"""When a file may have changed: reported by the operating system, or found by reading it.

Its directories are watched, so that a save by `os.replace` and a swapped link (`..data` of a mounted ConfigMap) are seen as
well as a write in place.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fla.backends.policy_files.versions import read_regular

# How often the directories themselves are looked at: a removed and remade one has to be watched anew.
LOOK_AGAIN_SECONDS = 1.0
# A file that never rests is read all the same after this many debounces.
_MOST_DEBOUNCES = 20
STEP_MILLISECONDS = 25
_NEVER = float('inf')


@dataclass(frozen=True)
class Watched:
    """A file that is watched.

    Attributes:
        path: the file.
        debounce: seconds without a further write before a change is told.
        stopping: set when nobody asks any more.
        seen: the state that it was last seen in.
        look_again: whether it is to be read although nothing is reported: it is bad, and may be readable again.
    """

    path: str
    debounce: float
    stopping: threading.Event
    seen: Callable[[], str]
    look_again: Callable[[], object]


def polled(file: Watched, seconds: float) -> Iterator[None]:
    """Yields every so many seconds, later while the file changes. The content is compared: times of files may be too
    coarse (watchfiles' own polling sees one write a second), or come from another host's clock."""
    while not file.stopping.wait(seconds):
        state = state_of(file.path)
        if state != file.seen():
            for _ in range(_MOST_DEBOUNCES):
                if file.stopping.wait(file.debounce):
                    return
                before, state = state, state_of(file.path)
                if before == state:
                    break
        yield


def reported(file: Watched) -> Iterator[None]:
    """Yields when the file may have changed and is quiet since. Ends when other directories have to be watched."""
    names = _names_on_the_way(file.path)
    directories = _directories_of(names, file.path)
    if not directories:
        file.stopping.wait(LOOK_AGAIN_SECONDS)
        yield
        return
    now = time.monotonic()
    # it may have been written before its directories were watched
    due, latest, look_again = now + file.debounce, _NEVER, now + LOOK_AGAIN_SECONDS
    for changes in import_watchfiles().watch(
        *directories,
        watch_filter=None,
        debounce=2 * STEP_MILLISECONDS,
        step=STEP_MILLISECONDS,
        rust_timeout=max(STEP_MILLISECONDS, int(file.debounce * 500)),
        yield_on_timeout=True,
        stop_event=file.stopping,
        raise_interrupt=False,
        force_polling=False,
        recursive=False,
    ):
        now = time.monotonic()
        ours = any(name in names for _, name in changes)
        if ours:
            latest = now + _MOST_DEBOUNCES * file.debounce if latest == _NEVER else latest
            due = min(now + file.debounce, latest)
        if now >= due:
            due = latest = _NEVER
            yield
        if ours or now >= look_again:
            look_again = now + LOOK_AGAIN_SECONDS
            if due == _NEVER and file.look_again():
                due = now + file.debounce  # readable again, or thawed: nothing reports that
            found = _names_on_the_way(file.path)
            if found != names or _directories_of(found, file.path) != directories:
                return


def import_watchfiles() -> Any:
    """The module, imported when somebody watches."""
    try:
        import watchfiles
    except ImportError as error:
        raise ImportError(
            "watch_policy() needs watchfiles, of the extra 'policy': pip install watchfiles; or poll=True"
        ) from error
    return watchfiles


def state_of(path: str) -> str:
    """The content's hash, or why it cannot be read."""
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        return f'{type(error).__name__} {error.errno}'


def is_content(state: str) -> bool:
    """Whether a state is that of a file that can be read."""
    return ' ' not in state


def _names_on_the_way(path: str) -> frozenset[str]:
    """The file and every symbolic link that leads to it, in the middle of the path, too: where one of these names changes,
    `path` may read something else. A mounted ConfigMap's `policy.yaml` leads over `..data`, which is what is swapped."""
    names: set[str] = set()
    rest = list(reversed(Path(path).parts))
    at, links = rest.pop(), 0
    while rest and links < 40:  # as many as Linux follows: they may lead in a circle
        part = rest.pop()
        if part == os.pardir:
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, part)
        try:
            target = Path(os.readlink(here))
        except OSError:
            at = here
            continue
        links += 1
        names.add(here)
        if target.is_absolute():
            at = target.anchor
        rest.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
    return frozenset({*names, at})


def _directories_of(names: Iterable[str], path: str) -> dict[str, tuple[int, int]]:
    """The directories that hold these names, with what tells a directory from one of the same name made later. Links in the
    root directory are the system's."""
    found = {}
    for directory in sorted({os.path.dirname(name) for name in names}):
        if directory == os.path.dirname(directory) != os.path.dirname(path):
            continue
        try:
            status = os.stat(directory)
        except OSError:
            continue
        found[directory] = status.st_dev, status.st_ino
    return found
