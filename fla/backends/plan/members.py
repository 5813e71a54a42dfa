"""The backends of one function: the registered ones that have a method of its name, and the default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fla.backends.backend.base import BackendMeta, BaseBackend, overrides
from fla.backends.backend.declaration import check_declaration
from fla.backends.backend.untraceable import findings
from fla.backends.core.errors import RegistrationError
from fla.backends.core.signature import Callee, location
from fla.backends.core.spec import FunctionSpec
from fla.backends.plan.plan import Member
from fla.backends.policy.policy import matches
from fla.backends.policy.toggles import Toggles
from fla.backends.registry.registry import Registration

CheckMethods = Callable[[FunctionSpec, BaseBackend], None]


def any_match(members: Iterable[Member], tokens: tuple[str, ...]) -> bool:
    """Whether a token names one of these members."""
    return any(matches(token, member.backend) for token in tokens for member in members)


def collect(
    spec: FunctionSpec,
    default: BaseBackend,
    registrations: Iterable[tuple[int, Registration]],
    toggles: Toggles,
    check_methods: CheckMethods,
) -> tuple[Member, ...]:
    """The members of a function by priority, its default included. Runs code of the backends: never call it under the lock.

    Args:
        default: the decorated function as a backend.
        registrations: (rank among equal priorities, registration) of the operation's backends.
        check_methods: compares a backend's methods with the function; raises RegistrationError under strict.
    """
    found = [(rank, _registered(spec, registration, toggles, check_methods)) for rank, registration in registrations]
    # rank 2: behind registered backends of the same priority
    found.append((2, _member(spec, default, toggles, spec.default, spec.default_verifier, None, spec.place)))
    members = [(member.priority, rank, member) for rank, member in found if member is not None]
    return tuple(member for _, _, member in sorted(members, key=lambda item: item[:2]))


def _registered(
    spec: FunctionSpec, registration: Registration, toggles: Toggles, check_methods: CheckMethods
) -> Member | None:
    backend, name = registration.backend, spec.name
    if backend is None:
        # listed although it may lack a method of that name: an import error must be visible
        reason = f'cannot be imported: {registration.error or "not imported yet"}'
        return _stand_in('NotImported', registration, reason)
    try:
        check_declaration(backend)
    except RegistrationError as error:
        # changed since it was registered
        return _stand_in('Broken', registration, str(error))
    implementation = getattr(backend, name, None)
    if not callable(implementation):
        return None
    check_methods(spec, backend)
    verifier = _call_verify(backend, name) if overrides(backend, 'verify') else getattr(backend, f'{name}_verifier', None)
    prefers = getattr(backend, f'{name}_prefers', None)
    return _member(spec, backend, toggles, implementation, verifier, prefers, registration.origin)


def _stand_in(class_name: str, registration: Registration, reason: str) -> Member:
    backend: BaseBackend = BackendMeta(class_name, (BaseBackend,), {'backend_type': registration.name})()
    return Member(backend, None, None, unusable=reason, origin=registration.origin)


def _member(
    spec: FunctionSpec,
    backend: BaseBackend,
    toggles: Toggles,
    implementation: Callable[..., Any],
    verifier: Callable[..., Any] | None,
    prefers: Callable[..., Any] | None,
    origin: str,
) -> Member:
    unusable = None
    calls: dict[str, Callee] = {}
    for what, method in (('method', implementation), ('verifier', verifier), ('prefers', prefers)):
        try:
            if method is not None:
                calls[what] = spec.signature.call(method)
        except (TypeError, ValueError) as error:
            unusable = f'the signature of its {what} cannot be read: {error}'
    for what, call in calls.items():
        if call.unfillable:
            unusable = f'its {what} needs {", ".join(map(repr, call.unfillable))}, which {spec.name} does not have'
    untraceable = _untraceable(backend, toggles, verifier, prefers)
    own, verify, prefer = map(calls.get, ('method', 'verifier', 'prefers'))
    return Member(backend, implementation, own, verifier, verify, prefers, prefer, unusable, untraceable, origin)


def _untraceable(backend: BaseBackend, toggles: Toggles, *methods: Callable[..., Any] | None) -> str | None:
    if not backend.traceable:
        return 'the backend says traceable = False'
    if overrides(backend, 'verify'):
        methods += (backend.verify,)
    for method in methods:
        found = findings(method) if method is not None else []
        if found:
            return found[0]
    if backend.kind != 'default' and toggles.gate(backend).ask is not None:
        return f'{location(backend.is_enabled)}: is_enabled() reads a variable that is not declared; name it in extra_env'
    return None


def _call_verify(backend: BaseBackend, name: str) -> Callable[..., Any]:
    """The verifier of a backend that overrides `verify()`."""

    def verifier(*args: Any, **kwargs: Any) -> Any:
        return backend.verify(name, *args, **kwargs)

    return verifier
