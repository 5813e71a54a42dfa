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

from collections.abc import Callable

import torch
import torch.nn.functional as F

CHUNK = 64
BLOCK = 16


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    enter: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """The recurrence over chunks of inputs that are cut into chunks.

    Args:
        q, k: `[N, H, chunks, C, K]`, q already scaled; v: `[N, H, chunks, C, V]`. C is a multiple of `BLOCK`; steps with
            k = 0, beta = 0 and g = 0 change nothing.
        g: `[N, H, chunks, C, K]` or, one gate per head, `[N, H, chunks, C, 1]`; beta: `[N, H, chunks, C, 1]`.
        state: `[N, H, K, V]`. All of one wide dtype.
        enter: called with each chunk's number and the state that reaches it; returns the state it starts from.

    Returns:
        o `[N, H, chunks, C, V]`, and the states `[N, H, K, V]` before and after each chunk.
    """
    size = q.shape[-2]
    # Differences of long sums: in float32 one strong gate would cost the weak ones behind it their last digits. No decay
    # below e^-1000 differs from 0, and -inf - -inf would be NaN.
    exact = torch.float32 if g.device.type == 'mps' else torch.float64
    g = g.clamp(min=-1000.0).cumsum(-2, dtype=exact)
    grown = g.to(q.dtype).exp()
    left = (g[..., -1:, :] - g).to(q.dtype).exp()
    inner = _decayed_products(torch.stack((k * beta, q)), k, g)
    lower, attend = inner[0].tril(-1), inner[1].tril()
    eye = torch.eye(size, dtype=q.dtype, device=q.device)
    right = torch.cat((v * beta, k * grown * beta), -1)
    solved = torch.linalg.solve_triangular(eye + lower, right, upper=False, unitriangular=True)
    fresh, carried = solved.split((v.shape[-1], k.shape[-1]), -1)
    queries, keys, last = q * grown, k * left, grown[..., -1, :, None]
    outs, before, after = [], [], []
    for chunk in range(q.shape[2]):
        if enter is not None:
            state = enter(chunk, state)
        before.append(state)
        update = fresh[:, :, chunk] - carried[:, :, chunk] @ state
        outs.append(queries[:, :, chunk] @ state + attend[:, :, chunk] @ update)
        state = last[:, :, chunk] * state + keys[:, :, chunk].transpose(-1, -2) @ update
        after.append(state)
    return torch.stack(outs, 2), before, after


def plain_int(number: int | torch.SymInt) -> int:
    """Of a symbolic size, its value, which becomes a condition of the graph. Dynamo keeps `int(number)` symbolic."""
    return len(range(number))


def in_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """`[N, H, T, D]` to `[N, H, chunks, size, D]`, the last chunk filled up with zeros."""
    chunks = plain_int(-(-x.shape[2] // size))
    padded = F.pad(x, (0, 0, 0, chunks * size - x.shape[2]))
    return padded.reshape(*x.shape[:2], chunks, size, x.shape[3])


def _decayed_products(x: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """`sum_c x_ic e^{G_ic - G_jc} k_jc` for j <= i; what stands above the diagonal is finite and not to be used.

    x: `[2, N, H, chunks, C, K]`; k: `[N, H, chunks, C, K]`; g: `[..., C, K]` or, one gate per head, `[..., C, 1]`.
    """
    if g.shape[-1] == 1:
        decay = (g - g.transpose(-1, -2)).to(k.dtype).clamp(max=0).exp()
        return (x @ k.transpose(-1, -2)) * decay
    blocks = g.shape[-2] // BLOCK
    xs, ks, gs = (y.reshape(*y.shape[:-2], blocks, BLOCK, y.shape[-1]) for y in (x, k, g))
    relative = (gs[..., :, None, :] - gs[..., None, :, :]).to(k.dtype).clamp(max=0).exp()
    diagonal = torch.einsum('a...ic,...ijc->a...ij', xs, relative * ks[..., None, :, :])
    rows = []
    for block in range(blocks):
        parts = []
        if block:
            before = slice(0, block * BLOCK)
            start = gs[..., block, :1, :]
            scaled = k[..., before, :] * (start - g[..., before, :]).to(k.dtype).exp()
            parts.append(
                (xs[..., block, :, :] * (gs[..., block, :, :] - start).to(k.dtype).exp()) @ scaled.transpose(-1, -2)
            )
        parts.append(diagonal[..., block, :, :])
        rows.append(F.pad(torch.cat(parts, -1), (0, (blocks - block - 1) * BLOCK)))
    return torch.cat(rows, -2)
