"""Gates and normalisation in plain PyTorch, as the operations define them.

Log decays are natural logarithms, at most 0. Functions compute in float64 for float64 inputs, else in float32.
"""

from __future__ import annotations

import torch

L2_EPS = 1e-6


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32; float64 stays float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def gdn_gate(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None = None) -> torch.Tensor:
    """`-exp(A_log) * softplus(g + dt_bias)` for g `[..., HV]`, A_log and dt_bias `[HV]`."""
    raw = wide(g)
    if dt_bias is not None:
        raw = raw + wide(dt_bias).reshape(-1)
    return -wide(A_log).reshape(-1).exp() * softplus(raw)


def kda_gate(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None = None, lower_bound: float | None = None
) -> torch.Tensor:
    """`-exp(A_log) * softplus(g + dt_bias)`, or with `lower_bound` `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, for
    g `[..., HV, K]`, A_log `[HV]` (None with `lower_bound`: factor 1) and dt_bias `[HV * K]`."""
    raw = wide(g)
    heads, dim = g.shape[-2:]
    if dt_bias is not None:
        raw = raw + wide(dt_bias).reshape(heads, dim)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(raw if A_log is None else wide(A_log).reshape(heads, 1).exp() * raw)
    if A_log is None:
        raise ValueError('a gate without lower_bound needs A_log')
    return -wide(A_log).reshape(heads, 1).exp() * softplus(raw)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) without overflow and without losing small values. `F.softplus` is linear above 20, an error of e^-20, and
    the strides of its backward differ from those that PyTorch assumes when it compiles."""
    return torch.logaddexp(x, x.new_zeros(()))


def l2norm(x: torch.Tensor, eps: float = L2_EPS) -> torch.Tensor:
    """`x * rsqrt(sum(x^2) + eps)` over the last dimension, in at least float32."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def l2norms(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`l2norm` of q and of k `[B, T, H, K]`; stacked for one step, whose time is the overhead of PyTorch calls."""
    if q.shape[1] == 1:
        return l2norm(torch.stack((q, k))).unbind()
    return l2norm(q), l2norm(k)


def beta_sigmoid(beta: torch.Tensor, allow_neg_eigval: bool = False) -> torch.Tensor:
    """`sigmoid(beta)`, times 2 with `allow_neg_eigval`."""
    beta = wide(beta).sigmoid()
    return beta * 2 if allow_neg_eigval else beta
