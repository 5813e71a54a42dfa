"""Plans for policy scopes that are entered inside a region that Dynamo is tracing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.core.locking import lock
from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import Layer, State
from fla.backends.runtime.dispatcher import Dispatcher

# Functions stored per entry point.
_MOST_FUNCTIONS = 64


class Box:
    """Functions as attributes: Dynamo reads an object's attribute when it needs it, but would copy a whole dictionary."""


class TracedScopePlans:
    """The functions of one entry point for scopes entered in a trace. Dynamo finds them in `box`.

    Args:
        operation: the operation of the function.
        make: makes the function for a state (without the function's own policy); returns it with its plan's serial.
    """

    def __init__(self, dispatcher: Dispatcher, operation: str, make: Callable[[State], tuple[FunctionType, str]]) -> None:
        self.dispatcher, self.operation, self.box = dispatcher, operation, Box()
        self._make, self._errors = make, itertools.count()
        self._names: dict[tuple[Any, State, int], str] = {}

    def forget(self) -> None:
        """Plan again for scopes that are entered from now on. Functions stay: a thread may be about to call one."""
        self._names = {}

    def has(self, serial: str) -> bool:
        """Whether the plan of that serial is in use."""
        return f'plan{serial}' in self._names.values()

    def select(self, layers: tuple[tuple[Any, ...], ...]) -> str:
        """The attribute of the box for scopes entered in a trace, innermost last; the same for each attempt of a trace."""
        try:
            return self._name_for(layers)
        except DispatchError as error:
            # raised by the selected function: Dynamo treats an error there as the program's, and an error here as its own
            kind, text = type(error), str(error)

            def fail(*args: Any, **kwargs: Any) -> Any:
                raise kind(text)

            return self._put(f'error{next(self._errors)}', fail)

    def _name_for(self, layers: tuple[tuple[Any, ...], ...]) -> str:
        policies = self.dispatcher.policies
        policies.refuse_if_frozen('enter a scope')
        now = policies.now
        key = layers, now.state, now.generation(self.operation)
        if key in (names := self._names):
            return names[key]
        entered = []
        for spec in layers:
            policy = Policy(*spec)
            policies.check_scope(policy)
            entered.append(Layer(policy, 'a scope in the compiled region', of_call=True))
        function, serial = self._make(now.state.above(*reversed(entered)))
        name = self._put(f'plan{serial}', function)
        with lock:
            self._names = {**self._names, key: name}
        return name

    def _put(self, name: str, function: Callable[..., Any]) -> str:
        with lock:
            setattr(self.box, name, function)
            # the oldest, not all when plans change: a thread may have the name but not yet the attribute
            for old in list(vars(self.box))[:-_MOST_FUNCTIONS]:
                delattr(self.box, old)
                self._names = {k: v for k, v in self._names.items() if v != old}
        return name
