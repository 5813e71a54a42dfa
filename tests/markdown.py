"""Runs the examples of a Markdown file: every ```python block, in order, in one module.

A block ```text output directly after an example is compared with what the example prints. An example that needs an optional
package names it: ```python needs transformers>=5.24. An example that cannot run gives the reason: ```python notest: REASON.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from fla.backends import default_dispatcher, thaw_dispatch

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(r'^```(.*)$')


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after the backticks, the text, and the lines on which the text begins and the block ends."""

    info: str
    text: str
    line: int
    end: int


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks of a file, in order."""
    found: list[Block] = []
    info, start, lines = None, 0, markdown.splitlines()
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if info is None:
            info, start = fence[1].strip(), number + 1
        else:
            found.append(Block(info, '\n'.join(lines[start - 1 : number - 1]), start, number))
            info = None
    assert info is None, f'the block that begins on line {start - 1} is not closed'
    return found


@contextlib.contextmanager
def _fresh_process() -> Iterator[None]:
    """Environment, dispatch and Dynamo as in a new process; restored afterwards."""
    before, paths = dict(os.environ), list(sys.path)
    for name in [name for name in os.environ if name.startswith('FLA_')]:
        del os.environ[name]
    default_dispatcher().reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        yield
    finally:
        thaw_dispatch()
        os.environ.clear()
        os.environ.update(before)
        sys.path[:] = paths
        default_dispatcher().reset()
        torch._dynamo.reset()


def _is_installed(requirement: str) -> bool:
    needed = Requirement(requirement)
    try:
        return needed.specifier.contains(metadata.version(needed.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def run(path: str) -> int:
    """Run the examples of a file, which is named relative to the root. Returns how many ran."""
    every = blocks((ROOT / path).read_text(encoding='utf-8'))
    module = types.ModuleType(re.sub(r'\W', '_', path))
    sys.modules[module.__name__] = module
    count = 0
    with _fresh_process():
        for place, block in enumerate(every):
            if block.info.split(' ')[0] != 'python':
                continue
            if block.info != 'python':
                known = re.fullmatch(r'python (?:notest: \S.*|needs (\S+))', block.info)
                assert known, f'{path}:{block.line - 1}: {block.info!r} is neither `notest: REASON` nor `needs PACKAGE`'
                if known[1] is None or not _is_installed(known[1]):
                    continue
            printed = io.StringIO()
            # a relative name, so that what the examples print is the same on every machine
            code = compile('\n' * (block.line - 1) + block.text + '\n', path, 'exec')
            with contextlib.redirect_stdout(printed):
                exec(code, vars(module))
            count += 1
            after = every[place + 1] if place + 1 < len(every) else None
            if after is not None and after.info == 'text output':
                got = '\n'.join(line.rstrip() for line in printed.getvalue().strip('\n').splitlines())
                assert got == after.text, f'{path}:{after.line}: it prints\n{got}'
    return count
