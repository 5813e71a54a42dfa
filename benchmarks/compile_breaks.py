"""What dispatch costs a compiled program: graph breaks, compilations per change, trace time, steady state.

    python benchmarks/compile_breaks.py [--quick] [--json PATH]

A change that dispatch must see (a toggle, a policy scope, a dtype) may cost one more compilation, one that it need not
see may cost none, and after each step the compiled caller must choose what eager chooses: every implementation returns
a number of its own, and each step compares compiled, eager and the expected one. Beside each row stand the compilations
of the undispatched function under the same steps, which has reasons of its own to recompile. A dispatcher behind
`torch.compiler.disable` goes through the same counting, to show that the counts would tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from _changes import CHANGES, RESULTS, Op, Step, World, inputs, toggled, undispatched
from _compile_speed import steady_state, trace_times
from _timing import command, machine, parser, table, write_json
from torch import Tensor
from torch._dynamo.utils import counters

from fla.backends import use_backend


@dataclass(frozen=True)
class Counts:
    """Of one compiled caller: graphs compiled, graph breaks, and the steps whose call was served wrongly."""

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
def live_through(op: Op, steps: list[Step], backend: str, *, dispatched: bool = True) -> Counts:
    """Take one compiled caller through the steps."""

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
    """A policy scope entered *inside* the compiled region, between two calls that it must not reach."""

    def caller(**tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        before = world.op(**tensors)
        with use_backend('second', op=world.operation):
            within = world.op(**tensors)
        return before, within, world.op(**tensors)

    compiled = compiled_afresh(caller, backend)
    wrong = []
    for i in range(3):
        got, eager = ([int(x) for x in run(**inputs())] for run in (compiled, caller))
        if not got == eager == [1, 2, 1]:
            wrong.append(f'call {i}: compiled {got}, eager {eager}, expected [1, 2, 1]')
    return counted(wrong)


# Beyond its limit of 8 Dynamo falls back to eager, and what a change costs would go uncounted.
@torch._dynamo.config.patch(recompile_limit=64)
def changes(backend: str) -> list[dict[str, Any]]:
    rows = []

    def row(name: str, ours: Counts, plain: Counts | None = None, allowed: int | None = None) -> None:
        facts = {'graphs': ours.graphs, 'allowed': allowed, 'undispatched': plain.graphs if plain else None}
        rows.append({'name': name, 'backend': backend, 'breaks': ours.breaks, **facts, 'wrong': ours.wrong})

    for name, (steps, allowed) in CHANGES.items():
        world = World()
        ours = live_through(world.op, steps(world), backend)
        row(name, ours, live_through(undispatched, steps(world), backend, dispatched=False), allowed)
    row('scope entered inside the region, 3x', scope_inside(World(), backend), allowed=1)
    world = World()
    row('control: behind compiler.disable', live_through(torch.compiler.disable(world.op), toggled(world), backend))
    if not rows[-1]['breaks']:
        raise AssertionError('the control shows no graph break: the counters count nothing')
    return rows


@torch.no_grad()
def cold_starts() -> dict[str, str]:
    """The first call ever of an operation inside a trace, with no break allowed: what came of it."""

    def calls(op: Op) -> Op:
        return lambda **tensors: op(**tensors)

    outcomes = {}
    for name, program in {'called by a compiled function': calls, 'compiled by itself': lambda op: op}.items():
        torch._dynamo.reset()
        try:
            got = int(torch.compile(program(World().op), backend='eager', fullgraph=True)(**inputs()))
        except Exception as error:  # whatever stops the trace is what this row is to show
            outcomes[name] = f'FAILS: {type(error).__name__}: {str(error).splitlines()[0]}'
        else:
            outcomes[name] = 'served right' if got == RESULTS['first'] else f'WRONG: served by {got}'
    return outcomes


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    backends = ['eager'] if arguments.quick else ['eager', 'aot_eager', 'inductor']
    cold = cold_starts()
    rows = [row for backend in backends for row in changes(backend)]
    traces = trace_times(2 if arguments.quick else 7)
    steady = steady_state(15 if arguments.quick else 101, copies=2 if arguments.quick else 4)

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
    print(f'Hot, the guards of 8 dispatched calls add {guards:.1f} us: {guards / us["undispatched"]:.1%} of the model.')
    report = {'benchmark': 'compile_breaks', 'command': command(), 'machine': machine(), 'cold_fullgraph': cold}
    write_json(arguments.json, {**report, 'changes': rows, 'trace_time': traces, 'steady_state': steady})


if __name__ == '__main__':
    main()
