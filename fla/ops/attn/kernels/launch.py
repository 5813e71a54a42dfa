"""Launches of attention's kernels, forward and backward, and their block sizes."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from fla.ops.attn.kernels.backward import key_gradients, query_gradients
from fla.ops.attn.kernels.common import decay_gradient, decay_sums
from fla.ops.attn.kernels.forward import forward
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.kernels.layout import layout_of
from fla.ops.launch.precompile import launch, precompile_parallel
from fla.ops.launch.triton_call import contiguous_rows_int32, resolve_neg
from fla.utils.devices import capability_of, shared_memory_of
from fla.utils.sizes import next_power_of_2

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]

_SCAN_STEPS = 1024  # of an iteration of a scan
_LARGEST_BLOCK = 128  # in steps


def _compile_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Hashable:
    """The facts that decide which kernels are compiled."""
    g, sink_bias, cu_seqlens, _, window_size = others[:5]
    dtypes = [None if x is None else x.dtype for x in (g, sink_bias, cu_seqlens)]
    return (q.dtype, q.device, q.shape[2:], k.shape[2], v.shape[3], _is_decode(q), window_size > 0, *dtypes)


@precompile_parallel(_compile_key)
def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    sink_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    window_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward on the current device and stream, for checked arguments of `parallel_attn`.

    Args:
        q `[B, T, HQ, K]`, k `[B, S, H, K]`, v `[B, S, H, V]`: of one dtype, any strides. g `[B, T, HQ]`, sink_bias `[HQ]`.
        window_size: 0 for none.

    Returns:
        o `[B, T, HQ, V]` in v's dtype and lse `[B, HQ, T]`, the log-sum-exp of the scores in base 2, both contiguous.
    """
    q, k, v = (contiguous_rows_int32(x, _LARGEST_BLOCK) for x in (q, k, v))
    g = resolve_neg(g)
    batch, length, heads, _ = q.shape
    window_size = min(window_size, k.shape[1])
    o = v.new_empty((batch, length, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    if not o.numel() or _is_empty(cu_seqlens):
        return o, lse
    sizes = _BlockSizes(q, v)
    layout = layout_of(batch, length, sizes.forward_m, cu_seqlens)
    sums = _sums(g, cu_seqlens)
    launch(forward, (layout.rows * heads,))(
        *(q, k, v, lse if sums is None else sums, sink_bias, o, lse, cu_seqlens, layout.table),
        *(scale * math.log2(math.e), length, k.shape[1], window_size, lse.numel(), *_strides(q, k, v)),
        **_common(q, k, v, g, cu_seqlens, window_size),
        SINK=sink_bias is not None,
        BM=sizes.forward_m,
        BN=sizes.forward_n,
        STAGES=sizes.forward_stages,
        num_warps=sizes.forward_warps,
    )
    return o, lse


@precompile_parallel(_compile_key)
def attention_backward(
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
) -> Gradients:
    """Returns the gradients of q, k, v, g and sink_bias, contiguous, from arguments and results of `attention_forward`."""
    q, k, v = (contiguous_rows_int32(x, _LARGEST_BLOCK) for x in (q, k, v))
    g = resolve_neg(g)
    batch, length, heads, dim = q.shape
    keys, groups = k.shape[1:3]
    window_size = min(window_size, keys)
    if not o.numel() or _is_empty(cu_seqlens):
        zeros: Any = tuple(None if x is None else x.new_zeros(x.shape) for x in (q, k, v, g, sink_bias))
        return zeros  # type: ignore[no-any-return]
    do = do.contiguous()
    sizes = _BlockSizes(q, v)
    common = _common(q, k, v, g, cu_seqlens, window_size)
    numbers = (scale * math.log2(math.e), scale, length, keys, window_size, lse.numel(), *_strides(q, k, v))
    sums = _sums(g, cu_seqlens)
    dq = q.new_empty((batch, length, heads, dim))
    dk = k.new_empty((batch, keys, groups, dim))
    dv = v.new_empty((batch, keys, groups, v.shape[3]))
    delta = torch.empty_like(lse)
    row_sums = column_sums = delta  # not written
    if g is not None:
        row_sums, column_sums = torch.empty_like(lse), torch.empty_like(lse)
    layout = layout_of(batch, length, sizes.queries_m, cu_seqlens)
    programs = layout.rows * heads
    d_sinks = delta if sink_bias is None else q.new_empty((programs,), dtype=torch.float32)
    launch(query_gradients, (programs,))(
        *(q, k, v, lse if sums is None else sums, sink_bias, o, lse, do, dq, delta, row_sums, d_sinks),
        *(cu_seqlens, layout.table, *numbers),
        **common,
        SINK=sink_bias is not None,
        BM=sizes.queries_m,
        BN=sizes.queries_n,
        STAGES=sizes.backward_stages,
        num_warps=sizes.backward_warps,
    )
    layout = layout_of(batch, keys, sizes.keys_n, cu_seqlens)
    launch(key_gradients, (layout.rows * groups,))(
        *(q, k, v, lse if sums is None else sums, lse, do, delta, dk, dv, column_sums, cu_seqlens, layout.table, *numbers),
        **common,
        BM=sizes.keys_m,
        BN=sizes.keys_n,
        STAGES=sizes.backward_stages,
        num_warps=sizes.backward_warps,
    )
    dg = d_sink = None
    if g is not None:
        dg = g.new_empty(g.shape)
        launch(decay_gradient, (_sequences(g, cu_seqlens) * heads,))(
            *(g, row_sums, column_sums, dg, cu_seqlens, length, *g.stride()), **_scan_options(heads, cu_seqlens)
        )
    if sink_bias is not None:
        # programs are in the order batch row, head, block; packed, in the order head, block
        outer = batch if cu_seqlens is None else 1
        d_sink = d_sinks.view(outer, heads, -1).sum((0, 2)).to(sink_bias.dtype)
    return dq, dk, dv, dg, d_sink


class _BlockSizes:
    """Block sizes, warps and stages, chosen to fit into shared memory and to spill little. Not tuned on any GPU yet."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor) -> None:
        capability = capability_of(q.device)
        major = capability[0] if capability else 0
        # a float32 product is three products, and needs three times the registers
        wide = q.element_size() > 2
        small = shared_memory_of(capability) < shared_memory_of((8, 0))
        dim = max(_block(q.shape[3]), _block(v.shape[3]))
        if wide:
            size, warps = (16, 4) if dim > 128 else (32, 4)
            self._set(size, size, warps, 1)
            self._set_backward(size, size, 8 if dim == 128 else 4, 1)
        elif dim > 128:
            self._set(64, 32 if small else 64, 4 if small else 8, 1 if major < 9 else 2)
            # on 10.x two accumulators of 64 rows exceed the tensor memory
            self._set_backward(32, 32 if small or major == 10 else 64, 8, 1)
        else:
            warps = 8 if dim > 64 else 4
            self._set(128, 64, warps, 2 if small else 3)
            self._set_backward(32, 64 if small or dim <= 64 else 128, warps, 1 if small else 2)
        if _is_decode(q):
            self.forward_m = 16
            self.forward_warps = 4

    def _set(self, m: int, n: int, warps: int, stages: int) -> None:
        self.forward_m, self.forward_n, self.forward_warps, self.forward_stages = m, n, warps, stages

    def _set_backward(self, m: int, n: int, warps: int, stages: int) -> None:
        """`key_gradients` holds a block of n keys and loops over blocks of m queries; `query_gradients` vice versa."""
        self.keys_m, self.keys_n, self.queries_m, self.queries_n = m, n, n, m
        self.backward_warps, self.backward_stages = warps, stages


def _is_decode(q: torch.Tensor) -> bool:
    """Whether one small block holds all queries, as in decoding."""
    return q.shape[1] <= 16


def _block(dim: int) -> int:
    size: int = next_power_of_2(max(dim, 16))
    return size


def _common(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    window_size: int,
) -> dict[str, Any]:
    """The constants that the three large kernels share."""
    return {
        'H': k.shape[2],
        'HQ': q.shape[2],
        'K': q.shape[3],
        'V': v.shape[3],
        'BK': _block(q.shape[3]),
        'BV': _block(v.shape[3]),
        'DECAY': g is not None,
        'WINDOW': window_size > 0,
        'PACKED': cu_seqlens is not None,
        'PRECISION': precisions.of_products(q.dtype),
    }


def _sums(g: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """See `decay_sums`."""
    if g is None:
        return None
    batch, length, heads = g.shape
    sums = g.new_empty((2, batch, heads, length), dtype=torch.float32)
    launch(decay_sums, (_sequences(g, cu_seqlens) * heads,))(
        *(g, sums, cu_seqlens, length, batch * heads * length, *g.stride()), **_scan_options(heads, cu_seqlens)
    )
    return sums


def _scan_options(heads: int, cu_seqlens: torch.Tensor | None) -> dict[str, Any]:
    """The constants of a scan over time."""
    return {'HQ': heads, 'BLOCK': _SCAN_STEPS, 'PACKED': cu_seqlens is not None, 'num_warps': 4}


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """The number of sequences."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _is_empty(cu_seqlens: torch.Tensor | None) -> bool:
    return cu_seqlens is not None and cu_seqlens.shape[0] == 1
