"""Attention rounded as in FlashAttention's kernels, in float32 and with all scores in memory: the accuracy they can reach.

Operands of products are rounded to 16 bits: the weights p before the product with v, the scores' gradients before those with
q and k. The backward repeats p from the scores and the logarithm of the normaliser. It gets delta = o do from the rounded o
and not as the sum of p dp, for which every key would be met once more. Where a query sees little but one key, dp - delta
all but vanishes, and the rounding of o shows: small rows of dq may be off by a tenth of themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from fla.ops.attn.naive import decays, visible


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype, q, k, v, g, sink_bias, scale, seen):
        ctx.rounded = lambda x: x.to(dtype).float()
        queries, keys, values = (x.float().transpose(1, 2) for x in (q, k, v))
        groups = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        scores = queries @ keys.transpose(2, 3) * scale
        if g is not None:
            scores = scores + decays(g).float()
        scores = scores.masked_fill(~seen, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        sink = None if sink_bias is None else sink_bias.float()[:, None, None]
        top = top if sink is None else torch.maximum(top, sink)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        total = total if sink is None else total + (sink - top).exp()
        o = (ctx.rounded(weights) @ values / total).to(dtype)
        ctx.save_for_backward(queries, keys, values, scores, top + total.log(), o, sink)
        ctx.scale, ctx.groups, ctx.decays = scale, groups, g is not None
        return o.transpose(1, 2)

    @staticmethod
    def backward(ctx, do):
        queries, keys, values, scores, lse, o, sink = ctx.saved_tensors
        p = (scores - lse).exp()
        do = do.float().transpose(1, 2)
        delta = (o.float() * do).sum(-1, keepdim=True)
        ds = p * (do @ values.transpose(2, 3) - delta)
        dv = ctx.rounded(p).transpose(2, 3) @ do
        dq = ctx.rounded(ds) @ keys * ctx.scale
        dk = ctx.rounded(ds).transpose(2, 3) @ queries * ctx.scale
        dk, dv = (x.unflatten(1, (-1, ctx.groups)).sum(2).transpose(1, 2) for x in (dk, dv))
        dg = None
        if ctx.decays:
            dg = (ds.sum(3) - ds.sum(2)).double().flip(2).cumsum(2).flip(2).transpose(1, 2)
        d_sink = None if sink is None else -((sink - lse).exp() * delta).sum((0, 2, 3))
        return None, dq.transpose(1, 2), dk, dv, dg, d_sink, None, None


def emulated(
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    sink_bias: torch.Tensor | None = None,
) -> Any:
    """`parallel_attn`, differentiable once, with operands and o rounded to `dtype`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Flash.apply(dtype, q, k, v, g, sink_bias, scale, visible(q, k, window_size, cu_seqlens))
