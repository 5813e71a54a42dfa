"""Rules about registries and functions, which only an imported package has.

Asks the dispatchers that the package makes, and fla's own for a plugin of fla's operations. Keeps the findings in the
package's files.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fla.backends.backend.base import BaseBackend, overrides
from fla.backends.core.signature import location
from fla.backends.lint.findings import Finding
from fla.backends.lint.source import VERIFIER_SUFFIXES, Project, class_value
from fla.backends.observe.describe import function_name, methods_of
from fla.backends.plan.plan import Candidate, Facts, build
from fla.backends.registry.registry import Registration
from fla.backends.runtime.dispatcher import BackendRegistry, Dispatcher, LiveFunction, _dispatchers, default_dispatcher
from fla.utils.devices import PLATFORMS, Device
from fla.utils.env import nearest

_DECLARES = ('dispatch', 'Dispatcher', 'BackendRegistry')
_REPAIR = 'repair it, or register by path (module:Class) what needs an optional package'

Place = tuple[Path, int]


def check(package: str, project: Project) -> Iterator[Finding]:
    """Imports a package and yields the findings of its registries."""
    roots = project.roots[package]
    yield from _import_all(package, project)
    top = package.split('.')[0]
    for dispatcher in list(_dispatchers):
        if dispatcher is default_dispatcher() or dispatcher.namespace.split('.')[0] == top:
            yield from (finding for finding in _dispatcher(dispatcher, project, roots) if _is_below(finding.file, roots))


def _is_below(file: Path, roots: list[Path]) -> bool:
    return any(root == file or root in file.parents for root in roots)


# -- importing -------------------------------------------------------------------------------------------------------------


def _import_all(package: str, project: Project) -> Iterator[Finding]:
    """Imports the package, and those of its modules that declare operations, functions or registries."""
    names = [package]
    for source in project.sources.values():
        declares = any(source.dotted(call.func).rpartition('.')[2] in _DECLARES for call in source.calls())
        if source.package == package and declares and source.file.stem != '__main__':
            names.append(source.module)
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            yield _import_failed(error, f'importing {name}', project.roots[package])


def _import_failed(error: BaseException, action: str, roots: list[Path]) -> Finding:
    """Returns a finding at the innermost line of the traceback in the package, else at the package's first line."""
    place = (roots[0] if roots[0].is_file() else roots[0] / '__init__.py'), 1
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_below(Path(frame.filename), roots):
            place = Path(frame.filename), frame.lineno or 1
    return Finding(*place, 'import', f'{action} raises {type(error).__name__}: {error}', _REPAIR)


# -- one namespace ---------------------------------------------------------------------------------------------------------


def _dispatcher(dispatcher: Dispatcher, project: Project, roots: list[Path]) -> Iterator[Finding]:
    discovery = dispatcher.discovery
    for operation in discovery.operations():
        try:
            discovery.load(operation)
        except Exception as error:  # under FLA_STRICT; else loading keeps the text in `errors`
            yield _import_failed(error, f'loading {operation!r}', roots)
    for operation, text in discovery.errors.items():
        module = discovery.module_of(operation)
        files = [source.file for source in project.sources.values() if source.module == module]
        yield from (Finding(file, 1, 'import', f'importing {module} raises {text}', _REPAIR) for file in files)
    for operation, registry in dispatcher.registries.items():
        known = {
            entry.spec.name for entry in dispatcher.catalogue.functions(None if operation == '*' else operation).values()
        }
        assert isinstance(registry, BackendRegistry)
        for registration in registry.registrations():
            yield from _registration(registry, registration, known, project)
        yield from _shared_toggles(registry, project)
    for entry in dispatcher.catalogue.functions().values():
        yield from _operation(entry)
        yield from _drift(entry)
        yield from _unreachable(entry, project)


def _place(text: str) -> Place:
    """Parses a 'file:line' of the framework."""
    file, _, line = text.rpartition(':')
    return Path(file).resolve(), int(line) if line.isdigit() else 1


def _attribute_place(backend: BaseBackend, attribute: str, project: Project) -> Place:
    """Returns where a backend's class sets an attribute, if the source shows it; else where the class stands."""
    for cls in type(backend).__mro__:
        if cls is type(backend) or attribute in vars(cls):
            file, line = _class_place(cls)
            source = project.sources.get(file)
            for node in source.classes() if source is not None else ():
                if node.name == cls.__name__ and (value := class_value(node, attribute)) is not None:
                    return file, value.lineno
            if attribute in vars(cls):
                return file, line
    return _class_place(type(backend))


def _class_place(cls: type) -> Place:
    try:
        return _place(f'{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}')
    except (TypeError, OSError):
        return _place(location(cls))


def _registration(
    registry: BackendRegistry, registration: Registration, known: set[str], project: Project
) -> Iterator[Finding]:
    backend = registration.backend
    if backend is None:
        if registration.error is not None and not _lacks_optional_package(registration):
            yield Finding(*_place(registration.origin), 'import', f'{registration.path}: {registration.error}', _REPAIR)
        return
    cls = type(backend).__name__
    methods = methods_of(backend)
    unknown: dict[str, list[str]] = {}
    for name, method in methods.items():
        function = function_name(name)
        if name.endswith(VERIFIER_SUFFIXES) and function not in methods:
            remedy = f'rename it, or implement the function.{nearest(function, methods)}'
            problem = f'{cls}.{name} has no method {function} beside it'
            yield Finding(*_place(location(method)), 'lonely-verifier', problem, remedy)
        elif function not in known:
            unknown.setdefault(function, []).append(name)
    where = 'any operation' if registry.operation == '*' else f'operation {registry.operation!r}'
    for function, names in unknown.items():
        problem = f'{cls}.{", ".join(names)}: {where} has no dispatched function {function!r}'
        remedy = f'rename it, or give it a leading underscore if it is a helper.{nearest(function, known)}'
        yield Finding(*_place(location(methods[names[0]])), 'unknown-function', problem, remedy)
    prefix = f'{registry.dispatcher.env_prefix}_'
    if backend.env_var and not backend.env_var.startswith(prefix):
        problem = f'{cls}.env_var is {backend.env_var!r}, which does not start with {prefix}'
        remedy = 'rename it: only variables with the prefix are checked for typing errors'
        yield Finding(*_attribute_place(backend, 'env_var', project), 'env-prefix', problem, remedy)


def _lacks_optional_package(registration: Registration) -> bool:
    """Returns whether a path failed because another project's package is not installed, which is ordinary."""
    kind, _, rest = str(registration.error).partition(': ')
    missing = rest.partition("'")[2].partition("'")[0].split('.')[0]
    return kind == 'ModuleNotFoundError' and missing != str(registration.path).split('.')[0]


def _shared_toggles(registry: BackendRegistry, project: Project) -> Iterator[Finding]:
    first: dict[str, BaseBackend] = {}
    for backend in registry:
        if not backend.env_var:
            continue
        other = first.setdefault(backend.env_var, backend)
        mine, theirs = (inspect.getattr_static(b, 'default_enable') for b in (backend, other))
        if mine is not theirs and mine != theirs:
            problem = (
                f'{backend.env_var} switches {other.backend_type!r} (default_enable {_name(theirs)}) and '
                f'{backend.backend_type!r} (default_enable {_name(mine)}) of operation {registry.operation!r}'
            )
            remedy = 'give each its own toggle: no value of this one means the same as leaving it unset'
            yield Finding(*_attribute_place(backend, 'env_var', project), 'shared-toggle', problem, remedy)


def _name(default: Any) -> str:
    return getattr(default, '__name__', None) or repr(default)


def _operation(entry: LiveFunction) -> Iterator[Finding]:
    discovery = entry.dispatcher.discovery
    if not discovery.exists(entry.spec.operation):
        known = discovery.operations()
        problem = f'@dispatch({entry.spec.operation!r}): unknown operation.{nearest(entry.spec.operation, known)}'
        remedy = (
            f'use one of {", ".join(known) or "none yet"}, or make the package {discovery.module_of(entry.spec.operation)}'
        )
        yield Finding(*_place(entry.spec.place), 'unknown-operation', problem, remedy)


def _drift(entry: LiveFunction) -> Iterator[Finding]:
    names = (entry.spec.name, *(entry.spec.name + suffix for suffix in VERIFIER_SUFFIXES))
    backends = [member.backend for member in entry.members() if member.backend is not entry.default]
    methods: list[Any] = [
        entry.spec.default_verifier,
        *(getattr(backend, name, None) for backend in backends for name in names),
    ]
    for method in filter(callable, methods):
        for problem in entry.spec.signature.drift(method):
            text = f'{method.__qualname__} and {entry.spec.name} ({entry.spec.place.rpartition("/")[2]}) disagree: {problem}'
            yield Finding(*_place(location(method)), 'drift', text, 'write it as in the public function')


# -- reachability ----------------------------------------------------------------------------------------------------------


def _unreachable(entry: LiveFunction, project: Project) -> Iterator[Finding]:
    """Yields the backends behind a candidate that accepts every call on every machine, under the policy in force."""
    policy = entry.policy(entry.state())
    facts = Facts(
        package=lambda backend: (True, None),
        device=lambda backend, device: (True, None),
        devices=lambda platform: (Device(platform),),
        gate=entry.dispatcher.toggles.gate,
    )
    plan = build(entry.spec.signature, entry.members(), policy, PLATFORMS, facts)
    reached: set[int] = set()
    blockers: dict[int, Candidate] = {}
    for chain in plan.chains.values():
        blocker = None
        for candidate in chain:
            if candidate.out is not None:
                continue
            if blocker is not None:
                blockers[id(candidate.member.backend)] = blocker
                continue
            reached.add(id(candidate.member.backend))
            if candidate.accepts_always and _is_everywhere(candidate.member.backend):
                blocker = candidate
    for candidate in next(iter(plan.chains.values())):
        backend = candidate.member.backend
        # a reference is asked for by name: it is the oracle
        if id(backend) in reached or id(backend) not in blockers or backend.kind == 'reference':
            continue
        first = blockers[id(backend)].member.name
        problem = (
            f'{type(backend).__name__} is never asked for {entry.spec.key}: {first!r} stands before it '
            f'(order: {policy.order_source}) and accepts every call'
        )
        remedy = f'give {first!r} a verifier or facts, or this one a lower priority'
        yield Finding(*_attribute_place(backend, 'priority', project), 'unreachable', problem, remedy)


def _is_everywhere(backend: BaseBackend) -> bool:
    """Returns whether every machine has the backend."""
    asks = any(overrides(backend, name) for name in ('is_available', 'probe'))
    return not (asks or backend.package_name or backend.min_capability)
