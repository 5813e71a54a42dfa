"""The Triton kernels of chunked KDA as one differentiable operator, for eager and compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fla.opaque import OpaqueKernel
from fla.ops.kda.kernels.launch import BLOCKS, Intermediates, chunk_backward, chunk_forward, intra_chunk_bwd
from fla.ops.kda.kernels.tuning import SIZE
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.ptxas_workaround import avoid_wgmma_if_unsafe
from fla.ops.launch.triton_call import flat, in_rows, on_device_of, resolve_neg
from fla.ops.recurrence.arguments import Inputs, Options, count_of, resolve, without_steps
from fla.ops.recurrence.operator import declare, shaped_like, unpack
from fla.utils.sizes import cdiv


def chunk(inputs: Inputs, options: Options, cu_seqlens_cpu: torch.Tensor | None, kernel: OpaqueKernel | None = None) -> Any:
    """`chunk_kda` on Triton, or on another operator that `operator_of` made; o, the final state and, if wanted, states."""
    q, v = inputs.q, inputs.v
    if q.shape[1] == 0 or count_of(q, inputs.cu_seqlens) == 0:
        o, final = without_steps(inputs, options)
        dims = (v.shape[3], q.shape[3]) if options.state_v_first else (q.shape[3], v.shape[3])
        none = v.new_empty((q.shape[0], 0, v.shape[2], *dims), dtype=torch.float32)
        return (o, final, none) if options.return_intermediate_states else (o, final)
    o, final, h = (_chunk if kernel is None else kernel)(*inputs, *resolve(options, q.shape[3]))
    if not options.return_intermediate_states:
        return o, final
    if cu_seqlens_cpu is not None:
        chunks = int((-(-cu_seqlens_cpu.diff() // SIZE)).sum())
        h = h[:chunks][None]
    else:
        h = h.unflatten(0, (q.shape[0], -1))
    return o, final, (h.transpose(-1, -2) if options.state_v_first else h).float()


def operator_of(name: str, intra_chunk: Callable[..., Any]) -> OpaqueKernel:
    """The operator, with an implementation of `intra_chunk_bwd` in its backward."""

    def backward(*arguments: Any) -> Any:
        inputs, options, (*saved, do, dfinal_state) = unpack(arguments)
        intermediates = Intermediates(*saved) if options.disable_recompute else None
        do, dfinal_state = resolve_neg(do), resolve_neg(dfinal_state)
        with on_device_of(inputs.q), avoid_wgmma_if_unsafe(inputs.k, inputs.v):
            ready = _readable(inputs)
            gradients = chunk_backward(ready, options, intermediates, do, dfinal_state, intra_chunk)
        return shaped_like(inputs, gradients)

    return declare(
        name,
        forward=_forward,
        fake=_fake,
        backward=backward,
        results=('intermediate',),
        intermediates=Intermediates._fields,
    )


def _forward(*arguments: Any) -> Any:
    inputs, options, _ = unpack(arguments)
    with on_device_of(inputs.q), avoid_wgmma_if_unsafe(inputs.k, inputs.v):
        o, final, intermediates, h = chunk_forward(_readable(inputs), options)
    if not options.return_intermediate_states:
        h = None
    elif intermediates is not None and h is not None:
        h = h.clone()  # results of an operator do not share memory
    return o, final, h, *(intermediates or (None,) * len(Intermediates._fields))


def _readable(inputs: Inputs) -> Inputs:
    """The inputs as the kernels read them: contiguous rows, flat parameters, a contiguous state."""
    q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens = inputs
    q, k, v, g = in_rows(q), in_rows(k), in_rows(v), in_rows(g)
    state = None if state is None else resolve_neg(state).contiguous()
    return Inputs(q, k, v, g, resolve_neg(beta), flat(A_log), flat(dt_bias), state, flat(cu_seqlens))


def _fake(*arguments: Any) -> Any:
    inputs, options, _ = unpack(arguments)
    q, v, cu_seqlens = inputs.q, inputs.v, inputs.cu_seqlens
    token, dim, value_dim = v.shape[:3], q.shape[3], v.shape[3]
    per_sequence = cdiv(q.shape[1], SIZE)
    rows = q.shape[0] * per_sequence if cu_seqlens is None else per_sequence + count_of(q, cu_seqlens)

    def states() -> torch.Tensor:
        return q.new_empty((rows, v.shape[2], dim, value_dim))

    intermediates: tuple[torch.Tensor | None, ...] = (None,) * len(Intermediates._fields)
    if options.disable_recompute:
        intermediates = Intermediates(
            G=q.new_empty((*token, dim), dtype=precisions.of_sums(q.dtype)),
            block_kind=q.new_empty((rows, v.shape[2], BLOCKS), dtype=torch.int32),
            attend=q.new_empty((*token, SIZE)),
            diag_scores=q.new_empty(token, dtype=torch.float32),
            lower=q.new_empty((*token, SIZE), dtype=torch.float32),
            inverse=q.new_empty((*token, SIZE)),
            w=q.new_empty((*token, dim)),
            kg=q.new_empty((*token, dim)),
            qg=q.new_empty((*token, dim)),
            h=states(),
            v_new=q.new_empty((*token, value_dim)),
        )
    h = states() if options.return_intermediate_states else None
    return v.new_empty(v.shape), inputs.empty_final_state(options), h, *intermediates


_chunk = operator_of('fla::chunk_kda', intra_chunk_bwd)
