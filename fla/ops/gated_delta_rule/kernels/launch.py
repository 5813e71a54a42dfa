"""The kernels of the chunked gated delta rule in their order, forward and backward: what an autograd function calls.

The forward leaves, beside its inputs, the running log decay G and `inverse`, which is the inverse of each chunk's system
less the ones on its diagonal: `[B, T, HV]`, wide, and `[B, T, HV, 64]` in v's dtype. The backward starts from those and
repeats the states.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fla.ops.gated_delta_rule.kernels.backward import inter_chunk_bwd, intra_chunk_bwd, scores
from fla.ops.gated_delta_rule.kernels.forward import outputs, prepare
from fla.ops.gated_delta_rule.kernels.gates import gates_backward
from fla.ops.gated_delta_rule.kernels.heads import heads_backward
from fla.ops.gated_delta_rule.kernels.states import states_forward
from fla.ops.gated_delta_rule.kernels.states_backward import states_backward
from fla.ops.gated_delta_rule.kernels.turns import programs_of, turns_of
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.kernels.layout import Layout, layout_of
from fla.ops.launch.precompile import is_dry_run, kind_of_step, launch, precompile_parallel
from fla.ops.launch.ptxas_workaround import launch_options
from fla.ops.launch.triton_call import contiguous_rows_int32
from fla.utils.devices import capability_of, multiprocessors_of, shared_memory_of
from fla.utils.sizes import cdiv, next_power_of_2

CHUNK = 64


@dataclass(frozen=True)
class Options:
    """What a call asks for beside its tensors; by the names of `chunk_gated_delta_rule`. Two that differ in their scale are
    equal: kernels are not compiled for it."""

    scale: float = field(compare=False)
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False


class Gradients(NamedTuple):
    """Of each tensor argument, in its dtype and shape; None of those that were not given."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


def _kind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *rest: Any,
) -> Hashable:
    """What the kernels are compiled for."""
    turns = _rule(q, q.shape[3], v.shape[3]).turns(v, cu_seqlens is not None)
    return (*kind_of_step(q, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *rest), turns)


@precompile_parallel(_kind)
def chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    options: Options,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The forward, of checked arguments, on the current device and stream.

    Args:
        q, k `[B, T, H, K]`, v `[B, T, HV, V]`: of one dtype, any strides. g, beta `[B, T, HV]`.
        A_log, dt_bias: `[HV]`, read with `use_gate_in_kernel`; dt_bias may be None.
        initial_state: `[N, HV, K, V]` or, `state_v_first`, `[N, HV, V, K]`, or None.

    Returns:
        o, contiguous, in v's dtype; the final state in float32 or None; G and inverse for the backward.
    """
    q, k, v = (contiguous_rows_int32(x, CHUNK) for x in (q, k, v))
    batch, length, _, dim_k = q.shape
    heads, dim_v = v.shape[2:]
    layout = layout_of(batch, length, CHUNK, cu_seqlens)
    common = _common(q, v, layout)
    rule = _rule(q, dim_k, dim_v)
    normalise = options.use_qk_l2norm_in_kernel
    G = _empty(q, batch, length, heads, dtype=precisions.of_sums(q.dtype))
    inverse = _empty(q, batch, length, heads, CHUNK)
    attend = _empty(q, batch, length, heads, CHUNK) if rule.outputs_with_states else None
    selves = None if attend is None else _empty(q, batch, length, heads, dtype=torch.float32)
    beta32 = torch.empty_like(G, dtype=torch.float32)
    rq = rk = G  # not read
    if normalise:
        rk = torch.empty_like(G, dtype=torch.float32)
        rq = rk if attend is None else torch.empty_like(rk)
    chunks = layout.rows * heads
    launch(prepare, (chunks,))(
        *(q, k, g, beta, A_log, dt_bias, G, beta32, rq, rk, attend, selves, inverse),
        *(cu_seqlens, layout.table, options.scale, length),
        *(*q.stride()[:3], *k.stride()[:3], *g.stride(), *beta.stride()),
        **common,
        BK=rule.block_k,
        NORMALISE=normalise,
        GATE=options.use_gate_in_kernel,
        HAS_BIAS=dt_bias is not None,
        SIGMOID=options.use_beta_sigmoid_in_kernel,
        DOUBLE=options.allow_neg_eigval,
        ATTEND=attend is not None,
        INVERSE_PRECISION=common['PRECISION'],
        num_warps=rule.warps,
        **rule.of_prepare,
    )
    o = _empty(v, batch, length, heads, dim_v)
    h, v_new, final = _states(
        *(q, k, v, beta32, attend, selves, inverse, G, rq, rk, o, initial_state, cu_seqlens, layout),
        *(options, output_final_state, common, rule),
    )
    if attend is None:
        launch(outputs, (cdiv(dim_v, rule.output_block_v) * chunks,))(
            *(q, k, v_new, G, rk, h, o, cu_seqlens, layout.table, options.scale, length),
            *(*q.stride()[:3], *k.stride()[:3]),
            **common,
            V=dim_v,
            BK=rule.block_k,
            BV=rule.output_block_v,
            NORMALISE=normalise,
            num_warps=rule.warps,
            num_stages=rule.stages,
        )
    return o, final, G, inverse


@precompile_parallel(_kind)
def chunk_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    G: torch.Tensor,
    inverse: torch.Tensor,
    do: torch.Tensor,
    d_final: torch.Tensor | None,
    options: Options,
) -> Gradients:
    """The gradients, from the arguments and the last two results of `chunk_forward`.

    Args:
        do: of o, any strides.
        d_final: of the final state, or None for 0.
    """
    q, k, v = (contiguous_rows_int32(x, CHUNK) for x in (q, k, v))
    do = do.contiguous()
    batch, length, groups, dim_k = q.shape
    heads, dim_v = v.shape[2:]
    layout = layout_of(batch, length, CHUNK, cu_seqlens)
    common = _common(q, v, layout)
    rule = _rule(q, dim_k, dim_v)
    normalise = options.use_qk_l2norm_in_kernel
    of_beta = {'SIGMOID': options.use_beta_sigmoid_in_kernel, 'DOUBLE': options.allow_neg_eigval}
    strides_qk = (*q.stride()[:3], *k.stride()[:3])
    chunks = layout.rows * heads
    rq, rk = None, G  # not read
    if normalise:
        rq, rk = (_empty(q, batch, length, heads, dtype=torch.float32) for _ in range(2))
    attend = torch.empty_like(inverse)
    selves, beta32 = (_empty(q, batch, length, heads, dtype=torch.float32) for _ in range(2))
    launch(scores, (chunks,))(
        *(q, k, beta, G, beta32, rq, rk, attend, selves, cu_seqlens, layout.table, options.scale, length),
        *(*strides_qk, *beta.stride()),
        **common,
        **of_beta,
        BK=rule.block_k,
        NORMALISE=normalise,
        num_warps=rule.warps,
        num_stages=rule.stages,
    )
    h, v_new, _ = _states(
        *(q, k, v, beta32, None, None, inverse, G, rq, rk, None, initial_state, cu_seqlens, layout),
        *(options, False, common, rule),
    )
    assert h is not None
    assert v_new is not None
    D, dv = _empty(k, batch, length, heads, dim_v), _empty(v, batch, length, heads, dim_v)
    dh = torch.empty_like(h)
    d_initial = None if initial_state is None else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    d_final = None if d_final is None else d_final.contiguous()
    blocks, sequences = cdiv(dim_v, rule.backward_block_v), layout.count * heads
    turns = rule.turns(v, layout.packed)
    carried = None if turns == 1 else _empty(k, sequences, dim_k, dim_v, dtype=torch.float32)
    for turn in range(1 if is_dry_run() else turns):
        launch(states_backward, (programs_of(sequences, blocks, turns),))(
            *(q, k, beta32, attend, selves, inverse, do, G, rq, rk, D, dh, d_final, d_initial, carried),
            *(cu_seqlens, layout.offsets, options.scale, length, sequences, turn, *strides_qk),
            **common,
            V=dim_v,
            BK=rule.whole_k,
            BV=rule.backward_block_v,
            NORMALISED=normalise,
            HAS_FINAL=d_final is not None,
            HAS_INITIAL=initial_state is not None,
            V_FIRST=options.state_v_first,
            TURNS=turns,
            STAGES=rule.backward_stages,
            num_warps=rule.state_warps,
        )
    # `states_backward` was the last to read the scores
    from_q, from_k = attend, torch.empty_like(inverse)
    shares = 1 + cdiv(dim_k, rule.block_k)
    d_G, d_beta = (_empty(q, shares, batch, length, heads, dtype=torch.float32) for _ in range(2))
    launch(intra_chunk_bwd, (chunks,))(
        *(q, k, v, beta, do, G, rq, rk, v_new, D, dv, from_q, from_k, d_G, d_beta),
        *(cu_seqlens, layout.table, options.scale, length),
        *(*strides_qk, *v.stride()[:3], *beta.stride()),
        **common,
        **of_beta,
        **rule.of_within,
        V=dim_v,
        NORMALISE=normalise,
        num_warps=rule.warps,
    )
    dq_each, dk_each = (_empty(q, batch, length, heads, dim_k) for _ in range(2))
    launch(inter_chunk_bwd, ((shares - 1) * chunks,))(
        *(q, k, beta, do, G, rq, rk, v_new, D, h, dh, from_q, from_k, dq_each, dk_each, d_G, d_beta),
        *(cu_seqlens, layout.table, options.scale, length, batch * length, *strides_qk, *beta.stride()),
        **common,
        **of_beta,
        V=dim_v,
        BK=rule.block_k,
        BV=rule.block_v,
        NORMALISE=normalise,
        num_warps=rule.warps,
        num_stages=rule.through_stages,
    )
    dg = _empty(g, batch, length, heads, dtype=torch.float32 if options.use_gate_in_kernel else g.dtype)
    dbeta = _empty(beta, batch, length, heads)
    dA = torch.empty_like(dg) if options.use_gate_in_kernel else None
    if dA is not None and layout.packed:
        # sums go over steps of no sequence as well, of which there are none but in lengths that nobody has checked
        dg.zero_()
        dA.zero_()
    launch(gates_backward, (chunks,))(
        *(g, beta, A_log, dt_bias, d_G, d_beta, dg, dbeta, dA, cu_seqlens, layout.table, length, batch * length),
        *(*g.stride(), *beta.stride()),
        **of_beta,
        SHARES=shares,
        HV=heads,
        SIZE=CHUNK,
        GATE=options.use_gate_in_kernel,
        HAS_BIAS=dt_bias is not None,
        PACKED=layout.packed,
        num_warps=2,
    )
    dq, dk = dq_each, dk_each
    if normalise or groups != heads:
        if groups != heads:
            dq, dk = (_empty(q, batch, length, groups, dim_k) for _ in range(2))
        launch(heads_backward, (layout.rows * groups,))(
            *(q, k, dq_each, dk_each, dq, dk, cu_seqlens, layout.table, length, *strides_qk),
            H=groups,
            HV=heads,
            K=dim_k,
            SIZE=CHUNK,
            BK=rule.block_k,
            NORMALISE=normalise,
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta32: torch.Tensor,
    attend: torch.Tensor | None,
    selves: torch.Tensor | None,
    inverse: torch.Tensor,
    G: torch.Tensor,
    rq: torch.Tensor | None,
    rk: torch.Tensor,
    o: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    layout: Layout,
    options: Options,
    output_final_state: bool,
    common: dict[str, Any],
    rule: _Rule,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """States before each chunk `[rows, HV, K, V]`, U' `[B, T, HV, V]` and the final state. With `attend` o is written, and
    not the first two."""
    batch, length, heads, dim_v = v.shape
    dim_k = k.shape[-1]
    h = v_new = final = None
    if attend is None:
        h = _empty(k, layout.rows, heads, dim_k, dim_v)
        v_new = _empty(k, batch, length, heads, dim_v)
    if output_final_state:
        shape = (dim_v, dim_k) if options.state_v_first else (dim_k, dim_v)
        final = _empty(k, layout.count, heads, *shape, dtype=torch.float32)
    initial_state = None if initial_state is None else initial_state.contiguous()
    blocks, sequences = cdiv(dim_v, rule.state_block_v), layout.count * heads
    turns = rule.turns(v, layout.packed, attend is not None)
    carried = None if turns == 1 else _empty(k, sequences, dim_k, dim_v, dtype=torch.float32)
    for turn in range(1 if is_dry_run() else turns):
        launch(states_forward, (programs_of(sequences, blocks, turns),))(
            *(q, k, v, beta32, attend, selves, inverse, G, rq, rk, h, v_new, o, initial_state, final, carried),
            *(cu_seqlens, layout.offsets, options.scale, length, sequences, turn),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            **common,
            V=dim_v,
            BK=rule.whole_k,
            BV=rule.state_block_v,
            NORMALISED=options.use_qk_l2norm_in_kernel,
            OUTPUTS=attend is not None,
            HAS_INITIAL=initial_state is not None,
            HAS_FINAL=output_final_state,
            V_FIRST=options.state_v_first,
            TURNS=turns,
            STAGES=rule.state_stages if attend is None else rule.outputs_stages,
            num_warps=rule.state_warps,
        )
    return h, v_new, final


def _rule(x: torch.Tensor, dim_k: int, dim_v: int) -> _Rule:
    """Of this call, which differs little from the one before: all that it takes is asked on each."""
    return _rule_of(capability_of(x.device), x.element_size() > 2, not launch_options(), dim_k, dim_v)


def _width(dim: int) -> int:
    """Of a tile: 16 at least, for products."""
    return next_power_of_2(max(dim, 16))


class _Rule:
    """Block sizes, warps and stages.

    Measured on an H200 (torch 2.11, Triton 3.6) at K = V = 128 in bf16; elsewhere chosen to fit and to spill little.
    """

    def __init__(self, capability: tuple[int, int] | None, wide: bool, wgmma: bool, dim_k: int, dim_v: int) -> None:
        """wide: products are in fp32, so three, which take three times the registers."""
        major = capability[0] if capability else 0
        small = shared_memory_of(capability) < shared_memory_of((8, 0))
        block = 32 if wide else 64
        self.block_k = min(block, _width(dim_k))
        self.block_v = min(block, _width(dim_v))
        self.output_block_v = min(64 if wide or small else 128, _width(dim_v))
        self.warps = 8 if wide else 4
        hopper, few = major in (9, 10), wide or small
        self.stages = 1 if few else 3
        # A third program fits a multiprocessor. Elsewhere such a limit could cost more than that brings.
        self.of_prepare = {'maxnreg': 168} if major == 9 and not wide else {}
        # With a third stage only one program fits a multiprocessor of a Hopper, and more is spilled where there is no wgmma.
        self.through_stages = 1 if few else 2
        self.of_within = {'BK': self.block_k, 'BV': self.block_v, 'num_stages': self.stages}
        if major == 9 and not wide and wgmma:
            # Products are asynchronous, and tiles are used outside of them too: none may be loaded ahead (docs/kernels.md).
            block_v = 64 if dim_v > 128 else _width(dim_v)
            self.of_within = {'BK': min(128, _width(dim_k)), 'BV': block_v, 'num_stages': 1}
        # A program of the recurrences keeps [whole_k, block] in registers and 64 steps of each operand in shared memory.
        self.whole_k = _width(dim_k)
        large = few or self.whole_k > 128
        self.state_block_v = min(32 if large else 64, self.block_v)
        self.state_stages = 1 if large else 3
        # with the outputs a stage is 57 KiB
        self.outputs_with_states = not large
        self.outputs_stages = 3 if hopper else 2
        # With so many stages a program that writes outputs fills a multiprocessor, but with small blocks. Rows that are no
        # multiple of 32 bytes are not loaded ahead.
        self.alone = hopper and not large and self.whole_k > 32 and self.state_block_v > 16 and dim_k % 16 == 0
        self.state_warps = 8 if self.whole_k > (64 if wide else 128) else 4
        self.backward_block_v = min(32 if large or major < 9 else 64, self.block_v)
        self.backward_stages = 1 if large else 3 if hopper else 2

    def turns(self, v: torch.Tensor, packed: bool, outputs: bool = True) -> int:
        """Of the recurrences. Of the one that writes states, and no `outputs`, a multiprocessor holds two programs; but of
        the largest blocks they take 1.7 times as long there as one (0.44 ms, and 0.38 in three turns of two thirds, so 0.25:
        H200), which is more than turns take."""
        if packed or not self.alone or not (outputs or (self.whole_k == 128 and self.state_block_v == 64)):
            return 1
        batch, length, heads, dim_v = v.shape
        blocks, chunks = -(-dim_v // self.state_block_v), -(-length // CHUNK)
        return turns_of(batch * heads, blocks, chunks, multiprocessors_of(v.device))


_rule_of = functools.cache(_Rule)


def _common(q: torch.Tensor, v: torch.Tensor, layout: Layout) -> dict[str, Any]:
    """The arguments that all large kernels share."""
    return {
        'H': q.shape[2],
        'HV': v.shape[2],
        'K': q.shape[3],
        'SIZE': layout.size,
        'PACKED': layout.packed,
        'PRECISION': precisions.of_products(q.dtype),
    }


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
