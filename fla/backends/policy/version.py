"""A policy as a file said it at one time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fla.backends.policy.policy import Policy


@dataclass(frozen=True)
class PolicyVersion:
    """The content of a policy file at one time.

    Attributes:
        version: number of the version in its namespace, from 1; 0 for a file that was read and never put in force.
        sha256: hash of the bytes that were read.
        source: the file's path.
        time: when it was read, in seconds since the epoch.
        policy: the policy that it states.
    """

    version: int
    sha256: str
    source: str
    time: float
    policy: Policy

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        found = {name: getattr(self, name) for name in ('version', 'sha256', 'source', 'time')}
        return {**found, 'policy': self.policy.to_dict()}
