"""What only an imported package can tell: its registries, its functions, and how they fit together.

Asked are the dispatchers that the package makes and fla's own (for a plugin of fla's operations), and of their findings
those are kept that lie in the package's files.
"""

from __future__ import annotations

import ast
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


def check(package: str, project: Project) -> Iterator[Finding]:
    """Import a package and report what its registries say."""
    here = project.roots[package]
    yield from _import_all(package, project)
    top = package.split('.')[0]
    for dispatcher in list(_dispatchers):
        if dispatcher is default_dispatcher() or dispatcher.namespace.split('.')[0] == top:
            for finding in _dispatcher(dispatcher, project, here):
                if any(root == finding.file or root in finding.file.parents for root in here):
                    yield finding


# -- importing -------------------------------------------------------------------------------------------------------------


def _import_all(package: str, project: Project) -> Iterator[Finding]:
    """Import the package, and those of its modules that declare operations, functions or registries."""
    names = [package]
    for source in project.sources.values():
        calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
        declares = any(source.dotted(call.func).rpartition('.')[2] in _DECLARES for call in calls)
        if source.package == package and declares and source.file.stem != '__main__':
            names.append(source.module)
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            yield Finding(*_blame(error, project.roots[package]), 'import', f'importing {name} raises {_text(error)}', _MEND)


_MEND = 'mend it, or register by path (module:Class) what needs an optional package'


def _text(error: BaseException) -> str:
    return f'{type(error).__name__}: {error}'


def _blame(error: BaseException, roots: list[Path]) -> tuple[Path, int]:
    """The innermost line of an error's traceback that lies in the package, else the package's first line."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if any(root == file or root in file.parents for root in roots):
            return file, frame.lineno or 1
    return (roots[0] if roots[0].is_file() else roots[0] / '__init__.py'), 1


# -- one namespace ---------------------------------------------------------------------------------------------------------


def _dispatcher(dispatcher: Dispatcher, project: Project, roots: list[Path]) -> Iterator[Finding]:
    for operation in dispatcher.discovery.operations():
        try:
            dispatcher.discovery.load(operation)
        except Exception as error:  # under FLA_STRICT loading raises what it otherwise only remembers
            yield Finding(*_blame(error, roots), 'import', f'loading {operation!r} raises {_text(error)}', _MEND)
    for operation, text in dispatcher.discovery.errors.items():
        yield from _failed_package(dispatcher.discovery.module_of(operation), text, project)
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


def _failed_package(module: str, text: str, project: Project) -> Iterator[Finding]:
    """Where the import system has the module's file; the error itself is only kept as text."""
    for source in project.sources.values():
        if source.module == module:
            yield Finding(source.file, 1, 'import', f'importing {module} raises {text}', _MEND)


def _place(text: str) -> tuple[Path, int]:
    """A 'file:line' of the framework."""
    file, _, line = text.rpartition(':')
    return Path(file).resolve(), int(line) if line.isdigit() else 1


def _attribute_place(backend: BaseBackend, attribute: str, project: Project) -> tuple[Path, int]:
    """Where a backend's class sets an attribute, as far as the source tells; else where the class stands."""
    for cls in type(backend).__mro__:
        if cls is type(backend) or attribute in vars(cls):
            file, line = _place(_class_location(cls))
            source = project.sources.get(file)
            for node in source.classes() if source is not None else ():
                if node.name == cls.__name__ and (value := class_value(node, attribute)) is not None:
                    return file, value.lineno
            if attribute in vars(cls):
                return file, line
    return _place(_class_location(type(backend)))


def _class_location(cls: type) -> str:
    try:
        return f'{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}'
    except (TypeError, OSError):
        return location(cls)


def _registration(
    registry: BackendRegistry, registration: Registration, known: set[str], project: Project
) -> Iterator[Finding]:
    backend = registration.backend
    if backend is None:
        if registration.error is not None and not _is_optional(registration):
            yield Finding(*_place(registration.origin), 'import', f'{registration.path}: {registration.error}', _MEND)
        return
    methods = methods_of(backend)
    unknown: dict[str, list[str]] = {}
    for name, method in methods.items():
        function = function_name(name)
        if name.endswith(VERIFIER_SUFFIXES) and function not in methods:
            problem = f'{type(backend).__name__}.{name} has no method {function} beside it'
            remedy = f'rename it, or implement the function.{nearest(function, methods)}'
            yield Finding(*_place(location(method)), 'lonely-verifier', problem, remedy)
        elif function not in known:
            unknown.setdefault(function, []).append(name)
    for function, names in unknown.items():
        of = 'any operation' if registry.operation == '*' else f'operation {registry.operation!r}'
        problem = f'{type(backend).__name__}.{", ".join(names)}: no dispatched function {function!r} of {of} is known'
        remedy = f'rename it, or give it a leading underscore if it is a helper.{nearest(function, known)}'
        yield Finding(*_place(location(methods[names[0]])), 'unknown-function', problem, remedy)
    prefix = f'{registry.dispatcher.env_prefix}_'
    if backend.env_var and not backend.env_var.startswith(prefix):
        problem = f'{type(backend).__name__}.env_var is {backend.env_var!r}, which does not start with {prefix}'
        remedy = 'rename it: only variables with the prefix are checked for typing errors'
        yield Finding(*_attribute_place(backend, 'env_var', project), 'env-prefix', problem, remedy)


def _is_optional(registration: Registration) -> bool:
    """Whether a path failed because of somebody else's package that is not installed, which is ordinary."""
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
                f'{backend.env_var} switches {other.backend_type!r} (default_enable {_shown(theirs)}) and '
                f'{backend.backend_type!r} (default_enable {_shown(mine)}) of operation {registry.operation!r}'
            )
            remedy = 'give each a toggle of its own: no value of this one means what unsetting it means'
            yield Finding(*_attribute_place(backend, 'env_var', project), 'shared-toggle', problem, remedy)


def _shown(default: Any) -> str:
    return getattr(default, '__name__', None) or repr(default)


def _operation(entry: LiveFunction) -> Iterator[Finding]:
    discovery = entry.dispatcher.discovery
    if not discovery.exists(entry.spec.operation):
        known = discovery.operations()
        problem = f'@dispatch({entry.spec.operation!r}): there is no such operation.{nearest(entry.spec.operation, known)}'
        remedy = (
            f'use one of {", ".join(known) or "none yet"}, or make the package {discovery.module_of(entry.spec.operation)}'
        )
        yield Finding(*_place(entry.spec.place), 'unknown-operation', problem, remedy)


def _drift(entry: LiveFunction) -> Iterator[Finding]:
    methods = [entry.spec.default_verifier] if entry.spec.default_verifier is not None else []
    for member in entry.members():
        if member.backend is not entry.default:
            names = (entry.spec.name, *(entry.spec.name + suffix for suffix in VERIFIER_SUFFIXES))
            methods += [getattr(member.backend, name) for name in names if callable(getattr(member.backend, name, None))]
    for method in methods:
        for problem in entry.spec.signature.drift(method):
            text = f'{method.__qualname__} and {entry.spec.name} ({entry.spec.place.rpartition("/")[2]}) disagree: {problem}'
            yield Finding(*_place(location(method)), 'drift', text, 'write it as in the public function')


# -- reachability ----------------------------------------------------------------------------------------------------------


def _unreachable(entry: LiveFunction, project: Project) -> Iterator[Finding]:
    """Backends behind a candidate that accepts every call on every machine, under the policy in force."""
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
            if blocker is None:
                reached.add(id(candidate.member.backend))
            else:
                blockers[id(candidate.member.backend)] = blocker
            if blocker is None and candidate.accepts_always and _is_everywhere(candidate.member.backend):
                blocker = candidate
    for candidate in next(iter(plan.chains.values())):
        backend = candidate.member.backend
        # the reference is there to be asked for by name: it is the oracle
        if id(backend) in reached or id(backend) not in blockers or backend.kind == 'reference':
            continue
        blocker = blockers[id(backend)]
        problem = (
            f'{type(backend).__name__} is never asked for {entry.spec.key}: {blocker.member.name!r} stands before it '
            f'(order: {policy.order_source}) and accepts every call'
        )
        remedy = f'give {blocker.member.name!r} a verifier or facts, or this one a lower priority'
        yield Finding(*_attribute_place(backend, 'priority', project), 'unreachable', problem, remedy)


def _is_everywhere(backend: BaseBackend) -> bool:
    """Whether no machine can lack the backend."""
    asks = (
        backend.package_name or backend.min_capability or overrides(backend, 'is_available') or overrides(backend, 'probe')
    )
    return not asks
