"""xFormers: `memory_efficient_attention`, which chooses among kernels of its own and of others."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends import BaseBackend, Verdict
from fla.ops.attn.backends.scale import above_zero
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import in_pieces, smallest_call
from fla.utils.devices import Device


class XFormersBackend(BaseBackend):
    """Causal, with a window, grouped heads, and keys before the first query; no decays, sinks, or packed sequences, whose
    lengths it wants on the host. Since 0.0.34 its kernels are PyTorch's own, which `sdpa` takes as well: it is worth having
    for windows."""

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
        # built for another PyTorch it imports, with a warning, and has no operator for any call
        return smallest_call(device, self._one_step, 1.0, self.needs)

    def _one_step(self, device: torch.device) -> torch.Tensor:
        """A step that sees itself alone, o = v, here of ones; and two of which each sees itself, as their window is 1."""
        x = torch.ones(1, 2, 1, 64, dtype=torch.bfloat16, device=device)
        first = x[:, :1]
        return torch.cat([self.parallel_attn(first, first, first), self.parallel_attn(x, x, x, window_size=1)], 1)

    def parallel_attn_verifier(self, q: torch.Tensor, v: torch.Tensor) -> Verdict:
        if q.shape[3] != v.shape[3]:
            return False, ('K and V must be equal, got %s and %s', q.shape[3], v.shape[3])
        if q.shape[3] % 8:
            return False, ('K must be a multiple of 8, got %s', q.shape[3])
        if q.numel() == 0:
            return False, 'there are no steps, and the kernels cannot be launched on nothing'
        return True, None

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
        q, scale = above_zero(q, scale)
        bias = _bias(q.shape[1], k.shape[1], window_size)
        q, k, v = (in_pieces(x) for x in (q, k, v))
        if heads != groups:
            # [B, T, H, HQ // H, K], of which keys and values repeat the fourth
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
