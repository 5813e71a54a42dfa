"""Registries, functions, backends and their problems. No call is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fla.backends.backend.base import BaseBackend
from fla.backends.runtime.dispatcher import Dispatcher, LiveFunction, owner_of
from fla.backends.runtime.view import state_of
from fla.utils.owners import conflict

_SUFFIXES = ('_verifier', '_prefers')


def snapshot(dispatcher: Dispatcher | None = None) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """An immutable copy of every registry: its backends and where each was registered."""
    owner = owner_of(dispatcher)
    picture = {}
    for operation, registry in sorted(owner.registries.items()):
        rows = {}
        for entry in registry.registrations():
            facts = {name: getattr(entry.backend, name, None) for name in ('impl_id', 'priority', 'verified')}
            rows[entry.name] = MappingProxyType({**facts, 'origin': entry.origin, 'by': entry.by, 'error': entry.error})
        picture[operation] = MappingProxyType(rows)
    return MappingProxyType(picture)


def methods_of(backend: BaseBackend) -> dict[str, Callable[..., Any]]:
    """Public methods that BaseBackend does not have: implementations, verifiers, `prefers`."""
    cls = type(backend)
    # tested on the class: a property of the instance may need a package that is not installed
    names = [n for n in dir(cls) if not (n.startswith('_') or hasattr(BaseBackend, n)) and callable(getattr(cls, n, None))]
    return {name: getattr(backend, name) for name in names}


def function_name(method: str) -> str:
    """The function that a method belongs to: its own name without `_verifier` or `_prefers`."""
    suffix = next((suffix for suffix in _SUFFIXES if method.endswith(suffix)), '')
    return method.removesuffix(suffix)


def _functions_of(dispatcher: Dispatcher, operation: str) -> list[LiveFunction]:
    """The functions that backends registered for an operation, or for all ('*'), may serve."""
    return list(dispatcher.catalogue.functions(None if operation == '*' else operation).values())


def pending(dispatcher: Dispatcher) -> dict[str, list[str]]:
    """Methods without a declared function, by 'operation.backend'."""
    found: dict[str, list[str]] = {}
    for operation, registry in dispatcher.registries.items():
        declared = {function.spec.name for function in _functions_of(dispatcher, operation)}
        for backend in registry:
            names = sorted({function_name(name) for name in methods_of(backend)} - declared)
            if names:
                found[f'{operation}.{backend.backend_type}'] = names
    return found


def problems(dispatcher: Dispatcher) -> list[str]:
    """See `validate()`."""
    dispatcher.discovery.load_all()
    other = conflict()
    found = [other] if other else []
    failed = sorted(dict(dispatcher.discovery.errors).items())
    found += [f'operation {name!r}: its backends package failed: {text}' for name, text in failed]
    found += dispatcher.policies.environment_problems()
    found += [f'plugin {p.name} ({p.source}) failed: {p.error}' for p in dispatcher.plugins() if p.error]
    for operation, registry in sorted(dispatcher.registries.items()):
        for entry in registry.registrations():
            if entry.error:
                found.append(f'{operation}.{entry.name} (registered at {entry.origin}) cannot be imported: {entry.error}')
            if entry.backend is not None:
                texts = _unpaired_methods(entry.backend) + _unused_facts(dispatcher, operation, entry.backend)
                found += [f'{operation}.{entry.name}: {text}' for text in texts]
    for name, functions in sorted(pending(dispatcher).items()):
        found.append(f'{name}: no such function is known (yet): {", ".join(functions)}')
    for function in dispatcher.catalogue.functions().values():
        for member in function.members():
            if member.implementation is None or member.backend.kind == 'default':
                continue
            for name in (function.spec.name, *(function.spec.name + suffix for suffix in _SUFFIXES)):
                method = getattr(member.backend, name, None)
                if callable(method):
                    where = f'{function.spec.operation}.{member.name}.{name}'
                    found += [f'{where}: {text}' for text in function.spec.signature.drift(method)]
    return found


def _unused_facts(dispatcher: Dispatcher, operation: str, backend: BaseBackend) -> list[str]:
    """Facts declared for parameters that none of the backend's functions has, so that they are never tested."""
    methods = methods_of(backend)
    served = [function.spec for function in _functions_of(dispatcher, operation) if function.spec.name in methods]
    parameters = {name for spec in served for name in spec.signature.names}
    return [
        f'{attribute} names parameter {name!r}, which {", ".join(sorted(spec.name for spec in served))} does not have'
        for attribute in ('devices', 'dtypes')
        for name in getattr(backend, attribute) or ()
        if served and isinstance(getattr(backend, attribute), Mapping) and name not in parameters
    ]


def _unpaired_methods(backend: BaseBackend) -> list[str]:
    methods = methods_of(backend)
    unpaired = [name for name in methods if name.endswith(_SUFFIXES) and function_name(name) not in methods]
    return [f'{name} has no method {function_name(name)} beside it' for name in unpaired]


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
