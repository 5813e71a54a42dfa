# mypy: disable-error-code="assignment, unreachable, var-annotated"
# Tuples grow in these kernels, which Python's types cannot follow.
"""A decode step of the short causal convolution, in one launch: whole states are read, and written where they were."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.modules.kernels.convolution_common import (
    _activated,
    _columns,
    _dense,
    _offset,
    _store_columns,
    _strides,
    _weights,
)
from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.triton_call import in_rows, on_device_of, resolve_neg
from fla.utils.sizes import next_power_of_2

# Measured on an H200 with bfloat16 and W = 4.
UPDATE_ROWS, UPDATE_WARPS = (1, 4), 2  # sequences of a program, of few, and of many numbers
MANY = 2048  # a launch of more programs than this, even of the larger kind, is of the larger kind


@triton.jit(do_not_specialize=['N'])
def _update(
    x,
    cache,
    residual,
    weight,
    bias,
    y,
    N,
    D,
    x_n,
    r_n,
    c_n,
    c_d,
    c_w,
    w_d,
    w_w,
    bias_d,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DENSE_CACHE: tl.constexpr,
    DENSE: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (ceil(N / BN) * ceil(D / BD),): a step of BN sequences.

    Args:
        x, residual: `[N, D]` by strides, the last 1; y: `[N, D]`, contiguous.
        cache: `[N, D, W]`, weight: `[D, W]`, bias: `[D]`, by strides; DENSE_CACHE, DENSE: see `_columns`.
    """
    blocks = tl.cdiv(D, BD)
    row = tl.program_id(0) // blocks * BN
    first = (tl.program_id(0) % blocks) * BD
    d = first + tl.arange(0, BD)
    past = ()
    steps = ()
    residuals = ()
    for i in tl.static_range(BN):
        n = tl.cast(row + i, tl.int64)
        there = tl.where(row + i < N, D, 0)
        mask = d < there
        past = past + (_columns(cache + n * c_n, first, there - first, c_d, c_w, W, DENSE_CACHE, BD),)
        steps = steps + (tl.load(x + n * x_n + d, mask=mask, other=0.0),)
        if HAS_RESIDUAL:
            residuals = residuals + (tl.load(residual + n * r_n + d, mask=mask, other=0.0),)
    column = _weights(weight, first, D, w_d, w_w, W, DENSE, BD)
    offset = _offset(bias, d, D, bias_d, HAS_BIAS)
    # everything of these rows is read before any of it is written over: x may lie in its own row's cache, not in another's
    tl.debug_barrier()
    for i in tl.static_range(BN):
        n = tl.cast(row + i, tl.int64)
        there = tl.where(row + i < N, D, 0)
        mask = d < there
        taps = past[i][1:]
        acc = offset
        for w in tl.static_range(W - 1):
            acc += column[w] * taps[w].to(tl.float32)
        acc = _activated(acc + column[W - 1] * steps[i].to(tl.float32), SILU)
        if HAS_RESIDUAL:
            acc += residuals[i].to(tl.float32)
        tl.store(y + n * D + d, acc.to(y.dtype.element_ty), mask=mask)
        taps = taps + (steps[i].to(cache.dtype.element_ty),)
        _store_columns(cache + n * c_n, taps, first, there - first, c_d, c_w, W, DENSE_CACHE, BD)


def launch_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """y, and the cache changed in place."""
    D, W = x.shape[-1], weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, residual = in_rows(x), None if residual is None else in_rows(residual)
    weight, bias, stored = resolve_neg(weight), resolve_neg(bias), resolve_neg(cache)
    count = cache.shape[0]
    # of as many channels as 16 bytes of the cache hold, so that each thread keeps to its own
    channels = 32 * UPDATE_WARPS * max(16 // (W * stored.element_size()), 1)
    block = min(next_power_of_2(max(D, 1)), channels)
    rows = UPDATE_ROWS[count * D > 4 * MANY * channels]
    programs = -(-count // rows) * -(-D // block)
    if programs:
        with on_device_of(x):
            launch_kernel(
                _update,
                (programs,),
                *(
                    x,
                    stored,
                    residual,
                    weight,
                    bias,
                    y,
                    count,
                    D,
                    _step_stride(x),
                    0 if residual is None else _step_stride(residual),
                ),
                *(*stored.stride(), *weight.stride(), *_strides(bias, 1)),
                *(W, silu, bias is not None, residual is not None, _dense(stored), _dense(weight), rows, block),
                num_warps=UPDATE_WARPS,
            )
    if stored is not cache:
        cache.copy_(stored)
    return y


def _step_stride(x: torch.Tensor) -> int:
    """From one sequence to the next: of `[N, D]`, `[N, 1, D]` or `[1, N, D]`."""
    return x.stride(1) if x.dim() == 3 and x.shape[0] == 1 else x.stride(0)
