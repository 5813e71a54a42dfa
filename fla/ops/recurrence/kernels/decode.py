"""Launches `recurrent`: one kernel, without copies or intermediate tensors."""

from __future__ import annotations

from typing import Any

import torch
from triton.compiler import CompiledKernel

from fla.ops.launch.precompile import refuse_in_capture
from fla.ops.launch.triton_call import flat, on_device_of, resolve_neg
from fla.ops.recurrence.kernels.recurrent import recurrent
from fla.utils.sizes import next_power_of_2

_NONE = (0, 0, 0)
# Indices of the initial and the final state among the kernel's tensors.
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
    scale: float | None,
    *,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns o `[B, T, HV, V]` in v's dtype, and the final state in float32 or None.

    The arguments are those of the operations, already checked. g, gk and gv are log decays per head, key channel and value
    channel: `[B, T, HV]`, `[B, T, HV, K]` and `[B, T, HV, V]`. With `use_gate_in_kernel` g or gk is raw.
    """
    (q, q_strides), (k, k_strides), (v, v_strides) = _rows(q), _rows(k), _rows(v)
    g, beta, initial_state = resolve_neg(g), resolve_neg(beta), resolve_neg(initial_state)
    gk, gk_strides = (None, _NONE) if gk is None else _rows(gk)
    gv, gv_strides = (None, _NONE) if gv is None else _rows(gv)
    batch, length, heads, dim = q.shape
    value_heads, value_dim = v.shape[2:]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = torch.empty_like(v) if v.is_contiguous() else v.new_empty((batch, length, value_heads, value_dim))
    final = None
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    cu_seqlens = flat(cu_seqlens)
    if output_final_state:
        if initial_state is not None and initial_state.dtype is torch.float32:
            final = torch.empty_like(initial_state)
        else:
            dims = (value_dim, dim) if state_v_first else (dim, value_dim)
            final = v.new_empty((count, value_heads, *dims), dtype=torch.float32)
    if count == 0 or value_heads == 0:
        return o, final
    block_k = next_power_of_2(dim)
    block_v = _value_block(count * value_heads, value_dim, block_k)
    programs = count * value_heads * -(-value_dim // block_v)
    tensors = (q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, o, final, cu_seqlens)
    numbers = (
        # Each number always has the same type, because the key of a compiled kernel does not contain numbers.
        *(dim**-0.5 if scale is None else float(scale), float(lower_bound or 0.0), length),
        *(*q_strides[:3], *k_strides[:3], *v_strides[:3]),
        *(_NONE if g is None else g.stride()),
        *(*gk_strides[:3], *gv_strides[:3]),
        *(_NONE if beta is None else beta.stride()),
    )
    constants = (
        *(heads, value_heads, dim, value_dim, block_k, block_v),
        *(g is not None, gk is not None, gv is not None, beta is not None),
        *(use_gate_in_kernel, A_log is not None, dt_bias is not None, lower_bound is not None),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, use_qk_l2norm_in_kernel),
        *(initial_state is not None, final is not None, state_v_first, cu_seqlens is not None),
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
    """Launches a compiled kernel from a cache of its own.

    Triton inspects every argument of every launch to find the compiled kernel, which takes 30 of the 40 µs that a decode
    step may take. Its numbers have fixed types and are not specialised, so that the key below determines it."""
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    aligned = not ((addresses[_INITIAL] or 0) | (addresses[_FINAL] or 0)) & 15
    key = (device, aligned, constants, *[None if x is None else x.dtype for x in tensors])
    compiled = _compiled.get(key)
    if compiled is None:
        refuse_in_capture()
        compiled = recurrent[(programs,)](*tensors, *numbers, *constants, **_options(constants))
        # The interpreter and background compilation return something else.
        if isinstance(compiled, CompiledKernel):
            _compiled[key] = compiled
    else:
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled[(programs, 1, 1)](*addresses, *numbers, *constants, stream=stream)


def _options(constants: tuple[Any, ...]) -> dict[str, int]:
    """Returns the launch options. A thread holds 64 numbers of the state, or 16 where its columns are K apart: the fastest
    on an H200."""
    block_k, block_v = constants[4:6]
    *_, v_first, _packed = constants
    warps = block_k * block_v // (32 * (16 if v_first else 64))
    return {'num_warps': min(8, max(1, warps)), 'num_stages': 1}


def _value_block(programs: int, value_dim: int, block_k: int) -> int:
    """Returns the value columns of a program: few for few heads, to use every multiprocessor; else 32, whole cache lines."""
    most = max(8, min(32, 8192 // block_k))
    return min(next_power_of_2(value_dim), 8 if programs <= 64 else most)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns x with a contiguous last dimension, which it nearly always has, and its strides; see `resolve_neg`."""
    strides = x.stride()
    if strides[-1] != 1 or x.shape[-1] == 1:
        x = resolve_neg(x).contiguous()
        strides = x.stride()
    return x, strides
