"""Measures the errors from which the bounds of tests/bounds.py were derived.

python -m tests.measure_bounds       # one draw of the grid
python -m tests.measure_bounds 5
"""

from __future__ import annotations

import contextlib
import itertools
import sys

import torch

from tests import bounds
from tests.ops import delta_rules as rules


def main(draws: int = 1) -> None:
    """Prints the largest errors of the reference and of `HalfOperands` for each quantity, over the grid and `draws`
    draws."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for half in (False, True):
            if half and dtype not in bounds.ROUNDING:
                continue
            worst: dict[str, tuple[float, float, str]] = {}
            for draw, (function, name) in itertools.product(range(draws), rules.grid()):
                given = rules.on_grid(function, name, dtype=dtype, draw=draw)

                def run(tensors, given=given, function=function):
                    return given.with_tensors(**tensors).call(function)

                with bounds.HalfOperands(dtype) if half else contextlib.nullcontext():
                    found = rules.measure(given, run)
                for key, (rms, row, kind) in found.items():
                    key = f'{key} {str(kind).removeprefix("torch.")}'
                    old = worst.get(key, (0.0, 0.0, ''))
                    label = f'{function.__name__}, {name}, draw {draw}'
                    worst[key] = max(old[0], rms), max(old[1], row), label if rms > old[0] else old[2]
            print(f'{dtype}, {"half operands" if half else "reference"}')
            for key, (rms, row, where) in sorted(worst.items()):
                print(f'  {key:<26} {rms:.1e}  {row:.1e}  {where}')


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
