"""The Triton default of attention: its kernels as one differentiable operator that compiled code can call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fla.opaque import opaque
from fla.ops.attn.kernels.launch import attention_backward, attention_forward
from fla.ops.launch.ptxas_workaround import avoid_wgmma_if_unsafe
from fla.ops.launch.triton_call import DEVICES, flat, on_device_of


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    sink_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    window_size: int,
) -> Any:
    with on_device_of(q), avoid_wgmma_if_unsafe(k, v):
        return attention_forward(q, k, v, g, flat(sink_bias), flat(cu_seqlens), scale, window_size)


def fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
    """Empty o, and empty lse: the log-sum-exp of the scores in base 2."""
    batch, length, heads = q.shape[:3]
    return v.new_empty((batch, length, heads, v.shape[3])), q.new_empty((batch, heads, length), dtype=torch.float32)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    sink_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    window_size: int,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
) -> Any:
    """The gradients, given o and lse of either forward kernel."""
    with on_device_of(q), avoid_wgmma_if_unsafe(k, v):
        return attention_backward(q, k, v, g, flat(sink_bias), flat(cu_seqlens), scale, window_size, o, lse, do)


SCHEMA = (
    '(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? sink_bias, Tensor? cu_seqlens, float scale, SymInt window_size) '
    '-> (Tensor o, Tensor lse)'
)

_attention = opaque(
    'fla::parallel_attn',
    schema=SCHEMA,
    forward=_forward,
    fake=fake,
    backward=backward,
    grads=('q', 'k', 'v', 'g', 'sink_bias'),
    intermediates=('lse',),
    devices=DEVICES,
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None,
    window_size: int | None,
    cu_seqlens: torch.Tensor | None,
    sink_bias: torch.Tensor | None,
    kernel: Callable[..., Any] = _attention,
) -> torch.Tensor:
    """`parallel_attn` on Triton, or by another `kernel` with the same schema."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o: torch.Tensor = kernel(q, k, v, g, sink_bias, cu_seqlens, scale, 0 if window_size is None else window_size)
    return o
