"""A cache of compiled Triton kernels, keyed by all facts of a launch that they depend on.

Triton finds the compiled kernel by inspecting every argument of every launch: 16 us for one of the larger kernels. Here one
dictionary look-up finds it. Launch hooks run as usual. Changes of Triton's settings after a kernel's first launch have no
effect.

Kernels take tensors first, then numbers, then constants. Triton itself launches other kernels, kernels with hooks of their
own, and tensors other than plain ones on an NVIDIA GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})

# id of a kernel (its hash would hash its source): the kernel, so that its id is not reused; how many tensors it takes; and
# how many arguments precede its constants.
_kernels: dict[int, tuple[JITFunction[Any], int, int]] = {}
_cache: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def launch_kernel(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, on the current device and stream."""
    found = _key(kernel, args, options)
    if found is None:
        kernel[grid](*args, **options)
        return
    key, given = found
    cached = _cache.get(key)
    if cached is None:
        compiled = kernel[grid](*args, **options)
        constants = (*args[_kernels[id(kernel)][2] :], *options.values())
        # another type while Triton compiles in the background; a tensor among the constants has no fixed value
        if isinstance(compiled, CompiledKernel) and not any(isinstance(x, torch.Tensor) for x in constants):
            _cache[key] = compiled, _arguments_by_name(kernel, args, options)
        return
    compiled, by_name = cached
    compiled[(*grid, 1, 1)[:3]](*given, *by_name, stream=_stream(key[1]))


def _key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """The key of the compiled kernel, and the positional arguments with tensors as addresses; None if Triton must launch."""
    known = _kernels.get(id(kernel))
    if known is None:
        if type(kernel) is not JITFunction or torch.version.hip is not None:
            return None
        known = _kernels[id(kernel)] = _parameters(kernel, args)
    _, count, first_constant = known
    tensors, numbers, constants = args[:count], args[count:first_constant], args[first_constant:]
    if kernel.pre_run_hooks or kernel.launch_metadata or not {x.__class__ for x in tensors} <= _PLAIN:
        return None
    # an address does not say on which device it is; Triton would ask
    if {x.is_cuda for x in tensors if x is not None} != {True}:
        return None
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    number_keys: list[Any] = []
    for x in numbers:
        kind = x.__class__
        if kind is int:
            # Triton compiles in a 1, divisibility by 16, and whether a number has 32 or 64 bits
            special = -1 if x == 1 else x & 15 == 0
            number_keys.append(special if -(1 << 31) <= x < 1 << 31 else (special,))
        elif kind is float:
            number_keys.append(kind)
        elif kind is bool:
            number_keys.append((kind, x))
        else:
            return None
    key = (
        id(kernel),
        _device(),
        *[None if x is None else x.dtype for x in tensors],
        tuple([i for i, address in enumerate(addresses) if address and address & 15]),
        *number_keys,
        *constants,
        *options,
        *options.values(),
    )
    return key, [*addresses, *numbers, *constants]


def _parameters(kernel: JITFunction[Any], args: tuple[Any, ...]) -> tuple[JITFunction[Any], int, int]:
    constant = [parameter.is_constexpr for parameter in kernel.params]
    first_constant = constant.index(True) if True in constant else len(constant)
    numbers = (i for i, x in enumerate(args[:first_constant]) if isinstance(x, int | float))
    return kernel, next(numbers, min(first_constant, len(args))), first_constant


def _arguments_by_name(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments given by name or default, in the order of the parameters; the launcher counts constants but ignores them."""
    return tuple(options.get(parameter.name, parameter.default) for parameter in kernel.params[len(args) :])


def _device() -> int:
    """The current CUDA device."""
    return torch._C._cuda_getDevice()


def _stream(device: int) -> int:
    """The current stream of a device."""
    return torch._C._cuda_getCurrentRawStream(device)
