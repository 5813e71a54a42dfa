"""The launches of chunked Kimi delta attention, forward and backward, in their order.

By default the forward saves only its inputs. The backward computes the intermediates again, with the states, which the
forward need not write, and overwrites most of them after their last use, so that its peak memory is that of the
recomputation. With `disable_recompute` the forward saves all intermediates and the backward overwrites none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fla.ops.kda.kernels.backward import channels_backward, pairs_backward
from fla.ops.kda.kernels.blocks_backward import blocks_backward, products_with_states
from fla.ops.kda.kernels.blocks_forward import scores, updates
from fla.ops.kda.kernels.forward import outputs, prepare
from fla.ops.kda.kernels.gates import BLOCK, FAR, NEAR, WHOLE, decays, gates_backward
from fla.ops.kda.kernels.heads import heads_backward
from fla.ops.kda.kernels.states import states_forward
from fla.ops.kda.kernels.states_backward import states_backward
from fla.ops.kda.kernels.tuning import SIZE, tuning_of
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.precompile import launch, precompile_parallel
from fla.ops.recurrence.arguments import Gradients, Inputs, Options, compile_key
from fla.ops.recurrence.kernels.call import Call
from fla.utils.sizes import cdiv

BLOCKS = SIZE // BLOCK.value
# The largest distance, in log decays, of a step from the middle of its chunk, or of its block: see forward.py.
FURTHEST = 60.0


class Intermediates(NamedTuple):
    """Tensors between the inputs and o, which the backward reads; see the kernels that write them."""

    G: torch.Tensor
    block_kind: torch.Tensor
    attend: torch.Tensor
    diag_scores: torch.Tensor
    lower: torch.Tensor
    inverse: torch.Tensor
    w: torch.Tensor
    kg: torch.Tensor
    qg: torch.Tensor
    h: torch.Tensor
    v_new: torch.Tensor


class IntraChunkGradients(NamedTuple):
    """Results of `intra_chunk_bwd`: those of q and k (as normalised) for each value head, the others complete."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None


class KDACall(Call):
    """A call of chunked KDA.

    Attributes:
        gates: constants of the kernels that read gates.
        block_kinds: the kinds of blocks that such gates can lead to, the least first: see forward.py.
    """

    def __init__(self, inputs: Inputs, options: Options) -> None:
        super().__init__(inputs, options, SIZE)
        self.tuning = tuning_of(inputs.k, self.V)
        self.lower_bound = options.lower_bound or 0.0
        self.block_kinds = block_kinds(options, inputs.k.dtype)
        self.gates: dict[str, Any] = {
            'HV': self.HV,
            'K': self.K,
            'SIZE': SIZE,
            'BK': self.tuning.whole_k,
            'GATE': options.use_gate_in_kernel,
            'HAS_A': options.use_gate_in_kernel and inputs.A_log is not None,
            'HAS_BIAS': options.use_gate_in_kernel and inputs.dt_bias is not None,
            'BOUNDED': options.lower_bound is not None,
            'PACKED': self.layout.packed,
        }


def block_kinds(options: Options, dtype: torch.dtype) -> tuple[int, ...]:
    """The kinds of blocks that can occur with these options, the least first: see forward.py."""
    if dtype == torch.float16:
        # its range is too small for products relative to the middle of a chunk or block
        return (FAR.value,)
    lowest = -math.inf
    if options.use_gate_in_kernel and options.lower_bound is not None:
        lowest = options.lower_bound
    if lowest >= -FURTHEST / (SIZE // 2):
        return (WHOLE.value,)
    if lowest >= -FURTHEST / (BLOCK.value // 2):
        return WHOLE.value, NEAR.value
    return WHOLE.value, NEAR.value, FAR.value


@precompile_parallel(compile_key)
def chunk_forward(
    inputs: Inputs, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None, Intermediates | None, torch.Tensor | None]:
    """The operation on checked inputs: T, B and N are at least 1, and the last stride of q, k, v and g is 1.

    Returns:
        o `[B, T, HV, V]`; the final state in float32, or None; the intermediates with `disable_recompute`; with
        `return_intermediate_states` the state before each chunk, `[rows, HV, K, V]` in k's dtype, where the rows of sequence
        n begin at `layout.offsets[n]`, or at n * ceil(T / 64).
    """
    call = KDACall(inputs, options)
    v, tuning = inputs.v, call.tuning
    final = inputs.empty_final_state(options)
    o = v.new_empty(v.shape)
    if not (options.disable_recompute or options.return_intermediate_states) and tuning.outputs_stages > 1:
        _recurrence(call, _prepare(call, full=False), final, o=o)
        return o, final, None, None
    found = _intermediates(call, final, full=options.disable_recompute)
    launch(outputs, (cdiv(call.V, tuning.outputs_block_v) * call.chunks,))(
        *(found.qg, found.attend, found.diag_scores, found.v_new, found.h, o, inputs.cu_seqlens, call.layout.table, call.T),
        **call.common,
        V=call.V,
        BK=tuning.outputs_block_k,
        BV=tuning.outputs_block_v,
    )
    return o, final, found if options.disable_recompute else None, found.h


@precompile_parallel(
    lambda inputs, options, intermediates, do, d_final=None, intra_chunk=None: (
        *compile_key(inputs, options),
        *(intermediates is None, d_final is None, intra_chunk),
    )
)
def chunk_backward(
    inputs: Inputs,
    options: Options,
    intermediates: Intermediates | None,
    do: torch.Tensor,
    d_final: torch.Tensor | None = None,
    intra_chunk: Callable[..., IntraChunkGradients] | None = None,
) -> Gradients:
    """Gradients of all inputs.

    Args:
        inputs, options, intermediates: of `chunk_forward`.
        do: gradient of o, in its dtype.
        d_final: gradient of the final state, or None.
        intra_chunk: another implementation of `intra_chunk_bwd`.
    """
    call = KDACall(inputs, options)
    q, k, state, tuning = inputs.q, inputs.k, inputs.initial_state, call.tuning
    reuse = intermediates is None
    if intermediates is None:
        intermediates = _intermediates(call, None, full=True)
    do = do.contiguous()
    du, dh = torch.empty_like(intermediates.v_new), torch.empty_like(intermediates.h)
    d_initial = None if state is None else torch.empty_like(state)
    d_final = None if d_final is None else d_final.contiguous()
    launch(states_backward, (cdiv(call.V, tuning.state_block_v) * call.layout.count * call.HV,))(
        *(intermediates.qg, intermediates.kg, intermediates.attend, intermediates.diag_scores, intermediates.w, do),
        *(intermediates.G, du, dh, d_final, d_initial, inputs.cu_seqlens, call.layout.offsets, call.T),
        **call.common,
        V=call.V,
        BK=tuning.whole_k,
        BV=tuning.state_block_v,
        HAS_FINAL=d_final is not None,
        HAS_INITIAL=d_initial is not None,
        V_FIRST=options.state_v_first,
        STAGES=tuning.backward_stages,
        num_warps=tuning.state_warps,
    )
    parts = (intra_chunk or intra_chunk_bwd)(call, intermediates, reuse, do, du, dh)
    dq, dk = parts.q, parts.k
    if call.HV != call.H or call.normalise:
        if call.HV != call.H:
            dq, dk = call.empty(*q.shape), call.empty(*k.shape)
        tokens, rows = call.B * call.T * call.H, 16
        launch(heads_backward, (cdiv(tokens, rows), 2))(
            *(q, k, parts.q, parts.k, dq, dk, tokens, call.T, *q.stride()[:3], *k.stride()[:3]),
            H=call.H,
            GROUPS=call.HV // call.H,
            K=call.K,
            BK=tuning.whole_k,
            ROWS=rows,
            NORMALISE=call.normalise,
            num_warps=4,
        )
    return Gradients(dq, dk, *parts[2:], d_initial)


def intra_chunk_bwd(
    call: KDACall, intermediates: Intermediates, reuse: bool, do: torch.Tensor, du: torch.Tensor, dh: torch.Tensor
) -> IntraChunkGradients:
    """The part of the backward that is parallel over chunks, after the recurrence.

    Args:
        reuse: whether `intermediates` may be overwritten.
        do: gradient of o. du: of v_new. dh: of the state after each chunk. All contiguous; du and dh may be overwritten.
    """
    inputs, found, tuning = call.inputs, intermediates, call.tuning
    q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens = inputs
    scale, table, T, K, V = call.options.scale, call.layout.table, call.T, call.K, call.V
    in_place_of: Callable[[torch.Tensor], torch.Tensor] = _itself if reuse else torch.empty_like

    def parts(*shape: int) -> torch.Tensor:
        # the chunk table may have unused rows, whose parts no program writes
        new = torch.zeros if call.layout.packed else torch.empty
        return new(call.layout.rows, call.HV, *shape, dtype=torch.float32, device=k.device)

    # `lower` is float32: room for each number in two 16-bit parts
    d_attend = in_place_of(found.lower).view(k.dtype)
    d_diag_scores, d_lower, d_grown = (in_place_of(x) for x in (found.diag_scores, found.inverse, found.w))
    dv = du
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    rq = rk = None
    if call.normalise:
        rq, rk = (call.empty_per_token(dtype=torch.float32) for _ in range(2))
    launch(pairs_backward, (call.chunks,))(
        *(q, k, v, beta, found.G, found.lower, found.inverse, found.v_new, found.h, do, du),
        *(d_attend, d_diag_scores, d_lower, d_grown, dv, dbeta, rq, rk, cu_seqlens, table, scale, T),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *beta.stride()),
        **call.common,
        **call.sigmoid,
        H=call.H,
        V=V,
        BK=tuning.block_k,
        BV=tuning.block_v,
        NORMALISE=call.normalise,
        num_warps=4,
    )

    # the recurrence was the last to read qg and kg
    dq, dk = in_place_of(found.qg), in_place_of(found.kg)
    dg = found.G if g.dtype == found.G.dtype and reuse else torch.empty_like(found.G, dtype=g.dtype)
    slices = cdiv(K, tuning.channels_block_k)
    gate = call.options.use_gate_in_kernel
    dA_parts = parts(slices) if gate and A_log is not None else None
    dbias_parts = parts(K) if gate and dt_bias is not None else None
    if WHOLE.value in call.block_kinds:
        launch(channels_backward, (slices * call.chunks,))(
            *(q, k, g, A_log, dt_bias, found.G, found.block_kind, found.v_new, found.h, dh, do),
            *(d_attend, d_diag_scores, d_lower, d_grown, rq, rk, dq, dk, dg, dA_parts, dbias_parts),
            *(cu_seqlens, table, scale, call.lower_bound, T),
            *(*q.stride()[:3], *k.stride()[:3], *g.stride()[:3]),
            **(call.gates | {'BK': tuning.channels_block_k}),
            H=call.H,
            V=V,
            BV=tuning.block_v,
            NORMALISE=call.normalise,
            PRECISION=precisions.of_products(k.dtype),
            num_warps=4,
        )
    if call.block_kinds[-1] != WHOLE.value:
        kept, carried = parts(K), parts(BLOCKS, K)
        tiles = cdiv(K, tuning.block_k)
        launch(products_with_states, (tiles * call.chunks,))(
            *(found.G, found.v_new, found.h, do, dh, found.block_kind, dq, dk, kept, cu_seqlens, table, scale, T),
            **call.common,
            V=V,
            BK=tuning.block_k,
            BV=tuning.block_v,
            num_warps=4,
        )
        # the states have been read for the last time
        dG = _float32_in_place_of(dh, (call.B, T, call.HV, K))
        launch(blocks_backward, (tiles * BLOCKS * call.chunks,))(
            *(q, k, found.G, found.block_kind, d_attend, d_diag_scores, d_lower, d_grown, dq, dk, rq, rk),
            *(dq, dk, dG, carried, cu_seqlens, table, T, *q.stride()[:3], *k.stride()[:3]),
            **call.common,
            H=call.H,
            BK=tuning.block_k,
            LEAST=call.block_kinds[0],
            MOST=call.block_kinds[-1],
            NORMALISE=call.normalise,
            num_warps=2,
        )
        launch(gates_backward, (call.chunks,))(
            *(g, A_log, dt_bias, dG, found.block_kind, kept, carried, dg, dA_parts, dbias_parts, cu_seqlens, table),
            *(call.lower_bound, T, *g.stride()[:3]),
            **call.gates,
            PARTS=slices,
            WIDE=tuning.float32,
            num_warps=4,
        )
    dA = None if dA_parts is None or A_log is None else dA_parts.sum((0, 2)).view(A_log.shape).to(A_log.dtype)
    dbias = None if dbias_parts is None or dt_bias is None else dbias_parts.sum(0).view(dt_bias.shape).to(dt_bias.dtype)
    return IntraChunkGradients(dq, dk, dv, dg, dbeta, dA, dbias)


class _Prepared(NamedTuple):
    """Results of `_prepare`: `Intermediates` before the recurrence, with u in place of h and v_new."""

    G: torch.Tensor
    block_kind: torch.Tensor
    attend: torch.Tensor
    diag_scores: torch.Tensor
    lower: torch.Tensor | None
    inverse: torch.Tensor | None
    w: torch.Tensor
    kg: torch.Tensor
    qg: torch.Tensor
    u: torch.Tensor


def _intermediates(call: KDACall, final: torch.Tensor | None, full: bool) -> Intermediates:
    """Everything up to the states; `lower` and `inverse` are None unless `full`."""
    prepared = _prepare(call, full)
    h = call.empty(call.layout.rows, call.HV, call.K, call.V)
    _recurrence(call, prepared, final, h=h)
    # v_new has overwritten u
    return Intermediates(*prepared[:-1], h, prepared.u)  # type: ignore[arg-type]


def _prepare(call: KDACall, full: bool) -> _Prepared:
    """The part of the forward that is parallel over chunks; with `full` also what only a backward reads."""
    q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens = call.inputs
    scale, table, T, K, V, tuning = call.options.scale, call.layout.table, call.T, call.K, call.V, call.tuning
    least, most = call.block_kinds[0], call.block_kinds[-1]
    G = call.empty_per_token(K, dtype=precisions.of_sums(k.dtype))
    block_kind = call.empty(call.layout.rows, call.HV, BLOCKS, dtype=torch.int32)
    launch(decays, (call.chunks,))(
        *(g, A_log, dt_bias, G, block_kind, cu_seqlens, table, call.lower_bound, FURTHEST, T, *g.stride()[:3]),
        **call.gates,
        LEAST=least,
        MOST=most,
        num_warps=1,
    )
    attend, w, u = call.empty_per_token(SIZE), call.empty_per_token(K), call.empty_per_token(V)
    kg, qg = torch.empty_like(w), torch.empty_like(w)
    diag_scores = call.empty_per_token(dtype=torch.float32)
    lower = inverse = None
    if full:
        lower, inverse = call.empty_per_token(SIZE, dtype=torch.float32), call.empty_per_token(SIZE)
    if least == WHOLE.value:
        launch(prepare, (call.chunks,))(
            *(q, k, v, beta, G, block_kind, attend, diag_scores, lower, inverse, w, u, kg, qg, cu_seqlens, table, scale, T),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *beta.stride()),
            **call.common,
            **call.sigmoid,
            H=call.H,
            V=V,
            BK=tuning.block_k,
            BK_ROWS=tuning.prepare_rows_block_k,
            BV=tuning.block_v,
            NORMALISE=call.normalise,
            FULL=full,
            num_warps=4,
            # with its loads pipelined it was wrong on a Hopper with Triton 3.6: see docs/kernels.md
            num_stages=1,
        )
    if most != WHOLE.value:
        products = lower
        if products is None:
            # u is free until `updates`; where its rows are as long, each program overwrites only its own
            same = V * u.element_size() == SIZE * 4
            products = u.view(torch.float32) if same else call.empty_per_token(SIZE, dtype=torch.float32)
        launch(scores, (call.chunks * BLOCKS,))(
            *(q, k, G, block_kind, attend, diag_scores, products, w, kg, qg, cu_seqlens, table, scale, T),
            *(*q.stride()[:3], *k.stride()[:3]),
            **call.common,
            H=call.H,
            BK=tuning.whole_k,
            LEAST=least,
            MOST=most,
            NORMALISE=call.normalise,
            num_warps=tuning.blocks_warps,
            num_stages=1,
        )
        launch(updates, (call.chunks,))(
            *(v, beta, block_kind, products, inverse, w, u, cu_seqlens, table, T, *v.stride()[:3], *beta.stride()),
            **call.common,
            **call.sigmoid,
            V=V,
            BK=tuning.block_k,
            BV=tuning.block_v,
            FULL=full,
            num_warps=tuning.blocks_warps,
            num_stages=1,
        )
    return _Prepared(G, block_kind, attend, diag_scores, lower, inverse, w, kg, qg, u)


def _recurrence(
    call: KDACall,
    prepared: _Prepared,
    final: torch.Tensor | None,
    h: torch.Tensor | None = None,
    o: torch.Tensor | None = None,
) -> None:
    """Writes the states into h and the updates into `prepared.u`; or the outputs into o."""
    tuning, state = call.tuning, call.inputs.initial_state
    launch(states_forward, (cdiv(call.V, tuning.state_block_v) * call.layout.count * call.HV,))(
        *(prepared.qg, prepared.kg, prepared.attend, prepared.diag_scores, prepared.w, prepared.u, prepared.G),
        h,
        prepared.u,  # v_new: a program overwrites a tile of u that it alone has read
        *(o, state, final, call.inputs.cu_seqlens, call.layout.offsets, call.T),
        **call.common,
        V=call.V,
        BK=tuning.whole_k,
        BV=tuning.state_block_v,
        OUTPUTS=o is not None,
        HAS_INITIAL=state is not None,
        HAS_FINAL=final is not None,
        V_FIRST=call.options.state_v_first,
        STAGES=tuning.forward_stages if o is None else tuning.outputs_stages,
        num_warps=tuning.state_warps,
    )


def _float32_in_place_of(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Float32 memory of this shape: that of a contiguous tensor that is no longer read, if it is large enough."""
    count = math.prod(shape)
    if tensor.numel() * tensor.element_size() < 4 * count:
        return torch.empty(shape, dtype=torch.float32, device=tensor.device)
    return tensor.view(-1)[: 4 * count // tensor.element_size()].view(torch.float32).view(shape)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
