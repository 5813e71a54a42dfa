"""Measures the gated delta rule and KDA on a GPU: times of forward, forward with backward, decode step and first call, and
peak memory. Measures each backend that can run and, with --fla, flash-linear-attention, in one run on one card.

    python benchmarks/delta_rules.py --json benchmarks/results/delta_rules.json --fla folder/of/fla-core

FLA runs in a separate process, because both packages are imported as `fla`: --fla takes the folder in which its
distribution was unpacked. Its autotuning takes minutes, which `forward_first_s` and `both_first_s` include. `vendors.py`
measures FlashKDA, which takes raw gates only.

The JSON holds a row for each operation, backend and shape [B, T, H, K]. `packed` rows have B sequences of T steps in one
row, separated by `cu_seqlens`. `bounded` rows are KDA with raw gates and a lower bound, which decay faster. `decode` is the
batch size of a decode step. Times are in ms (`*_us` in µs), memory in MiB beyond the inputs. `errors` are relative RMS
errors of the backend against the definition in float64, on 320 steps of two heads, the mean of three seeds. Inputs are
random, never zeros. --quick: one decode step of the default.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from _delta_rule_inputs import (
    DEVICE,
    NAMES,
    cu_seqlens_of,
    definition,
    inputs,
    output_gradient,
    packed_inputs,
    with_bounded_gates,
    with_finished_gates,
)
from _fla_process import FLA, fla_rows, only_backend
from _gpu import gpu_ms, time_call, wall_ms
from _results import ResultFile, command, error_line, has_gpu, machine, parser, print_lines, relative_rms

OPS = ('gated_delta_rule', 'kda')
KINDS = ('chunk', 'packed', 'bounded', 'decode')
SHAPES = ((4, 2048, 16, 128), (1, 8192, 96, 128))
PACKED = (4, 2048, 96, 128)
DECODE = (1, 32, 256)
# of the model whose decode step is measured
LAYERS = 20
BACKENDS = {'gated_delta_rule': ('default', 'tilelang', 'flash_qla'), 'kda': ('default', 'tilelang')}


def function_of(op: str, kind: str) -> Any:
    """Returns the public function of an operation for chunks or for a decode step."""
    if op == 'kda':
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        return {'chunk': chunk_kda, 'decode': fused_recurrent_kda}[kind]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    return {'chunk': chunk_gated_delta_rule, 'decode': fused_recurrent_gated_delta_rule}[kind]


def errors(op: str, dim: int, backward: bool, kind: str) -> dict[str, float]:
    """Returns relative RMS errors of results and, with `backward`, of gradients for the same do; the mean of three seeds."""
    seeds = [_errors(op, dim, backward, kind, seed) for seed in range(3)]
    return {name: sum(found[name] for found in seeds) / len(seeds) for name in seeds[0]}


def _errors(op: str, dim: int, backward: bool, kind: str, seed: int) -> dict[str, float]:
    args = inputs(op, 1, 320, 2, dim, seed)
    lengths, more = (320,), {}
    if kind == 'packed':
        lengths = (200, 120)
        more = {'cu_seqlens': cu_seqlens_of(*lengths)}
    elif kind == 'bounded':
        args, more = with_bounded_gates(args, seed)

    def exactly(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaves = with_finished_gates(leaves, more) if kind == 'bounded' else leaves
        found = [definition(*sequence) for sequence in zip(*(x.split(lengths, 1) for x in leaves), strict=True)]
        return torch.cat([o for o, _ in found], 1), torch.cat([state for _, state in found])

    do = output_gradient(args[2], 100 + seed)
    found = []
    for run, dtype in ((function_of(op, 'chunk'), None), (exactly, torch.float64)):
        leaves = [(x if dtype is None else x.to(dtype)).clone().requires_grad_(backward) for x in args]
        o, state = run(*leaves) if dtype else run(*leaves, output_final_state=True, **more)
        if backward:
            ((o * do.to(o.dtype)).sum() + state.sum()).backward()
        found.append([o, state, *(leaf.grad for leaf in leaves)])
    names = ('o', 'state', *(f'd{name}' for name in NAMES))
    return {name: relative_rms(ours, exact) for name, ours, exact in zip(names, *found, strict=True) if ours is not None}


def chunked(op: str, shape: tuple[int, ...], kind: str) -> Iterator[dict[str, Any]]:
    """Yields the row of one shape after each measurement, so that an interrupted run keeps the earlier ones: autotuning may
    take longer than the time left."""
    call = function_of(op, 'chunk')
    if kind == 'packed':
        args, cu_seqlens = packed_inputs(op, shape)
        call = functools.partial(call, cu_seqlens=cu_seqlens)
    else:
        args = inputs(op, *shape)
    if kind == 'bounded':
        args, more = with_bounded_gates(args)
        call = functools.partial(call, **more)
    do = torch.randn_like(args[2])

    leaves = [a.clone().requires_grad_() for a in args]
    # The first backward of a process imports much of PyTorch, which takes a second or more.
    torch.autograd.grad(leaves[0] * 2, leaves[0], torch.ones_like(leaves[0]))

    def forward() -> None:
        with torch.no_grad():
            call(*args)

    def both() -> None:
        torch.autograd.grad(call(*leaves)[0], leaves, do)

    row: dict[str, Any] = {}
    for name, measured in (('forward', forward), ('both', both)):
        row |= time_call(name, measured)
        yield row
    if 'forward_ms' in row:
        row['errors'] = errors(op, shape[-1], 'both_ms' in row, kind)
        yield row


def decoding(op: str, batch: int, heads: int = 16, dim: int = 128) -> dict[str, Any]:
    """Returns the row of a decode step in µs: GPU time by graph replay, wall time and host time of consecutive calls.

    Steps cycle through LAYERS states, as the layers of a model do: a single state would always be in the GPU's cache.
    """
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
        # 100 calls fit into the GPU's queue, so launching never waits
        wall = wall_ms(step, calls=100, rounds=50) * 1000
        launch = float('inf')
        for _ in range(50):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(100):
                step()
            launch = min(launch, (time.perf_counter() - began) / 100)
    error = {'o': relative_rms(o, exact[0]), 'state': relative_rms(final, exact[1])}
    return {'gpu_us': gpu, 'wall_us': wall, 'host_us': launch * 1e6, 'errors': error}


def rows(
    backends: list[str] | None,
    ops: list[str],
    shapes: list[tuple[int, ...]],
    kinds: list[str],
    batches: Sequence[int] = DECODE,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of all kinds; a row of chunks again after each of its measurements."""
    for op in ops:
        for backend in backends or BACKENDS[op]:
            with only_backend(backend, op):
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
                for batch in batches:
                    try:
                        row = decoding(op, batch)
                    except Exception as error:
                        row = {'refused': error_line(error)}
                    yield {'op': op, 'backend': backend, 'decode': batch, **row}


def main() -> None:
    options = parser(__doc__, peer=True)
    options.add_argument('--op', choices=OPS, action='append', help='measure only this operation')
    options.add_argument('--backend', action='append', help='measure only this backend')
    options.add_argument(
        '--shape', type=int, choices=range(len(SHAPES)), action='append', help=f'index of the only shape, of {SHAPES}'
    )
    options.add_argument('--kind', choices=KINDS, action='append', help='only this kind of row (default: chunk and decode)')
    chosen = options.parse_args()
    ops = chosen.op or list(OPS)
    shapes = [SHAPES[i] for i in chosen.shape or range(len(SHAPES))]
    kinds = chosen.kind or ['chunk', 'decode']
    backends, batches = chosen.backend, DECODE
    if chosen.quick:
        ops, kinds, backends, batches = ops[:1], ['decode'], ['default'], DECODE[:1]
    if chosen.lines:
        print_lines(rows([FLA], ops, shapes, kinds, batches))
        return
    if not has_gpu():
        return
    about = machine(packages=('flash-qla', 'tokenspeed-flashkda', 'tilelang'), fla=chosen.fla)
    words = command('delta_rules', chosen, 'op', 'backend', 'shape', 'kind')
    results = ResultFile(chosen.json, 'delta_rules', **about, command=words)

    def add(row: dict[str, Any]) -> None:
        results.add(row, replace=bool(results.rows) and same_case(row, results.rows[-1]))

    for row in rows(backends, ops, shapes, kinds, batches):
        add(row)
    if chosen.fla:
        repeated = [
            *(['--quick'] if chosen.quick else []),
            *(f'--op={op}' for op in ops),
            *(f'--shape={i}' for i in chosen.shape or ()),
            *(f'--kind={kind}' for kind in kinds),
        ]
        for row in fla_rows(__file__, repeated, chosen.fla):
            add(row)
    results.complete()


def same_case(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows measure the same call."""
    return all(row.get(name) == other.get(name) for name in ('op', 'backend', 'shape', 'packed', 'bounded', 'decode'))


if __name__ == '__main__':
    main()
