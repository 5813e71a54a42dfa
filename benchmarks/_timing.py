"""CPU timing on a shared machine: all cases in one process, interleaved, compared by ratio.

A shared machine changes speed during a benchmark (by 1.5x on the one used here). A figure in nanoseconds therefore means
little, and figures measured one after the other cannot be compared. Hence:

1. The cases run in bursts, one burst of each per round, in an order that is shuffled for each round.
2. The clock counts this thread's CPU time, which leaves out the time that other processes held the core.
3. The garbage collector is off, and the process stays on one core.
4. A cost is a difference from the direct call in the same round. A claim is the ratio of a cost to a yardstick timed in the
   same rounds.
"""

from __future__ import annotations

import contextlib
import gc
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
from _results import cores, without_json

Burst = Callable[[int], None]
"""Runs its case n times."""


@dataclass(frozen=True)
class Samples:
    """Nanoseconds per call of one case, one number per round."""

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
        """Cost of this case over `base`, which was timed in the same rounds."""
        paired = [mine - theirs for mine, theirs in zip(self.ns, base.ns, strict=True)]
        return Cost(self.min - base.min, self.p20 - base.p20, statistics.median(paired))


@dataclass(frozen=True)
class Cost:
    """Nanoseconds over a base: difference of the minima, of the 20th percentiles, and median of the paired differences."""

    min: float
    p20: float
    median: float

    def ratio(self, yardstick: Cost) -> Cost:
        return Cost(self.min / yardstick.min, self.p20 / yardstick.p20, self.median / yardstick.median)

    def as_json(self) -> dict[str, float]:
        return {'min': round(self.min, 4), 'p20': round(self.p20, 4), 'median': round(self.median, 4)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context without garbage collection, on one core where the platform supports that."""
    gc_enabled = gc.isenabled()
    allowed = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else None
    gc.collect()
    gc.disable()
    if allowed:
        os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
        if gc_enabled:
            gc.enable()


def interleave(bursts: Mapping[str, Burst], *, rounds: int, burst_ms: float, clock: Callable[[], int]) -> dict[str, Samples]:
    """Times each burst once per round, in shuffled order. A burst has as many calls as take about `burst_ms`."""
    calls = {}
    for name, burst in bursts.items():
        burst(20)  # warm up: lazy imports, plans and inline caches are not measured
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
    """`interleave` with this thread's CPU clock, for work that stays on the calling thread."""
    return interleave(bursts, rounds=rounds, burst_ms=burst_ms, clock=time.thread_time_ns)


def machine() -> dict[str, Any]:
    """Returns what a reader needs to judge a figure; no name of the machine and no path on it."""
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
    """Returns the command line as a reader can repeat it."""
    script, *arguments = sys.argv
    return ' '.join(['python', f'benchmarks/{Path(script).name}', *without_json(arguments)])


def table(header: Sequence[str], rows: Sequence[Sequence[object]], title: str = '') -> str:
    """Formats a table as plain text: the first column left-aligned, the others right-aligned."""
    cells = [['' if cell is None else str(cell) for cell in row] for row in (header, *rows)]
    width = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        '  '.join(cell.ljust(width[i]) if i == 0 else cell.rjust(width[i]) for i, cell in enumerate(row)).rstrip()
        for row in cells
    ]
    lines.insert(1, '  '.join('-' * w for w in width))
    return '\n'.join(([f'\n{title}'] if title else []) + lines)
