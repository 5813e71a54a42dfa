"""Checks of arguments that the modules share. They raise before any backend is tried. The message names the argument, what
came and what is allowed. They read metadata; only `check_mask` reads values.

Each call of a decode step or a small norm waits for its checks. So a function first asks `is_dense_float` and `matches`
whether the call is a common one, in as few reads as possible. If not, it runs the full checks, which raise or pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fla.backends import check_tensors
from fla.ops.autocast import autocast_is_on
from fla.ops.checks import FLOATS, check_64_bits, check_dense, check_given, is_number, readable
from fla.ops.launch.triton_call import require_triton

SILU = ('silu', 'swish')

_WHOLE = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)
MASKS = (torch.bool, *_WHOLE, *FLOATS)


def is_dense_float(tensor: Any) -> bool:
    """Whether this is a dense tensor of float16, bfloat16, float32 or float64."""
    try:
        return tensor.dtype in FLOATS and tensor.layout is torch.strided and not tensor.is_nested
    except AttributeError:
        return False


def matches(tensor: Any, shape: Sequence[int | torch.SymInt], device: torch.device) -> bool:
    """Whether this is a dense floating tensor of this shape on this device."""
    try:
        dense = tensor.layout is torch.strided
        return dense and tensor.shape == shape and tensor.dtype in FLOATS and tensor.device == device
    except (AttributeError, RuntimeError):  # RuntimeError: nested tensors have no shape
        return False


def check_launchable(function: str, **tensors: torch.Tensor | None) -> None:
    """Checks for a Triton default, which also runs when dispatch is off and the check was skipped: every tensor is given,
    and kernels can be launched on the device of the first."""
    check_given(**tensors)
    name, tensor = next(iter(tensors.items()))
    assert tensor is not None
    require_triton(function, tensor, name)


def check_floating(**tensors: torch.Tensor | None) -> None:
    """Each tensor that is not None is dense and float16, bfloat16, float32 or float64; all are on one device."""
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        check_dense(name, tensor)
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(f'{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}')


def check_mask(name: str, mask: torch.Tensor | None) -> None:
    """A mask is bool or numbers from 0 on, 0 for padding. An additive mask, negative for padding, is refused."""
    if mask is None:
        return
    if mask.dtype not in MASKS:
        raise TypeError(f'{name} must be bool, whole numbers or float16, bfloat16, float32 or float64, got {mask.dtype}')
    if mask.dtype.is_signed and readable(mask) and bool((mask < 0).any()):
        raise ValueError(
            f'{name} must be 1 for steps and 0 for padding, got negative numbers; if this mask is added to scores, '
            f'with -inf for padding, pass {name} == 0'
        )


def check_shape(name: str, tensor: torch.Tensor | None, wanted: Sequence[int | torch.SymInt], meaning: str) -> None:
    """A tensor that is not None is dense and has the wanted shape."""
    check_dense(name, tensor)
    if tensor is not None and tuple(tensor.shape) != tuple(wanted):
        raise ValueError(f'{name} must be {meaning} = {list(wanted)}, got {list(tensor.shape)}')


def check_dims(name: str, tensor: torch.Tensor, least: int, meaning: str) -> None:
    """A tensor has at least `least` dimensions."""
    if tensor.dim() < least:
        raise ValueError(f'{name} must be {meaning}, got shape {list(tensor.shape)}')


def check_same(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Two tensors have the same shape and dtype."""
    check_shape(name, tensor, other.shape, f'shaped like {other_name}')
    if tensor.dtype != other.dtype:
        raise TypeError(f'{name} must have the dtype of {other_name}, {other.dtype}, got {tensor.dtype}')


def check_finite(name: str, value: Any) -> None:
    """A number, neither infinite nor NaN."""
    if not is_number(value):
        raise TypeError(f'{name} must be a number, got {type(value).__name__}')
    check_64_bits(name, value)
    if not -math.inf < value < math.inf:
        raise ValueError(f'{name} must be finite, got {value}')


def check_int(name: str, value: object) -> None:
    """An int, not a float or bool."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f'{name} must be an int, got {type(value).__name__}')
    check_64_bits(name, value)


def check_eps(eps: float, name: str = 'eps') -> None:
    """A finite number that is at least 0."""
    check_finite(name, eps)
    if not eps >= 0:
        raise ValueError(f'{name} must be at least 0, got {eps}')


def check_sizes(**sizes: object) -> None:
    """Ints from 1 on."""
    for name, size in sizes.items():
        check_int(name, size)
        if not size >= 1:  # type: ignore[operator]
            raise ValueError(f'{name} must be at least 1, got {size}')


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may share memory. They cannot if each stride exceeds the span of all smaller strides."""
    if tensor.is_contiguous():
        return False
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for i, (stride, _) in enumerate(dims):
        others = [dims[j] for j in range(len(dims)) if j != i]
        if stride <= sum(other * (size - 1) for other, size in others if other <= stride):
            return True
    return False


def check_written(name: str, tensor: torch.Tensor) -> None:
    """No two elements of a tensor that will be written share memory."""
    if shares_memory(tensor):
        raise ValueError(f'{name} is written into, but elements share memory, strides {tensor.stride()}: clone() it')


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """A value is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f'{name} must be one of {list(allowed)}, got {value!r}')


def under_autocast(tensor: torch.Tensor) -> bool:
    """Whether autocast is on for the tensor's device."""
    return autocast_is_on(tensor.device.type)


def check_weights(x: torch.Tensor, **weights: torch.Tensor | None) -> None:
    """Weights have the dtype of x. Under autocast they may differ, unless one is float64, which autocast does not cast."""
    for name, tensor in weights.items():
        if tensor is None or tensor.dtype == x.dtype:
            continue
        if not under_autocast(x):
            raise TypeError(f'{name} must have the dtype of x, {x.dtype}, outside autocast, got {tensor.dtype}')
        if torch.float64 in (x.dtype, tensor.dtype):
            raise TypeError(
                f'{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}: autocast leaves float64 as it is'
            )
