"""A toy operation for tests of the framework.

Each implementation returns a tensor filled with its own number, so that the result shows which one ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from fla.backends import BackendRegistry, BaseBackend, dispatch

_numbers = itertools.count()


class Toy:
    """An operation with one function `f(q, k, scale=None, flag=False)` in its own registry.

    `toy.add('a', ...)` registers a backend; `toy.f` is the dispatched function; `toy.ran(*args)` calls it and returns the
    name of the backend that ran.
    """

    def __init__(self, **options: Any) -> None:
        self.op = f'toy{next(_numbers)}'
        self.dispatcher = options.get('dispatcher')
        self.registry = BackendRegistry(self.op, self.dispatcher)
        self.names = {0: 'default'}

        @dispatch(self.op, **options)
        def f(q: torch.Tensor, k: torch.Tensor, scale: float | None = None, flag: bool = False) -> torch.Tensor:
            """The toy function."""
            return q * 0

        self.f = f

    def add(
        self,
        name: str,
        *,
        accepts: Callable[..., Any] | None = None,
        prefers: Callable[..., Any] | None = None,
        register: bool = True,
        **attributes: Any,
    ) -> Any:
        """Registers a backend with the verifier `accepts(self, ...)`, which takes any of f's parameters."""
        number = len(self.names)
        self.names[number] = name

        def implementation(
            self: Any, q: torch.Tensor, k: torch.Tensor, scale: float | None = None, flag: bool = False
        ) -> torch.Tensor:
            return q * 0 + number

        members: dict[str, Any] = {'backend_type': name, 'f': implementation, **attributes}
        if accepts is not None:
            members['f_verifier'] = accepts
        if prefers is not None:
            members['f_prefers'] = prefers
        backend = type(f'Backend_{name}', (BaseBackend,), members)()
        self.handle = self.registry.register(backend) if register else None
        return backend

    def name_of(self, result: torch.Tensor) -> str:
        """Returns the name of the backend that made a result."""
        return self.names[int(result.reshape(-1)[0])]

    def ran(self, *args: Any, **kwargs: Any) -> str:
        """Calls f, with two small tensors by default, and returns the name of the backend that ran."""
        return self.name_of(self.f(*(args or (Q, Q)), **kwargs))


Q = torch.zeros(2, 8)
