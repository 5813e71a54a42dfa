"""Gates inside kernels. `fla.ops.recurrence.gates` defines them for the host."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp32(x):
    """Returns e^x in float32, as one instruction and one multiplication.

    `tl.exp` takes five instructions to keep denormal results, which no caller needs. The running log decays of float32
    operands are float64, because the weak gates behind one strong gate would lose their last digits in float32."""
    return tl.exp2(x.to(tl.float32) * 1.4426950408889634)


@triton.jit
def softplus(x):
    """Returns log(1 + e^x) without overflow. Below -4 it is a series, because 1 + e^x rounds e^x away."""
    y = tl.exp(tl.minimum(x, -4.0))
    return tl.where(x < -4.0, y * (1.0 - y * (0.5 - y / 3.0)), tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def beta_of(beta, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """Returns beta itself, its sigmoid (SIGMOID), or twice its sigmoid (SIGMOID and DOUBLE)."""
    if SIGMOID:
        beta = sigmoid(beta)
        if DOUBLE:
            beta *= 2.0
    return beta


@triton.jit
def load_beta(beta_ptr, b_t, steps, inside, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """Returns beta of the steps of a chunk in float32, 0 outside the chunk. `beta_ptr` points to the chunk's first step."""
    raw = tl.load(beta_ptr + steps.to(tl.int64) * b_t, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, beta_of(raw, SIGMOID, DOUBLE), 0.0)


@triton.jit
def inverse_norm(x_ptr, x_t, time, inside, K: tl.constexpr, BK: tl.constexpr):
    """Returns 1 / norm of the rows `[steps, K]`, which a loop of its own sums.

    Inside a loop with products the sums were wrong on Hopper (relative error 2e-2 instead of 3e-3 at K = 128). Such rows may
    be refilled while products read them (docs/kernels.md)."""
    squares = tl.zeros([inside.shape[0]], tl.float32)
    for i in range(0, K, BK):
        cols = i + tl.arange(0, BK)
        x = tl.load(x_ptr + time * x_t + cols[None, :], mask=inside[:, None] & (cols[None, :] < K), other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
    return tl.rsqrt(squares + 1e-6)
