"""SwiGLU: `silu(x) y`, forward and backward, element by element in float32.

The backward saves only x and y. That of `swiglu_linear` needs `silu(x) y` for the gradient of the weight; it writes it again
in the pass that writes the gradients of x and y.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fla.modules.kernels.rows import rows
from fla.opaque import opaque
from fla.ops.autocast import without_autocast
from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.triton_call import DEVICES, on_device_of
from fla.utils.sizes import cdiv, next_power_of_2


@triton.jit
def _rows_and_columns(D, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows and columns of a program. Adjacent programs share rows."""
    blocks = (D - 1) // BLOCK + 1  # not cdiv, whose sum may overflow: D may be close to 2^31
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row[:, None], col[None, :]


@triton.jit(do_not_specialize=['count'])
def _forward(x, y, z, count, D, x_row, y_row, HALVES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    if HALVES:
        y += D
    row, col = _rows_and_columns(D, BLOCK_ROWS, BLOCK)
    inside = (row < count) & (col < D)
    a = tl.load(x + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_row + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(z + row * D + col, (a * tl.sigmoid(a) * b).to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=['count'])
def _backward(
    x,
    y,
    dz,
    dx,
    dy,
    z,
    count,
    D,
    x_row,
    y_row,
    dz_row,
    d_row,
    HALVES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With s = sigmoid(x): dx = dz y s (1 + x (1 - s)), dy = dz x s, and z = x s y again unless z is None."""
    if HALVES:
        y += D
        dy += D
    row, col = _rows_and_columns(D, BLOCK_ROWS, BLOCK)
    inside = (row < count) & (col < D)
    a = tl.load(x + row * x_row + col, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_row + col, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dz + row * dz_row + col, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    silu = a * s
    tl.store(dx + row * d_row + col, (d * b * (s + silu * (1.0 - s))).to(dx.dtype.element_ty), mask=inside)
    tl.store(dy + row * d_row + col, (d * silu).to(dy.dtype.element_ty), mask=inside)
    if z is not None:
        tl.store(z + row * D + col, (silu * b).to(z.dtype.element_ty), mask=inside)


def _tile(count: int, D: int, itemsize: int) -> tuple[int, int, tuple[int]]:
    """Rows and columns of a program, and the grid. A program has 4 KiB of each tensor, 32 bytes per thread of four warps."""
    numbers = 4096 // itemsize
    block = min(next_power_of_2(D), numbers)
    block_rows = min(numbers // block, next_power_of_2(count))
    return block_rows, block, (cdiv(count, block_rows) * cdiv(D, block),)


def _launch_forward(x: torch.Tensor, y: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns `silu(x) y`, contiguous; without y, x holds both halves."""
    D = x.shape[-1] if y is not None else x.shape[-1] // 2
    z = torch.empty((*x.shape[:-1], D), dtype=dtype, device=x.device)
    if z.numel() == 0:
        return z
    count = z.numel() // D
    (x, second), (x_row, second_row) = rows(x, y)
    if y is None:
        second, second_row = x, x_row
    elif x_row == second_row == D:
        # one long row has a remainder only at its end
        count, D = 1, z.numel()
    block_rows, block, grid = _tile(count, D, x.element_size())
    with on_device_of(x):
        launch_kernel(_forward, grid, x, second, z, count, D, x_row, second_row, y is None, block_rows, block)
    return z


def _launch_backward(
    x: torch.Tensor, y: torch.Tensor | None, dz: torch.Tensor, z: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of x and y, contiguous; without y, that of x twice. Writes `silu(x) y` into z, if given."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy = dx if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, dy
    D = dz.shape[-1]
    count = dz.numel() // D
    (x, second, dz), (x_row, second_row, dz_row) = rows(x, y, dz)
    d_row = dx.shape[-1]
    if y is None:
        second, second_row = x, x_row
    elif x_row == second_row == dz_row == D:
        count, D = 1, dz.numel()
    block_rows, block, grid = _tile(count, D, x.element_size())
    with on_device_of(x):
        launch_kernel(
            _backward,
            grid,
            *(x, second, dz, dx, dy, z, count, D, x_row, second_row, dz_row, d_row),
            *(y is None, block_rows, block),
        )
    return dx, dy


swiglu = opaque(
    'fla::swiglu',
    schema='(Tensor x, Tensor y) -> (Tensor z)',
    forward=lambda x, y: _launch_forward(x, y, x.dtype),
    fake=lambda x, y: x.new_empty(x.shape),
    backward=lambda x, y, dz: _launch_backward(x, y, dz),
    grads=('x', 'y'),
    devices=DEVICES,
)

silu_and_mul = opaque(
    'fla::silu_and_mul',
    schema='(Tensor x) -> (Tensor z)',
    forward=lambda x: _launch_forward(x, None, x.dtype),
    fake=lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    backward=lambda x, dz: _launch_backward(x, None, dz)[0],
    grads=('x',),
    devices=DEVICES,
)


def _linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with without_autocast(x.device):  # the caller has cast the weight
        return F.linear(_launch_forward(x, y, weight.dtype), weight, bias)


def _linear_backward(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    do: torch.Tensor,
    needs_input_grad: tuple[bool, ...],
) -> Any:
    needs_x, needs_y, needs_weight, needs_bias = needs_input_grad
    (out, D), count = weight.shape, do.shape[:-1].numel()
    do = do.reshape(count, out)
    dx = dy = dweight = None
    with without_autocast(x.device):
        z = torch.empty(x.shape, dtype=weight.dtype, device=x.device) if needs_weight else None
        if needs_x or needs_y:
            dx, dy = _launch_backward(x, y, (do @ weight).view(x.shape), z)
        elif needs_weight:
            z = _launch_forward(x, y, weight.dtype)
        if z is not None:
            dweight = do.t() @ z.view(count, D)
        dbias = do.sum(0) if bias is not None and needs_bias else None
    return dx if needs_x else None, dy if needs_y else None, dweight, dbias


swiglu_linear = opaque(
    'fla::swiglu_linear',
    schema='(Tensor x, Tensor y, Tensor weight, Tensor? bias) -> (Tensor o)',
    forward=_linear,
    fake=lambda x, y, weight, bias: weight.new_empty((*x.shape[:-1], weight.shape[0])),
    backward=_linear_backward,
    grads=('x', 'y', 'weight', 'bias'),
    devices=DEVICES,
)
