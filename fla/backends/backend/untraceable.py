"""Finds what a verifier must not do if compiled code is to call it, without running it.

Reads the bytecode, which needs no source and costs microseconds. Compiled code skips a backend with such a verifier (with
one warning), and the lint reports it.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType
from typing import Any

# names loaded by a verifier → (problem, remedy)
_PROBLEMS = {
    ('environ', 'getenv'): (
        'reads the environment: a change is not seen by compiled callers',
        'declare env_var or extra_env on the backend',
    ),
    ('data_ptr',): (
        'reads data_ptr: a trace sees a wrong constant',
        'test stride and shape; align inside the implementation',
    ),
    ('storage_offset',): ('reads storage_offset: it cannot be traced', 'test stride and shape'),
    ('is_inference_mode_enabled', 'is_inference'): (
        'asks for inference mode: it cannot be traced',
        'use `not torch.is_grad_enabled()`',
    ),
    ('get_float32_matmul_precision',): (
        'reads the matmul precision: it cannot be traced',
        'use torch.backends.cuda.matmul.allow_tf32',
    ),
    ('getLogger', 'logger', 'logging'): ('logs: it cannot be traced', 'return the reason instead'),
    ('warn',): ('warns: it cannot be traced', 'return the reason instead'),
    ('print',): ('prints: it cannot be traced', 'return the reason instead'),
    ('perf_counter', 'monotonic', 'time'): ('reads a clock: it cannot be traced', 'decide on the arguments alone'),
}
COMPILED = {name: found for names, found in _PROBLEMS.items() for name in names}

_LOADS = ('LOAD_GLOBAL', 'LOAD_NAME', 'LOAD_ATTR', 'LOAD_METHOD', 'LOAD_DEREF')


def codes_of(function: Callable[..., Any]) -> list[CodeType]:
    """Returns the code of a function and of the functions defined inside it."""
    code = getattr(getattr(function, '__func__', function), '__code__', None)
    found = [code] if code is not None else []
    for one in found:
        found += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    return found


def findings(function: Callable[..., Any]) -> list[str]:
    """Returns what makes a verifier unfit for compiled code, as 'file:line: problem; remedy'."""
    found = []
    for code in codes_of(function):
        if not COMPILED.keys() & {*code.co_names, *code.co_freevars}:
            continue
        line = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            if instruction.starts_line:
                # a line number before Python 3.13, a flag beside `line_number` since
                line = getattr(instruction, 'line_number', instruction.starts_line)
            if instruction.opname in _LOADS and instruction.argval in COMPILED:
                problem, remedy = COMPILED[instruction.argval]
                found.append(f'{code.co_filename}:{line}: {problem}; {remedy}')
    return found
