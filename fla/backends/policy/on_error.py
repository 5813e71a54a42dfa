"""A policy's settings for a backend that raises: whether to try the next one, and when to skip it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from fla.utils.env import nearest

ON_ERROR = ('raise', 'fallback')


@dataclass(frozen=True)
class BreakerSettings:
    """When a circuit breaker opens, and for how long.

    Attributes:
        threshold: failures in a row that open it.
        cooldown: seconds until a probe.
        probe_timeout: seconds after which a probe that has not ended is given up, and another call may probe. Generous: the
            first call of a kernel may have to compile it.
    """

    threshold: int = 5
    cooldown: float = 30.0
    probe_timeout: float = 300.0

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, int) or self.threshold < 1:
            raise ValueError(f'threshold must be a whole number from 1, got {self.threshold!r}')
        for name in ('cooldown', 'probe_timeout'):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
                raise ValueError(f'{name} must be a number of seconds from 0, got {value!r}')
            object.__setattr__(self, name, float(value))
        if not self.probe_timeout:
            raise ValueError(f'probe_timeout must be larger than 0, or every call would be a probe; got {value!r}')

    @property
    def spec(self) -> tuple[Any, ...]:
        """The fields as constants, which compiled code can carry; `as_settings` reads them."""
        return astuple(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return asdict(self)


def as_settings(value: Any) -> BreakerSettings | None:
    """Returns breaker settings that are given as such, as a mapping, as a tuple of all fields, or as None.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if value is None or isinstance(value, BreakerSettings):
        return value
    known = [field.name for field in fields(BreakerSettings)]
    if isinstance(value, Mapping):
        for name in value:
            if name not in known:
                close = nearest(str(name), known)
                raise TypeError(f'breaker has no setting {name!r}.{close} It has {", ".join(known)}')
        return BreakerSettings(**value)
    if isinstance(value, tuple) and len(value) == len(known):
        return BreakerSettings(*value)
    raise TypeError(
        f'breaker must be BreakerSettings(threshold=5, cooldown=30, probe_timeout=300), or a mapping of these; got {value!r}'
    )
