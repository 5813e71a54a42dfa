"""FlashAttention 2 and 3 by Dao et al.: the packages `flash_attn` and `flash_attn_interface`."""

from __future__ import annotations

import importlib

import torch

from fla.backends import BaseBackend, Verdict
from fla.ops.attn.backends.vendor_calls import check_head_dims, positive_scale, steps_left
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import in_pieces, ordered, smallest_call
from fla.utils.devices import Device


class _FlashAttention(BaseBackend):
    """No decays and no sinks; K = V, a multiple of 8. Causal masks are aligned to the last key, as ours are. Gradients are
    deterministic. Not for compiled code: unaligned q, k and v are copied, and compiled code does not see addresses."""

    devices = ('cuda',)
    dtypes = (torch.float16, torch.bfloat16)
    vendor = 'dao-ailab'
    grad = 'backward'
    traceable = False
    default_enable = False
    verified = False
    needs: tuple[str, ...]

    def probe(self, device: Device) -> Verdict:
        # the package may be built for another PyTorch, or without kernels for this GPU
        return smallest_call(device, self._one_step, 1.0, self.needs)

    def _one_step(self, device: torch.device) -> torch.Tensor:
        """o of a single step, as a batch row and packed. It sees only itself, so o = v, which is ones."""
        x = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
        packed = self.parallel_attn(x, x, x, cu_seqlens=torch.tensor([0, 1], device=device))
        return torch.cat([self.parallel_attn(x, x, x), packed])

    def parallel_attn_verifier(self, q: torch.Tensor, v: torch.Tensor) -> Verdict:
        return check_head_dims(q, v)

    def parallel_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window_size: int | None = None,
        cu_seqlens: torch.Tensor | None = None,
        # lint: allow ignored-argument because chunk_indices follows from cu_seqlens
        chunk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self.package_name is not None
        package = importlib.import_module(self.package_name)
        q, scale = positive_scale(q, scale)
        window = (steps_left(window_size), 0)
        options = {'softmax_scale': scale, 'causal': True, 'window_size': window, 'deterministic': True}
        with on_device_of(q):
            q, k, v = (in_pieces(x) for x in (q, k, v))
            if cu_seqlens is None:
                return _output(package.flash_attn_func(q, k, v, **options)).contiguous()
            ends, longest = ordered(cu_seqlens, q.shape[1]), q.shape[1]
            o = package.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, longest, longest, **options)
            return _output(o)[None].contiguous()


class FlashAttention2Backend(_FlashAttention):
    """`flash_attn`, on Ampere and newer."""

    backend_type = 'flash_attn'
    package_name = 'flash_attn'
    package_version = 'flash-attn>=2.7,<3'
    env_var = 'FLA_FLASH_ATTN'
    min_capability = (8, 0)
    priority = 4
    needs = ('flash_attn:flash_attn_func', 'flash_attn:flash_attn_varlen_func')


class FlashAttention3Backend(_FlashAttention):
    """`flash_attn_interface`, only on Hopper."""

    backend_type = 'flash_attn_3'
    package_name = 'flash_attn_interface'
    env_var = 'FLA_FLASH_ATTN_3'
    min_capability = (9, 0)
    priority = 3
    needs = ('flash_attn_interface:flash_attn_func', 'flash_attn_interface:flash_attn_varlen_func')

    def probe(self, device: Device) -> Verdict:
        if device.capability is not None and device.capability[0] != 9:
            return False, ('its kernels are for compute capability 9.0, this is %s.%s', *device.capability)
        return super().probe(device)


def _output(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """o; builds of FlashAttention 3 of 2024 and 2025 return the log-sum-exp too."""
    return result[0] if isinstance(result, tuple) else result
