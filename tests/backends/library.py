"""A package outside fla with its own operations, written into a folder for one test.

Its functions return `'default'` or the name of the backend that ran.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType
from typing import Any

_numbers = itertools.count()


def backend_source(name: str, registry: str, body: str = '', register: bool = True) -> str:
    """Returns source that defines a backend, whose method `f` returns its name, and registers it in `registry`."""
    lines = [f'class Backend_{name}(BaseBackend):', f'    backend_type = {name!r}']
    lines += indent(dedent(body), '    ').splitlines()
    if 'def f(' not in body:
        lines += ['    def f(self, x=None, flag=False):', f'        return {name!r}']
    return '\n'.join([*lines, f'{registry}.register(Backend_{name}())' if register else '', ''])


class Library:
    """`library.add('op')` writes an operation, `library.f('op')` imports its function.

    Args:
        root: folder on `sys.path`.
        options: source of further arguments of its `Dispatcher`.
    """

    def __init__(self, root: Path, options: str = '') -> None:
        self.root = root
        self.name = f'madeup{next(_numbers)}'
        self.prefix = self.name.upper()
        made = f"Dispatcher('{self.name}.ops', '{self.prefix}', {options})"
        self.write('__init__.py', f'from fla.backends import Dispatcher\n\ndispatcher = {made}\n')
        self.write('ops/__init__.py', '')

    def write(self, path: str, source: str) -> Path:
        """Writes a file of the package."""
        file = self.root / self.name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(source), encoding='utf-8')
        importlib.invalidate_caches()
        return file

    def add(self, operation: str, backends: str | None = None, dispatched_as: str | None = None) -> None:
        """Writes an operation with a function `f(x, flag)`; `backends` is the source of its backends package."""
        folder = 'ops/' + operation.replace('.', '/')
        for part in range(1, operation.count('.') + 1):
            self.write('ops/' + '/'.join(operation.split('.')[:part]) + '/__init__.py', '')
        self.write(
            f'{folder}/__init__.py',
            f"""
            from {self.name} import dispatcher
            from fla.backends import dispatch

            @dispatch({dispatched_as or operation!r}, dispatcher=dispatcher)
            def f(x=None, flag=False):
                return 'default'
            """,
        )
        if backends is not None:
            self.backends(operation, backends)

    def backends(self, operation: str, source: str) -> Path:
        """Writes the backends package of an operation. Its source can use `registry`, `BaseBackend` and `LOADS`, a list that
        outlives a failed import."""
        head = f"""
            import sys
            from {self.name} import dispatcher
            from fla.backends import BaseBackend
            registry = dispatcher.registry({operation!r})
            LOADS = dispatcher.__dict__.setdefault('loads_of_{operation.replace('.', '_')}', [])
            LOADS.append(1)
        """
        folder = 'ops/' + operation.replace('.', '/')
        return self.write(f'{folder}/backends/__init__.py', dedent(head) + dedent(source))

    def module(self, name: str = '') -> ModuleType:
        """Imports a module of the package."""
        return importlib.import_module(f'{self.name}.{name}'.rstrip('.'))

    def f(self, operation: str) -> Any:
        """Returns the function of an operation."""
        return self.module(f'ops.{operation}').f

    @property
    def dispatcher(self) -> Any:
        return self.module().dispatcher

    def loads(self, operation: str) -> int:
        """Returns how often the backends package was executed."""
        return len(vars(self.dispatcher).get(f'loads_of_{operation.replace(".", "_")}', ()))

    def loaded(self, operation: str) -> bool:
        """Whether the backends package is imported."""
        return f'{self.name}.ops.{operation}.backends' in sys.modules

    def forget(self) -> None:
        """Removes the package's modules from `sys.modules`."""
        for name in [n for n in sys.modules if n == self.name or n.startswith(f'{self.name}.')]:
            del sys.modules[name]
