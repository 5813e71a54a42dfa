"""One namespace of operations: its registries, its functions, its policy.

`fla` has one; another package makes its own: `Dispatcher(namespace='mylib.ops', env_prefix='MYLIB')`.

A call runs the code of its entry point; the dispatcher decides when that code is replaced. A change (a registration, an
attribute of a backend, a policy) makes a new `Situation`. Each entry point then gets its cached code for the situation, or
cold code that plans on the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, ClassVar, Protocol

from fla.backends.backend.availability import Availability
from fla.backends.backend.base import BaseBackend, changes_of_other_threads, on_change
from fla.backends.core import logs
from fla.backends.core.errors import RegistrationError, unknown_name
from fla.backends.core.locking import lock
from fla.backends.core.signature import location
from fla.backends.core.spec import FunctionSpec
from fla.backends.fallback.breaker import Breaker, Breakers
from fla.backends.plan.decision import Decision
from fla.backends.plan.plan import Facts, Member, Plan
from fla.backends.policy.environment import Environment
from fla.backends.policy.policy import normalise
from fla.backends.policy.precedence import Layer, ResolvedPolicy, State
from fla.backends.policy.toggles import Gate, Toggles
from fla.backends.registry.catalogue import Catalogue
from fla.backends.registry.discovery import Discovery, Plugin, in_forked_children
from fla.backends.registry.registry import Listener, Registries, Registry
from fla.backends.runtime.policy_stack import PolicyReader, PolicyStack
from fla.backends.runtime.recorders import Recorder
from fla.backends.runtime.situation import Control, Situation
from fla.utils import devices

# Operations whose backends live elsewhere than in `fla.ops.<operation>.backends`.
_OPERATION_BACKEND_MODULES = {'modules': 'fla.modules.backends'}

_dispatchers: list[Dispatcher] = []


class LiveFunction(Protocol):
    """The entry point of a dispatched function; `Entry` implements it.

    Attributes:
        default: the decorated function as a backend.
        own: the policy of a bound function, above every other.
        platforms: platforms of the calls so far.
        was_called: a call has planned it.
        wrapper: the function that users hold.
        globals: globals of its generated code.
    """

    dispatcher: Dispatcher
    spec: FunctionSpec
    default: BaseBackend
    own: Layer | None
    platforms: tuple[str, ...]
    was_called: bool
    wrapper: FunctionType

    @property
    def globals(self) -> dict[str, Any]: ...
    def state(self) -> State: ...
    def policy(self, state: State) -> ResolvedPolicy: ...
    def members(self) -> tuple[Member, ...]: ...
    def facts(self, policy: ResolvedPolicy) -> Facts: ...
    def plan(self, state: State) -> Plan: ...
    def decide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], platform: Any = None, state: State | None = None
    ) -> Decision: ...
    def direct(self, member: Member) -> Callable[..., Any]: ...
    def bind(self, backend: str | None = None, **fields: Any) -> Callable[..., Any]: ...
    def explain(self, *args: Any, **kwargs: Any) -> Any: ...
    def resolve(self, *args: Any, **kwargs: Any) -> Callable[..., Any]: ...
    def adopt(self, now: Situation) -> None: ...


class Dispatcher:
    """A namespace of dispatched operations.

    Args:
        namespace: package that holds the operations; backends of operation `x` are in `<namespace>.x.backends`.
        env_prefix: prefix of its environment variables.
        modules: operation → module that registers its backends, if it is another.
        entry_points: entry-point group of its plugins. Default: `<top-level package>.backends`.
        retired_env: old name → new name of environment variables.
        variables: other variables with this prefix that the package reads, and that are therefore not unknown.

    Attributes:
        catalogue: its operations, functions and backends by name.
        policies: its layers of policy.
        control: the situation in force.
    """

    # set by higher rooms
    policy_reader: ClassVar[Callable[[], PolicyReader]]
    environment_recorder: ClassVar[Callable[[Dispatcher], Recorder]]
    before_reset: ClassVar[list[Callable[[Dispatcher], None]]] = []

    def __init__(
        self,
        namespace: str,
        env_prefix: str,
        *,
        modules: Mapping[str, str] | None = None,
        entry_points: str | None = None,
        retired_env: Mapping[str, str] | None = None,
        variables: Collection[str] = (),
    ) -> None:
        if not all(part.isidentifier() for part in namespace.split('.')):
            raise ValueError(f'namespace must be a dotted package name, got {namespace!r}')
        if not env_prefix.isidentifier() or env_prefix != env_prefix.upper():
            raise ValueError(f"env_prefix must be an upper-case name such as 'MYLIB', got {env_prefix!r}")
        self.namespace, self.env_prefix = namespace, env_prefix
        self.listeners: tuple[Listener, ...] = ()
        self.availability = Availability()
        self.toggles = Toggles(retired_env)
        self.environment = Environment(env_prefix, retired_env or {}, variables)
        self.registries = Registries(self, BackendRegistry)
        self.discovery = Discovery(
            namespace,
            self.registries,
            modules=modules if modules is not None else {},
            group=entry_points or f'{namespace.split(".")[0]}.backends',
            plugin_variable=self.environment.name('PLUGIN_MODULES'),
            is_strict=lambda operation: self.policies.is_strict(operation),
            loaded=self._backends_changed,
            declared_at=self._declared_at,
        )
        self.baseline = bool(self.environment.boolean('DISABLE_BACKEND_DISPATCH'))
        self.catalogue: Catalogue[LiveFunction] = Catalogue(self.registries, self.discovery, baseline=self.baseline)
        self.control = Control(self.catalogue.entries)
        self.breakers = Breakers()
        self.policies = PolicyStack(
            self.control,
            self.environment,
            self.toggles,
            self.catalogue,
            reader=lambda: type(self).policy_reader(),
            recorder=lambda: type(self).environment_recorder(self),
            changed=self.breakers.clear,
        )
        self.scopes_in_trace = ScopesInTrace()
        self.device_facts: Callable[[str], Sequence[devices.Device]] = devices.devices_of
        self.breakers.asked = self._asks_breakers
        in_forked_children(self._after_fork_in_child)
        _dispatchers.append(self)

    def __repr__(self) -> str:
        return f'<Dispatcher {self.namespace}>'

    def _declared_at(self, operation: str) -> str:
        return next((e.spec.place for e in self.catalogue.entries() if e.spec.operation == operation), '')

    def registry(self, operation: str) -> BackendRegistry:
        """The registry of an operation, made if it does not exist."""
        return BackendRegistry(operation, self)

    # -- `registry.Owner`: what its registries call -----------------------------------------------------------------------

    def refuse_if_frozen(self, what: str) -> None:
        self.policies.refuse_if_frozen(what)

    def is_strict(self, operation: str) -> bool:
        return self.policies.is_strict(operation)

    def module_of(self, operation: str) -> str:
        return self.discovery.module_of(operation)

    def who_registers(self) -> str:
        return self.discovery.who_registers()

    def check_registration(self, registry: Registry, backend: BaseBackend) -> None:
        """Compare a new backend's methods with the functions that exist; later functions compare themselves."""
        for entry in self.catalogue.functions(_or_any(registry)).values():
            self.check_methods(entry.spec, backend)

    def check_methods(self, spec: FunctionSpec, backend: BaseBackend) -> None:
        """Warn about a backend's methods that disagree with the public function. Raises RegistrationError under strict."""
        for name in (spec.name, f'{spec.name}_verifier', f'{spec.name}_prefers'):
            method = getattr(backend, name, None)
            if not callable(method):
                continue
            for problem in spec.signature.drift(method):
                text = f'{type(backend).__qualname__}.{name} ({location(method)}) and {spec.name} ({spec.place}): {problem}'
                if self.is_strict(spec.operation):
                    raise RegistrationError(text)
                logs.warn_once(('drift', text), '%s', text)

    def registry_changed(self, registry: Registry) -> None:
        self._backends_changed(registry.operation)

    def registry_has_changed(self, registry: Registry) -> None:
        self.breakers.clear('the backends changed', _or_any(registry))

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event, registry, registration)` after every change of any registry. Returns a function that removes
        the listener."""
        with lock:
            self.listeners = (*self.listeners, listener)

        def remove() -> None:
            with lock:
                self.listeners = tuple(known for known in self.listeners if known is not listener)

        return remove

    # -- changes of backends ----------------------------------------------------------------------------------------------

    def _backends_changed(self, operation: str) -> None:
        """Plan again for the functions of `operation` ('*': all)."""
        self.control.change(
            lambda now: replace(now, generations={**now.generations, operation: now.generations.get(operation, 0) + 1})
        )

    def replan(self) -> None:
        """Plan again for every function on its next call."""
        self._backends_changed('*')

    def backend_changed(self, owner: Any, name: str) -> None:
        """An attribute of a backend class or instance was set: plan again if plans read it."""
        if self._reads(owner, name):
            self.availability.forget(owner)
            self.toggles.forget(owner)
            self.replan()
            self.breakers.clear(f'{name} was set', backends={b.backend_type for b in self._backends_of(owner)})

    def backend_changing(self, owner: Any, name: str) -> None:
        """An attribute of a backend class or instance is about to be set. Raises FrozenError if frozen plans read it."""
        if self.policies.frozen is not None and self._reads(owner, name):
            self.refuse_if_frozen(f'set {name} of {owner!r}')

    def _reads(self, owner: Any, name: str) -> bool:
        """Whether plans read this attribute of these backends. An attribute of the backend's own, such as a workspace or a
        counter, does not matter."""
        function = name.removesuffix('_verifier').removesuffix('_prefers')
        matters = hasattr(BaseBackend, name) or any(e.spec.name == function for e in self.catalogue.functions().values())
        return matters and bool(self._backends_of(owner))

    def _backends_of(self, owner: Any) -> list[BaseBackend]:
        """`owner` itself, or the backends of the class `owner`."""
        return [b for b in self.catalogue.backends() if b is owner or (isinstance(owner, type) and isinstance(b, owner))]

    def gate(self, backend: BaseBackend, policy: ResolvedPolicy) -> Gate:
        """The toggle of a backend under a policy: current, or fixed when dispatch was frozen."""
        frozen = self.policies.frozen
        if frozen is not None and backend in frozen.enabled:
            return Gate(self.toggles.variables(backend), is_on=frozen.enabled[backend])
        env = dict(policy.env) if policy.env is not None else None
        return self.toggles.gate(backend, env, strict=policy.strict)

    def plugins(self) -> tuple[Plugin, ...]:
        """The plugins of entry points and of the plugin variable; loads them if necessary."""
        return self.discovery.load_plugins()

    # -- recorders --------------------------------------------------------------------------------------------------------

    @property
    def recorders(self) -> tuple[Recorder, ...]:
        """Traces, telemetry and observers in use."""
        return self.control.now.recorders

    def start_recording(self, recorder: Recorder) -> bool:
        """Add a recorder; returns False if it is in use already."""
        self.policies.now  # noqa: B018 - reads the environment, which may start a recorder of its own first
        if recorder in self.recorders:
            return False
        self.control.change(lambda now: replace(now, recorders=(*now.recorders, recorder)))
        return True

    def stop_recording(self, recorder: Recorder) -> None:
        self.control.change(lambda now: replace(now, recorders=tuple(r for r in now.recorders if r is not recorder)))

    # -- the whole process ------------------------------------------------------------------------------------------------

    def _after_fork_in_child(self) -> None:
        """Remove scopes of other threads, which do not exist in the child."""
        self.discovery.after_fork_in_child()
        for recorder in self.recorders:
            recorder.after_fork_in_child()
        if changes_of_other_threads():  # the child gets no notification of their changes
            self.availability.forget()
            self.toggles.forget()
            self.replan()
        me = threading.get_ident()
        if any(scope.thread != me for scope in self.control.now.scopes):
            self.control.change(lambda now: replace(now, scopes=tuple(s for s in now.scopes if s.thread == me)))

    def refresh(self) -> None:
        """Read again: package availability, devices, policy variables, plans, packages that failed to import."""
        self.refuse_if_frozen('refresh')
        self.availability.forget()
        self.discovery.retry()
        with lock:
            for _, registry in self.registries.items():
                registry.retry_paths()
            self.replan()  # first: no cached plan may serve while the environment's layers are away
            self.policies.forget_environment()
        self.breakers.clear('refresh()')

    def reset(self) -> None:
        """Return to the state of a fresh process, for tests: no scopes, policy, traces or freeze, only the backends of the
        operations' own packages. The next call reads plugins and environment again."""
        for act in self.before_reset:
            act(self)
        with lock:
            self.listeners = ()
            self.breakers.reset()
            self.device_facts = devices.devices_of
            self.scopes_in_trace.layers = ()
            for _, registry in self.registries.items():
                registry._reset()
            self.availability.forget()
            self.toggles.forget()
            self.discovery.forget()
            self.policies.forget()
            logs.reset()
            for entry in self.catalogue.entries():
                entry.platforms, entry.was_called = (), False
            # generations only grow: a plan in progress must not match an old number
            self.control.change(lambda now: Situation(generations=now.generations))
            self.replan()

    # -- failures ---------------------------------------------------------------------------------------------------------

    def breaker(self, function: str | Callable[..., Any], backend: str) -> Breaker:
        """The circuit breaker of a backend (by name) for a dispatched function (or its name). Raises UnknownNameError for
        unknown names, TypeError for a function that is not dispatched."""
        self.policies.warn_in_baseline('a circuit breaker')
        entry = self.catalogue.entry(function) if isinstance(function, str) else entry_of(function)
        owner, key = entry.dispatcher, entry.spec.key
        owner.discovery.load(entry.spec.operation)
        names = {member.name.casefold(): member.name for member in entry.members()}
        if not isinstance(backend, str) or normalise(backend) not in names:
            raise unknown_name('backend', str(backend), names.values(), f' of {key}')
        return owner.breakers.of(key, names[normalise(backend)])

    def _asks_breakers(self, function: str) -> bool:
        entry = self.catalogue.known(function)
        return entry is None or self.baseline or entry.policy(entry.state()).falls_back


class ScopesInTrace:
    """Policy scopes entered in a region that Dynamo is tracing; empty outside a trace. Dynamo tracks the attribute, and
    undoes changes when it restarts a trace or gives up."""

    def __init__(self) -> None:
        # set on the instance: Dynamo would see an attribute move there from the class
        self.layers: tuple[tuple[Any, ...], ...] = ()


class BackendRegistry(Registry):
    """The backends of one operation. `BackendRegistry('kda')` returns the same object each time.

    Args:
        operation: such as 'kda', or '*' for backends that serve every operation of the namespace.
        dispatcher: the namespace; default: fla's own.
    """

    def __new__(cls, operation: str, dispatcher: Dispatcher | None = None) -> BackendRegistry:
        found = owner_of(dispatcher).registries(operation)
        assert isinstance(found, BackendRegistry)
        return found

    @property
    def dispatcher(self) -> Dispatcher:
        assert isinstance(self.owner, Dispatcher)
        return self.owner


def entry_of(function: Any) -> LiveFunction:
    """The entry point of a dispatched function. Raises TypeError for another object."""
    entry: LiveFunction | None = getattr(function, '__fla_entry__', None)
    if entry is None:
        raise TypeError(f'{getattr(function, "__qualname__", function)!r} is not a dispatched function')
    return entry


def _or_any(registry: Registry) -> str | None:
    """The registry's operation; None for all."""
    return None if registry.operation == '*' else registry.operation


def _before_change(owner: Any, name: str) -> None:
    for dispatcher in _dispatchers:
        dispatcher.backend_changing(owner, name)


def _after_change(owner: Any, name: str) -> None:
    for dispatcher in _dispatchers:
        dispatcher.backend_changed(owner, name)


on_change(_before_change, _after_change)

_default = Dispatcher('fla.ops', 'FLA', modules=_OPERATION_BACKEND_MODULES)


def replan_everything() -> None:
    """Plan again for every function of every namespace that is not frozen."""
    for dispatcher in _dispatchers:
        if dispatcher.policies.frozen is None:
            dispatcher.replan()


def owner_of(dispatcher: Dispatcher | None) -> Dispatcher:
    """The namespace for an argument `dispatcher`: None means fla's own. Raises TypeError for another object."""
    if dispatcher is None:
        return _default
    if not isinstance(dispatcher, Dispatcher):
        raise TypeError(f'dispatcher must be a Dispatcher or None, got {dispatcher!r}')
    return dispatcher


def default_dispatcher() -> Dispatcher:
    """The namespace `fla.ops`."""
    return _default
