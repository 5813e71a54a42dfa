"""causal-conv1d: CUDA kernels for short convolutions, by Dao-AILab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.modules.backends.limits import check_size
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import aligned, for_tma, smallest_call
from fla.utils.devices import Device

WIDTHS = (2, 3, 4)
HALVES_AND_FLOAT = (torch.float16, torch.bfloat16, torch.float32)


def _channels_first(x: torch.Tensor) -> torch.Tensor:
    """x as `[B, D, T]` with contiguous channels, which the package needs for packed sequences and reads 16 bytes at a time.
    Copies x if it has another layout, or if it is one step expanded over time: the package would take that for contiguous
    `[B, D, T]`, and read past its end."""
    rows, steps, channels = x.stride()
    is_readable = channels == 1 and steps and not (rows % 8 or steps % 8)
    return (aligned(x) if is_readable else for_tma(x)).transpose(1, 2)


def _contiguous(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """The index of each step's packed sequence, `[1, T]`."""
    if cu_seqlens is None:
        return None
    steps = torch.arange(x.shape[1], device=x.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True, out_int32=True)[None]


def _call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    from causal_conv1d import causal_conv1d_fn

    y: torch.Tensor = causal_conv1d_fn(
        *(_channels_first(x), weight.contiguous(), _contiguous(bias), _sequences(x, cu_seqlens)), activation=activation
    )
    return y.transpose(1, 2).contiguous()


def _forward(x: torch.Tensor, *others: Any) -> torch.Tensor:
    with on_device_of(x), torch.no_grad():
        return _call(x, *others)


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
    dy: torch.Tensor,
    needs_input_grad: Sequence[bool],
) -> Any:
    """Runs the forward again under the package's own autograd, the only public access to its backward."""
    x, weight = x.detach().requires_grad_(needs_input_grad[0]), weight.detach().requires_grad_(needs_input_grad[1])
    bias = None if bias is None else bias.detach().requires_grad_(needs_input_grad[2])
    wanted = [one for one in (x, weight, bias) if one is not None and one.requires_grad]
    with on_device_of(x), torch.enable_grad():
        y = _call(x, weight, bias, activation, cu_seqlens)
        found = iter(torch.autograd.grad(y, wanted, for_tma(dy)))
    return tuple(next(found) if one is not None and one.requires_grad else None for one in (x, weight, bias))


_convolution = opaque(
    'fla::vendor_causal_conv1d',
    schema='(Tensor x, Tensor weight, Tensor? bias, str? activation, Tensor? cu_seqlens) -> (Tensor y)',
    forward=_forward,
    fake=lambda x, *_: x.new_empty(x.shape),
    backward=_backward,
    grads=('x', 'weight', 'bias'),
)


def _update(
    x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    with on_device_of(x):
        from causal_conv1d import causal_conv1d_update

        step = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = causal_conv1d_update(step, cache, weight.contiguous(), _contiguous(bias), activation)
        return y.reshape(x.shape)


_step = opaque(
    'fla::vendor_causal_conv1d_update',
    schema='(Tensor x, Tensor(a!) cache, Tensor weight, Tensor? bias, str? activation) -> Tensor y',
    forward=_update,
    fake=lambda x, *_: x.new_empty(x.shape),
)


class CausalConv1dBackend(BaseBackend):
    """Whole sequences, also packed, without states and residual; a decode step in place. Its states hold W - 1 steps, ours
    W. So `causal_conv1d` with states is not supported; `causal_conv1d_update` is, because it accepts longer states."""

    backend_type = 'causal_conv1d'
    package_name = 'causal_conv1d'
    package_version = 'causal-conv1d>=1.4'
    env_var = 'FLA_CAUSAL_CONV1D'
    default_enable = False
    vendor = 'dao-ailab'
    devices = ('cuda',)
    dtypes = dict.fromkeys(('x', 'weight', 'bias'), HALVES_AND_FLOAT)
    verified = True
    needs = ('causal_conv1d:causal_conv1d_fn', 'causal_conv1d:causal_conv1d_update')

    def probe(self, device: Device) -> Verdict:
        # the package may be built for another PyTorch, or without kernels for this GPU
        return smallest_call(device, _first_step, 1.0, self.needs)

    def causal_conv1d_verifier(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Verdict:
        return _takes(x, weight, bias)

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _convolution(x, weight, bias, None if activation is None else 'silu', cu_seqlens), None

    def causal_conv1d_update_verifier(
        self, x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Verdict:
        given = (x, cache, weight, bias)
        if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given):
            return False, 'a step is for inference only'
        assert weight is not None  # the check has refused None
        if cache.dtype != x.dtype:
            return False, ('the cache must have the dtype of x, %s, got %s', x.dtype, cache.dtype)
        return _takes(x, weight, bias)

    def causal_conv1d_update(
        self,
        x: torch.Tensor,
        cache: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _step(x, cache, weight, bias, None if activation is None else 'silu'), cache


def _first_step(device: torch.device) -> torch.Tensor:
    """The first step of the convolution of ones with a filter of ones, which is 1."""
    x = torch.ones(1, 8, 8, dtype=torch.bfloat16, device=device)
    return _forward(x, x[0, :, :4], None, None, None)[:, 0]


def _takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Verdict:
    if weight.shape[1] not in WIDTHS:
        return False, ('filters have 2 to 4 steps, got W = %s', weight.shape[1])
    if x.shape[-1] % 8:
        return False, ('channels are read 8 at a time: D must be a multiple of 8, got %s', x.shape[-1])
    if bias is not None and bias.dtype != weight.dtype:
        return False, ('bias must have the dtype of weight, %s, got %s', weight.dtype, bias.dtype)
    return check_size(x)
