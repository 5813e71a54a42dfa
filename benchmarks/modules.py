"""Times of the modules on a GPU: forward, forward with backward, of each backend that can run here, of plain PyTorch and
torch.compile of it and, with --fla, of flash-linear-attention, in one run on one card.

    python benchmarks/modules.py --json benchmarks/results/modules.json --fla folder/of/fla-core
    python benchmarks/modules.py --only rms_norm --only swiglu --size large --backend default --backend torch

Bandwidth is what a call must at least move (each input read once, each result written once) by its time: `copy_gbs` is that
of a copy of a gigabyte in the same process, `forward_copy_ms` and `both_copy_ms` the time of a copy that moves as much as
the call. Beside each time stands the error of the same backend against float64, on rows as wide and at most 512 of them.
Inputs are normal numbers in bfloat16.

FLA runs in a process of its own, because its import name is `fla` too: put the folder that its distribution was unpacked
into after --fla. The result is written after each row, so that a run may be stopped, and the same command with --continue
goes on with it, on such a card with the same packages. When each part began, and how quick a copy was, is kept; a row that
was refused is not tried again. FLA's own tuning takes most of the time. --dry tries everything on a CPU, at sizes that mean
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _fla_process import FLA, fla_rows
from _gpu import gpu_ms, peak_mib, wall_ms
from _module_cases import MODULES, Module, Tensors, inputs, relative, results_of, with_gradients
from _results import ResultFile, command, machine, now, said

# of this package, by name of a backend; a package by itself, where its backend refuses; plain PyTorch; the same compiled
OURS = ('default', 'reference', 'liger')
LIGER, PLAIN, COMPILED = 'liger-kernel', 'torch', 'torch.compile'
BACKENDS = (*OURS, LIGER, PLAIN, COMPILED, FLA)
SIZES = ('small', 'large')


class Clock:
    """Times on a GPU or, to try the benchmark, of one call on a CPU."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = 'cpu' if dry else 'cuda'
        self._copies: dict[float, float] = {}
        moved = 2**21 if dry else 2**31
        self.copy_gbs = moved / self.copy_ms(moved) / 1e6

    def ms(self, function: Callable[[], object]) -> float:
        """Of one call."""
        if not self.dry:
            return gpu_ms(function)
        began = time.perf_counter()
        function()
        return (time.perf_counter() - began) * 1e3

    def copy_ms(self, moved: float) -> float:
        """Of a copy that moves so many bytes, half of them read and half written."""
        if moved not in self._copies:
            source = torch.zeros(max(int(moved // 4), 1), dtype=torch.bfloat16, device=self.device)
            target = torch.empty_like(source)
            self._copies[moved] = self.ms(lambda: target.copy_(source))
        return self._copies[moved]

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Before the next row: no memory of this one, and nothing compiled for it."""
        gc.collect()
        torch._dynamo.reset()
        if not self.dry:
            torch.cuda.empty_cache()


def function_of(module: Module, backend: str) -> Callable[..., Any]:
    """What a backend runs."""
    if backend == LIGER and module.liger is not None:
        return module.liger
    if backend == PLAIN:
        return module.plain
    if backend == COMPILED:
        return torch.compile(module.plain, dynamic=False)
    return module.function()


def only(backend: str) -> contextlib.AbstractContextManager[Any]:
    """Within it, this backend runs, or the call raises."""
    if backend in (LIGER, PLAIN, COMPILED, FLA):
        return contextlib.nullcontext()
    from fla.backends import use_backend

    return use_backend(backend, op='modules')


def errors(module: Module, backend: str, shape: tuple[int, ...], device: str, backward: bool) -> dict[str, float]:
    """Relative RMS against float64, of the result and of gradients."""
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
    return {name: relative(*pair) for name, *pair in zip(names, *found, strict=True)}


def _gradient(result: torch.Tensor, seed: int, device: str) -> torch.Tensor:
    """The same numbers for a result in any dtype."""
    if not result.dim():
        return torch.ones_like(result)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(result.shape, generator=generator, device=device).bfloat16().to(result.dtype)


def copies(tensors: Tensors) -> Tensors:
    """What a call may change."""
    return {name: one.clone() for name, one in tensors.items()}


def measured(module: Module, backend: str, shape: tuple[int, ...], clock: Clock) -> dict[str, Any]:
    """One row: times in ms, bandwidth, memory beyond the inputs. What a backend refuses is said in its words."""
    tensors = inputs(module, shape, clock.device)
    given, leaves = with_gradients(tensors)
    function = function_of(module, backend)
    # contiguous, as a gradient is that comes through a product: the plain result may be a transposed one
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
        try:
            began = time.perf_counter()
            call()
            clock.synchronize()
            row[f'{name}_first_s'] = time.perf_counter() - began
            row[f'{name}_ms'] = clock.ms(call)
            if not clock.dry:
                row[f'{name}_wall_ms'] = wall_ms(call, calls=10, rounds=5)
                row[f'{name}_peak_mib'] = peak_mib(call)
            if moved:
                row[f'{name}_copy_ms'] = clock.copy_ms(moved)
                row[f'{name}_gbs'] = moved / row[f'{name}_ms'] / 1e6
        except Exception as refused:
            row[f'{name}_refused'] = said(refused)
    if 'forward_ms' in row:
        try:
            row['errors'] = errors(module, backend, shape, clock.device, backward='both_ms' in row)
        except Exception as refused:
            row['errors_refused'] = said(refused)
    return row


def rows(
    backends: list[str], names: list[str], sizes: list[str], clock: Clock, done: set[tuple[str, str, str]]
) -> Iterator[dict[str, Any]]:
    """All but those that are done."""
    for name in names:
        for size in sizes:
            shape = MODULES[name].sizes['dry' if clock.dry else size]
            for backend in backends:
                if (name, size, backend) in done or (backend == LIGER and MODULES[name].liger is None):
                    continue
                key = {'module': name, 'size': size, 'shape': shape, 'axes': MODULES[name].axes, 'backend': backend}
                try:
                    with only(backend):
                        row = measured(MODULES[name], backend, shape, clock)
                except Exception as refused:
                    row = {'forward_refused': said(refused), 'both_refused': said(refused)}
                yield {**key, **row}
                clock.tidy()


def keys(known: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(row['module'], row['size'], row['backend']) for row in known}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='write the results there, after each row')
    parser.add_argument('--continue', dest='go_on', action='store_true', help='go on with the stopped run in --json')
    parser.add_argument('--fla', type=Path, help='folder of an unpacked fla-core: measure it as well')
    parser.add_argument('--only', choices=MODULES, action='append', help='only this module')
    parser.add_argument('--size', choices=SIZES, action='append', help='only this size')
    parser.add_argument('--backend', action='append', help=f'only this one of {", ".join(BACKENDS)}, or any other of ours')
    parser.add_argument('--dry', action='store_true', help='try it on a CPU, at tiny sizes; its times mean nothing')
    parser.add_argument('--lines', action='store_true', help='a JSON object a line: how the process for FLA answers')
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        print('These kernels need a GPU: nothing is measured here.')
        return
    clock = Clock(options.dry)
    names, sizes = options.only or list(MODULES), options.size or list(SIZES)
    if options.lines:
        # its rows alone, of which the file has those that are done
        known = json.loads(options.json.read_text())['rows'] if options.go_on else []
        for row in rows([FLA], names, sizes, clock, keys(known)):
            print(json.dumps(row), flush=True)
        return
    results = ResultFile(
        options.json,
        'modules',
        **machine(options.dry, ('liger-kernel', 'flashinfer-python', 'flag-gems', 'causal-conv1d'), options.fla),
        command=command('modules', options, 'only', 'size', 'backend'),
        began=now(),
        copy_gbs=clock.copy_gbs,
    )
    if options.go_on:
        results.go_on()
    wanted = options.backend or list(BACKENDS)
    for row in rows([one for one in wanted if one != FLA], names, sizes, clock, keys(results.rows)):
        results.add(row)
    if options.fla and FLA in wanted:
        clock.tidy()
        again = [*(['--dry'] if options.dry else []), *(f'--only={name}' for name in options.only or ())]
        again += [f'--size={size}' for size in options.size or ()]
        again += ['--continue', f'--json={options.json}'] if options.go_on else []
        for row in fla_rows(__file__, again, options.fla):
            results.add(row)
    results.complete()


if __name__ == '__main__':
    main()
