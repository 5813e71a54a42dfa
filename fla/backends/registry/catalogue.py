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
    """A dispatched function, as far as the catalogue knows it.

    Attributes:
        default: its default implementation as a backend.
        wrapper: the function that users hold.
    """

    spec: FunctionSpec
    default: BaseBackend
    wrapper: Any


F = TypeVar('F', bound=Dispatchable)


class Catalogue(Generic[F]):
    """Looks names up, and imports the operations that are asked for.

    Args:
        registries: the registries of the namespace.
        discovery: loads operations.
        baseline: nothing is dispatched; functions are the undecorated ones.
    """

    def __init__(self, registries: Registries, discovery: Discovery, *, baseline: bool) -> None:
        self.registries, self.discovery, self.baseline = registries, discovery, baseline
        # undecorated functions by key, in a baseline process
        self.plain: dict[str, Callable[..., Any]] = {}
        self._functions: dict[str, F] = {}
        self._entries: weakref.WeakSet[F] = weakref.WeakSet()

    def add(self, entry: F, *, public: bool) -> None:
        """Add an entry point, under its name if it is public."""
        with lock:
            self._entries.add(entry)
        if public:
            self.register_function(entry)

    def register_function(self, entry: F) -> None:
        """Make a public function known by its name."""
        spec = entry.spec
        with lock:
            known = self._functions.get(spec.key)
            # a new dictionary: an iteration over the old one goes on undisturbed
            self._functions = {**self._functions, spec.key: entry}
        if known is not None and known.spec.place.rpartition(':')[0] != spec.place.rpartition(':')[0]:
            logs.logger.warning(
                'function %s is dispatched at %s and again at %s; its name now means the newest',
                spec.key,
                known.spec.place,
                spec.place,
            )

    def entries(self) -> list[F]:
        """Every entry point, bound ones included."""
        with lock:
            return list(self._entries)

    def functions(self, operation: str | None = None) -> dict[str, F]:
        """Public functions by 'operation.function', of one operation or of all."""
        return {k: e for k, e in self._functions.items() if operation is None or e.spec.operation == operation}

    def known(self, name: str) -> F | None:
        """The function called 'operation.function' if it is imported already."""
        return self._functions.get(name)

    def entry(self, name: str) -> F:
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
                known = [entry.spec.name for entry in self.functions(name).values()]
                raise unknown_name('function', '', known, f' of operation {name!r}', f" Write '{name}.FUNCTION'.")
            if not operation or not self.discovery.exists(operation):
                raise unknown_name('operation', operation or name, self.discovery.operations())
            self.import_operation(operation)
            if name not in self._functions:
                raise unknown_name(
                    'function',
                    function,
                    [e.spec.name for e in self.functions(operation).values()],
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
        found: Callable[..., Any] = self.plain[name] if name in self.plain else self.entry(name).wrapper
        return found

    def import_operation(self, operation: str) -> None:
        """Import the package of an operation, where it has one."""
        package = self.discovery.module_of(operation).removesuffix('.backends')
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is None or not f'{package}.'.startswith(f'{error.name}.'):
                raise

    def backends(self) -> Iterator[BaseBackend]:
        """Every backend, covered ones and the functions' defaults included."""
        for _, registry in self.registries.items():
            yield from registry.all_backends()
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
