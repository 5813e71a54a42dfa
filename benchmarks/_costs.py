"""Beside the calls of `dispatch_overhead.py`: import and first plan in fresh processes, and what primitives cost."""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _cases import OUT, wide_function
from _timing import Burst
from torch import Tensor

HERE = Path(__file__).resolve().parent

# As for a user, whose installer has compiled the sources: with bytecode, kept apart so that none is left in the tree.
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

# Each line: the first call of a function over its second, and how many modules the first call imported.
FIRST_CALLS = """
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


def in_fresh_processes(script: str, repeats: int) -> list[list[list[str]]]:
    """The words of each line it prints, of each run but the first, which makes the bytecode."""
    with tempfile.TemporaryDirectory() as cache:
        runs = [in_fresh_process(PREAMBLE.format(cache=cache) + script) for _ in range(repeats + 1)]
    return runs[1:]


def in_fresh_process(script: str) -> list[list[str]]:
    """The process finds the modules this one does, and none of its switches."""
    env = {name: value for name, value in os.environ.items() if not name.startswith('FLA_')}
    env['PYTHONPATH'] = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, '-c', script], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f'the measured process failed:\n{done.stderr}')
    return [line.split() for line in done.stdout.splitlines()]


def one_off_costs(repeats: int, skipped: list[str]) -> list[dict[str, Any]]:
    """Milliseconds of CPU: with the files in memory a user waits no longer. Importing must not touch an accelerator."""
    rows = []

    def row(name: str, ms: list[float], ceiling: float | None, **facts: Any) -> None:
        least, median = round(min(ms), 3), round(statistics.median(ms), 3)
        met = None if ceiling is None else least <= ceiling
        rows.append({'name': name, 'ms_min': least, 'ms_median': median, 'ceiling_ms': ceiling, 'met': met, **facts})

    for module, ceiling in (('fla', 50.0), ('fla.backends', 50.0), ('fla.ops.kda', None)):
        if not is_there(module):
            skipped.append(f'import {module}: not there yet')
            continue
        runs = [lines[0] for lines in in_fresh_processes(IMPORT.format(module=module), repeats)]
        name = f'import {module}, after torch'
        row(name, [float(ms) for ms, *_ in runs], ceiling, new_modules=int(runs[0][1]), triton=runs[0][2] == 'True')

    runs = in_fresh_processes(FIRST_CALLS, repeats)
    first, later = [run[0] for run in runs], [line for run in runs for line in run[1:]]
    for name, lines in (('first plan of a process, three backends', first), ('first plan of a later function', later)):
        row(name, [float(ms) for ms, _ in lines], 2.0, new_modules=max(int(n) for _, n in lines))
    return rows


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


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
    """Each primitive alone in a loop; `pass` is the loop itself, to be subtracted from the others."""

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
