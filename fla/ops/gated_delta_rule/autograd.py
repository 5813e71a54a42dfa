"""The Triton kernels of the chunked gated delta rule as one differentiable operator, for eager and compiled code."""

from __future__ import annotations

from typing import Any

import torch

from fla.opaque import OpaqueKernel
from fla.ops.gated_delta_rule.kernels.launch import chunk_backward, chunk_forward
from fla.ops.gated_delta_rule.kernels.tuning import CHUNK
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.ptxas_workaround import avoid_wgmma_if_unsafe
from fla.ops.launch.triton_call import contiguous_rows_int32, flat, on_device_of, resolve_neg
from fla.ops.recurrence.arguments import Inputs, Options, count_of, resolve, without_steps
from fla.ops.recurrence.operator import declare, shaped_like, unpack


def chunk(inputs: Inputs, options: Options, kernel: OpaqueKernel | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_gated_delta_rule` on Triton, or on another operator that `operator_of` made."""
    if inputs.q.shape[1] == 0 or count_of(inputs.q, inputs.cu_seqlens) == 0:
        return without_steps(inputs, options)
    o, final = (_chunk if kernel is None else kernel)(*inputs, *resolve(options, inputs.q.shape[3]))
    return o, final


def operator_of(name: str, forward: Any) -> OpaqueKernel:
    """The operator with this forward; it returns o, the final state or None, and G and inverse for the Triton backward."""
    return declare(name, forward=forward, fake=_fake, backward=_backward, intermediates=('G', 'inverse'))


def _forward(*arguments: Any) -> Any:
    inputs, options, _ = unpack(arguments)
    with on_device_of(inputs.q), avoid_wgmma_if_unsafe(inputs.k, inputs.v):
        return chunk_forward(_readable(inputs), options)


def _backward(*arguments: Any) -> Any:
    inputs, options, (G, inverse, do, dfinal_state) = unpack(arguments)
    do, dfinal_state = resolve_neg(do), resolve_neg(dfinal_state)
    with on_device_of(inputs.q), avoid_wgmma_if_unsafe(inputs.k, inputs.v):
        gradients = chunk_backward(_readable(inputs), options, G, inverse, do, dfinal_state)
    return shaped_like(inputs, gradients)


def _readable(inputs: Inputs) -> Inputs:
    """The inputs as the kernels read them: contiguous rows of q, k and v, flat parameters, a contiguous state."""
    q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens = inputs
    q, k, v = contiguous_rows_int32(q, CHUNK), contiguous_rows_int32(k, CHUNK), contiguous_rows_int32(v, CHUNK)
    state = None if state is None else resolve_neg(state).contiguous()
    return Inputs(q, k, v, resolve_neg(g), resolve_neg(beta), flat(A_log), flat(dt_bias), state, flat(cu_seqlens))


def _fake(*arguments: Any) -> Any:
    inputs, options, _ = unpack(arguments)
    q, v = inputs.q, inputs.v
    G = q.new_empty(v.shape[:3], dtype=precisions.of_sums(q.dtype))
    return v.new_empty(v.shape), inputs.empty_final_state(options), G, q.new_empty((*v.shape[:3], CHUNK))


_chunk = operator_of('fla::chunk_gated_delta_rule', _forward)
