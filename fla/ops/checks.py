"""Checks of arguments that every operation and module may use.

They run before any backend is chosen. An error names the argument, the value that came and the values that are allowed.
Checks read metadata only, unless the values can be read without a synchronisation.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256


def check_shape(name: str, tensor: torch.Tensor, wanted: Sequence[int | torch.SymInt], meaning: str) -> None:
    """The shape is `wanted`, which `meaning` spells in letters."""
    check_dense(name, tensor)
    if tensor.dim() != len(wanted) or any(have != want for have, want in zip(tensor.shape, wanted, strict=True)):
        raise ValueError(f'{name} must be {meaning} = {list(wanted)}, got {list(tensor.shape)}')


def is_number(value: object) -> bool:
    """Whether PyTorch computes with it, NumPy's numbers included; a bool or a fraction is not a number here."""
    if isinstance(value, (bool, numbers.Rational)):
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt))


def is_finite_float(value: object) -> bool:
    """Whether the value is a Python float and finite, as most scales are."""
    return type(value) is float and -math.inf < value < math.inf


def check_scale(scale: object) -> None:
    """A finite number, or None for 1 / sqrt(K)."""
    if scale is None:
        return
    if not is_number(scale):
        raise TypeError(f'scale must be a number or None, got {type(scale).__name__}')
    check_64_bits('scale', scale)
    if not -math.inf < scale < math.inf:  # type: ignore[operator]
        # kernels differ in where a NaN or infinite scale leads to NaN, and some return zeros
        raise ValueError(f'scale must be finite, got {scale}')


def check_64_bits(name: str, value: object) -> None:
    """An int fits into 64 bits, as PyTorch requires."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f'{name} must be within 64 bits, got a number of {value.bit_length()}')


def check_output_dtype(dtype: object) -> None:
    """A floating dtype, or None."""
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f'output_dtype must be float16, bfloat16, float32, float64 or None, got {dtype!r}')


def check_given(**tensors: torch.Tensor | None) -> None:
    """Required arguments are present, and dense if they are tensors."""
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


def check_companion(name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """A tensor beside q, k and v has their dtype or float32."""
    check_dense(name, tensor)
    if tensor.dtype not in (q.dtype, torch.float32):
        allowed = f'{q.dtype} or torch.float32' if q.dtype != torch.float32 else 'torch.float32'
        raise TypeError(f'{name} must be {allowed}, got {tensor.dtype}')


def check_cu_seqlens(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None = None, check_values: bool = False
) -> int | torch.SymInt:
    """`cu_seqlens` is `[N + 1]`, int32 or int64, with B == 1. Values are read on the host only. Returns N."""
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
        check_shape('cu_seqlens_cpu', cu_seqlens_cpu, list(cu_seqlens.shape), 'shaped like cu_seqlens')
    for name, lens in (('cu_seqlens', cu_seqlens), ('cu_seqlens_cpu', cu_seqlens_cpu)):
        if lens is not None and (check_values or readable(lens)):
            _check_bounds(name, lens, int(q.shape[1]))
    if cu_seqlens_cpu is not None and readable(cu_seqlens_cpu) and (check_values or readable(cu_seqlens)):
        check_same(cu_seqlens, cu_seqlens_cpu)
    return cu_seqlens.shape[0] - 1


def readable(lens: torch.Tensor) -> bool:
    """Whether values can be read without a synchronisation, outside of traces and transforms."""
    if torch.compiler.is_compiling() or type(lens) is not torch.Tensor or not lens.is_cpu:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(lens)


def check_same(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor) -> None:
    """One is a copy of the other; both are `readable`."""
    there, here = cu_seqlens.tolist(), cu_seqlens_cpu.tolist()
    if there != here:
        raise ValueError(f'cu_seqlens_cpu must be a copy of cu_seqlens: that is {there}, cu_seqlens_cpu is {here}')


def _check_bounds(name: str, lens: torch.Tensor, length: int) -> None:
    values = lens.tolist()
    if values[0] != 0 or values[-1] != length:
        raise ValueError(f'{name} must start at 0 and end at T = {length}, got {values[0]} … {values[-1]}')
    check_rising(name, values)


def check_rising(name: str, values: Sequence[int]) -> None:
    """Values start at 0 and never decrease."""
    if values[0] != 0:
        raise ValueError(f'{name} must start at 0, got {values[0]}')
    for i, (start, end) in enumerate(itertools.pairwise(values)):
        if end < start:
            raise ValueError(f'{name} must not decrease: entry {i} is {start}, entry {i + 1} is {end}')


def check_chunk_indices(chunk_indices: torch.Tensor | None) -> None:
    """`[chunks, 2]`, int32 or int64. Its values are ignored: they follow from `cu_seqlens`."""
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
    """A gate is the logarithm of a decay, at most 0. Reads values."""
    if gate.numel() and bool((gate > 0).any()):
        raise ValueError(f'{name} must be at most 0 (a logarithm of a decay), got a maximum of {float(gate.max()):.3g}')
