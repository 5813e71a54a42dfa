"""Measures errors of the chunked delta rules in half precision against float64: of this package's Triton kernels and, with
--fla, of flash-linear-attention's on the same inputs. Needs no GPU: both run in Triton's interpreter, with the corrections
of `tests/triton_support`. A GPU sums products in another order, so its errors differ.

    python benchmarks/accuracy.py --json benchmarks/results/accuracy.json --fla folder/of/fla-core

FLA runs in a separate process: --fla takes the folder in which its distribution was unpacked. FLA imports `einops`, which
must be installed. `tests/ops/test_accuracy.py` holds this package's kernels to 1.1 times FLA's errors in the recorded rows.

The JSON holds a row for each operation, dtype, gate strength, seed and backend, with the relative RMS errors of o, of the
final state and of the gradients for a normal gradient of o. Inputs are [1, 192, 2, 128]. --quick: one row.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _delta_rule_inputs import NAMES, definition, inputs
from _fla_process import FLA, fla_rows
from _results import ROOT, ResultFile, command, machine, parser, print_lines, relative_rms

OPS = ('gated_delta_rule', 'kda')
DTYPES = {'bfloat16': torch.bfloat16, 'float16': torch.float16}
# factors of log decays, which are -0.8 a step on average and at most 0
STRENGTHS = (0.01, 0.1, 1.0, 3.0, 5.0, 20.0)
SEEDS = (0, 1, 2)
BATCH, LENGTH, HEADS, DIM = 1, 192, 2, 128
ERRORS = ('o', 'state', *(f'd{name}' for name in NAMES))


def errors(op: str, dtype: torch.dtype, strength: float, seed: int) -> dict[str, float]:
    """Returns the relative RMS errors of o, of the final state and of the gradients, of the `fla` that is on the path."""
    if op == 'kda':
        from fla.ops.kda import chunk_kda as function
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    tensors = inputs(op, BATCH, LENGTH, HEADS, DIM, seed, dtype=dtype, strength=strength, device='cpu')
    do = torch.randn(tensors[2].shape, generator=torch.Generator().manual_seed(100 + seed)).to(dtype)
    found = []
    for run, wide in ((function, None), (definition, torch.float64)):
        leaves = [(x if wide is None else x.to(wide)).clone().requires_grad_() for x in tensors]
        o, state = run(*leaves) if wide else run(*leaves, output_final_state=True)
        found.append([o, state, *torch.autograd.grad(o, leaves, do.to(o.dtype))])
    return {name: relative_rms(*pair) for name, *pair in zip(ERRORS, *found, strict=True)}


def rows(backend: str, ops: Sequence[str], quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yields a row for each operation, dtype, strength and seed; with `quick` only the first of each."""
    first = slice(1 if quick else None)
    for op in ops[first]:
        for name, dtype in [*DTYPES.items()][first]:
            for strength in STRENGTHS[first]:
                for seed in SEEDS[first]:
                    row = {'op': op, 'dtype': name, 'strength': strength, 'seed': seed, 'backend': backend}
                    yield {**row, 'errors': errors(op, dtype, strength, seed)}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, peer=True)
    options.add_argument('--op', choices=OPS, action='append', help='measure only this operation')
    chosen = options.parse_args(arguments)
    ops = chosen.op or list(OPS)
    use_interpreter()
    if chosen.lines:
        print_lines(rows(FLA, ops, chosen.quick))
        return
    results = ResultFile(
        chosen.json,
        'accuracy',
        **machine(cpu=True, fla=chosen.fla),
        command=command('accuracy', chosen, 'op'),
        shape=[BATCH, LENGTH, HEADS, DIM],
    )
    from fla.backends import use_backend

    with use_backend('default'):
        for row in rows('default', ops, chosen.quick):
            results.add(row)
    if chosen.fla:
        repeated = [*(['--quick'] if chosen.quick else []), *(f'--op={op}' for op in chosen.op or ())]
        for row in fla_rows(__file__, repeated, chosen.fla):
            results.add(row)
    results.complete()


def use_interpreter() -> None:
    """Makes kernels that are imported later run in Triton's interpreter, and hides every `fla` but the first on the path."""
    os.environ['TRITON_INTERPRET'] = '1'
    torch.set_num_threads(1)
    # loaded by path: the process for FLA must not import from the folder that also holds this package
    name = 'triton_interpreter'
    spec = importlib.util.spec_from_file_location(name, ROOT / 'tests' / 'triton_support' / 'interpreter.py')
    assert spec
    assert spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
    first = next((path for path in sys.path if path and Path(path, 'fla').is_dir()), None)
    sys.path[:] = [path for path in sys.path if path == first or not Path(path or '.', 'fla').is_dir()]


if __name__ == '__main__':
    main()
