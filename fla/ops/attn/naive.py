"""Softmax attention as it is written down, for every argument, and which keys a query sees."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch

from fla.ops.autocast import outside_autocast
from fla.ops.checks import readable
from fla.ops.recurrence.gates import wide

# A decay that leaves nothing of a key, -inf among them, of which there are no differences.
STRONGEST = -1e5


def visible(
    q: torch.Tensor, k: torch.Tensor, window_size: int | None = None, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Which keys each query sees, `[T, S]`: those of its own sequence, up to itself, at most `window_size`. The queries are
    the last T of S steps."""
    key = torch.arange(k.shape[1], device=q.device)
    query = key[k.shape[1] - q.shape[1] :, None]
    seen = key <= query
    if window_size is not None:
        seen = seen & (key > query - window_size)
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), key.to(cu_seqlens.dtype), right=True)
        seen = seen & (sequence == sequence[:, None])
    return seen


def lengths_of(cu_seqlens: torch.Tensor | None, length: int) -> list[int]:
    """Steps of the packed sequences that have some; none, if only a device knows, or they are not `length` together."""
    if cu_seqlens is None or not readable(cu_seqlens):
        return []
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens.tolist()) if start < end]
    return lengths if sum(lengths) == length else []


def one_by_one(attention: Callable[..., torch.Tensor], lengths: list[int], *tensors: torch.Tensor | None) -> torch.Tensor:
    """Attention of packed sequences, each by itself: so they keep to themselves even what is no number, which a mask does
    not stop, since zero weights times NaN are NaN."""
    parts = [[None] * len(lengths) if x is None else torch.split(x, lengths, 1) for x in tensors]
    return torch.cat([attention(*each) for each in zip(*parts, strict=True)], 1)


def decays(g: torch.Tensor) -> torch.Tensor:
    """What a score of each step and each earlier one adds, `[B, HQ, T, T]`. Sums are differences of sums from the first step
    on, which in float32 would lose the last digits of weak decays: they are in float64, where a device has it."""
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

    Args and errors: as for `parallel_attn`, unchecked. Differentiable twice; float64 stays float64.

    Returns:
        o `[B, T, HQ, V]` in v's dtype, contiguous.
    """
    if lengths := lengths_of(cu_seqlens, q.shape[1]):
        sink = None if sink_bias is None else wide(sink_bias)  # its gradient, of all sequences, is rounded once
        attention = functools.partial(naive_parallel_attn, scale=scale, window_size=window_size, sink_bias=sink)
        return one_by_one(attention, lengths, q, k, v, g)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    formula = functools.partial(_of_formula, scale, window_size, cu_seqlens)
    return outside_autocast(formula, (q, k, v, g, sink_bias), v.dtype)[0]


def _of_formula(
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
