"""Launches the recurrent kernel of both delta rules: one kernel, no copy, no intermediate."""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel

from fla.ops.launch.precompile import refuse_in_capture
from fla.ops.launch.triton_call import flat, in_rows, on_device_of, resolve_neg
from fla.ops.recurrence.arguments import Options, count_of
from fla.ops.recurrence.kernels.recurrent import recurrent
from fla.utils.sizes import cdiv, next_power_of_2

_NO_STRIDES = (0, 0, 0)
# positions among the kernel's tensors
_INITIAL, _FINAL = 9, 11

_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    gv: torch.Tensor | None,
    beta: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A delta rule step by step, on checked arguments.

    Args:
        g: log decay or raw gate per head. gk, gv: per key and per value channel. The others as for the operations.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final state in float32 or None.
    """
    q, k, v = in_rows(q), in_rows(k), in_rows(v)
    gk, gv = None if gk is None else in_rows(gk), None if gv is None else in_rows(gv)
    g, beta, initial_state = resolve_neg(g), resolve_neg(beta), resolve_neg(initial_state)
    A_log, dt_bias, cu_seqlens = flat(A_log), flat(dt_bias), flat(cu_seqlens)
    batch, length, heads, dim = q.shape
    value_heads, value_dim = v.shape[2:]
    count = count_of(q, cu_seqlens)
    o = torch.empty_like(v) if v.is_contiguous() else v.new_empty((batch, length, value_heads, value_dim))
    final = None
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if options.output_final_state:
        if initial_state is not None and initial_state.dtype is torch.float32:
            final = torch.empty_like(initial_state)
        else:
            dims = (value_dim, dim) if options.state_v_first else (dim, value_dim)
            final = v.new_empty((count, value_heads, *dims), dtype=torch.float32)
    if count == 0 or value_heads == 0:
        return o, final
    scale, lower_bound = options.scale, options.lower_bound if options.use_gate_in_kernel else None
    block_k = next_power_of_2(dim)
    block_v = _value_block(count * value_heads, value_dim, block_k)
    programs = count * value_heads * cdiv(value_dim, block_v)
    tensors = (q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, o, final, cu_seqlens)
    numbers = (
        # always Python floats: the cached kernel was compiled for their type
        *(dim**-0.5 if scale is None else float(scale), float(lower_bound or 0.0), length),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(_NO_STRIDES if g is None else g.stride()),
        *(_NO_STRIDES if gk is None else gk.stride()[:3]),
        *(_NO_STRIDES if gv is None else gv.stride()[:3]),
        *(_NO_STRIDES if beta is None else beta.stride()),
    )
    constants = (
        *(heads, value_heads, dim, value_dim, block_k, block_v),
        *(g is not None, gk is not None, gv is not None, beta is not None),
        *(options.use_gate_in_kernel, A_log is not None, dt_bias is not None, lower_bound is not None),
        *(options.use_beta_sigmoid_in_kernel, options.allow_neg_eigval, options.use_qk_l2norm_in_kernel),
        *(initial_state is not None, final is not None, options.state_v_first, cu_seqlens is not None),
    )
    # Triton launches on the current device. On ROCm it also specialises pointers by the size of their memory.
    if not q.is_cuda or torch.version.hip is not None or type(q) is not torch.Tensor or torch.compiler.is_compiling():
        with on_device_of(q):
            recurrent[(programs,)](*tensors, *numbers, *constants, **_options(constants))
    elif (device := q.get_device()) == torch.cuda.current_device():
        _launch(programs, tensors, numbers, constants, device)
    else:
        with torch.cuda.device(device):
            _launch(programs, tensors, numbers, constants, device)
    return o, final


def _launch(
    programs: int,
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    device: int,
) -> None:
    """A launch by our own cache. Triton inspects every argument of every launch to find the compiled kernel: 30 of the 40 µs
    that a decode step may take. The kernel's numbers have one type and are not specialised, so this key is complete."""
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    aligned = not ((addresses[_INITIAL] or 0) | (addresses[_FINAL] or 0)) & 15
    key = (device, aligned, constants, *[None if x is None else x.dtype for x in tensors])
    compiled = _compiled.get(key)
    if compiled is None:
        refuse_in_capture()
        compiled = recurrent[(programs,)](*tensors, *numbers, *constants, **_options(constants))
        # another type comes from Triton's interpreter, or while it compiles in the background
        if isinstance(compiled, CompiledKernel):
            _compiled[key] = compiled
    else:
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled[(programs, 1, 1)](*addresses, *numbers, *constants, stream=stream)


def _options(constants: tuple[Any, ...]) -> dict[str, int]:
    """A thread holds 64 numbers of the state, or 16 with `state_v_first`, where columns are K apart: the fastest on an
    H200."""
    block_k, block_v = constants[4:6]
    *_, v_first, _packed = constants
    warps = block_k * block_v // (32 * (16 if v_first else 64))
    return {'num_warps': min(8, max(1, warps)), 'num_stages': 1}


def _value_block(programs: int, value_dim: int, block_k: int) -> int:
    """Value columns of a program: narrow for few heads, so that every multiprocessor has work; else 32, a cache line."""
    most = max(8, min(32, 8192 // block_k))
    return min(next_power_of_2(value_dim), 8 if programs <= 64 else most)
