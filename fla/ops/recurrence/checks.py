"""Checks of arguments that the delta rules share; those of any operation are in `fla.ops.checks`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fla.backends import check_tensors
from fla.ops.checks import (
    FLOATS,
    MAX_HEAD_DIM,
    check_64_bits,
    check_chunk_indices,
    check_companion,
    check_dense,
    check_given,
    check_shape,
    is_number,
)


def is_common_case(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    state_v_first: bool,
    per_channel: bool,
) -> bool:
    """Whether the tensors of an ordinary call fit together, in as few reads as possible: a decode step waits for them.

    After False the checks run one by one: they raise an error that names the fault, or accept the call.
    """
    try:
        batch, length, heads, dim = shape = q.shape
        batch_v, length_v, value_heads, value_dim = v.shape
        dtype, device = q.dtype, q.device
        token = (batch, length, value_heads)
        return (
            k.shape == shape
            and batch_v == batch
            and length_v == length
            and g.shape == ((*token, dim) if per_channel else token)
            and beta.shape == token
            and heads > 0
            and value_heads > 0
            and value_heads % heads == 0
            and 0 < dim <= MAX_HEAD_DIM
            and 0 < value_dim <= MAX_HEAD_DIM
            and q.layout is k.layout is v.layout is g.layout is beta.layout is torch.strided
            and dtype in FLOATS
            and k.dtype is dtype
            and v.dtype is dtype
            and g.dtype in (torch.float32, dtype)
            and beta.dtype in (torch.float32, dtype)
            and k.device == device
            and v.device == device
            and g.device == device
            and beta.device == device
            and (initial_state is None or _is_common_state(initial_state, q, v, batch, state_v_first))
        )
    except (AttributeError, ValueError, TypeError, RuntimeError):  # RuntimeError: a nested tensor has no shape
        return False


def _is_common_state(
    state: torch.Tensor, q: torch.Tensor, v: torch.Tensor, count: int | torch.SymInt, state_v_first: bool
) -> bool:
    dims = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    dense = state.layout is torch.strided and state.shape == (count, v.shape[2], *dims)
    return dense and state.dtype in (torch.float32, q.dtype) and state.device == q.device


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k `[B, T, H, K]` and v `[B, T, HV, V]` have one floating dtype; HV is a multiple of H; K and V are at most 256."""
    for name, tensor in (('q', q), ('k', k), ('v', v)):
        if tensor.dim() != 4:
            raise ValueError(f'{name} must have 4 dimensions [batch, time, heads, head dim], got shape {list(tensor.shape)}')
    if q.dtype not in FLOATS:
        raise TypeError(f'q must be float16, bfloat16, float32 or float64, got {q.dtype}')
    for name, tensor in (('k', k), ('v', v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f'q, k and v must have one dtype: q is {q.dtype}, {name} is {tensor.dtype}')
    if k.shape != q.shape:
        raise ValueError(f'k must be shaped like q {list(q.shape)}, got {list(k.shape)}')
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f'v must have the batch and time of q {list(q.shape[:2])}, got {list(v.shape[:2])}')
    heads, value_heads = q.shape[2], v.shape[2]
    if heads == 0 or value_heads == 0 or value_heads % heads != 0:
        raise ValueError(f'the heads of v must be a multiple of those of q: v has {value_heads}, q has {heads}')
    for name, size in (('q', q.shape[3]), ('v', v.shape[3])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f'the head dim of {name} must be between 1 and {MAX_HEAD_DIM}, got {size}')


def check_per_token(
    name: str, tensor: torch.Tensor, q: torch.Tensor, v: torch.Tensor, channels: int | torch.SymInt | None = None
) -> None:
    """A gate or beta is `[B, T, HV]`, or `[B, T, HV, channels]`, in the dtype of q or float32."""
    wanted = [q.shape[0], q.shape[1], v.shape[2]]
    if channels is None:
        check_shape(name, tensor, wanted, '[B, T, HV]')
    else:
        check_shape(name, tensor, [*wanted, channels], '[B, T, HV, channels]')
    check_companion(name, tensor, q)


def check_state(
    initial_state: torch.Tensor | None, q: torch.Tensor, v: torch.Tensor, count: int | torch.SymInt, state_v_first: bool
) -> None:
    """`initial_state` is `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`, in the dtype of q or float32."""
    if initial_state is None:
        return
    dims, meaning = [q.shape[3], v.shape[3]], '[N, HV, K, V]'
    if state_v_first:
        dims, meaning = dims[::-1], '[N, HV, V, K]'
    check_shape('initial_state', initial_state, [count, v.shape[2], *dims], meaning)
    check_companion('initial_state', initial_state, q)


def check_gate_parameters(
    q: torch.Tensor,
    v: torch.Tensor,
    use_gate_in_kernel: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    per_channel: bool,
    lower_bound: float | None = None,
) -> None:
    """`A_log` is `[HV]` and `dt_bias` is `[HV]` or `[HV * K]`; both are for raw gates only."""
    heads = v.shape[2]
    if not use_gate_in_kernel:
        for name, value in (('A_log', A_log), ('dt_bias', dt_bias)):
            if value is not None:
                raise ValueError(f'{name} belongs to raw gates: pass use_gate_in_kernel=True, or leave {name} out')
        return
    if A_log is None and lower_bound is None:
        also = ' (or lower_bound)' if per_channel else ''
        raise ValueError(f'use_gate_in_kernel=True needs A_log [HV] = [{heads}]{also}')
    _check_sizes(heads, q.shape[3] if per_channel else None, A_log, dt_bias)
    for name, value in (('A_log', A_log), ('dt_bias', dt_bias)):
        if value is not None:
            check_companion(name, value, q)


def check_raw_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None = None,
    *,
    per_channel: bool,
) -> None:
    """The arguments of a gate function: g is `[..., HV]` or `[..., HV, K]`, A_log and dt_bias are of any floating dtype."""
    check_given(g=g)
    check_tensors(g=g, A_log=A_log, dt_bias=dt_bias)
    least, meaning = (2, '[..., HV, K]') if per_channel else (1, '[..., HV]')
    if g.dim() < least:
        raise ValueError(f'g must be {meaning}, got shape {list(g.shape)}')
    if g.dtype not in FLOATS:
        raise TypeError(f'g must be float16, bfloat16, float32 or float64, got {g.dtype}')
    for name, value in (('A_log', A_log), ('dt_bias', dt_bias)):
        if value is not None and value.dtype not in FLOATS:
            raise TypeError(f'{name} must be float16, bfloat16, float32 or float64, got {value.dtype}')
    check_lower_bound(False, True, lower_bound)
    heads = g.shape[-least]
    if A_log is None and lower_bound is None:
        raise ValueError(f'A_log must be [HV] = [{heads}]' + (', or lower_bound be given' if per_channel else ''))
    _check_sizes(heads, g.shape[-1] if per_channel else None, A_log, dt_bias)


def _check_sizes(
    heads: int | torch.SymInt, channels: int | torch.SymInt | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None
) -> None:
    """`A_log` has HV elements, `dt_bias` HV or, for gates per channel, HV * K."""
    check_dense('A_log', A_log)
    check_dense('dt_bias', dt_bias)
    if A_log is not None and A_log.numel() != heads:
        raise ValueError(f'A_log must have HV = {heads} elements, got shape {list(A_log.shape)}')
    size, meaning = (heads, 'HV') if channels is None else (heads * channels, 'HV * K')
    if dt_bias is not None and dt_bias.numel() != size:
        raise ValueError(f'dt_bias must have {meaning} = {size} elements, got shape {list(dt_bias.shape)}')


def check_common_gates(
    q: torch.Tensor,
    v: torch.Tensor,
    use_gate_in_kernel: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    per_channel: bool,
) -> None:
    """The rest of the checks after `is_common_case`: parameters of raw gates, as in a layer's decode step."""
    if use_gate_in_kernel or A_log is not None or dt_bias is not None:
        check_tensors(q=q, A_log=A_log, dt_bias=dt_bias)
        check_gate_parameters(q, v, use_gate_in_kernel, A_log, dt_bias, per_channel=per_channel)


def check_lower_bound(safe_gate: bool, use_gate_in_kernel: bool, lower_bound: float | None) -> None:
    """`safe_gate` promises g ≥ −5 a step: with raw gates that needs `lower_bound` in [−5, 0)."""
    if lower_bound is not None:
        if not is_number(lower_bound):
            raise TypeError(f'lower_bound must be a number, got {type(lower_bound).__name__}')
        check_64_bits('lower_bound', lower_bound)
        if not -math.inf < lower_bound < 0:
            raise ValueError(f'lower_bound must be negative and finite (usually -5), got {lower_bound}')
        if not use_gate_in_kernel:
            raise ValueError('lower_bound belongs to raw gates: pass use_gate_in_kernel=True, or leave lower_bound out')
    if safe_gate and use_gate_in_kernel and (lower_bound is None or lower_bound < -5):
        raise ValueError(f'safe_gate=True with raw gates needs lower_bound in [-5, 0), got {lower_bound}')


def check_chunk_options(
    chunk_size: int | None, allowed: Sequence[int], chunk_indices: torch.Tensor | None, cp_context: object
) -> None:
    """Arguments of the chunked forms only."""
    if cp_context is not None:
        raise NotImplementedError('cp_context: context parallelism is not there yet; pass None')
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size not in allowed):
        raise ValueError(f'chunk_size must be None or one of {list(allowed)}, got {chunk_size}')
    check_chunk_indices(chunk_indices)
