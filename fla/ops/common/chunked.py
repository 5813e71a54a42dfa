"""The gated delta rule in chunks, in plain PyTorch: any device, any dtype, differentiable twice.

Within a chunk of C steps, with G the running sum of the log decay, the updates u solve a unit lower-triangular system
(the WY representation: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length";
Gated DeltaNet 2412.06464; Kimi Linear 2510.26692):

    L[i, j] = beta_i * sum_c k_ic e^{G_ic - G_jc} k_jc           (j < i)
    (I + L) U = diag(beta) (V - (K e^G) S)
    O = scale * ((Q e^G) S + M U),   M[i, j] = sum_c q_ic e^{G_ic - G_jc} k_jc   (j <= i)
    S' = diag(e^{G_C}) S + (K e^{G_C - G})^T U

Only decays between two steps occur, so every exponent is at most 0. With one gate per head they are a matrix; with one per
channel, blocks of 16 steps are done by the definition and the blocks below them relative to the block's first step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64
BLOCK = 16


def chunked_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One batch of equally long sequences.

    Args:
        q, k: `[N, H, T, K]`, q already scaled; v: `[N, H, T, V]`.
        g: `[N, H, T]` or `[N, H, T, K]`; beta: `[N, H, T]`; state: `[N, H, K, V]`. All of one wide dtype.

    Returns:
        o `[N, H, T, V]`, the final state, and the states before each chunk `[N, H, ceil(T / CHUNK), K, V]`.
    """
    length = q.shape[2]
    if length == 0:
        return v.new_zeros(v.shape), state, v.new_zeros(*state.shape[:2], 0, *state.shape[2:])
    size = min(CHUNK, -(-length // BLOCK) * BLOCK)
    q, k, v = (_in_chunks(x, size) for x in (q, k, v))
    beta = _in_chunks(beta[..., None], size)
    g = _in_chunks(g if g.dim() == 4 else g[..., None], size).cumsum(-2)
    grown = g.exp()
    left = (g[..., -1:, :] - g).exp()
    inner = _decayed_products(torch.stack((k * beta, q)), k, g)
    lower, attend = inner[0].tril(-1), inner[1].tril()
    eye = torch.eye(size, dtype=q.dtype, device=q.device)
    right = torch.cat((v * beta, k * grown * beta), -1)
    solved = torch.linalg.solve_triangular(eye + lower, right, upper=False, unitriangular=True)
    fresh, carried = solved.split((v.shape[-1], k.shape[-1]), -1)
    queries, keys, last = q * grown, k * left, grown[..., -1, :, None]
    outs, states = [], []
    for chunk in range(q.shape[2]):
        states.append(state)
        update = fresh[:, :, chunk] - carried[:, :, chunk] @ state
        outs.append(queries[:, :, chunk] @ state + attend[:, :, chunk] @ update)
        state = last[:, :, chunk] * state + keys[:, :, chunk].transpose(-1, -2) @ update
    return torch.stack(outs, 2).flatten(2, 3)[:, :, :length], state, torch.stack(states, 2)


def _in_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """`[N, H, T, D]` to `[N, H, chunks, size, D]`; the steps that fill up the last chunk change nothing."""
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % size))
    return padded.unflatten(2, (-1, size))


def _decayed_products(x: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """`sum_c x_ic e^{G_ic - G_jc} k_jc` for j <= i; what stands above the diagonal is finite and not to be used.

    x: `[2, N, H, chunks, C, K]`; k: `[N, H, chunks, C, K]`; g: `[..., C, K]` or, one gate per head, `[..., C, 1]`.
    """
    if g.shape[-1] == 1:
        decay = (g - g.transpose(-1, -2)).clamp(max=0).exp()
        return (x @ k.transpose(-1, -2)) * decay
    blocks = g.shape[-2] // BLOCK
    xs, ks, gs = (y.unflatten(-2, (blocks, BLOCK)) for y in (x, k, g))
    relative = (gs[..., :, None, :] - gs[..., None, :, :]).clamp(max=0).exp()
    diagonal = torch.einsum('a...ic,...ijc->a...ij', xs, relative * ks[..., None, :, :])
    rows = []
    for block in range(blocks):
        parts = []
        if block:
            before = slice(0, block * BLOCK)
            start = gs[..., block, :1, :]
            scaled = k[..., before, :] * (start - g[..., before, :]).exp()
            parts.append((xs[..., block, :, :] * (gs[..., block, :, :] - start).exp()) @ scaled.transpose(-1, -2))
        parts.append(diagonal[..., block, :, :])
        rows.append(F.pad(torch.cat(parts, -1), (0, (blocks - block - 1) * BLOCK)))
    return torch.cat(rows, -2)
