"""The backends that are registered for an operation.

Nothing is lost: a registration that covers another one of the same name is removed by its handle, and the covered one serves
again.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, ItemsView, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from fla.backends.backend.base import BaseBackend
from fla.backends.backend.declaration import check_declaration
from fla.backends.core import logs
from fla.backends.core.errors import error_text, unknown_name
from fla.backends.core.locking import lock
from fla.backends.registry.importing import import_whole

_serials = itertools.count()

Listener = Callable[[str, 'Registry', 'Registration'], None]


@dataclass(frozen=True, eq=False)
class Registration:
    """One call of `register()`.

    Attributes:
        backend: the instance, None while a path has not been imported or cannot be.
        path: 'module:Class' it was registered by, None for an instance.
        origin: file:line of the call.
        error: why the path cannot be imported.
        position: place among equals; a replacement inherits it.
        promised: the name that came with a path.
        by: who called: the operation's own 'package', a 'plugin', or the 'user'.
    """

    backend: BaseBackend | None
    path: str | None
    origin: str
    serial: int
    position: int
    error: str | None = None
    by: str = 'user'
    promised: str | None = None

    @property
    def name(self) -> str:
        """The backend's name, its path as long as that is all that is known."""
        return self.backend.backend_type if self.backend is not None else self.promised or str(self.path)


class Owner(Protocol):
    """What a registry asks of the namespace that owns it."""

    listeners: tuple[Listener, ...]

    def refuse_if_frozen(self, what: str) -> None:
        """Raises FrozenError while dispatch is frozen."""

    def is_strict(self, operation: str) -> bool:
        """Whether bugs in backends of an operation raise."""

    def module_of(self, operation: str) -> str:
        """The package that registers the operation's own backends."""

    def who_registers(self) -> str:
        """Who registers on this thread: 'package', 'plugin' or 'user'."""

    def check_registration(self, registry: Registry, backend: BaseBackend) -> None:
        """Compares a backend's methods with the public functions; raises RegistrationError under strict."""

    def registry_changed(self, registry: Registry) -> None:
        """Called under the lock after a change."""

    def registry_has_changed(self, registry: Registry) -> None:
        """Called outside the lock, after a change by a caller."""


class Handle:
    """Returned by `register()`; removes the registration."""

    def __init__(self, registry: Registry, serial: int) -> None:
        self._registry, self._serial = registry, serial

    def remove(self) -> None:
        """Undo the registration; what it covered serves again. A second call does nothing."""
        self._registry._remove(self._serial)


class Registry:
    """The backends of one operation, or of every operation of a namespace ('*')."""

    operation: str
    owner: Owner
    _entries: tuple[Registration, ...]
    _own: tuple[Registration, ...]
    _listeners: tuple[Listener, ...]

    def __repr__(self) -> str:
        return f'<BackendRegistry {self.operation!r}: {", ".join(r.name for r in self.registrations()) or "empty"}>'

    # -- reading ------------------------------------------------------------------------------------------------------

    def registrations(self) -> tuple[Registration, ...]:
        """What is in force: the newest registration of each name, in order of first registration."""
        newest = {entry.name: entry for entry in sorted(self._entries, key=lambda entry: entry.serial)}
        return tuple(sorted(newest.values(), key=lambda entry: entry.position))

    def __iter__(self) -> Iterator[BaseBackend]:
        return iter([entry.backend for entry in self.registrations() if entry.backend is not None])

    def all_backends(self) -> Iterator[BaseBackend]:
        """Every registered backend, covered ones included."""
        return iter([entry.backend for entry in self._entries if entry.backend is not None])

    def __len__(self) -> int:
        return len(self.registrations())

    def __contains__(self, name: object) -> bool:
        return any(entry.name == name for entry in self.registrations())

    def get(self, name: str) -> BaseBackend | None:
        """The backend of that name, None if there is none."""
        return next((backend for backend in self if backend.backend_type == name), None)

    # -- writing ------------------------------------------------------------------------------------------------------

    def register(self, backend: BaseBackend | str, name: str | None = None) -> Handle:
        """Add a backend.

        Args:
            backend: an instance, or a path 'package.module:Class' that is imported when the operation is first used; its
                import error is kept as the reason of this one backend and harms no other.
            name: of the backend behind a path, so that policies and `explain` know it while it cannot be imported.

        Raises:
            TypeError: for anything else.
            RegistrationError: for a declaration that cannot be right, and under strict mode for one that drifts from the
                public function.
            FrozenError: while dispatch is frozen.
        """
        self.owner.refuse_if_frozen('register a backend')
        if isinstance(backend, type) and issubclass(backend, BaseBackend):
            raise TypeError(f'register() takes an instance: register({backend.__name__}())')
        path = None
        if isinstance(backend, str):
            path = backend
            module, _, attribute = path.partition(':')
            if not all(part.isidentifier() for part in module.split('.')) or not attribute.isidentifier():
                raise TypeError(f"a path must look like 'package.module:Class', got {backend!r}")
        elif not isinstance(backend, BaseBackend):
            raise TypeError(f'register() takes an instance of BaseBackend or a path "module:Class", got {backend!r}')
        instance = backend if isinstance(backend, BaseBackend) else None
        frame = sys._getframe(1)
        origin = f'{frame.f_code.co_filename}:{frame.f_lineno}'
        if instance is not None:
            check_declaration(instance)
            self.owner.check_registration(self, instance)
        serial = next(_serials)
        who = self._who(frame.f_globals.get('__name__', ''))
        entry = Registration(instance, path, origin, serial, serial, by=who, promised=name)
        with lock:
            entry, covered = self._add(entry)
        self._warn_of(covered, entry)
        self._tell('registered', entry)
        return Handle(self, entry.serial)

    def _who(self, module: str) -> str:
        own = self.owner.module_of(self.operation)
        return 'package' if f'{module}.'.startswith(f'{own}.') else self.owner.who_registers()

    def _add(self, entry: Registration) -> tuple[Registration, Registration | None]:
        """Called under the lock; also returns another one of this name that stands elsewhere, newer or older: a path that
        has just been imported may be older than what has its name now."""
        other = next((old for old in self.registrations() if old.name == entry.name), None)
        kept = self._entries
        if other is not None:
            entry = replace(entry, position=min(entry.position, other.position))
            if _same_source(other, entry):
                kept = tuple(old for old in kept if old is not other)
                other = None
        self._entries = (*kept, entry)
        if entry.by == 'package':
            self._own = (*(old for old in self._own if old.name not in (entry.name, entry.path)), entry)
        self.owner.registry_changed(self)
        return entry, other

    def _warn_of(self, other: Registration | None, entry: Registration) -> None:
        if other is None:
            return
        older, newer = sorted((other, entry), key=lambda known: known.serial)
        logs.logger.warning(
            'operation %r: backend %r is registered from %s and again from %s; the newest is used',
            self.operation,
            entry.name,
            older.origin,
            newer.origin,
        )

    def _remove(self, serial: int) -> None:
        self.owner.refuse_if_frozen('remove a backend')
        with lock:
            gone = next((entry for entry in self._entries if entry.serial == serial), None)
            if gone is None:
                return
            self._entries = tuple(entry for entry in self._entries if entry is not gone)
            self.owner.registry_changed(self)
        self._tell('removed', gone)

    def unregister(self, name: str) -> None:
        """Remove every registration of that name.

        Raises:
            UnknownNameError: if there is none.
        """
        serials = [entry.serial for entry in self._entries if entry.name == name]
        if not serials:
            raise unknown_name('backend', name, [entry.name for entry in self._entries], f' in operation {self.operation!r}')
        for serial in serials:
            self._remove(serial)

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event, registry, registration)` after each 'registered' and 'removed'; returns a function that
        ends it. Listeners run outside the lock."""
        with lock:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with lock:
                self._listeners = tuple(known for known in self._listeners if known is not listener)

        return end

    def _reset(self) -> None:
        """Called under the lock: only what the operation's own package registered remains, removed or not."""
        self._entries = self._own
        self._listeners = ()
        self.retry_paths()

    def _tell(self, event: str, entry: Registration) -> None:
        self.owner.registry_has_changed(self)
        for listener in (*self._listeners, *self.owner.listeners):
            try:
                listener(event, self, entry)
            except (Exception, SystemExit):  # a listener's error is not that of whoever registers
                logs.logger.exception('listener %r failed on %s of %r', listener, event, entry.name)

    # -- paths --------------------------------------------------------------------------------------------------------

    def import_paths(self) -> bool:
        """Import what is registered by path and not imported yet. Each failure stays with its own registration.

        False if one of them is being imported further up in this very thread.
        """
        new = [entry for entry in self._entries if entry.backend is None and entry.error is None]
        done = [self._import(entry) for entry in new]
        return all(done)

    def retry_paths(self) -> None:
        """Called under the lock: what could not be imported is tried again when the operation is next used."""

        def again(entries: tuple[Registration, ...]) -> tuple[Registration, ...]:
            return tuple(replace(entry, error=None) if entry.backend is None else entry for entry in entries)

        self._entries, self._own = again(self._entries), again(self._own)

    def _import(self, entry: Registration) -> bool:
        module, _, name = str(entry.path).partition(':')
        try:
            whole = import_whole(module)
            if whole is None:
                return False
            found = getattr(whole, name)
            backend = found() if isinstance(found, type) else found
            if not isinstance(backend, BaseBackend):
                raise TypeError(f'{entry.path} is {backend!r}, not a BaseBackend')
            check_declaration(backend)
            if entry.promised not in (None, backend.backend_type):
                raise ValueError(
                    f'it was registered as {entry.promised!r}, but its backend_type is {backend.backend_type!r}'
                )
            self.owner.check_registration(self, backend)
            loaded = replace(entry, backend=backend)
        except Exception as error:
            # an optional package that is missing is ordinary; anything else is a bug
            optional = isinstance(error, ModuleNotFoundError) and (error.name or '').split('.')[0] != module.split('.')[0]
            if not optional and self.owner.is_strict(self.operation):
                raise
            loaded = replace(entry, error=f'{type(error).__name__}: {error}' if optional else error_text(error))
            if self._replace(entry, loaded):
                logs.logger.log(
                    logging.INFO if optional else logging.WARNING,
                    'backend %s (registered at %s) is out: %s',
                    entry.path,
                    entry.origin,
                    loaded.error,
                    exc_info=not optional,
                )
            return True
        self._replace(entry, loaded)
        return True

    def _replace(self, entry: Registration, loaded: Registration) -> bool:
        """Put what an import brought in the place of its path, unless another thread has."""
        with lock:
            if entry not in self._entries:
                return False
            self._entries = tuple(old for old in self._entries if old is not entry)
            loaded, other = self._add(loaded)
        self._warn_of(other, loaded)
        return True


class Registries:
    """The registries of a namespace, by operation. `registries('kda')` and `registries['kda']` make one that does not exist;
    this is what a plugin's `register(registries)` gets."""

    def __init__(self, owner: Owner, kind: type[Registry]) -> None:
        self._owner, self._kind = owner, kind
        self._known: dict[str, Registry] = {}

    def __call__(self, operation: str) -> Registry:
        """The registry of an operation, such as 'kda', or '*' for backends that serve every operation.

        Raises:
            TypeError: if `operation` is not a name.
        """
        named = isinstance(operation, str) and all(part.isidentifier() for part in operation.split('.'))
        if not named and operation != '*':
            raise TypeError(f"operation must be a name such as 'kda', or '*', got {operation!r}")
        with lock:
            known = self._known.get(operation)
            if known is None:
                known = object.__new__(self._kind)
                known.operation, known.owner = operation, self._owner
                known._entries, known._own, known._listeners = (), (), ()
                # a new dictionary: an iteration over the old one goes on undisturbed
                self._known = {**self._known, operation: known}
        return known

    __getitem__ = __call__

    def get(self, operation: str) -> Registry | None:
        """The registry of an operation, None if it has none."""
        return self._known.get(operation)

    def __contains__(self, operation: object) -> bool:
        return operation in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def items(self) -> ItemsView[str, Registry]:
        """(operation, registry) pairs, as they are now."""
        return self._known.items()

    def registrations(self, operation: str) -> Iterator[tuple[int, Registration]]:
        """(rank, registration) of what serves an operation: its own first, then those for every operation."""
        for rank, name in enumerate((operation, '*')):
            registry = self._known.get(name)
            yield from ((rank, one) for one in (registry.registrations() if registry is not None else ()))


def _same_source(one: Registration, other: Registration) -> bool:
    """Whether two registrations are one piece of code that ran twice (a notebook cell, a reloaded module)."""
    if one.path is not None or other.path is not None:
        return one.path == other.path
    a, b = type(one.backend), type(other.backend)
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__) and _place(one) == _place(other)


def _place(entry: Registration) -> str:
    """Where a registration stands. A notebook cell gets a new file name each time it runs, and other lines when edited."""
    file = entry.origin.rpartition(':')[0]
    return '<notebook>' if any(mark in file for mark in _NOTEBOOKS) else entry.origin


# Jupyter's and Colab's names for the file of a cell, old and new.
_NOTEBOOKS = ('<ipython-input', 'ipykernel_', 'ipython-input-')
