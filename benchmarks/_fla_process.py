"""Runs a benchmark script on flash-linear-attention, in a separate process: both packages are imported as `fla`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FLA = 'flash-linear-attention'


def version_of(folder: Path) -> str:
    """Returns the version of the fla-core unpacked in `folder`, or 'unknown'."""
    found = [path.name.removeprefix('fla_core-').removesuffix('.dist-info') for path in folder.glob('fla_core-*.dist-info')]
    return found[0] if found else 'unknown'


def fla_rows(script: str, arguments: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows that `script --lines` prints with the `fla` in `folder`. Exits if the process fails.

    FLA runs its own Triton kernels unless FLA_DISABLE_BACKEND_DISPATCH is set: its dispatch would otherwise choose an
    installed vendor's package.
    """
    environment = {'FLA_DISABLE_BACKEND_DISPATCH': '1', **os.environ, 'PYTHONPATH': _path_with(folder)}
    command = [sys.executable, script, '--lines', *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith('{'):
                yield json.loads(line)
    if process.returncode:
        sys.exit(f'{FLA} ended with status {process.returncode}; its rows are not complete')


def _path_with(fla: Path) -> str:
    """PYTHONPATH with FLA's folder first and no other folder with a package `fla`, which would supply missing modules."""
    others = [path for path in os.environ.get('PYTHONPATH', '').split(os.pathsep) if path and not Path(path, 'fla').exists()]
    return os.pathsep.join([str(fla), *others])


def only_backend(backend: str, op: str, foreign: Sequence[str] = (FLA,)) -> contextlib.AbstractContextManager[Any]:
    """Context in which `backend` serves `op` or the call raises; does nothing for names in `foreign`, which run without
    this package's dispatch."""
    if backend in foreign:
        return contextlib.nullcontext()
    from fla.backends import use_backend

    return use_backend(backend, op=op)
