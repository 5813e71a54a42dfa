"""Norms over the last dimension: all share one forward and one backward kernel, each with a variant for long rows.

A row (with groups, a group of a row) is read once and stays in registers. Rows longer than `IN_REGISTERS`, and shorter ones
where that is faster in the forward, are read tile by tile, and again from the cache. The backward computes the statistics of
a row again, so that only inputs are saved. Each program sums the gradients of weight and bias over its rows, and one more
kernel adds the programs' sums in a fixed order. For rows in registers, the backward prefetches the next tiles of a program
into shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fla.modules.kernels.rows import rows
from fla.ops.launch.launch_cache import launch_kernel
from fla.utils.devices import check_shared_mem, multiprocessors_of
from fla.utils.sizes import next_power_of_2

# Elements of the longest row that stays in registers, in forward and backward.
IN_REGISTERS = (32768, 8192)
# Elements of a tile of a longer row.
TILE = 8192


class Norm(NamedTuple):
    """A norm of `s = x + residual`: `(s - mean) / sqrt(...) weight + bias`, times an activation of the gate."""

    kind: str  # 'rms'; 'layer', which subtracts the mean; 'l2', which sums squares instead of averaging them
    eps: float
    activation: str = ''  # of the gate: 'swish' or 'sigmoid'
    num_groups: int = 1


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """The activation of the gate, and its derivative."""
    sigmoid = tl.sigmoid(gate)
    if ACTIVATION == 'sigmoid':
        return sigmoid, sigmoid * (1 - sigmoid)
    else:
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))


@triton.jit
def _load_sum(x, residual, row, x_stride, residual_stride, col, inside, POLICY: tl.constexpr):
    """Elements of x + residual in float32. POLICY: the eviction policy of the cache, '' for the default."""
    s = tl.load(x + row * x_stride + col, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if residual is not None:
        at = residual + row * residual_stride + col
        s += tl.load(at, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    return s


@triton.jit
def _load_parameter(p, at, inside, default: tl.constexpr):
    """Elements of weight or bias in float32."""
    if p is None:
        return tl.full(inside.shape, default, tl.float32)
    else:
        return tl.load(p + at, mask=inside, other=0.0, eviction_policy='evict_last').to(tl.float32)


@triton.jit(do_not_specialize=['count'])
def _forward(
    x,
    residual,
    g,
    weight,
    bias,
    y,
    total,
    count,
    x_stride,
    residual_stride,
    g_stride,
    eps,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    BD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS rows of SIDE adjacent groups of D elements each. AHEAD: weight and bias are loaded before the sums of x."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    first = tl.program_id(1) * D
    col = tl.arange(0, SIDE * BD)[None, :]
    in_group = col < D
    if SIDE > 1:
        first = (tl.program_id(1) * SIDE + col // BD) * D
        col = col % BD
        # Always true, but the compiler moves loads without a condition behind the sums, even with AHEAD.
        in_group = (col < D) & (first < D * GROUPS)
    inside = (row < count) & in_group
    out = row * (D * GROUPS) + first + col
    if AHEAD:
        w = _load_parameter(weight, first + col, in_group, 1.0)
        b = _load_parameter(bias, first + col, in_group, 0.0)
    s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, '')
    if total is not None:
        tl.store(total + out, s.to(total.dtype.element_ty), mask=inside)
    s = tl.reshape(s, (ROWS * SIDE, BD))
    if KIND == 'layer':
        s = tl.where(tl.arange(0, BD)[None, :] < D, s - (tl.sum(s, 1) / D)[:, None], 0.0)
    square = tl.sum(s * s, 1)
    s *= tl.rsqrt((square if KIND == 'l2' else square / D) + eps)[:, None]
    s = tl.reshape(s, (ROWS, SIDE * BD))
    if not AHEAD:
        w = _load_parameter(weight, first + col, in_group, 1.0)
        b = _load_parameter(bias, first + col, in_group, 0.0)
    if weight is not None:
        s *= w
    if bias is not None:
        s += b
    if g is not None:
        gate = tl.load(g + row * g_stride + first + col, mask=inside, other=0.0)
        s *= _activate(gate.to(tl.float32), ACTIVATION)[0]
    tl.store(y + out, s.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _statistics(
    x,
    residual,
    row,
    x_stride,
    residual_stride,
    first,
    eps,
    D: tl.constexpr,
    KIND: tl.constexpr,
    BD: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Mean and reciprocal standard deviation of a long row, which is read once for each of them."""
    col = tl.arange(0, BD)
    mean = 0.0
    if KIND == 'layer':
        sums = tl.zeros((BD,), tl.float32)
        for start in range(0, D, BD):
            at = start + col
            sums += _load_sum(x, residual, row, x_stride, residual_stride, first + at, at < D, POLICY)
        mean = tl.sum(sums, 0) / D
    squares = tl.zeros((BD,), tl.float32)
    for start in range(0, D, BD):
        at = start + col
        s = _load_sum(x, residual, row, x_stride, residual_stride, first + at, at < D, POLICY)
        if KIND == 'layer':
            s = tl.where(at < D, s - mean, 0.0)
        squares += s * s
    square = tl.sum(squares, 0)
    return mean, tl.rsqrt((square if KIND == 'l2' else square / D) + eps)


@triton.jit
def _forward_long(
    x,
    residual,
    g,
    weight,
    bias,
    y,
    total,
    x_stride,
    residual_stride,
    g_stride,
    eps,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BD: tl.constexpr,
):
    """One row of a group, tile by tile."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * D
    # the row is read once more
    mean, scale = _statistics(x, residual, row, x_stride, residual_stride, first, eps, D, KIND, BD, 'evict_last')
    for start in range(0, D, BD):
        col = start + tl.arange(0, BD)
        inside = col < D
        out = row * (D * GROUPS) + first + col
        s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, 'evict_first')
        if total is not None:
            tl.store(total + out, s.to(total.dtype.element_ty), mask=inside)
        s = (s - mean) * scale
        if weight is not None:
            s *= _load_parameter(weight, first + col, col < D, 1.0)
        if bias is not None:
            s += _load_parameter(bias, first + col, col < D, 0.0)
        if g is not None:
            gate = tl.load(g + row * g_stride + first + col, mask=inside, other=0.0)
            s *= _activate(gate.to(tl.float32), ACTIVATION)[0]
        tl.store(y + out, s.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(dy, s, g, dg, w, b, at_g, out, inside, ACTIVATION: tl.constexpr):
    """Stores the gradient of the gate, and returns that of the norm's result. s is normalized."""
    if g is None:
        return dy
    else:
        gate = tl.load(g + at_g, mask=inside, other=0.0).to(tl.float32)
        value, slope = _activate(gate, ACTIVATION)
        tl.store(dg + out, (dy * (s * w + b) * slope).to(dg.dtype.element_ty), mask=inside)
        return dy * value


@triton.jit(do_not_specialize=['count'])
def _backward(
    x,
    residual,
    g,
    weight,
    bias,
    dy,
    dtotal,
    dx,
    dresidual,
    dg,
    dweight,
    dbias,
    count,
    x_stride,
    residual_stride,
    g_stride,
    dy_stride,
    dtotal_stride,
    eps,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes every `programs`-th tile of ROWS rows of a group. With STAGES 0 it takes one tile; the compiler removes
    a loop of one constant step. dweight and dbias `[programs, GROUPS, D]`."""
    first = tl.program_id(1) * D
    col = tl.arange(0, BD)[None, :]
    w = _load_parameter(weight, first + col, col < D, 1.0)
    b = _load_parameter(bias, first + col, col < D, 0.0)
    dw = tl.zeros((ROWS, BD), tl.float32)
    db = tl.zeros((ROWS, BD), tl.float32)
    own = tl.program_id(0).to(tl.int64) * ROWS
    for start in tl.range(
        own if STAGES else 0, count if STAGES else 1, tl.num_programs(0) * ROWS if STAGES else 1, num_stages=STAGES
    ):
        row = ((start if STAGES else own) + tl.arange(0, ROWS))[:, None]
        inside = (row < count) & (col < D)
        out = row * (D * GROUPS) + first + col
        s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, '')
        d = tl.load(dy + row * dy_stride + first + col, mask=inside, other=0.0)
        d = d.to(tl.float32)
        if KIND == 'layer':
            s = tl.where(inside, s - (tl.sum(s, 1) / D)[:, None], 0.0)
        square = tl.sum(s * s, 1)
        scale = tl.rsqrt((square if KIND == 'l2' else square / D) + eps)[:, None]
        s *= scale
        d = _gate_backward(d, s, g, dg, w, b, row * g_stride + first + col, out, inside, ACTIVATION)
        if dweight is not None:
            dw += tl.where(inside, d * s, 0.0)  # past the last row s is 0 * inf if eps is 0
        if dbias is not None:
            db += d
        d *= w
        along = tl.sum(d * s, 1)[:, None]
        d -= s * (along if KIND == 'l2' else along / D)
        if KIND == 'layer':
            d -= (tl.sum(d, 1) / D)[:, None]
        d *= scale
        if dtotal is not None:
            d += tl.load(dtotal + row * dtotal_stride + first + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + out, d.to(dx.dtype.element_ty), mask=inside)
        if dresidual is not None:
            tl.store(dresidual + out, d.to(dresidual.dtype.element_ty), mask=inside)
    at = tl.program_id(0) * (D * GROUPS) + first + tl.arange(0, BD)
    if dweight is not None:
        tl.store(dweight + at, tl.sum(dw, 0), mask=tl.arange(0, BD) < D)
    if dbias is not None:
        tl.store(dbias + at, tl.sum(db, 0), mask=tl.arange(0, BD) < D)


@triton.jit(do_not_specialize=['count'])
def _backward_long(
    x,
    residual,
    g,
    weight,
    bias,
    dy,
    dtotal,
    dx,
    dresidual,
    dg,
    dweight,
    dbias,
    count,
    x_stride,
    residual_stride,
    g_stride,
    dy_stride,
    dtotal_stride,
    eps,
    D: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BD: tl.constexpr,
):
    """A program takes every `programs`-th row of a group, tile by tile. dweight and dbias `[programs, GROUPS, D]` start at 0
    and stay in the cache."""
    first = tl.program_id(1) * D
    sums = tl.program_id(0).to(tl.int64) * (D * GROUPS) + first
    for row in range(tl.program_id(0).to(tl.int64), count, tl.num_programs(0)):
        mean, scale = _statistics(x, residual, row, x_stride, residual_stride, first, eps, D, KIND, BD, '')
        along = tl.zeros((BD,), tl.float32)
        straight = tl.zeros((BD,), tl.float32)
        for start in range(0, D, BD):
            col = start + tl.arange(0, BD)
            inside = col < D
            s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, '')
            s = tl.where(inside, (s - mean) * scale, 0.0)
            d = tl.load(dy + row * dy_stride + first + col, mask=inside, other=0.0).to(tl.float32)
            if g is not None:
                gate = tl.load(g + row * g_stride + first + col, mask=inside, other=0.0)
                d *= _activate(gate.to(tl.float32), ACTIVATION)[0]
            d *= _load_parameter(weight, first + col, col < D, 1.0)
            along += d * s
            straight += d
        parallel = tl.sum(along, 0)
        constant = 0.0
        if KIND != 'l2':
            parallel /= D
        if KIND == 'layer':
            constant = tl.sum(straight, 0) / D
        tl.debug_barrier()  # until the sums of the previous row are written
        for start in range(0, D, BD):
            col = start + tl.arange(0, BD)
            inside = col < D
            out = row * (D * GROUPS) + first + col
            w = _load_parameter(weight, first + col, col < D, 1.0)
            b = _load_parameter(bias, first + col, col < D, 0.0)
            s = _load_sum(x, residual, row, x_stride, residual_stride, first + col, inside, '')
            s = (s - mean) * scale
            d = tl.load(dy + row * dy_stride + first + col, mask=inside, other=0.0).to(tl.float32)
            d = _gate_backward(d, s, g, dg, w, b, row * g_stride + first + col, out, inside, ACTIVATION)
            if dweight is not None:
                before = tl.load(dweight + sums + col, mask=inside, other=0.0)
                tl.store(dweight + sums + col, before + d * s, mask=inside)
            if dbias is not None:
                before = tl.load(dbias + sums + col, mask=inside, other=0.0)
                tl.store(dbias + sums + col, before + d, mask=inside)
            d = (d * w - s * parallel - constant) * scale
            if dtotal is not None:
                d += tl.load(dtotal + row * dtotal_stride + first + col, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + out, d.to(dx.dtype.element_ty), mask=inside)
            if dresidual is not None:
                tl.store(dresidual + out, d.to(dresidual.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=['programs'])
def _add_programs(dweight, dbias, weight, bias, programs, W: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr):
    """The gradients of weight and bias `[W]` from the programs' sums `[programs, W]`. If both are given, the second axis of
    the grid selects one."""
    if dbias is None:
        _add_columns(dweight, weight, programs, W, ROWS, BW)
    elif dweight is None:
        _add_columns(dbias, bias, programs, W, ROWS, BW)
    elif tl.program_id(1) == 0:
        _add_columns(dweight, weight, programs, W, ROWS, BW)
    else:
        _add_columns(dbias, bias, programs, W, ROWS, BW)


@triton.jit
def _add_columns(parts, out, programs, W: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr):
    col = tl.program_id(0) * BW + tl.arange(0, BW)
    total = tl.zeros((ROWS, BW), tl.float32)
    for start in range(0, programs, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        total += tl.load(parts + row.to(tl.int64) * W + col[None, :], mask=(row < programs) & (col < W)[None, :], other=0.0)
    tl.store(out + col, tl.sum(total, 0).to(out.dtype.element_ty), mask=col < W)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: Norm,
    output_dtype: torch.dtype,
    prenorm: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the norm in `output_dtype`, and with `prenorm` x + residual in the dtype of residual."""
    y = _empty(x, output_dtype)
    total = _empty(x, residual.dtype) if prenorm and residual is not None else None
    if x.numel() == 0:
        return y, total
    count, D = x.numel() // x.shape[-1], x.shape[-1] // norm.num_groups
    inputs, strides = rows(x, residual, g)
    arguments = (*inputs, _contiguous(weight), _contiguous(bias), y, total)
    options = {'D': D, 'GROUPS': norm.num_groups, 'KIND': norm.kind, 'ACTIVATION': norm.activation}
    read = D * (x.element_size() + (0 if residual is None else residual.element_size()))
    rule = _forward_rule(D, norm.num_groups, norm.kind, g is not None, residual is not None, total is not None, read)
    if isinstance(rule, _TiledRule):
        grid = (count, norm.num_groups)
        launch_kernel(_forward_long, grid, *arguments, *strides, norm.eps, **options, **rule._asdict())
        return y, total
    grid = (-(-count // rule.ROWS), norm.num_groups // rule.SIDE)
    launch_kernel(_forward, grid, *arguments, count, *strides, norm.eps, **options, **rule._asdict())
    return y, total


class Gradients(NamedTuple):
    x: torch.Tensor
    residual: torch.Tensor | None
    g: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def backward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    g: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dy: torch.Tensor,
    dtotal: torch.Tensor | None,
    norm: Norm,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    needs: Sequence[bool],
) -> Gradients:
    """Returns gradients. `dtypes` are those of x and residual, None for no gradient of the residual; `needs` is of weight
    and bias."""
    dx = _empty(x, dtypes[0])
    dresidual = None if dtypes[1] is None else _empty(x, dtypes[1])
    dg = None if g is None else _empty(x, g.dtype)
    parameters = [p if need else None for p, need in zip((weight, bias), needs, strict=True)]
    if x.numel() == 0:
        return Gradients(dx, dresidual, dg, *(None if p is None else torch.zeros_like(p) for p in parameters))
    count, D = x.numel() // x.shape[-1], x.shape[-1] // norm.num_groups
    rule = _backward_rule(D, g is not None, any(p is not None for p in parameters))
    BD, ROWS, num_warps = rule.BD, rule.ROWS, rule.num_warps
    programs = -(-count // ROWS)
    if rule.programs:
        programs = min(programs, max(1, multiprocessors_of(x.device) * rule.programs // norm.num_groups))
    new = torch.zeros if D > IN_REGISTERS[1] else torch.empty
    sums = [None if p is None else new((programs, *p.shape), dtype=torch.float32, device=p.device) for p in parameters]
    inputs, strides = rows(x, residual, g, dy, dtotal)
    arguments = (*inputs[:3], _contiguous(weight), _contiguous(bias), *inputs[3:], dx, dresidual, dg, *sums, count)
    options = {'D': D, 'GROUPS': norm.num_groups, 'KIND': norm.kind, 'ACTIVATION': norm.activation, 'BD': BD}
    grid = (programs, norm.num_groups)
    if D > IN_REGISTERS[1]:
        launch_kernel(_backward_long, grid, *arguments, *strides, norm.eps, **options, num_warps=num_warps)
    else:
        read = sum(one.element_size() for one in inputs if one is not None) * ROWS * BD
        stages = _stages(x.device, read, num_warps) if rule.programs else 0
        # only NVIDIA GPUs prefetch tiles and limit registers
        limits = {'num_warps': num_warps, **({'maxnreg': rule.registers} if stages > 1 and rule.registers else {})}
        launch_kernel(_backward, grid, *arguments, *strides, norm.eps, **options, ROWS=ROWS, STAGES=stages, **limits)
    return Gradients(dx, dresidual, dg, *_sum_programs(parameters, sums))


def _sum_programs(parameters: list[torch.Tensor | None], sums: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of parameters, each in its dtype, from the programs' sums."""
    given = [s for s in sums if s is not None]
    gradients = [None if p is None else _empty(p, p.dtype) for p in parameters]
    if given:
        width = given[0][0].numel()
        grid = (-(-width // 32), len(given))
        launch_kernel(_add_programs, grid, *sums, *gradients, given[0].shape[0], W=width, ROWS=64, BW=32, num_warps=4)
    return gradients


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty contiguous tensor. With one argument, `empty_like` takes a third of the time."""
    if like.dtype is dtype and like.is_contiguous():
        return torch.empty_like(like)
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


# The rules below were measured on an H200 with bfloat16, for rows of 128, 2048 and 8192, and groups of 256 and 1024.


class _ForwardRule(NamedTuple):
    """Options of the forward for rows in registers: a program's tile and warps, its groups, and whether it loads weight and
    bias early."""

    BD: int
    ROWS: int
    num_warps: int
    SIDE: int = 1
    AHEAD: bool = False


class _TiledRule(NamedTuple):
    """Options of the forward for long rows: a program's tile, of one row, and warps."""

    BD: int
    num_warps: int


@functools.cache
def _forward_rule(
    D: int, groups: int, kind: str, gated: bool, residual: bool, prenorm: bool, read: int
) -> _ForwardRule | _TiledRule:
    """`read`: bytes of a row of x and residual together."""
    if D > IN_REGISTERS[0]:
        return _TiledRule(TILE, 16)
    # Programs with fewer registers run more warps at a time, which is faster while the row is in the multiprocessor's cache.
    # Measured for rows of 8192, 16384 and 32768 in bfloat16 and float32; gated rows only for 8192.
    shortest, most = 16384 if kind == 'layer' else 8192, 1024 * (32 if residual else 64)
    if kind != 'l2' and groups == 1 and D >= shortest and D % 8192 == 0 and read <= most:
        return _TiledRule(4096 if D == 8192 else 8192, 16)
    if groups % 2 == 0 and D <= 256 and D % 8 == 0 and not gated:
        # Groups are put side by side up to the width of one load of all threads, so that weight and bias have x's layout.
        BD = next_power_of_2(D)
        side = min(groups & -groups, 2048 // BD)
        return _ForwardRule(BD, 8192 // (side * BD), 8, side, AHEAD=True)
    if kind == 'l2' and D <= 512:
        return _ForwardRule(*_tile(D, 1024, 8))
    if prenorm and not gated and 1024 < D <= 4096:
        return _ForwardRule(*_tile(D, 2048, 32), AHEAD=True)
    return _ForwardRule(*_tile(D, 2048, 32 if D > 4096 else 8 if D <= 1024 and gated else 16))


class _BackwardRule(NamedTuple):
    """Options of the backward: a program's tile and warps, programs per multiprocessor (0: one per tile), registers per
    thread (0: no limit)."""

    BD: int
    ROWS: int
    num_warps: int
    programs: int
    registers: int


@functools.cache
def _backward_rule(D: int, gated: bool, sums: bool) -> _BackwardRule:
    if D > IN_REGISTERS[1]:
        return _BackwardRule(TILE, 1, 32, 1, 0)
    if D > 512:
        tile = _tile(D, 1024, 16)
        return _BackwardRule(*tile, max(1, 8 // tile[2]), 0)
    if gated:
        return _BackwardRule(*_tile(D, 2048, 8), 3, 0)
    # without sums over rows a loop carries nothing, and a program costs less than an iteration
    return _BackwardRule(*_tile(D, 1024, 8), *((5, 96) if sums else (0, 0)))


@functools.cache
def _tile(D: int, elements: int, per_thread: int) -> tuple[int, int, int]:
    """Elements of a row, rows, and warps of a program with at least `elements` elements, `per_thread` for each thread."""
    BD = next_power_of_2(D)
    ROWS = max(1, elements // BD)
    return BD, ROWS, min(32, ROWS * BD // (32 * per_thread))


def _stages(device: torch.device, read: int, num_warps: int) -> int:
    """Stages of the backward's loop: the current tile of `read` bytes, and up to two more that fit into shared memory."""
    room = _prefetch_bytes(device) if device.type == 'cuda' else _prefetch_bytes.__wrapped__(device)  # tests compile for many cards on 'meta'
    return 1 + min(2, room * num_warps // 32 // read)


@functools.cache
def _prefetch_bytes(device: torch.device) -> int:
    """Bytes of shared memory for the prefetched tiles of 32 warps; 0 if the device has no asynchronous copies."""
    return 1024 * (144 if check_shared_mem('ampere', device.index) else 72 if check_shared_mem('ada', device.index) else 0)


def _contiguous(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.contiguous()
