"""A policy that came from a file, as it was read."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class PolicyVersion:
    """A policy file's content at one time.

    Attributes:
        version: counts what has been put in force as the file layer of a namespace; 0 for what has only been read.
        sha256: of the bytes that were read.
        source: the file.
        time: when it was read, in seconds since the epoch.
        policy: what it says.
    """

    version: int
    sha256: str
    source: str
    time: float
    policy: Policy

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        found = {name: getattr(self, name) for name in ('version', 'sha256', 'source', 'time')}
        return {**found, 'policy': self.policy.to_dict()}
