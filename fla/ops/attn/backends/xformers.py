"""xFormers: `memory_efficient_attention`, which chooses among its own and other kernels."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends import BaseBackend, Verdict
from fla.ops.attn.backends.vendor_calls import check_head_dims, positive_scale
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import in_pieces, smallest_call
from fla.utils.devices import Device


class XFormersBackend(BaseBackend):
    """Causal, with a window, grouped heads and cached keys. No decays, sinks or packed sequences, whose lengths it needs on
    the host. Since 0.0.34 its kernels are PyTorch's own, which `sdpa` uses too; it still adds windows."""

    backend_type = 'xformers'
    package_name = 'xformers'
    package_version = 'xformers>=0.0.30'
    env_var = 'FLA_XFORMERS'
    vendor = 'meta'
    devices = ('cuda',)
    dtypes = (torch.float16, torch.bfloat16)
    min_capability = (8, 0)
    grad = 'backward'
    traceable = False
    priority = 6
    default_enable = False
    verified = False
    needs = (
        'xformers.ops:memory_efficient_attention',
        'xformers.ops.fmha.attn_bias:LowerTriangularMask',
        'xformers.ops.fmha.attn_bias:LowerTriangularFromBottomRightMask',
    )

    def probe(self, device: Device) -> Verdict:
        # a package built for another PyTorch imports with a warning, and then has no operator for any call
        return smallest_call(device, self._one_step, 1.0, self.needs)

    def _one_step(self, device: torch.device) -> torch.Tensor:
        """o of a single step and of two steps with a window of 1. Each sees only itself, so o = v, which is ones."""
        x = torch.ones(1, 2, 1, 64, dtype=torch.bfloat16, device=device)
        first = x[:, :1]
        return torch.cat([self.parallel_attn(first, first, first), self.parallel_attn(x, x, x, window_size=1)], 1)

    def parallel_attn_verifier(self, q: torch.Tensor, v: torch.Tensor) -> Verdict:
        return check_head_dims(q, v)

    def parallel_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window_size: int | None = None,
    ) -> torch.Tensor:
        from xformers.ops import memory_efficient_attention

        heads, groups = q.shape[2], k.shape[2]
        q, scale = positive_scale(q, scale)
        bias = _bias(q.shape[1], k.shape[1], window_size)
        q, k, v = (in_pieces(x) for x in (q, k, v))
        if heads != groups:
            # [B, T, H, HQ // H, K]; keys and values are expanded along the fourth dimension
            shape = (groups, heads // groups)
            q = q.view(*q.shape[:2], *shape, q.shape[3])
            k, v = (x.unsqueeze(3).expand(*x.shape[:3], shape[1], x.shape[3]) for x in (k, v))
        with on_device_of(q):
            o: torch.Tensor = memory_efficient_attention(q, k, v, attn_bias=bias, scale=scale)
        return (o.flatten(2, 3) if heads != groups else o).contiguous()


def _bias(queries: int, keys: int, window_size: int | None) -> Any:
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask, LowerTriangularMask

    if window_size is not None and window_size < keys:
        return LowerTriangularFromBottomRightMask().make_local_attention(window_size)
    return LowerTriangularMask() if queries == keys else LowerTriangularFromBottomRightMask()
