"""One version of a policy file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fla.backends.policy.policy import Policy


@dataclass(frozen=True)
class PolicyVersion:
    """The content of a policy file at one time.

    Attributes:
        version: number of the version in its namespace, from 1; 0 for a file that was read but never in force.
        sha256: hash of the bytes that were read.
        source: the file's path.
        time: when it was read, in seconds since the epoch.
        policy: its content.
    """

    version: int
    sha256: str
    source: str
    time: float
    policy: Policy

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return {**vars(self), 'policy': self.policy.to_dict()}
