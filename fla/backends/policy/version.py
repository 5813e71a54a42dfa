"""A policy as a file said it at one time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fla.backends.policy.policy import Policy


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
