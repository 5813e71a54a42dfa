"""The TileLang forward of attention with the Triton backward, which needs only o and lse of the forward."""

from __future__ import annotations

import math
from typing import Any

import torch

from fla.opaque import opaque
from fla.ops.attn import autograd
from fla.ops.attn.backends.tilelang import kernels
from fla.ops.launch.kernels.layout import layout_of
from fla.ops.launch.tilelang_call import kernels_of, name_of
from fla.ops.launch.triton_call import DEVICES, flat, on_device_of
from fla.ops.launch.vendor import for_tma


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, scale: float, window_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `fla.ops.attn.kernels.launch.attention_forward` without decays and sinks, for at least one step."""
    batch, length, heads, dim = q.shape
    keys, groups = k.shape[1:3]
    cu_seqlens = flat(cu_seqlens)
    layout = layout_of(batch, length, kernels.QUERIES, cu_seqlens)
    o = v.new_empty((batch, length, heads, dim))
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    # takes the place of tensors that the compiled code does not read
    unread = q.new_empty((2,), dtype=torch.int32)
    indices = unread if cu_seqlens is None else cu_seqlens
    options = (dim, name_of(q.dtype), name_of(indices.dtype), layout.packed, window_size > 0)
    (forward,) = kernels_of((kernels.forward, options))
    forward(
        for_tma(q).view(batch * length, heads, dim),
        *(for_tma(x).view(batch * keys, groups, dim) for x in (k, v)),
        *(indices, unread.view(1, 2) if layout.table is None else layout.table),
        *(o.view(batch * length, heads, dim), lse.view(-1)),
        *(layout.rows, length, keys - length, min(window_size, keys), heads // groups, scale * math.log2(math.e)),
    )
    return o, lse


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: None,
    sink_bias: None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    window_size: int,
) -> Any:
    with on_device_of(q):
        return attention_forward(q, k, v, cu_seqlens, scale, window_size)


kernel = opaque(
    'fla::tilelang_parallel_attn',
    schema=autograd.SCHEMA,
    forward=_forward,
    fake=autograd.fake,
    backward=autograd.backward,
    grads=('q', 'k', 'v', 'g', 'sink_bias'),
    intermediates=('lse',),
    devices=DEVICES,
)
