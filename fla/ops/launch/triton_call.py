"""Steps of the Triton defaults before a launch: the device, and tensors as kernels read them."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

# device types that Triton kernels run on; CPUs only with its interpreter
DEVICES = ('cuda', 'xpu', 'cpu') if os.environ.get('TRITON_INTERPRET') == '1' else ('cuda', 'xpu')


def triton_version() -> tuple[int, ...]:
    """The installed version of Triton, as (major, minor)."""
    import triton

    return tuple(int(part) for part in triton.__version__.split('.')[:2])


def require_triton(function: str, tensor: torch.Tensor, name: str = 'q') -> None:
    """Checks that Triton kernels run on the tensor's device.

    Raises:
        RuntimeError: if they do not; Triton's own error does not say what to do.
    """
    if tensor.device.type not in DEVICES:
        raise RuntimeError(
            f'{function}: the default implementation is written in Triton and needs a GPU; {name} is on {tensor.device}. '
            'Without FLA_DISABLE_BACKEND_DISPATCH the plain PyTorch backend `reference` serves such tensors.'
        )


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device current: Triton launches on the current one, which may differ in autograd's threads."""
    if tensor.is_cuda and torch.cuda.current_device() != tensor.get_device():
        return torch.cuda.device(tensor.device)
    if tensor.is_xpu and torch.xpu.current_device() != tensor.get_device():
        return torch.xpu.device(tensor.device)
    return contextlib.nullcontext()


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, with a contiguous last dimension and its own signs in memory, as the kernels read it."""
    # an imaginary part has other strides, unless it is one column: see `resolve_neg`
    if x.stride()[-1] == 1 and x.shape[-1] != 1:
        return x
    x = resolve_neg(x)
    return x if x.shape[-1] == 1 else x.contiguous()


def contiguous_rows_int32(x: torch.Tensor, steps: int) -> torch.Tensor:
    """`in_rows` of `[B, T, ...]`, which also copies x if `steps` steps span more elements than 32 bits can count."""
    x = in_rows(x)
    return x if x.stride()[1] < 2**31 // steps else x.contiguous()


def resolve_neg(x: torch.Tensor | None) -> Any:
    """x, or a copy if its memory holds the opposite signs, as that of the imaginary part of a conjugate does.

    `contiguous` is not enough: a single number is contiguous. `is_neg` is not asked, because Dynamo breaks the graph there.
    """
    return None if x is None else x.resolve_neg()


def flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A_log, dt_bias, sink_bias or cu_seqlens, of any shape and strides, in one contiguous dimension as kernels read it."""
    if tensor is None:
        return None
    tensor = resolve_neg(tensor)
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1).contiguous()
