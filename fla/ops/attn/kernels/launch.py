"""The kernels of attention in their order, forward and backward: what an autograd function calls."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from fla.ops.attn.kernels.backward import of_keys, of_queries
from fla.ops.attn.kernels.common import decay_gradient, decay_sums
from fla.ops.attn.kernels.forward import forward
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.kernels.layout import layout_of
from fla.ops.launch.precompile import launch, precompile_parallel
from fla.ops.launch.triton_call import contiguous_rows_int32, resolve_neg
from fla.utils.devices import capability_of, shared_memory_of
from fla.utils.sizes import next_power_of_2

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]

# of a scan: steps of a program at a time
_SCAN = 1024
# in steps
_LARGEST_BLOCK = 128


def _kind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Hashable:
    """What the kernels are compiled for."""
    given = [None if x is None else x.dtype if isinstance(x, torch.Tensor) else x for x in others[:3]]
    windowed = others[4] > 0
    return (q.dtype, q.device, q.shape[2:], k.shape[2], v.shape[3], _few(q), windowed, *given)


@precompile_parallel(_kind)
def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    sink_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward, of checked arguments of `parallel_attn`, on the current device and stream.

    Args:
        q `[B, T, HQ, K]`, k `[B, S, H, K]`, v `[B, S, H, V]`: of one dtype, any strides. g `[B, T, HQ]`, sink_bias `[HQ]`.
        window: 0 for none.

    Returns:
        o `[B, T, HQ, V]` in v's dtype and lse `[B, HQ, T]`, the logarithm of the normaliser in base 2, both contiguous.
    """
    q, k, v = (contiguous_rows_int32(x, _LARGEST_BLOCK) for x in (q, k, v))
    g = resolve_neg(g)
    batch, length, heads, _ = q.shape
    window = min(window, k.shape[1])
    o = v.new_empty((batch, length, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    if not o.numel() or _is_empty(cu_seqlens):
        return o, lse
    rule = _Rule(q, v)
    layout = layout_of(batch, length, rule.forward_m, cu_seqlens)
    sums = _sums(g, cu_seqlens)
    launch(forward, (layout.rows * heads,))(
        *(q, k, v, lse if sums is None else sums, sink_bias, o, lse, cu_seqlens, layout.table),
        *(scale * math.log2(math.e), length, k.shape[1], window, lse.numel(), *_strides(q, k, v)),
        **_common(q, k, v, g, cu_seqlens, window),
        SINK=sink_bias is not None,
        BM=rule.forward_m,
        BN=rule.forward_n,
        STAGES=rule.forward_stages,
        num_warps=rule.forward_warps,
    )
    return o, lse


@precompile_parallel(_kind)
def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    sink_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    window: int,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
) -> Gradients:
    """The gradients of q, k, v, g and sink_bias, contiguous, from the arguments and results of `attention_forward`."""
    q, k, v = (contiguous_rows_int32(x, _LARGEST_BLOCK) for x in (q, k, v))
    g = resolve_neg(g)
    batch, length, heads, dim = q.shape
    kept, groups = k.shape[1:3]
    window = min(window, kept)
    if not o.numel() or _is_empty(cu_seqlens):
        return _zeros(q), _zeros(k), _zeros(v), None if g is None else _zeros(g), _sink_zeros(sink_bias)
    do = do.contiguous()
    rule = _Rule(q, v)
    common = _common(q, k, v, g, cu_seqlens, window)
    sums = _sums(g, cu_seqlens)
    dq = q.new_empty((batch, length, heads, dim))
    dk = k.new_empty((batch, kept, groups, dim))
    dv = v.new_empty((batch, kept, groups, v.shape[3]))
    delta = torch.empty_like(lse)
    rows = columns = delta  # not written
    if g is not None:
        rows, columns = torch.empty_like(lse), torch.empty_like(lse)
    layout = layout_of(batch, length, rule.queries_m, cu_seqlens)
    programs = layout.rows * heads
    each = delta if sink_bias is None else q.new_empty((programs,), dtype=torch.float32)
    launch(of_queries, (programs,))(
        *(q, k, v, lse if sums is None else sums, sink_bias, o, lse, do, dq, delta, rows, each, cu_seqlens, layout.table),
        *(scale * math.log2(math.e), scale, length, kept, window, lse.numel(), *_strides(q, k, v)),
        **common,
        SINK=sink_bias is not None,
        BM=rule.queries_m,
        BN=rule.queries_n,
        STAGES=rule.backward_stages,
        num_warps=rule.backward_warps,
    )
    layout = layout_of(batch, kept, rule.keys_n, cu_seqlens)
    launch(of_keys, (layout.rows * groups,))(
        *(q, k, v, lse if sums is None else sums, lse, do, delta, dk, dv, columns, cu_seqlens, layout.table),
        *(scale * math.log2(math.e), scale, length, kept, window, lse.numel(), *_strides(q, k, v)),
        **common,
        BM=rule.keys_m,
        BN=rule.keys_n,
        STAGES=rule.backward_stages,
        num_warps=rule.backward_warps,
    )
    dg = d_sink = None
    if g is not None:
        dg = g.new_empty(g.shape)
        launch(decay_gradient, (_count(g, cu_seqlens) * heads,))(
            *(g, rows, columns, dg, cu_seqlens, length, *g.stride()), **_for_scan(heads, cu_seqlens)
        )
    if sink_bias is not None:
        # by head: packed sequences come after the head in the order of programs, batch rows before it
        outer = batch if cu_seqlens is None else 1
        d_sink = each.view(outer, heads, -1).sum((0, 2)).to(sink_bias.dtype)
    return dq, dk, dv, dg, d_sink


class _Rule:
    """Block sizes, warps and stages: chosen to fit into shared memory and to spill little, tuned on no card yet."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor) -> None:
        capability = capability_of(q.device)
        major = capability[0] if capability else 0
        # products in fp32 are three, and take three times the registers
        wide = q.element_size() > 2
        small = shared_memory_of(capability) < shared_memory_of((8, 0))
        dim = max(_block(q.shape[3]), _block(v.shape[3]))
        if wide:
            size, warps = (16, 4) if dim > 128 else (32, 4)
            self._set(size, size, warps, 1)
            self._set_backward(size, size, 8 if dim == 128 else 4, 1)
        elif dim > 128:
            self._set(64, 32 if small else 64, 4 if small else 8, 1 if major < 9 else 2)
            # on 10.x two such accumulators of 64 rows take more tensor memory than there is
            self._set_backward(32, 32 if small or major == 10 else 64, 8, 1)
        else:
            warps = 8 if dim > 64 else 4
            self._set(128, 64, warps, 2 if small else 3)
            self._set_backward(32, 64 if small or dim <= 64 else 128, warps, 1 if small else 2)
        if _few(q):
            self.forward_m = 16
            self.forward_warps = 4

    def _set(self, m: int, n: int, warps: int, stages: int) -> None:
        self.forward_m, self.forward_n, self.forward_warps, self.forward_stages = m, n, warps, stages

    def _set_backward(self, m: int, n: int, warps: int, stages: int) -> None:
        """Of keys: a block of n keys stays, and m queries come at a time; of queries: the other way round."""
        self.keys_m, self.keys_n, self.queries_m, self.queries_n = m, n, n, m
        self.backward_warps, self.backward_stages = warps, stages


def _few(q: torch.Tensor) -> bool:
    """Decoding: one small block holds all queries."""
    return q.shape[1] <= 16


def _block(dim: int) -> int:
    size: int = next_power_of_2(max(dim, 16))
    return size


def _common(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, cu_seqlens: torch.Tensor | None, window: int
) -> dict[str, Any]:
    """The arguments that all large kernels share."""
    return {
        'H': k.shape[2],
        'HQ': q.shape[2],
        'K': q.shape[3],
        'V': v.shape[3],
        'BK': _block(q.shape[3]),
        'BV': _block(v.shape[3]),
        'DECAY': g is not None,
        'WINDOW': window > 0,
        'PACKED': cu_seqlens is not None,
        'PRECISION': precisions.of_products(q.dtype),
    }


def _sums(g: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """See `decay_sums`."""
    if g is None:
        return None
    batch, length, heads = g.shape
    sums = g.new_empty((2, batch, heads, length), dtype=torch.float32)
    launch(decay_sums, (_count(g, cu_seqlens) * heads,))(
        *(g, sums, cu_seqlens, length, batch * heads * length, *g.stride()), **_for_scan(heads, cu_seqlens)
    )
    return sums


def _for_scan(heads: int, cu_seqlens: torch.Tensor | None) -> dict[str, Any]:
    """The other arguments of a scan."""
    return {'HQ': heads, 'BLOCK': _SCAN, 'PACKED': cu_seqlens is not None, 'num_warps': 4}


def _count(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """Sequences."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _is_empty(cu_seqlens: torch.Tensor | None) -> bool:
    return cu_seqlens is not None and cu_seqlens.shape[0] == 1


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.shape)


def _sink_zeros(sink_bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if sink_bias is None else _zeros(sink_bias)
