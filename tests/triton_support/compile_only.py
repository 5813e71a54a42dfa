"""Compile what an operation launches, for a GPU that need not exist, and launch nothing.

    with compile_only((9, 0)) as compiled:
        chunk_gla(q, k, v, g)           # on CPU or meta tensors
    print(*compiled, sep='\\n')          # chunk_gla_fwd sm_90: 48.0 KiB shared, 128 registers, 0 B spilled, 4 warps, 1.2 s

Inside, every kernel is specialised from the arguments of its launch and compiled to a cubin, in a cache of its own; what it
would have computed is missing, so outputs hold whatever was in memory. `fla.utils.devices` and `torch.cuda`'s two functions
about a device answer for the GPU asked for. On leaving, kernels that do not fit that GPU or, of Hopper's, that refill memory
in use (see `refills`) are an AssertionError, and so is a block that launched none.
"""

import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, MockTensor

from fla.utils import devices
from tests.triton_support.refills import refilled_too_early

# Bytes of shared memory that one block may ask for: the CUDA programming guide's table of technical specifications.
SHARED_MEMORY = {
    **dict.fromkeys([(8, 0), (8, 7)], 163 * 1024),
    **dict.fromkeys([(8, 6), (8, 9), (12, 0), (12, 1)], 99 * 1024),
    **dict.fromkeys([(9, 0), (10, 0), (10, 3)], 227 * 1024),
}
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class Compiled:
    """One specialisation of one kernel. Sizes are in bytes, per block (`shared`) or per thread (`spilled`)."""

    name: str
    capability: tuple[int, int]
    shared: int
    tensor_memory: int
    registers: int
    spilled: int
    num_warps: int
    seconds: float
    kernel: CompiledKernel

    def constant(self, name: str) -> object:
        """What was compiled in for a parameter, or None."""
        source = self.kernel.src
        return next((value for (place, *_), value in source.constants.items() if source.fn.arg_names[place] == name), None)

    @property
    def wrong(self) -> str:
        """Why it does not fit or is not to be trusted, or an empty string."""
        limit = SHARED_MEMORY[self.capability]
        if self.shared > limit:
            return f'takes {self.shared / 1024:.1f} KiB of shared memory, of {limit // 1024}'
        if self.tensor_memory > TENSOR_MEMORY_COLUMNS:
            return f'takes {self.tensor_memory} columns of tensor memory, of {TENSOR_MEMORY_COLUMNS}'
        if refilled := refilled_too_early(self.kernel.asm['ttgir']):
            return f'refills {", ".join(refilled)} while products read it'
        return ''

    def __str__(self) -> str:
        return (
            f'{self.name} sm_{_number(self.capability)}: {self.shared / 1024:.1f} KiB shared, {self.registers} registers, '
            f'{self.spilled} B spilled, {self.num_warps} warps, {self.seconds:.1f} s'
        )


@contextlib.contextmanager
def compile_only(capability: tuple[int, int], every_config: bool = False) -> Iterator[list[Compiled]]:
    """Compile instead of launching; yields the list that fills with what was compiled, each specialisation once.

    An autotuned kernel is compiled with the first configuration that its pruning leaves, or with all if `every_config`.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError('TRITON_INTERPRET is set: there is nothing to compile in this process')
    compiled: list[Compiled] = []
    target = GPUTarget('cuda', _number(capability), 32)
    stub = _StubDriver(target)
    functions: set[JITFunction] = set()
    autotuners: set[Autotuner] = set()
    stock_run = JITFunction.run

    def run(self, *args, grid, warmup=False, **options):
        functions.add(self)
        started = time.perf_counter()
        args, options = [_stand_in(a) for a in args], {name: _stand_in(a) for name, a in options.items()}
        kernel = stock_run(self, *args, grid=grid, warmup=True, **options)
        kernel = kernel.result() if hasattr(kernel, 'result') else kernel  # compiled by another thread
        if all(kernel is not one.kernel for one in compiled):
            compiled.append(_record(self, kernel, capability, time.perf_counter() - started))
        return kernel

    def bench(self, *args, config, **options):
        autotuners.add(self)
        if every_config:
            self.fn.run(*args, **{**options, **config.all_kwargs()})
        return [0.0, 0.0, 0.0]  # equal times: the first wins

    def launch_nothing(*args, **options):
        pass

    def runner(self, grid):
        return launch_nothing

    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix='triton-'))
        stack.callback(_forget, functions, autotuners, stub.device)
        for patch in (
            mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
            mock.patch.object(driver, '_active', stub),
            mock.patch.object(JITFunction, 'run', run),
            mock.patch.object(Autotuner, '_bench', bench),
            # A compiled kernel that is kept and launched directly.
            mock.patch.object(CompiledKernel, 'run', launch_nothing),
            mock.patch.object(CompiledKernel, '__getitem__', runner),
            *_pretend(capability),
        ):
            stack.enter_context(patch)
        yield compiled
    assert compiled, 'nothing was compiled: no Triton kernel was launched'
    wrong = [f'{one.name} (sm_{_number(capability)}) {one.wrong}' for one in compiled if one.wrong]
    assert not wrong, '; '.join(wrong)


def _number(capability: tuple[int, int]) -> int:
    return capability[0] * 10 + capability[1]


def _forget(functions: set[JITFunction], autotuners: set[Autotuner], device: int) -> None:
    """Drop what a process that has a GPU must not find later."""
    for function in functions:
        function.device_caches.pop(device, None)
    for autotuner in autotuners:
        autotuner.cache.clear()


def _stand_in(argument: object) -> object:
    """A fake tensor has no address; what a kernel is specialised for is its type and an address divisible by 16."""
    if isinstance(argument, torch._subclasses.FakeTensor):
        return MockTensor(argument.dtype, argument.shape)
    return argument


def _record(function: JITFunction, kernel: CompiledKernel, capability: tuple[int, int], seconds: float) -> Compiled:
    usage = _resource_usage(kernel.asm['cubin'])
    return Compiled(
        name=function.__name__,
        capability=capability,
        shared=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, 'tmem_size', None) or 0,
        registers=usage['REG'],
        spilled=usage['STACK'] + usage['LOCAL'],
        num_warps=kernel.metadata.num_warps,
        seconds=seconds,
        kernel=kernel,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What cuobjdump, which comes with Triton, says of a cubin's only function: `REG:40 STACK:0 SHARED:0 LOCAL:0 …`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'kernel.cubin')
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, '--dump-resource-usage', str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = (line for line in text.splitlines() if 'REG:' in line)
    return {name: int(value) for name, _, value in (field.partition(':') for field in line.split())}


class _StubDriver:
    """As much of a driver as a launch asks for before it would launch."""

    _devices = itertools.count(-1, -1)

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        # A kernel keeps what it compiled by device. Real ones count up from 0.
        self.device = next(self._devices)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device('cpu')

    def get_benchmarker(self) -> None:
        return None


def _pretend(capability: tuple[int, int]) -> list:
    """Patches by which code that asks for the device's capability hears of this one, whichever tensor it asks about.

    The code of `fla.utils.devices` is replaced rather than its names, which other modules have imported.
    """
    limit = SHARED_MEMORY[capability]
    properties = SimpleNamespace(
        name=f'compile-only sm_{_number(capability)}',
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        shared_memory_per_block_optin=limit,
    )
    answers = {
        devices.capability_of: f'lambda device=None: {capability!r}',
        devices.check_shared_mem: f"lambda arch='ampere', device=None: _SHARED_MEMORY[arch] * 1024 <= {limit}",
    }
    return [
        *(_answer(function, source) for function, source in answers.items()),
        mock.patch.object(torch.cuda, 'get_device_capability', return_value=capability),
        mock.patch.object(torch.cuda, 'get_device_properties', return_value=properties),
    ]


@contextlib.contextmanager
def _answer(function, source: str) -> Iterator[None]:
    stock, function.__code__ = function.__code__, eval(source).__code__
    try:
        yield
    finally:
        function.__code__ = stock
