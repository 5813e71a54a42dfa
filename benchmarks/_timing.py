"""Timing that survives a shared machine: every case in one process, interleaved, compared by ratio.

A machine that others use changes speed while a benchmark runs, by 1.5x on the one this was written on, so a figure in
nanoseconds means little and two figures taken one after the other cannot be compared at all. Hence:

1. the cases run in bursts, one burst of each per round, in an order shuffled anew each round;
2. the clock counts this thread's CPU time, so the time that other processes held the core is left out;
3. the garbage collector is off and the process stays on one core;
4. a cost is a difference from the direct call of the same round, and a claim is the ratio of that to a yardstick
   timed beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _machine import cores, repeatable

Burst = Callable[[int], None]
"""Runs its case n times."""


@dataclass(frozen=True)
class Samples:
    """Nanoseconds per call of one case, one entry per round."""

    ns: tuple[float, ...]

    @property
    def min(self) -> float:
        return min(self.ns)

    @property
    def p20(self) -> float:
        return sorted(self.ns)[len(self.ns) // 5]

    @property
    def median(self) -> float:
        return statistics.median(self.ns)

    def over(self, base: Samples) -> Cost:
        """What this case costs beyond `base`, which was timed in the same rounds."""
        paired = [mine - theirs for mine, theirs in zip(self.ns, base.ns, strict=True)]
        return Cost(self.min - base.min, self.p20 - base.p20, statistics.median(paired))


@dataclass(frozen=True)
class Cost:
    """Nanoseconds more: of the quickest rounds, of the 20th percentiles, and the median of the paired differences."""

    min: float
    p20: float
    median: float

    def ratio(self, yardstick: Cost) -> Cost:
        return Cost(self.min / yardstick.min, self.p20 / yardstick.p20, self.median / yardstick.median)

    def as_json(self) -> dict[str, float]:
        return {'min': round(self.min, 4), 'p20': round(self.p20, 4), 'median': round(self.median, 4)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection, and one core where the platform can say so."""
    collecting = gc.isenabled()
    cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else None
    gc.collect()
    gc.disable()
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        if collecting:
            gc.enable()


def interleave(bursts: Mapping[str, Burst], *, rounds: int, burst_ms: float, clock: Callable[[], int]) -> dict[str, Samples]:
    """Time every burst once per round, in shuffled order; each burst is sized to last about `burst_ms`."""
    calls = {}
    for name, burst in bursts.items():
        burst(20)  # warm: lazy imports, plans and inline caches are not what is measured
        start = clock()
        burst(50)
        calls[name] = max(3, int(burst_ms * 1e6 * 50 / max(1, clock() - start)))
    samples: dict[str, list[float]] = {name: [] for name in bursts}
    order, rng = list(bursts), random.Random(0)
    with quiet():
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                burst, n = bursts[name], calls[name]
                start = clock()
                burst(n)
                samples[name].append((clock() - start) / n)
    return {name: Samples(tuple(ns)) for name, ns in samples.items()}


def timed(bursts: Mapping[str, Burst], *, rounds: int, burst_ms: float = 1.0) -> dict[str, Samples]:
    """`interleave` on this thread's CPU clock: for work that stays on the calling thread."""
    return interleave(bursts, rounds=rounds, burst_ms=burst_ms, clock=time.thread_time_ns)


def machine() -> dict[str, Any]:
    """What a reader needs to judge a figure; nothing that names the machine or a path on it."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                model = line.split(':', 1)[1].strip()
                break
    return {
        'cpu': model,
        'cores': cores(),
        'load': [round(load, 2) for load in os.getloadavg()] if hasattr(os, 'getloadavg') else None,
        'system': f'{platform.system()} {platform.machine()}',
        'python': platform.python_version(),
        'torch': torch.__version__,
    }


def command() -> str:
    """The command as a reader can repeat it."""
    script, *arguments = sys.argv
    return ' '.join(['python', f'benchmarks/{Path(script).name}', *repeatable(arguments)])


def parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description)
    options.add_argument('--json', type=Path, metavar='PATH', help='also write the result here')
    options.add_argument('--quick', action='store_true', help='fewer rounds: a check that it runs, not a figure to quote')
    return options


def table(header: Sequence[str], rows: Sequence[Sequence[object]], title: str = '') -> str:
    """Plain text: the first column to the left, the others to the right."""
    cells = [['' if cell is None else str(cell) for cell in row] for row in (header, *rows)]
    width = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        '  '.join(cell.ljust(width[i]) if i == 0 else cell.rjust(width[i]) for i, cell in enumerate(row)).rstrip()
        for row in cells
    ]
    lines.insert(1, '  '.join('-' * w for w in width))
    return '\n'.join(([f'\n{title}'] if title else []) + lines)


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + '\n')
