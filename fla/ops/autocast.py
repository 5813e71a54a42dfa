"""Code that autocast must not change: float32 stays float32, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fla.backends.core.tensors import in_func_transform

Tensors = TypeVar('Tensors', bound=tuple[torch.Tensor, ...])


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[bool]:
    """Switches autocast off and yields whether it was on. Where it was off, only asks: switching takes longer than a decode
    step."""
    if not autocast_is_on(device.type):
        yield False
        return
    with torch.autocast(device.type, enabled=False):
        yield True


def autocast_is_on(device_type: str) -> bool:
    """Whether autocast is on for a device type; False for types without autocast, such as meta, where asking raises."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


# Dynamo of PyTorch 2.11 cannot trace is_autocast_available. torch.compiler.assume_constant_result sets this same mark, but
# imports Dynamo, Inductor and Triton.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def outside_autocast(run: Callable[..., Tensors], tensors: tuple[torch.Tensor | None, ...], dtype: torch.dtype) -> Tensors:
    """`run(*tensors)` as without autocast, forward and backward; its results have `dtype`."""
    first = next(x for x in tensors if x is not None)
    if not autocast_is_on(first.device.type):
        return run(*tensors)
    with without_autocast(first.device):
        if in_func_transform():
            return _in_float64(run, tensors, dtype)
        if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors):
            return run(*tensors)
        if torch.compiler.is_compiling():
            return _in_float64(run, tensors, dtype)
        result: Tensors = _WithoutAutocast.apply(run, *tensors)  # type: ignore[no-untyped-call]
        return result


def _in_float64(run: Callable[..., Tensors], tensors: tuple[torch.Tensor | None, ...], dtype: torch.dtype) -> Tensors:
    """Autocast leaves float64 alone, also in a backward that PyTorch derives. MPS has no float64: there autocast changes
    such a backward."""
    first = next(x for x in tensors if x is not None)
    if first.device.type == 'mps':
        return run(*tensors)
    results = run(*(x if x is None else x.double() for x in tensors))
    return tuple(x.to(dtype) for x in results)  # type: ignore[return-value]


class _WithoutAutocast(torch.autograd.Function):
    """Runs a function, and runs it again in the backward pass, without autocast in either: products of gradients would
    otherwise be in half precision."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensors], *tensors: torch.Tensor | None) -> Tensors:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        twice, tensors = torch.is_grad_enabled(), ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if not twice:
            tensors = [x.detach().requires_grad_() if want else x for x, want in zip(tensors, wanted, strict=True)]
        with without_autocast(gradients[0].device), torch.enable_grad():
            leaves = [x for x, want in zip(tensors, wanted, strict=True) if want]
            outs = [(out, d) for out, d in zip(ctx.run(*tensors), gradients, strict=True) if out.requires_grad]
            grads = iter(
                torch.autograd.grad(
                    [out for out, _ in outs], leaves, [d for _, d in outs], create_graph=twice, allow_unused=True
                )
            )
        return None, *(next(grads) if want else None for want in wanted)
