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
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fla.backends.core import logs
from fla.backends.core.errors import error_text, unknown_name
from fla.backends.core.locking import lock
from fla.utils.env import LIVE, live_key, text_of
from fla.utils.owners import with_conflict

if TYPE_CHECKING:
    from fla.backends.registry.registry import BackendRegistry
    from fla.backends.runtime.dispatcher import Dispatcher

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


class Registries:
    """What a plugin's `register(registries)` is given: `registries('kda')` or `registries['kda']` is a registry."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def __call__(self, operation: str) -> BackendRegistry:
        return self._dispatcher.registry(operation)

    __getitem__ = __call__


class Discovery:
    """What has been loaded for one dispatcher."""

    def __init__(self, dispatcher: Dispatcher, modules: dict[str, str], group: str) -> None:
        self.dispatcher, self.modules, self.group = dispatcher, modules, group
        self.errors: dict[str, str] = {}
        self.plugins: tuple[Plugin, ...] = ()
        self._loaded: set[str] = set()
        self._loading: dict[int, list[str]] = {}
        self._plugins_done = threading.Event()
        self._plugins_loader: int | None = None

    # -- operations ---------------------------------------------------------------------------------------------------

    def module_of(self, operation: str) -> str:
        """Name of the package that registers the backends of an operation."""
        return self.modules.get(operation, f'{self.dispatcher.namespace}.{operation}.backends')

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
            registry = self.dispatcher.registries.get(name)
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
            elif operation not in self.dispatcher.registries and not self.exists(operation):
                package = module.removesuffix('.backends')
                advice = with_conflict(f' A new operation needs BackendRegistry({operation!r}), or a package {package}.')
                raise unknown_name('operation', operation, self.operations(), self._declared_at(operation), advice) from None
        except Exception as error:
            self._remember(operation, module, error)
        with lock:
            self._loaded.add(operation)
            self.dispatcher.operation_loaded(operation)
        return True

    def _declared_at(self, operation: str) -> str:
        places = [e.place for e in self.dispatcher.entries() if e.operation == operation]
        return f' (in @dispatch at {places[0]})' if places else ''

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
        if self.dispatcher.is_strict(operation):
            raise error

    def exists(self, operation: str) -> bool:
        """Whether there is such an operation: registered, mapped, or a package of the namespace. Imports no operation."""
        if operation == '*' or operation in self.dispatcher.registries or operation in self.modules:
            return True
        if '.' in operation and operation in self.operations():
            return True
        parent, _, leaf = f'{self.dispatcher.namespace}.{operation}'.rpartition('.')
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
        return sorted({*self.modules, *self.dispatcher.registries, *self._packages()} - {'*'})

    def _packages(self) -> Iterator[str]:
        try:
            spec = importlib.util.find_spec(self.dispatcher.namespace)
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
        variable = f'{self.dispatcher.env_prefix}_PLUGIN_MODULES'
        for name in (text_of(LIVE.get(live_key(variable))) or '').split(','):
            if name := name.strip():
                error = self._call_plugin(name, variable, lambda name=name: importlib.import_module(name))
                version = getattr(sys.modules.get(name), '__version__', None)
                yield Plugin(name, variable, version, error)

    def _call_plugin(self, name: str, source: str, load: Any) -> str | None:
        try:
            found = load()
            register = found if not hasattr(found, 'register') else found.register
            if not callable(register):
                raise AttributeError(f'{found!r} has no function register(registries)')
            register(Registries(self.dispatcher))
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

    def variables_in_sources(self) -> set[str]:
        """Names of the form PREFIX_… in the source files of the namespace's top-level package, so that a toggle of an
        operation not loaded yet is no unknown variable."""
        pattern = re.compile(rf'\b{self.dispatcher.env_prefix}_[A-Z0-9_]+\b')
        top = self.dispatcher.namespace.split('.')[0]
        names: set[str] = set()
        for root in getattr(sys.modules.get(top), '__path__', ()):
            for file in Path(root).rglob('*.py'):
                try:
                    names.update(pattern.findall(file.read_text(encoding='utf-8')))
                except (OSError, UnicodeDecodeError):
                    continue
        return names

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
            _forget_unfinished_imports()


def _operations_in(folder: Path, prefix: str = '') -> Iterator[str]:
    """The packages in a folder, and of those inside them the ones that have backends. Reads folders and imports nothing."""
    for info in pkgutil.iter_modules([str(folder)]):
        if not info.ispkg or info.name == 'backends':
            continue
        inside = folder / info.name
        if not prefix or (inside / 'backends').is_dir():
            yield f'{prefix}{info.name}'
        yield from _operations_in(inside, f'{prefix}{info.name}.')


def import_whole(name: str) -> ModuleType | None:
    """Import a module; None while it is still being executed: further up in this thread, or by another thread that in turn
    waits for what this one is importing (Python detects that and lets one of the two go on)."""
    try:
        module = importlib.import_module(name)
    except RuntimeError as error:
        if type(error).__name__ == '_DeadlockError':
            return None
        raise
    return None if getattr(module.__spec__, '_initializing', False) else module


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


def _forget_unfinished_imports() -> None:
    """Drop modules whose import a thread that does not exist any more had begun, and their locks.

    The import system has no public way to say this; without it, importing such a module in the child waits for ever.
    """
    locks = getattr(importlib._bootstrap, '_module_locks', {})
    for name, reference in dict(locks).items():
        holder = reference()
        if holder is None or getattr(holder, 'owner', None) in (None, threading.get_ident()):
            continue
        locks.pop(name, None)
        # one that is still being looked for has a lock and no module yet
        if getattr(getattr(sys.modules.get(name), '__spec__', None), '_initializing', False):
            del sys.modules[name]


def in_forked_children(clean_up: Callable[[], None]) -> None:
    """Have `clean_up` called in forked children."""
    _clean_ups.append(clean_up)


_clean_ups: list[Callable[[], None]] = []


def _clean_up_child() -> None:
    for clean_up in _clean_ups:
        clean_up()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_clean_up_child)
