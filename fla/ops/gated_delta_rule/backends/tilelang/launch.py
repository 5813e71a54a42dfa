"""The operator with its forward in two TileLang kernels, and the Triton backward, which starts from the same tensors."""

from __future__ import annotations

from typing import Any

import torch

from fla.ops.gated_delta_rule.autograd import operator_of
from fla.ops.gated_delta_rule.backends.tilelang import kernels
from fla.ops.launch.kernels.layout import layout_of
from fla.ops.launch.tilelang_call import Recipe, kernels_of, name_of
from fla.ops.launch.triton_call import flat, on_device_of
from fla.ops.launch.vendor import for_tma
from fla.ops.recurrence.arguments import Inputs, Options
from fla.ops.recurrence.operator import unpack


def _recipes(inputs: Inputs, options: Options, indices: torch.Tensor) -> tuple[Recipe, Recipe]:
    """The kernels, with the values that their code depends on."""
    q, _, v, g, beta, _, _, state, cu_seqlens = inputs
    K, V, dtype, index, packed = q.shape[3], v.shape[3], name_of(q.dtype), name_of(indices.dtype), cu_seqlens is not None
    # without a state, the code is the same for either layout
    v_first = options.state_v_first and (state is not None or options.output_final_state)
    flags = (
        *(options.use_qk_l2norm_in_kernel, options.use_gate_in_kernel),
        *(options.use_beta_sigmoid_in_kernel, options.use_beta_sigmoid_in_kernel and options.allow_neg_eigval),
    )
    state_dtype = 'float32' if state is None else name_of(state.dtype)
    return (
        (kernels.prepare, (K, dtype, name_of(g.dtype), name_of(beta.dtype), index, packed, *flags)),
        (kernels.scan, (K, V, dtype, state_dtype, index, packed, state is not None, options.output_final_state, v_first)),
    )


def chunk_forward(inputs: Inputs, options: Options) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """o, the final state or None, and G and inverse for the backward: see `fla.ops.gated_delta_rule.kernels.launch`."""
    inputs = inputs._replace(cu_seqlens=flat(inputs.cu_seqlens))
    q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens = inputs
    batch, length, groups, dim_k = q.shape
    heads, dim_v = v.shape[2:]
    tokens = batch * length
    layout = layout_of(batch, length, kernels.CHUNK, cu_seqlens)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    G = empty(batch, length, heads)
    inverse = empty(batch, length, heads, kernels.CHUNK, dtype=q.dtype)
    attend = empty(tokens, heads, kernels.CHUNK, dtype=q.dtype)
    factors = empty(layout.rows, heads, kernels.FACTORS, kernels.CHUNK)
    o = empty(*v.shape, dtype=v.dtype)
    final = inputs.empty_final_state(options)
    # stands for tensors that the compiled code does not read
    unread = empty(2, dtype=torch.int32)
    indices = unread if cu_seqlens is None else cu_seqlens
    prepare, scan = kernels_of(*_recipes(inputs, options, indices))
    q, k = (for_tma(x).view(tokens, groups, dim_k) for x in (q, k))
    v = for_tma(v).view(tokens, heads, dim_v)
    some = factors.view(-1)[:heads]
    gate = options.use_gate_in_kernel
    prepare(
        *(q, k, g.contiguous().view(tokens, heads), beta.contiguous().view(tokens, heads)),
        some if A_log is None or not gate else A_log.float().reshape(-1).contiguous(),
        # without a bias the code adds 0
        (some if not gate else torch.zeros_like(some)) if dt_bias is None else dt_bias.float().reshape(-1).contiguous(),
        *(indices, unread.view(1, 2) if layout.table is None else layout.table),
        *(G.view(tokens, heads), inverse.view(tokens, heads, -1), attend, factors, length, heads // groups, options.scale),
    )
    scan(
        *(q, k, v, inverse.view(tokens, heads, -1), attend, factors),
        some if state is None else state.contiguous().view(-1),
        some if final is None else final.view(-1),
        *(indices, unread if layout.offsets is None else layout.offsets),
        *(o.view(tokens, heads, dim_v), layout.count, length, heads // groups),
    )
    return o, final, G, inverse


def _forward(*arguments: Any) -> Any:
    inputs, options, _ = unpack(arguments)
    with on_device_of(inputs.q):
        return chunk_forward(inputs, options)


kernel = operator_of('fla::tilelang_gated_delta_rule', _forward)
