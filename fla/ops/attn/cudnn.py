"""Calls of PyTorch's attention that would go to cuDNN.

cuDNN makes a plan for each shape that it has not seen, which takes tens of milliseconds: in decoding, where each step has a
key more, that is at every step. PyTorch prefers it on Hopper and on the larger Blackwell chips. To forbid it is a setting of
the whole process, so that a call which had better not be planned has to be made otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from fla.backends.core.tensors import in_func_transform


def takes_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
    """Whether `scaled_dot_product_attention` takes cuDNN's kernel for q `[B, T, HQ, K]`, k `[B, S, H, K]`, v `[B, S, H, V]`,
    not causal. False in compiled code and in `torch.func` transforms, where nobody can say."""
    if torch.compiler.is_compiling() or not has_memory_on_gpu(q) or in_func_transform():
        return False
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    choice = torch._fused_sdp_choice(queries, keys, values, mask, enable_gqa=q.shape[2] != k.shape[2])
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def has_memory_on_gpu(q: Any) -> bool:
    """Whether q is a tensor of which PyTorch can be asked: no subclass, no fake, and on a GPU."""
    return type(q) in (torch.Tensor, torch.nn.Parameter) and bool(q.is_cuda)
