"""Finds backends: an operation's own `backends` package, entry points, and plugin modules from the environment.

No lock of this package is held during an import: two threads that race a first call import once, and a backend module may
call dispatched functions while it loads.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fla.backends.core import logs
from fla.backends.core.errors import error_text, unknown_name
from fla.backends.core.locking import lock
from fla.backends.registry.importing import forget_unfinished_imports, import_whole
from fla.backends.registry.registry import Registries
from fla.utils.env import LIVE, live_key, text_of
from fla.utils.owners import with_conflict

# A second thread waits this long for plugins that another thread is loading, then continues without them: waiting for ever
# could deadlock with the import system.
_PLUGIN_WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class Plugin:
    """A plugin, loaded or failed.

    Attributes:
        name: entry point or module.
        source: 'entry point' or the environment variable.
        version: of its distribution, or None.
        error: why it could not be loaded, or None.
    """

    name: str
    source: str
    version: str | None = None
    error: str | None = None


class Discovery:
    """Loads the backends of one namespace.

    Args:
        namespace: package of the operations.
        registries: where backends register.
        modules: operation → module that registers its backends, for those outside `<namespace>.<operation>.backends`.
        group: entry-point group of plugins.
        plugin_variable: environment variable that lists plugin modules.
        is_strict: whether an error in an operation's package raises.
        loaded: called under the lock after an operation's package was imported.
        declared_at: returns the place of an operation's first `@dispatch`, or ''.
    """

    def __init__(
        self,
        namespace: str,
        registries: Registries,
        *,
        modules: Mapping[str, str],
        group: str,
        plugin_variable: str,
        is_strict: Callable[[str], bool],
        loaded: Callable[[str], None],
        declared_at: Callable[[str], str],
    ) -> None:
        self.namespace, self.registries, self.group = namespace, registries, group
        self.modules = modules
        self._variable, self._is_strict, self._on_loaded, self._declared_at = plugin_variable, is_strict, loaded, declared_at
        self.errors: dict[str, str] = {}
        self.plugins: tuple[Plugin, ...] = ()
        self._loaded: set[str] = set()
        # thread → what it is loading, innermost last: 'package' or 'plugin'
        self._loading: dict[int, list[str]] = {}
        self._plugins_done = threading.Event()
        self._plugins_loader: int | None = None

    def module_of(self, operation: str) -> str:
        """Returns the name of the package that registers the backends of an operation."""
        return self.modules.get(operation, f'{self.namespace}.{operation}.backends')

    def who_registers(self) -> str:
        """Returns the source of registrations on this thread: 'package', 'plugin' or 'user'."""
        stack = self._loading.get(threading.get_ident())
        return stack[-1] if stack else 'user'

    def load(self, operation: str) -> bool:
        """Imports the backends of `operation`. Returns False if that is still in progress further up in this thread (a
        backend module that calls a dispatched function while it loads): the backends registered so far then serve for now.

        Raises:
            UnknownNameError: for an operation without a package and without a registry.
        """
        complete = self._load_plugins()
        complete = self._load_package(operation) and complete
        for name in (operation, '*'):
            registry = self.registries.get(name)
            if registry is not None:
                with self._registering('package'):
                    complete = registry.import_paths() and complete
        return complete

    def _load_package(self, operation: str) -> bool:
        if operation in self._loaded or operation == '*':
            return True
        module = self.module_of(operation)
        try:
            with self._registering('package'):
                if import_whole(module) is None:
                    return False
        except ModuleNotFoundError as error:
            if error.name is None or not f'{module}.'.startswith(f'{error.name}.'):
                self._remember(operation, module, error)
            elif not self.exists(operation):
                package, place = module.removesuffix('.backends'), self._declared_at(operation)
                advice = with_conflict(f' A new operation needs BackendRegistry({operation!r}), or a package {package}.')
                where = f' (in @dispatch at {place})' if place else ''
                raise unknown_name('operation', operation, self.operations(), where, advice) from None
        except Exception as error:
            self._remember(operation, module, error)
        with lock:
            self._loaded.add(operation)
            self._on_loaded(operation)
        return True

    def _remember(self, operation: str, module: str, error: BaseException) -> None:
        text = self.errors[operation] = error_text(error)
        words = 'operation %r: importing %s failed, what it registered before that is used: %s'
        logs.once(('package', module, text), logging.ERROR, words, operation, module, text, exc_info=True)
        if self._is_strict(operation):
            raise error

    def exists(self, operation: str) -> bool:
        """Whether an operation is registered, mapped, or a package of the namespace. Imports no operation."""
        if operation == '*' or operation in self.registries or operation in self.modules:
            return True
        if '.' in operation and operation in self.operations():
            return True
        parent, _, leaf = f'{self.namespace}.{operation}'.rpartition('.')
        if not leaf.isidentifier() or ('.' in operation and not self.exists(operation.rpartition('.')[0])):
            return False
        try:
            spec = importlib.util.find_spec(f'{parent}.{leaf}')
            # a module is not an operation: `kda.chunk` is a file of `kda`
            return spec is not None and ('.' not in operation or spec.submodule_search_locations is not None)
        except (ImportError, ValueError, AttributeError):
            return False

    def operations(self) -> list[str]:
        """Returns every operation, loaded or not."""
        return sorted({*self.modules, *self.registries, *self._packages()} - {'*'})

    def _packages(self) -> Iterator[str]:
        try:
            spec = importlib.util.find_spec(self.namespace)
        except (ImportError, ValueError):
            spec = None
        for path in (spec and spec.submodule_search_locations) or ():
            yield from _operations_in(Path(path))

    def load_all(self) -> None:
        """Loads every operation, unless this thread is loading one."""
        for operation in self.operations() if not self.is_loading() else ():
            self.load(operation)

    def load_plugins(self) -> tuple[Plugin, ...]:
        """Loads the plugins if need be, and returns them."""
        self._load_plugins()
        return self.plugins

    def _load_plugins(self) -> bool:
        if self._plugins_done.is_set():
            return True
        if self.is_loading():
            return False
        me = threading.get_ident()
        with lock:
            if self._plugins_loader is None and not self._plugins_done.is_set():
                self._plugins_loader = me
        if self._plugins_loader != me:
            return self._plugins_done.wait(_PLUGIN_WAIT_SECONDS)
        try:
            with self._registering('plugin'):
                self.plugins = (*self._entry_points(), *self._plugin_modules())
            self._plugins_done.set()
        finally:
            self._plugins_loader = None
        return True

    def _entry_points(self) -> Iterator[Plugin]:
        for point in importlib.metadata.entry_points(group=self.group):
            try:
                version = point.dist.version if point.dist is not None else None
            except Exception:  # broken metadata; the plugin may work
                version = None
            error = self._call_plugin(point.name, f'entry point {point.value}', point.load)
            yield Plugin(point.name, 'entry point', version, error)

    def _plugin_modules(self) -> Iterator[Plugin]:
        for name in (text_of(LIVE.get(live_key(self._variable))) or '').split(','):
            if name := name.strip():
                error = self._call_plugin(name, self._variable, lambda name=name: importlib.import_module(name))
                version = getattr(sys.modules.get(name), '__version__', None)
                yield Plugin(name, self._variable, version, error)

    def _call_plugin(self, name: str, source: str, load: Any) -> str | None:
        try:
            found = load()
            register = getattr(found, 'register', found)
            if not callable(register):
                raise AttributeError(f'{found!r} has no function register(registries)')
            register(self.registries)
        except Exception as error:
            words = 'plugin %s (%s) failed, what it registered before that is used: %s'
            logs.logger.warning(words, name, source, error, exc_info=True)
            return f'{type(error).__name__}: {error}'
        return None

    @contextlib.contextmanager
    def _registering(self, who: str) -> Iterator[None]:
        """Marks registrations on this thread as those of a package or a plugin."""
        me = threading.get_ident()
        stack = self._loading.setdefault(me, [])
        stack.append(who)
        try:
            yield
        finally:
            stack.pop()
            if not stack:
                del self._loading[me]

    def is_loading(self) -> bool:
        """Whether this thread is inside a load."""
        return threading.get_ident() in self._loading

    def retry(self) -> None:
        """Lets the next call try failed imports again."""
        with lock:
            self._loaded -= set(self.errors)
            self.errors.clear()

    def forget(self) -> None:
        """Unloads the plugins; packages stay imported."""
        with lock:
            self._loaded.clear()
            self.errors.clear()
            self.plugins = ()
            self._plugins_done.clear()

    def after_fork_in_child(self) -> None:
        """Drops unfinished loads of other threads, which do not exist in the child, and their import locks: the child's next
        call loads again."""
        me = threading.get_ident()
        others = self._loading.keys() - {me}
        for thread in others:
            del self._loading[thread]
        if not self._plugins_done.is_set():
            self._plugins_done = threading.Event()  # another thread may have held the old one's lock
        if self._plugins_loader != me:
            self._plugins_loader = None
        if others:
            forget_unfinished_imports()


def _operations_in(folder: Path, prefix: str = '') -> Iterator[str]:
    """Yields the packages in a folder, and the packages inside them that have backends. Imports nothing."""
    for info in pkgutil.iter_modules([str(folder)]):
        if not info.ispkg or info.name == 'backends':
            continue
        inside = folder / info.name
        if not prefix or (inside / 'backends').is_dir():
            yield f'{prefix}{info.name}'
        yield from _operations_in(inside, f'{prefix}{info.name}.')


def in_forked_children(clean_up: Callable[[], None]) -> None:
    """Calls `clean_up` in forked children."""
    if hasattr(os, 'register_at_fork'):
        os.register_at_fork(after_in_child=clean_up)
