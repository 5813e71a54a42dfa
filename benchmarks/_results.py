"""Shared by every benchmark: the command line, the description of the machine, and the JSON file of results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from _fla_process import FLA, version_of

ROOT = Path(__file__).resolve().parents[1]
# must be equal in all parts of a continued run
_SAME = ('benchmark', 'card', 'versions', 'cores', 'command')


def parser(description: str, *, peer: bool = False) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark: --json and --quick.

    Args:
        description: the benchmark's module docstring.
        peer: also add --fla and --lines, for benchmarks that measure flash-linear-attention in a separate process.
    """
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument('--json', type=Path, metavar='PATH', help='also write the results to this file')
    options.add_argument('--quick', action='store_true', help='check that the script runs; its numbers mean nothing')
    if peer:
        options.add_argument('--fla', type=Path, metavar='FOLDER', help='also measure the fla-core unpacked in this folder')
        options.add_argument('--lines', action='store_true', help='print one JSON object a line (used for the FLA process)')
    return options


def has_gpu() -> bool:
    """Whether a GPU is available; prints a line where none is."""
    available = torch.cuda.is_available()
    if not available:
        print('This benchmark needs a GPU: nothing is measured.')
    return available


def print_lines(rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints each row as one line of JSON."""
    for row in rows:
        print(json.dumps(row), flush=True)


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def without_json(arguments: Sequence[str]) -> Iterator[str]:
    """Yields a command line's arguments without `--json` and its path, which differ between machines."""
    skipped = False
    for word in arguments:
        if not skipped and not word.startswith('--json'):
            yield word
        skipped = word == '--json'


def error_line(error: Exception) -> str:
    """Returns the error in one line of at most 300 characters, with paths relative to the repository."""
    text = f'{type(error).__name__}: {error}'.replace(f'{ROOT}{os.sep}', '')
    return ' '.join(text.split())[:300]


def relative_rms(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative RMS error of `found`; infinity where `exact` is zero everywhere."""
    found, exact = found.detach().double(), exact.detach().double()
    size = float(exact.norm())
    return float((found - exact).norm()) / size if size else float('inf')


def machine(cpu: bool = False, packages: Sequence[str] = (), fla: Path | None = None) -> dict[str, Any]:
    """Returns the card, the CPU cores and the versions of torch, Triton, Python and installed `packages`.

    Args:
        cpu: the run uses no GPU.
        packages: names of distributions; those that are not installed are left out.
        fla: folder of an unpacked fla-core, whose version is added.
    """
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    versions = {'torch': torch.__version__, 'triton': triton_version, 'python': platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if fla:
        versions[FLA] = version_of(fla)
    return {'card': 'CPU' if cpu else torch.cuda.get_device_name(), 'versions': versions, 'cores': cores()}


def now() -> str:
    """Current UTC time in ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec='seconds')


def command(benchmark: str, options: argparse.Namespace, *names: str) -> str:
    """Returns the command line that repeats a run with the named options, without paths of this machine."""
    words = ['python', f'benchmarks/{benchmark}.py']
    for name in names:
        words += [word for value in getattr(options, name) or () for word in (f'--{name}', shlex.quote(str(value)))]
    words += ['--fla fla-core'] if getattr(options, 'fla', None) else []
    return ' '.join([*words, *(['--quick'] if getattr(options, 'quick', False) else [])])


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Replaces the file at `path` in one step, so that an interrupted run leaves a complete file; does nothing for None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f'{path.name}.part')
        part.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
        part.replace(path)


class ResultFile:
    """A result file that is valid JSON after each row, so that a run may be interrupted.

    Args:
        path: of the file; None only prints the rows.
        benchmark: name of the benchmark.
        more: further fields, written before the rows.
    """

    def __init__(self, path: Path | None, benchmark: str, **more: Any) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.fields = {'benchmark': benchmark, **more, 'complete': False, 'rows': self.rows}

    def add(self, row: dict[str, Any], replace: bool = False) -> None:
        """Appends a row, or replaces the last one; also prints it as one line of JSON."""
        if replace:
            self.rows.pop()
        self.rows.append(row)
        print_lines([row])
        write_json(self.path, self.fields)

    def resume(self) -> None:
        """Starts with the rows of the interrupted run in the file.

        The earlier run's own fields (start time, copy bandwidth, a note) and its number of rows are stored under `earlier`.
        Exits if the file does not exist or is complete, or if its card, versions, cores or command differ.
        """
        if self.path is None or not self.path.exists():
            sys.exit('--continue resumes the run in --json, but there is no such file')
        found = json.loads(self.path.read_text())
        if found.get('complete', True):
            sys.exit(f'{self.path.name} is complete: there is nothing to resume')
        for name in _SAME:
            if found.get(name) != self.fields.get(name):
                here, there = self.fields.get(name), found.get(name)
                sys.exit(f'{name} is {here} here but {there} in {self.path.name}: parts of one file must agree')
        earlier = found.get('earlier', [])
        own = {name: value for name, value in found.items() if name not in (*_SAME, 'complete', 'earlier', 'rows')}
        counted = len(found['rows']) - sum(part['rows'] for part in earlier)
        self.rows += found['rows']
        self.fields['earlier'] = [*earlier, {**own, 'rows': counted}]
        self.fields['rows'] = self.fields.pop('rows')  # rows come last in the file

    def complete(self) -> None:
        """Marks the file as complete."""
        self.fields['complete'] = True
        write_json(self.path, self.fields)
