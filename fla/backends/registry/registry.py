"""The backends that are registered for an operation.

A registration hides an earlier one of the same name; its handle removes it, and the hidden one serves again.
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
        backend: the instance; None while a path is not imported.
        path: 'module:Class', None for an instance.
        origin: file:line of the call.
        serial: number of the call.
        position: rank among equal priorities; a replacement inherits it.
        error: why the path cannot be imported.
        by: the caller: the operation's own 'package', a 'plugin', or the 'user'.
        promised: the name given with a path.
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
        """The backend's name; its path if it has no other name yet."""
        return self.backend.backend_type if self.backend is not None else self.promised or str(self.path)


class Owner(Protocol):
    """The dispatcher, for a registry. `registry_changed` runs under the lock, `registry_has_changed` outside."""

    listeners: tuple[Listener, ...]

    def refuse_if_frozen(self, what: str) -> None: ...
    def is_strict(self, operation: str) -> bool: ...
    def module_of(self, operation: str) -> str: ...
    def who_registers(self) -> str: ...
    def check_registration(self, registry: Registry, backend: BaseBackend) -> None: ...
    def registry_changed(self, registry: Registry) -> None: ...
    def registry_has_changed(self, registry: Registry) -> None: ...


class Handle:
    """Removes a registration. Returned by `register()`."""

    def __init__(self, registry: Registry, serial: int) -> None:
        self._registry, self._serial = registry, serial

    def remove(self) -> None:
        """Removes the registration; the hidden one serves again. A second call does nothing."""
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

    def registrations(self) -> tuple[Registration, ...]:
        """Returns the newest registration of each name, in order of first registration."""
        newest = {entry.name: entry for entry in sorted(self._entries, key=lambda entry: entry.serial)}
        return tuple(sorted(newest.values(), key=lambda entry: entry.position))

    def __iter__(self) -> Iterator[BaseBackend]:
        return iter([entry.backend for entry in self.registrations() if entry.backend is not None])

    def all_backends(self) -> Iterator[BaseBackend]:
        """Returns every registered backend, hidden ones included."""
        return iter([entry.backend for entry in self._entries if entry.backend is not None])

    def __len__(self) -> int:
        return len(self.registrations())

    def __contains__(self, name: object) -> bool:
        return any(entry.name == name for entry in self.registrations())

    def get(self, name: str) -> BaseBackend | None:
        """Returns the backend of that name, or None."""
        return next((backend for backend in self if backend.backend_type == name), None)

    def register(self, backend: BaseBackend | str, name: str | None = None) -> Handle:
        """Adds a backend.

        Args:
            backend: an instance, or a path 'package.module:Class' that is imported when the operation is first used; an
                import error becomes the reason of this backend and affects no other.
            name: name of the backend behind a path: policies and `explain` know it even if the path cannot be imported.

        Raises:
            TypeError: for anything else.
            RegistrationError: for a wrong declaration, and under strict mode for a method that differs from the public
                function.
            FrozenError: while dispatch is frozen.
        """
        self.owner.refuse_if_frozen('register a backend')
        if isinstance(backend, type) and issubclass(backend, BaseBackend):
            raise TypeError(f'register() takes an instance: register({backend.__name__}())')
        instance = path = None
        if isinstance(backend, BaseBackend):
            instance = backend
            check_declaration(instance)
            self.owner.check_registration(self, instance)
        elif isinstance(backend, str):
            path = backend
            module, _, attribute = path.partition(':')
            if not all(part.isidentifier() for part in module.split('.')) or not attribute.isidentifier():
                raise TypeError(f"a path must look like 'package.module:Class', got {backend!r}")
        else:
            raise TypeError(f'register() takes an instance of BaseBackend or a path "module:Class", got {backend!r}')
        frame = sys._getframe(1)
        origin = f'{frame.f_code.co_filename}:{frame.f_lineno}'
        own = self.owner.module_of(self.operation)
        by = 'package' if f'{frame.f_globals.get("__name__", "")}.'.startswith(f'{own}.') else self.owner.who_registers()
        serial = next(_serials)
        entry = Registration(instance, path, origin, serial, serial, by=by, promised=name)
        with lock:
            entry, other = self._add(entry)
        self._warn_twice(other, entry)
        self._notify('registered', entry)
        return Handle(self, entry.serial)

    def _add(self, entry: Registration) -> tuple[Registration, Registration | None]:
        """Adds a registration and also returns another one of this name from other code. Called under the lock.

        The other one may be newer: an import replaces a path that was registered earlier.
        """
        other = next((old for old in self.registrations() if old.name == entry.name), None)
        others = self._entries
        if other is not None:
            entry = replace(entry, position=min(entry.position, other.position))
            if _same_source(other, entry):
                others = tuple(old for old in others if old is not other)
                other = None
        self._entries = (*others, entry)
        if entry.by == 'package':
            self._own = (*(old for old in self._own if old.name not in (entry.name, entry.path)), entry)
        self.owner.registry_changed(self)
        return entry, other

    def _warn_twice(self, other: Registration | None, entry: Registration) -> None:
        if other is not None:
            older, newer = sorted((other, entry), key=lambda one: one.serial)
            words = 'operation %r: backend %r is registered from %s and again from %s; the newest is used'
            logs.logger.warning(words, self.operation, entry.name, older.origin, newer.origin)

    def _remove(self, serial: int) -> None:
        self.owner.refuse_if_frozen('remove a backend')
        with lock:
            gone = next((entry for entry in self._entries if entry.serial == serial), None)
            if gone is None:
                return
            self._entries = tuple(entry for entry in self._entries if entry is not gone)
            self.owner.registry_changed(self)
        self._notify('removed', gone)

    def unregister(self, name: str) -> None:
        """Removes every registration of that name. Raises UnknownNameError if there is none."""
        serials = [entry.serial for entry in self._entries if entry.name == name]
        if not serials:
            raise unknown_name('backend', name, [entry.name for entry in self._entries], f' in operation {self.operation!r}')
        for serial in serials:
            self._remove(serial)

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(event, registry, registration)`, outside the lock, after each 'registered' and 'removed'.

        Returns a function that removes the listener.
        """
        with lock:
            self._listeners = (*self._listeners, listener)

        def end() -> None:
            with lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        return end

    def _reset(self) -> None:
        """Restores what the operation's own package registered, removed or not. Called under the lock."""
        self._entries = self._own
        self._listeners = ()
        self.retry_paths()

    def _notify(self, event: str, entry: Registration) -> None:
        self.owner.registry_has_changed(self)
        for listener in (*self._listeners, *self.owner.listeners):
            try:
                listener(event, self, entry)
            except (Exception, SystemExit):  # must not end the registration
                logs.logger.exception('listener %r failed on %s of %r', listener, event, entry.name)

    def import_paths(self) -> bool:
        """Imports the registered paths. Returns False if one of them is being imported further up in this thread.

        A failed import is an error of its own registration alone.
        """
        done = [self._import(entry) for entry in self._entries if entry.backend is None and entry.error is None]
        return all(done)

    def retry_paths(self) -> None:
        """Lets the next use of the operation try failed imports again. Called under the lock."""
        self._entries, self._own = (
            tuple(replace(entry, error=None) if entry.backend is None else entry for entry in entries)
            for entries in (self._entries, self._own)
        )

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
                raise ValueError(f'registered as {entry.promised!r}, but its backend_type is {backend.backend_type!r}')
            self.owner.check_registration(self, backend)
            loaded = replace(entry, backend=backend)
        except Exception as error:
            # a missing optional package is ordinary; any other error is a bug
            optional = isinstance(error, ModuleNotFoundError) and (error.name or '').split('.')[0] != module.split('.')[0]
            if not optional and self.owner.is_strict(self.operation):
                raise
            loaded = replace(entry, error=f'{type(error).__name__}: {error}' if optional else error_text(error))
            if self._replace(entry, loaded):
                level, words = logging.INFO if optional else logging.WARNING, 'backend %s (registered at %s) is out: %s'
                logs.logger.log(level, words, entry.path, entry.origin, loaded.error, exc_info=not optional)
            return True
        self._replace(entry, loaded)
        return True

    def _replace(self, entry: Registration, loaded: Registration) -> bool:
        """Replaces a path by the imported backend. Returns False if another thread has done so."""
        with lock:
            if entry not in self._entries:
                return False
            self._entries = tuple(old for old in self._entries if old is not entry)
            loaded, other = self._add(loaded)
        self._warn_twice(other, loaded)
        return True


class Registries:
    """The registries of a namespace by operation. `registries('kda')` and `registries['kda']` create a missing one.

    A plugin's `register(registries)` receives this object.
    """

    def __init__(self, owner: Owner, kind: type[Registry]) -> None:
        self._owner, self._kind = owner, kind
        self._registries: dict[str, Registry] = {}

    def __call__(self, operation: str) -> Registry:
        """Returns the registry of an operation such as 'kda', or of '*' for backends that serve every operation.

        Raises:
            TypeError: if `operation` is not a name.
        """
        named = isinstance(operation, str) and all(part.isidentifier() for part in operation.split('.'))
        if not named and operation != '*':
            raise TypeError(f"operation must be a name such as 'kda', or '*', got {operation!r}")
        with lock:
            found = self._registries.get(operation)
            if found is None:
                found = object.__new__(self._kind)  # the class itself looks up its one object of this name
                found.operation, found.owner = operation, self._owner
                found._entries, found._own, found._listeners = (), (), ()
                # a new dictionary: another thread may be iterating over the old one
                self._registries = {**self._registries, operation: found}
        return found

    __getitem__ = __call__

    def get(self, operation: str) -> Registry | None:
        """Returns the registry of an operation, or None."""
        return self._registries.get(operation)

    def __contains__(self, operation: object) -> bool:
        return operation in self._registries

    def __iter__(self) -> Iterator[str]:
        return iter(self._registries)

    def items(self) -> ItemsView[str, Registry]:
        """Returns a snapshot of (operation, registry) pairs."""
        return self._registries.items()

    def registrations(self, operation: str) -> Iterator[tuple[int, Registration]]:
        """Yields (rank, registration) for an operation: 0 for its own, 1 for those of every operation."""
        for rank, name in enumerate((operation, '*')):
            if name in self._registries:
                yield from ((rank, one) for one in self._registries[name].registrations())


def _same_source(one: Registration, other: Registration) -> bool:
    """Whether two registrations are the same code run twice (a notebook cell, a reloaded module)."""
    if one.path is not None or other.path is not None:
        return one.path == other.path
    a, b = type(one.backend), type(other.backend)
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__) and _place(one) == _place(other)


def _place(entry: Registration) -> str:
    """Returns a registration's place. A notebook cell gets a new file name with each run, and other lines with each edit."""
    file = entry.origin.rpartition(':')[0]
    return '<notebook>' if any(mark in file for mark in _NOTEBOOKS) else entry.origin


# names of a cell's file in Jupyter and Colab, old and new
_NOTEBOOKS = ('<ipython-input', 'ipykernel_', 'ipython-input-')
