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
from fla.ops.attn.backends.scale import above_zero
from fla.ops.attn.cudnn import has_memory_on_gpu, takes_cudnn
from fla.ops.attn.naive import lengths_of, one_by_one, visible
from fla.ops.autocast import outside_autocast, without_autocast
from fla.ops.launch.vendor import in_pieces


class SDPABackend(BaseBackend):
    """No gates and no sinks: as an additive mask they would put all scores into memory.

    A window, packed sequences and several queries after cached ones are a mask of True and False, with which PyTorch's
    kernels look at every key: on a GPU the Triton default, which skips what nobody sees, is preferred there, and where none
    but PyTorch's `math` would serve, which keeps all scores. Packed sequences whose lengths are on the CPU, outside of
    compiled code, need no mask: they come one after the other. Plain causal attention and decoding are PyTorch's. Which
    kernel that is, is PyTorch's choice, but that decoding keeps from cuDNN: `explain` notes those that take the call.
    """

    backend_type = 'sdpa'
    kind = 'native'
    env_var = 'FLA_SDPA'
    priority = 10  # behind the vendors' packages that somebody switched on, before the default

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
            return False, 'packed sequences are a mask here, of T by T'
        if window_size is not None and q.shape[1] != 1:
            return False, 'a window is a mask here, of T by S'
        if q.shape[1] != 1 and q.shape[1] != k.shape[1]:
            return False, 'some queries after cached ones are a mask here, of T by S'
        if q.dtype != torch.float32 and q.shape[3] == v.shape[3]:
            return True, None
        step = 4 if q.dtype == torch.float32 else 8
        if q.shape[2] != k.shape[2] or q.shape[3] % step or v.shape[3] % step:
            return False, 'PyTorch has no fused kernel for such heads, and would keep all scores'
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
        # lint: allow ignored-argument because chunk_indices says nothing that cu_seqlens does not
        chunk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if lengths := lengths_of(cu_seqlens, q.shape[1]):
            return one_by_one(partial(self.parallel_attn, scale=scale, window_size=window_size), lengths, q, k, v)
        if window_size is not None and q.shape[1] == 1:
            # the last keys, and all of them
            k, v, window_size = k[:, -window_size:], v[:, -window_size:], None
        q, scale = above_zero(q, scale)
        # flags are set by branches: in compiled code for any shape a comparison is no bool
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
            # of PyTorch's `math`, the backward is products too
            return outside_autocast(attend, (q, k, v), v.dtype)[0]
        with without_autocast(q.device):
            return attend(q, k, v)[0]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor]:
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    return (o.transpose(1, 2).contiguous(),)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """PyTorch's FlashAttention by name, for one query, which sees all keys."""
    queries, keys, values = (in_pieces(x).transpose(1, 2) for x in (q, k, v))
    o: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, scale=scale)[0]
    return o.transpose(1, 2).contiguous()


def _prefers_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether one query goes to FlashAttention, because PyTorch would take cuDNN. Without a row neither is launched."""
    return bool(q.shape[0]) and takes_cudnn(q, k, v) and cuda.can_use_flash_attention(_form_of(q, k, v))


def notes_of(q: Any, k: Any, v: Any, window_size: int | None, cu_seqlens: torch.Tensor | None) -> Sequence[str]:
    """Which of PyTorch's kernels take a call on this GPU, as far as PyTorch says without running it."""
    if not has_memory_on_gpu(q):
        return ()
    seen = k.shape[1] if window_size is None else min(window_size, k.shape[1])
    if q.shape[1] == 1 and seen != 1 and cu_seqlens is None and _prefers_flash(q, k, v):
        return ('FlashAttention of PyTorch, whose choice would make a plan for each new number of keys',)
    masked = cu_seqlens is not None or (q.shape[1] != 1 and (window_size is not None or q.shape[1] != k.shape[1]))
    asked = {
        'cudnn': getattr(cuda, 'can_use_cudnn_attention', None),
        'flash': cuda.can_use_flash_attention,
        'efficient': cuda.can_use_efficient_attention,
    }
    call = _form_of(q, k, v, masked)
    able = [name for name, question in asked.items() if question is not None and question(call, False)]
    return (f'PyTorch takes one of its kernels {", ".join(able)}' if able else "PyTorch takes its kernel 'math'",)


def _form_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masked: bool = False) -> cuda.SDPAParams:
    """What PyTorch's questions are about."""
    # only its form is looked at, and a row has that
    mask = q.new_empty(k.shape[1], dtype=torch.bool).expand(q.shape[1], -1) if masked else None
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    causal = not masked and q.shape[1] == k.shape[1]
    return cuda.SDPAParams(queries, keys, values, mask, 0.0, causal, q.shape[2] != k.shape[2])
