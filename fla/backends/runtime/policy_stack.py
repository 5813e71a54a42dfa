"""The layers of policy of a namespace, and the state that they make: who may change which, and what is in force."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fla.backends.backend.base import BaseBackend
from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, FrozenError, UnknownNameError
from fla.backends.core.locking import lock
from fla.backends.fallback.breaker import Breakers
from fla.backends.policy.environment import Environment
from fla.backends.policy.policy import Policy, Rule
from fla.backends.policy.precedence import Layer, State, refuse_if_locked
from fla.backends.policy.toggles import Toggles
from fla.backends.registry.catalogue import Catalogue
from fla.utils.env import nearest

if TYPE_CHECKING:
    from fla.backends.observe.telemetry import Observer, Telemetry
    from fla.backends.observe.trace import Trace
    from fla.backends.policy_files.load import Draft
    from fla.backends.policy_files.versions import PolicyVersion


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


class PolicyStack(Catalogue):
    """The part of a `Dispatcher` that knows who says what. Highest first: scopes, code, environment, file, measured."""

    environment: Environment
    toggles: Toggles
    breakers: Breakers

    def __init__(self) -> None:
        super().__init__()
        self.virtual = Virtual()
        self.frozen: Frozen | None = None
        self.scopes: tuple[tuple[int, Layer, State | None], ...] = ()
        # which thread entered a scope, by its token
        self.holders: dict[int, int] = {}
        self.traces: tuple[Trace, ...] = ()
        self.telemetries: tuple[Telemetry, ...] = ()
        self.observers: tuple[tuple[object, Observer], ...] = ()
        self._code: Layer | None = None
        self._file: PolicyVersion | None = None
        self._file_versions = 0
        # the environment's file: as it was last read, and what of it was last put in force
        self._config_draft: Draft | None = None
        self._config_version: PolicyVersion | None = None
        self._config_error: str | None = None
        self._measured: Layer | None = None
        self._env_layers: tuple[Layer, ...] | None = None
        self._env_checked = False
        self._state = State()

    def follow_environment(self) -> None:
        """Record calls, or end that, as the environment says. Called under the lock."""
        raise NotImplementedError

    def forget_layers(self) -> None:
        """As in a fresh process. Called under the lock."""
        self.frozen = None
        self.scopes, self.holders = (), {}
        self.traces, self.telemetries, self.observers = (), (), ()
        self.virtual.layers = ()
        self._code, self._env_layers = None, None
        self._file, self._file_versions, self._measured = None, 0, None
        self._config_draft = self._config_version = self._config_error = None

    # -- what is in force -----------------------------------------------------------------------------------------------

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
        layers = self.environment.layers()
        self._config_draft = self._config_error = None
        path = self._config_path()
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
                self.follow_environment()
                self.push()

    def _config_path(self) -> str:
        return (self.environment.text('DISPATCH_CONFIG') or '').strip()

    def _config_problems(self) -> list[str]:
        path = self._config_path()
        if not path:
            return []
        from fla.backends.policy_files.load import PolicyFileError

        try:
            self.read_policy_version(path)
        except PolicyFileError as error:
            return list(error.errors)
        except (OSError, ImportError) as error:
            return [f'{self.environment.name("DISPATCH_CONFIG")}={path!r}: {error}']
        return []

    def _read_config(self, path: str) -> PolicyVersion | None:
        """The file that the environment names. One that cannot be used is an error in the log; if strict, every call raises
        it. Its names are looked up with those of the other variables, when plugins are loaded."""
        from fla.backends.policy_files import load

        try:
            self._config_draft = load.read(path)
            return self._config_draft.version()
        except (load.PolicyFileError, OSError, ImportError) as error:
            known = self._file
            now = 'left out' if known is None else f'left out, {known.source} as it was read before is in force still'
            text = f'{self.environment.name("DISPATCH_CONFIG")}={path!r} is {now}: {error}'
            self._config_error = text
            if not self.environment.boolean('STRICT'):  # else the next call raises it
                logs.once(('policy file', text), logging.ERROR, '%s', text)
            return None

    def _compose(self) -> State:
        pinned = next((state for _, _, state in reversed(self.scopes) if state is not None), None)
        if pinned is not None:
            return State(pinned.layers, bool(self.traces), pinned.env, self._telemetry())
        if self.frozen is not None:  # what was in force then, also where a scope has ended since
            return State(self.frozen.layers, bool(self.traces), self.frozen.env, self._telemetry())
        layers = [layer for _, layer, _ in reversed(self.scopes)]
        if self._code is not None:
            layers.append(self._code)
        return State((*layers, *self._below_code()), bool(self.traces), telemetry=self._telemetry())

    def _below_code(self) -> tuple[Layer, ...]:
        file = None if self._file is None else _file_layer(self._file.policy, self._file.source)
        return (*(self._env_layers or ()), *(layer for layer in (file, self._measured) if layer is not None))

    def _telemetry(self) -> str:
        if any(running.timing for running in self.telemetries):
            return 'time'
        return 'count' if self.telemetries or self.observers else ''

    def state_with_file(self, policy: Policy | None, name: str = '') -> State:
        """The state in force, with another policy in the place of the file's; None for no file."""
        now, file = self.state(), self._file
        source = '' if file is None else _file_layer(file.policy, file.source).source
        layers = [layer for layer in now.layers if file is None or layer.policy is not file.policy or layer.source != source]
        below = [layer for layer in layers if layer is self._measured]
        above = [layer for layer in layers if layer is not self._measured]
        own = [] if policy is None else [_file_layer(policy, name)]
        return replace(now, layers=(*above, *own, *below))

    def state_without_measured(self) -> State:
        """The state in force but for what was measured."""
        now = self.state()
        return replace(now, layers=tuple(layer for layer in now.layers if layer is not self._measured))

    def layers(self) -> tuple[Layer, ...]:
        """The layers in force, highest first, with their sources."""
        return self.state().layers

    def kind_of(self, layer: Layer) -> str:
        """Which layer it is, without the place where it was written."""
        if layer is self._measured:
            return 'measured'
        if self._file is not None and layer.source == _file_layer(self._file.policy, self._file.source).source:
            return 'policy file'
        return re.sub(r' at .+:\d+$', '', layer.source, flags=re.DOTALL)

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

    def refuse_in_baseline(self, what: str) -> None:
        """Raise DispatchError where nothing is dispatched, for what promises that something runs."""
        if self.baseline:
            raise DispatchError(f'{what}: {self._baseline_text()}; unset it')

    def warn_in_baseline(self, what: str) -> None:
        """One WARNING where nothing is dispatched, for what can change nothing then."""
        if self.baseline:
            logs.warn_once(('baseline', what), '%s has no effect: %s', what, self._baseline_text())

    def _baseline_text(self) -> str:
        return f'{self.environment.name("DISABLE_BACKEND_DISPATCH")} was set at import, so that nothing is dispatched'

    def refuse_if_frozen(self, what: str) -> None:
        """Raise FrozenError while frozen, except for what a lazy load does."""
        if self.frozen is not None and not self.discovery.is_loading():
            raise FrozenError(f'cannot {what} while dispatch is frozen; call thaw_dispatch() first')

    # -- code -----------------------------------------------------------------------------------------------------------

    def set_policy(self, policy: Policy) -> Policy | None:
        """Set the policy of the code layer, for the whole process; returns the one it replaces.

        Raises:
            UnknownNameError: for an operation or backend that nobody knows.
            DispatchError: for another order of a function that the policy file locks.
            FrozenError: while dispatch is frozen.
        """
        if not isinstance(policy, Policy):
            raise TypeError(f'set_policy() takes a Policy, got {policy!r}')
        self.refuse_if_frozen('set a policy')
        if policy.use:
            self.refuse_in_baseline('set_policy()')
        self.warn_in_baseline('set_policy()')
        self.check_policy(policy)
        self.state()
        refuse_if_locked(policy, self._below_code(), of_call=False)
        with lock:
            old, self._code = self._code, Layer(policy, 'set_policy()')
            self.push()
        self.policy_changed()
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
        self.policy_changed()

    def check_scope(self, policy: Policy) -> None:
        """`check_policy`, for a scope that is about to be entered."""
        refuse_if_locked(policy, self.state().layers, of_call=True)
        self.check_policy(policy)

    def check_policy(self, policy: Policy) -> None:
        """Raise UnknownNameError for operations, functions, backends and parameters that nobody knows."""
        if policy.op:
            self.check_operation(policy.op)
        for name, tokens in (*policy.order, *policy.lock):
            self.check_operation(name)
            self.check_tokens(tokens, name)
        self.check_tokens((*policy.use, *policy.prefer, *(policy.allow or ()), *policy.deny), policy.op)
        if policy.rules or policy.boost:
            from fla.backends.policy_files import names

            said = []
            fields = policy.to_dict()
            for at, text in names.problems(self, {name: fields.get(name) for name in ('rules', 'boost')}):
                rule = policy.rules[at[1]] if at[0] == 'rules' else None
                said.append(f'{"boost" if rule is None else rule.place or f"rules[{at[1]}]"}: {text}')
            if said:
                raise UnknownNameError('; '.join(said))

    # -- the file, and what was measured --------------------------------------------------------------------------------

    def read_policy_version(self, path: str | os.PathLike[str]) -> PolicyVersion:
        """Read a policy file, once, and check it. Changes nothing.

        Raises:
            PolicyFileError: lists every error with its line.
            OSError: if the file cannot be read.
        """
        from fla.backends.policy_files import load

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
        made, is_other = self.swap_file_policy(made)
        if is_other:
            self.policy_changed()
        return made

    def swap_file_policy(self, made: PolicyVersion) -> tuple[PolicyVersion, bool]:
        """`set_file_policy` without what follows: the version, and whether `policy_changed()` is to be called. That calls
        listeners, which is for whoever holds no lock."""
        self.refuse_if_frozen('change the file layer')
        self.warn_in_baseline('a policy file')
        self.state()
        with lock:
            if not made.version:
                self._file_versions += 1
                made = replace(made, version=self._file_versions)
                config = self._config_version
                if config is not None and os.path.abspath(config.source) == os.path.abspath(made.source):
                    self._config_version = made  # so that refresh() does not take it for news after a rollback()
            before, self._file = self._file, made
            self._config_error = None  # there is a file that can be used
            self.push()
        return made, before is None or before.policy != made.policy

    def policy_changed(self) -> None:
        """What has failed under another policy says nothing under this one."""
        self.breakers.clear('the policy changed')

    def unload_policy(self) -> None:
        """Take the file layer away. `refresh()` reads the file that the environment names again."""
        self.refuse_if_frozen('unload the policy file')
        self.state()
        with lock:
            self._file = self._config_version = self._config_error = None
            self.push()
        self.policy_changed()

    def try_policy(self, policy: Policy, source: str) -> None:
        """Plan the functions in use as if `policy` were the file layer. Changes nothing.

        Raises:
            DispatchError: for a function that no backend would be left for.
        """
        from fla.backends.policy_files.trial import require_backends

        require_backends(self, self.state_with_file(policy, source), source)

    def policy_version(self) -> PolicyVersion | None:
        """The version of the file layer in force, None if there is none."""
        self.state()
        return self._file

    def set_measured(self, policy: Policy | None, source: str = '') -> None:
        """Set or take away the lowest layer, which is what was measured (see `measure`)."""
        self.refuse_if_frozen('change what was measured')
        if policy is not None:
            self.warn_in_baseline('what was measured')
        self.state()
        with lock:
            self._measured = Layer(policy, source) if policy is not None else None
            self.push()

    def measured_rules(self) -> tuple[Rule, ...]:
        """What was measured, as rules for one function each."""
        return self._measured.policy.rules if self._measured is not None else ()

    # -- names in the environment ---------------------------------------------------------------------------------------

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
        """Warn of names in the environment that nobody knows. Run after the first plan, when plugins are loaded.

        Raises:
            DispatchError: if strict, for these and for a policy file that cannot be used.
        """
        if self._config_error is not None and self.is_strict():
            raise DispatchError(self._config_error)
        for source, problem in self._unknown_in_environment():
            text = f'{source}: {problem}'
            if self.is_strict():
                raise UnknownNameError(text)
            logs.warn_once(('environment', text), '%s', text)
        draft = self._config_draft
        if draft is not None:
            name = self.environment.name('DISPATCH_CONFIG')
            unknown_there = draft.at(draft.unknown(self))
            if unknown_there and self.is_strict():
                raise UnknownNameError(f'{name}: ' + '\n'.join(unknown_there))
            for problem in unknown_there:
                logs.warn_once(('environment', name, problem), '%s: %s', name, problem)
        toggles = {name for backend in self.backends() for name in self.toggles.variables(backend)}
        self.environment.warn_unknown(toggles, self.discovery.variables_in_sources)

    def _unknown_in_environment(self) -> Iterator[tuple[str, str]]:
        """Names in the variables that nobody knows: (variable, what to say)."""
        for layer in self._env_layers or ():
            for name, tokens in layer.policy.order:
                try:
                    self.check_operation(name)
                    unknown = self.unknown_tokens(tokens, name)
                except Exception as error:
                    # an operation that cannot be imported is not the business of the call that is being planned
                    yield layer.source, str(error)
                    continue
                words = self._words(self.operation_of(name))
                yield from ((layer.source, f'unknown backend {t!r} for {name!r}.{nearest(t, words)}') for t in unknown)
            if not layer.policy.order:
                for token in self.unknown_tokens(layer.policy.tokens(), None):
                    yield layer.source, f'unknown backend {token!r}.{nearest(token, self._words(None))}'

    def environment_problems(self) -> list[str]:
        """Names that nobody knows in the variables, and all that is wrong with the file that one names. Changes nothing."""
        self.state()
        return [f'{source}: {problem}' for source, problem in self._unknown_in_environment()] + self._config_problems()
