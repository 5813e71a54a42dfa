"""The layers of policy of a namespace. Highest first: scopes, code, environment, file, measured.

A new layer is a field of `Situation`, its place in `Situation._compose`, and a method here that changes it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, FrozenError, UnknownNameError
from fla.backends.policy.environment import Environment
from fla.backends.policy.policy import Policy, Rule
from fla.backends.policy.precedence import Layer, State, refuse_if_locked
from fla.backends.policy.toggles import Toggles
from fla.backends.policy.version import PolicyVersion
from fla.backends.registry.catalogue import Catalogue
from fla.backends.runtime.recorders import Recorder
from fla.backends.runtime.situation import Control, EnteredScope, Frozen, Situation, file_layer
from fla.utils.env import nearest

Errors = set[tuple[int, str]]


class Draft(Protocol):
    """A policy file that was read but is not in force."""

    def version(self, unknown: Errors | None = None) -> PolicyVersion:
        """The policy to put in force. Raises DispatchError, with `errors`, if the file is wrong."""

    def unknown(self, catalogue: Catalogue[Any]) -> Errors:
        """(line, problem) of each unknown name."""

    def at(self, errors: Errors) -> list[str]:
        """Errors as 'path:line: problem'."""


class PolicyReader(Protocol):
    """Reads policy files and looks up the names in a policy. Imported on first use: it needs pydantic and YAML."""

    def read(self, path: str | os.PathLike[str]) -> Draft:
        """Raises OSError, ImportError."""

    def unknown_names(self, catalogue: Catalogue[Any], fields: Mapping[str, Any]) -> Iterable[tuple[tuple[Any, ...], str]]:
        """(place, problem) of each unknown name in the fields of a policy."""


class PolicyStack:
    """The layers of policy, and the situation that they produce.

    Args:
        control: owns the situation.
        environment: the namespace's variables.
        toggles: the backends' variables.
        catalogue: looks up names.
        reader: returns the reader of policy files.
        recorder: makes the recorder that the environment requests.
        changed: called outside the lock, with the reason, after a policy changed.
    """

    def __init__(
        self,
        control: Control,
        environment: Environment,
        toggles: Toggles,
        catalogue: Catalogue[Any],
        *,
        reader: Callable[[], PolicyReader],
        recorder: Callable[[], Recorder],
        changed: Callable[[str], None],
    ) -> None:
        self.control, self.environment, self.toggles, self.catalogue = control, environment, toggles, catalogue
        self._reader, self._make_recorder, self._changed = reader, recorder, changed
        self._environment_recorder: Recorder | None = None
        self._draft: Draft | None = None
        self._names_checked = False

    def forget(self) -> None:
        """Forget what the environment requested; called by `reset()`."""
        if self._environment_recorder is not None:
            self._environment_recorder.clear()  # else FLA_DISPATCH_TRACE=1 prints these calls at exit
        self._environment_recorder = self._draft = None

    # -- in force ---------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> Situation:
        """The situation in force. The first access reads the environment."""
        if self.control.now.environment is None:
            self._read_environment()
        return self.control.now

    @property
    def state(self) -> State:
        """The state that plans are made for."""
        return self.now.state

    @property
    def frozen(self) -> Frozen | None:
        """Set while dispatch is frozen."""
        return self.control.now.frozen

    def is_strict(self, operation: str | None = None) -> bool:
        """Whether bugs raise in an operation; None: in code of no operation."""
        for layer in self.state.layers:
            about = layer.policy.op
            concerned = about is None or (operation is not None and f'{about}.'.startswith(f'{operation}.'))
            if layer.policy.strict is not None and concerned:
                return layer.policy.strict
        return False

    def kind_of(self, layer: Layer) -> str:
        """The name of a layer, without its place in a source file."""
        now = self.control.now
        if layer is now.measured:
            return 'measured'
        if layer.source == now.file_source:
            return 'policy file'
        return re.sub(r' at .+:\d+$', '', layer.source, flags=re.DOTALL)

    def refuse_in_baseline(self, what: str) -> None:
        """Raises DispatchError in a baseline process, for a call that promises that a backend runs."""
        if self.catalogue.baseline:
            raise DispatchError(f'{what}: {self._baseline_text()}; unset it')

    def warn_in_baseline(self, what: str) -> None:
        """Warns once in a baseline process about a call that has no effect there."""
        if self.catalogue.baseline:
            logs.warn_once(('baseline', what), '%s has no effect: %s', what, self._baseline_text())

    def _baseline_text(self) -> str:
        return f'{self.environment.name("DISABLE_BACKEND_DISPATCH")} was set at import, so that nothing is dispatched'

    def refuse_if_frozen(self, what: str) -> None:
        """Raises FrozenError while dispatch is frozen, except in a lazy load."""
        if self.frozen is not None and not self.catalogue.discovery.is_loading():
            raise FrozenError(f'cannot {what} while dispatch is frozen; call thaw_dispatch() first')

    # -- scopes -----------------------------------------------------------------------------------------------------------

    def push_scope(self, token: int, layer: Layer, pinned: State | None = None, *, verb: str | None = None) -> None:
        """Enter a scope.

        Args:
            pinned: a state that replaces all layers.
            verb: the public function that was called, for a warning if another thread holds a scope. None: no warning, and
                the scope belongs to no thread.
        """
        thread = threading.get_ident() if verb is not None else None
        if verb is not None and any(scope.thread not in (None, thread) for scope in self.now.scopes):
            logs.warn_once(
                ('scope threads',),
                '%s is entered while another thread holds a scope. Scopes are process-wide: use bind() for policies that '
                'differ between threads.',
                verb,
            )
        entered = EnteredScope(token, layer, pinned, thread)
        self.control.change(lambda now: replace(now, scopes=(*now.scopes, entered)))

    def pop_scope(self, token: int) -> None:
        """Leave a scope; later scopes stay."""
        self.control.change(lambda now: replace(now, scopes=tuple(s for s in now.scopes if s.token != token)))

    # -- code -------------------------------------------------------------------------------------------------------------

    def set_policy(self, policy: Policy) -> Policy | None:
        """Set the policy of the code layer for the whole process; returns the one that it replaces.

        Raises:
            UnknownNameError: for an unknown operation or backend.
            DispatchError: for an order that contradicts a lock of the policy file.
            FrozenError: while dispatch is frozen.
        """
        if not isinstance(policy, Policy):
            raise TypeError(f'set_policy() takes a Policy, got {policy!r}')
        self.refuse_if_frozen('set a policy')
        if policy.use:
            self.refuse_in_baseline('set_policy()')
        self.warn_in_baseline('set_policy()')
        self.check_policy(policy)
        refuse_if_locked(policy, self.now.below_code, of_call=False)
        old = self.get_policy()
        self._set_code(Layer(policy, 'set_policy()'))
        return old

    def get_policy(self) -> Policy | None:
        """The policy of the code layer."""
        code = self.control.now.code
        return code.policy if code else None

    def reset_policy(self) -> None:
        """Remove the policy of the code layer."""
        self.refuse_if_frozen('reset the policy')
        self._set_code(None)

    def _set_code(self, code: Layer | None) -> None:
        self.control.change(lambda now: replace(now, code=code))
        self.policy_changed()

    def policy_changed(self) -> None:
        """Clear failures, which were counted under another policy. Never called under the lock."""
        self._changed('the policy changed')

    def check_scope(self, policy: Policy) -> None:
        """`check_policy`, for a scope that is about to be entered."""
        refuse_if_locked(policy, self.state.layers, of_call=True)
        self.check_policy(policy)

    def check_policy(self, policy: Policy) -> None:
        """Raises UnknownNameError for unknown operations, functions, backends and parameters."""
        catalogue = self.catalogue
        if policy.op:
            catalogue.check_operation(policy.op)
        for name, tokens in (*policy.order, *policy.lock):
            catalogue.check_operation(name)
            catalogue.check_tokens(tokens, name)
        catalogue.check_tokens((*policy.use, *policy.prefer, *(policy.allow or ()), *policy.deny), policy.op)
        if policy.rules or policy.boost:
            problems = []
            fields = policy.to_dict()
            named = {name: fields.get(name) for name in ('rules', 'boost')}
            for at, text in self._reader().unknown_names(catalogue, named):
                rule = policy.rules[at[1]] if at[0] == 'rules' else None
                problems.append(f'{"boost" if rule is None else rule.place or f"rules[{at[1]}]"}: {text}')
            if problems:
                raise UnknownNameError('; '.join(problems))

    # -- the file, and measured choices -----------------------------------------------------------------------------------

    def set_file(self, made: PolicyVersion) -> PolicyVersion:
        """Put a policy in force as the file layer, in place of the former one.

        Returns:
            The version, with a new number unless it was in force before.

        Raises:
            FrozenError: while dispatch is frozen.
        """
        made, differs = self.swap_file(made)
        if differs:
            self.policy_changed()
        return made

    def swap_file(self, made: PolicyVersion) -> tuple[PolicyVersion, bool]:
        """`set_file` without its notification: the version, and whether the caller must call `policy_changed()`, which a
        caller that holds a lock does later."""
        self.refuse_if_frozen('change the file layer')
        self.warn_in_baseline('a policy file')
        former = self.now.file

        def put(now: Situation) -> Situation:
            config, number, version = now.config, now.file_versions, made
            if not made.version:
                number += 1
                version = replace(made, version=number)
                if config is not None and os.path.abspath(config.source) == os.path.abspath(made.source):
                    config = version  # so that refresh() does not put it in force again after a rollback()
            return replace(now, file=version, file_versions=number, config=config, config_error=None)

        in_force = self.control.change(put).file
        assert in_force is not None
        return in_force, former is None or former.policy != made.policy

    def unload_file(self) -> None:
        """Remove the file layer. `refresh()` reads the file that the environment names again."""
        self.refuse_if_frozen('unload the policy file')
        self.control.change(lambda now: replace(now, file=None, config=None, config_error=None))
        self.policy_changed()

    def state_with_file(self, policy: Policy | None, name: str = '') -> State:
        """The state in force with another policy in place of the file's; None for no file."""
        now = self.now
        old = now.file
        layers = [x for x in now.state.layers if old is None or x.policy is not old.policy or x.source != now.file_source]
        made = () if policy is None else (file_layer(policy, name),)
        above = (layer for layer in layers if layer is not now.measured)
        below = (layer for layer in layers if layer is now.measured)
        return replace(now.state, layers=(*above, *made, *below))

    def set_measured(self, policy: Policy | None, source: str = '') -> None:
        """Set or remove the lowest layer: measured choices (see `measure`)."""
        self.refuse_if_frozen('change what was measured')
        if policy is not None:
            self.warn_in_baseline('what was measured')
        layer = Layer(policy, source) if policy is not None else None
        self.control.change(lambda now: replace(now, measured=layer))

    def measured_rules(self) -> tuple[Rule, ...]:
        """The measured choices, as rules for one function each."""
        measured = self.control.now.measured
        return measured.policy.rules if measured is not None else ()

    def state_without_measured(self) -> State:
        """The state in force without the measured layer."""
        now = self.now
        return replace(now.state, layers=tuple(layer for layer in now.state.layers if layer is not now.measured))

    # -- the environment --------------------------------------------------------------------------------------------------

    def _read_environment(self) -> None:
        layers = self.environment.layers()
        path = self._config_path()
        file, error = self._read_config(path) if path else (None, None)
        running, wanted = self._environment_recorder, self.environment.tracing
        if wanted and running not in self.control.now.recorders:
            self._environment_recorder = self._make_recorder()

        def read(now: Situation) -> Situation:
            if now.environment is not None:  # another thread was faster
                return now
            recorders = tuple(r for r in now.recorders if r is not running or wanted)
            own = self._environment_recorder
            if wanted and own is not None and own not in recorders:
                recorders = (*recorders, own)
            made = replace(now, environment=layers, config_error=error, recorders=recorders)
            known = now.config
            if file is not None and (known is None or (known.sha256, known.source) != (file.sha256, file.source)):
                version = replace(file, version=now.file_versions + 1)
                return replace(made, file=version, config=version, file_versions=version.version)
            if file is None and not path and known is not None:  # the variable that named it is unset now
                return replace(made, file=None if now.file is known else now.file, config=None)
            return made

        self._names_checked = False
        self.control.change(read)

    def forget_environment(self) -> None:
        """Read the variables again when they are next needed."""
        self.control.change(lambda now: replace(now, environment=None))

    def _config_path(self) -> str:
        return (self.environment.text('DISPATCH_CONFIG') or '').strip()

    def _read_config(self, path: str) -> tuple[PolicyVersion | None, str | None]:
        """The file that the environment names, or why it cannot be used. Such an error is logged; under strict every call
        raises it. Names in the file are checked with those in the variables, when plugins are loaded."""
        self._draft = None
        try:
            self._draft = self._reader().read(path)
            return self._draft.version(), None
        except (DispatchError, OSError, ImportError) as error:
            known = self.control.now.file
            instead = 'left out' if known is None else f'left out, and the former version of {known.source} stays in force'
            text = f'{self.environment.name("DISPATCH_CONFIG")}={path!r} is {instead}: {error}'
            if not self.environment.boolean('STRICT'):  # else the next call raises it
                logs.once(('policy file', text), logging.ERROR, '%s', text)
            return None, text

    def check_environment_once(self) -> None:
        """`check_environment`, the first time since the environment was read."""
        if not self._names_checked and not self.catalogue.discovery.is_loading():
            self._names_checked = True
            try:
                self.check_environment()
            except BaseException:
                self._names_checked = False  # under strict the next call raises, too
                raise

    def check_environment(self) -> None:
        """Warn about unknown names in the environment. Runs after the first plan, when plugins are loaded.

        Raises:
            DispatchError: under strict, for these and for a policy file that cannot be used.
        """
        error = self.control.now.config_error
        if error is not None and self.is_strict():
            raise DispatchError(error)
        self._warn_unknown(list(self._unknown_in_variables()))
        if self._draft is not None:
            name = self.environment.name('DISPATCH_CONFIG')
            self._warn_unknown([f'{name}: {text}' for text in self._draft.at(self._draft.unknown(self.catalogue))])
        self.environment.warn_unknown(self._toggle_names, self.catalogue.discovery.load_all)

    def _warn_unknown(self, problems: list[str]) -> None:
        if problems and self.is_strict():
            raise UnknownNameError('\n'.join(problems))
        for problem in problems:
            logs.warn_once(('environment', problem), '%s', problem)

    def _toggle_names(self) -> set[str]:
        return {name for backend in self.catalogue.backends() for name in self.toggles.variables(backend)}

    def _unknown_in_variables(self) -> Iterator[str]:
        """'variable: problem' of each unknown name."""
        catalogue = self.catalogue
        for layer in self.control.now.environment or ():
            for name, tokens in layer.policy.order:
                try:
                    catalogue.check_operation(name)
                    unknown = catalogue.unknown_tokens(tokens, name)
                except Exception as error:
                    # an operation that cannot be imported must not fail the call that is being planned
                    yield f'{layer.source}: {error}'
                    continue
                words = catalogue.words(name)
                yield from (f'{layer.source}: unknown backend {t!r} for {name!r}.{nearest(t, words)}' for t in unknown)
            if not layer.policy.order:
                for token in catalogue.unknown_tokens(layer.policy.tokens(), None):
                    yield f'{layer.source}: unknown backend {token!r}.{nearest(token, catalogue.words(None))}'

    def environment_problems(self) -> list[str]:
        """Unknown names in the variables, and all errors of the file that one names. Changes nothing."""
        self.now  # noqa: B018 - reads the environment
        found = list(self._unknown_in_variables())
        path = self._config_path()
        try:
            if path:
                draft = self._reader().read(path)
                draft.version(draft.unknown(self.catalogue))
        except DispatchError as error:
            found += getattr(error, 'errors', (str(error),))
        except (OSError, ImportError) as error:
            found.append(f'{self.environment.name("DISPATCH_CONFIG")}={path!r}: {error}')
        return found
