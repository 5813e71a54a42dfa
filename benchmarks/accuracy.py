"""Errors of the chunked delta rules in half precision against float64, of our kernels and, with --fla, of
flash-linear-attention's on the same inputs. Both run in Triton's interpreter, mended by `tests/triton_support`: no GPU is
needed, and none is used. A GPU sums products in another order, and its figures are others.

    python benchmarks/accuracy.py --json benchmarks/results/accuracy.json --fla folder/of/fla-core

FLA runs in a process of its own: put the folder that its distribution was unpacked into after --fla. `einops`, which it
imports, must be installed. `tests/ops/test_accuracy.py` holds our kernels to 1.1 times what FLA's rows say.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _delta_rule_inputs import NAMES, definition, inputs, relative
from _fla_process import FLA, fla_rows
from _results import ResultFile, command, machine

OPS = ('gated_delta_rule', 'kda')
DTYPES = {'bfloat16': torch.bfloat16, 'float16': torch.float16}
# of log decays of -0.8 a step in the mean, and at most 0
STRENGTHS = (0.01, 0.1, 1.0, 3.0, 5.0, 20.0)
SEEDS = (0, 1, 2)
BATCH, LENGTH, HEADS, DIM = 1, 192, 2, 128
ERRORS = ('o', 'state', *(f'd{name}' for name in NAMES))


def errors(op: str, dtype: torch.dtype, strength: float, seed: int) -> dict[str, float]:
    """Relative RMS of o, of the final state and of the gradients for a normal gradient of o, of the `fla` on the path."""
    if op == 'kda':
        from fla.ops.kda import chunk_kda as function
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    given = inputs(op, BATCH, LENGTH, HEADS, DIM, seed, dtype=dtype, strength=strength, device='cpu')
    do = torch.randn(given[2].shape, generator=torch.Generator().manual_seed(100 + seed)).to(dtype)
    found = []
    for run, wide in ((function, None), (definition, torch.float64)):
        leaves = [(x if wide is None else x.to(wide)).clone().requires_grad_() for x in given]
        o, state = run(*leaves) if wide else run(*leaves, output_final_state=True)
        found.append([o, state, *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    return {name: relative(*pair) for name, *pair in zip(ERRORS, *found, strict=True)}


def rows(backend: str, ops: list[str]) -> Iterator[dict[str, Any]]:
    for op in ops:
        for name, dtype in DTYPES.items():
            for strength in STRENGTHS:
                for seed in SEEDS:
                    row = {'op': op, 'dtype': name, 'strength': strength, 'seed': seed, 'backend': backend}
                    yield {**row, 'errors': errors(op, dtype, strength, seed)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='write the results there, after each row')
    parser.add_argument('--fla', type=Path, help='folder of an unpacked fla-core: measure it as well')
    parser.add_argument('--op', choices=OPS, action='append', help='only this operation')
    parser.add_argument('--lines', action='store_true', help='a JSON object a line: how the process for FLA answers')
    options = parser.parse_args(arguments)
    ops = options.op or list(OPS)
    interpret()
    if options.lines:
        for row in rows(FLA, ops):
            print(json.dumps(row), flush=True)
        return
    about = machine(dry=True, fla=options.fla)
    results = ResultFile(
        options.json,
        'accuracy',
        **about,
        command=command('accuracy', options, 'op'),
        shape=[BATCH, LENGTH, HEADS, DIM],
    )
    from fla.backends import use_backend

    with use_backend('default'):
        for row in rows('default', ops):
            results.add(row)
    if options.fla:
        for row in fla_rows(__file__, [f'--op={op}' for op in options.op or ()], options.fla):
            results.add(row)
    results.complete()


def interpret() -> None:
    """Kernels that are imported from here on run in the interpreter, and only the first `fla` on the path is found."""
    os.environ['TRITON_INTERPRET'] = '1'
    torch.set_num_threads(1)
    # by its place: in FLA's process nothing may be imported from the folder that also has our `fla`
    named = 'triton_interpreter'
    where = Path(__file__).resolve().parents[1] / 'tests' / 'triton_support' / 'interpreter.py'
    spec = importlib.util.spec_from_file_location(named, where)
    assert spec
    assert spec.loader
    sys.modules[named] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
    first = next((path for path in sys.path if path and Path(path, 'fla').is_dir()), None)
    sys.path[:] = [path for path in sys.path if path == first or not Path(path or '.', 'fla').is_dir()]


if __name__ == '__main__':
    main()
