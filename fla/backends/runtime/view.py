"""`function.backends`: the candidates of a function and their states."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView

from fla.backends.backend.base import format_reason
from fla.backends.core.errors import unknown_name
from fla.backends.plan.plan import Member
from fla.backends.policy.policy import normalise
from fla.backends.runtime.dispatcher import LiveFunction


def state_of(entry: LiveFunction, member: Member) -> str:
    """The part of a backend's state that does not depend on a call."""
    if member.unusable is not None:
        return f'unavailable: {member.unusable}'
    usable, reason = entry.dispatcher.availability.package(member.backend)
    if not usable:
        return f'unavailable: {format_reason(reason)}'
    gate = entry.dispatcher.toggles.gate(member.backend)
    return 'available' if gate.is_on else f'disabled: {gate.says_off}'


class BackendsView(Mapping[str, str]):
    """`function.backends`: name → state of every candidate, by priority. Each access reads the current state."""

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

    # Mapping's own methods would read the states again for each name, and a backend may be unregistered meanwhile

    def items(self) -> ItemsView[str, str]:
        return self._states().items()

    def values(self) -> ValuesView[str]:
        return self._states().values()

    def __repr__(self) -> str:
        return f'{self._entry.spec.key} backends: {self._states()}'
