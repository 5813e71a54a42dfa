"""A policy file that may change while the process runs.

One change of the file, from disk to calls:
    1. its directories are watched, so that a save by `os.replace` and a swapped link (`..data` of a mounted ConfigMap) are
       seen as well as a write in place;
    2. the file has been quiet for `debounce` seconds: of several writes the last one counts;
    3. read once, parsed, names checked, the user's validators asked, plans of the functions in use made;
    4. one swap of the file layer: calls in flight finish on the code they began with;
    5. callbacks, outside every lock.
Whatever goes wrong before 4 leaves the policy as it was.
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
from typing import TYPE_CHECKING, Any

from fla.backends.core import logs
from fla.backends.core.errors import DispatchError, FrozenError, error_text
from fla.backends.core.locking import lock
from fla.backends.policy.policy import Policy
from fla.backends.policy_files.file_changes import (
    STEP_MILLISECONDS,
    Watched,
    import_watchfiles,
    is_content,
    polled,
    reported,
    state_of,
)
from fla.backends.policy_files.load import read_version
from fla.backends.policy_files.trial import require_backends
from fla.backends.policy_files.versions import checked_path
from fla.backends.registry.discovery import in_forked_children
from fla.backends.runtime.dispatcher import Dispatcher, owner_of

if TYPE_CHECKING:
    from fla.backends.policy.version import PolicyVersion

_POLL_SECONDS = 1.0

Validator = Callable[['Policy'], object]
Callback = Callable[['PolicyEvent'], object]


class WatchError(DispatchError):
    """A watcher that was stopped, belongs to another process, or has nothing to go back to."""


@dataclass(frozen=True)
class PolicyEvent:
    """What became of a change.

    Attributes:
        kind: 'reload', 'rollback' or 'error'.
        path: the watched file.
        version: the version in force afterwards, None if there is none.
        previous: the one in force before.
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
    """Put a policy file in force, and again after each change, until `stop()`.

    Args:
        path: the file. It must be there and right at the start; later a bad or missing one changes nothing.
        debounce: seconds without a further write before a change is read.
        poll: read the file every second, or every so many seconds, in place of asking the operating system: for network file
            systems, which do not report what other hosts write.
        validators: called with each new `Policy` before it is in force; one that raises, or returns anything but None or
            True, refuses it.
        on_reload: called with a `PolicyEvent` after each change in force, also by `rollback()`, and when a file that was
            bad is good again.
        on_error: called with a `PolicyEvent` for each change that was refused, once for each state of the file.
        history: how many versions `rollback()` can choose among, the one in force included.
        dispatcher: the namespace; default: fla's own.

    Returns:
        The watcher, which is also a context manager. Its policy stays in force after it; `unload_policy()` ends that.

    Raises:
        PolicyFileError: if the file is not right.
        OSError: if it cannot be read.
        FrozenError: while dispatch is frozen.
        WatchError: if a file is watched for this namespace already: there is one file layer.
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
        self._most = history
        self._dispatcher = dispatcher
        self._history: tuple[PolicyVersion, ...] = ()
        self._turn = threading.RLock()
        self._tickets = self._done = 0
        # what the file held when it was last looked at, by hash or by what was wrong
        self._seen = ''
        self._in_error: tuple[str, str] | None = None
        # what the file held when rollback() took it back: it does not come again because it could not be read for a moment
        self._taken_back = ''
        # what the file said when it could last be read
        self._content = ''
        self._waits_for_thaw = False
        self._stopping = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f'fla policy watcher {self.path}', daemon=True)
        if self._poll is None:
            import_watchfiles()
        with lock:
            known = _watchers.get(dispatcher)
            if known is not None and known.running:
                raise WatchError(
                    f'{known.path} is already watched for {dispatcher.namespace}, and there is one file layer: '
                    'stop() that watcher first, or load_policy() this file once'
                )
            _watchers[dispatcher] = self
        try:
            self._take()
            self._thread.start()
        except BaseException:
            self._forget()
            raise

    def __repr__(self) -> str:
        return f'<PolicyWatcher of {self.path}: {self._why_not() or "running"}>'

    def __enter__(self) -> PolicyWatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether changes are seen: not after `stop()`, and not in a forked child, which has no such thread."""
        return self._why_not() is None

    def current_version(self) -> PolicyVersion | None:
        """The version of the file layer in force, whoever put it there; None if there is none."""
        return self._dispatcher.policies.now.file

    def history(self) -> tuple[PolicyVersion, ...]:
        """The versions that this watcher has put in force and not taken back, oldest first."""
        return self._history

    def _why_not(self) -> str | None:
        if self._pid != os.getpid():
            return (
                f'there is no watcher thread in this process ({os.getpid()}), which was forked from {self._pid}; '
                'call watch_policy() here'
            )
        if self._stopping.is_set():
            return 'it was stopped'
        return None if self._thread.is_alive() or self._thread.ident is None else 'its thread has ended'

    def _check_running(self, what: str) -> None:
        why = self._why_not()
        if why is not None:
            raise WatchError(f'cannot {what} {self.path}: {why}')

    # -- acting -------------------------------------------------------------------------------------------------------

    def reload(self) -> PolicyVersion:
        """Read the file now, whether it has changed or not, and put it in force. Callbacks run in this thread.

        Raises:
            Whatever refused the file, after `on_error`; the policy is then as it was.
            WatchError: after `stop()`, and in a forked child.
        """
        self._check_running('reload')
        previous = self.current_version()
        state = state_of(self.path)
        try:
            made = self._take()
        except Exception as error:
            self._seen = state
            self._refused(error, state)
            raise
        if made is None:
            return self._history[-1]
        self._tell('reload', made, previous)
        return made

    def rollback(self, to: int | None = None) -> PolicyVersion:
        """Put an earlier version in force again.

        The versions after it leave `history()`, so that a further `rollback()` goes further back. The file is not touched
        and still says what was taken back: it is read again when its content changes, or on `reload()`.

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
            if past and previous == past[-1]:
                past = past[:-1]  # else somebody else's load_policy() came since, and that is what is taken back
            if to is not None:
                past = tuple(version for version in past if version.version <= to)
            if not past or to not in (None, past[-1].version):
                known = ', '.join(str(version.version) for version in self._history[:-1]) or 'none'
                what = 'the version before' if to is None else f'version {to!r}'
                raise WatchError(f'cannot roll back {self.path} to {what}: the earlier versions kept are {known}')
            _, is_other = self._dispatcher.policies.swap_file(past[-1])
            self._taken_back = self._content
            self._history = past
            self._tickets += 1
            self._done = self._tickets  # what is being read at this moment was asked for before
        if is_other:
            self._dispatcher.policies.policy_changed()
        logs.logger.info('policy %s: back to version %d (%s)', self.path, past[-1].version, past[-1].sha256[:12])
        self._tell('rollback', past[-1], previous)
        return past[-1]

    def stop(self, timeout: float | None = None) -> None:
        """Stop watching and wait for the thread; the policy stays in force. Called again, or in a forked child, it does
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
        self._forget()

    def _forget(self) -> None:
        with lock:
            if _watchers.get(self._dispatcher) is self:
                del _watchers[self._dispatcher]

    # -- one change ---------------------------------------------------------------------------------------------------

    def _take(self) -> PolicyVersion | None:
        """Read, check and put in force what the file says now. Foreign code runs outside the lock, so of two threads that
        are here at once, the one that began to read later decides; None for the other."""
        with self._turn:
            self._tickets += 1
            ticket = self._tickets
        self._dispatcher.policies.refuse_if_frozen(f'reload {self.path}')
        made = read_version(self.path, self._dispatcher)
        for validator in self._validators:
            try:
                answer = validator(made.policy)
            except SystemExit as error:  # a thread would end without a word
                raise ValueError(
                    f'validator {_name_of(validator)} refuses {self.path}: it exits with {error.code!r}'
                ) from error
            if answer is not None and answer is not True:
                raise ValueError(f'validator {_name_of(validator)} refuses {self.path}: {answer!r}')
        require_backends(self._dispatcher, self._dispatcher.policies.state_with_file(made.policy, self.path), self.path)
        with self._turn:
            if ticket < self._done:
                return None
            now, is_other = self.current_version(), False
            if now is not None and self._history and now == self._history[-1] and now.sha256 == made.sha256:
                made = now  # read again, and still the same
            else:
                made, is_other = self._dispatcher.policies.swap_file(made)
                self._history = (*self._history, made)[-self._most :]
            self._done, self._seen, self._content = ticket, made.sha256, made.sha256
            self._in_error, self._taken_back, self._waits_for_thaw = None, '', False
        if is_other:
            self._dispatcher.policies.policy_changed()
        logs.logger.info('policy %s: version %d (%s) in force', self.path, made.version, made.sha256[:12])
        return made

    def _look(self) -> None:
        """Take what the file holds, if that is not what it held before."""
        state = state_of(self.path)
        if state == self._seen and not (self._waits_for_thaw and self._dispatcher.policies.frozen is None):
            return
        previous = self.current_version()
        was_bad = self._in_error is not None
        in_force = self._history[-1].sha256 if self._history and previous == self._history[-1] else ''
        if is_content(state):
            if state != self._content:
                self._taken_back = ''
            self._content = state
        if state in (in_force, self._taken_back):
            self._seen, self._in_error, self._waits_for_thaw = state, None, False
            if was_bad and state == in_force:
                self._tell('reload', previous, previous)
            return
        self._seen, self._waits_for_thaw = state, False
        try:
            made = self._take()
        except Exception as error:
            self._refused(error, state)
        else:
            if made is not None:
                self._tell('reload', made, previous)

    def _refused(self, error: Exception, state: str) -> None:
        self._waits_for_thaw = isinstance(error, FrozenError)
        text = error_text(error)
        if state and self._in_error == (state, text):
            return  # said already
        self._in_error = (state, text)
        logs.logger.error('policy %s: not reloaded, nothing is changed. %s', self.path, text)
        now = self.current_version()
        self._tell('error', now, now, error)

    def _tell(
        self, kind: str, version: PolicyVersion | None, previous: PolicyVersion | None, error: Exception | None = None
    ) -> None:
        event = PolicyEvent(kind, self.path, version, previous, error)
        for callback in self._on_error if kind == 'error' else self._on_reload:
            try:
                callback(event)
            except (Exception, SystemExit):
                logs.logger.exception('policy %s: callback %s raised', self.path, _name_of(callback))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                for _ in reported(self._watched()) if self._poll is None else polled(self._watched(), self._poll):
                    self._look_and_live()
            except FileNotFoundError:
                self._stopping.wait(STEP_MILLISECONDS / 1000)  # a directory has just gone
            except Exception as error:
                # no inotify instances left, say
                logs.logger.warning(
                    'policy %s: the operating system does not report changes (%s); the file is read every %g s instead',
                    self.path,
                    error_text(error),
                    _POLL_SECONDS,
                )
                self._poll = _POLL_SECONDS

    def _watched(self) -> Watched:
        return Watched(
            self.path,
            self._debounce,
            self._stopping,
            seen=lambda: self._seen,
            look_again=lambda: self._in_error or self._waits_for_thaw,
        )

    def _look_and_live(self) -> None:
        try:
            self._look()
        except BaseException:  # nobody else hears of it, and the next change is to be seen
            logs.logger.exception('policy %s: the watcher goes on after an error of its own', self.path)

    def _after_fork_in_child(self) -> None:
        self._turn = threading.RLock()
        self._stopping = threading.Event()


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


_watchers: weakref.WeakKeyDictionary[Any, PolicyWatcher] = weakref.WeakKeyDictionary()


def stop_watching(dispatcher: Dispatcher) -> None:
    """Stop the watcher of a namespace, if there is one."""
    watcher = _watchers.get(dispatcher)
    if watcher is not None:
        watcher.stop()


def _in_child() -> None:
    for watcher in list(_watchers.values()):
        watcher._after_fork_in_child()


def _at_exit() -> None:
    """A thread inside watchfiles must not meet an interpreter that is being taken down."""
    for watcher in list(_watchers.values()):
        watcher._stopping.set()
        if watcher.running or watcher._thread.is_alive():
            watcher._thread.join(1.0)


in_forked_children(_in_child)
atexit.register(_at_exit)


Dispatcher.before_reset.append(stop_watching)
