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

from fla.modules.kernels.norms_device import norm_backward, norm_backward_long, norm_forward, norm_forward_long, sum_programs
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
        launch_kernel(norm_forward_long, grid, *arguments, *strides, norm.eps, **options, **rule._asdict())
        return y, total
    grid = (-(-count // rule.ROWS), norm.num_groups // rule.SIDE)
    launch_kernel(norm_forward, grid, *arguments, count, *strides, norm.eps, **options, **rule._asdict())
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
        launch_kernel(norm_backward_long, grid, *arguments, *strides, norm.eps, **options, num_warps=num_warps)
    else:
        read = sum(one.element_size() for one in inputs if one is not None) * ROWS * BD
        stages = _stages(x.device, read, num_warps) if rule.programs else 0
        # only NVIDIA GPUs prefetch tiles and limit registers
        limits = {'num_warps': num_warps, **({'maxnreg': rule.registers} if stages > 1 and rule.registers else {})}
        launch_kernel(norm_backward, grid, *arguments, *strides, norm.eps, **options, ROWS=ROWS, STAGES=stages, **limits)
    return Gradients(dx, dresidual, dg, *_sum_over_programs(parameters, sums))


def _sum_over_programs(parameters: list[torch.Tensor | None], sums: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of parameters, each in its dtype, from the programs' sums."""
    given = [s for s in sums if s is not None]
    gradients = [None if p is None else _empty(p, p.dtype) for p in parameters]
    if given:
        width = given[0][0].numel()
        grid = (-(-width // 32), len(given))
        launch_kernel(sum_programs, grid, *sums, *gradients, given[0].shape[0], W=width, ROWS=64, BW=32, num_warps=4)
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
    """Elements of a row, rows, and warps of a program: at least `elements` elements, `per_thread` for each thread."""
    BD = next_power_of_2(D)
    ROWS = max(1, elements // BD)
    return BD, ROWS, min(32, ROWS * BD // (32 * per_thread))


def _stages(device: torch.device, read: int, num_warps: int) -> int:
    """Stages of the backward's loop: the current tile of `read` bytes, and up to two more that fit into shared memory."""
    # not cached on 'meta', where tests compile for several GPUs
    room = _prefetch_bytes(device) if device.type == 'cuda' else _prefetch_bytes.__wrapped__(device)
    return 1 + min(2, room * num_warps // 32 // read)


@functools.cache
def _prefetch_bytes(device: torch.device) -> int:
    """Bytes of shared memory for the prefetched tiles of 32 warps; 0 if the device has no asynchronous copies."""
    return 1024 * (144 if check_shared_mem('ampere', device.index) else 72 if check_shared_mem('ada', device.index) else 0)


def _contiguous(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.contiguous()
