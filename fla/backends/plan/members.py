"""The backends of one function: which of the registered ones have a method of its name, and how each is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fla.backends.backend.base import BackendMeta, BaseBackend
from fla.backends.backend.declaration import check_declaration
from fla.backends.backend.untraceable import findings
from fla.backends.core.errors import RegistrationError
from fla.backends.core.signature import Callee, location
from fla.backends.plan.plan import Member, overrides
from fla.backends.policy.policy import matches
from fla.backends.registry.registry import Registration

if TYPE_CHECKING:
    from fla.backends.runtime.entry import Entry


def any_match(members: Iterable[Member], tokens: tuple[str, ...]) -> bool:
    """Whether a token names one of these members."""
    return any(matches(token, member.backend) for token in tokens for member in members)


def collect(function: Entry) -> tuple[Member, ...]:
    """The members of a function by priority, its default included. Runs code of the backends: never under the lock."""
    found: list[tuple[float, int, Member]] = []
    for rank, name in enumerate((function.operation, '*')):
        registry = function.dispatcher.registries.get(name)
        for registration in registry.registrations() if registry is not None else ():
            member = _registered(function, registration)
            if member is not None:
                found.append((member.priority, rank, member))
    default = _member(function, function.default, function.function, function.default_verifier, None, function.place)
    found.append((default.priority, 2, default))
    return tuple(member for _, _, member in sorted(found, key=lambda item: item[:2]))


def _registered(function: Entry, registration: Registration) -> Member | None:
    backend, name = registration.backend, function.name
    if backend is None:
        # whether it has a method of that name is not known; the user should hear of it rather than not
        stand_in: BaseBackend = BackendMeta('NotImported', (BaseBackend,), {'backend_type': registration.name})()
        reason = f'cannot be imported: {registration.error or "not imported yet"}'
        return Member(stand_in, None, None, unusable=reason, origin=registration.origin)
    try:
        check_declaration(backend)
    except RegistrationError as error:
        # right when it was registered, and set to something else since
        broken: BaseBackend = BackendMeta('Broken', (BaseBackend,), {'backend_type': registration.name})()
        return Member(broken, None, None, unusable=str(error), origin=registration.origin)
    implementation = getattr(backend, name, None)
    if not callable(implementation):
        return None
    function.dispatcher.check_methods(function.operation, function.signature, name, function.place, backend)
    verifier = getattr(backend, f'{name}_verifier', None)
    if overrides(backend, 'verify'):
        verifier = _through_verify(backend, name)
    prefers = getattr(backend, f'{name}_prefers', None)
    return _member(function, backend, implementation, verifier, prefers, registration.origin)


def _member(
    function: Entry,
    backend: BaseBackend,
    implementation: Callable[..., Any],
    verifier: Callable[..., Any] | None,
    prefers: Callable[..., Any] | None,
    origin: str,
) -> Member:
    unusable = None
    calls: list[Callee | None] = [None, None, None]
    for place, method in enumerate((implementation, verifier, prefers)):
        try:
            calls[place] = None if method is None else function.signature.call(method)
        except (TypeError, ValueError) as error:
            unusable = f'a method without a signature that can be read: {error}'
    for what, call in zip(('its method', 'its verifier', 'its prefers'), calls, strict=True):
        if call is not None and call.unfillable:
            unusable = f'{what} needs {", ".join(map(repr, call.unfillable))}, which {function.name} does not have'
    untraceable = _untraceable(function, backend, verifier, prefers)
    return Member(backend, implementation, calls[0], verifier, calls[1], prefers, calls[2], unusable, untraceable, origin)


def _untraceable(function: Entry, backend: BaseBackend, *methods: Callable[..., Any] | None) -> str | None:
    if not backend.traceable:
        return 'the backend says traceable = False'
    if overrides(backend, 'verify'):
        methods += (backend.verify,)
    for method in methods:
        found = findings(method) if method is not None else []
        if found:
            return str(found[0])
    if backend.kind != 'default' and function.dispatcher.toggles.gate(backend).ask is not None:
        return f'{location(backend.is_enabled)}: is_enabled() reads what nobody declared; name it in extra_env'
    return None


def _through_verify(backend: BaseBackend, name: str) -> Callable[..., Any]:
    """The verifier of a backend that overrides `verify()` itself."""

    def verifier(*args: Any, **kwargs: Any) -> Any:
        return backend.verify(name, *args, **kwargs)

    return verifier
