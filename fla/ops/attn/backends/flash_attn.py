"""FlashAttention 2 and 3 by Dao and others: the packages `flash_attn` and `flash_attn_interface`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fla.backends import BaseBackend, Verdict
from fla.ops.attn.backends.scale import above_zero
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import in_pieces, ordered, smallest_call
from fla.utils.devices import Device


def _window(window_size: int | None) -> tuple[int, int]:
    """Steps to the left and right of a query, itself apart; -1 for no bound."""
    return (-1 if window_size is None else window_size - 1, 0)


class _FlashAttention(BaseBackend):
    """No decays and no sinks; K = V, a multiple of 8. Causal masks are aligned to the last key, as ours are.
    `deterministic=True`, so that gradients have the same bits twice. Not in compiled code, which cannot see addresses: those
    of q, k and v must be multiples of 16, and others are copied."""

    devices = ('cuda',)
    dtypes = (torch.float16, torch.bfloat16)
    vendor = 'dao-ailab'
    grad = 'backward'
    traceable = False
    default_enable = False
    verified = False

    def parallel_attn_verifier(self, q: torch.Tensor, v: torch.Tensor) -> Verdict:
        if q.shape[3] != v.shape[3]:
            return False, ('K and V must be equal, got %s and %s', q.shape[3], v.shape[3])
        if q.shape[3] % 8:
            return False, ('K must be a multiple of 8, got %s', q.shape[3])
        if q.numel() == 0:
            return False, 'there are no steps, and the kernels cannot be launched on nothing'
        return True, None


class FlashAttention2Backend(_FlashAttention):
    """`flash_attn`, on Ampere and newer."""

    backend_type = 'flash_attn'
    package_name = 'flash_attn'
    package_version = 'flash-attn>=2.7,<3'
    env_var = 'FLA_FLASH_ATTN'
    min_capability = (8, 0)
    priority = 4
    needs = ('flash_attn:flash_attn_func', 'flash_attn:flash_attn_varlen_func')

    def probe(self, device: Device) -> Verdict:
        # it may be built for another PyTorch, or without kernels for this GPU
        return smallest_call(device, lambda place: _one_step(self.parallel_attn, place), 1.0, self.needs)

    def parallel_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window_size: int | None = None,
        cu_seqlens: torch.Tensor | None = None,
        # lint: allow ignored-argument because chunk_indices says nothing that cu_seqlens does not
        chunk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        q, scale = above_zero(q, scale)
        shared = {
            'dropout_p': 0.0,
            'softmax_scale': scale,
            'causal': True,
            'window_size': _window(window_size),
            'deterministic': True,
        }
        with on_device_of(q):
            q, k, v = (in_pieces(x) for x in (q, k, v))
            if cu_seqlens is None:
                o: torch.Tensor = flash_attn_func(q, k, v, **shared)
                return o.contiguous()
            ends, longest = ordered(cu_seqlens, q.shape[1]), q.shape[1]
            o = flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, longest, longest, **shared)
            return o[None].contiguous()


class FlashAttention3Backend(_FlashAttention):
    """`flash_attn_interface`, on Hopper alone."""

    backend_type = 'flash_attn_3'
    package_name = 'flash_attn_interface'
    env_var = 'FLA_FLASH_ATTN_3'
    min_capability = (9, 0)
    priority = 3
    needs = ('flash_attn_interface:flash_attn_func', 'flash_attn_interface:flash_attn_varlen_func')

    def probe(self, device: Device) -> Verdict:
        if device.capability is not None and device.capability[0] != 9:
            return False, ('its kernels are for compute capability 9.0, this is %s.%s', *device.capability)
        return smallest_call(device, lambda place: _one_step(self.parallel_attn, place), 1.0, self.needs)

    def parallel_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window_size: int | None = None,
        cu_seqlens: torch.Tensor | None = None,
        # lint: allow ignored-argument because chunk_indices says nothing that cu_seqlens does not
        chunk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

        q, scale = above_zero(q, scale)
        shared = {'softmax_scale': scale, 'causal': True, 'window_size': _window(window_size), 'deterministic': True}
        with on_device_of(q):
            q, k, v = (in_pieces(x) for x in (q, k, v))
            if cu_seqlens is None:
                return _output(flash_attn_func(q, k, v, **shared)).contiguous()
            ends, longest = ordered(cu_seqlens, q.shape[1]), q.shape[1]
            o = flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, longest, longest, **shared)
            return _output(o)[None].contiguous()


def _one_step(attention: Callable[..., torch.Tensor], device: torch.device) -> torch.Tensor:
    """A step sees itself alone: o = v, here of ones; as a row of a batch, and packed."""
    x = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    return torch.cat([attention(x, x, x), attention(x, x, x, cu_seqlens=torch.tensor([0, 1], device=device))])


def _output(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Builds of 2024 and 2025 return the log-sum-exp as well."""
    return result[0] if isinstance(result, tuple) else result
