"""`function.backends`: the candidates of a function and their states."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView

from fla.backends.backend.base import format_reason
from fla.backends.core.errors import unknown_name
from fla.backends.plan.plan import Member
from fla.backends.policy.policy import normalise
from fla.backends.runtime.dispatcher import LiveFunction


def state_of(entry: LiveFunction, member: Member) -> str:
    """A backend's state for a function, as far as that does not depend on a call."""
    dispatcher, backend = entry.dispatcher, member.backend
    if member.unusable is not None:
        return f'unavailable: {member.unusable}'
    usable, reason = dispatcher.availability.package(backend)
    if not usable:
        return f'unavailable: {format_reason(reason)}'
    gate = dispatcher.toggles.gate(backend)
    if not gate.is_on:
        return f'disabled: {gate.says_off}'
    return 'available'


class BackendsView(Mapping[str, str]):
    """`function.backends`: name → state of every candidate, in order of priority, read when looked at."""

    def __init__(self, entry: LiveFunction) -> None:
        self._entry = entry

    def _states(self) -> dict[str, str]:
        self._entry.dispatcher.discovery.load(self._entry.spec.operation)
        return {member.name: state_of(self._entry, member) for member in self._entry.members()}

    def __getitem__(self, name: str) -> str:
        states = self._states()
        known = next((own for own in states if own.casefold() == normalise(name)), None)
        if known is None:
            raise KeyError(str(unknown_name('backend', name, states, f' of {self._entry.spec.key}')))
        return states[known]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states())

    def __len__(self) -> int:
        return len(self._states())

    # from one look each: what a Mapping does by itself asks again for every name, which may be gone by then

    def items(self) -> ItemsView[str, str]:
        return self._states().items()

    def values(self) -> ValuesView[str]:
        return self._states().values()

    def __repr__(self) -> str:
        return f'{self._entry.spec.key} backends: {self._states()}'
