"""The launches of the chunked gated delta rule, forward and backward, in their order.

The forward saves, beside its inputs, the running log decay G `[B, T, HV]` (float32, or float64 for float32 inputs) and
`inverse` `[B, T, HV, 64]` in v's dtype: the inverse of each chunk's system without the ones on its diagonal. The backward
starts from those and computes the states again.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from fla.ops.gated_delta_rule.kernels.backward import inter_chunk_bwd, intra_chunk_bwd, scores
from fla.ops.gated_delta_rule.kernels.forward import outputs, prepare
from fla.ops.gated_delta_rule.kernels.gates import gates_backward
from fla.ops.gated_delta_rule.kernels.heads import heads_backward
from fla.ops.gated_delta_rule.kernels.states import states_forward
from fla.ops.gated_delta_rule.kernels.states_backward import states_backward
from fla.ops.gated_delta_rule.kernels.tuning import CHUNK, tuning_of
from fla.ops.gated_delta_rule.kernels.turns import programs_of
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.precompile import is_dry_run, launch, precompile_parallel
from fla.ops.recurrence.arguments import Gradients, Inputs, Options, compile_key
from fla.ops.recurrence.kernels.call import Call
from fla.utils.sizes import cdiv


class GDNCall(Call):
    """A call of the chunked gated delta rule."""

    def __init__(self, inputs: Inputs, options: Options) -> None:
        super().__init__(inputs, options, CHUNK)
        self.tuning = tuning_of(inputs.q, self.V)
        self.common['H'] = self.H
        self.qk_strides = (*inputs.q.stride()[:3], *inputs.k.stride()[:3])


def _key(inputs: Inputs, options: Options) -> tuple[Hashable, ...]:
    turns = tuning_of(inputs.q, inputs.v.shape[3]).turns(inputs.v, inputs.cu_seqlens is not None)
    return (*compile_key(inputs, options), turns)


@precompile_parallel(_key)
def chunk_forward(inputs: Inputs, options: Options) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The operation on checked inputs: T, B and N are at least 1, and the last stride of q, k and v is 1.

    Returns:
        o `[B, T, HV, V]`; the final state in float32, or None; G and inverse for the backward.
    """
    call = GDNCall(inputs, options)
    q, k, _, g, beta, A_log, dt_bias, _, cu_seqlens = inputs
    tuning, table = call.tuning, call.layout.table
    G = call.empty_per_token(dtype=precisions.of_sums(q.dtype))
    inverse = call.empty_per_token(CHUNK)
    beta32 = torch.empty_like(G, dtype=torch.float32)
    attend = diag_scores = None
    if tuning.outputs_with_states:
        attend, diag_scores = torch.empty_like(inverse), torch.empty_like(beta32)
    rq = rk = G  # not read
    if call.normalise:
        rk = torch.empty_like(beta32)
        rq = rk if attend is None else torch.empty_like(beta32)
    launch(prepare, (call.chunks,))(
        *(q, k, g, beta, A_log, dt_bias, G, beta32, rq, rk, attend, diag_scores, inverse, cu_seqlens, table),
        *(options.scale, call.T, *call.qk_strides, *g.stride(), *beta.stride()),
        **call.common,
        **call.sigmoid,
        BK=tuning.block_k,
        NORMALISE=call.normalise,
        GATE=options.use_gate_in_kernel,
        HAS_BIAS=dt_bias is not None,
        ATTEND=attend is not None,
        INVERSE_PRECISION=call.common['PRECISION'],
        num_warps=tuning.warps,
        **tuning.prepare_options,
    )
    final = inputs.empty_final_state(options)
    o = call.empty_per_token(call.V)
    if attend is not None:
        _states(call, beta32, inverse, G, rq, rk, final, attend=attend, diag_scores=diag_scores, o=o)
        return o, final, G, inverse
    h, v_new = call.empty(call.layout.rows, call.HV, call.K, call.V), call.empty_per_token(call.V)
    _states(call, beta32, inverse, G, rq, rk, final, h=h, v_new=v_new)
    launch(outputs, (cdiv(call.V, tuning.output_block_v) * call.chunks,))(
        *(q, k, v_new, G, rk, h, o, cu_seqlens, table, options.scale, call.T, *call.qk_strides),
        **call.common,
        V=call.V,
        BK=tuning.block_k,
        BV=tuning.output_block_v,
        NORMALISE=call.normalise,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return o, final, G, inverse


@precompile_parallel(lambda inputs, options, G, inverse, do, d_final=None: (*_key(inputs, options), d_final is None))
def chunk_backward(
    inputs: Inputs,
    options: Options,
    G: torch.Tensor,
    inverse: torch.Tensor,
    do: torch.Tensor,
    d_final: torch.Tensor | None = None,
) -> Gradients:
    """Gradients of all inputs.

    Args:
        inputs, options, G, inverse: of `chunk_forward`.
        do: gradient of o, of any strides.
        d_final: gradient of the final state, or None.
    """
    call = GDNCall(inputs, options)
    q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens = inputs
    B, T, H, HV, K, V = call.B, call.T, call.H, call.HV, call.K, call.V
    layout, tuning, scale, qk_strides = call.layout, call.tuning, options.scale, call.qk_strides
    do = do.contiguous()
    beta32 = torch.empty_like(G, dtype=torch.float32)
    attend, diag_scores = torch.empty_like(inverse), torch.empty_like(beta32)
    rq, rk = None, G  # not read
    if call.normalise:
        rq, rk = torch.empty_like(beta32), torch.empty_like(beta32)
    launch(scores, (call.chunks,))(
        *(q, k, beta, G, beta32, rq, rk, attend, diag_scores, cu_seqlens, layout.table, scale, T),
        *(*qk_strides, *beta.stride()),
        **call.common,
        **call.sigmoid,
        BK=tuning.block_k,
        NORMALISE=call.normalise,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    h, v_new = call.empty(layout.rows, HV, K, V), call.empty_per_token(V)
    _states(call, beta32, inverse, G, rq, rk, None, h=h, v_new=v_new)
    D, dv, dh = torch.empty_like(v_new), torch.empty_like(v_new), torch.empty_like(h)
    d_initial = None if state is None else torch.empty_like(state)
    d_final = None if d_final is None else d_final.contiguous()
    blocks, sequences = cdiv(V, tuning.backward_block_v), layout.count * HV
    turns = tuning.turns(v, layout.packed)
    carried = None if turns == 1 else call.empty(sequences, K, V, dtype=torch.float32)
    for turn in range(1 if is_dry_run() else turns):
        launch(states_backward, (programs_of(sequences, blocks, turns),))(
            *(q, k, beta32, attend, diag_scores, inverse, do, G, rq, rk, D, dh, d_final, d_initial, carried),
            *(cu_seqlens, layout.offsets, scale, T, sequences, turn, *qk_strides),
            **call.common,
            V=V,
            BK=tuning.whole_k,
            BV=tuning.backward_block_v,
            NORMALISED=call.normalise,
            HAS_FINAL=d_final is not None,
            HAS_INITIAL=state is not None,
            V_FIRST=options.state_v_first,
            TURNS=turns,
            STAGES=tuning.backward_stages,
            num_warps=tuning.state_warps,
        )
    # `states_backward` was the last to read the scores
    from_q, from_k = attend, torch.empty_like(inverse)
    shares = 1 + cdiv(K, tuning.block_k)
    d_G = call.empty(shares, B, T, HV, dtype=torch.float32)
    d_beta = torch.empty_like(d_G)
    launch(intra_chunk_bwd, (call.chunks,))(
        *(q, k, v, beta, do, G, rq, rk, v_new, D, dv, from_q, from_k, d_G, d_beta, cu_seqlens, layout.table, scale, T),
        *(*qk_strides, *v.stride()[:3], *beta.stride()),
        **call.common,
        **call.sigmoid,
        **tuning.intra_chunk_options,
        V=V,
        NORMALISE=call.normalise,
        num_warps=tuning.warps,
    )
    dq_each = call.empty_per_token(K)
    dk_each = torch.empty_like(dq_each)
    launch(inter_chunk_bwd, ((shares - 1) * call.chunks,))(
        *(q, k, beta, do, G, rq, rk, v_new, D, h, dh, from_q, from_k, dq_each, dk_each, d_G, d_beta),
        *(cu_seqlens, layout.table, scale, T, B * T, *qk_strides, *beta.stride()),
        **call.common,
        **call.sigmoid,
        V=V,
        BK=tuning.block_k,
        BV=tuning.block_v,
        NORMALISE=call.normalise,
        num_warps=tuning.warps,
        num_stages=tuning.inter_chunk_stages,
    )
    gate = options.use_gate_in_kernel
    dg = call.empty_per_token(dtype=torch.float32 if gate else g.dtype)
    dbeta = call.empty_per_token(dtype=beta.dtype)
    dA = torch.empty_like(dg) if gate else None
    if dA is not None and layout.packed:
        # the sums below include steps of no sequence; only unchecked lengths have such steps
        dg.zero_()
        dA.zero_()
    launch(gates_backward, (call.chunks,))(
        *(g, beta, A_log, dt_bias, d_G, d_beta, dg, dbeta, dA, cu_seqlens, layout.table, T, B * T),
        *(*g.stride(), *beta.stride()),
        **call.sigmoid,
        SHARES=shares,
        HV=HV,
        SIZE=CHUNK,
        GATE=gate,
        HAS_BIAS=dt_bias is not None,
        PACKED=layout.packed,
        num_warps=2,
    )
    dq, dk = dq_each, dk_each
    if call.normalise or H != HV:
        if H != HV:
            dq, dk = call.empty(*q.shape), call.empty(*k.shape)
        launch(heads_backward, (layout.rows * H,))(
            *(q, k, dq_each, dk_each, dq, dk, cu_seqlens, layout.table, T, *qk_strides),
            H=H,
            HV=HV,
            K=K,
            SIZE=CHUNK,
            BK=tuning.block_k,
            NORMALISE=call.normalise,
            PACKED=layout.packed,
            num_warps=4,
        )
    d_A_log = d_dt_bias = None
    if dA is not None and A_log is not None:
        d_A_log = dA.sum((0, 1)).to(A_log.dtype)
        d_dt_bias = None if dt_bias is None else dg.sum((0, 1)).to(dt_bias.dtype)
        dg = dg.to(g.dtype)
    return Gradients(dq, dk, dv, dg, dbeta, d_A_log, d_dt_bias, d_initial)


def _states(
    call: GDNCall,
    beta32: torch.Tensor,
    inverse: torch.Tensor,
    G: torch.Tensor,
    rq: torch.Tensor | None,
    rk: torch.Tensor,
    final: torch.Tensor | None,
    *,
    h: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    attend: torch.Tensor | None = None,
    diag_scores: torch.Tensor | None = None,
    o: torch.Tensor | None = None,
) -> None:
    """Writes the states before each chunk into h `[rows, HV, K, V]` and U' into v_new `[B, T, HV, V]`; or, from the scores
    `attend` and `diag_scores`, the outputs into o. Writes the final state if it is given."""
    q, k, v = call.inputs[:3]
    state, tuning, layout = call.inputs.initial_state, call.tuning, call.layout
    blocks, sequences = cdiv(call.V, tuning.state_block_v), layout.count * call.HV
    turns = tuning.turns(v, layout.packed, o is not None)
    carried = None if turns == 1 else call.empty(sequences, call.K, call.V, dtype=torch.float32)
    for turn in range(1 if is_dry_run() else turns):
        launch(states_forward, (programs_of(sequences, blocks, turns),))(
            *(q, k, v, beta32, attend, diag_scores, inverse, G, rq, rk, h, v_new, o, state, final, carried),
            *(call.inputs.cu_seqlens, layout.offsets, call.options.scale, call.T, sequences, turn),
            *(*call.qk_strides, *v.stride()[:3]),
            **call.common,
            V=call.V,
            BK=tuning.whole_k,
            BV=tuning.state_block_v,
            NORMALISED=call.normalise,
            OUTPUTS=o is not None,
            HAS_INITIAL=state is not None,
            HAS_FINAL=final is not None,
            V_FIRST=call.options.state_v_first,
            TURNS=turns,
            STAGES=tuning.state_stages if o is None else tuning.outputs_stages,
            num_warps=tuning.state_warps,
        )
