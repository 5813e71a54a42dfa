"""Launches of Triton kernels that were launched alike before.

To find the compiled kernel Triton looks at every argument of every launch: 16 us for one of the larger kernels. Here a
dictionary has the compiled kernel by all that it depends on. Hooks around launches are called as ever; what one changes of
Triton's settings after a kernel's first launch is not looked at.

Kernels take tensors first, then numbers, then what is compiled in. Of others, of those with hooks of their own, and of
tensors that are no plain ones on a GPU of NVIDIA, the launches are Triton's.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})

# By identity, for the hash of a kernel is that of its source. Each holds its kernel, so that no other gets its number; how
# many tensors it takes; and how many arguments before those that are compiled in.
_shapes: dict[int, tuple[JITFunction[Any], int, int]] = {}
_kept: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def launch_kernel(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, on the current device and stream."""
    found = _key(kernel, args, options)
    if found is None:
        kernel[grid](*args, **options)
        return
    key, given = found
    kept = _kept.get(key)
    if kept is None:
        compiled = kernel[grid](*args, **options)
        constants = (*args[_shapes[id(kernel)][2] :], *options.values())
        # not while Triton compiles in the background, nor with a tensor among what is compiled in
        if isinstance(compiled, CompiledKernel) and not any(isinstance(x, torch.Tensor) for x in constants):
            _kept[key] = compiled, _rest(kernel, args, options)
        return
    compiled, rest = kept
    compiled[(*grid, 1, 1)[:3]](*given, *rest, stream=_stream(key[1]))


def _key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """What decides which compiled kernel it is, and the arguments by position with addresses for tensors; or None."""
    known = _shapes.get(id(kernel))
    if known is None:
        if type(kernel) is not JITFunction or torch.version.hip is not None:
            return None
        known = _shapes[id(kernel)] = _shape(kernel, args)
    _, count, plain = known
    tensors, numbers, constants = args[:count], args[count:plain], args[plain:]
    if kernel.pre_run_hooks or kernel.launch_metadata or not {x.__class__ for x in tensors} <= _PLAIN:
        return None
    # an address says nothing of where it is, of which Triton would ask
    if {x.is_cuda for x in tensors if x is not None} != {True}:
        return None
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    of_numbers: list[Any] = []
    for x in numbers:
        kind = x.__class__
        if kind is int:
            # compiled in where they are 1, and their being multiples of 16; their types are of 32 or 64 bits
            sort = -1 if x == 1 else x & 15 == 0
            of_numbers.append(sort if -(1 << 31) <= x < 1 << 31 else (sort,))
        elif kind is float:
            of_numbers.append(kind)
        elif kind is bool:
            of_numbers.append((kind, x))
        else:
            return None
    key = (
        id(kernel),
        _device(),
        *[None if x is None else x.dtype for x in tensors],
        tuple([i for i, address in enumerate(addresses) if address and address & 15]),
        *of_numbers,
        *constants,
        *options,
        *options.values(),
    )
    return key, [*addresses, *numbers, *constants]


def _shape(kernel: JITFunction[Any], args: tuple[Any, ...]) -> tuple[JITFunction[Any], int, int]:
    constant = [parameter.is_constexpr for parameter in kernel.params]
    plain = constant.index(True) if True in constant else len(constant)
    count = next((i for i, x in enumerate(args[:plain]) if isinstance(x, int | float)), min(plain, len(args)))
    return kernel, count, plain


def _rest(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments by name, in the order of the parameters; of those compiled in the launcher counts but does not read them."""
    return tuple(options.get(parameter.name, parameter.default) for parameter in kernel.params[len(args) :])


def _device() -> int:
    """The current one of CUDA."""
    return torch._C._cuda_getDevice()


def _stream(device: int) -> int:
    """The device's current one."""
    return torch._C._cuda_getCurrentRawStream(device)
