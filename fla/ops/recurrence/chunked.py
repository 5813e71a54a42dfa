"""The chunked delta rule in plain PyTorch: any device, any dtype, differentiable twice.

Within a chunk of C steps, with G the running sum of the log decay, the updates u solve a unit lower-triangular system
(the WY representation: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length";
Gated DeltaNet 2412.06464; Kimi Linear 2510.26692):

    L[i, j] = beta_i * sum_c k_ic e^{G_ic - G_jc} k_jc           (j < i)
    (I + L) U = diag(beta) (V - (K e^G) S)
    O = scale * ((Q e^G) S + M U),   M[i, j] = sum_c q_ic e^{G_ic - G_jc} k_jc   (j <= i)
    S' = diag(e^{G_C}) S + (K e^{G_C - G})^T U

Only decays between two steps occur, so every exponent is at most 0. With one gate per head the decays form a matrix. With
one gate per channel, diagonal blocks of 16 steps follow the definition, and the blocks left of them are computed relative to
the first step of their rows.
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
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The recurrence over inputs that are split into chunks.

    Args:
        q, k: `[N, H, chunks, C, K]`, q already scaled; v: `[N, H, chunks, C, V]`. C is a multiple of `BLOCK`; steps with
            k = 0, beta = 0 and g = 0 change nothing.
        g: `[N, H, chunks, C, K]` or, one gate per head, `[N, H, chunks, C, 1]`; beta: `[N, H, chunks, C, 1]`.
        state: `[N, H, K, V]`. All tensors are float32, or all are float64.
        enter: called with a chunk's number and the state after the chunk before it; returns the chunk's initial state.

    Returns:
        o `[N, H, chunks, C, V]`, the states before each chunk `[N, H, chunks, K, V]`, and after each `[N, H, K, V]`.
    """
    # Decays are differences of long sums: in float32 one strong gate would cost the weak ones after it their last digits. A
    # decay below e^-1000 is 0 in every dtype, and -inf - -inf would be NaN.
    exact = torch.float32 if g.device.type == 'mps' else torch.float64
    g = g.clamp(min=-1000.0).cumsum(-2, dtype=exact)
    grown = g.to(q.dtype).exp()
    left = (g[..., -1:, :] - g).to(q.dtype).exp()
    lower, attend = _decayed_products(k * beta, q, k, g)
    lower, attend = lower.tril(-1), attend.tril()
    solved = _solve(lower, torch.cat((v * beta, k * grown * beta), -1))
    fresh, carried = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    keys, last = (k * left).transpose(-1, -2).contiguous(), grown[..., -1, :, None]
    # the sequential part has few operations, on [N H, ., .], where product and sum are fused
    fresh, carried, keys, last = (x.flatten(0, 1) for x in (fresh, carried, keys, last))
    shape = state.shape
    updates, before, after = [], [], []
    for chunk in range(q.shape[2]):
        if enter is not None:
            state = enter(chunk, state)
        before.append(state)
        flat = state.flatten(0, 1)
        update = torch.baddbmm(fresh[:, chunk], carried[:, chunk], flat, alpha=-1)
        state = torch.baddbmm(_decayed(flat, last[:, chunk]), keys[:, chunk], update).view(shape)
        updates.append(update)
        after.append(state)
    update, states = torch.stack(updates, 1).view(v.shape), torch.stack(before, 2)
    return (q * grown) @ states + attend @ update, states, after


def _decayed(state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """A function of its own, like `_solve`, so that tests can round its operands as kernels do."""
    return decay * state


def _solve(lower: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`(I + L)^-1 right` for a strictly lower triangular L, by blocks of 16 steps: 2.0 ms for 64 systems of 64 steps with
    128 columns, where LAPACK takes 3.8 ms."""
    starts = range(0, lower.shape[-1], BLOCK)
    blocks = torch.stack([lower[..., i : i + BLOCK, i : i + BLOCK] for i in starts], -3)
    eye = torch.eye(BLOCK, dtype=lower.dtype, device=lower.device).expand_as(blocks)
    inverses = torch.linalg.solve_triangular(blocks, eye, upper=False, unitriangular=True)
    solved: torch.Tensor = inverses[..., 0, :, :] @ right[..., :BLOCK, :]
    for number, i in enumerate(starts):
        if number:
            rest = right[..., i : i + BLOCK, :] - lower[..., i : i + BLOCK, :i] @ solved
            solved = torch.cat((solved, inverses[..., number, :, :] @ rest), -2)
    return solved


def plain_int(number: int | torch.SymInt) -> int:
    """The value of a symbolic size, which becomes a guard of the graph; Dynamo keeps `int(number)` symbolic."""
    return len(range(number))


def in_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """`[N, H, T, D]` to `[N, H, chunks, size, D]`, the last chunk padded with zeros."""
    chunks = plain_int(-(-x.shape[2] // size))
    padded = F.pad(x, (0, 0, 0, chunks * size - x.shape[2]))
    return padded.reshape(*x.shape[:2], chunks, size, x.shape[3])


def _decayed_products(
    x: torch.Tensor, y: torch.Tensor, k: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum_c x_ic e^{G_ic - G_jc} k_jc` for j <= i, and the same for y; entries above the diagonal are undefined.

    x, y, k: `[N, H, chunks, C, K]`; g: `[..., C, K]` or, one gate per head, `[..., C, 1]`.
    """
    if g.shape[-1] == 1:
        decay = (g - g.transpose(-1, -2)).to(k.dtype).clamp(max=0).exp()
        # batched small products with a transposed matrix take twice as long as with a contiguous copy
        turned = k.transpose(-1, -2).contiguous()
        return (x @ turned) * decay, (y @ turned) * decay
    both = torch.stack((x, y))
    size, rows = g.shape[-2], []
    for start in range(0, size, BLOCK):
        now, before = slice(start, start + BLOCK), slice(0, start)
        own, g_own = both[..., now, :], g[..., now, :]
        parts = []
        if start:
            first = g_own[..., :1, :]
            scaled = k[..., before, :] * (first - g[..., before, :]).to(k.dtype).exp()
            parts.append((own * (g_own - first).to(k.dtype).exp()) @ scaled.transpose(-1, -2))
        # block by block: a temporary for all blocks is new memory on each call, whose page faults take longer than the rest
        relative = (g_own[..., :, None, :] - g_own[..., None, :, :]).to(k.dtype).clamp(max=0).exp()
        parts.append(torch.einsum('a...ic,...ijc->a...ij', own, relative * k[..., None, now, :]))
        rows.append(F.pad(torch.cat(parts, -1), (0, size - start - BLOCK)))
    first, second = torch.cat(rows, -2)
    return first, second
