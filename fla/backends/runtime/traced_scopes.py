"""Plans for policy scopes that are entered inside a region that Dynamo is tracing."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from fla.backends.core.errors import DispatchError
from fla.backends.core.locking import lock
from fla.backends.plan.plan import build
from fla.backends.policy.policy import Policy
from fla.backends.policy.precedence import Layer, State

if TYPE_CHECKING:
    from fla.backends.runtime.entry import Entry

# Functions kept in a box.
_KEPT = 64


class Box:
    """Functions for the policies that are entered inside a trace, by attribute: Dynamo reads an object's attributes when it
    gets there, while it would snapshot a dictionary."""


class TracedScopePlans:
    """The functions of one entry point that Dynamo finds in its `box`, by the scopes they are for."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.box = entry, Box()
        self.known: dict[tuple[Any, State, int], str] = {}

    def select(self, layers: tuple[tuple[Any, ...], ...]) -> str:
        """The attribute of the box that holds the plan for scopes entered inside a trace, innermost last.

        A second attempt of the same trace must get the same answer.
        """
        try:
            return self._name_for(layers)
        except DispatchError as error:
            # raised where Dynamo expects errors of the program, which are no accidents of its own
            kind, text = type(error), str(error)

            def fail(*args: Any, **kwargs: Any) -> Any:
                raise kind(text)

            return self._put(f'error{self.entry.serial()}', fail)

    def _name_for(self, layers: tuple[tuple[Any, ...], ...]) -> str:
        entry = self.entry
        entry.dispatcher.refuse_if_frozen('enter a scope')
        key = layers, entry.dispatcher.state(), entry.dispatcher.generation(entry.operation)
        known = self.known.get(key)
        if known is not None:
            return known
        virtual = []
        for spec in layers:
            policy = Policy(*spec)
            entry.dispatcher.check_scope(policy)
            virtual.append(Layer(policy, 'a scope in the compiled region', of_call=True))
        base = key[1].above(*reversed(virtual))
        state = base.above(entry.own) if entry.own is not None else base
        in_force = entry.policy(state)
        plan = build(entry.signature, entry.members(), in_force, entry.platforms, entry._facts(in_force))
        kept = entry._generate(plan, virtual=False)
        function = FunctionType(kept.code, entry._namespace, entry.name, *entry.signature.defaults()[:1])
        function.__kwdefaults__ = entry.signature.defaults()[1]
        name = self._put(f'plan{kept.serial}', function)
        with lock:
            self.known = {**self.known, key: name}
        return name

    def _put(self, name: str, function: Callable[..., Any]) -> str:
        with lock:
            setattr(self.box, name, function)
            # not at once with the plans: a thread may be between the name and the attribute
            for old in list(vars(self.box))[:-_KEPT]:
                delattr(self.box, old)
                self.known = {k: v for k, v in self.known.items() if v != old}
        return name
