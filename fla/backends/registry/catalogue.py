"""Operations, functions and backends of a namespace by name."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from fla.backends.backend.base import KINDS, BaseBackend
from fla.backends.core import logs
from fla.backends.core.errors import unknown_name
from fla.backends.core.locking import lock
from fla.backends.core.spec import FunctionSpec
from fla.backends.registry.discovery import Discovery
from fla.backends.registry.registry import Registries


class Dispatchable(Protocol):
    """A dispatched function as the catalogue sees it: its default as a backend, and the function that users hold."""

    spec: FunctionSpec
    default: BaseBackend
    wrapper: Any


F = TypeVar('F', bound=Dispatchable)


class Catalogue(Generic[F]):
    """Looks names up, and imports their operations if need be.

    Args:
        registries: the registries of the namespace.
        discovery: loads operations.
        baseline: functions are undecorated, and nothing is dispatched.

    Attributes:
        plain: undecorated functions by 'operation.function', in a baseline process.
    """

    def __init__(self, registries: Registries, discovery: Discovery, *, baseline: bool) -> None:
        self.registries, self.discovery, self.baseline = registries, discovery, baseline
        self.plain: dict[str, Callable[..., Any]] = {}
        self._functions: dict[str, F] = {}
        self._entries: weakref.WeakSet[F] = weakref.WeakSet()

    def add(self, entry: F, *, public: bool) -> None:
        """Adds an entry point, under its name if it is public."""
        with lock:
            self._entries.add(entry)
        if public:
            self.register_function(entry)

    def register_function(self, entry: F) -> None:
        """Adds a public function under its name. Warns if another file has dispatched a function of that name."""
        key, place = entry.spec.key, entry.spec.place
        with lock:
            old = self._functions.get(key)
            # a new dictionary: another thread may be iterating over the old one
            self._functions = {**self._functions, key: entry}
        if old is not None and old.spec.place.rpartition(':')[0] != place.rpartition(':')[0]:
            words = 'function %s is dispatched at %s and again at %s; its name now means the newest'
            logs.logger.warning(words, key, old.spec.place, place)

    def entries(self) -> list[F]:
        """Returns every entry point, bound ones included."""
        with lock:
            return list(self._entries)

    def functions(self, operation: str | None = None) -> dict[str, F]:
        """Returns public functions by 'operation.function', of one operation or of all."""
        return {k: e for k, e in self._functions.items() if operation is None or e.spec.operation == operation}

    def known(self, name: str) -> F | None:
        """Returns the function called 'operation.function' if it is imported already."""
        return self._functions.get(name)

    def entry(self, name: str) -> F:
        """Returns the function called 'operation.function', importing its operation if need be.

        Raises:
            UnknownNameError: with the nearest match.
        """
        if not isinstance(name, str):
            raise TypeError(f"a function's name is a string such as 'kda.chunk_kda', got {name!r}")
        if name not in self._functions:
            operation, _, function = name.rpartition('.')
            advice = ''
            if not operation and self.discovery.exists(name):
                operation, advice = name, f" Write '{name}.FUNCTION'."
            if not operation or not self.discovery.exists(operation):
                raise unknown_name('operation', operation or name, self.discovery.operations())
            self.import_operation(operation)
            if advice or name not in self._functions:
                known = [entry.spec.name for entry in self.functions(operation).values()]
                function = '' if advice else function
                raise unknown_name('function', function, known, f' of operation {operation!r}', advice)
        return self._functions[name]

    def named(self, name: str) -> Callable[..., Any]:
        """Returns the public function called 'operation.function', importing its operation if need be.

        Raises:
            UnknownNameError: with the nearest match.
        """
        if self.baseline and name not in self.plain and self.discovery.exists(name.rpartition('.')[0]):
            self.import_operation(name.rpartition('.')[0])
        found: Callable[..., Any] = self.plain[name] if name in self.plain else self.entry(name).wrapper
        return found

    def import_operation(self, operation: str) -> None:
        """Imports the package of an operation if it has one."""
        package = self.discovery.module_of(operation).removesuffix('.backends')
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is None or not f'{package}.'.startswith(f'{error.name}.'):
                raise

    def backends(self) -> Iterator[BaseBackend]:
        """Yields every backend, hidden ones and the functions' defaults included."""
        for _, registry in self.registries.items():
            yield from registry.all_backends()
        for function in self.entries():
            yield function.default

    def check_operation(self, name: str) -> None:
        """Raises unless `name` is an operation or a function."""
        if not isinstance(name, str):
            raise TypeError(f"an operation is named by a string such as 'kda', got {name!r}")
        if name == '*':
            raise unknown_name('operation', name, self.discovery.operations(), '', ' Leave op out to mean every function.')
        if not self.discovery.exists(name):
            self.entry(name)

    def check_tokens(self, tokens: tuple[str, ...], name: str | None) -> None:
        """Raises unless every token names a kind or a backend: of the operation `name`, or of any if it is None."""
        unknown = self.unknown_tokens(tokens, name)
        if unknown:
            where = f' of operation {self.operation_of(name)!r}' if name else ''
            raise unknown_name('backend', unknown[0], self.words(name), where)

    def unknown_tokens(self, tokens: tuple[str, ...], name: str | None) -> list[str]:
        """Returns the tokens that name nothing. Loads the operation `name`; if it is None, all operations, but only for a
        token that is unknown without that."""
        if name is not None:
            self.discovery.load(self.operation_of(name))
        elif not self.words(None).issuperset(tokens):
            self.discovery.load_all()
        known = self.words(name)
        return [token for token in tokens if token not in known]

    def operation_of(self, name: str) -> str:
        """Returns the operation of a name: its own, or that of a function."""
        return name if self.discovery.exists(name) else name.rpartition('.')[0]

    def words(self, name: str | None) -> set[str]:
        """Returns the tokens known for an operation or function, or for any."""
        operation = self.operation_of(name) if name else None
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
