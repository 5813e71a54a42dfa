"""What every TileLang backend does around its kernels: compiling them, once, and saying why one cannot be used here."""

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

# What makes a kernel (a function that returns TileLang's `prim_func`), and the values that its code depends on.
Recipe = tuple[Callable[..., Any], tuple[Any, ...]]

_compiled: dict[Recipe, Any] = {}
_lock = threading.Lock()


def usable(package: str | None, version: str | None) -> Verdict:
    """Whether both languages are there: the parts that are not written in TileLang are Triton's."""
    if importlib.util.find_spec('triton') is None:
        return False, "package 'triton' is not installed: the chunk table and the rest of the backward pass are its kernels"
    return check_package(package, version)


def on_hopper(device: Device) -> Verdict:
    """The kernels multiply with wgmma, which other generations do not have."""
    capability = device.capability or (0, 0)
    if capability[0] == 9:
        return True, None
    return False, ('the kernels are for compute capability 9.x, %s has %s.%s', device.name, *capability)


def kernels_of(*recipes: Recipe) -> list[Any]:
    """The compiled kernels, in the order asked for. Shapes are no part of a recipe: new lengths compile nothing.

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
        # traced one after the other, since TileLang traces into one global frame; nvcc is most of the time
        functions = [make(*values) for make, values in missing]
        with ThreadPoolExecutor(max(1, len(missing))) as pool:
            _compiled.update(zip(missing, pool.map(compiled_for_hopper, functions), strict=True))
        return [_compiled[recipe] for recipe in recipes]


def compiled_for_hopper(function: Any) -> Any:
    """One kernel, from TileLang's cache on disk if it is there. Needs nvcc, no GPU."""
    import tilelang

    # the kernels keep to their tensors by themselves
    return tilelang.compile(function, target=TARGET, pass_configs={'tl.disable_safe_memory_legalize': True})


def name_of(dtype: torch.dtype) -> str:
    """As TileLang calls it."""
    return str(dtype).removeprefix('torch.')
