"""Measures the modules on a GPU: times of forward and of forward with backward, and peak memory. Measures each backend that
can run, plain PyTorch, torch.compile of it and, with --fla, flash-linear-attention, in one run on one card.

    python benchmarks/modules.py --json benchmarks/results/modules.json --fla folder/of/fla-core
    python benchmarks/modules.py --only rms_norm --only swiglu --size large --backend default --backend torch

The JSON holds a row for each module, size and backend. Times are in ms, memory is in MiB beyond the inputs. `*_gbs` is the
least traffic of a call (each input read once, each result written once) over its time; `copy_gbs` is the bandwidth of a copy
of a gigabyte in the same process, and `*_copy_ms` the time of a copy with the call's traffic. `errors` are relative RMS
errors of the backend against float64, on at most 512 rows of the same width. `*_refused` is the error of a backend that
cannot run. Inputs are normal numbers in bfloat16.

FLA runs in a separate process, because both packages are imported as `fla`: --fla takes the folder in which its
distribution was unpacked. Its autotuning takes most of the time. The file is written after each row. An interrupted run is
resumed by the same command with --continue, on a card of the same kind with the same packages: `earlier` then holds the
start and the copy bandwidth of each part, and refused rows are not tried again. --quick runs everything but torch.compile
once on a CPU, at tiny sizes.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _fla_process import FLA, fla_rows, only_backend
from _gpu import gpu_ms, time_call
from _module_cases import MODULES, Module, Tensors, inputs, results_of, with_gradients
from _results import ResultFile, command, error_line, has_gpu, machine, now, parser, print_lines, relative_rms

# backends of this package; Liger-Kernel called directly, where our backend refuses; plain PyTorch; the same compiled
OURS = ('default', 'reference', 'liger')
LIGER, PLAIN, COMPILED = 'liger-kernel', 'torch', 'torch.compile'
BACKENDS = (*OURS, LIGER, PLAIN, COMPILED, FLA)
SIZES = ('small', 'large')


class Clock:
    """Measures on a GPU or, with --quick, one call on a CPU."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.device = 'cpu' if quick else 'cuda'
        self._copies: dict[float, float] = {}
        moved = 2**21 if quick else 2**31
        self.copy_gbs = moved / self.copy_ms(moved) / 1e6

    def ms(self, function: Callable[[], object]) -> float:
        """Time of a call."""
        if not self.quick:
            return gpu_ms(function)
        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e3

    def copy_ms(self, moved: float) -> float:
        """Time of a copy that moves so many bytes, half of them read and half written."""
        if moved not in self._copies:
            source = torch.zeros(max(int(moved // 4), 1), dtype=torch.bfloat16, device=self.device)
            target = torch.empty_like(source)
            self._copies[moved] = self.ms(lambda: target.copy_(source))
        return self._copies[moved]

    def measure(self, name: str, call: Callable[[], object]) -> dict[str, float | str]:
        """Measures a call as `time_call` does; with --quick only the times of a first and a second call."""
        if not self.quick:
            return time_call(name, call, calls=10)
        try:
            return {f'{name}_first_s': self.ms(call) / 1e3, f'{name}_ms': self.ms(call)}
        except Exception as error:
            return {f'{name}_refused': error_line(error)}

    def free(self) -> None:
        """Frees a row's memory and what was compiled for it."""
        gc.collect()
        torch._dynamo.reset()
        if not self.quick:
            torch.cuda.empty_cache()


def function_of(module: Module, backend: str) -> Callable[..., Any]:
    """Returns the function that a backend runs."""
    if backend == LIGER and module.liger is not None:
        return module.liger
    if backend == PLAIN:
        return module.plain
    if backend == COMPILED:
        return torch.compile(module.plain, dynamic=False)
    return module.function()


def errors(module: Module, backend: str, shape: tuple[int, ...], device: str, backward: bool) -> dict[str, float]:
    """Returns relative RMS errors against float64, of results and, with `backward`, of gradients."""
    tensors = inputs(module, module.few(shape), device)
    found = []
    for function, dtype in ((function_of(module, backend), None), (module.plain, torch.float64)):
        given, leaves = with_gradients(tensors, dtype) if backward or dtype else (copies(tensors), [])
        with torch.set_grad_enabled(backward):
            results = results_of(module, function(**given))
        do = [_gradient(one, seed, device) for seed, one in enumerate(results, 1)]
        found.append([*results, *(torch.autograd.grad(results, leaves, do) if backward else ())])
    names = list(module.results)
    if backward:
        names += [f'd{name}' for name, one in with_gradients(tensors)[0].items() if one.requires_grad]
    return {name: relative_rms(*pair) for name, *pair in zip(names, *found, strict=True)}


def _gradient(result: torch.Tensor, seed: int, device: str) -> torch.Tensor:
    """Returns a gradient with the same numbers for a result in any dtype."""
    if not result.dim():
        return torch.ones_like(result)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(result.shape, generator=generator, device=device).bfloat16().to(result.dtype)


def copies(tensors: Tensors) -> Tensors:
    """Returns copies, which a call may change."""
    return {name: one.clone() for name, one in tensors.items()}


def measured(module: Module, backend: str, shape: tuple[int, ...], clock: Clock) -> dict[str, Any]:
    """Returns the row of a module, size and backend, without its key."""
    tensors = inputs(module, shape, clock.device)
    given, leaves = with_gradients(tensors)
    function = function_of(module, backend)
    # contiguous, as the gradient from a matrix product is: the plain result may be transposed
    do = [torch.ones(one.shape, dtype=one.dtype, device=one.device) for one in results_of(module, module.plain(**tensors))]

    def forward() -> None:
        with torch.no_grad():
            function(**tensors)

    def both() -> None:
        results = results_of(module, function(**given))
        torch.autograd.grad(results, leaves, [one.to(result.dtype) for one, result in zip(do, results, strict=True)])

    row: dict[str, Any] = {'copy_gbs': clock.copy_gbs}
    for name, call, moved in zip(
        ('forward', 'both'), (forward, both), module.bytes_of(tensors) or (None, None), strict=True
    ):
        if name == 'both' and not module.backward:
            row['both_refused'] = 'there is no backward'
            continue
        row |= clock.measure(name, call)
        if moved and f'{name}_ms' in row:
            row[f'{name}_copy_ms'] = clock.copy_ms(moved)
            row[f'{name}_gbs'] = moved / row[f'{name}_ms'] / 1e6
    if 'forward_ms' in row:
        try:
            row['errors'] = errors(module, backend, shape, clock.device, backward='both_ms' in row)
        except Exception as error:
            row['errors_refused'] = error_line(error)
    return row


def rows(
    backends: list[str], names: list[str], sizes: list[str], clock: Clock, done: set[tuple[str, str, str]]
) -> Iterator[dict[str, Any]]:
    """Yields all rows but those whose keys are in `done`."""
    for name in names:
        for size in sizes:
            shape = MODULES[name].sizes['quick' if clock.quick else size]
            for backend in backends:
                if (name, size, backend) in done or (backend == LIGER and MODULES[name].liger is None):
                    continue
                key = {'module': name, 'size': size, 'shape': shape, 'axes': MODULES[name].axes, 'backend': backend}
                try:
                    with only_backend(backend, 'modules', foreign=(LIGER, PLAIN, COMPILED, FLA)):
                        row = measured(MODULES[name], backend, shape, clock)
                except Exception as error:
                    row = {'forward_refused': error_line(error), 'both_refused': error_line(error)}
                yield {**key, **row}
                clock.free()


def keys(known: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Returns the module, size and backend of each row."""
    return {(row['module'], row['size'], row['backend']) for row in known}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, peer=True)
    options.add_argument('--continue', dest='resume', action='store_true', help='resume the interrupted run in --json')
    options.add_argument('--only', choices=MODULES, action='append', help='measure only this module')
    options.add_argument('--size', choices=SIZES, action='append', help='measure only this size')
    options.add_argument('--backend', action='append', help=f'only this one of {", ".join(BACKENDS)}, or another of ours')
    chosen = options.parse_args(arguments)
    if not chosen.quick and not has_gpu():
        return
    clock = Clock(chosen.quick)
    names, sizes = chosen.only or list(MODULES), chosen.size or list(SIZES[: 1 if chosen.quick else None])
    if chosen.lines:
        # prints only the rows that the file lacks
        known = json.loads(chosen.json.read_text())['rows'] if chosen.resume else []
        print_lines(rows([FLA], names, sizes, clock, keys(known)))
        return
    results = ResultFile(
        chosen.json,
        'modules',
        **machine(chosen.quick, ('liger-kernel', 'flashinfer-python', 'flag-gems', 'causal-conv1d'), chosen.fla),
        command=command('modules', chosen, 'only', 'size', 'backend'),
        began=now(),
        copy_gbs=clock.copy_gbs,
    )
    if chosen.resume:
        results.resume()
    wanted = chosen.backend or [name for name in BACKENDS if not (chosen.quick and name == COMPILED)]
    for row in rows([backend for backend in wanted if backend != FLA], names, sizes, clock, keys(results.rows)):
        results.add(row)
    if chosen.fla and FLA in wanted:
        clock.free()
        repeated = [*(['--quick'] if chosen.quick else []), *(f'--only={name}' for name in chosen.only or ())]
        repeated += [f'--size={size}' for size in chosen.size or ()]
        repeated += ['--continue', f'--json={chosen.json}'] if chosen.resume else []
        for row in fla_rows(__file__, repeated, chosen.fla):
            results.add(row)
    results.complete()


if __name__ == '__main__':
    main()
