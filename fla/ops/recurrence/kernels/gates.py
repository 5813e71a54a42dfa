"""Gates inside kernels; `fla.ops.recurrence.gates` is the definition."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp32(x):
    """e^x in float32, by one instruction and a product; `tl.exp` takes five, to keep denormal results, which nothing that
    calls this needs. Running log decays of float32 operands are float64: behind one strong gate the weak ones would lose
    their last digits."""
    return tl.exp2(x.to(tl.float32) * 1.4426950408889634)


@triton.jit
def softplus(x):
    """log(1 + e^x) without overflow; below -4 the series, because 1 + e^x rounds e^x away."""
    y = tl.exp(tl.minimum(x, -4.0))
    return tl.where(x < -4.0, y * (1.0 - y * (0.5 - y / 3.0)), tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def beta_of(beta, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """beta itself, its sigmoid, or twice that."""
    if SIGMOID:
        beta = sigmoid(beta)
        if DOUBLE:
            beta *= 2.0
    return beta


@triton.jit
def inverse_norm(x_ptr, x_t, time, inside, K: tl.constexpr, BK: tl.constexpr):
    """1 / norm of rows `[steps, K]`, in a loop of its own: as part of a loop with products it was wrong on Hopper (relative
    error 2e-2 instead of 3e-3 at K = 128); maybe as such rows are refilled while products read them (docs/kernels.md)."""
    squares = tl.zeros([inside.shape[0]], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        x = tl.load(x_ptr + time * x_t + cols[None, :], mask=inside[:, None] & (cols[None, :] < K), other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
    return tl.rsqrt(squares + 1e-6)
