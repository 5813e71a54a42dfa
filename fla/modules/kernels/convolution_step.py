# mypy: disable-error-code="assignment, unreachable, var-annotated"
# Tuples grow in these kernels, which Python's types cannot follow.
"""A decode step of the short causal convolution, in one launch that updates the states in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla.modules.kernels.convolution_common import (
    activate,
    is_dense,
    load_bias,
    load_columns,
    load_weight,
    store_columns,
    strides_of,
)
from fla.ops.launch.launch_cache import launch_kernel
from fla.ops.launch.triton_call import in_rows, on_device_of, resolve_neg
from fla.utils.sizes import next_power_of_2

# Measured on an H200 with bfloat16 and W = 4.
UPDATE_ROWS, UPDATE_WARPS = (1, 4), 2  # sequences of a program for few and for many programs; warps
MANY = 2048  # a program has 4 sequences where that still makes more programs than this


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
    """Grid (ceil(N / BN) * ceil(D / BD),): one step of BN sequences.

    Args:
        x, residual: `[N, D]` with strides, the last 1; y: `[N, D]`, contiguous.
        cache: `[N, D, W]`, weight: `[D, W]`, bias: `[D]`, with strides.
        DENSE_CACHE, DENSE: of cache and weight; see `load_columns`.
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
        channels = tl.where(row + i < N, D, 0)
        mask = d < channels
        past = past + (load_columns(cache + n * c_n, first, channels - first, c_d, c_w, W, DENSE_CACHE, BD),)
        steps = steps + (tl.load(x + n * x_n + d, mask=mask, other=0.0),)
        if HAS_RESIDUAL:
            residuals = residuals + (tl.load(residual + n * r_n + d, mask=mask, other=0.0),)
    column = load_weight(weight, first, D, w_d, w_w, W, DENSE, BD)
    offset = load_bias(bias, d, D, bias_d, HAS_BIAS)
    # All loads of these rows come before any store: a row of x may be a view of its own cache, but not of another row's.
    tl.debug_barrier()
    for i in tl.static_range(BN):
        n = tl.cast(row + i, tl.int64)
        channels = tl.where(row + i < N, D, 0)
        mask = d < channels
        taps = past[i][1:]
        acc = offset
        for w in tl.static_range(W - 1):
            acc += column[w] * taps[w].to(tl.float32)
        acc = activate(acc + column[W - 1] * steps[i].to(tl.float32), SILU)
        if HAS_RESIDUAL:
            acc += residuals[i].to(tl.float32)
        tl.store(y + n * D + d, acc.to(y.dtype.element_ty), mask=mask)
        taps = taps + (steps[i].to(cache.dtype.element_ty),)
        store_columns(cache + n * c_n, taps, first, channels - first, c_d, c_w, W, DENSE_CACHE, BD)


def launch_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """Returns y and updates the cache in place; see `causal_conv1d_update`."""
    D, W = x.shape[-1], weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, residual = in_rows(x), None if residual is None else in_rows(residual)
    weight, bias, stored = resolve_neg(weight), resolve_neg(bias), resolve_neg(cache)
    count = cache.shape[0]
    # a thread has as many channels as 16 bytes of the cache hold, so that threads do not exchange columns
    channels = 32 * UPDATE_WARPS * max(16 // (W * stored.element_size()), 1)
    block = min(next_power_of_2(max(D, 1)), channels)
    rows = UPDATE_ROWS[count * D > 4 * MANY * channels]
    programs = -(-count // rows) * -(-D // block)
    if programs:
        with on_device_of(x):
            launch_kernel(
                _update,
                (programs,),
                *(x, stored, residual, weight, bias, y, count, D, _step_stride(x), _step_stride(residual)),
                *(*stored.stride(), *weight.stride(), *strides_of(bias, 1)),
                *(W, activation is not None, bias is not None, residual is not None),
                *(is_dense(stored), is_dense(weight), rows, block),
                num_warps=UPDATE_WARPS,
            )
    if stored is not cache:
        cache.copy_(stored)
    return y


def _step_stride(x: torch.Tensor | None) -> int:
    """The stride between sequences of `[N, D]`, `[N, 1, D]` or `[1, N, D]`, 0 for None."""
    if x is None:
        return 0
    return x.stride(1) if x.dim() == 3 and x.shape[0] == 1 else x.stride(0)
