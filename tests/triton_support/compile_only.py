"""Compiles the kernels that an operation launches, for a GPU that need not exist, and launches nothing.

    with compile_only((9, 0)) as compiled:
        chunk_gla(q, k, v, g)           # on CPU or meta tensors
    print(*compiled, sep='\\n')          # chunk_gla_fwd sm_90: 48.0 KiB shared, 128 registers, 0 B spilled, 4 warps, 1.2 s

Inside the block every kernel is specialised for the arguments of its launch, and compiled to a cubin in a temporary cache.
Outputs stay uninitialised. `fla.utils.devices` and two functions of `torch.cuda` describe the requested GPU. At the end of
the block, AssertionError is raised for kernels that do not fit the GPU, for kernels for Hopper that refill memory in use
(see `refills`), and for a block that launched no kernel.
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

# Bytes of shared memory that one block may use: the CUDA programming guide's table of technical specifications.
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
        """Returns the value of a constexpr parameter, or None."""
        source = self.kernel.src
        return next((value for (place, *_), value in source.constants.items() if source.fn.arg_names[place] == name), None)

    @property
    def problem(self) -> str:
        """Why the kernel does not fit or may be wrong, or an empty string."""
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
    """Compiles instead of launching. Yields a list to which each compiled specialisation is appended once.

    An autotuned kernel is compiled with the first configuration that its pruning leaves, or with all with `every_config`.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError('TRITON_INTERPRET is set: this process interprets kernels and cannot compile them')
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
            # A cached compiled kernel that is launched directly.
            mock.patch.object(CompiledKernel, 'run', launch_nothing),
            mock.patch.object(CompiledKernel, '__getitem__', runner),
            *_pretend(capability),
        ):
            stack.enter_context(patch)
        yield compiled
    assert compiled, 'nothing was compiled: no Triton kernel was launched'
    problems = [f'{one.name} (sm_{_number(capability)}) {one.problem}' for one in compiled if one.problem]
    assert not problems, '; '.join(problems)


def _number(capability: tuple[int, int]) -> int:
    return capability[0] * 10 + capability[1]


def _forget(functions: set[JITFunction], autotuners: set[Autotuner], device: int) -> None:
    """Drops cached kernels that a process with a GPU must not find later."""
    for function in functions:
        function.device_caches.pop(device, None)
    for autotuner in autotuners:
        autotuner.cache.clear()


def _stand_in(argument: object) -> object:
    """Replaces a fake tensor, which has no address. A kernel is specialised for a dtype and an address divisible by 16."""
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
    """Parses what Triton's cuobjdump prints for a cubin's only function: `REG:40 STACK:0 SHARED:0 LOCAL:0 …`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'kernel.cubin')
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, '--dump-resource-usage', str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = (line for line in text.splitlines() if 'REG:' in line)
    return {name: int(value) for name, _, value in (field.partition(':') for field in line.split())}


class _StubDriver:
    """The methods of a driver that a launch calls before it launches."""

    _devices = itertools.count(-1, -1)

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        # A kernel caches compiled code by device. Real devices count up from 0.
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
    """Returns patches that make every device appear to have this capability.

    They replace the code of functions in `fla.utils.devices`, because other modules have imported these functions by name.
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
