"""The rotary embedding. The backward is the rotation by the negative angle.

A row is one head of one step. The kernel finds its position, for packed sequences by a binary search in `cu_seqlens`, so
that nothing has to be prepared before the launch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from fla.modules.rotary.positions import TABLES_AND_POSITIONS, tables_and_positions
from fla.opaque import opaque
from fla.ops.launch.kernels.layout import sequence_of
from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.triton_call import DEVICES, on_device_of, resolve_neg
from fla.utils.sizes import cdiv, next_power_of_2


@triton.jit
def _table_row(b, t, offset, offsets, cu_seqlens, N, levels, S):
    """The row of the tables for step t of batch row b, clamped to [0, S)."""
    place = t.to(tl.int64)
    n = b
    if cu_seqlens is not None:
        n = sequence_of(t, cu_seqlens, N, levels)
        place -= tl.load(cu_seqlens + n).to(tl.int64)
    if offsets is not None:
        place += tl.load(offsets + n).to(tl.int64)
    else:
        place += offset
    return tl.minimum(tl.maximum(place, 0), S - 1)


@triton.jit
def _quotient(n, d, reciprocal):
    """n // d. For 32-bit n it multiplies by `_reciprocal(d)`: a few instructions instead of the twenty of a division."""
    if n.dtype == tl.int32:
        high = tl.umulhi(2 * n.to(tl.uint32), (reciprocal >> 5).to(tl.uint32))
        return (high >> (reciprocal & 31).to(tl.uint32)).to(tl.int32)
    else:
        return n // d


@triton.jit(do_not_specialize=['count', 'T', 'H', 'T_reciprocal', 'H_reciprocal', 'offset', 'N', 'levels', 'S'])
def _rotate(
    x,
    y,
    cos,
    sin,
    offsets,
    cu_seqlens,
    count,
    T,
    H,
    T_reciprocal,
    H_reciprocal,
    offset,
    N,
    levels,
    S,
    x_b,
    x_t,
    x_h,
    x_d,
    y_b,
    y_t,
    y_h,
    y_d,
    cos_s,
    sin_s,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Rotates 2 HALF channels, and copies the REST channels after them; REST is 0 in place."""
    row = tl.program_id(0).to(count.dtype) * ROWS + tl.arange(0, ROWS)
    valid = row < count
    # rows past the end read the first row, and store nothing
    row = tl.where(valid, row, 0)
    step = _quotient(row, H, H_reciprocal)
    h = (row - step * H).to(tl.int64)
    b = _quotient(step, T, T_reciprocal)
    t = step - b * T
    x += b.to(tl.int64)[:, None] * x_b + t.to(tl.int64)[:, None] * x_t + h[:, None] * x_h
    y += b.to(tl.int64)[:, None] * y_b + t.to(tl.int64)[:, None] * y_t + h[:, None] * y_h

    # in 64 bits: the stride of channels may be large
    col = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    inside = valid[:, None] & (col < HALF)
    if INTERLEAVED:
        pair = tl.arange(0, 2 * BLOCK_HALF)[None, :].to(tl.int64)
        pair_inside = valid[:, None] & (pair < 2 * HALF)
        both = tl.load(x + pair * x_d, mask=pair_inside, other=0.0)
        first, second = tl.split(tl.reshape(both, (ROWS, BLOCK_HALF, 2)))
    else:
        first = tl.load(x + col * x_d, mask=inside, other=0.0)
        second = tl.load(x + (col + HALF) * x_d, mask=inside, other=0.0)
    if REST > 0:
        rest = tl.arange(0, BLOCK_REST)[None, :].to(tl.int64)
        rest_inside = valid[:, None] & (rest < REST)
        unrotated = tl.load(x + (rest + 2 * HALF) * x_d, mask=rest_inside, other=0.0)

    # after the loads of x are issued, which this overlaps with
    place = _table_row(b, t, offset, offsets, cu_seqlens, N, levels, S)[:, None]
    c = tl.load(cos + place * cos_s + col, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + place * sin_s + col, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    rotated_first = (first * c - second * s).to(y.dtype.element_ty)
    rotated_second = (first * s + second * c).to(y.dtype.element_ty)

    if INTERLEAVED:
        both = tl.reshape(tl.join(rotated_first, rotated_second), (ROWS, 2 * BLOCK_HALF))
        tl.store(y + pair * y_d, both, mask=pair_inside)
    else:
        tl.store(y + col * y_d, rotated_first, mask=inside)
        tl.store(y + (col + HALF) * y_d, rotated_second, mask=inside)
    if REST > 0:
        tl.store(y + (rest + 2 * HALF) * y_d, unrotated, mask=rest_inside)


@functools.lru_cache
def _reciprocal(d: int) -> int:
    """m, of 32 bits, and s in the 5 bits below it: n // d is 2 n m >> 32 >> s for 0 <= n < 2^31, as
    m d - 2^(31 + s) < d <= 2^s. The result never fits into 32 bits, because the top bit of m is 1."""
    s = (d - 1).bit_length()
    return -(-(1 << (31 + s)) // d) << 5 | s


def _launch(
    x: torch.Tensor,
    y: torch.Tensor,
    inverse: bool,
    cos: torch.Tensor,
    sin: torch.Tensor,
    offsets: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offset: int,
    interleaved: bool,
) -> torch.Tensor:
    """Writes x rotated into y, which may be x, and returns y."""
    B, T, H, D = x.shape
    half = cos.shape[1]
    rest = 0 if y is x else D - 2 * half
    if x.numel() == 0 or half == rest == 0:
        return y
    if y is not x:
        x = resolve_neg(x)
    cos, sin = (table if table.stride(1) == 1 else table.contiguous() for table in (cos, sin))
    offsets, cu_seqlens = (None if one is None else one.contiguous() for one in (offsets, cu_seqlens))
    count = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if cu_seqlens is not None and count == 0:
        # steps without a sequence: only with invalid cu_seqlens
        cu_seqlens = offsets = None
    block_half = next_power_of_2(max(half, 1))
    block_rest = next_power_of_2(max(rest, 1))
    # 4 KiB of x, 32 bytes per thread of four warps
    rows = max(1, 4096 // (x.element_size() * max(2 * block_half, block_rest)))
    warps = min(max(2 * block_half, block_rest) * rows // 512, 16) if rows == 1 else 4
    with on_device_of(x):
        launch_kernel(
            _rotate,
            (cdiv(B * T * H, rows),),
            *(x, y, cos, sin, offsets, cu_seqlens, B * T * H, T, H, _reciprocal(T), _reciprocal(H)),
            *(offset, count, count.bit_length(), cos.shape[0]),
            *(*x.stride(), *y.stride(), cos.stride(0), sin.stride(0)),
            *(half, rest, block_half, block_rest, rows, interleaved, inverse),
            num_warps=max(warps, 4),
        )
    return y


def _empty(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _forward(x: torch.Tensor, *tables_and_positions: Any) -> torch.Tensor:
    return _launch(x, _empty(x), False, *tables_and_positions)


def _backward(
    cos: torch.Tensor,
    sin: torch.Tensor,
    offsets: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offset: int,
    interleaved: bool,
    dy: torch.Tensor,
) -> torch.Tensor:
    return _launch(dy, _empty(dy), True, cos, sin, offsets, cu_seqlens, offset, interleaved)


def _in_place(x: torch.Tensor, *tables_and_positions: Any) -> None:
    stored = resolve_neg(x)
    _launch(stored, stored, False, *tables_and_positions)
    if stored is not x:
        x.copy_(stored)


rotate = opaque(
    'fla::rotary_embedding',
    schema=f'(Tensor x, {TABLES_AND_POSITIONS}) -> (Tensor y)',
    forward=_forward,
    fake=lambda x, *_: x.new_empty(x.shape),
    backward=_backward,
    fake_backward=lambda *arguments: arguments[-1].new_empty(arguments[-1].shape),
    grads=('x',),
    devices=DEVICES,
)

rotate_in_place = opaque(
    'fla::rotary_embedding_in_place',
    schema=f'(Tensor(a!) x, {TABLES_AND_POSITIONS}) -> ()',
    forward=_in_place,
    fake=lambda *_: None,
    devices=DEVICES,
)


def rotary_embedding(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    inplace: bool,
    seqlen_offsets: int | torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """`rotary_embedding` on Triton."""
    given = tables_and_positions(cos, sin, interleaved, seqlen_offsets, cu_seqlens)
    if inplace and not (torch.is_grad_enabled() and x.requires_grad):
        rotate_in_place(x, *given)
        return x
    y: torch.Tensor = rotate(x, *given)
    # autograd cannot differentiate a kernel that overwrites its input
    return x.copy_(y) if inplace else y
