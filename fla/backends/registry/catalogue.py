"""What there is in a namespace, by its name: operations, functions, backends."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fla.backends.backend.base import KINDS, BaseBackend
from fla.backends.core import logs
from fla.backends.core.errors import unknown_name
from fla.backends.core.locking import lock

if TYPE_CHECKING:
    from fla.backends.registry.discovery import Discovery
    from fla.backends.registry.registry import BackendRegistry
    from fla.backends.runtime.entry import Entry


class Catalogue:
    """The part of a `Dispatcher` that knows names, importing what is asked for."""

    discovery: Discovery
    baseline: bool

    def __init__(self) -> None:
        self.registries: dict[str, BackendRegistry] = {}
        # the undecorated functions, by key, where nothing is dispatched
        self.plain: dict[str, Callable[..., Any]] = {}
        self._functions: dict[str, Entry] = {}
        self._entries: weakref.WeakSet[Entry] = weakref.WeakSet()

    def add(self, entry: Entry, *, public: bool) -> None:
        """Have an entry point follow what changes, and know it by its name if it is public."""
        with lock:
            self._entries.add(entry)
        if public:
            self.register_function(entry)

    def register_function(self, entry: Entry) -> None:
        """Know a public function by its name."""
        with lock:
            known = self._functions.get(entry.key)
            # a new dictionary: see BackendRegistry.__new__
            self._functions = {**self._functions, entry.key: entry}
        if known is not None and known.place.rpartition(':')[0] != entry.place.rpartition(':')[0]:
            logs.logger.warning(
                'function %s is dispatched at %s and again at %s; by name, the newest is meant',
                entry.key,
                known.place,
                entry.place,
            )

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
        package = self.discovery.module_of(operation).removesuffix('.backends')
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is None or not f'{package}.'.startswith(f'{error.name}.'):
                raise

    def backends(self) -> Iterator[BaseBackend]:
        """Every backend there is, covered ones and the functions' defaults included."""
        for registry in self.registries.values():
            for entry in registry._entries:
                if entry.backend is not None:
                    yield entry.backend
        for function in self.entries():
            yield function.default

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
