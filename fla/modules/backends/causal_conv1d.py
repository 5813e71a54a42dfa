"""causal-conv1d: CUDA kernels for short convolutions, by Dao-AILab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import aligned, for_tma, smallest_call
from fla.utils.devices import Device

WIDTHS = (2, 3, 4)
HALVES_AND_FLOAT = (torch.float16, torch.bfloat16, torch.float32)


def _channels_first(x: torch.Tensor) -> torch.Tensor:
    """`[B, D, T]`, as the package wants it, with the channels still side by side in memory, as it needs them for packed
    sequences, and 16 bytes of them read at a time: nothing is copied but what is otherwise. One step that is expanded over
    time is: the package would take it for `[B, D, T]` in memory, and read what lies behind."""
    rows, steps, channels = x.stride()
    even = channels == 1 and steps and not (rows % 8 or steps % 8)
    return (aligned(x) if even else for_tma(x)).transpose(1, 2)


def _packed(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """Which packed sequence each step is in, `[1, T]`."""
    if cu_seqlens is None:
        return None
    steps = torch.arange(x.shape[1], device=x.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True, out_int32=True)[None]


def _call(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    from causal_conv1d import causal_conv1d_fn

    activation = 'silu' if silu else None
    y: torch.Tensor = causal_conv1d_fn(
        _channels_first(x), weight.contiguous(), _packed(bias), _sequences(x, cu_seqlens), activation=activation
    )
    return y.transpose(1, 2).contiguous()


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    with on_device_of(x), torch.no_grad():
        return _call(x, weight, bias, cu_seqlens, silu)


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    silu: bool,
    dy: torch.Tensor,
    needs_input_grad: Sequence[bool],
) -> Any:
    """By the package's own autograd, the only public way to its backward: the forward runs again."""
    x, weight = x.detach().requires_grad_(needs_input_grad[0]), weight.detach().requires_grad_(needs_input_grad[1])
    bias = None if bias is None else bias.detach().requires_grad_(needs_input_grad[2])
    wanted = [one for one in (x, weight, bias) if one is not None and one.requires_grad]
    with on_device_of(x), torch.enable_grad():
        y = _call(x, weight, bias, cu_seqlens, silu)
        found = iter(torch.autograd.grad(y, wanted, for_tma(dy)))
    return tuple(next(found) if one is not None and one.requires_grad else None for one in (x, weight, bias))


_convolution = opaque(
    'fla::vendor_causal_conv1d',
    schema='(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, bool silu) -> (Tensor y)',
    forward=_forward,
    fake=lambda x, weight, bias, cu_seqlens, silu: x.new_empty(x.shape),
    backward=_backward,
    grads=('x', 'weight', 'bias'),
)


def _update(
    x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    with on_device_of(x):
        from causal_conv1d import causal_conv1d_update

        step = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = causal_conv1d_update(step, cache, weight.contiguous(), _packed(bias), 'silu' if silu else None)
        return y.reshape(x.shape)


_step = opaque(
    'fla::vendor_causal_conv1d_update',
    schema='(Tensor x, Tensor(a!) cache, Tensor weight, Tensor? bias, bool silu) -> Tensor y',
    forward=_update,
    fake=lambda x, cache, weight, bias, silu: x.new_empty(x.shape),
)


class CausalConv1dBackend(BaseBackend):
    """Whole sequences, packed ones too, without states and residual; a decode step in place. Its states hold W - 1 steps
    where ours hold W: `causal_conv1d` with states is not served, `causal_conv1d_update` is, as longer ones are taken."""

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
        # it may be built for another PyTorch, or without kernels for this GPU
        return smallest_call(device, _first_step, 1.0, self.needs)

    def causal_conv1d_verifier(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Verdict:
        if x.numel() == 0:
            return False, 'there are no steps, and the kernels cannot be launched on nothing'
        return _takes(x, weight, bias)

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _convolution(x, weight, bias, cu_seqlens, activation is not None), None

    def causal_conv1d_update_verifier(
        self, x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Verdict:
        given = (x, cache, weight, bias)
        if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given):
            return False, 'a step is for inference only'
        assert weight is not None  # the check has refused that
        if x.numel() == 0:
            return False, 'there are no steps, and the kernels cannot be launched on nothing'
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
        return _step(x, cache, weight, bias, activation is not None), cache


def _first_step(device: torch.device) -> torch.Tensor:
    """Of x and a filter of ones: 1."""
    x = torch.ones(1, 8, 8, dtype=torch.bfloat16, device=device)
    return _forward(x, x[0, :, :4], None, None, False)[:, 0]


def _takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Verdict:
    if weight.shape[1] not in WIDTHS:
        return False, ('filters have 2 to 4 steps, got W = %s', weight.shape[1])
    if x.shape[-1] % 8:
        return False, ('channels side by side are read 8 at a time: D must be a multiple of 8, got %s', x.shape[-1])
    if bias is not None and bias.dtype != weight.dtype:
        return False, ('bias must have the dtype of weight, %s, got %s', weight.dtype, bias.dtype)
    if x.numel() >= 2**31:
        return False, ('not known to count in 64 bits: x must have fewer than 2^31 elements, got %s', x.numel())
    return True, None
