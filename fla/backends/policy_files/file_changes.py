"""Wakes a watcher when a file may have changed: on reports of the operating system, or at intervals."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator

from fla.backends.policy_files.versions import read_regular

# Changes that the operating system does not report for the two watched directories are found this late: a link in the
# middle of the path is swapped, the directory is removed and made again.
LOOK_AGAIN_SECONDS = 1.0
_STEP_MILLISECONDS = 25


def polled(seconds: float, stopping: threading.Event) -> Iterator[None]:
    """Yields at intervals until `stopping` is set."""
    while not stopping.wait(seconds):
        yield


def reported(path: str, stopping: threading.Event) -> Iterator[None]:
    """Yields when an entry changed in the directory of the file or of its target, and every second, until `stopping` is set.
    Directories are watched, since `os.replace` and a swapped link (`..data` of a mounted ConfigMap) leave the old file as it
    was.

    Raises:
        OSError: if the operating system has no watches left.
    """
    import watchfiles

    while not stopping.is_set():
        directories = _directories(path)
        if not directories:
            stopping.wait(LOOK_AGAIN_SECONDS)
            yield
            continue
        try:
            for _ in watchfiles.watch(
                *directories,
                watch_filter=None,
                debounce=2 * _STEP_MILLISECONDS,
                step=_STEP_MILLISECONDS,
                rust_timeout=int(LOOK_AGAIN_SECONDS * 1000),
                yield_on_timeout=True,
                stop_event=stopping,
                raise_interrupt=False,
                force_polling=False,
                recursive=False,
            ):
                yield
                if _directories(path) != directories:
                    break
        except FileNotFoundError:  # the directory was removed just now
            stopping.wait(_STEP_MILLISECONDS / 1000)


def _directories(path: str) -> dict[str, tuple[int, int]]:
    """Returns the existing directories of the file and of its target, each with what identifies it: a new directory may have
    an old one's name."""
    found = {}
    for directory in (os.path.dirname(path), os.path.dirname(os.path.realpath(path))):
        try:
            status = os.stat(directory)
        except OSError:
            continue
        found[directory] = status.st_dev, status.st_ino
    return found


def state_of(path: str) -> str:
    """Returns the hash of a file's content, or why it cannot be read. Times are not compared: they may be coarse, or come
    from another host's clock."""
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        return f'{type(error).__name__} {error.errno}'


def stamp_of(path: str) -> tuple[int, ...] | None:
    """Returns what a write usually changes, for one system call; None if there is no file. Among busy threads each call may
    wait 5 ms for each of them, so reading the content takes five times as long."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def is_content(state: str) -> bool:
    """Returns whether a state is a hash of content."""
    return ' ' not in state
