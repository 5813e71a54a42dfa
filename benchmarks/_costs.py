"""One-off costs for `dispatch_overhead.py`: imports and first plans in fresh processes; and the cost of primitives."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _cases import OUT, wide_function
from _checkouts import door_of, environment_of
from _results import ROOT
from _timing import Burst
from torch import Tensor

# An installer compiles the sources, so bytecode is used here too; in a separate folder, which leaves the tree clean.
PREAMBLE = """
import sys, time, torch
sys.dont_write_bytecode, sys.pycache_prefix = False, {cache!r}
"""

IMPORT = """
def touched(*_): raise RuntimeError('an accelerator was touched')
torch._C._cuda_getDeviceCount = touched
before = set(sys.modules)
start = time.process_time()
import {module}
print((time.process_time() - start) * 1e3, len(set(sys.modules) - before), 'triton' in sys.modules)
"""

# Prints a line per function: milliseconds of its first call beyond its second, and the modules that the first call imported.
FIRST_CALLS = """
import {door} as door
sys.modules['fla.backends'] = door
from _cases import CHUNK, accepts, dispatched, toggled
functions = [dispatched(toggled(accepts, accepts, accepts)) for _ in range(4)]
with torch.no_grad():
    for function in functions:
        run, before = CHUNK.burst(function), set(sys.modules)
        start = time.process_time(); served = run(1); first = time.process_time() - start
        start = time.process_time(); run(1); second = time.process_time() - start
        assert int(served) == 1, served
        print((first - second) * 1e3, len(set(sys.modules) - before))
"""

FIRST_PLAN, LATER_PLAN = 'first plan of a process, three backends', 'first plan of a later function'
# in milliseconds of CPU time
CEILINGS = {
    'import fla, after torch': 50.0,
    'import fla.backends, after torch': 50.0,
    FIRST_PLAN: 2.0,
    LATER_PLAN: 2.0,
}


def in_fresh_process(script: str, root: Path) -> list[list[str]]:
    """Runs a script with the `fla` of `root` and without FLA_* variables; returns the words of each line it prints."""
    done = subprocess.run(
        [sys.executable, '-c', script], env=environment_of(root), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f'the measured process failed:\n{done.stderr}')
    return [line.split() for line in done.stdout.splitlines()]


def one_off_costs(repeats: int, roots: Sequence[Path] = (ROOT,)) -> list[list[dict[str, Any]]]:
    """Returns rows of one-off costs for each checkout, in milliseconds of CPU time, as the files are in the page cache.

    The checkouts take turns. Their first run makes the bytecode and does not count. Importing must not touch an accelerator.
    """
    with tempfile.TemporaryDirectory() as cache:
        runs = [[dict(_one_run(root, cache)) for root in roots] for _ in range(repeats + 1)][1:]
    return [list(_rows([run[place] for run in runs])) for place in range(len(roots))]


def _one_run(root: Path, cache: str) -> Iterator[tuple[str, list[list[str]]]]:
    preamble, door = PREAMBLE.format(cache=cache), door_of(root)
    for name, module in (('fla', 'fla'), ('fla.backends', door), ('fla.ops.kda', 'fla.ops.kda')):
        yield f'import {name}, after torch', in_fresh_process(preamble + IMPORT.format(module=module), root)
    first, *later = in_fresh_process(preamble + FIRST_CALLS.format(door=door), root)
    yield FIRST_PLAN, [first]
    yield LATER_PLAN, later


def _rows(runs: list[dict[str, list[list[str]]]]) -> Iterator[dict[str, Any]]:
    for name in runs[0]:
        lines = [line for run in runs for line in run[name]]
        ms, ceiling = [float(line[0]) for line in lines], CEILINGS.get(name)
        minimum, median = round(min(ms), 3), round(statistics.median(ms), 3)
        row = {'name': name, 'ms_min': minimum, 'ms_median': median, 'ceiling_ms': ceiling}
        row |= {'met': None if ceiling is None else minimum <= ceiling, 'new_modules': max(int(line[1]) for line in lines)}
        yield row | ({'triton': lines[0][2] == 'True'} if len(lines[0]) > 2 else {})


STATEMENTS = [
    'type(q) is Tensor',
    'is_dynamo_compiling()',
    'torch.compiler.is_compiling()',
    'is_grad_enabled()',
    'torch.is_grad_enabled()',
    'profiler._is_profiler_enabled',
    "env.get(b'UNSET')",
    "env.get(b'PATH') == b'0'",
    "os.environ.get('UNSET')",
    'q.dtype',
    'q.dtype is bfloat16',
    'q.dtype not in floating',
    'q.is_cuda',
    'q.requires_grad',
    'q.get_device()',
    'q.device',
    'q.device != device',
    'q.device.type',
    'q.ndim',
    'q.shape',
    'q.shape[-1]',
    'a, b, c, d = q.shape',
    'q.shape != shape',
    'q.shape != (1, 2, 3, 4)',
    'q.shape[:2]',
    'function()',
    'method(q, k, False, False, False)',
    'result[0] is True',
    'wide(q, k, q, k, q, None, None, False, True, False, False, False, False, None, False, None)',
]


def primitive_bursts() -> dict[str, Burst]:
    """Returns a burst of each primitive in a loop; `pass` is the empty loop, which is subtracted from the others."""

    class Backend:
        def verify(self, q, v, a, b, c):
            return None

    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    namespace = {
        'torch': torch,
        'os': os,
        'repeat': itertools.repeat,
        'env': os.environ._data,
        'Tensor': Tensor,
        'q': q,
        'k': k,
        'shape': q.shape,
        'device': q.device,
        'bfloat16': torch.bfloat16,
        'result': (True, None),
        'floating': (torch.bfloat16, torch.float16, torch.float32),
        'profiler': torch.autograd.profiler,
        'is_grad_enabled': torch.is_grad_enabled,
        'is_dynamo_compiling': torch.compiler.is_dynamo_compiling,
        'function': lambda: None,
        'method': Backend().verify,
        'wide': wide_function(OUT[0]),
    }
    bursts = {}
    for statement in ('pass', *STATEMENTS):
        exec(f'def burst(n):\n    for _ in repeat(None, n):\n        {statement}', namespace)
        bursts[statement] = namespace.pop('burst')
    return bursts
