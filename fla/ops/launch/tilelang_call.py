"""Requirements of TileLang backends, and the compilation of each of their kernels, once."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fla.backends.backend.base import Verdict, check_package
from fla.utils.devices import Device

# wgmma is part of this target, not of plain sm_90
TARGET = {'kind': 'cuda', 'arch': 'sm_90a'}

# A function that returns TileLang's `prim_func`, and its arguments: all values that the kernel's code depends on.
Recipe = tuple[Callable[..., Any], tuple[Any, ...]]

_compiled: dict[Recipe, Any] = {}
_lock = threading.Lock()


def usable(package: str | None, version: str | None) -> Verdict:
    """Whether the package and Triton are installed: other kernels of these backends are in Triton."""
    if importlib.util.find_spec('triton') is None:
        return False, "package 'triton' is not installed: the chunk table and the rest of the backward pass are its kernels"
    return check_package(package, version)


def on_hopper(device: Device) -> Verdict:
    """Whether the device has wgmma, with which the kernels multiply."""
    capability = device.capability or (0, 0)
    if capability[0] == 9:
        return True, None
    return False, ('the kernels are for compute capability 9.x, %s has %s.%s', device.name, *capability)


def kernels_of(*recipes: Recipe) -> list[Any]:
    """The compiled kernels, in the order of the recipes. A recipe holds no lengths: new lengths compile nothing.

    Raises:
        RuntimeError: inside a CUDA graph capture, for a kernel that has not been used before.
    """
    try:
        return [_compiled[recipe] for recipe in recipes]
    except KeyError:
        return _compile(recipes)


def _compile(recipes: tuple[Recipe, ...]) -> list[Any]:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError('a TileLang kernel would be compiled inside a CUDA graph capture: make the same call once before')
    with _lock:
        missing = [recipe for recipe in dict.fromkeys(recipes) if recipe not in _compiled]
        # traced one after the other, since TileLang traces into one global frame; nvcc takes most of the time
        functions = [make(*values) for make, values in missing]
        with ThreadPoolExecutor(max(1, len(missing))) as pool:
            _compiled.update(zip(missing, pool.map(compiled_for_hopper, functions), strict=True))
        return [_compiled[recipe] for recipe in recipes]


def compiled_for_hopper(function: Any) -> Any:
    """The compiled kernel, from TileLang's disk cache if possible. Needs nvcc, but no GPU."""
    import tilelang

    # the kernels check their bounds themselves
    return tilelang.compile(function, target=TARGET, pass_configs={'tl.disable_safe_memory_legalize': True})


def name_of(dtype: torch.dtype) -> str:
    """TileLang's name of the dtype."""
    return str(dtype).removeprefix('torch.')
