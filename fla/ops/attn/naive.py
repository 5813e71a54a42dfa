"""Softmax attention by its formula, for every argument, and the mask of keys that a query sees."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from fla.ops.autocast import outside_autocast
from fla.ops.checks import readable
from fla.ops.recurrence.gates import wide

# Stronger decays, such as -inf, are clamped to this: it leaves nothing of a key, and sums of it have differences.
STRONGEST = -1e5


def visible(
    q: torch.Tensor, k: torch.Tensor, window_size: int | None = None, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Which keys each query sees, `[T, S]`: those of its sequence up to itself, at most `window_size` of them. The queries
    are the last T of S steps."""
    key = torch.arange(k.shape[1], device=q.device)
    query = key[k.shape[1] - q.shape[1] :, None]
    seen = key <= query
    if window_size is not None:
        seen = seen & (key > query - window_size)
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), key.to(cu_seqlens.dtype), right=True)
        seen = seen & (sequence == sequence[:, None])
    return seen


def sequence_lengths(cu_seqlens: torch.Tensor | None, length: int) -> list[int]:
    """Lengths of the packed sequences that are not empty. An empty list if reading them would synchronise or trace, or if
    they do not add up to `length`."""
    if cu_seqlens is None or not readable(cu_seqlens):
        return []
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens.tolist()) if start < end]
    return lengths if sum(lengths) == length else []


def attend_each_sequence(
    attention: Callable[..., torch.Tensor], lengths: list[int], *tensors: torch.Tensor | None
) -> torch.Tensor:
    """Attention of packed sequences, one call for each. Unlike with a mask, NaN in one sequence does not reach another: a
    masked weight of 0 times NaN is NaN."""
    parts = [[None] * len(lengths) if x is None else torch.split(x, lengths, 1) for x in tensors]
    return torch.cat([attention(*each) for each in zip(*parts, strict=True)], 1)


def decays(g: torch.Tensor) -> torch.Tensor:
    """The decay between each step and each earlier one, `[B, HQ, T, T]`, which is added to their score: a difference of
    running sums. These are in float64 if the device has it; float32 would lose the last digits of weak decays."""
    exact = torch.float32 if g.device.type == 'mps' else torch.float64
    total = g.transpose(1, 2).to(exact).clamp(min=STRONGEST).cumsum(-1)
    return total[..., :, None] - total[..., None, :]


def naive_parallel_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    sink_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`softmax(scale q k^T + decays, over the visible keys and the sink) v`, with all scores in memory.

    Arguments are those of `parallel_attn` and not checked. Differentiable twice; float64 stays float64.

    Returns:
        o `[B, T, HQ, V]` in v's dtype, contiguous.
    """
    if lengths := sequence_lengths(cu_seqlens, q.shape[1]):
        sink = None if sink_bias is None else wide(sink_bias)  # the sum of its gradients is rounded once
        attention = functools.partial(naive_parallel_attn, scale=scale, window_size=window_size, sink_bias=sink)
        return attend_each_sequence(attention, lengths, q, k, v, g)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    formula = functools.partial(_formula, scale, window_size, cu_seqlens)
    return outside_autocast(formula, (q, k, v, g, sink_bias), v.dtype)[0]


def _formula(
    scale: float,
    window_size: int | None,
    cu_seqlens: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    sink_bias: torch.Tensor | None,
) -> tuple[torch.Tensor]:
    groups = q.shape[2] // k.shape[2]
    queries = wide(q).transpose(1, 2) * scale
    keys, values = (wide(x).transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))
    scores = queries @ keys.transpose(-1, -2)
    if g is not None:
        scores = scores + decays(g).to(scores.dtype)
    scores = scores.masked_fill(~visible(q, k, window_size, cu_seqlens), -torch.inf)
    if sink_bias is None:
        weights = scores.softmax(-1)
    else:
        sink = wide(sink_bias)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return ((weights @ values).transpose(1, 2).to(v.dtype).contiguous(),)
