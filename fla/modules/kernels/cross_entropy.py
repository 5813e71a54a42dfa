"""Cross entropy of rows of logits. Forward and backward each read the logits once.

With v the logits after scale and cap, m their maximum and s = sum e^(v - m), the backward needs m and log s of each row.
They are saved separately: for logits of a few hundred, their sum would round log s away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.triton_call import on_device_of
from fla.ops.recurrence.kernels.gates import exp32
from fla.utils.sizes import cdiv, next_power_of_2


@triton.jit
def _tanh(y):
    """tanh and its derivative, accurate for small values of either. The formulas 1 - e^-2y and 1 - tanh^2 have an absolute
    error of 6e-8, not a relative one."""
    square = y * y
    series = 62.0 / 2835 + square * (-1382.0 / 155925)
    series = 2.0 / 15 + square * (-17.0 / 315 + square * series)
    series = y + y * square * (-1.0 / 3 + square * series)
    decay = tl.exp(-2.0 * tl.abs(y))
    large = (1.0 - decay) / (1.0 + decay)
    slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return tl.where(square < 0.0625, series, tl.where(y < 0, -large, large)), slope


@triton.jit
def _transformed(x, scale, cap, CAPPED: tl.constexpr):
    """The logit after scale and cap, and the derivative of the cap."""
    v = x.to(tl.float32) * scale
    slope = 1.0
    if CAPPED:
        v, slope = _tanh(v / cap)
        v = cap * v
    return v, slope


@triton.jit
def _sum(v, K: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of a tile for each thread."""
    return tl.sum(tl.sum(tl.reshape(v, (K, THREADS, WIDTH)), 2), 0)


@triton.jit
def _add_tile(
    m,
    s,
    total,
    at,
    V,
    scale,
    cap,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    WHOLE: tl.constexpr,
    K: tl.constexpr,
    THREADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Updates each thread's maximum, sum and total `[THREADS]` with the tile at `at`. V columns of the row remain. A WHOLE
    tile needs no mask, which would have to be aligned too."""
    col = tl.arange(0, K * THREADS * WIDTH)
    inside = col < V
    if WHOLE:
        x = tl.load(at + col, eviction_policy=POLICY)
    else:
        x = tl.load(at + col, mask=inside, other=0.0, eviction_policy=POLICY)
    v, _ = _transformed(x, scale, cap, CAPPED)
    if SMOOTHED:
        total += _sum(v, K, THREADS, WIDTH)  # 0 outside
    if not WHOLE:
        v = tl.where(inside, v, -float('inf'))
    larger = tl.maximum(m, tl.max(tl.max(tl.reshape(v, (K, THREADS, WIDTH)), 2), 0))
    # if all values are -inf
    shift = tl.where(larger == -float('inf'), 0.0, larger)
    v = tl.reshape(v, (K, THREADS, WIDTH)) - shift[None, :, None]
    return larger, s * exp32(m - shift) + _sum(exp32(v), K, THREADS, WIDTH), total


@triton.jit(do_not_specialize=['target_row', 'classes', 'first', 'ignore_index'])
def _forward(
    logits,
    target,
    losses,
    z_losses,
    maximum,
    log_sum,
    row_stride,
    target_row,
    V,
    classes,
    first,
    ignore_index,
    scale,
    cap,
    smoothing,
    lse_square,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    PARTIAL: tl.constexpr,
    K: tl.constexpr,
    THREADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Grid (N,): a program reads a row once. A tile is K times WIDTH adjacent columns for each of THREADS threads. Threads
    do not synchronise: each has its own maximum and sum until the end of the row.

    Args:
        logits: `[N, V]`, columns `first` to `first + V` of all `classes`.
        target: `[N]`. A number that is neither a class nor ignored makes its loss NaN.
        losses, z_losses: float32 `[N]`; with PARTIAL instead the target's logit (0 if another shard has it) and the sum of
            the logits.
        maximum, log_sum: float32 `[N]`.
    """
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(target + row * target_row).to(tl.int64)
    ignored = wanted == ignore_index
    at = logits + row * row_stride
    m = tl.full((THREADS,), -float('inf'), tl.float32)
    s = tl.zeros((THREADS,), tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    BLOCK: tl.constexpr = K * THREADS * WIDTH
    # an ignored row is not read
    end = tl.where(ignored, 0, V)
    whole = end // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        m, s, total = _add_tile(
            *(m, s, total, at + start, BLOCK, scale, cap, CAPPED, SMOOTHED, True, K, THREADS, WIDTH, POLICY)
        )
    if whole < end:
        m, s, total = _add_tile(
            *(m, s, total, at + whole, V - whole, scale, cap, CAPPED, SMOOTHED, False, K, THREADS, WIDTH, POLICY)
        )
    largest = tl.max(m)
    s = tl.sum(s * exp32(m - tl.where(largest == -float('inf'), 0.0, largest)))
    m = largest
    total = tl.sum(total)
    log_s = tl.log(s)
    local = wanted - first
    here = (local >= 0) & (local < V) & ~ignored
    picked, _ = _transformed(tl.load(at + local, mask=here, other=0.0), scale, cap, CAPPED)
    if PARTIAL:
        loss = tl.where(here, picked, 0.0)
        z_loss = total
    else:
        loss = log_s + (m - picked)
        if SMOOTHED:
            loss = (1.0 - smoothing) * loss + smoothing * (log_s + (m - total / V))
        lse = m + log_s
        z_loss = lse_square * lse * lse
        known = (wanted >= 0) & (wanted < classes)
        loss = tl.where(known, loss + z_loss, float('nan'))
    tl.store(losses + row, tl.where(ignored, 0.0, loss))
    tl.store(z_losses + row, tl.where(ignored, 0.0, z_loss))
    tl.store(maximum + row, tl.where(ignored, 0.0, m))
    tl.store(log_sum + row, tl.where(ignored, 0.0, log_s))


@triton.jit(do_not_specialize=['target_row', 'd_row', 'classes', 'first', 'ignore_index'])
def _backward(
    logits,
    target,
    maximum,
    log_sum,
    dlosses,
    dlogits,
    row_stride,
    out_stride,
    target_row,
    d_row,
    V,
    classes,
    first,
    ignore_index,
    scale,
    cap,
    smoothing,
    lse_square,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (N, ceil(V / BLOCK)): a program writes a block of a row. `dlogits` may be the logits themselves."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < V
    # Loaded together with the rest; after the branch, it would wait for the target. An ignored row does not need it.
    x = tl.load(logits + row * row_stride + col, mask=inside, other=0.0)
    wanted = tl.load(target + row * target_row).to(tl.int64)
    m = tl.load(maximum + row)
    log_s = tl.load(log_sum + row)
    d = tl.load(dlosses + row * d_row).to(tl.float32)
    out = dlogits + row * out_stride + col
    if wanted == ignore_index:
        tl.store(out, tl.zeros([BLOCK], dlogits.dtype.element_ty), mask=inside)
    else:
        known = (wanted >= 0) & (wanted < classes)
        d = tl.where(known, d * scale, float('nan'))
        v, slope = _transformed(x, scale, cap, CAPPED)
        p = exp32(v - m - log_s)
        wished = tl.where(col == wanted - first, 1.0 - smoothing, 0.0)
        if SMOOTHED:
            wished += smoothing / classes
        # the difference first: for a row that is predicted well, only the z-loss may remain
        gradient = (p - wished) + p * (2.0 * lse_square * (m + log_s))
        if CAPPED:
            gradient *= slope
        tl.store(out, (gradient * d).to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(x, factor, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(y + at, values.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=['target_row', 'count', 'ignore_index'])
def _reduced(losses, target, loss, share, target_row, count, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (1,): stores the sum of losses `[count]`, or their mean over targets that are not ignored, and its derivative by
    one of them."""
    total = tl.zeros([BLOCK], tl.float32)
    counted = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        row = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = row < count
        total += tl.load(losses + row, mask=inside, other=0.0)
        if MEAN:
            wanted = tl.load(target + row * target_row, mask=inside, other=0).to(tl.int64)
            counted += (inside & (wanted != ignore_index)).to(tl.int32)
    weight = 1.0
    if MEAN:
        weight = 1.0 / tl.sum(counted).to(tl.float32)
    tl.store(loss, tl.sum(total) * weight)
    # the mean of no losses is NaN, but has no gradient
    tl.store(share, tl.where(weight == float('inf'), 0.0, weight))


# A fused x scale - m is not 0 for the maximum m, which was rounded: a row predicted with certainty would have a loss.
_NO_FUSION = {'enable_fp_fusion': False}


@dataclass(frozen=True)
class Options:
    """The options of a loss. `logit_softcapping` is 0 for none. `first` is this shard's first column, `classes` the number
    of columns of all shards."""

    label_smoothing: float
    logit_scale: float
    lse_square_scale: float
    logit_softcapping: float
    ignore_index: int
    first: int
    classes: int

    @property
    def numbers(self) -> tuple[float, ...]:
        """The arguments of either kernel that come between sizes and flags."""
        return (
            *(self.classes, self.first, self.ignore_index, self.logit_scale, self.logit_softcapping),
            *(self.label_smoothing, self.lse_square_scale),
        )


def _aligned(logits: torch.Tensor) -> bool:
    """Whether rows are aligned, so that Triton loads 16 bytes at a time."""
    return logits.stride(0) % 16 == 0 and logits.data_ptr() % 16 == 0


# Tiles were measured on an H200, with 1024 and with 8192 rows. The larger tiles for many rows would need 110 to 210
# registers for unaligned rows or with a cap.
_FEW_ROWS = 2048


def _forward_tile(logits: torch.Tensor, capped: bool) -> tuple[int, int, int, str]:
    """K, THREADS, WIDTH and POLICY of `_forward`."""
    count, V = logits.shape
    aligned, few = _aligned(logits), count <= _FEW_ROWS
    # numbers of one load, adjacent in a thread
    width = 16 // logits.element_size() if aligned else 1
    pieces = next_power_of_2(cdiv(V, width))
    threads = max(32, min(128, pieces))
    most = 64 if aligned and not few and not capped else 32
    # the tile for few rows was measured only with 'evict_first', from a cold cache
    return max(1, min(most // width, pieces // threads)), threads, width, 'evict_first' if few else ''


def _backward_tile(logits: torch.Tensor, dlogits: torch.Tensor, capped: bool) -> int:
    """BLOCK of `_backward`."""
    count, V = logits.shape
    aligned, few = V % 16 == 0 and _aligned(logits) and _aligned(dlogits), count <= _FEW_ROWS
    block: int = min(next_power_of_2(V), 8192 if aligned and not few and not capped else 2048)
    return block


def launch_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    options: Options,
    partial: bool = False,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns losses, z_losses, maximum and log_sum, each float32 `[N]`, new or `out`; see `_forward`. The logits come from
    `in_rows`."""
    count, V = logits.shape
    if out is None:
        out = [torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(4)]
    losses, z_losses, maximum, log_sum = out
    if count:
        capped = options.logit_softcapping != 0
        tile = _forward_tile(logits, capped)
        with on_device_of(logits):
            launch_kernel(
                _forward,
                (count,),
                *(logits, target, losses, z_losses, maximum, log_sum, logits.stride(0), target.stride(0), V),
                *options.numbers,
                *(capped, options.label_smoothing != 0, partial, *tile),
                num_warps=tile[1] // 32,
                **_NO_FUSION,
            )
    return losses, z_losses, maximum, log_sum


def launch_backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    maximum: torch.Tensor,
    log_sum: torch.Tensor,
    dlosses: torch.Tensor,
    dlogits: torch.Tensor,
    options: Options,
) -> None:
    """Writes the gradient of the logits into `dlogits`, which may be the logits. Both come from `in_rows`."""
    count, V = logits.shape
    if count == 0:
        return
    capped = options.logit_softcapping != 0
    block = _backward_tile(logits, dlogits, capped)
    grid: tuple[Any, ...] = (count, cdiv(V, block))
    with on_device_of(logits):
        launch_kernel(
            _backward,
            grid,
            *(logits, target, maximum, log_sum, dlosses, dlogits, logits.stride(0), dlogits.stride(0)),
            *(target.stride(0), dlosses.stride(0), V),
            *options.numbers,
            *(capped, options.label_smoothing != 0, block),
            num_warps=max(1, min(8, block // 256)),
            **_NO_FUSION,
        )


def reduced(
    losses: torch.Tensor, target: torch.Tensor, ignore_index: int, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the 'mean' or 'sum' of contiguous losses, which are 0 where the target is ignored, and its derivative by one
    loss (0 if all are ignored): float32 scalars."""
    loss, share = (torch.empty((), dtype=torch.float32, device=losses.device) for _ in range(2))
    with on_device_of(losses):
        launch_kernel(
            _reduced,
            (1,),
            *(losses, target, loss, share, target.stride(0), losses.shape[0], ignore_index, reduction == 'mean', 2048),
            num_warps=8,
        )
    return loss, share


def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Returns `factor x` for a contiguous x. Unlike PyTorch, it does not round the float32 factor to x's dtype first."""
    y = torch.empty_like(x)
    if x.numel():
        with on_device_of(x):
            launch_kernel(_scaled, (cdiv(x.numel(), 4096),), x, factor, y, x.numel(), 4096)
    return y
