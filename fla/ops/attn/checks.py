"""Checks of attention's arguments."""

from __future__ import annotations

import torch

from fla.backends import check_tensors
from fla.ops.checks import (
    FLOATS,
    MAX_HEAD_DIM,
    check_64_bits,
    check_chunk_indices,
    check_companion,
    check_cu_seqlens,
    check_dense,
    check_given,
    check_log_gate,
    check_scale,
)


def _is_common_case(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether q, k and v are valid and dense, in few reads, because a decode step waits for its checks. If not, the full
    checks run, which raise or pass."""
    try:
        batch, length, heads, dim = q.shape
        batch_k, keys, groups, dim_k = k.shape
        dtype, device = q.dtype, q.device
        return (
            q.layout is k.layout is v.layout is torch.strided
            and dtype in FLOATS
            and k.dtype == dtype
            and v.dtype == dtype
            and k.device == device
            and v.device == device
            and batch_k == batch
            and dim_k == dim
            and v.shape[:3] == (batch, keys, groups)
            and len(v.shape) == 4
            and 1 <= dim <= MAX_HEAD_DIM
            and 1 <= v.shape[3] <= MAX_HEAD_DIM
            and groups > 0
            and heads % groups == 0
            and keys >= length
        )
    except (AttributeError, ValueError, TypeError, RuntimeError):  # RuntimeError: nested tensors have no shape
        return False


def check_parallel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None,
    window_size: int | None,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    sink_bias: torch.Tensor | None,
    check_values: bool,
) -> None:
    """Checks the arguments of `parallel_attn`."""
    check_scale(scale)
    if cu_seqlens is g is chunk_indices is sink_bias is None and _is_common_case(q, k, v):
        return check_window(window_size)
    check_given(q=q, k=k, v=v)
    check_tensors(q=q, k=k, v=v, g=g, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices, sink_bias=sink_bias)
    for name, tensor in (('q', q), ('k', k), ('v', v)):
        if tensor.dim() != 4:
            raise ValueError(f'{name} must have 4 dimensions [batch, time, heads, head dim], got shape {list(tensor.shape)}')
        if tensor.dtype not in FLOATS:
            raise TypeError(f'{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}')
        if tensor.dtype != q.dtype:
            raise TypeError(f'q, k and v must have one dtype: q is {q.dtype}, {name} is {tensor.dtype}')
        if not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(f'the head dim of {name} must be between 1 and {MAX_HEAD_DIM}, got {tensor.shape[3]}')
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f'k must have the batch and head dim of q {list(q.shape)}, got {list(k.shape)}')
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f'v must have the batch, time and heads of k {list(k.shape[:3])}, got {list(v.shape[:3])}')
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ValueError(f'the heads of q must be a multiple of those of k: q has {q.shape[2]}, k has {k.shape[2]}')
    if k.shape[1] < q.shape[1]:
        raise ValueError(f'k must be at least as long as q: q has T = {q.shape[1]}, k has {k.shape[1]}')
    for name, given in (('g', g), ('cu_seqlens', cu_seqlens)):
        if given is not None and k.shape[1] != q.shape[1]:
            raise ValueError(f'{name} needs k to be as long as q: q has T = {q.shape[1]}, k has {k.shape[1]}')
    check_cu_seqlens(q, cu_seqlens, None, check_values)
    check_window(window_size)
    check_chunk_indices(chunk_indices)
    check_dense('g', g)
    check_dense('sink_bias', sink_bias)
    if g is not None:
        if g.shape != q.shape[:3]:
            raise ValueError(f'g must be [B, T, HQ] = {list(q.shape[:3])}, got {list(g.shape)}')
        check_companion('g', g, q)
        if check_values:
            check_log_gate('g', g)
    if sink_bias is not None:
        if sink_bias.shape != q.shape[2:3]:
            raise ValueError(f'sink_bias must be [HQ] = {list(q.shape[2:3])}, got {list(sink_bias.shape)}')
        check_companion('sink_bias', sink_bias, q)


def check_window(window_size: int | None) -> None:
    """An int from 1 on, or None."""
    if window_size is None:
        return
    if isinstance(window_size, bool) or not isinstance(window_size, (int, torch.SymInt)):
        raise TypeError(f'window_size must be a whole number or None, got {type(window_size).__name__}')
    check_64_bits('window_size', window_size)
    if window_size < 1:
        raise ValueError(f'window_size must be at least 1 (each step sees itself), got {window_size}')
