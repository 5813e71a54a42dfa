"""Inputs of the delta rules and their step-by-step definition. Imports no `fla`, so it also serves the process for FLA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

NAMES = ('q', 'k', 'v', 'g', 'beta')
DEVICE = 'cuda'
# lower bound of the log decay of a step
LOWER_BOUND = -5.0


def inputs(
    op: str,
    batch: int,
    length: int,
    heads: int,
    dim: int,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    strength: float = 1.0,
    device: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns q, k, v [batch, length, heads, dim] in `dtype`, and g and beta [batch, length, heads] in float32.

    q and v are normal, k is normal and scaled to length 1, g is strength * logsigmoid(normal), beta is uniform in [0, 1).
    For 'kda', g has a last dimension of `dim`.
    """
    device = device or DEVICE
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k, v = (normal(batch, length, heads, dim) for _ in range(3))
    g = F.logsigmoid(normal(batch, length, heads, *([dim] if op == 'kda' else []))) * strength
    beta = torch.rand((batch, length, heads), generator=generator, device=device)
    return q.to(dtype), F.normalize(k, dim=-1).to(dtype), v.to(dtype), g, beta


def with_bounded_gates(args: tuple[torch.Tensor, ...], seed: int = 0) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Returns KDA's inputs with raw gates, as Kimi's models have them, and the call's other arguments.

    Finished gates reach down to LOWER_BOUND, and half of the decays of a step are below e^-2.5. Keys have lengths between
    0.5 and 2. The other arguments' tensors get no gradient.
    """
    q, k, v, g, beta = args
    heads, dim = g.shape[2:]
    generator = torch.Generator(g.device).manual_seed(1000 + seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=g.device)

    flags = {'use_gate_in_kernel': True, 'safe_gate': True, 'lower_bound': LOWER_BOUND, 'use_qk_l2norm_in_kernel': True}
    parameters = {'A_log': normal(heads) * 0.3, 'dt_bias': normal(heads * dim) * 0.5}
    k = (k.float() * torch.exp2(torch.tanh(normal(*k.shape[:3], 1)))).to(k.dtype)
    return (q, k, v, normal(*g.shape).to(q.dtype), beta), flags | parameters


def with_finished_gates(args: tuple[torch.Tensor, ...], more: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Converts results of `with_bounded_gates` to arguments of `definition`."""
    q, k, v, g, beta = args
    rate = more['A_log'].to(g.dtype).exp()[:, None]
    g = LOWER_BOUND * torch.sigmoid(rate * (g + more['dt_bias'].to(g.dtype).view(g.shape[2:])))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q, k, v, g, beta


def packed_inputs(op: str, shape: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Returns inputs of equally long sequences packed into one row, and their `cu_seqlens`."""
    count, length, heads, dim = shape
    return inputs(op, 1, count * length, heads, dim), cu_seqlens_of(*[length] * count)


def cu_seqlens_of(*lengths: int) -> torch.Tensor:
    """Returns the `cu_seqlens` of sequences of these lengths, int32."""
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


def output_gradient(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns a normal gradient with the shape and dtype of a result."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(like.shape, device=DEVICE, generator=generator).to(like.dtype)


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns o and the final state S of S <- diag(e^g) S, S <- S + beta k (v - k^T S)^T, o = scale q^T S, step by step."""
    (batch, length, heads, dim), value_dim = q.shape, v.shape[-1]
    decay = (g if g.dim() == 4 else g[..., None]).exp()
    state = q.new_zeros(batch, heads, dim, value_dim) if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        state = state * decay[:, t, :, :, None]
        update = (v[:, t] - torch.einsum('bhk,bhkv->bhv', k[:, t], state)) * beta[:, t, :, None]
        state = state + torch.einsum('bhk,bhv->bhkv', k[:, t], update)
        outputs.append(torch.einsum('bhk,bhkv->bhv', q[:, t], state) * dim**-0.5)
    return torch.stack(outputs, 1), state
