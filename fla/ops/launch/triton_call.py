"""What every Triton default does around its kernels."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

# device types on which Triton kernels can be launched; tensors of a CPU only under its interpreter
DEVICES = ('cuda', 'xpu', 'cpu') if os.environ.get('TRITON_INTERPRET') == '1' else ('cuda', 'xpu')


def triton_version() -> tuple[int, ...]:
    """(major, minor) of the Triton that is installed."""
    import triton

    return tuple(int(part) for part in triton.__version__.split('.')[:2])


def require_triton(function: str, tensor: torch.Tensor, name: str = 'q') -> None:
    """A sentence instead of what Triton would say.

    Raises:
        RuntimeError: for tensors that a Triton kernel cannot be launched on.
    """
    if tensor.device.type not in DEVICES:
        raise RuntimeError(
            f'{function}: the default implementation is written in Triton and needs a GPU; {name} is on {tensor.device}. '
            'Without FLA_DISABLE_BACKEND_DISPATCH the plain PyTorch backend `reference` serves such tensors.'
        )


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which in an autograd thread, or beside a second GPU, is not the tensor's."""
    if tensor.is_cuda and torch.cuda.current_device() != tensor.get_device():
        return torch.cuda.device(tensor.device)
    if tensor.is_xpu and torch.xpu.current_device() != tensor.get_device():
        return torch.xpu.device(tensor.device)
    return contextlib.nullcontext()


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, with a contiguous last dimension, as the kernels read it; see `resolve_neg`."""
    x = resolve_neg(x)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def contiguous_rows_int32(x: torch.Tensor, steps: int) -> torch.Tensor:
    """As `in_rows`; `[B, T, ...]` is also copied where `steps` of its steps are too far apart to be counted in 32 bits."""
    x = in_rows(x)
    return x if x.stride(1) < 2**31 // steps else x.contiguous()


def resolve_neg(x: torch.Tensor | None) -> Any:
    """For kernels that read any strides: x, or a copy where its memory holds the other sign and PyTorch has taken a note of
    that, as of imaginary parts of conjugates. `contiguous` need not do it: a single number is contiguous. Nor is `is_neg`
    asked, for which Dynamo breaks the graph."""
    return None if x is None else x.resolve_neg()


def flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A list of numbers (A_log, dt_bias, sink_bias, cu_seqlens), of any shape and strides, as the kernels read it."""
    return None if tensor is None else resolve_neg(tensor).reshape(-1).contiguous()


def no_steps(
    q: torch.Tensor, v: torch.Tensor, count: Any, initial_state: torch.Tensor | None, output_final_state: bool, v_first: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """No steps: nothing comes out, and the state stays."""
    final = None
    if output_final_state:
        dims = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
        final = v.new_zeros((count, v.shape[2], *dims), dtype=torch.float32)
        if initial_state is not None:
            final = initial_state.to(torch.float32, copy=True)
    # zeros that stay in the graph of v; not a product with 0, which infinite values survive
    return v.masked_fill(torch.ones((), dtype=torch.bool, device=v.device), 0.0), final
