"""The delta rules in plain PyTorch, which the `reference` backends run: every device, dtype and argument.

Differentiable twice, also under `torch.func`. No shape depends on a value, so it runs on meta and fake tensors and inside
torch.compile: indices of packed sequences are computed on their device, for the largest possible number of chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fla.ops.autocast import outside_autocast
from fla.ops.checks import readable
from fla.ops.recurrence.chunked import BLOCK, CHUNK, chunked_delta_rule, in_chunks, plain_int
from fla.ops.recurrence.gates import wide

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """Results of `delta_rule`; states are in float32 or float64, laid out like the initial one.

    Attributes:
        o: `[B, T, HV, V]` in v's dtype.
        final: state after the last step, `[N, HV, K, V]`.
        states: state before each chunk, `[B, chunks, HV, K, V]`, or None.
    """

    o: torch.Tensor
    final: torch.Tensor
    states: torch.Tensor | None


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    gv: torch.Tensor | None = None,
    chunk_size: int | None = None,
    states: bool = False,
) -> Result:
    """The recurrence over inputs of any floating dtype; gates, norms and sigmoids have been applied to them.

    Args:
        q, k: `[B, T, H, K]`. v: `[B, T, HV, V]`.
        g: log decay `[B, T, HV]`, per key channel `[B, T, HV, K]`, or None. gv: per value channel `[B, T, HV, V]`.
        beta: `[B, T, HV]`.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; returned states have the same layout.
        chunk_size: steps per chunk; None: 64.
        states: also return the states before each chunk.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[1] == 1 and cu_seqlens is None and gv is None:
        return _decode(q, k, v, g, beta, scale, initial_state, state_v_first, states)
    dtype, groups = v.dtype, v.shape[2] // q.shape[2]
    heads_first = [wide(x).transpose(1, 2) for x in (q, k, v)]
    q, k = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in heads_first[:2])
    v, q = heads_first[2], q * scale
    beta = wide(beta).transpose(1, 2)[..., None]
    if g is None:
        g = beta.new_zeros(beta.shape)
    else:
        g = wide(g).transpose(1, 2)
        g = g if g.dim() == 4 else g[..., None]
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        state = v.new_zeros(count, v.shape[1], k.shape[-1], v.shape[-1])
    else:
        state = wide(initial_state).to(v.dtype)
        state = state.transpose(-1, -2) if state_v_first else state
    tensors = (q, k, v, g, beta, state, None if gv is None else wide(gv).transpose(1, 2))

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        gv: torch.Tensor | None,
    ) -> Triple:
        if gv is not None:
            return *_steps(q, k, v, g, gv, beta, state, cu_seqlens), state[:, None].clone()
        if cu_seqlens is not None:
            return _packed(q, k, v, g, beta, state, cu_seqlens, chunk_size)
        return _equal(q, k, v, g, beta, state, chunk_size)

    o, final, before = outside_autocast(run, tensors, v.dtype)
    if state_v_first:
        final, before = final.transpose(-1, -2), before.transpose(-1, -2)
    return Result(o.transpose(1, 2).to(dtype).contiguous(), final.contiguous(), before.contiguous() if states else None)


def notes_of(function: str, arguments: Mapping[str, Any]) -> Sequence[str]:
    """The notes of `explain` beside a reference: `fused_recurrent_*` calls that it computes in chunks."""
    q, one_by_one = arguments['q'], arguments.get('gv') is not None
    if function.startswith('chunk') or one_by_one or (q.shape[1] == 1 and arguments.get('cu_seqlens') is None):
        return ()
    return (f'computes in chunks, as {function.replace("fused_recurrent", "chunk")} does',)


def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
    states: bool,
) -> Result:
    """One step of every sequence, in as few PyTorch calls as possible: their overhead is all its time."""
    batch, _, heads, dim = q.shape
    value_heads, value_dim = v.shape[2:]
    rows = batch * value_heads

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        beta: torch.Tensor,
        state: torch.Tensor | None,
    ) -> Triple:
        q, k = (wide(x).reshape(batch * heads, 1, dim) for x in (q, k))
        if heads != value_heads:
            q, k = (x.repeat_interleave(value_heads // heads, 0) for x in (q, k))
        v = wide(v).reshape(rows, 1, value_dim)
        if state is None:
            state = v.new_zeros(rows, dim, value_dim)
        else:
            state = wide(state).to(v.dtype)
            state = (state.transpose(-1, -2) if state_v_first else state).reshape(rows, dim, value_dim)
        if g is not None:
            state = state * wide(g).exp().reshape(rows, dim if g.dim() == 4 else 1, 1)
        update = wide(beta).reshape(rows, 1, 1) * torch.baddbmm(v, k, state, alpha=-1)
        after = torch.baddbmm(state, k.transpose(1, 2), update)
        return torch.bmm(q * scale, after), after, after

    o, final, _ = outside_autocast(run, (q, k, v, g, beta, initial_state), wide(v).dtype)
    final = final.view(batch, value_heads, dim, value_dim)
    if state_v_first:
        final = final.transpose(-1, -2).contiguous()
    before = None
    if states:
        before = (torch.zeros_like(final) if initial_state is None else initial_state.to(final.dtype, copy=True))[:, None]
    return Result(o.view(batch, 1, value_heads, value_dim).to(v.dtype), final, before)


def _step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> Pair:
    """One step of `[N, H, 1, .]`."""
    state = state * g.exp().transpose(-1, -2)
    update = beta * (v - k @ state)
    state = state + k.transpose(-1, -2) @ update
    return q @ state, state


def _steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> Pair:
    """Step by step, for `gv`, which has no chunked form."""
    if cu_seqlens is not None and not readable(cu_seqlens):
        return _packed_steps(q, k, v, g, gv, beta, state, cu_seqlens)
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        if len(ends) == 1:
            return v.clone(), state.clone()
        parts = []
        for n, (start, end) in enumerate(itertools.pairwise(ends)):
            q_n, k_n, v_n, g_n, gv_n, beta_n = (x[:, :, start:end] for x in (q, k, v, g, gv, beta))
            parts.append(_steps(q_n, k_n, v_n, g_n, gv_n, beta_n, state[n : n + 1], None))
        return torch.cat([o for o, _ in parts], 2), torch.cat([s for _, s in parts])
    outs = []
    for t in range(q.shape[2]):
        now = slice(t, t + 1)
        state = state * gv[:, :, now].exp()
        o, state = _step(q[:, :, now], k[:, :, now], v[:, :, now], g[:, :, now], beta[:, :, now], state)
        outs.append(o)
    return (torch.cat(outs, 2), state) if outs else (v.clone(), state.clone())


def _packed_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    gv: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> Pair:
    """`_steps` of packed sequences whose lengths the host cannot read: each step updates the states `[N, H, K, V]`."""
    if state.shape[0] == 0 or q.shape[2] == 0:
        return v.clone(), state.clone()
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    outs, number = [], torch.arange(state.shape[0], device=q.device)
    for t in range(q.shape[2]):
        now = slice(t, t + 1)
        inside = ((starts <= t) & (t < ends)).view(-1, 1, 1, 1)
        # only the sequence of this step is advanced, so that a NaN of another cannot reach it
        mine = (number * inside.flatten()).sum()[None]
        one = state.index_select(0, mine) * gv[:, :, now].exp()
        o, one = _step(q[:, :, now], k[:, :, now], v[:, :, now], g[:, :, now], beta[:, :, now], one)
        state = torch.where(inside, one, state)
        outs.append(o)
    return torch.cat(outs, 2), state


def _equal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk_size: int | None,
) -> Triple:
    """Sequences of equal length, in chunks."""
    length = q.shape[2]
    if length == 0 or q.shape[0] == 0:
        return v.clone(), state.clone(), state.new_zeros(state.shape[0], 0, *state.shape[1:])
    # one compiled graph for each number of chunks: with symbolic sizes below here, compiling takes minutes
    size = min(chunk_size or CHUNK, plain_int(-(-length // BLOCK)) * BLOCK)
    q, k, v, g, beta = (in_chunks(x, size) for x in (q, k, v, g, beta))
    o, before, after = chunked_delta_rule(q, k, v, g, beta, state)
    return o.flatten(2, 3)[:, :, :length], after[-1], before.transpose(1, 2)


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    chunk_size: int | None,
) -> Triple:
    """Packed sequences: each starts a new chunk, in the largest possible number of rows of chunks."""
    length, count, size = q.shape[2], cu_seqlens.shape[0] - 1, chunk_size or CHUNK
    if length == 0 or count == 0:
        return (torch.zeros_like(v) if length else v.clone()), state.clone(), state.new_zeros(1, 0, *state.shape[1:])
    starts = cu_seqlens[:-1].clamp(0, length)
    lengths = (cu_seqlens[1:].clamp(0, length) - starts).clamp(min=0)
    chunks = -(-lengths // size)
    ends = chunks.cumsum(0)
    rows = torch.arange(plain_int(-(-length // size) + count), device=q.device)
    sequence = torch.searchsorted(ends, rows, right=True).clamp(max=count - 1)
    chunk = rows - (ends - chunks)[sequence]
    used = rows < ends[-1]
    offset = chunk[:, None] * size + torch.arange(size, device=q.device)
    inside = used[:, None] & (offset < lengths[sequence][:, None])
    token = torch.where(inside, starts[sequence][:, None] + offset, 0)
    # not a product with 0: a NaN would reach other sequences
    q, k, v, g, beta = (torch.where(inside[:, :, None], x[:, :, token], 0) for x in (q, k, v, g, beta))
    first = (chunk == 0) & used

    def enter(row: int, reached: torch.Tensor) -> torch.Tensor:
        # not `state[sequence[row]]`: an index without dimensions is read on the host
        return torch.where(first[row], state.index_select(0, sequence[row : row + 1]), reached)

    o, before, after = chunked_delta_rule(q, k, v, g, beta, torch.zeros_like(state[:1]), enter)
    finals = torch.cat(after)[(ends - 1).clamp(min=0)]
    final = torch.where((lengths > 0)[:, None, None, None], finals, state)
    # each token has one slot; slots outside any sequence are dropped
    slots = torch.where(inside, token, length).flatten()
    place = torch.zeros(length + 1, dtype=slots.dtype, device=q.device)
    place = place.scatter(0, slots, torch.arange(slots.shape[0], device=q.device))
    return o.flatten(2, 3)[:, :, place[:length]], final, before.transpose(1, 2)
