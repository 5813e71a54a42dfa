"""`torch.nn.attention.varlen`, PyTorch's FlashAttention for packed sequences and windows (in PyTorch newer than 2.11)."""

from __future__ import annotations

import functools
import inspect

import torch

from fla.backends import BaseBackend, Verdict
from fla.ops.attn.backends.vendor_calls import check_head_dims, positive_scale, steps_left
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import in_pieces, ordered, smallest_call
from fla.utils.devices import Device


@functools.cache
def _parameters() -> frozenset[str]:
    """The parameters of `varlen_attn`, which each version extends; empty if PyTorch has no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


class TorchVarlenBackend(BaseBackend):
    """Packed sequences and windows, for which `sdpa` needs a mask; with a window, the rows of a batch are packed. K = V, a
    multiple of 8; no decays, no sinks, as many queries as keys. Not for compiled code: unaligned q, k and v are copied, and
    compiled code does not see addresses."""

    backend_type = 'torch_varlen'
    kind = 'native'
    env_var = 'FLA_TORCH_VARLEN'
    devices = ('cuda',)
    dtypes = (torch.float16, torch.bfloat16)
    min_capability = (8, 0)
    grad = 'backward'
    traceable = False
    priority = 9
    default_enable = False
    verified = False
    needs = ('torch.nn.attention.varlen:varlen_attn',)

    @classmethod
    def is_available(cls) -> Verdict:
        missing = {'window_size', 'scale', 'enable_gqa'} - _parameters()
        if missing:
            return False, (
                'torch.nn.attention.varlen.varlen_attn lacks %s: needs a newer PyTorch',
                ', '.join(sorted(missing)),
            )
        return True, None

    def probe(self, device: Device) -> Verdict:
        # PyTorch has the function even if it was built without FlashAttention
        return smallest_call(device, self._one_step, 1.0, self.needs)

    def _one_step(self, device: torch.device) -> torch.Tensor:
        """o of a single step. It sees only itself, so o = v, which is ones."""
        x = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
        return self.parallel_attn(x, x, x, window_size=1)

    def parallel_attn_verifier(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Verdict:
        if q.shape[1] != k.shape[1]:
            return False, ('takes as many queries as keys, got %s and %s', q.shape[1], k.shape[1])
        return check_head_dims(q, v)

    def parallel_attn_prefers(self, window_size: int | None, cu_seqlens: torch.Tensor | None) -> Verdict:
        if window_size is None and cu_seqlens is None:
            return False, 'the call needs no mask, so `sdpa` can choose among more kernels'
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
        from torch.nn.attention.varlen import varlen_attn

        q, scale = positive_scale(q, scale)
        batch, length = q.shape[:2]
        with on_device_of(q):
            if cu_seqlens is None:
                ends = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length
            else:
                ends = ordered(cu_seqlens, length)
            q, k, v = (in_pieces(x.flatten(0, 1)) for x in (q, k, v))
            o = varlen_attn(
                q,
                k,
                v,
                ends,
                ends,
                length,
                length,
                scale=scale,
                window_size=(steps_left(window_size), 0),
                enable_gqa=q.shape[1] != k.shape[1],
            )
        packed: torch.Tensor = o[0] if isinstance(o, tuple) else o
        return packed.view(batch, length, *packed.shape[1:]).contiguous()
