"""flash-linear-attention in a process of its own, because its import name is `fla` too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLA = 'flash-linear-attention'


def version_of(folder: Path) -> str:
    """Of the unpacked distribution; 'unknown' for a folder that says none."""
    found = [path.name.removeprefix('fla_core-').removesuffix('.dist-info') for path in folder.glob('fla_core-*.dist-info')]
    return found[0] if found else 'unknown'


def fla_rows(script: str, arguments: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """What the same script prints there, a JSON object a line, after `--lines`. FLA's own Triton kernels, unless
    the environment says otherwise: a vendor's package that is installed would serve in its name."""
    environment = {'FLA_DISABLE_BACKEND_DISPATCH': '1', **os.environ, 'PYTHONPATH': _path_with(folder)}
    again = [sys.executable, script, '--lines', *arguments]
    with subprocess.Popen(again, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith('{'):
                yield json.loads(line)
    if process.returncode:
        sys.exit(f'{FLA} ended with status {process.returncode}; its rows are not complete')


def _path_with(fla: Path) -> str:
    """PYTHONPATH with FLA's folder first and no other folder with a package `fla`: one would fill in what it lacks."""
    others = [path for path in os.environ.get('PYTHONPATH', '').split(os.pathsep) if path and not Path(path, 'fla').exists()]
    return os.pathsep.join([str(fla), *others])
