"""Prefill, decode and training time of transformers' models, with these operations and without.

    python benchmarks/clients.py [--quick] [--json PATH]

Four models of four layers, 256 wide, in float32 on one CPU core: once as transformers finds them where `fla` can be
imported, once on its own PyTorch path, in processes of their own that take turns. CPU time, so that what other processes
do counts little; the quickest repetition of each process, and of processes the median: a processor that runs faster for a
while would decide otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median

import torch
from _timing import command, machine, parser, table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.clients.models import MODELS, WithoutFla, build, tokens

PHASES = {'prefill': 'ms, T = 1024', 'decode': 'ms a token', 'training step': 'ms, T = 512'}


def quickest(call: Callable[[], object], repetitions: int) -> float:
    """Milliseconds of CPU time; the first call is not timed."""
    call()
    taken = []
    for _ in range(repetitions):
        start = time.process_time_ns()
        call()
        taken.append(time.process_time_ns() - start)
    return min(taken) / 1e6


def measure(name: str, repetitions: int) -> dict[str, float]:
    """All phases of one model in this process."""
    model = build(name, hidden_size=256, head_dim=64)
    prompt, batch, steps = tokens(1, 1024), tokens(1, 512), 16
    cache = None

    def prefill() -> None:
        with torch.no_grad():
            model(prompt, use_cache=True)

    def decode() -> None:
        # goes on from where the last repetition ended
        nonlocal cache
        with torch.no_grad():
            cache = model(prompt[:, :64], use_cache=True).cache if cache is None else cache
            for i in range(steps):
                model(prompt[:, i : i + 1], cache=cache, use_cache=True)

    def step() -> None:
        model.zero_grad()
        model(batch, labels=batch).loss.backward()

    return {
        'prefill': quickest(prefill, repetitions),
        'decode': quickest(decode, 5 * repetitions) / steps,
        'training step': quickest(step, repetitions),
    }


def child(with_fla: bool, repetitions: int) -> dict[str, dict[str, float]]:
    """All models in a process of their own."""
    done = subprocess.run(
        [sys.executable, __file__, '--child', str(int(with_fla)), str(repetitions)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    rounds, repetitions = (1, 1) if arguments.quick else (5, 4)
    runs: dict[bool, list[dict[str, dict[str, float]]]] = {True: [], False: []}
    for _ in range(rounds):
        for with_fla in (True, False):
            runs[with_fla].append(child(with_fla, repetitions))
    rows = []
    for name in MODELS:
        for phase, unit in PHASES.items():
            ours, theirs = (median(run[name][phase] for run in runs[with_fla]) for with_fla in (True, False))
            rows.append({'model': name, 'phase': phase, 'unit': unit, 'fla': ours, 'transformers': theirs})
    print(f'{command()}\n{machine()}')
    cells = []
    for row in rows:
        ours, theirs = row['fla'], row['transformers']
        cells.append([row['model'], row['phase'], row['unit'], f'{ours:.2f}', f'{theirs:.2f}', f'{theirs / ours:.2f}x'])
    print(table(['model', 'phase', 'unit', 'fla', 'transformers alone', 'faster'], cells, 'CPU time, one core'))
    where = {**machine(), 'transformers': metadata.version('transformers')}
    write_json(arguments.json, {'benchmark': 'clients', 'command': command(), 'machine': where, 'rows': rows})


if __name__ == '__main__':
    torch.set_num_threads(1)
    if sys.argv[1:2] == ['--child']:
        if sys.argv[2] == '0':
            sys.meta_path.insert(0, WithoutFla)
        print(json.dumps({name: measure(name, int(sys.argv[3])) for name in MODELS}))
    else:
        main()
