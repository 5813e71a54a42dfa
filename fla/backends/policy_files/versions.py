"""Reading the bytes of a policy file."""

from __future__ import annotations

import errno
import os
import stat

from fla.backends.policy.policy import Policy


def checked_path(path: object) -> str:
    """The path of a policy file as text; `~` is the user's folder.

    Raises:
        TypeError: for something else.
    """
    found = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(found, str):
        hint = '; set_policy() puts a Policy in force' if isinstance(path, Policy) else ''
        raise TypeError(f'a policy file is named by a path, a str or os.PathLike[str], got {path!r}{hint}')
    return os.path.expanduser(found)


def read_regular(path: str) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: if it cannot be read, or is a pipe or a device, which might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, 'O_NONBLOCK', 0) | getattr(os, 'O_BINARY', 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, 'a policy file is a regular file, this is not', path)
        with open(descriptor, 'rb', closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
