"""How backends are found: an operation's own `backends` package, entry points, and plugin modules from the environment.

Packages are imported by Python's import system without any lock of ours held, so that two threads racing a first call
import once, and a backend module may itself call dispatched functions while it loads.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
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

# A second thread waits this long for the plugins that a first one is loading, then goes on without them: waiting for ever
# could deadlock with the import system.
_PLUGIN_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Plugin:
    """A plugin and how its loading went.

    Attributes:
        name: entry point or module.
        source: 'entry point' or the environment variable.
        version: of its distribution, where known.
        error: why it could not be loaded, None if it was.
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
        loaded: called under the lock when all backends of an operation are known.
        declared_at: operation → place of its first `@dispatch`, '' where unknown.
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
        self._variable, self._is_strict, self._on_loaded, self._place_of = plugin_variable, is_strict, loaded, declared_at
        self.errors: dict[str, str] = {}
        self.plugins: tuple[Plugin, ...] = ()
        self._loaded: set[str] = set()
        self._loading: dict[int, list[str]] = {}
        self._plugins_done = threading.Event()
        self._plugins_loader: int | None = None

    # -- operations ---------------------------------------------------------------------------------------------------

    def module_of(self, operation: str) -> str:
        """Name of the package that registers the backends of an operation."""
        return self.modules.get(operation, f'{self.namespace}.{operation}.backends')

    def who_registers(self) -> str:
        """Who is registering on this thread: 'package', 'plugin' or 'user'."""
        stack = self._loading.get(threading.get_ident())
        return stack[-1] if stack else 'user'

    def load(self, operation: str) -> bool:
        """Import what serves `operation`. False if that is still under way further up in this very thread (a backend module
        that calls a dispatched function while it loads): what is known so far then serves, provisionally.

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
            elif operation not in self.registries and not self.exists(operation):
                package = module.removesuffix('.backends')
                advice = with_conflict(f' A new operation needs BackendRegistry({operation!r}), or a package {package}.')
                raise unknown_name('operation', operation, self.operations(), self._declared_at(operation), advice) from None
        except Exception as error:
            self._remember(operation, module, error)
        with lock:
            self._loaded.add(operation)
            self._on_loaded(operation)
        return True

    def _declared_at(self, operation: str) -> str:
        place = self._place_of(operation)
        return f' (in @dispatch at {place})' if place else ''

    def _remember(self, operation: str, module: str, error: BaseException) -> None:
        text = error_text(error)
        self.errors[operation] = text
        logs.once(
            ('package', module, text),
            40,
            'operation %r: importing %s failed, what it registered before that is used: %s',
            operation,
            module,
            text,
            exc_info=True,
        )
        if self._is_strict(operation):
            raise error

    def exists(self, operation: str) -> bool:
        """Whether there is such an operation: registered, mapped, or a package of the namespace. Imports no operation."""
        if operation == '*' or operation in self.registries or operation in self.modules:
            return True
        if '.' in operation and operation in self.operations():
            return True
        parent, _, leaf = f'{self.namespace}.{operation}'.rpartition('.')
        if not leaf.isidentifier() or ('.' in operation and not self.exists(operation.rpartition('.')[0])):
            return False
        try:
            spec = importlib.util.find_spec(f'{parent}.{leaf}')
            # `kda.chunk` is a file of operation `kda`, beside its function `kda.chunk_kda`
            return spec is not None and ('.' not in operation or spec.submodule_search_locations is not None)
        except (ImportError, ValueError, AttributeError):
            return False

    def operations(self) -> list[str]:
        """Every operation there is, loaded or not."""
        return sorted({*self.modules, *self.registries, *self._packages()} - {'*'})

    def _packages(self) -> Iterator[str]:
        try:
            spec = importlib.util.find_spec(self.namespace)
        except (ImportError, ValueError):
            spec = None
        for path in (spec and spec.submodule_search_locations) or ():
            yield from _operations_in(Path(path))

    def load_all(self) -> None:
        """Load every operation there is, to answer a question about a name that no loaded one knows."""
        if self._loading.get(threading.get_ident()):
            return
        for operation in self.operations():
            self.load(operation)

    # -- plugins ------------------------------------------------------------------------------------------------------

    def load_plugins(self) -> tuple[Plugin, ...]:
        """Every plugin that was found, loaded if that has not happened yet."""
        self._load_plugins()
        return self.plugins

    def _load_plugins(self) -> bool:
        if self._plugins_done.is_set():
            return True
        me = threading.get_ident()
        if self._loading.get(me):
            return False
        with lock:
            if self._plugins_loader is None and not self._plugins_done.is_set():
                self._plugins_loader = me
        if self._plugins_loader != me:
            return self._plugins_done.wait(_PLUGIN_PATIENCE_SECONDS)
        try:
            with self._registering('plugin'):
                self.plugins = (*self._entry_points(), *self._plugin_modules())
            self._plugins_done.set()
        finally:
            self._plugins_loader = None
        return True

    def _entry_points(self) -> Iterator[Plugin]:
        for point in importlib.metadata.entry_points(group=self.group):
            version = _version_of(point)
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
            register = found if not hasattr(found, 'register') else found.register
            if not callable(register):
                raise AttributeError(f'{found!r} has no function register(registries)')
            register(self.registries)
        except Exception as error:
            logs.logger.warning(
                'plugin %s (%s) failed, what it registered before that is used: %s', name, source, error, exc_info=True
            )
            return f'{type(error).__name__}: {error}'
        return None

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _registering(self, who: str) -> _Registering:
        return _Registering(self._loading, who)

    def is_loading(self) -> bool:
        """Whether this thread is inside a load."""
        return bool(self._loading.get(threading.get_ident()))

    def retry(self) -> None:
        """Try again what failed to load."""
        with lock:
            self._loaded -= set(self.errors)
            self.errors.clear()

    def forget(self) -> None:
        """As if nothing had been loaded by a plugin; packages stay imported."""
        with lock:
            self._loaded.clear()
            self.errors.clear()
            self.plugins = ()
            self._plugins_done.clear()

    def after_fork_in_child(self) -> None:
        """Other threads do not exist in the child. What they were loading is half done and their import locks would never
        be released: forget both, so that the child's next call loads it itself."""
        others = {thread: stack for thread, stack in self._loading.items() if thread != threading.get_ident() and stack}
        for thread in others:
            del self._loading[thread]
        if not self._plugins_done.is_set():
            # another thread may have been holding its lock
            self._plugins_done = threading.Event()
        if self._plugins_loader is not None and self._plugins_loader != threading.get_ident():
            self._plugins_loader = None
        if others:
            forget_unfinished_imports()


def _operations_in(folder: Path, prefix: str = '') -> Iterator[str]:
    """The packages in a folder, and of those inside them the ones that have backends. Reads folders and imports nothing."""
    for info in pkgutil.iter_modules([str(folder)]):
        if not info.ispkg or info.name == 'backends':
            continue
        inside = folder / info.name
        if not prefix or (inside / 'backends').is_dir():
            yield f'{prefix}{info.name}'
        yield from _operations_in(inside, f'{prefix}{info.name}.')


def _version_of(point: importlib.metadata.EntryPoint) -> str | None:
    try:
        return point.dist.version if point.dist is not None else None
    except Exception:
        # a distribution with broken metadata; its plugin may work all the same
        return None


class _Registering:
    """Marks what is registered on this thread meanwhile as coming from a package or a plugin."""

    def __init__(self, loading: dict[int, list[str]], who: str) -> None:
        self._loading, self._who = loading, who

    def __enter__(self) -> None:
        self._loading.setdefault(threading.get_ident(), []).append(self._who)

    def __exit__(self, *_: object) -> None:
        stack = self._loading[threading.get_ident()]
        stack.pop()
        if not stack:
            del self._loading[threading.get_ident()]


def in_forked_children(clean_up: Callable[[], None]) -> None:
    """Have `clean_up` called in forked children."""
    _clean_ups.append(clean_up)


_clean_ups: list[Callable[[], None]] = []


def _clean_up_child() -> None:
    for clean_up in _clean_ups:
        clean_up()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_clean_up_child)
