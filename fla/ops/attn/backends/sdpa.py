"""`torch.nn.functional.scaled_dot_product_attention`, which chooses among PyTorch's own kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.backends import cuda

from fla.backends import BaseBackend, Verdict
from fla.ops.attn.backends.vendor_calls import positive_scale
from fla.ops.attn.cudnn import has_memory_on_gpu, takes_cudnn
from fla.ops.attn.naive import attend_each_sequence, sequence_lengths, visible
from fla.ops.autocast import outside_autocast, without_autocast
from fla.ops.launch.vendor import in_pieces


class SDPABackend(BaseBackend):
    """No decays and no sinks: an additive mask for them would put all scores into memory.

    A window, packed sequences, and several queries behind cached keys need a boolean mask, with which PyTorch's kernels read
    every key. For these the Triton default, which skips invisible keys, is preferred on a GPU. It is also preferred where
    only PyTorch's `math` could serve, which stores all scores. Packed sequences whose lengths are on the CPU need no mask
    outside of compiled code: they are computed one after the other. PyTorch chooses among its kernels, except that decoding
    avoids cuDNN; `explain` notes which kernels take a call.
    """

    backend_type = 'sdpa'
    kind = 'native'
    env_var = 'FLA_SDPA'
    priority = 10  # after vendors' packages, if they are enabled, and before the default

    def parallel_attn_verifier(self) -> Verdict:
        if forward_ad._current_level >= 0:
            return False, "forward-mode AD is active, which PyTorch's attention kernels do not have"
        return True, None

    def parallel_attn_prefers(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window_size: int | None, cu_seqlens: torch.Tensor | None
    ) -> Verdict:
        if not q.is_cuda or q.dtype == torch.float64:
            return True, None
        if cu_seqlens is not None:
            return False, 'packed sequences need a mask of T by T'
        if window_size is not None and q.shape[1] != 1:
            return False, 'a window needs a mask of T by S'
        if q.shape[1] != 1 and q.shape[1] != k.shape[1]:
            return False, 'several queries behind cached keys need a mask of T by S'
        if q.dtype != torch.float32 and q.shape[3] == v.shape[3]:
            return True, None
        step = 4 if q.dtype == torch.float32 else 8
        if q.shape[2] != k.shape[2] or q.shape[3] % step or v.shape[3] % step:
            return False, 'PyTorch has no fused kernel for such heads, and would store all scores'
        return True, None

    def explain_notes(self, function: str, arguments: Mapping[str, Any]) -> Sequence[str]:
        q, k, v = (arguments.get(name) for name in ('q', 'k', 'v'))
        return notes_of(q, k, v, arguments.get('window_size'), arguments.get('cu_seqlens'))

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
        if lengths := sequence_lengths(cu_seqlens, q.shape[1]):
            return attend_each_sequence(partial(self.parallel_attn, scale=scale, window_size=window_size), lengths, q, k, v)
        if window_size is not None and q.shape[1] == 1:
            # the query sees all of the last keys
            k, v, window_size = k[:, -window_size:], v[:, -window_size:], None
        q, scale = positive_scale(q, scale)
        # branches set the flags: in compiled code with symbolic shapes a comparison is not a bool
        seen, causal, grouped = None, False, False
        if q.shape[2] != k.shape[2]:
            grouped = True
        if window_size is None and cu_seqlens is None and q.shape[1] == k.shape[1]:
            causal = True
        elif window_size is not None or cu_seqlens is not None or q.shape[1] != 1:
            seen = visible(q, k, window_size, cu_seqlens)
        if q.shape[1] == 1 and seen is None and not causal and _prefers_flash(q, k, v):
            with without_autocast(q.device):
                return _flash(q, k, v, scale)
        attend = partial(_attend, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=grouped)
        if not q.is_cuda and q.shape[3] != v.shape[3]:
            # PyTorch's `math`, whose backward also has products that autocast would cast
            return outside_autocast(attend, (q, k, v), v.dtype)[0]
        with without_autocast(q.device):
            return attend(q, k, v)[0]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor]:
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    return (o.transpose(1, 2).contiguous(),)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """PyTorch's FlashAttention, called by name, for one query that sees all keys."""
    queries, keys, values = (in_pieces(x).transpose(1, 2) for x in (q, k, v))
    o: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, scale=scale)[0]
    return o.transpose(1, 2).contiguous()


def _prefers_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether one query should go to FlashAttention because PyTorch would take cuDNN. Neither is launched without a row."""
    return bool(q.shape[0]) and takes_cudnn(q, k, v) and cuda.can_use_flash_attention(_sdpa_params(q, k, v))


def notes_of(q: Any, k: Any, v: Any, window_size: int | None, cu_seqlens: torch.Tensor | None) -> Sequence[str]:
    """Which of PyTorch's kernels can take a call on this GPU, as PyTorch reports without running it."""
    if not has_memory_on_gpu(q):
        return ()
    seen = k.shape[1] if window_size is None else min(window_size, k.shape[1])
    if q.shape[1] == 1 and seen != 1 and cu_seqlens is None and _prefers_flash(q, k, v):
        return (
            "PyTorch's FlashAttention instead of its choice cuDNN, which would build a plan for each new number of keys",
        )
    masked = cu_seqlens is not None or (q.shape[1] != 1 and (window_size is not None or q.shape[1] != k.shape[1]))
    asked = {
        'cudnn': getattr(cuda, 'can_use_cudnn_attention', None),
        'flash': cuda.can_use_flash_attention,
        'efficient': cuda.can_use_efficient_attention,
    }
    call = _sdpa_params(q, k, v, masked)
    able = [name for name, question in asked.items() if question is not None and question(call, False)]
    return (f'PyTorch takes one of its kernels {", ".join(able)}' if able else "PyTorch takes its kernel 'math'",)


def _sdpa_params(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masked: bool = False) -> cuda.SDPAParams:
    """The description of a call that PyTorch's `can_use_…` functions take."""
    # they read only the mask's shape and strides
    mask = q.new_empty(k.shape[1], dtype=torch.bool).expand(q.shape[1], -1) if masked else None
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    causal = not masked and q.shape[1] == k.shape[1]
    return cuda.SDPAParams(queries, keys, values, mask, 0.0, causal, q.shape[2] != k.shape[2])
