"""Times of the gated delta rule and KDA on a GPU: forward, forward with backward, peak memory, decoding, first call; of each
backend that can run here and, with --fla, of flash-linear-attention, in one run on one card. `packed` are sequences side by
side in one row, by `cu_seqlens`; `bounded` is KDA with raw gates and a lower bound, which decay faster.

    python benchmarks/delta_rules.py --json benchmarks/results/delta_rules.json --fla folder/of/fla-core

Beside each time stands the error of the same backend against the definition in float64, on 320 steps of two heads: the
mean of three seeds. Inputs are those of `_delta_rule_inputs.py`, never zeros. FLA runs in a process of its own, because
its import name is `fla` too: put the folder that its distribution was unpacked into after --fla. It tunes itself for
minutes first, which shows as `forward_first_s` and `both_first_s`. FlashKDA takes raw gates only: `vendors.py` measures
it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _delta_rule_inputs import (
    DEVICE,
    NAMES,
    bounds_of,
    definition,
    finished,
    inputs,
    relative,
    side_by_side,
    upstream,
    with_bounded_gates,
)
from _fla_process import FLA, fla_rows
from _gpu import gpu_ms, peak_mib, wall_ms
from _results import ResultFile, command, machine, said

OPS = ('gated_delta_rule', 'kda')
KINDS = ('chunk', 'packed', 'bounded', 'decode')
SHAPES = ((4, 2048, 16, 128), (1, 8192, 96, 128))
PACKED = (4, 2048, 96, 128)
DECODE = (1, 32, 256)
# of a model that decodes
LAYERS = 20
BACKENDS = {'gated_delta_rule': ('default', 'tilelang', 'flash_qla'), 'kda': ('default', 'tilelang')}


def function_of(op: str, kind: str) -> Any:
    if op == 'kda':
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        return {'chunk': chunk_kda, 'decode': fused_recurrent_kda}[kind]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    return {'chunk': chunk_gated_delta_rule, 'decode': fused_recurrent_gated_delta_rule}[kind]


def only(backend: str, op: str) -> Any:
    """Within it, this backend runs, or the call raises."""
    if backend == FLA:
        return contextlib.nullcontext()
    from fla.backends import use_backend

    return use_backend(backend, op=op)


def errors(op: str, dim: int, backward: bool, kind: str) -> dict[str, float]:
    """Mean over three seeds of the relative RMS errors: of results, and of gradients for the same rounded do."""
    seeds = [_errors(op, dim, backward, kind, seed) for seed in range(3)]
    return {name: sum(found[name] for found in seeds) / len(seeds) for name in seeds[0]}


def _errors(op: str, dim: int, backward: bool, kind: str, seed: int) -> dict[str, float]:
    args = inputs(op, 1, 320, 2, dim, seed)
    lengths, more = (320,), {}
    if kind == 'packed':
        lengths = (200, 120)
        more = {'cu_seqlens': bounds_of(*lengths)}
    elif kind == 'bounded':
        args, more = with_bounded_gates(args, seed)

    def exactly(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaves = finished(leaves, more) if kind == 'bounded' else leaves
        found = [definition(*sequence) for sequence in zip(*(x.split(lengths, 1) for x in leaves), strict=True)]
        return torch.cat([o for o, _ in found], 1), torch.cat([state for _, state in found])

    do = upstream(args[2], 100 + seed)
    found = []
    for run, dtype in ((function_of(op, 'chunk'), None), (exactly, torch.float64)):
        leaves = [(x if dtype is None else x.to(dtype)).clone().requires_grad_(backward) for x in args]
        o, state = run(*leaves) if dtype else run(*leaves, output_final_state=True, **more)
        if backward:
            ((o * do.to(o.dtype)).sum() + state.sum()).backward()
        found.append([o, state, *(leaf.grad for leaf in leaves)])
    names = ('o', 'state', *(f'd{name}' for name in NAMES))
    return {name: relative(ours, exact) for name, ours, exact in zip(names, *found, strict=True) if ours is not None}


def chunked(op: str, shape: tuple[int, ...], kind: str) -> Iterator[dict[str, Any]]:
    """One shape: times in ms, peak memory of forward and backward in MiB beyond the inputs; all so far, when there is more:
    a package that tunes itself may take longer over the rest than there is time."""
    call = function_of(op, 'chunk')
    if kind == 'packed':
        args, cu_seqlens = side_by_side(op, shape)
        call = functools.partial(call, cu_seqlens=cu_seqlens)
    else:
        args = inputs(op, *shape)
    if kind == 'bounded':
        args, more = with_bounded_gates(args)
        call = functools.partial(call, **more)
    do = torch.randn_like(args[2])

    leaves = [a.clone().requires_grad_() for a in args]
    # A first backward with a given gradient imports much of PyTorch (a second or more), whatever it is of.
    torch.autograd.grad(leaves[0] * 2, leaves[0], torch.ones_like(leaves[0]))

    def forward() -> None:
        with torch.no_grad():
            call(*args)

    def both() -> None:
        torch.autograd.grad(call(*leaves)[0], leaves, do)

    row: dict[str, Any] = {}
    for name, wanted in (('forward', forward), ('both', both)):
        try:
            began = time.perf_counter()
            wanted()
            torch.cuda.synchronize()
        except Exception as refused:
            row[f'{name}_refused'] = said(refused)
            yield row
            continue
        row[f'{name}_first_s'] = time.perf_counter() - began
        row[f'{name}_ms'] = gpu_ms(wanted)
        row[f'{name}_wall_ms'] = wall_ms(wanted, calls=20, rounds=5)
        row[f'{name}_peak_mib'] = peak_mib(wanted)
        yield row
    if 'forward_ms' in row:
        row['errors'] = errors(op, shape[-1], 'both_ms' in row, kind)
        yield row


def decoding(op: str, batch: int, heads: int = 16, dim: int = 128) -> dict[str, Any]:
    """One decode step: GPU time by graph replay, wall time of calls in a row, in µs. Steps take turns with LAYERS states, as
    the layers of a model do: one state would come from the GPU's cache each time."""
    args = inputs(op, batch, 1, heads, dim)
    named = dict(zip(NAMES, args, strict=True))
    states = [torch.randn(batch, heads, dim, dim, device=DEVICE) for _ in range(LAYERS)]
    turn = itertools.cycle(states)
    call = function_of(op, 'decode')

    def step() -> Any:
        return call(**named, initial_state=next(turn), output_final_state=True)

    with torch.no_grad():
        o, final = call(**named, initial_state=states[0], output_final_state=True)
        exact = definition(*(x.double() for x in args), initial_state=states[0].double())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in states:
                step()
        gpu = gpu_ms(graph.replay) / LAYERS * 1000
        # fewer in a row than the GPU's queue holds: launching never waits
        wall = wall_ms(step, calls=100, rounds=50) * 1000
        launch = float('inf')
        for _ in range(50):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(100):
                step()
            launch = min(launch, (time.perf_counter() - began) / 100)
    error = {'o': relative(o, exact[0]), 'state': relative(final, exact[1])}
    return {'gpu_us': gpu, 'wall_us': wall, 'host_us': launch * 1e6, 'errors': error}


def rows(backends: list[str] | None, ops: list[str], shapes: list[tuple[int, ...]], kinds: list[str]) -> Any:
    for op in ops:
        for backend in backends or BACKENDS[op]:
            with only(backend, op):
                for shape in shapes if 'chunk' in kinds else ():
                    for row in chunked(op, shape, 'chunk'):
                        yield {'op': op, 'backend': backend, 'shape': [*shape], **row}
                if 'packed' in kinds:
                    for row in chunked(op, PACKED, 'packed'):
                        yield {'op': op, 'backend': backend, 'shape': [*PACKED], 'packed': True, **row}
                for shape in shapes if 'bounded' in kinds and op == 'kda' else ():
                    for row in chunked(op, shape, 'bounded'):
                        yield {'op': op, 'backend': backend, 'shape': [*shape], 'bounded': True, **row}
                if backend not in ('default', FLA) or 'decode' not in kinds:
                    continue
                for batch in DECODE:
                    try:
                        row = decoding(op, batch)
                    except Exception as refused:
                        row = {'refused': said(refused)}
                    yield {'op': op, 'backend': backend, 'decode': batch, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='write the results there')
    parser.add_argument('--fla', type=Path, help='folder of an unpacked fla-core: measure it as well')
    parser.add_argument('--op', choices=OPS, action='append', help='only this operation')
    parser.add_argument('--backend', action='append', help='only this backend')
    parser.add_argument(
        '--shape', type=int, choices=range(len(SHAPES)), action='append', help=f'only these of {SHAPES}, of chunks'
    )
    parser.add_argument(
        '--kind', choices=KINDS, action='append', help='only this kind of step; packed and bounded only if asked for'
    )
    parser.add_argument('--lines', action='store_true', help='a JSON object a line: how the process for FLA answers')
    options = parser.parse_args()
    ops = options.op or list(OPS)
    shapes = [SHAPES[i] for i in options.shape or range(len(SHAPES))]
    kinds = options.kind or ['chunk', 'decode']
    if options.lines:
        for row in rows([FLA], ops, shapes, kinds):
            print(json.dumps(row), flush=True)
        return
    if not torch.cuda.is_available():
        print('These kernels need a GPU: nothing is measured here.')
        return
    about = machine(packages=('flash-qla', 'tokenspeed-flashkda', 'tilelang'), fla=options.fla)
    words = command('delta_rules', options, 'op', 'backend', 'shape', 'kind')
    results = ResultFile(options.json, 'delta_rules', **about, command=words)

    def add(row: dict[str, Any]) -> None:
        results.add(row, instead=bool(results.rows) and is_more_of(row, results.rows[-1]))

    for row in rows(options.backend, ops, shapes, kinds):
        add(row)
    if options.fla:
        again = [
            *(f'--op={op}' for op in ops),
            *(f'--shape={i}' for i in options.shape or ()),
            *(f'--kind={kind}' for kind in kinds),
        ]
        for row in fla_rows(__file__, again, options.fla):
            add(row)
    results.complete()


def is_more_of(row: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(row.get(name) == other.get(name) for name in ('op', 'backend', 'shape', 'packed', 'bounded', 'decode'))


if __name__ == '__main__':
    main()
