"""Which calls of PyTorch's attention would go to cuDNN.

cuDNN builds a plan for each new shape, which takes tens of milliseconds. In decoding, where the number of keys grows, that
happens at every step. PyTorch prefers cuDNN on Hopper and on the larger Blackwell GPUs. Disabling it is a setting of the
whole process, so a decode step has to call another kernel by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from fla.backends.core.tensors import in_func_transform


def takes_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
    """Whether `scaled_dot_product_attention` takes cuDNN's kernel for q `[B, T, HQ, K]`, k `[B, S, H, K]`, v `[B, S, H, V]`,
    without a causal mask. False where it is unknown: in compiled code and in `torch.func` transforms."""
    if torch.compiler.is_compiling() or not has_memory_on_gpu(q) or in_func_transform():
        return False
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    choice = torch._fused_sdp_choice(queries, keys, values, mask, enable_gqa=q.shape[2] != k.shape[2])
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def has_memory_on_gpu(q: Any) -> bool:
    """Whether q is a plain tensor on a GPU, not a subclass or a fake, so that PyTorch can choose a kernel for it."""
    return type(q) in (torch.Tensor, torch.nn.Parameter) and bool(q.is_cuda)
