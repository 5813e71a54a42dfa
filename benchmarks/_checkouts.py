"""Another checkout of this repository beside this one, to compare both within the same rounds.

Both packages are named `fla`, so `Checkout` swaps their modules in `sys.modules`. A checkout may have the older layout,
where `fla.backends` is `fla.ops.backends`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from _results import ROOT

HERE = Path(__file__).resolve().parent


def door_of(root: Path) -> str:
    """Returns the import name of the framework in a checkout: 'fla.backends' or, in older ones, 'fla.ops.backends'.

    Raises:
        ValueError: if `root` has neither.
    """
    for name in ('fla.backends', 'fla.ops.backends'):
        if root.joinpath(*name.split('.'), '__init__.py').is_file():
            return name
    raise ValueError(f'--beside {root} is not a checkout of this repository: it has no fla/backends')


class Checkout:
    """A checkout's `fla` and the given benchmark modules on top of it, loaded into this process.

    Args:
        root: folder of the checkout, which has the folder `fla`.
        scripts: modules of `benchmarks/` that import `fla`; each checkout gets its own copy of them.
    """

    def __init__(self, root: Path, *scripts: str) -> None:
        self.root, self.door, self.scripts = root.resolve(), door_of(root), scripts
        self.modules: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which `import fla` finds this checkout, also for functions that import when they are first called."""
        others = self._take_modules()
        sys.modules.update(self.modules)
        sys.path.insert(0, str(self.root))
        try:
            yield
        finally:
            sys.path.remove(str(self.root))
            self.modules = self._take_modules()
            sys.modules.update(others)

    def load(self, script: str) -> ModuleType:
        """Imports one of the scripts, with `fla.backends` as the name of the framework in either layout."""
        with self.active():
            sys.modules.setdefault('fla.backends', importlib.import_module(self.door))
            found = Path(str(sys.modules['fla'].__file__)).resolve()
            if found.parents[1] != self.root:
                raise ImportError(f'`fla` comes from {found.parents[1]}, not from {self.root}')
            return importlib.import_module(script)

    def _take_modules(self) -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name in self.scripts or name.split('.')[0] == 'fla']
        return {name: sys.modules.pop(name) for name in names}


def environment_of(root: Path) -> dict[str, str]:
    """Returns the environment of a process that imports `fla` from `root`: this process's paths, no FLA_* variables."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith('FLA_')}
    paths = [str(HERE), str(root.resolve()), *filter(None, sys.path)]
    return {**variables, 'PYTHONPATH': os.pathsep.join(paths)}


def alternate_results(script: str, arguments: Sequence[str], other: Path, turns: int) -> tuple[list[Any], list[Any]]:
    """Runs a script of `benchmarks/` in fresh processes, alternately with this checkout and the other; returns their JSON.

    Raises:
        RuntimeError: with the process's errors, if one fails.
    """
    results: dict[Path, list[Any]] = {ROOT: [], other: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'result.json'
        for turn in range(turns):
            for root in (ROOT, other) if turn % 2 else (other, ROOT):
                start = f'import sys, runpy, {door_of(root)} as door; sys.modules["fla.backends"] = door; '
                start += f'sys.argv[:] = {[script, "--json", str(path), *arguments]!r}; '
                code = start + f'runpy.run_path({str(HERE / script)!r}, run_name="__main__")'
                run = subprocess.run(
                    [sys.executable, '-c', code], env=environment_of(root), capture_output=True, text=True, check=False
                )
                if run.returncode:
                    raise RuntimeError(f'{script} failed with the `fla` of {root}:\n{run.stderr}')
                results[root].append(json.loads(path.read_text()))
    return results[ROOT], results[other]


def spread(values: Sequence[float]) -> Mapping[str, float]:
    """Returns the median, the 10th and the 90th percentile."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    found = {'p10': ordered[tenth], 'median': statistics.median(ordered), 'p90': ordered[-1 - tenth]}
    return {name: round(value, 4) for name, value in found.items()}
