"""Softmax attention over whole sequences, packed sequences, or new queries behind cached keys."""

from __future__ import annotations

import torch

from fla.backends import dispatch
from fla.ops.attn.checks import check_parallel
from fla.ops.attn.on_triton import AttentionOnTriton
from fla.ops.launch.triton_call import require_triton


@dispatch('attn', check=check_parallel, default_verifier=AttentionOnTriton)
def parallel_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    *,
    sink_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal softmax attention: `o_i = sum_j p_ij v_j`, `p_ij ~ exp(scale q_i k_j + g_(j+1) + … + g_i)` for j up to i.

    Args:
        q: `[B, T, HQ, K]`, float16, bfloat16, float32 or float64, K at most 256.
        k: `[B, S, H, K]`; v: `[B, S, H, V]`, V at most 256; the dtype of q. HQ is a multiple of H: query head i reads head
            i // (HQ // H). S is T, or more in decoding, where the queries are the last T of S steps.
        g: log decay `[B, T, HQ]`, at most 0, the dtype of q or float32; needs S == T. Values below -1e5, such as -inf, count
            as -1e5, which leaves nothing of earlier steps.
        scale: of the scores, finite. Default: K ** -0.5.
        window_size: number of steps that a query sees, itself included; None: all.
        cu_seqlens: `[N + 1]`, int32 or int64: packed sequences, with B == 1; needs S == T.
        chunk_indices: accepted for compatibility, without effect.
        sink_bias: `[HQ]`, for each head a logit in the softmax that has no value; the dtype of q or float32.

    Returns:
        o `[B, T, HQ, V]` in v's dtype, contiguous.

    Raises:
        TypeError, ValueError: for invalid arguments, before any backend is tried.

    Source: Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762; g: Lin et al. 2025, "Forgetting Transformer",
    arXiv 2503.02130; sinks: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453.
    """
    require_triton('parallel_attn', q)
    from fla.ops.attn.autograd import attention

    # chunk_indices follows from cu_seqlens
    return attention(q, k, v, g, scale, window_size, cu_seqlens, sink_bias)
