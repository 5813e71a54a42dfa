"""One namespace of operations: its registries, its functions, its policy.

`fla` has one; a package outside fla makes its own: `Dispatcher(namespace='mylib.ops', env_prefix='MYLIB')`.

What a call runs is the code its entry point holds; this object only decides when that code is replaced. Every change
(a registration, an attribute of a backend, a policy) is *pushed*: the entry points concerned get the code that is kept for
the new state, or go cold and plan again on their next call.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fla.ops.backends import logs
from fla.ops.backends.availability import Availability
from fla.ops.backends.backend import KINDS, BaseBackend, changes_of_other_threads, on_change
from fla.ops.backends.breaker import Breaker, BreakerListener, Breakers, Health
from fla.ops.backends.discovery import Discovery, Plugin, in_forked_children
from fla.ops.backends.environment import Environment
from fla.ops.backends.errors import DispatchError, FrozenError, RegistrationError, UnknownNameError, unknown_name
from fla.ops.backends.locking import lock
from fla.ops.backends.plan import Gate
from fla.ops.backends.policy import Policy, Rule
from fla.ops.backends.precedence import Effective, Layer, State
from fla.ops.backends.registry import BackendRegistry, Listener
from fla.ops.backends.signature import Signature, location
from fla.ops.backends.toggles import Toggles
from fla.utils import devices
from fla.utils.env import nearest

if TYPE_CHECKING:
    from fla.ops.backends.config.load import Draft
    from fla.ops.backends.entry import Entry
    from fla.ops.backends.telemetry import Observer, Telemetry
    from fla.ops.backends.trace import Trace
    from fla.ops.backends.versions import PolicyVersion

# Operations whose backends live elsewhere than in `fla.ops.<operation>.backends`.
_OPERATION_BACKEND_MODULES = {'modules': 'fla.modules.backends'}

_dispatchers: list[Dispatcher] = []


class Virtual:
    """Policy scopes entered inside a region that Dynamo is tracing. A plain object: Dynamo tracks its attribute through the
    trace, and takes the change back by itself when it restarts or gives up. Outside a trace it is always empty."""

    def __init__(self) -> None:
        # on the instance from the start: Dynamo would see it move there from the class
        self.layers: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class Frozen:
    """What `freeze_dispatch()` holds fast: the policy, the toggles' values, and for each backend whether it is on."""

    layers: tuple[Layer, ...]
    env: tuple[tuple[str, str | None], ...]
    enabled: Mapping[BaseBackend, bool]


def _file_layer(policy: Policy, path: str) -> Layer:
    return Layer(policy, f'policy file {path}')


class Dispatcher:
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
        self.namespace, self.env_prefix = namespace, env_prefix
        self.registries: dict[str, BackendRegistry] = {}
        self.listeners: tuple[Listener, ...] = ()
        self.availability = Availability()
        self.toggles = Toggles(retired_env)
        self.environment = Environment(env_prefix, retired_env or {})
        self.discovery = Discovery(self, dict(modules or {}), entry_points or f'{namespace.split(".")[0]}.backends')
        self.virtual = Virtual()
        self.baseline = bool(self.environment.boolean('DISABLE_BACKEND_DISPATCH'))
        # the undecorated functions, by key, where nothing is dispatched
        self.plain: dict[str, Callable[..., Any]] = {}
        self.traces: tuple[Trace, ...] = ()
        self.telemetries: tuple[Telemetry, ...] = ()
        self.observers: tuple[tuple[object, Observer], ...] = ()
        self.breakers = Breakers()
        self.frozen: Frozen | None = None
        # operation ('*' for all) → how often what serves it has changed
        self._generations: dict[str, int] = {}
        self.scopes: tuple[tuple[int, Layer, State | None], ...] = ()
        # which thread entered a scope, by its token
        self.holders: dict[int, int] = {}
        self._code: Layer | None = None
        self._file: PolicyVersion | None = None
        self._file_versions = 0
        # the environment's file: as it was last read, and what of it was last put in force
        self._config_draft: Draft | None = None
        self._config_version: PolicyVersion | None = None
        self._measured: Layer | None = None
        self._env_layers: tuple[Layer, ...] | None = None
        self._env_checked = False
        self._state = State()
        self._functions: dict[str, Entry] = {}
        self._entries: weakref.WeakSet[Entry] = weakref.WeakSet()
        self.device_facts: Callable[[str], Sequence[devices.Device]] = devices.devices_of
        self.breakers.asked = self._breakers_asked
        in_forked_children(self._after_fork_in_child)
        _dispatchers.append(self)

    def __repr__(self) -> str:
        return f'<Dispatcher {self.namespace}>'

    # -- functions ----------------------------------------------------------------------------------------------------

    def add(self, entry: Entry, *, public: bool) -> None:
        """Make an entry point known."""
        with lock:
            self._entries.add(entry)
            if public:
                known = self._functions.get(entry.key)
                if known is not None and known.place.rpartition(':')[0] != entry.place.rpartition(':')[0]:
                    logs.logger.warning(
                        'function %s is dispatched at %s and again at %s; by name, the newest is meant',
                        entry.key,
                        known.place,
                        entry.place,
                    )
                # a new dictionary: see BackendRegistry.__new__
                self._functions = {**self._functions, entry.key: entry}

    def entries(self) -> list[Entry]:
        """Every entry point, bound ones included."""
        with lock:
            return list(self._entries)

    def functions(self, operation: str | None = None) -> dict[str, Entry]:
        """Public functions by 'operation.function'."""
        return {k: e for k, e in self._functions.items() if operation is None or e.operation == operation}

    def entry(self, name: str) -> Entry:
        """The function called 'operation.function', imported if need be.

        Raises:
            UnknownNameError: with the nearest match.
        """
        if not isinstance(name, str):
            raise TypeError(f"a function's name is a string such as 'kda.chunk_kda', got {name!r}")
        if name not in self._functions:
            operation, _, function = name.rpartition('.')
            if not operation and self.discovery.exists(name):
                self.import_operation(name)
                known = [entry.name for entry in self.functions(name).values()]
                raise unknown_name('function', '', known, f' of operation {name!r}', f" Write '{name}.FUNCTION'.")
            if not operation or not self.discovery.exists(operation):
                raise unknown_name('operation', operation or name, self.discovery.operations())
            self.import_operation(operation)
            if name not in self._functions:
                raise unknown_name(
                    'function',
                    function,
                    [e.name for e in self.functions(operation).values()],
                    f' of operation {operation!r}',
                )
        return self._functions[name]

    def named(self, name: str) -> Callable[..., Any]:
        """The public function called 'operation.function', imported if need be.

        Raises:
            UnknownNameError: with the nearest match.
        """
        if self.baseline and name not in self.plain and self.discovery.exists(name.rpartition('.')[0]):
            self.import_operation(name.rpartition('.')[0])
        return self.plain[name] if name in self.plain else self.entry(name).wrapper

    def import_operation(self, operation: str) -> None:
        """Import the package of an operation, where it has one."""
        import importlib

        package = self.discovery.module_of(operation).removesuffix('.backends')
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is None or not f'{package}.'.startswith(f'{error.name}.'):
                raise

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

    def backends(self) -> Iterator[BaseBackend]:
        """Every backend there is, covered ones and the functions' defaults included."""
        for registry in self.registries.values():
            for entry in registry._entries:
                if entry.backend is not None:
                    yield entry.backend
        for function in self.entries():
            yield function.default

    def gate(self, backend: BaseBackend, policy: Effective) -> Gate:
        """The toggle of a backend under a policy: live, or as it was when dispatch was frozen."""
        if self.frozen is not None and backend in self.frozen.enabled:
            return Gate(self.toggles.variables(backend), is_on=self.frozen.enabled[backend])
        env = dict(policy.env) if policy.env is not None else None
        return self.toggles.gate(backend, env, strict=policy.strict)

    def plugins(self) -> tuple[Plugin, ...]:
        """What was found by entry points and the plugin variable, loading it if that has not happened yet."""
        self.discovery._load_plugins()
        return self.discovery.plugins

    # -- policy -------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The state in force. The environment is read on the first call."""
        if self._env_layers is None:
            self._read_environment()
        return self._state

    def is_strict(self, operation: str | None = None) -> bool:
        """Whether bugs raise: in an operation, or outside any."""
        for layer in self.state().layers:
            about = layer.policy.op
            concerned = about is None or (operation is not None and f'{about}.'.startswith(f'{operation}.'))
            if layer.policy.strict is not None and concerned:
                return layer.policy.strict
        return False

    def _read_environment(self) -> None:
        from fla.ops.backends.trace import follow_environment

        layers = self.environment.layers()
        self._config_draft = None
        path = os.path.expanduser((self.environment.text('DISPATCH_CONFIG') or '').strip())
        file = self._read_config(path) if path else None
        with lock:
            if self._env_layers is None:  # else another thread was faster
                self._env_layers, self._env_checked = layers, False
                if file is not None:
                    known = self._config_version
                    # else it says what it said, and what load_policy() has put in its place since stays
                    if known is None or (known.sha256, known.source) != (file.sha256, file.source):
                        self._file_versions += 1
                        self._file = self._config_version = replace(file, version=self._file_versions)
                elif not path and self._config_version is not None:  # the variable that named it is gone
                    self._file = None if self._file is self._config_version else self._file
                    self._config_version = None
                follow_environment(self, self.environment.tracing)
                self.push()

    def _compose(self) -> State:
        pinned = next((state for _, _, state in reversed(self.scopes) if state is not None), None)
        if pinned is not None:
            return State(pinned.layers, bool(self.traces), pinned.env, self._telemetry())
        if self.frozen is not None:  # what was in force then, also where a scope has ended since
            return State(self.frozen.layers, bool(self.traces), self.frozen.env, self._telemetry())
        layers = [layer for _, layer, _ in reversed(self.scopes)]
        if self._code is not None:
            layers.append(self._code)
        layers += self._env_layers or ()
        file = None if self._file is None else _file_layer(self._file.policy, self._file.source)
        layers += [layer for layer in (file, self._measured) if layer is not None]
        return State(tuple(layers), bool(self.traces), telemetry=self._telemetry())

    def state_with_file(self, policy: Policy | None, name: str = '') -> State:
        """The state in force, with another policy in the place of the file's; None for no file."""
        now, file = self.state(), self._file
        source = '' if file is None else _file_layer(file.policy, file.source).source
        layers = [layer for layer in now.layers if file is None or layer.policy is not file.policy or layer.source != source]
        below = [layer for layer in layers if layer is self._measured]
        above = [layer for layer in layers if layer is not self._measured]
        own = [] if policy is None else [_file_layer(policy, name)]
        return replace(now, layers=(*above, *own, *below))

    def _telemetry(self) -> str:
        if any(running.timing for running in self.telemetries):
            return 'time'
        return 'count' if self.telemetries or self.observers else ''

    def push(self) -> None:
        """Give every entry point the code for the state that is now in force."""
        with lock:
            self._state = self._compose()
            for entry in self._entries:
                entry.install(self._state)

    def push_scope(self, token: int, layer: Layer, pinned: State | None = None) -> None:
        """Enter a scope."""
        self.state()
        with lock:
            self.scopes = (*self.scopes, (token, layer, pinned))
            self.push()

    def pop_scope(self, token: int) -> None:
        """Leave a scope, whichever others were entered since."""
        with lock:
            self.scopes = tuple(scope for scope in self.scopes if scope[0] != token)
            self.push()

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

    def set_policy(self, policy: Policy) -> Policy | None:
        """Set the policy of the code layer, for the whole process; returns the one it replaces.

        Raises:
            UnknownNameError: for an operation or backend that nobody knows.
            FrozenError: while dispatch is frozen.
        """
        if not isinstance(policy, Policy):
            raise TypeError(f'set_policy() takes a Policy, got {policy!r}')
        self.refuse_if_frozen('set a policy')
        self.check_policy(policy)
        self.state()
        with lock:
            old, self._code = self._code, Layer(policy, 'set_policy()')
            self.push()
        self.breakers.clear('the policy changed')
        return old.policy if old else None

    def get_policy(self) -> Policy | None:
        """The policy of the code layer, None if none is set."""
        return self._code.policy if self._code else None

    def reset_policy(self) -> None:
        """Take the policy of the code layer away."""
        self.refuse_if_frozen('reset the policy')
        with lock:
            self._code = None
            self.push()
        self.breakers.clear('the policy changed')

    # -- policy file --------------------------------------------------------------------------------------------------

    def read_policy_version(self, path: str | os.PathLike[str]) -> PolicyVersion:
        """Read a policy file, once, and check it. Changes nothing.

        Raises:
            PolicyFileError: lists every error with its line.
            OSError: if the file cannot be read.
        """
        from fla.ops.backends.config import load

        draft = load.read(path)
        return draft.version(draft.unknown(self))

    def read_policy(self, path: str | os.PathLike[str]) -> Policy:
        """What a policy file says. Arguments and errors as for `read_policy_version`."""
        return self.read_policy_version(path).policy

    def load_policy(self, path: str | os.PathLike[str]) -> PolicyVersion:
        """Put a policy file in force as the file layer, in the place of the former one. Errors change nothing.

        Raises:
            PolicyFileError: lists every error with its line.
            OSError: if the file cannot be read.
            FrozenError: while dispatch is frozen.
        """
        self.refuse_if_frozen('load a policy file')
        return self.set_file_policy(self.read_policy_version(path))

    def set_file_policy(self, made: PolicyVersion) -> PolicyVersion:
        """Put what was read in force. It gets the next number, unless it has been in force before."""
        self.refuse_if_frozen('change the file layer')
        self.state()
        with lock:
            if not made.version:
                self._file_versions += 1
                made = replace(made, version=self._file_versions)
            before, self._file = self._file, made
            self.push()
        if before is None or before.policy != made.policy:
            self.breakers.clear('the policy changed')
        return made

    def unload_policy(self) -> None:
        """Take the file layer away. `refresh()` reads the file that the environment names again."""
        self.refuse_if_frozen('unload the policy file')
        self.state()
        with lock:
            self._file = self._config_version = None
            self.push()
        self.breakers.clear('the policy changed')

    def try_policy(self, policy: Policy, source: str) -> None:
        """Plan the functions in use as if `policy` were the file layer. Changes nothing.

        Raises:
            DispatchError: for a function that no backend would be left for.
        """
        from fla.ops.backends.config.trial import require_backends

        require_backends(self, self.state_with_file(policy, source), source)

    def set_measured(self, policy: Policy | None, source: str = '') -> None:
        """Set or take away the lowest layer, which is what was measured (see `measure`)."""
        self.refuse_if_frozen('change what was measured')
        self.state()
        with lock:
            self._measured = Layer(policy, source) if policy is not None else None
            self.push()

    def measured_rules(self) -> tuple[Rule, ...]:
        """What was measured, as rules for one function each."""
        return self._measured.policy.rules if self._measured is not None else ()

    def kind_of(self, layer: Layer) -> str:
        """Which layer it is, without the place where it was written."""
        if layer is self._measured:
            return 'measured'
        if self._file is not None and layer.source == _file_layer(self._file.policy, self._file.source).source:
            return 'policy file'
        return re.sub(r' at \S+:\d+', '', layer.source)

    def state_without_measured(self) -> State:
        """The state in force but for what was measured."""
        now = self.state()
        return replace(now, layers=tuple(layer for layer in now.layers if layer is not self._measured))

    def policy_version(self) -> PolicyVersion | None:
        """The version of the file layer in force, None if there is none."""
        self.state()
        return self._file

    def _read_config(self, path: str) -> PolicyVersion | None:
        """The file that the environment names. One that cannot be used is an error in the log, and raises if strict; its
        names are looked up with those of the other variables, when plugins are loaded."""
        from fla.ops.backends.config import load

        try:
            self._config_draft = load.read(path)
            return self._config_draft.version()
        except (load.PolicyFileError, OSError, ImportError) as error:
            text = f'{self.environment.name("DISPATCH_CONFIG")}={path!r} is left out: {error}'
            if self.environment.boolean('STRICT'):
                raise DispatchError(text) from error
            logs.once(('policy file', text), logging.ERROR, '%s', text)
            return None

    def _refuse_if_locked(self, policy: Policy) -> None:
        """Raise for an order that a lock of the file stands against."""
        file = self._file
        for name, _ in file.policy.lock if file is not None else ():
            named = [key for key, _ in (*policy.order, *policy.lock)]
            if policy.op and (policy.prefer or policy.rules):
                named.append(policy.op)
            if any(f'{key}.'.startswith(f'{name}.') or f'{name}.'.startswith(f'{key}.') for key in named):
                assert file is not None
                place = file.policy.place(f'lock.{name}', file.source)
                raise DispatchError(
                    f'the order of {name!r} is locked by {place}: only use_backend() and bind() may choose another backend'
                )

    def layers(self) -> tuple[Layer, ...]:
        """The layers in force, highest first, with their sources."""
        return self.state().layers

    # -- names --------------------------------------------------------------------------------------------------------

    def check_policy(self, policy: Policy) -> None:
        """Raise UnknownNameError for operations, functions and backends that nobody knows."""
        named = (*policy.order, *policy.lock)
        for name in (*([policy.op] if policy.op else []), *(name for name, _ in named)):
            self.check_operation(name)
        self._refuse_if_locked(policy)
        if policy.rules:
            from fla.ops.backends.config import names

            unknown = list(names.problems(self, {'rules': [rule.to_dict() for rule in policy.rules]}))
            if unknown:
                said = [f'{policy.rules[at[1]].place or "a rule of this policy"}: {text}' for at, text in unknown]
                raise UnknownNameError('; '.join(said))
        if policy.op:
            self.check_tokens(policy.tokens(), policy.op)
        else:
            listed = {name for name, _ in policy.order}
            for name, tokens in policy.order:
                self.check_tokens(tokens, name)
            self.check_tokens(tuple(t for t in policy.tokens() if not any(t in dict(policy.order)[n] for n in listed)), None)

    def check_operation(self, name: str) -> None:
        """`name` must be an operation, or one of its functions."""
        if not isinstance(name, str):
            raise TypeError(f"an operation is named by a string such as 'kda', got {name!r}")
        if name == '*':
            raise unknown_name('operation', name, self.discovery.operations(), '', ' Leave op out to mean every function.')
        if self.discovery.exists(name):
            return
        self.entry(name)

    def check_tokens(self, tokens: tuple[str, ...], name: str | None) -> None:
        """Every token must name a kind, or a backend of the operation (or of any, where `name` is None)."""
        unknown = self.unknown_tokens(tokens, name)
        if unknown:
            operation = self.operation_of(name) if name else None
            where = f' of operation {operation!r}' if name else ''
            raise unknown_name('backend', unknown[0], self._words(operation), where)

    def unknown_tokens(self, tokens: tuple[str, ...], name: str | None) -> list[str]:
        """The tokens that name nothing. Loads the operation; where `name` is None, every operation, but only
        for a token that no loaded one knows."""
        if name is not None:
            operation = self.operation_of(name)
            self.discovery.load(operation)
            return [token for token in tokens if token not in self._words(operation)]
        missing = [token for token in tokens if token not in self._words(None)]
        if missing:
            self.discovery.load_all()
            missing = [token for token in missing if token not in self._words(None)]
        return missing

    def operation_of(self, name: str) -> str:
        """The operation that an operation's or a function's name belongs to."""
        return name if self.discovery.exists(name) else name.rpartition('.')[0]

    def words(self, name: str | None) -> set[str]:
        """The tokens known for an operation or function, or for any."""
        return self._words(self.operation_of(name) if name else None)

    def _words(self, operation: str | None) -> set[str]:
        words = {*KINDS, 'triton'}
        for name, registry in self.registries.items():
            if operation is not None and name not in (operation, '*'):
                continue
            for backend in registry:
                words |= {backend.backend_type.casefold(), f'impl:{backend.impl_id.casefold()}', 'impl:default.default'}
                if backend.vendor:
                    words.add(f'vendor:{backend.vendor.casefold()}')
            words |= {registration.name.casefold() for registration in registry.registrations()}
        return words

    def check_environment_once(self) -> None:
        """`check_environment`, the first time since the environment was read."""
        if not self._env_checked and not self.discovery.is_loading():
            self._env_checked = True
            try:
                self.check_environment()
            except BaseException:
                self._env_checked = False  # strict: the next call is no better
                raise

    def check_environment(self) -> None:
        """Warn of names in the environment that nobody knows. Run after the first plan, when plugins are loaded."""
        for layer in self._env_layers or ():
            for name, tokens in layer.policy.order:
                try:
                    self.check_operation(name)
                    unknown = self.unknown_tokens(tokens, name)
                except Exception as error:
                    # an operation that cannot be imported is not the business of the call that is being planned
                    self._environment_problem(layer.source, str(error))
                    continue
                for token in unknown:
                    problem = f'unknown backend {token!r} for {name!r}.'
                    self._environment_problem(layer.source, problem, self._words(self.operation_of(name)), token)
            if not layer.policy.order:
                for token in self.unknown_tokens(layer.policy.tokens(), None):
                    self._environment_problem(layer.source, f'unknown backend {token!r}.', self._words(None), token)
        draft = self._config_draft
        if draft is not None:
            unknown_there = draft.at(draft.unknown(self))
            if unknown_there and self.is_strict():
                raise UnknownNameError(f'{self.environment.name("DISPATCH_CONFIG")}: ' + '\n'.join(unknown_there))
            for problem in unknown_there:
                self._environment_problem(self.environment.name('DISPATCH_CONFIG'), problem)
        toggles = {name for backend in self.backends() for name in self.toggles.variables(backend)}
        self.environment.warn_unknown(toggles, self.discovery.variables_in_sources)

    def _environment_problem(self, source: str, problem: str, words: set[str] | None = None, token: str = '') -> None:
        text = f'{source}: {problem}{nearest(token, words) if words and token else ""}'
        if self.is_strict():
            raise UnknownNameError(text)
        logs.warn_once(('environment', text), '%s', text)

    # -- whole-process verbs ------------------------------------------------------------------------------------------

    def refuse_if_frozen(self, what: str) -> None:
        """Raise FrozenError while frozen, except for what a lazy load does."""
        if self.frozen is not None and not self.discovery.is_loading():
            raise FrozenError(f'cannot {what} while dispatch is frozen; call thaw_dispatch() first')

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
        from fla.ops.backends.trace import forget_environment

        for running in self.traces:
            running.stop()
        if 'fla.ops.backends.watch' in sys.modules:
            sys.modules['fla.ops.backends.watch'].stop_watching(self)
        forget_environment(self)
        with lock:
            self.frozen = None
            self.scopes, self._code, self._env_layers = (), None, None
            self._file, self._file_versions, self._measured = None, 0, None
            self._config_draft = self._config_version = None
            self.holders = {}
            self.traces, self.listeners = (), ()
            self.telemetries, self.observers = (), ()
            self.breakers.reset()
            self.virtual.layers = ()
            self.device_facts = devices.devices_of
            for registry in self.registries.values():
                registry._reset()
            self.availability.forget()
            self.toggles.forget()
            self.discovery.forget()
            logs.reset()
            self._advance('*')
            for entry in self.entries():
                entry.platforms = ()
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
        from fla.ops.backends.failure import breaker_of

        return breaker_of(self, function, backend)

    def _breakers_asked(self, function: str) -> bool:
        entry = self._functions.get(function)
        return entry is None or entry.policy(entry.state()).falls_back

    def add_breaker_listener(self, listener: BreakerListener) -> Callable[[], None]:
        """Call `listener(event)` after every change of a breaker's state, in the call's thread and outside every lock;
        returns what ends it. What it raises is logged."""
        return self.breakers.add_listener(listener)

    def validate(self) -> list[str]:
        """Problems that need no call: methods of functions nobody knows (pending), verifiers without a method, plugins and
        packages that failed. Loads every operation."""
        from fla.ops.backends.describe import problems

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
