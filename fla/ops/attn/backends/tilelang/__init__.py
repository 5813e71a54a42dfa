"""Our TileLang kernel for the forward of attention."""

from __future__ import annotations

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.ops.launch.tilelang_call import on_hopper, usable
from fla.ops.launch.vendor import smallest_call
from fla.utils.devices import Device

DIMS = (64, 128)


class AttentionTileLang(BaseBackend):
    """`parallel_attn` on Hopper: the forward in TileLang, the backward in Triton. bfloat16 or float16, K = V of 64 or 128,
    packed sequences, a window, more keys than queries; no decays and no sinks. q, k and v are copied unless contiguous.

    On an H200 its results are as accurate as the default's. Its forward took 5 to 15 % longer there than the default's (a
    single step 49 and 60 %), except with a window of 512, where it took 6 % less. With the backward it took up to 2 % longer
    (a step 9 and 14 %), and 1 % less with the window. So it is disabled by default.
    """

    backend_type = 'tilelang'
    kind = 'native'
    package_name = 'tilelang'
    package_version = '>=0.1.15,<0.2'
    env_var = 'FLA_TILELANG_ATTN'  # apart from the delta rules' kernels
    default_enable = False
    verified = True
    priority = 8
    devices = ('cuda',)
    min_capability = (9, 0)
    dtypes = (torch.bfloat16, torch.float16)
    grad = 'backward'

    @classmethod
    def is_available(cls) -> Verdict:
        return usable(cls.package_name, cls.package_version)

    def probe(self, device: Device) -> Verdict:
        fits = on_hopper(device)
        # without nvcc, or with a newer apache-tvm-ffi, TileLang imports but fails to compile
        return smallest_call(device, _one_step, 1.0) if fits[0] else fits

    def parallel_attn_verifier(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Verdict:
        if q.shape[3] not in DIMS or v.shape[3] != q.shape[3]:
            return False, ('K and V must both be 64 or both 128, got %s and %s', q.shape[3], v.shape[3])
        if q.numel() == 0:
            return False, 'there are no steps, and the kernel cannot be launched on nothing'
        if q.numel() >= 2**31:
            return False, ('not tested with so many elements: q must have fewer than 2^31, got %s', q.numel())
        if k.numel() >= 2**31:
            return False, ('not tested with so many elements: k must have fewer than 2^31, got %s', k.numel())
        return True, None

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
        from fla.ops.attn.autograd import attention
        from fla.ops.attn.backends.tilelang.launch import kernel

        return attention(q, k, v, None, scale, window_size, cu_seqlens, None, kernel=kernel)


def _one_step(device: torch.device) -> torch.Tensor:
    """o of a single step. It sees only itself, so o = v, which is ones."""
    from fla.ops.attn.backends.tilelang.launch import attention_forward

    ones = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    with torch.cuda.device(device):
        return attention_forward(ones, ones, ones, None, 1.0, 0)[0]
