"""Kernels of a chunked delta rule on a GPU with other options of their launches: what they do to bits, errors and times.

    python benchmarks/launch_options.py gated_delta_rule 'intra_chunk_bwd BK=64 BV=64' 'inter_chunk_bwd num_stages=1'

After the kernels as they are comes each variant: kernels with the options that are changed, apart by commas. A block that
a grid or another kernel follows from cannot be changed so. Before its times, a variant says

- `unsteady`: how many of six runs at full size gave other bits than its first. Anything but 0 is a race;
- `as_before`: whether its bits are those of the kernels as they are;
- `error`: the largest relative RMS of outputs and gradients against float64, on 320 steps of two heads.

`kernels` are launches and µs of each, by PyTorch's profiler, in a forward with backward. `--packed` takes the sequences of a
shape as one packed row.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _delta_rule_inputs import inputs, side_by_side, upstream
from _gpu import gpu_ms
from _results import ResultFile, command, machine, said
from delta_rules import OPS, SHAPES, errors, function_of, only
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Variant = dict[str, dict[str, int]]


def launches_of(op: str) -> Any:
    """The module that launches the kernels of an operation, all of which it knows by their names."""
    return importlib.import_module(f'fla.ops.{op}.kernels.launch')


def parsed(op: str, text: str) -> Variant:
    """`'a X=1 Y=2, b X=3'` as `{'a': {'X': 1, 'Y': 2}, 'b': {'X': 3}}`.

    Raises:
        ValueError: for what is no kernel of `op`, or no number, and for a kernel without options or named twice.
    """
    variant: Variant = {}
    for kernel in text.split(','):
        name, *options = kernel.split() or ['']
        if not hasattr(getattr(launches_of(op), name, None), 'fn'):
            raise ValueError(f'{text!r}: {op} has no kernel {name!r}')
        if not options or name in variant:
            raise ValueError(f'{text!r}: name {name} once, with its options')
        variant[name] = {key: int(value) for key, _, value in (option.partition('=') for option in options)}
    return variant


def let_vary(op: str) -> Variant:
    """What is put into it changes the launches of the kernels of that name."""
    module = launches_of(op)
    as_it_is: Callable[..., Any] = module.launch
    variant: Variant = {}

    def launch(kernel: Any, *args: Any, **more: Any) -> Callable[..., Any]:
        run, other = as_it_is(kernel, *args, **more), variant.get(kernel.fn.__name__, {})
        return lambda *tensors, **options: run(*tensors, **{**options, **other})

    vars(module)['launch'] = launch
    return variant


def by_kernel(function: Callable[[], object], repeats: int = 5) -> dict[str, list[float]]:
    """How often each kernel is launched, and how many µs one takes."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA:
            times.setdefault(event.name[:60], []).append(event.device_time)
    return {name: [len(all_) / repeats, sum(all_) / len(all_)] for name, all_ in times.items()}


def measured(
    op: str, shape: tuple[int, ...], packed: bool, before: list[torch.Tensor] | None
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A variant's row and results; `before`: results of the kernels as they are."""
    options: dict[str, Any] = {}
    if packed:
        args, options['cu_seqlens'] = side_by_side(op, shape)
    else:
        args = inputs(op, *shape)
    call = function_of(op, 'chunk')
    do = upstream(args[2], 1)
    leaves = [a.clone().requires_grad_() for a in args]

    def forward() -> None:
        with torch.no_grad():
            call(*args, **options)

    def both() -> list[torch.Tensor]:
        o, _ = call(*leaves, **options)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    first = both()
    row: dict[str, Any] = {'unsteady': sum(not same(first, both()) for _ in range(6))}
    if before is not None:
        row['as_before'] = same(first, before)
    row['error'] = max(errors(op, shape[-1], True, 'packed' if packed else 'chunk').values())
    return {**row, 'forward_ms': gpu_ms(forward), 'both_ms': gpu_ms(both), 'kernels': by_kernel(both)}, first


def rows(op: str, variants: dict[str, Variant], shape: tuple[int, ...], packed: bool) -> Iterator[dict[str, Any]]:
    changed = let_vary(op)
    with only('default', op):
        row, as_it_is = measured(op, shape, packed, None)
        yield {'variant': 'as it is', **row}
        for text, variant in variants.items():
            changed.clear()
            changed.update(variant)
            try:
                row, _ = measured(op, shape, packed, as_it_is)
            except Exception as refused:
                # more than a block can hold, say: the others may be compiled all the same
                row = {'refused': said(refused)}
            yield {'variant': text, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('op', choices=OPS, nargs='?', default=OPS[0])
    parser.add_argument('variant', nargs='*', help="such as 'inter_chunk_bwd num_stages=1, intra_chunk_bwd num_warps=8'")
    parser.add_argument('--shape', type=int, choices=range(len(SHAPES)), default=1, help=f'which of {SHAPES}')
    parser.add_argument('--packed', action='store_true')
    parser.add_argument('--json', type=Path, help='write the results there')
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print('These kernels need a GPU: nothing is measured here.')
        return
    try:
        variants = {text: parsed(options.op, text) for text in options.variant}
    except ValueError as error:
        parser.error(str(error))
    words = [options.op, *map(shlex.quote, options.variant), '--shape', str(options.shape), *['--packed'] * options.packed]
    results = ResultFile(
        options.json, 'launch_options', **machine(), command=' '.join([command('launch_options', options), *words])
    )
    for row in rows(options.op, variants, SHAPES[options.shape], options.packed):
        results.add({'op': options.op, 'shape': [*SHAPES[options.shape]], 'packed': options.packed, **row})
    results.complete()


if __name__ == '__main__':
    main()
