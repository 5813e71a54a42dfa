"""What there is: registries, functions, backends, problems. None of it needs a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fla.backends.backend.base import BaseBackend
from fla.backends.runtime.dispatcher import Dispatcher, LiveFunction
from fla.backends.runtime.view import state_of
from fla.utils.owners import conflict

_SUFFIXES = ('_verifier', '_prefers')


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


def _functions_of(dispatcher: Dispatcher, operation: str) -> list[LiveFunction]:
    """The functions that backends registered for an operation, or for all ('*'), may serve."""
    return list(dispatcher.catalogue.functions(None if operation == '*' else operation).values())


def pending(dispatcher: Dispatcher) -> dict[str, list[str]]:
    """Methods of functions that nobody has declared (yet), by 'operation.backend'."""
    found: dict[str, list[str]] = {}
    for operation, registry in dispatcher.registries.items():
        known = {
            entry.spec.name for entry in dispatcher.catalogue.functions(None if operation == '*' else operation).values()
        }
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
    found += dispatcher.policies.environment_problems()
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
    for function in dispatcher.catalogue.functions().values():
        for member in function.members():
            if member.implementation is None:
                continue
            for name in (function.spec.name, *(function.spec.name + suffix for suffix in _SUFFIXES)):
                method = getattr(member.backend, name, None)
                if member.backend.kind != 'default' and callable(method):
                    where = f'{function.spec.operation}.{member.name}.{name}'
                    found += [f'{where}: {text}' for text in function.spec.signature.drift(method)]
    return found


def _facts_of_nobody(dispatcher: Dispatcher, operation: str, backend: BaseBackend) -> list[str]:
    """Facts declared for parameters that none of the backend's functions has: nothing would ever test them."""
    methods = methods_of(backend)
    served = [
        e for e in dispatcher.catalogue.functions(None if operation == '*' else operation).values() if e.spec.name in methods
    ]
    parameters = {name for entry in served for name in entry.spec.signature.names}
    return [
        f'{attribute} names parameter {name!r}, which {", ".join(sorted(e.spec.name for e in served))} does not have'
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
        dispatcher.catalogue.check_operation(operation)
        dispatcher.discovery.load(dispatcher.catalogue.operation_of(operation))
    lines = [f'namespace {dispatcher.namespace}, variables {dispatcher.env_prefix}_*']
    for layer in dispatcher.policies.state.layers:
        lines.append(f'policy of {layer.source}: {layer.policy.to_dict()}')
    for key, entry in sorted(dispatcher.catalogue.functions().items()):
        if operation not in (None, key, entry.spec.operation):
            continue
        lines.append(f'{key} ({entry.spec.place})')
        for member in entry.members():
            backend = member.backend
            mark = '' if backend.verified else ' (unverified)'
            toggle = f', {backend.env_var}' if backend.env_var else ''
            lines.append(
                f'  {member.name:<16} priority {member.priority:<5g} {backend.kind:<9} '
                f'{state_of(entry, member)}{mark}{toggle}  [{member.origin}]'
            )
    for name, functions in sorted(pending(dispatcher).items()):
        if operation is None or f'{name}.'.startswith(f'{dispatcher.catalogue.operation_of(operation)}.'):
            lines.append(f'pending: {name}: {", ".join(functions)}')
    for plugin in dispatcher.discovery.plugins:
        lines.append(f'plugin {plugin.name} ({plugin.source}) {plugin.version or ""}: {plugin.error or "loaded"}')
    return '\n'.join(lines)
