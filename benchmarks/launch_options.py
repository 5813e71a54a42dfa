"""Measures the kernels of a chunked delta rule on a GPU with other launch options: bits, errors and times.

    python benchmarks/launch_options.py gated_delta_rule 'intra_chunk_bwd BK=64 BV=64' 'inter_chunk_bwd num_stages=1'

A variant is a comma-separated list of kernels with their changed options. A block size that determines a grid or is shared
with another kernel cannot be changed this way. --packed takes the sequences of a shape as one packed row.

The JSON holds a row for the unchanged kernels and one for each variant:

- `unsteady`: how many of six runs at full size gave other bits than the first. Anything but 0 is a race.
- `as_before`: whether the bits equal those of the unchanged kernels.
- `error`: the largest relative RMS error of outputs and gradients against float64, on 320 steps of two heads.
- `forward_ms`, `both_ms`: GPU times of forward and of forward with backward.
- `kernels`: number of launches and mean µs of each kernel in a forward with backward, by PyTorch's profiler.

--quick: the unchanged kernels at the smallest shape.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _delta_rule_inputs import inputs, output_gradient, packed_inputs
from _fla_process import only_backend
from _gpu import gpu_ms
from _results import ResultFile, command, error_line, has_gpu, machine, parser
from delta_rules import OPS, SHAPES, errors, function_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Variant = dict[str, dict[str, int]]


def launches_of(op: str) -> Any:
    """Returns the module that launches an operation's kernels and holds them by name."""
    return importlib.import_module(f'fla.ops.{op}.kernels.launch')


def parsed(op: str, text: str) -> Variant:
    """Parses `'a X=1 Y=2, b X=3'` to `{'a': {'X': 1, 'Y': 2}, 'b': {'X': 3}}`.

    Raises:
        ValueError: for an unknown kernel, a value that is not a number, or a kernel without options or named twice.
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


def override_launches(op: str) -> Variant:
    """Returns a variant that launches read: options put into it override those of the named kernels."""
    module = launches_of(op)
    original: Callable[..., Any] = module.launch
    variant: Variant = {}

    def launch(kernel: Any, *args: Any, **more: Any) -> Callable[..., Any]:
        run, other = original(kernel, *args, **more), variant.get(kernel.fn.__name__, {})
        return lambda *tensors, **options: run(*tensors, **{**options, **other})

    vars(module)['launch'] = launch
    return variant


def by_kernel(function: Callable[[], object], repeats: int = 5) -> dict[str, list[float]]:
    """Returns the number of launches of each kernel in a call, and its mean time in µs."""
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
    """Returns a variant's row and results.

    Args:
        op: name of the operation.
        shape: [B, T, H, K].
        packed: the B sequences are one packed row.
        before: results of the unchanged kernels; None to measure these.
    """
    options: dict[str, Any] = {}
    if packed:
        args, options['cu_seqlens'] = packed_inputs(op, shape)
    else:
        args = inputs(op, *shape)
    call = function_of(op, 'chunk')
    do = output_gradient(args[2], 1)
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
    changed = override_launches(op)
    with only_backend('default', op):
        row, unchanged = measured(op, shape, packed, None)
        yield {'variant': 'unchanged', **row}
        for text, variant in variants.items():
            changed.clear()
            changed.update(variant)
            try:
                row, _ = measured(op, shape, packed, unchanged)
            except Exception as error:
                # too much shared memory, for example; the other variants may still compile
                row = {'refused': error_line(error)}
            yield {'variant': text, **row}


def main() -> None:
    options = parser(__doc__)
    options.add_argument('op', choices=OPS, nargs='?', default=OPS[0])
    options.add_argument('variant', nargs='*', help="such as 'inter_chunk_bwd num_stages=1, intra_chunk_bwd num_warps=8'")
    options.add_argument('--shape', type=int, choices=range(len(SHAPES)), default=1, help=f'index of one of {SHAPES}')
    options.add_argument('--packed', action='store_true', help='take the sequences of a shape as one packed row')
    chosen = options.parse_args()
    if not has_gpu():
        return
    try:
        variants = {text: parsed(chosen.op, text) for text in chosen.variant}
    except ValueError as error:
        options.error(str(error))
    if chosen.quick:
        chosen.shape, variants = 0, {}
    words = [chosen.op, *map(shlex.quote, chosen.variant), '--shape', str(chosen.shape), *['--packed'] * chosen.packed]
    results = ResultFile(
        chosen.json, 'launch_options', **machine(), command=' '.join([command('launch_options', chosen), *words])
    )
    for row in rows(chosen.op, variants, SHAPES[chosen.shape], chosen.packed):
        results.add({'op': chosen.op, 'shape': [*SHAPES[chosen.shape]], 'packed': chosen.packed, **row})
    results.complete()


if __name__ == '__main__':
    main()
