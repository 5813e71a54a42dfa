"""L2 normalisation of rows, `x rsqrt(sum x^2 + 1e-6)`, for kernels that do not normalise by themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.ops.launch.launch_cache import launch_kernel
from fla.utils.sizes import cdiv, next_power_of_2

ROWS = 16  # rows of one program


@triton.jit
def load_rows(x, count, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """Returns the offsets of a program's rows, their mask, the rows in float32, and 1 / norm of each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BK)
    inside = (row < count)[:, None] & (col < K)[None, :]
    at = row[:, None] * K + col[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return at, inside, values, tl.rsqrt(tl.sum(values * values, 1) + 1e-6)


@triton.jit
def _forward(x, y, count, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """Grid (ceil(count / ROWS),). Writes y from x, both `[count, K]` and contiguous."""
    at, inside, values, inverse = load_rows(x, count, K, BK, ROWS)
    tl.store(y + at, (values * inverse[:, None]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x, dy, dx, count, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """Grid (ceil(count / ROWS),). Writes dx from x and dy, all `[count, K]` and contiguous."""
    at, inside, values, inverse = load_rows(x, count, K, BK, ROWS)
    values *= inverse[:, None]
    gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    gradient -= values * tl.sum(values * gradient, 1)[:, None]
    tl.store(dx + at, (gradient * inverse[:, None]).to(dx.dtype.element_ty), mask=inside)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Returns x divided by the norms of its last dimension. x is contiguous."""
    y = torch.empty_like(x)
    K = x.shape[-1]
    count = x.numel() // K
    launch_kernel(_forward, (cdiv(count, ROWS),), x, y, count, K, next_power_of_2(K), ROWS)
    return y


def normalized_backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of x, given dy, the gradient of `normalized(x)`. Both are contiguous."""
    dx = torch.empty_like(x)
    K = x.shape[-1]
    count = x.numel() // K
    launch_kernel(_backward, (cdiv(count, ROWS),), x, dy, dx, count, K, next_power_of_2(K), ROWS)
    return dx
