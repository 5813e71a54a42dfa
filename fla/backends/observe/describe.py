"""What there is: registries, functions, backends, problems. None of it needs a call."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fla.backends.backend.base import BaseBackend, format_reason
from fla.backends.core.errors import unknown_name
from fla.backends.plan.plan import Member
from fla.backends.policy.policy import normalise
from fla.utils.owners import conflict

if TYPE_CHECKING:
    from fla.backends.runtime.dispatcher import Dispatcher
    from fla.backends.runtime.entry import Entry

_SUFFIXES = ('_verifier', '_prefers')


def entry_of(function: Any) -> Entry:
    """The entry point behind a dispatched function.

    Raises:
        TypeError: if it is not dispatched.
    """
    entry = getattr(function, '__fla_entry__', None)
    if entry is None:
        raise TypeError(f'{getattr(function, "__qualname__", function)!r} is not a dispatched function')
    found: Entry = entry
    return found


def state_of(entry: Entry, member: Member) -> str:
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

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def _states(self) -> dict[str, str]:
        self._entry.dispatcher.discovery.load(self._entry.operation)
        return {member.name: state_of(self._entry, member) for member in self._entry.members()}

    def __getitem__(self, name: str) -> str:
        states = self._states()
        known = next((own for own in states if own.casefold() == normalise(name)), None)
        if known is None:
            raise KeyError(str(unknown_name('backend', name, states, f' of {self._entry.key}')))
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
        return f'{self._entry.key} backends: {self._states()}'


def snapshot(dispatcher: Dispatcher) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Every registry with its backends and where each was registered. Immutable; a picture, not a view."""
    picture = {}
    for operation, registry in sorted(dispatcher.registries.items()):
        backends = {
            entry.name: MappingProxyType(
                {
                    'impl_id': entry.backend.impl_id if entry.backend is not None else None,
                    'priority': entry.backend.priority if entry.backend is not None else None,
                    'origin': entry.origin,
                    'by': entry.by,
                    'error': entry.error,
                    'verified': entry.backend.verified if entry.backend is not None else None,
                }
            )
            for entry in registry.registrations()
        }
        picture[operation] = MappingProxyType(backends)
    return MappingProxyType(picture)


def methods_of(backend: BaseBackend) -> dict[str, Callable[..., Any]]:
    """The functions that a backend class says something about: public methods that BaseBackend does not have."""
    found = {}
    for name in dir(type(backend)):
        # asked of the class: a property of the instance may need what is not there
        if name.startswith('_') or hasattr(BaseBackend, name) or not callable(getattr(type(backend), name, None)):
            continue
        found[name] = getattr(backend, name)
    return found


def function_name(method: str) -> str:
    """The function that a method belongs to: its own name without `_verifier` or `_prefers`."""
    for suffix in _SUFFIXES:
        if method.endswith(suffix):
            return method.removesuffix(suffix)
    return method


def pending(dispatcher: Dispatcher) -> dict[str, list[str]]:
    """Methods of functions that nobody has declared (yet), by 'operation.backend'."""
    found: dict[str, list[str]] = {}
    for operation, registry in dispatcher.registries.items():
        known = {entry.name for entry in dispatcher.functions(None if operation == '*' else operation).values()}
        for backend in registry:
            names = sorted({function_name(name) for name in methods_of(backend)} - known)
            if names:
                found[f'{operation}.{backend.backend_type}'] = names
    return found


def problems(dispatcher: Dispatcher) -> list[str]:
    """See `validate()`."""
    dispatcher.discovery.load_all()
    other = conflict()
    found = [other] if other else []
    found += [
        f'operation {name!r}: its backends package failed: {text}'
        for name, text in sorted(dict(dispatcher.discovery.errors).items())
    ]
    found += dispatcher.environment_problems()
    for plugin in dispatcher.plugins():
        if plugin.error:
            found.append(f'plugin {plugin.name} ({plugin.source}) failed: {plugin.error}')
    for operation, registry in sorted(dispatcher.registries.items()):
        for entry in registry.registrations():
            if entry.error:
                found.append(f'{operation}.{entry.name} (registered at {entry.origin}) cannot be imported: {entry.error}')
            if entry.backend is not None:
                texts = _lonely(entry.backend) + _facts_of_nobody(dispatcher, operation, entry.backend)
                found += [f'{operation}.{entry.name}: {text}' for text in texts]
    for name, functions in sorted(pending(dispatcher).items()):
        found.append(f'{name}: no such function is known (yet): {", ".join(functions)}')
    for function in dispatcher.functions().values():
        for member in function.members():
            if member.implementation is None:
                continue
            for name in (function.name, *(function.name + suffix for suffix in _SUFFIXES)):
                method = getattr(member.backend, name, None)
                if member.backend.kind != 'default' and callable(method):
                    where = f'{function.operation}.{member.name}.{name}'
                    found += [f'{where}: {text}' for text in function.signature.drift(method)]
    return found


def _facts_of_nobody(dispatcher: Dispatcher, operation: str, backend: BaseBackend) -> list[str]:
    """Facts declared for parameters that none of the backend's functions has: nothing would ever test them."""
    methods = methods_of(backend)
    served = [e for e in dispatcher.functions(None if operation == '*' else operation).values() if e.name in methods]
    parameters = {name for entry in served for name in entry.signature.names}
    return [
        f'{attribute} names parameter {name!r}, which {", ".join(sorted(e.name for e in served))} does not have'
        for attribute in ('devices', 'dtypes')
        for name in getattr(backend, attribute) or ()
        if served and isinstance(getattr(backend, attribute), Mapping) and name not in parameters
    ]


def _lonely(backend: BaseBackend) -> list[str]:
    methods = methods_of(backend)
    return [
        f'{name} has no method {function_name(name)} beside it'
        for name in methods
        if name.endswith(_SUFFIXES) and function_name(name) not in methods
    ]


def describe(dispatcher: Dispatcher, operation: str | None = None) -> str:
    """A table: each function with its candidates by priority, their state, and where they were registered."""
    if operation is None:
        dispatcher.discovery.load_all()
    else:
        dispatcher.check_operation(operation)
        dispatcher.discovery.load(dispatcher.operation_of(operation))
    lines = [f'namespace {dispatcher.namespace}, variables {dispatcher.env_prefix}_*']
    for layer in dispatcher.layers():
        lines.append(f'policy of {layer.source}: {layer.policy.to_dict()}')
    for key, entry in sorted(dispatcher.functions().items()):
        if operation not in (None, key, entry.operation):
            continue
        lines.append(f'{key} ({entry.place})')
        for member in entry.members():
            backend = member.backend
            mark = '' if backend.verified else ' (unverified)'
            toggle = f', {backend.env_var}' if backend.env_var else ''
            lines.append(
                f'  {member.name:<16} priority {member.priority:<5g} {backend.kind:<9} '
                f'{state_of(entry, member)}{mark}{toggle}  [{member.origin}]'
            )
    for name, functions in sorted(pending(dispatcher).items()):
        if operation is None or f'{name}.'.startswith(f'{dispatcher.operation_of(operation)}.'):
            lines.append(f'pending: {name}: {", ".join(functions)}')
    for plugin in dispatcher.discovery.plugins:
        lines.append(f'plugin {plugin.name} ({plugin.source}) {plugin.version or ""}: {plugin.error or "loaded"}')
    return '\n'.join(lines)
