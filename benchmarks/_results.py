"""What every benchmark of kernels writes down: the machine, the command, and a row at a time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from _fla_process import FLA, version_of
from _machine import cores

_ROOT = Path(__file__).resolve().parents[1]
# what is one for all parts of a run
_SAME = ('benchmark', 'card', 'versions', 'cores', 'command')


def said(error: Exception) -> str:
    """In one line, without this machine's folders."""
    text = f'{type(error).__name__}: {error}'.replace(f'{_ROOT}{os.sep}', '')
    return ' '.join(text.split())[:300]


def machine(dry: bool = False, packages: Sequence[str] = (), fla: Path | None = None) -> dict[str, Any]:
    """The card and what runs on it: of these distributions what is installed, and flash-linear-attention in its folder."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    versions = {'torch': torch.__version__, 'triton': version, 'python': platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if fla:
        versions[FLA] = version_of(fla)
    return {
        'card': 'CPU' if dry else torch.cuda.get_device_name(),
        'versions': versions,
        'cores': cores(),
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec='seconds')


def command(benchmark: str, options: argparse.Namespace, *names: str) -> str:
    """How to repeat a run with the options of these names, without this machine's folders."""
    words = ['python', f'benchmarks/{benchmark}.py']
    for name in names:
        words += [word for value in getattr(options, name) or () for word in (f'--{name}', shlex.quote(str(value)))]
    words += ['--fla fla-core'] if getattr(options, 'fla', None) else []
    return ' '.join([*words, *(['--dry'] if getattr(options, 'dry', False) else [])])


class ResultFile:
    """A file that is whole after each row, so that a run may be stopped.

    Args:
        path: of the file; None to print alone.
        benchmark: its name.
        more: what else is known before the first row.
    """

    def __init__(self, path: Path | None, benchmark: str, **more: Any) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.known = {'benchmark': benchmark, **more, 'complete': False, 'rows': self.rows}

    def add(self, row: dict[str, Any], instead: bool = False) -> None:
        """A row more, or instead of the last one; printed too, as a JSON object a line."""
        if instead:
            self.rows.pop()
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self._write()

    def go_on(self) -> None:
        """Begin with the rows of a run that was stopped. What it said of itself alone stays under `earlier`: when it began,
        how quick a copy was, a note, and how many rows it has.

        Exits if there is none, if it is complete, or had another card, other packages, cores or another command.
        """
        if self.path is None or not self.path.exists():
            sys.exit('--continue goes on with the run in --json, and there is no such file')
        found = json.loads(self.path.read_text())
        if found.get('complete', True):
            sys.exit(f'{self.path.name} is complete: there is nothing to go on with')
        for name in _SAME:
            if found.get(name) != self.known.get(name):
                here, there = self.known.get(name), found.get(name)
                sys.exit(f'{name}: {here} here, {there} in {self.path.name}, and one file is one run')
        earlier = found.get('earlier', [])
        own = {name: one for name, one in found.items() if name not in (*_SAME, 'complete', 'earlier', 'rows')}
        counted = len(found['rows']) - sum(part['rows'] for part in earlier)
        self.rows += found['rows']
        self.known['earlier'] = [*earlier, {**own, 'rows': counted}]
        self.known['rows'] = self.known.pop('rows')  # behind it

    def complete(self) -> None:
        """That was the last row."""
        self.known['complete'] = True
        self._write()

    def _write(self) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # a run may be stopped while it writes, too
            beside = self.path.with_name(f'{self.path.name}.part')
            beside.write_text(json.dumps(self.known, indent=1) + '\n')
            beside.replace(self.path)
