"""One namespace of operations: its registries, its functions, its policy.

`fla` has one; a package outside fla makes its own: `Dispatcher(namespace='mylib.ops', env_prefix='MYLIB')`.

What a call runs is the code its entry point holds; this object only decides when that code is replaced. Every change
(a registration, an attribute of a backend, a policy) is *pushed*: the entry points concerned get the code that is kept for
the new state, or go cold and plan again on their next call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fla.backends.backend.availability import Availability
from fla.backends.backend.base import BaseBackend, changes_of_other_threads, on_change
from fla.backends.core import logs
from fla.backends.core.errors import RegistrationError, unknown_name
from fla.backends.core.locking import lock
from fla.backends.core.signature import Signature, location
from fla.backends.fallback.breaker import Breaker, BreakerListener, Breakers, Health
from fla.backends.plan.plan import Gate
from fla.backends.policy.environment import Environment
from fla.backends.policy.policy import normalise
from fla.backends.policy.precedence import ResolvedPolicy
from fla.backends.policy.toggles import Toggles
from fla.backends.registry.discovery import Discovery, Plugin, in_forked_children
from fla.backends.registry.registry import BackendRegistry, Listener
from fla.backends.runtime.policy_stack import PolicyStack
from fla.utils import devices

# Operations whose backends live elsewhere than in `fla.ops.<operation>.backends`.
_OPERATION_BACKEND_MODULES = {'modules': 'fla.modules.backends'}

_dispatchers: list[Dispatcher] = []


class Dispatcher(PolicyStack):
    """A namespace of dispatched operations.

    Args:
        namespace: package that holds the operations; backends of operation `x` are in `<namespace>.x.backends`.
        env_prefix: prefix of its environment variables.
        modules: operation → module that registers its backends, for those that live elsewhere.
        entry_points: group of its plugins. Default: `<top-level package>.backends`.
        retired_env: old name → new name of environment variables.
    """

    def __init__(
        self,
        namespace: str,
        env_prefix: str,
        *,
        modules: Mapping[str, str] | None = None,
        entry_points: str | None = None,
        retired_env: Mapping[str, str] | None = None,
    ) -> None:
        if not all(part.isidentifier() for part in namespace.split('.')):
            raise ValueError(f'namespace must be a dotted package name, got {namespace!r}')
        if not env_prefix.isidentifier() or env_prefix != env_prefix.upper():
            raise ValueError(f"env_prefix must be an upper-case name such as 'MYLIB', got {env_prefix!r}")
        super().__init__()
        self.namespace, self.env_prefix = namespace, env_prefix
        self.listeners: tuple[Listener, ...] = ()
        self.availability = Availability()
        self.toggles = Toggles(retired_env)
        self.environment = Environment(env_prefix, retired_env or {})
        self.discovery = Discovery(self, dict(modules or {}), entry_points or f'{namespace.split(".")[0]}.backends')
        self.baseline = bool(self.environment.boolean('DISABLE_BACKEND_DISPATCH'))
        self.breakers = Breakers()
        # operation ('*' for all) → how often what serves it has changed
        self._generations: dict[str, int] = {}
        self.device_facts: Callable[[str], Sequence[devices.Device]] = devices.devices_of
        self.breakers.asked = self._breakers_asked
        in_forked_children(self._after_fork_in_child)
        _dispatchers.append(self)

    def __repr__(self) -> str:
        return f'<Dispatcher {self.namespace}>'

    # -- registries ---------------------------------------------------------------------------------------------------

    def registry(self, operation: str) -> BackendRegistry:
        """The registry of an operation, made if it does not exist."""
        return BackendRegistry(operation, self)

    def who_registers(self) -> str:
        return self.discovery.who_registers()

    def check_registration(self, registry: BackendRegistry, backend: BaseBackend, origin: str) -> None:
        """Compare a backend's methods with the public functions known so far; later functions compare themselves.

        Raises:
            RegistrationError: under strict mode.
        """
        operation = None if registry.operation == '*' else registry.operation
        for entry in self.functions(operation).values():
            self.check_methods(entry.operation, entry.signature, entry.name, entry.place, backend)

    def check_methods(self, operation: str, signature: Signature, function: str, place: str, backend: BaseBackend) -> None:
        """Warn of what in a backend's methods for one function disagrees with the public function, or raise if strict."""
        for name in (function, f'{function}_verifier', f'{function}_prefers'):
            method = getattr(backend, name, None)
            if not callable(method):
                continue
            for problem in signature.drift(method):
                text = f'{type(backend).__qualname__}.{name} ({location(method)}) and {function} ({place}): {problem}'
                if self.is_strict(operation):
                    raise RegistrationError(text)
                logs.warn_once(('drift', text), '%s', text)

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event, registry, registration)` after every change of any registry; returns what ends it."""
        with lock:
            self.listeners = (*self.listeners, listener)

        def end() -> None:
            with lock:
                self.listeners = tuple(known for known in self.listeners if known is not listener)

        return end

    def registry_changed(self, registry: BackendRegistry) -> None:
        """Called under the lock."""
        self._advance(registry.operation)

    def operation_loaded(self, operation: str) -> None:
        """Called under the lock when all backends of an operation are known."""
        self._generations[operation] = self._generations.get(operation, 0) + 1

    def generation(self, operation: str) -> int:
        """Changes whenever what serves an operation does."""
        return self._generations.get(operation, 0) + self._generations.get('*', 0)

    def _advance(self, operation: str) -> None:
        """Called under the lock: whatever serves `operation` ('*': any) is another thing now."""
        self._generations[operation] = self._generations.get(operation, 0) + 1
        for entry in self.entries():
            if operation in ('*', entry.operation):
                entry.forget_plans()

    def backend_changed(self, owner: Any, name: str) -> None:
        """An attribute of a backend class or instance was set: whatever it serves plans again."""
        if self._reads(owner, name):
            self.availability.forget(owner)
            self.toggles.forget(owner)
            with lock:
                self._advance('*')
            self.breakers.clear(f'{name} was set', backends=self._names_of(owner))

    def backend_changing(self, owner: Any, name: str) -> None:
        """An attribute of a backend class or instance is about to be set.

        Raises:
            FrozenError: while dispatch is frozen, if a plan reads it.
        """
        if self.frozen is not None and self._reads(owner, name):
            self.refuse_if_frozen(f'set {name} of {owner!r}')

    def _reads(self, owner: Any, name: str) -> bool:
        """Whether plans read this attribute of this backend, or of this class's backends. What a backend keeps for itself (a
        workspace, a counter) does not make anybody plan again."""
        if not self._matters(name):
            return False
        if isinstance(owner, type):
            return any(isinstance(backend, owner) for backend in self.backends())
        return any(backend is owner for backend in self.backends())

    def _names_of(self, owner: Any) -> set[str]:
        """Names of a backend, or of a class's backends."""
        return {b.backend_type for b in self.backends() if b is owner or (isinstance(owner, type) and isinstance(b, owner))}

    def _matters(self, name: str) -> bool:
        if hasattr(BaseBackend, name):
            return True
        function = name.removesuffix('_verifier').removesuffix('_prefers')
        return any(entry.name == function for entry in self._functions.values())

    def gate(self, backend: BaseBackend, policy: ResolvedPolicy) -> Gate:
        """The toggle of a backend under a policy: live, or as it was when dispatch was frozen."""
        if self.frozen is not None and backend in self.frozen.enabled:
            return Gate(self.toggles.variables(backend), is_on=self.frozen.enabled[backend])
        env = dict(policy.env) if policy.env is not None else None
        return self.toggles.gate(backend, env, strict=policy.strict)

    def plugins(self) -> tuple[Plugin, ...]:
        """What was found by entry points and the plugin variable, loading it if that has not happened yet."""
        self.discovery._load_plugins()
        return self.discovery.plugins

    def follow_environment(self) -> None:
        """Record calls, or end that, as the environment says."""
        from fla.backends.observe.trace import follow_environment

        follow_environment(self, self.environment.tracing)

    def _after_fork_in_child(self) -> None:
        """Other threads do not exist in the child, so that nobody there would ever leave their scopes."""
        self.discovery.after_fork_in_child()
        for running in self.telemetries:
            running.after_fork_in_child()
        if changes_of_other_threads():  # what has changed, nobody will tell
            self.availability.forget()
            self.toggles.forget()
            self.replan()
        me = threading.get_ident()
        self.holders = {token: thread for token, thread in self.holders.items() if thread == me}
        for token, _, _ in self.scopes:
            if token not in self.holders:
                self.pop_scope(token)

    # -- whole-process verbs ------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look again: package availability, devices, policy variables, plans, packages that failed to import."""
        self.refuse_if_frozen('refresh')
        self.availability.forget()
        self.discovery.retry()
        with lock:
            for registry in self.registries.values():
                registry.retry_paths()
            self._env_layers = None
            self._advance('*')
            self.push()
        self.breakers.clear('refresh()')

    def replan(self) -> None:
        """Every function plans again on its next call."""
        with lock:
            self._advance('*')

    def reset(self) -> None:
        """A fresh process, for tests: no scopes, no policy, no traces, not frozen; only what the operations' own packages
        registered is registered; plugins and environment are read again on the next call."""
        from fla.backends.observe.trace import forget_environment

        for running in self.traces:
            running.stop()
        if 'fla.backends.policy_files.watch' in sys.modules:
            sys.modules['fla.backends.policy_files.watch'].stop_watching(self)
        forget_environment(self)
        with lock:
            self.forget_layers()
            self.listeners = ()
            self.breakers.reset()
            self.device_facts = devices.devices_of
            for registry in self.registries.values():
                registry._reset()
            self.availability.forget()
            self.toggles.forget()
            self.discovery.forget()
            logs.reset()
            self._advance('*')
            for entry in self.entries():
                entry.platforms, entry.was_called = (), False
            self._state = self._compose()

    # -- failures -----------------------------------------------------------------------------------------------------

    def health(self) -> dict[tuple[str, str], Health]:
        """('operation.function', backend) → what its circuit breaker knows."""
        return self.breakers.health()

    def breaker(self, function: str | Callable[..., Any], backend: str) -> Breaker:
        """The circuit breaker of a backend for a function: `.state`, `.reset()`, `.force_open()`, `.force_close()`.

        Args:
            function: a dispatched function, or its name ('kda.chunk_kda').
            backend: the backend's name.

        Raises:
            UnknownNameError: for names nobody knows.
            TypeError: for a function that is not dispatched.
        """
        from fla.backends.observe.describe import entry_of

        self.warn_in_baseline('a circuit breaker')
        entry = self.entry(function) if isinstance(function, str) else entry_of(function)
        entry.dispatcher.discovery.load(entry.operation)
        names = {member.name.casefold(): member.name for member in entry.members()}
        if not isinstance(backend, str) or normalise(backend) not in names:
            raise unknown_name('backend', str(backend), names.values(), f' of {entry.key}')
        return entry.dispatcher.breakers.of(entry.key, names[normalise(backend)])

    def _breakers_asked(self, function: str) -> bool:
        entry = self._functions.get(function)
        return entry is None or self.baseline or entry.policy(entry.state()).falls_back

    def add_breaker_listener(self, listener: BreakerListener) -> Callable[[], None]:
        """Call `listener(event)` after every change of a breaker's state, in the call's thread and outside every lock;
        returns what ends it. What it raises is logged."""
        return self.breakers.add_listener(listener)

    def validate(self) -> list[str]:
        """Problems that need no call: methods of functions nobody knows (pending), verifiers without a method, plugins and
        packages that failed. Loads every operation."""
        from fla.backends.observe.describe import problems

        return problems(self)


def _before_change(owner: Any, name: str) -> None:
    for dispatcher in _dispatchers:
        dispatcher.backend_changing(owner, name)


def _after_change(owner: Any, name: str) -> None:
    for dispatcher in _dispatchers:
        dispatcher.backend_changed(owner, name)


on_change(_before_change, _after_change)

_default = Dispatcher('fla.ops', 'FLA', modules=_OPERATION_BACKEND_MODULES)


def replan_everything() -> None:
    """Every function of every namespace that is not frozen plans again on its next call."""
    for dispatcher in _dispatchers:
        if dispatcher.frozen is None:
            dispatcher.replan()


def owner_of(dispatcher: Dispatcher | None) -> Dispatcher:
    """The namespace that an argument `dispatcher` means: fla's own where it is None.

    Raises:
        TypeError: for something else.
    """
    if dispatcher is None:
        return _default
    if not isinstance(dispatcher, Dispatcher):
        raise TypeError(f'dispatcher must be a Dispatcher or None, got {dispatcher!r}')
    return dispatcher


def default_dispatcher() -> Dispatcher:
    """The namespace `fla.ops`."""
    return _default
