"""Kimi delta attention by Triton, with what is parallel over chunks of its backward in TileLang."""

from __future__ import annotations

import torch

from fla.opaque import opaque
from fla.ops.kda import autograd
from fla.ops.kda.backends.tilelang import kernels
from fla.ops.kda.kernels.launch import Saved, Settings, Within, _Chunks
from fla.ops.launch.kernels.layout import Layout
from fla.ops.launch.tilelang_call import kernels_of, name_of
from fla.ops.launch.triton_call import DEVICES
from fla.ops.launch.vendor import for_tma


def within_chunks(
    saved: Saved, settings: Settings, layout: Layout, chunks: _Chunks, do: torch.Tensor, du: torch.Tensor, dh: torch.Tensor
) -> Within:
    """See the function of that name in `fla.ops.kda.kernels.launch`."""
    q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens, table, _ = saved[:11]
    batch, length, groups, dim_k = q.shape
    heads, dim_v = v.shape[2:]
    tokens = batch * length
    keep = saved.G is not None
    # the recurrence was the last to read these two, and a chunk of the others is read before it is written
    dq, dk = (torch.empty_like(x) if keep else x for x in (chunks.qg, chunks.kg))
    dg = chunks.G if g.dtype == torch.float32 and not keep else torch.empty_like(chunks.G, dtype=g.dtype)
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    d_bias = torch.empty(layout.rows if settings.gate else 1, heads, dim_k, dtype=torch.float32, device=q.device)
    d_rates = torch.empty(layout.rows if settings.gate else 1, heads, dtype=torch.float32, device=q.device)
    # stand for tensors that the compiled code does not read
    unread = torch.empty(2, dtype=torch.int32, device=q.device)
    rates, bias = d_rates[0], d_bias[0]
    if settings.gate:
        rates = torch.ones_like(rates) if A_log is None else A_log.float().exp()
        bias = torch.zeros_like(bias) if dt_bias is None else dt_bias.float().view(heads, dim_k)
    indices = unread if cu_seqlens is None else cu_seqlens
    (kernel,) = kernels_of(
        (
            kernels.intra_chunk_bwd,
            (
                *(dim_k, dim_v, name_of(q.dtype), name_of(g.dtype), name_of(beta.dtype), name_of(indices.dtype)),
                *(layout.packed, settings.normalise, settings.gate, settings.lower_bound is not None),
                *(settings.sigmoid, settings.sigmoid and settings.double),
            ),
        )
    )
    kernel(
        *(for_tma(x).view(tokens, groups, dim_k) for x in (q, k)),
        for_tma(v).view(tokens, heads, dim_v),
        (for_tma(g) if settings.gate else dg).view(tokens, heads, dim_k),
        beta.contiguous().view(tokens, heads),
        *(rates, bias),
        *(x.view(tokens, heads, -1) for x in (chunks.G, chunks.lower, chunks.inverse, chunks.v_new)),
        *(chunks.h, dh, for_tma(do).view(tokens, heads, dim_v), du.view(tokens, heads, dim_v)),
        *(indices, unread.view(1, 2) if table is None else table),
        *(x.view(tokens, heads, -1) for x in (dq, dk, du, dg)),
        dbeta.view(tokens, heads),
        *(d_rates, d_bias),
        *(length, heads // groups, settings.scale, settings.lower_bound or 0.0),
    )
    d_A_log = d_dt_bias = None
    if settings.gate and A_log is not None:
        d_A_log = d_rates.sum(0).view(A_log.shape).to(A_log.dtype)
    if settings.gate and dt_bias is not None:
        d_dt_bias = d_bias.sum(0).view(dt_bias.shape).to(dt_bias.dtype)
    return Within(dq, dk, du, dg, dbeta, d_A_log, d_dt_bias)


kernel = opaque(
    'fla::tilelang_kda',
    schema=autograd.SCHEMA,
    forward=autograd._forward,
    fake=autograd._fake,
    backward=autograd.backward_with(within_chunks),
    grads=('q', 'k', 'v', 'g', 'beta', 'A_log', 'dt_bias', 'initial_state'),
    intermediates=autograd._KEPT,
    non_differentiable=('intermediate',),
    devices=DEVICES,
)
