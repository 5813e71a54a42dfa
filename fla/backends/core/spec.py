"""The description of a dispatched function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fla.backends.core.signature import Signature


@dataclass(frozen=True, eq=False)
class FunctionSpec:
    """A function that `@dispatch` decorated.

    Attributes:
        operation, name: its operation and its own name.
        signature: its parameters.
        default: the decorated function, which is the default implementation.
        check: raises for a bad call before the first candidate is asked, or None.
        default_verifier: accepts or rejects calls for the default; None accepts all.
        mutates: parameters that the operation changes in place.
        place: file and line of its definition.
        key: 'operation.name'.
    """

    operation: str
    name: str
    signature: Signature
    default: Callable[..., Any]
    check: Callable[..., Any] | None = None
    default_verifier: Callable[..., Any] | None = None
    mutates: tuple[str, ...] = ()
    place: str = ''
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, 'key', f'{self.operation}.{self.name}')
