"""Measures transformers' models with this package's operations and without: prefill, decode and training step on a CPU.

    python benchmarks/clients.py [--quick] [--json PATH]

Four models of four layers, 256 wide, in float32 on one CPU core. Each model exists twice in one process: with the
operations that transformers finds when `fla` can be imported, and with transformers' own PyTorch code. The two take turns,
so that a temporarily faster processor favours neither, and are measured in CPU time, which other processes hardly affect.
The operation of a decode step is also measured alone, because it is a small part of the step and the rest is the same code.

The JSON holds a row for each model and phase: `fla` and `transformers` in the given unit (medians over turns, then over
processes), and `faster`, the minimum, median and maximum over processes of the median ratio. The ratio differs between
processes because the place of memory matters.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from statistics import median
from typing import Any

import torch
from _results import ROOT, parser, write_json
from _timing import command, machine, table

sys.path.insert(0, str(ROOT))

from tests.clients.models import MODELS, WithoutFla, build, tokens

PHASES = {
    'prefill': 'ms, T = 1024',
    'decode': 'ms a token',
    'training step': 'ms, T = 512',
    'operation of a step': 'ms, one of 3 layers',
}
WIDTH, HEAD_DIM = 256, 64
STEPS = {'gated_delta_rule': 'torch_recurrent_gated_delta_rule', 'kda': 'recurrent_kimi_delta_attention'}

Call = Callable[[], object]


def models() -> dict[str, tuple[torch.nn.Module, torch.nn.Module]]:
    """Returns for each name a model that calls `fla` and one that does not.

    transformers is imported twice, because it chooses its functions when its modules are imported.
    """

    def build_all() -> list[torch.nn.Module]:
        return [build(name, hidden_size=WIDTH, head_dim=HEAD_DIM) for name in MODELS]

    sys.meta_path.insert(0, WithoutFla)  # type: ignore[arg-type]
    without = build_all()
    assert 'fla' not in sys.modules
    sys.meta_path.remove(WithoutFla)  # type: ignore[arg-type]
    for name in [name for name in sys.modules if name.split('.')[0] == 'transformers']:
        del sys.modules[name]
    with_fla = build_all()
    assert 'fla' in sys.modules
    return dict(zip(MODELS, zip(with_fla, without, strict=True), strict=True))


def phases(name: str, model: torch.nn.Module) -> dict[str, tuple[Call, int]]:
    """Returns for each phase of a model the function to measure, and the number of units it runs."""
    prompt, batch, steps, calls = tokens(1, 1024), tokens(1, 512), 16, 100
    cache = None

    def prefill() -> None:
        with torch.no_grad():
            model(prompt, use_cache=True)

    def decode() -> None:
        # continues after the steps of the last repetition
        nonlocal cache
        with torch.no_grad():
            cache = model(prompt[:, :64], use_cache=True).cache if cache is None else cache
            for i in range(steps):
                model(prompt[:, i : i + 1], cache=cache, use_cache=True)

    def training() -> None:
        model.zero_grad()
        model(batch, labels=batch).loss.backward()

    decode()
    function, args, options = step_of(name, model, decode)

    def step() -> None:
        with torch.no_grad():
            for _ in range(calls):
                function(*args, **options)

    return dict(zip(PHASES, [(prefill, 1), (decode, steps), (training, 1), (step, calls)], strict=True))


def step_of(name: str, model: torch.nn.Module, decode: Call) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    """Returns the function that the model's first layer calls in decoding, and its arguments."""
    # `sys.modules` may have the other copy of the module
    module, called = type(model).__init__.__globals__, STEPS[MODELS[name][2]]
    function, found = module[called], []

    def record(*args: Any, **options: Any) -> Any:
        found.append((args, options))
        return function(*args, **options)

    module[called] = record
    decode()
    module[called] = function
    return function, *found[0]


def in_turns(ours: Call, theirs: Call, turns: int) -> tuple[float, float, float]:
    """Returns median CPU times in ms of both, and the median of theirs over ours. The first turn does not count."""
    taken: list[tuple[int, int]] = []
    for turn in range(turns + 1):
        pair = {}
        for call in (ours, theirs) if turn % 2 else (theirs, ours):
            start = time.process_time_ns()
            call()
            pair[call] = time.process_time_ns() - start
        taken.append((pair[ours], pair[theirs]))
    del taken[0]
    mine, other = (median(of) / 1e6 for of in zip(*taken, strict=True))
    return mine, other, median(b / a for a, b in taken)


def measure(turns: int) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Measures all phases of all models in this process."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, pair in models().items():
        ours, theirs = (phases(name, model) for model in pair)
        for phase in PHASES:
            (mine, times), (other, _) = ours[phase], theirs[phase]
            taken, other_taken, ratio = in_turns(mine, other, turns if times == 1 else 5 * turns)
            found.setdefault(name, {})[phase] = (taken / times, other_taken / times, ratio)
    return found


def child(turns: int) -> dict[str, dict[str, list[float]]]:
    """Runs `measure` in a child process."""
    done = subprocess.run([sys.executable, __file__, '--child', str(turns)], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    arguments = parser(__doc__).parse_args()
    processes, turns = (1, 1) if arguments.quick else (5, 6)
    runs = [child(turns) for _ in range(processes)]
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        for phase, unit in PHASES.items():
            *times, ratios = zip(*(run[name][phase] for run in runs), strict=True)
            fla, transformers = (round(median(of), 4) for of in times)
            faster = [round(f(ratios), 3) for f in (min, median, max)]
            rows.append(
                {'model': name, 'phase': phase, 'unit': unit, 'fla': fla, 'transformers': transformers, 'faster': faster}
            )
    print(f'{command()}\n{machine()}')
    cells = [
        [
            *(row[key] for key in ('model', 'phase', 'unit')),
            *(f'{row[who]:.3f}' for who in ('fla', 'transformers')),
            ' / '.join(f'{ratio:.2f}x' for ratio in row['faster']),
        ]
        for row in rows
    ]
    header = ['model', 'phase', 'unit', 'fla', 'transformers alone', 'faster: min / median / max']
    print(table(header, cells, 'CPU time, one core'))
    where = {**machine(), 'transformers': metadata.version('transformers')}
    write_json(arguments.json, {'benchmark': 'clients', 'command': command(), 'machine': where, 'rows': rows})


if __name__ == '__main__':
    torch.set_num_threads(1)
    if sys.argv[1:2] == ['--child']:
        print(json.dumps(measure(int(sys.argv[2]))))
    else:
        main()
