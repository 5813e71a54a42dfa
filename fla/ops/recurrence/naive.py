"""The delta rule step by step: the definition that tests compare every implementation with.

    S <- diag(e^g) S;  S <- S + k (beta (v - S^T k))^T;  o = scale * S^T q         (S is [K, V] per head)

Computes in float64 for float64 inputs, else in float32.
"""

from __future__ import annotations

import itertools

import torch

from fla.ops.recurrence.gates import wide


def sequences(length: int, batch: int, cu_seqlens: torch.Tensor | None) -> list[tuple[int, slice]]:
    """Batch row and slice of time of every sequence."""
    if cu_seqlens is None:
        return [(row, slice(0, length)) for row in range(batch)]
    ends = cu_seqlens.tolist()
    return [(0, slice(start, end)) for start, end in itertools.pairwise(ends)]


def delta_rule_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, in a loop over steps.

    Args:
        q, k: `[B, T, H, K]`.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: log decay `[B, T, HV]` or per channel `[B, T, HV, K]`.
        beta: `[B, T, HV]`.
        scale: factor of q; None: K ** -0.5.
        initial_state: `[N, HV, K, V]`.
        cu_seqlens: `[N + 1]`, with B == 1.

    Returns:
        o `[B, T, HV, V]` and the final state `[N, HV, K, V]`, in float32 or float64.
    """
    groups = v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (wide(x).repeat_interleave(groups, dim=2) for x in (q, k))
    v, g, beta = wide(v), wide(g), wide(beta)
    g = g if g.dim() == 4 else g[..., None]
    spans = sequences(q.shape[1], q.shape[0], cu_seqlens)
    outs, states = [], []
    for index, (row, span) in enumerate(spans):
        if initial_state is None:
            state = v.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        else:
            state = initial_state[index].to(v.dtype)
        out = []
        for t in range(span.start, span.stop):
            state = state * g[row, t].exp()[..., None]
            error = v[row, t] - torch.einsum('hkv,hk->hv', state, k[row, t])
            state = state + torch.einsum('hk,hv->hkv', k[row, t], beta[row, t][:, None] * error)
            out.append(scale * torch.einsum('hkv,hk->hv', state, q[row, t]))
        outs.append(torch.stack(out) if out else v[row, :0])
        states.append(state)
    if not spans:
        return v, v.new_zeros(0, v.shape[2], q.shape[3], v.shape[3])
    o = torch.stack(outs) if cu_seqlens is None else torch.cat(outs)[None]
    return o, torch.stack(states)
