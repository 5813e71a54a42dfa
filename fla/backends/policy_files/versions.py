"""A policy that was read from a file, and the file's path and bytes."""

from __future__ import annotations

import errno
import os
import stat

from fla.backends.policy.policy import Policy


def checked_path(path: object) -> str:
    """Returns the path of a policy file as text, with `~` expanded.

    Raises:
        TypeError: if it is not a path.
    """
    found = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(found, str):
        hint = '; set_policy() puts a Policy in force' if isinstance(path, Policy) else ''
        raise TypeError(f'a policy file is named by a path, a str or os.PathLike[str], got {path!r}{hint}')
    return os.path.expanduser(found)


def read_regular(path: str) -> bytes:
    """Returns the bytes of a file.

    Raises:
        OSError: if it cannot be read, or is a pipe or a device, which might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, 'O_NONBLOCK', 0) | getattr(os, 'O_BINARY', 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, 'a policy file must be a regular file', path)
        with open(descriptor, 'rb', closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
