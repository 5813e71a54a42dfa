"""The operator with the intra-chunk part of its backward in one TileLang kernel; the rest is that of the default."""

from __future__ import annotations

import torch

from fla.ops.kda.autograd import operator_of
from fla.ops.kda.backends.tilelang import kernels
from fla.ops.kda.kernels.launch import Intermediates, IntraChunkGradients, KDACall
from fla.ops.launch.tilelang_call import kernels_of, name_of
from fla.ops.launch.vendor import for_tma


def intra_chunk_bwd(
    call: KDACall, intermediates: Intermediates, reuse: bool, do: torch.Tensor, du: torch.Tensor, dh: torch.Tensor
) -> IntraChunkGradients:
    """See `fla.ops.kda.kernels.launch.intra_chunk_bwd`."""
    found, options = intermediates, call.options
    q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens = call.inputs
    gate, table = options.use_gate_in_kernel, call.layout.table
    tokens, heads, dim_k = call.B * call.T, call.HV, call.K
    # the recurrence was the last to read qg and kg; a chunk of the other intermediates is read before it is written
    dq, dk = (x if reuse else torch.empty_like(x) for x in (found.qg, found.kg))
    dg = found.G if g.dtype == torch.float32 and reuse else torch.empty_like(found.G, dtype=g.dtype)
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    rows = call.layout.rows if gate else 1
    d_bias, d_rates = call.empty(rows, heads, dim_k, dtype=torch.float32), call.empty(rows, heads, dtype=torch.float32)
    # stands for tensors that the compiled code does not read
    unread = call.empty(2, dtype=torch.int32)
    rates, bias = d_rates[0], d_bias[0]
    if gate:
        rates = torch.ones_like(rates) if A_log is None else A_log.float().exp()
        bias = torch.zeros_like(bias) if dt_bias is None else dt_bias.float().view(heads, dim_k)
    indices = unread if cu_seqlens is None else cu_seqlens
    recipe = (
        *(dim_k, call.V, name_of(q.dtype), name_of(g.dtype), name_of(beta.dtype), name_of(indices.dtype)),
        *(call.layout.packed, call.normalise, gate, options.lower_bound is not None),
        *(options.use_beta_sigmoid_in_kernel, options.use_beta_sigmoid_in_kernel and options.allow_neg_eigval),
    )
    (kernel,) = kernels_of((kernels.intra_chunk_bwd, recipe))
    kernel(
        *(for_tma(x).view(tokens, call.H, dim_k) for x in (q, k)),
        for_tma(v).view(tokens, heads, call.V),
        (for_tma(g) if gate else dg).view(tokens, heads, dim_k),
        beta.contiguous().view(tokens, heads),
        *(rates, bias),
        *(x.view(tokens, heads, -1) for x in (found.G, found.lower, found.inverse, found.v_new)),
        *(found.h, dh, for_tma(do).view(tokens, heads, call.V), du.view(tokens, heads, call.V)),
        *(indices, unread.view(1, 2) if table is None else table),
        *(x.view(tokens, heads, -1) for x in (dq, dk, du, dg)),
        dbeta.view(tokens, heads),
        *(d_rates, d_bias),
        *(call.T, heads // call.H, options.scale, call.lower_bound),
    )
    d_A_log = d_dt_bias = None
    if gate and A_log is not None:
        d_A_log = d_rates.sum(0).view(A_log.shape).to(A_log.dtype)
    if gate and dt_bias is not None:
        d_dt_bias = d_bias.sum(0).view(dt_bias.shape).to(dt_bias.dtype)
    return IntraChunkGradients(dq, dk, du, dg, dbeta, d_A_log, d_dt_bias)


kernel = operator_of('fla::tilelang_kda', intra_chunk_bwd)
