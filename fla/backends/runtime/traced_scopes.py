"""Plans for policy scopes that are entered inside a region that Dynamo is tracing."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from fla.backends.core.errors import DispatchError
from fla.backends.core.locking import lock
from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import Layer, State
from fla.backends.runtime.dispatcher import Dispatcher

# Functions that one entry point keeps.
_MOST_FUNCTIONS = 64


class Box:
    """Functions for the policies that are entered inside a trace, by attribute: Dynamo reads an object's attributes when it
    gets there, while it would snapshot a dictionary."""


class TracedScopePlans:
    """The functions of one entry point that Dynamo finds in its `box`, by the scopes they are for.

    Args:
        operation: whose backends serve the function.
        make: a plan's function under a state (without the function's own policy), and its serial.
        new_serial: a number that no plan and no function had before.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        operation: str,
        make: Callable[[State], tuple[FunctionType, str]],
        new_serial: Callable[[], str],
    ) -> None:
        self.dispatcher, self.operation, self.box = dispatcher, operation, Box()
        self._make, self._new_serial = make, new_serial
        self._names: dict[tuple[Any, State, int], str] = {}

    def forget(self) -> None:
        """Plan again for scopes that are entered from now on. Functions stay: a thread may be about to call one."""
        self._names = {}

    def has(self, serial: str) -> bool:
        """Whether the plan of that serial is in use."""
        return f'plan{serial}' in self._names.values()

    def select(self, layers: tuple[tuple[Any, ...], ...]) -> str:
        """The attribute of the box that holds the plan for scopes entered inside a trace, innermost last.

        A second attempt of the same trace must get the same answer.
        """
        try:
            return self._name_for(layers)
        except DispatchError as error:
            # raised where Dynamo expects errors of the program, not accidents of its own
            kind, text = type(error), str(error)

            def fail(*args: Any, **kwargs: Any) -> Any:
                raise kind(text)

            return self._put(f'error{self._new_serial()}', fail)

    def _name_for(self, layers: tuple[tuple[Any, ...], ...]) -> str:
        policies = self.dispatcher.policies
        policies.refuse_if_frozen('enter a scope')
        now = policies.now
        key = layers, now.state, now.generation(self.operation)
        known = self._names.get(key)
        if known is not None:
            return known
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
            # not at once with the plans: a thread may be between the name and the attribute
            for old in list(vars(self.box))[:-_MOST_FUNCTIONS]:
                delattr(self.box, old)
                self._names = {k: v for k, v in self._names.items() if v != old}
        return name
