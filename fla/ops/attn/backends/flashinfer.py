"""FlashInfer: attention for inference."""

from __future__ import annotations

import torch

from fla.backends import BaseBackend, Verdict
from fla.ops.attn.backends.vendor_calls import NO_STEPS, positive_scale, steps_left
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import for_tma, smallest_call
from fla.utils.devices import Device


class FlashInferBackend(BaseBackend):
    """One sequence, forward only, K = V = 64, 128 or 256. Packed sequences would need a plan made on the host, which
    synchronises on each call; a batch would need a launch per row. A distribution without compiled kernels compiles each
    kind of call with nvcc."""

    backend_type = 'flashinfer'
    package_name = 'flashinfer'
    package_version = 'flashinfer-python>=0.6.14'  # the oldest tested
    env_var = 'FLA_FLASHINFER_ATTN'
    vendor = 'flashinfer'
    devices = ('cuda',)
    dtypes = (torch.float16, torch.bfloat16)
    min_capability = (8, 0)
    grad = 'none'
    traceable = False
    priority = 5
    default_enable = False
    needs = ('flashinfer:single_prefill_with_kv_cache',)

    def probe(self, device: Device) -> Verdict:
        # without nvcc the package imports but cannot compile
        return smallest_call(device, self._one_step, 1.0, self.needs)

    def _one_step(self, device: torch.device) -> torch.Tensor:
        """o of a single step, with the most common K. It sees only itself, so o = v, which is ones."""
        x = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
        return self.parallel_attn(x, x, x)

    def parallel_attn_verifier(self, q: torch.Tensor, v: torch.Tensor) -> Verdict:
        if q.shape[0] != 1:
            return False, ('takes one sequence, got B = %s', q.shape[0])
        if q.shape[3] != v.shape[3] or q.shape[3] not in (64, 128, 256):
            return False, ('K = V must be 64, 128 or 256, got %s and %s', q.shape[3], v.shape[3])
        if q.numel() == 0:
            return False, NO_STEPS
        return True, None

    def parallel_attn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window_size: int | None = None,
    ) -> torch.Tensor:
        from flashinfer import single_prefill_with_kv_cache

        q, scale = positive_scale(q, scale)
        with on_device_of(q):
            o: torch.Tensor = single_prefill_with_kv_cache(
                *(for_tma(x[0]) for x in (q, k, v)),
                causal=True,
                kv_layout='NHD',
                sm_scale=scale,
                window_left=steps_left(window_size),
            )
        return o[None].contiguous()
