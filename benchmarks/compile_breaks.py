"""Measures what dispatch costs a compiled program: graph breaks, compilations per change, trace time and steady state.

    python benchmarks/compile_breaks.py [--quick] [--json PATH]
    python benchmarks/compile_breaks.py --beside CHECKOUT [--quick] [--json PATH]

Needs no GPU. A change that dispatch must see (a toggle, a policy scope, a dtype) may cost one more compilation; any other
change may cost none. After each step the compiled caller must choose what eager code chooses: each implementation returns
its own number, and each step compares compiled, eager and the expected number. `undispatched` counts the compilations of
the undispatched function under the same steps, which may recompile for its own reasons. A control, a dispatcher behind
`torch.compiler.disable`, must show a graph break, so that the counters are known to count.

--beside runs this benchmark in three pairs of alternating processes, with the `fla` of this checkout and of another one. It
prints the ratios of trace times and of steady states, each relative to the undispatched function in the same process, and
the changes whose counts differ. `--beside .` shows the noise.

The JSON holds `machine`, `command`, `cold_fullgraph` (outcome of a first call inside a trace), `changes` (counts per change
and compiler), `trace_time` (ms per call) and `steady_state` (us per forward); with --beside `ratios` and
`changes_that_differ`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from _changes import CHANGES, RESULTS, Op, Step, World, inputs, toggled, undispatched
from _checkouts import alternate_results, spread
from _compile_speed import steady_state, trace_times
from _results import parser, write_json
from _timing import command, machine, table
from torch import Tensor
from torch._dynamo.utils import counters

from fla.backends import use_backend


@dataclass(frozen=True)
class Counts:
    """Counts of a compiled caller: graphs compiled, graph breaks, and descriptions of the steps that were served wrongly."""

    graphs: int
    breaks: int
    wrong: list[str]


def compiled_afresh(caller: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(caller, backend=backend)


def counted(wrong: list[str]) -> Counts:
    return Counts(counters['stats']['unique_graphs'], sum(counters['graph_break'].values()), wrong)


@torch.no_grad()
def take_steps(op: Op, steps: list[Step], backend: str, *, dispatched: bool = True) -> Counts:
    """Calls a compiled function once per step, and checks who served."""

    def caller(**tensors: Any) -> Tensor:
        return op(**tensors) + 10

    compiled = compiled_afresh(caller, backend)
    wrong = []
    for i, step in enumerate(steps):
        tensors = inputs() if step.inputs is None else step.inputs
        with step.during():
            got, eager = int(compiled(**tensors)) - 10, int(caller(**tensors)) - 10
        expected = RESULTS[step.serves if dispatched else 'default']
        if not got == eager == expected:
            wrong.append(f'step {i}: compiled {got}, eager {eager}, expected {expected}')
    return counted(wrong)


@torch.no_grad()
def scope_inside(world: World, backend: str) -> Counts:
    """Enters a policy scope inside the compiled region, between two calls that it must not affect."""

    def caller(**tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        before = world.op(**tensors)
        with use_backend('second', op=world.operation):
            inside = world.op(**tensors)
        return before, inside, world.op(**tensors)

    compiled = compiled_afresh(caller, backend)
    wrong = []
    for i in range(3):
        got, eager = ([int(x) for x in run(**inputs())] for run in (compiled, caller))
        if not got == eager == [1, 2, 1]:
            wrong.append(f'call {i}: compiled {got}, eager {eager}, expected [1, 2, 1]')
    return counted(wrong)


# Beyond its default limit of 8, Dynamo falls back to eager code, whose compilations would not be counted.
@torch._dynamo.config.patch(recompile_limit=64)
def changes(backend: str) -> list[dict[str, Any]]:
    rows = []

    def row(name: str, ours: Counts, plain: Counts | None = None, allowed: int | None = None) -> None:
        facts = {'graphs': ours.graphs, 'allowed': allowed, 'undispatched': plain.graphs if plain else None}
        rows.append({'name': name, 'backend': backend, 'breaks': ours.breaks, **facts, 'wrong': ours.wrong})

    for name, (steps, allowed) in CHANGES.items():
        world = World()
        ours = take_steps(world.op, steps(world), backend)
        row(name, ours, take_steps(undispatched, steps(world), backend, dispatched=False), allowed)
    row('scope entered inside the region, 3x', scope_inside(World(), backend), allowed=1)
    world = World()
    row('control: behind compiler.disable', take_steps(torch.compiler.disable(world.op), toggled(world), backend))
    if not rows[-1]['breaks']:
        raise AssertionError('the control shows no graph break: the counters count nothing')
    return rows


@torch.no_grad()
def cold_starts() -> dict[str, str]:
    """Returns the outcome of an operation's first call inside a trace with fullgraph=True."""

    def calls(op: Op) -> Op:
        return lambda **tensors: op(**tensors)

    outcomes = {}
    for name, program in {'called by a compiled function': calls, 'compiled by itself': lambda op: op}.items():
        torch._dynamo.reset()
        try:
            got = int(torch.compile(program(World().op), backend='eager', fullgraph=True)(**inputs()))
        except Exception as error:  # the row shows any error that stops the trace
            outcomes[name] = f'FAILS: {type(error).__name__}: {str(error).splitlines()[0]}'
        else:
            outcomes[name] = 'served right' if got == RESULTS['first'] else f'WRONG: served by {got}'
    return outcomes


def main() -> None:
    options = parser(__doc__)
    options.add_argument('--beside', type=Path, metavar='CHECKOUT', help='compare with this checkout of the repository')
    arguments = options.parse_args()
    report = compare(arguments.beside, arguments.quick) if arguments.beside else measure_this(arguments.quick)
    about = {'benchmark': 'compile_breaks', 'command': command(), 'machine': machine()}
    write_json(arguments.json, {**about, **report})


def compare(other: Path, quick: bool) -> dict[str, Any]:
    """Runs this benchmark alternately with two checkouts; prints tables and returns the JSON's fields."""
    this, that = alternate_results('compile_breaks.py', ['--quick'] if quick else [], other, turns=1 if quick else 3)
    ratios = []
    fields = {'over_undispatched_ms': 'trace_time', 'ratio_min': 'steady_state', 'ratio_median': 'steady_state'}
    for field, part in fields.items():
        for place, row in enumerate(this[0][part]):
            ours, theirs = ([run[part][place][field] for run in runs] for runs in (this, that))
            if 'undispatched' not in row['name']:
                values = [mine / base for mine, base in zip(ours, theirs, strict=True)]
                ratios.append({'part': part, 'name': row['name'], 'field': field, **spread(values)})
    differ = [
        {'name': ours['name'], 'backend': ours['backend'], 'this': ours, 'other': theirs}
        for runs in zip(this, that, strict=True)
        for ours, theirs in zip(*(run['changes'] for run in runs), strict=True)
        if ours != theirs
    ]
    print(f'{command()}\n{machine()}')
    header = ['this checkout / the other', 'of', 'median', 'least', 'most']
    cells = [[row['name'], row['field'], row['median'], row['p10'], row['p90']] for row in ratios]
    print(table(header, cells, 'Trace time of a call and steady state, relative to undispatched'))
    for row in differ:
        print(f'DIFFERS {row}')
    return {'ratios': ratios, 'changes_that_differ': differ}


def measure_this(quick: bool) -> dict[str, Any]:
    """Measures this checkout; prints tables and returns the JSON's fields."""
    backends = ['eager'] if quick else ['eager', 'aot_eager', 'inductor']
    cold = cold_starts()
    rows = [row for backend in backends for row in changes(backend)]
    traces = trace_times(2 if quick else 7)
    steady = steady_state(15 if quick else 101, copies=2 if quick else 4)

    print(f'{command()}\n{machine()}')
    for name, outcome in cold.items():
        print(f'fullgraph=True, cold, {name}: {outcome}')
    header = ['change', 'backend', 'breaks', 'compilations', 'allowed', 'undispatched', 'served wrong']
    cells = [[*list(row.values())[:-1], len(row['wrong'])] for row in rows]
    print(table(header, cells, 'Graph breaks and compilations under change'))
    for row in rows:
        for wrong in row['wrong']:
            print(f'WRONG {row["name"]} ({row["backend"]}): {wrong}')
    header = ['trace time of a call, Dynamo alone', 'ms', 'over undispatched', 'ratio']
    print(table(header, [list(row.values()) for row in traces], 'Tracing (32 calls in a frame)'))
    header = ['8 layers, Inductor, 1 thread', 'us min', 'median', 'ratio min', 'median', 'copies differ by', 'target']
    print(table(header, [list(row.values()) for row in steady], 'Steady state'))
    us = {row['name']: row['us_min'] for row in steady}
    guards = us['guards alone: dispatched'] - us['guards alone: undispatched']
    print(f'The guards of 8 dispatched calls alone add {guards:.1f} us: {guards / us["undispatched"]:.1%} of the model.')
    return {'cold_fullgraph': cold, 'changes': rows, 'trace_time': traces, 'steady_state': steady}


if __name__ == '__main__':
    main()
