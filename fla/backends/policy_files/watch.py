"""Follows a policy file that changes while the process runs.

A change takes this way from the disk to calls:
    1. the operating system reports it, or a look at the content every second finds it;
    2. the content has not changed for `debounce` seconds, so the last of several writes counts;
    3. the file is read once and parsed, its names are checked, the validators are called, and the functions in use are
       planned under it;
    4. the file layer is swapped at once: calls in flight finish on the code they began with;
    5. callbacks run, outside every lock.
An error before step 4 leaves the policy as it was.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, FrozenError, error_text
from fla.backends.core.locking import lock
from fla.backends.policy.policy import Policy
from fla.backends.policy.version import PolicyVersion
from fla.backends.policy_files.extra import require_extra
from fla.backends.policy_files.file_changes import is_content, polled, reported, stamp_of, state_of
from fla.backends.policy_files.load import read_version
from fla.backends.policy_files.trial import require_backends
from fla.backends.policy_files.versions import checked_path
from fla.backends.registry.discovery import in_forked_children
from fla.backends.runtime.dispatcher import Dispatcher, owner_of

_POLL_SECONDS = 1.0
# A file that never rests is read all the same after this many debounces.
_MAX_DEBOUNCES = 20

Validator = Callable[['Policy'], object]
Callback = Callable[['PolicyEvent'], object]


class WatchError(DispatchError):
    """A watcher that was stopped, belongs to another process, or has no version to go back to."""


@dataclass(frozen=True)
class PolicyEvent:
    """The outcome of a change.

    Attributes:
        kind: 'reload', 'rollback' or 'error'.
        path: the watched file.
        version: the version in force afterwards, None if there is none.
        previous: the version in force before.
        error: why nothing changed, for 'error'.
    """

    kind: str
    path: str
    version: PolicyVersion | None
    previous: PolicyVersion | None
    error: Exception | None = None


def watch_policy(
    path: str | os.PathLike[str],
    *,
    debounce: float = 0.25,
    poll: bool | float = False,
    validators: Iterable[Validator] | Validator | None = (),
    on_reload: Iterable[Callback] | Callback | None = (),
    on_error: Iterable[Callback] | Callback | None = (),
    history: int = 16,
    dispatcher: Dispatcher | None = None,
) -> PolicyWatcher:
    """Puts a policy file in force, and again after each change, until `stop()`.

    Args:
        path: the file. It must exist and be valid at the start; later a bad or missing file changes nothing.
        debounce: seconds without a further change before the file is read.
        poll: read the file every second (True), or every `poll` seconds, instead of asking the operating system: for network
            file systems, which do not report what other hosts write.
        validators: called with each new `Policy` before it is in force; one that raises, or returns anything but None or
            True, refuses it.
        on_reload: called with a `PolicyEvent` after each change in force, also by `rollback()`, and when a bad file is good
            again.
        on_error: called with a `PolicyEvent` for each refused change, once for each state of the file.
        history: how many versions `rollback()` can choose among, the one in force included.
        dispatcher: the namespace; default: fla's own.

    Returns:
        The watcher, also a context manager. Its policy stays in force after it stops; `unload_policy()` ends that.

    Raises:
        PolicyFileError: if the file is not valid.
        OSError: if it cannot be read.
        FrozenError: while dispatch is frozen.
        WatchError: if a file is already watched for this namespace, which has one file layer.
    """
    owner = owner_of(dispatcher)
    owner.policies.refuse_if_frozen('watch a policy file')
    return PolicyWatcher(path, debounce, poll, validators, on_reload, on_error, history, owner)


class PolicyWatcher:
    """Made by `watch_policy`. `current_version()`, `history()`, `reload()`, `rollback()`, `stop()`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        debounce: float,
        poll: bool | float,
        validators: Iterable[Validator] | Validator | None,
        on_reload: Iterable[Callback] | Callback | None,
        on_error: Iterable[Callback] | Callback | None,
        history: int,
        dispatcher: Dispatcher,
    ) -> None:
        self.path = os.path.join(os.getcwd(), checked_path(path))
        self._debounce = _seconds('debounce', debounce)
        self._poll = None if poll is False else _POLL_SECONDS if poll is True else _seconds('poll', poll, least=1e-3)
        self._validators = _callables('validators', validators)
        self._on_reload = _callables('on_reload', on_reload)
        self._on_error = _callables('on_error', on_error)
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ValueError(f'history must be a number of versions, at least 1, got {history!r}')
        self._max_history = history
        self._dispatcher = dispatcher
        self._history: tuple[PolicyVersion, ...] = ()
        # held during one change, validators included; callbacks run without it
        self._turn = threading.RLock()
        # the file's state when it was last looked at, and its content when it could last be read
        self._seen = self._content = ''
        # the content that rollback() took back: the file may be away for a moment without bringing it into force again
        self._taken_back = ''
        # the state, type and text of the last refusal
        self._refused: tuple[str, type[Exception], str] | None = None
        self._stopping = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f'fla policy watcher {self.path}', daemon=True)
        if self._poll is None:
            require_extra('watch_policy() without poll=True', 'watchfiles')
        with lock:
            known = _watchers.get(dispatcher)
            if known is not None and known.running:
                raise WatchError(
                    f'{known.path} is already watched for {dispatcher.namespace}, and there is one file layer: '
                    'stop() that watcher first, or load_policy() this file once'
                )
            _watchers[dispatcher] = self
        try:
            if self._put_in_force()[1]:
                dispatcher.policies.policy_changed()
            self._thread.start()
        except BaseException:
            self._unregister()
            raise

    def __repr__(self) -> str:
        return f'<PolicyWatcher of {self.path}: {self._why_not_running() or "running"}>'

    def __enter__(self) -> PolicyWatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether changes are seen: False after `stop()`, and in a forked child, which has no watcher thread."""
        return self._why_not_running() is None

    def current_version(self) -> PolicyVersion | None:
        """Returns the version of the file layer in force, also if another call put it there; None if there is none."""
        return self._dispatcher.policies.now.file

    def history(self) -> tuple[PolicyVersion, ...]:
        """Returns the versions that this watcher has put in force and not taken back, oldest first."""
        return self._history

    def _why_not_running(self) -> str | None:
        if self._pid != os.getpid():
            return (
                f'there is no watcher thread in this process ({os.getpid()}), which was forked from {self._pid}; '
                'call watch_policy() here'
            )
        if self._stopping.is_set():
            return 'it was stopped'
        return None if self._thread.is_alive() or self._thread.ident is None else 'its thread has ended'

    def _check_running(self, action: str) -> None:
        why = self._why_not_running()
        if why is not None:
            raise WatchError(f'cannot {action} {self.path}: {why}')

    def reload(self) -> PolicyVersion:
        """Reads the file now, whether it has changed or not, and puts it in force. Callbacks run in this thread.

        Raises:
            Exception: the error that refused the file, after `on_error`; the policy is then as it was.
            WatchError: after `stop()`, and in a forked child.
        """
        self._check_running('reload')
        made = self._take(state_of(self.path))
        if isinstance(made, Exception):
            raise made
        return made

    def rollback(self, to: int | None = None) -> PolicyVersion:
        """Puts an earlier version in force again.

        Later versions leave `history()`, so that a second `rollback()` goes further back. The file is not touched and still
        holds what was taken back: it is read again when its content changes, or on `reload()`.

        Args:
            to: the number of a version in `history()`. Default: the one before.

        Raises:
            WatchError: if there is no such version; after `stop()`, and in a forked child.
            FrozenError: while dispatch is frozen.
        """
        self._check_running('roll back')
        if to is not None and (isinstance(to, bool) or not isinstance(to, int)):
            raise TypeError(f'to is the number of a version, got {to!r}')
        with self._turn:
            previous = self.current_version()
            past = self._history
            if previous == past[-1]:  # else a later load_policy() is in force, and this takes that back
                past = past[:-1]
            if to is not None:
                past = tuple(version for version in past if version.version <= to)
            if not past or to not in (None, past[-1].version):
                known = ', '.join(str(version.version) for version in self._history[:-1]) or 'none'
                wanted = 'the version before' if to is None else f'version {to!r}'
                raise WatchError(f'cannot roll back {self.path} to {wanted}: the earlier versions kept are {known}')
            _, has_changed = self._dispatcher.policies.swap_file(past[-1])
            self._taken_back, self._history = self._content, past
        if has_changed:
            self._dispatcher.policies.policy_changed()
        logs.logger.info('policy %s: back to version %d (%s)', self.path, past[-1].version, past[-1].sha256[:12])
        self._notify(PolicyEvent('rollback', self.path, past[-1], previous))
        return past[-1]

    def stop(self, timeout: float | None = None) -> None:
        """Stops watching and waits for the thread; the policy stays in force. Called again, or in a forked child, it does
        nothing; called by a callback, it does not wait.

        Raises:
            WatchError: if the thread has not ended after `timeout` seconds: a callback or validator does not return.
        """
        self._stopping.set()
        if self._pid == os.getpid() and threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise WatchError(
                    f'the watcher of {self.path} has not ended after {timeout} s: a callback or validator does not return'
                )
        self._unregister()

    def _unregister(self) -> None:
        with lock:
            if _watchers.get(self._dispatcher) is self:
                del _watchers[self._dispatcher]

    # -- one change ---------------------------------------------------------------------------------------------------

    def _put_in_force(self) -> tuple[PolicyVersion, bool]:
        """Reads and checks the file, and swaps it in; returns its version and whether the policy is another one now."""
        self._dispatcher.policies.refuse_if_frozen(f'reload {self.path}')
        made = read_version(self.path, self._dispatcher)
        for validator in self._validators:
            try:
                answer = validator(made.policy)
            except SystemExit as error:  # would end the watcher's thread silently
                raise ValueError(
                    f'validator {_name_of(validator)} refuses {self.path}: it exits with {error.code!r}'
                ) from error
            if answer is not None and answer is not True:
                raise ValueError(f'validator {_name_of(validator)} refuses {self.path}: {answer!r}')
        require_backends(self._dispatcher, self._dispatcher.policies.state_with_file(made.policy, self.path), self.path)
        now, has_changed = self.current_version(), False
        if now is not None and self._history[-1:] == (now,) and now.sha256 == made.sha256:
            made = now  # a second reading of the same content makes no version
        else:
            made, has_changed = self._dispatcher.policies.swap_file(made)
            self._history = (*self._history, made)[-self._max_history :]
        self._seen = self._content = made.sha256
        self._taken_back, self._refused = '', None
        logs.logger.info('policy %s: version %d (%s) in force', self.path, made.version, made.sha256[:12])
        return made, has_changed

    def _take(self, state: str) -> PolicyVersion | Exception:
        """Puts the file in force and notifies the callbacks; returns its version, or the error that refused it."""
        with self._turn:
            previous = self.current_version()
            self._seen = state
            try:
                made, has_changed = self._put_in_force()
            except Exception as error:
                known, self._refused = self._refused, (state, type(error), error_text(error))
                event, has_changed = PolicyEvent('error', self.path, previous, previous, error), False
                is_news = self._refused != known
            else:
                event, is_news = PolicyEvent('reload', self.path, made, previous), True
        if has_changed:
            self._dispatcher.policies.policy_changed()
        if event.error is not None and is_news:
            logs.logger.error('policy %s: not reloaded, nothing is changed. %s', self.path, error_text(event.error))
        if is_news:
            self._notify(event)
        return event.error or made

    def _notify(self, event: PolicyEvent) -> None:
        for callback in self._on_error if event.kind == 'error' else self._on_reload:
            try:
                callback(event)
            except (Exception, SystemExit):
                logs.logger.exception('policy %s: callback %s raised', self.path, _name_of(callback))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            wakeups = reported(self.path, self._stopping) if self._poll is None else polled(self._poll, self._stopping)
            try:
                for _ in wakeups:
                    self._look()
            except Exception as error:  # no inotify instances left, for example
                logs.logger.warning(
                    'policy %s: the operating system does not report changes (%s); the file is read every %g s instead',
                    self.path,
                    error_text(error),
                    _POLL_SECONDS,
                )
                self._poll = _POLL_SECONDS

    def _look(self) -> None:
        try:
            self._take_if_new()
        except BaseException:  # the thread must live to see the next change
            logs.logger.exception('policy %s: the watcher goes on after an error of its own', self.path)

    def _take_if_new(self) -> None:
        """Takes the file if its content is new and has settled."""
        state = self._settled_state()
        if state is None or (state == self._seen and not self._is_thawed()):
            return
        with self._turn:
            now = self.current_version()
            in_force = now.sha256 if now is not None and self._history[-1:] == (now,) else ''
            if is_content(state) and state != self._content:
                self._content, self._taken_back = state, ''
            is_known = state in (in_force, self._taken_back)
            was_refused = self._refused is not None
            if is_known:
                self._seen, self._refused = state, None
        if not is_known:
            self._take(state)
        elif was_refused and state == in_force:
            self._notify(PolicyEvent('reload', self.path, now, now))

    def _settled_state(self) -> str | None:
        """Returns the file's state when it has not been written for `debounce` seconds; None if watching ends."""
        for _ in range(_MAX_DEBOUNCES):
            before = stamp_of(self.path)
            if self._stopping.wait(self._debounce):
                return None
            if stamp_of(self.path) == before:
                break
        return state_of(self.path)

    def _is_thawed(self) -> bool:
        """Returns whether the file was refused while dispatch was frozen, and dispatch is no longer frozen."""
        return self._refused is not None and self._refused[1] is FrozenError and self._dispatcher.policies.frozen is None


def _seconds(name: str, value: float, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= sys.float_info.max:
        raise ValueError(f'{name} must be a number of seconds, at least {least:g}, got {value!r}')
    return float(value)


def _callables(name: str, value: Iterable[Any] | Callable[..., Any] | None) -> tuple[Any, ...]:
    if value is None:
        return ()
    found = (value,) if callable(value) or not isinstance(value, Iterable) else tuple(value)
    for one in found:
        if not callable(one):
            raise TypeError(f'{name} takes a callable or several, got {one!r}')
    return found


def _name_of(function: object) -> str:
    return str(getattr(function, '__qualname__', None) or repr(function))


_watchers: weakref.WeakKeyDictionary[Dispatcher, PolicyWatcher] = weakref.WeakKeyDictionary()


def stop_watching(dispatcher: Dispatcher) -> None:
    """Stops the watcher of a namespace, if there is one."""
    watcher = _watchers.get(dispatcher)
    if watcher is not None:
        watcher.stop()


def _in_child() -> None:
    for watcher in list(_watchers.values()):
        watcher._turn, watcher._stopping = threading.RLock(), threading.Event()


def _at_exit() -> None:
    """A thread inside watchfiles must not outlive the interpreter."""
    for watcher in list(_watchers.values()):
        watcher._stopping.set()
        if watcher._thread.is_alive():
            watcher._thread.join(1.0)


in_forked_children(_in_child)
atexit.register(_at_exit)


Dispatcher.before_reset.append(stop_watching)
