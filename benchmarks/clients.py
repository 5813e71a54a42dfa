"""Prefill, decode and training time of transformers' models, with these operations and without.

    python benchmarks/clients.py [--quick] [--json PATH]

Four models of four layers, 256 wide, in float32 on one CPU core, each twice in one process: as transformers finds the
operations where `fla` can be imported, and on its own PyTorch path. They take turns, so that a processor that runs faster
for a while favours neither; CPU time, so that what other processes do counts little. A step's operation is measured by
itself too: of a step's decoding it is a small part, and all else is the same code.

Of each process the quickest turn of either and the median of the ratios of turns; of several processes the median, as
where a process happens to have its memory counts as well.
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
from typing import Any

import torch
from _timing import command, machine, parser, table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.clients.models import MODELS, WithoutFla, build, tokens

PHASES = {
    'prefill': 'ms, T = 1024',
    'decode': 'ms a token',
    'training step': 'ms, T = 512',
    'operation of a step': 'ms, H = 4, K = V = 64',
}
WIDTH, HEAD_DIM = 256, 64
STEPS = {'gated_delta_rule': 'torch_recurrent_gated_delta_rule', 'kda': 'recurrent_kimi_delta_attention'}

Call = Callable[[], object]


def models() -> dict[str, tuple[torch.nn.Module, torch.nn.Module]]:
    """Of each name a model that calls `fla`, and one that does not: transformers chooses when its modules are imported, so
    they are imported twice."""

    def of_all() -> list[torch.nn.Module]:
        return [build(name, hidden_size=WIDTH, head_dim=HEAD_DIM) for name in MODELS]

    sys.meta_path.insert(0, WithoutFla)  # type: ignore[arg-type]
    without = of_all()
    sys.meta_path.remove(WithoutFla)  # type: ignore[arg-type]
    for name in [name for name in sys.modules if name.split('.')[0] == 'transformers']:
        del sys.modules[name]
    with_fla = of_all()
    assert 'fla' in sys.modules
    return dict(zip(MODELS, zip(with_fla, without, strict=True), strict=True))


def phases(name: str, model: torch.nn.Module) -> dict[str, tuple[Call, int]]:
    """What is timed of a model, and how many times it does what a figure is of."""
    prompt, batch, steps, calls = tokens(1, 1024), tokens(1, 512), 16, 100
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

    def training() -> None:
        model.zero_grad()
        model(batch, labels=batch).loss.backward()

    operation = MODELS[name][2]
    # not through `sys.modules`, which may have another copy
    function = type(model).__init__.__globals__[STEPS[operation]]
    given, options = step_of(operation)

    def step() -> None:
        with torch.no_grad():
            for _ in range(calls):
                function(*given, **options)

    return dict(zip(PHASES, [(prefill, 1), (decode, steps), (training, 1), (step, calls)], strict=True))


def step_of(operation: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The arguments of a step as the models call it."""
    generator = torch.Generator().manual_seed(2)
    shape = (1, 1, 4, HEAD_DIM)
    options: dict[str, Any] = {
        'g': -torch.rand(shape if operation == 'kda' else shape[:3], generator=generator),
        'beta': torch.rand(shape[:3], generator=generator),
        'initial_state': torch.randn(1, 4, HEAD_DIM, HEAD_DIM, generator=generator),
        'output_final_state': True,
        'use_qk_l2norm_in_kernel': True,
    }
    return [torch.randn(shape, generator=generator) for _ in range(3)], options


def in_turns(ours: Call, theirs: Call, turns: int) -> tuple[float, float, float]:
    """Milliseconds of CPU time of the quickest turn of each, and the median of theirs over ours; the first is not timed."""
    taken: list[tuple[int, int]] = []
    for turn in range(turns + 1):
        pair = {}
        for call in (ours, theirs) if turn % 2 else (theirs, ours):
            start = time.process_time_ns()
            call()
            pair[call] = time.process_time_ns() - start
        taken.append((pair[ours], pair[theirs]))
    del taken[0]
    mine, other = (min(of) / 1e6 for of in zip(*taken, strict=True))
    return mine, other, median(b / a for a, b in taken)


def measure(turns: int) -> dict[str, dict[str, tuple[float, float, float]]]:
    """All phases of all models in this process."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, pair in models().items():
        ours, theirs = (phases(name, model) for model in pair)
        for phase in PHASES:
            (mine, times), (other, _) = ours[phase], theirs[phase]
            quickest, other_quickest, ratio = in_turns(mine, other, turns if times == 1 else 5 * turns)
            found.setdefault(name, {})[phase] = (quickest / times, other_quickest / times, ratio)
    return found


def child(turns: int) -> dict[str, dict[str, list[float]]]:
    """`measure` in a process of its own."""
    done = subprocess.run([sys.executable, __file__, '--child', str(turns)], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    processes, turns = (1, 1) if arguments.quick else (5, 6)
    runs = [child(turns) for _ in range(processes)]
    rows = []
    for name in MODELS:
        for phase, unit in PHASES.items():
            ours, theirs, faster = (median(run[name][phase][i] for run in runs) for i in range(3))
            row = {'model': name, 'phase': phase, 'unit': unit, 'fla': ours, 'transformers': theirs, 'faster': faster}
            rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    print(f'{command()}\n{machine()}')
    cells = [
        [row['model'], row['phase'], row['unit'], f'{row["fla"]:.3f}', f'{row["transformers"]:.3f}', f'{row["faster"]:.2f}x']
        for row in rows
    ]
    print(table(['model', 'phase', 'unit', 'fla', 'transformers alone', 'faster'], cells, 'CPU time, one core'))
    where = {**machine(), 'transformers': metadata.version('transformers')}
    write_json(arguments.json, {'benchmark': 'clients', 'command': command(), 'machine': where, 'rows': rows})


if __name__ == '__main__':
    torch.set_num_threads(1)
    if sys.argv[1:2] == ['--child']:
        print(json.dumps(measure(int(sys.argv[2]))))
    else:
        main()
