"""Checks of arguments that the recurrences share. They raise before any backend is asked, and name the argument, what came
and what is allowed. Metadata only, unless reading a value costs no synchronisation."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence

import torch

from fla.backends import check_tensors

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256


def _shape(name: str, tensor: torch.Tensor, wanted: Sequence[int | torch.SymInt], meaning: str) -> None:
    check_dense(name, tensor)
    if tensor.dim() != len(wanted) or any(have != want for have, want in zip(tensor.shape, wanted, strict=True)):
        raise ValueError(f'{name} must be {meaning} = {list(wanted)}, got {list(tensor.shape)}')


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
    """Whether the tensors of the usual call fit together, in as few reads as possible: a decode step waits for them. Whoever
    gets False goes through the checks one by one, which name what is wrong, or find that nothing is."""
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
            and (initial_state is None or _is_plain_state(initial_state, q, v, batch, state_v_first))
        )
    except (AttributeError, ValueError, TypeError, RuntimeError):  # the last of nested tensors, which have no shape
        return False


def _is_plain_state(
    state: torch.Tensor, q: torch.Tensor, v: torch.Tensor, count: int | torch.SymInt, state_v_first: bool
) -> bool:
    dims = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    dense = state.layout is torch.strided and state.shape == (count, v.shape[2], *dims)
    return dense and state.dtype in (torch.float32, q.dtype) and state.device == q.device


def is_number(value: object) -> bool:
    """One that PyTorch computes with, NumPy's among them: no bool, and no fraction."""
    if isinstance(value, (bool, numbers.Rational)):
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt))


def is_plain_scale(scale: object) -> bool:
    """Whether it is what most are: a finite float."""
    return type(scale) is float and -math.inf < scale < math.inf


def check_scale(scale: object) -> None:
    """A finite number, or None for 1 / sqrt(K)."""
    if scale is None:
        return
    if not is_number(scale):
        raise TypeError(f'scale must be a number or None, got {type(scale).__name__}')
    check_64_bits('scale', scale)
    if not -math.inf < scale < math.inf:  # type: ignore[operator]
        # kernels differ in where NaN comes of it, and some make zeros
        raise ValueError(f'scale must be finite, got {scale}')


def check_64_bits(name: str, value: object) -> None:
    """A whole number that PyTorch can take."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f'{name} must be within 64 bits, got a number of {value.bit_length()}')


def check_output_dtype(dtype: object) -> None:
    """Of a floating result, or None."""
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f'output_dtype must be float16, bfloat16, float32, float64 or None, got {dtype!r}')


def check_given(**tensors: torch.Tensor | None) -> None:
    """Arguments that must be there, and are dense if they are tensors."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f'argument {name!r} must be a tensor, got None')
        check_dense(name, tensor)


def check_dense(name: str, tensor: object) -> None:
    """A tensor has strides, which all kernels read by."""
    if not isinstance(tensor, torch.Tensor):
        return
    if tensor.is_nested:
        raise TypeError(
            f'argument {name!r} must be a dense tensor, got a nested one: pack sequences along time, or pad them, as '
            f'{name}.to_padded_tensor does'
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f'argument {name!r} must be a dense tensor, got one of layout {tensor.layout}: pass {name}.to_dense()'
        )


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k `[B, T, H, K]` and v `[B, T, HV, V]`, one floating dtype, HV a multiple of H, K and V at most 256."""
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
    """A gate or beta: `[B, T, HV]`, or with one value per channel `[B, T, HV, channels]`; the dtype of q or float32."""
    wanted = [q.shape[0], q.shape[1], v.shape[2]]
    if channels is None:
        _shape(name, tensor, wanted, '[B, T, HV]')
    else:
        _shape(name, tensor, [*wanted, channels], '[B, T, HV, channels]')
    check_companion(name, tensor, q)


def check_companion(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """Tensors beside q, k and v may have their dtype or float32."""
    check_dense(name, tensor)
    if tensor.dtype not in (q.dtype, torch.float32):
        allowed = f'{q.dtype} or torch.float32' if q.dtype != torch.float32 else 'torch.float32'
        raise TypeError(f'{name} must be {allowed}, got {tensor.dtype}')


def check_cu_seqlens(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None = None, check_values: bool = False
) -> int | torch.SymInt:
    """`cu_seqlens` `[N + 1]`, int32 or int64, with B == 1. Content is read on the host only. Returns N."""
    for name, lens in (('cu_seqlens', cu_seqlens), ('cu_seqlens_cpu', cu_seqlens_cpu)):
        if lens is None:
            continue
        if not isinstance(lens, torch.Tensor):
            raise TypeError(f'{name} must be a tensor [N + 1], got {type(lens).__name__}')
        check_dense(name, lens)
        if lens.dim() != 1 or lens.shape[0] < 1:
            raise ValueError(f'{name} must have one dimension [N + 1], got shape {list(lens.shape)}')
        if lens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f'{name} must be int32 or int64, got {lens.dtype}')
        if q.shape[0] != 1:
            raise ValueError(f'with {name} the batch must be 1 (sequences are packed along time), got B = {q.shape[0]}')
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError('cu_seqlens_cpu is a copy of cu_seqlens and needs it: pass cu_seqlens too')
        return q.shape[0]
    if cu_seqlens.shape[0] == 1 and q.shape[1] != 0:
        raise ValueError(f'cu_seqlens holds no sequence, but there are T = {q.shape[1]} steps')
    if cu_seqlens_cpu is not None:
        if cu_seqlens_cpu.device.type != 'cpu':
            raise ValueError(f'cu_seqlens_cpu must be on the CPU, is on {cu_seqlens_cpu.device}')
        _shape('cu_seqlens_cpu', cu_seqlens_cpu, list(cu_seqlens.shape), 'shaped like cu_seqlens')
    for name, lens in (('cu_seqlens', cu_seqlens), ('cu_seqlens_cpu', cu_seqlens_cpu)):
        if lens is not None and (check_values or readable(lens)):
            _check_lens(name, lens, int(q.shape[1]))
    if cu_seqlens_cpu is not None and readable(cu_seqlens_cpu) and (check_values or readable(cu_seqlens)):
        check_same(cu_seqlens, cu_seqlens_cpu)
    return cu_seqlens.shape[0] - 1


def readable(lens: torch.Tensor) -> bool:
    """Whether the values can be had without a synchronisation, a trace or a transform in the way."""
    if torch.compiler.is_compiling() or type(lens) is not torch.Tensor or not lens.is_cpu:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(lens)


def check_same(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor) -> None:
    """One is a copy of the other; both are `readable`."""
    there, here = cu_seqlens.tolist(), cu_seqlens_cpu.tolist()
    if there != here:
        raise ValueError(f'cu_seqlens_cpu must be a copy of cu_seqlens: that is {there}, cu_seqlens_cpu is {here}')


def _check_lens(name: str, lens: torch.Tensor, length: int) -> None:
    values = lens.tolist()
    if values[0] != 0 or values[-1] != length:
        raise ValueError(f'{name} must start at 0 and end at T = {length}, got {values[0]} … {values[-1]}')
    check_rising(name, values)


def check_rising(name: str, values: Sequence[int]) -> None:
    """They begin with 0, and none is below the one before."""
    if values[0] != 0:
        raise ValueError(f'{name} must start at 0, got {values[0]}')
    for i, (start, end) in enumerate(itertools.pairwise(values)):
        if end < start:
            raise ValueError(f'{name} must not decrease: entry {i} is {start}, entry {i + 1} is {end}')


def check_state(
    initial_state: torch.Tensor | None, q: torch.Tensor, v: torch.Tensor, count: int | torch.SymInt, state_v_first: bool
) -> None:
    """`initial_state` `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; the dtype of q or float32."""
    if initial_state is None:
        return
    dims, meaning = [q.shape[3], v.shape[3]], '[N, HV, K, V]'
    if state_v_first:
        dims, meaning = dims[::-1], '[N, HV, V, K]'
    _shape('initial_state', initial_state, [count, v.shape[2], *dims], meaning)
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
    """`A_log` `[HV]` and `dt_bias` `[HV]` or `[HV * K]`, for raw gates only."""
    heads = v.shape[2]
    if not use_gate_in_kernel:
        for name, value in (('A_log', A_log), ('dt_bias', dt_bias)):
            if value is not None:
                raise ValueError(f'{name} belongs to raw gates: pass use_gate_in_kernel=True, or leave {name} out')
        return
    if A_log is None and lower_bound is None:
        also = ' (or lower_bound)' if per_channel else ''
        raise ValueError(f'use_gate_in_kernel=True needs A_log [HV] = [{heads}]{also}')
    check_parameters(heads, q.shape[3] if per_channel else None, A_log, dt_bias)
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
    """Of the gates by themselves: g `[..., HV]` or `[..., HV, K]`, the rest as the operations take it, of any dtype."""
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
    check_parameters(heads, g.shape[-1] if per_channel else None, A_log, dt_bias)


def check_parameters(
    heads: int | torch.SymInt, channels: int | torch.SymInt | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None
) -> None:
    """`A_log` `[HV]` and `dt_bias` `[HV]` or, of each channel, `[HV * K]`."""
    check_dense('A_log', A_log)
    check_dense('dt_bias', dt_bias)
    if A_log is not None and A_log.numel() != heads:
        raise ValueError(f'A_log must have HV = {heads} elements, got shape {list(A_log.shape)}')
    size, meaning = (heads, 'HV') if channels is None else (heads * channels, 'HV * K')
    if dt_bias is not None and dt_bias.numel() != size:
        raise ValueError(f'dt_bias must have {meaning} = {size} elements, got shape {list(dt_bias.shape)}')


def check_plain_gates(
    q: torch.Tensor,
    v: torch.Tensor,
    use_gate_in_kernel: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    per_channel: bool,
) -> None:
    """What is left to check of a call whose tensors `is_common_case`: raw gates, as in a decode step of a layer."""
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
    """What only the chunked forms take."""
    if cp_context is not None:
        raise NotImplementedError('cp_context: context parallelism is not there yet; pass None')
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size not in allowed):
        raise ValueError(f'chunk_size must be None or one of {list(allowed)}, got {chunk_size}')
    check_chunk_indices(chunk_indices)


def check_chunk_indices(chunk_indices: torch.Tensor | None) -> None:
    """`[chunks, 2]`, int32 or int64. Nothing is read of it: it follows from `cu_seqlens`."""
    if chunk_indices is None:
        return
    if not isinstance(chunk_indices, torch.Tensor):
        raise TypeError(f'chunk_indices must be a tensor [chunks, 2], got {type(chunk_indices).__name__}')
    check_dense('chunk_indices', chunk_indices)
    if chunk_indices.dim() != 2 or chunk_indices.shape[1] != 2:
        raise ValueError(f'chunk_indices must be [chunks, 2], got shape {list(chunk_indices.shape)}')
    if chunk_indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f'chunk_indices must be int32 or int64, got {chunk_indices.dtype}')


def check_log_gate(name: str, gate: torch.Tensor) -> None:
    """Gates are logarithms of decays, at most 0. Reads values."""
    if gate.numel() and bool((gate > 0).any()):
        raise ValueError(f'{name} must be at most 0 (a logarithm of a decay), got a maximum of {float(gate.max()):.3g}')


__all__ = [
    'check_chunk_indices',
    'check_chunk_options',
    'check_companion',
    'check_cu_seqlens',
    'check_dense',
    'check_gate_parameters',
    'check_given',
    'check_log_gate',
    'check_lower_bound',
    'check_per_token',
    'check_plain_gates',
    'check_qkv',
    'check_scale',
    'check_state',
    'check_tensors',
]
