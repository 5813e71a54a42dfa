"""Chunked Kimi delta attention on a GPU: what is launched, on which memory, with which blocks.

The forward keeps only what it was given; the backward computes the rest again, with the states that the forward need not
write. Most of what it computes then overwrites what it has read for the last time, so that its peak is that of the
recomputation. With `keep` (the operation's `disable_recompute`) the forward keeps everything and nothing is overwritten.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
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
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.kernels.layout import Layout, layout_of
from fla.ops.launch.precompile import kind_of_step, launch, precompile_parallel
from fla.utils.devices import capability_of, shared_memory_of
from fla.utils.sizes import cdiv, next_power_of_2

SIZE = 64
BLOCKS = SIZE // BLOCK.value
# How far, in log decays, a step may be from the middle of its chunk, or of its block: see forward.py.
FURTHEST = 60.0


@dataclass(frozen=True)
class Settings:
    """What a call says besides its tensors. Two that differ in their scale are equal: kernels are not compiled for it.

    Attributes:
        scale: of q.
        normalise: q and k are taken to length 1.
        gate: g is raw; with `lower_bound` of the bounded kind.
        lower_bound: of the log decay of a step.
        sigmoid, double: beta is logits; and the sigmoid counts twice.
        v_first: states are `[N, HV, V, K]`.
    """

    scale: float = field(compare=False)
    normalise: bool = False
    gate: bool = False
    lower_bound: float | None = None
    sigmoid: bool = False
    double: bool = False
    v_first: bool = False


class Saved(NamedTuple):
    """What the backward needs; all tensors or None, for `save_for_backward`.

    Up to `cu_seqlens` the arguments of the call, then the chunk table, then what the forward computed and, unless it was to
    keep it, None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    table: torch.Tensor | None
    offsets: torch.Tensor | None
    G: torch.Tensor | None = None
    kinds: torch.Tensor | None = None
    attend: torch.Tensor | None = None
    selves: torch.Tensor | None = None
    lower: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    w: torch.Tensor | None = None
    kg: torch.Tensor | None = None
    qg: torch.Tensor | None = None
    h: torch.Tensor | None = None
    v_new: torch.Tensor | None = None


class Gradients(NamedTuple):
    """Of the arguments of a call, each of the argument's shape and dtype; None for those that were not given."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


class _Chunks(NamedTuple):
    """What `_chunks` computes; see the kernels that write it."""

    G: torch.Tensor
    kinds: torch.Tensor
    attend: torch.Tensor
    selves: torch.Tensor
    lower: torch.Tensor
    inverse: torch.Tensor
    w: torch.Tensor
    kg: torch.Tensor
    qg: torch.Tensor
    h: torch.Tensor
    v_new: torch.Tensor


@precompile_parallel(lambda q, k, v, g, beta, *rest, **more: kind_of_step(q, v, g, beta, *rest, *more.values()))
def chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    settings: Settings,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    keep: bool = False,
    states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, Saved, torch.Tensor | None]:
    """The operation, on inputs that have been checked: T, B and N at least 1, the last stride of q, k, v and g 1.

    Args:
        q, k: `[B, T, H, K]`. v: `[B, T, HV, V]`. g: `[B, T, HV, K]`. beta: `[B, T, HV]`.
        settings: the rest of the call.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]`; contiguous.
        output_final_state: whether the final state is wanted.
        A_log: `[HV]`. dt_bias: `[HV * K]`. Of raw gates.
        cu_seqlens: `[N + 1]` on the device.
        keep: save for the backward what it would compute again.
        states: return the state before each chunk.

    Returns:
        o `[B, T, HV, V]`, the final state (float32) or None, what `chunk_backward` wants, and the state before each chunk if
        asked for, `[rows, HV, K, V]` in k's dtype: rows of sequence n from `saved.offsets[n]`, or from n * ceil(T / 64).
    """
    layout = layout_of(q.shape[0], q.shape[1], SIZE, cu_seqlens)
    saved = Saved(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, layout.table, layout.offsets)
    final = None
    if output_final_state:
        final = v.new_empty(layout.count, v.shape[2], *_state_dims(saved, settings), dtype=torch.float32)
    o = v.new_empty(v.shape)
    K, V = k.shape[-1], v.shape[-1]
    if not (keep or states) and _stages_with_outputs(k, V) > 1:
        _recurrence(saved, settings, layout, _prepare(saved, settings, layout, full=False), final, o=o)
        return o, final, saved, None
    chunks = _chunks(saved, settings, layout, final, full=keep)
    BV = _block(V, 64)
    launch(outputs, (cdiv(V, BV) * layout.rows * v.shape[2],))(
        chunks.qg,
        chunks.attend,
        chunks.selves,
        chunks.v_new,
        chunks.h,
        o,
        cu_seqlens,
        layout.table,
        q.shape[1],
        HV=v.shape[2],
        K=K,
        V=V,
        SIZE=SIZE,
        BK=_block(K, 128 if k.element_size() == 2 else 64),
        BV=BV,
        PACKED=layout.packed,
        PRECISION=precisions.of_products(k.dtype),
    )
    return o, final, Saved(*saved[:11], *chunks) if keep else saved, chunks.h


class Within(NamedTuple):
    """What `within_chunks` computes: gradients of q and k for each value head (as normalised), of everything else whole."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None


@precompile_parallel(
    lambda saved, settings, do, d_final=None, within=None: kind_of_step(
        *(saved.q, saved.v, saved.g, saved.beta, settings, d_final, within, saved.A_log, saved.dt_bias),
        *(saved.initial_state, saved.table, saved.G),
    )
)
def chunk_backward(
    saved: Saved,
    settings: Settings,
    do: torch.Tensor,
    d_final: torch.Tensor | None = None,
    within: Callable[..., Within] | None = None,
) -> Gradients:
    """Gradients of everything the forward was given.

    Args:
        saved, settings: of `chunk_forward`.
        do: of o, in its dtype.
        d_final: of the final state, or None.
        within: computes what `within_chunks` does, by default that.
    """
    q, k, v = saved[:3]
    initial_state, cu_seqlens, table, offsets = saved[7:11]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    layout = Layout(SIZE, B, B * cdiv(T, SIZE), None, None, None)
    if cu_seqlens is not None and table is not None:
        layout = Layout(SIZE, cu_seqlens.shape[0] - 1, table.shape[0], table, offsets, cu_seqlens)
    keep = saved.G is not None
    # all of them are there, or none
    chunks = _Chunks(*saved[11:]) if keep else _chunks(saved, settings, layout, None, full=True)  # type: ignore[arg-type]
    do = do.contiguous()
    precision = precisions.of_products(k.dtype)

    du = torch.empty_like(chunks.v_new)
    dh = torch.empty_like(chunks.h)
    d_initial = None
    if initial_state is not None:
        d_initial = torch.empty_like(initial_state)
    d_final = None if d_final is None else d_final.contiguous()
    BV = _state_block(k, V)
    launch(states_backward, (cdiv(V, BV) * layout.count * HV,))(
        chunks.qg,
        chunks.kg,
        chunks.attend,
        chunks.selves,
        chunks.w,
        do,
        chunks.G,
        du,
        dh,
        d_final,
        d_initial,
        cu_seqlens,
        offsets,
        T,
        HV=HV,
        K=K,
        V=V,
        SIZE=SIZE,
        BK=_block(K, 256),
        BV=BV,
        HAS_FINAL=d_final is not None,
        HAS_INITIAL=d_initial is not None,
        V_FIRST=settings.v_first,
        PACKED=layout.packed,
        PRECISION=precision,
        STAGES=_stages(k, (3 * K + BV + SIZE) * SIZE, K * BV + 2 * SIZE * BV, 2),
        num_warps=_state_warps(k),
    )

    parts = (within or within_chunks)(saved, settings, layout, chunks, do, du, dh)
    dq, dk = parts.q, parts.k
    if HV != H or settings.normalise:
        if HV != H:
            dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        ROWS = 16
        launch(heads_backward, (cdiv(B * T * H, ROWS), 2))(
            q,
            k,
            parts.q,
            parts.k,
            dq,
            dk,
            B * T * H,
            T,
            *q.stride()[:3],
            *k.stride()[:3],
            H=H,
            GROUPS=HV // H,
            K=K,
            BK=_block(K, 256),
            ROWS=ROWS,
            NORMALISE=settings.normalise,
            num_warps=4,
        )
    return Gradients(dq, dk, *parts[2:], d_initial)


def within_chunks(
    saved: Saved, settings: Settings, layout: Layout, chunks: _Chunks, do: torch.Tensor, du: torch.Tensor, dh: torch.Tensor
) -> Within:
    """What is parallel over chunks, once the gradients of the updates and states are there.

    Args:
        saved, settings, layout: of the call. Unless `saved` has what the forward computed, `chunks` may be overwritten.
        do: of o. du: of v_new. dh: of the state after each chunk. All contiguous; the last two may be overwritten.
    """
    q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens, table, _ = saved[:11]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    programs = layout.rows * HV
    keep = saved.G is not None
    precision = precisions.of_products(k.dtype)
    narrow = k.element_size() > 2
    fresh = torch.empty_like if keep else _itself
    kinds = _kinds(settings, k.dtype)

    def parts(*shape: int) -> torch.Tensor:
        # a table has rows without a chunk, whose parts no program writes
        new = torch.zeros if layout.packed else torch.empty
        return new(layout.rows, HV, *shape, dtype=torch.float32, device=k.device)

    # `lower` is float32: room for each number in two 16-bit parts
    d_attend = fresh(chunks.lower).view(k.dtype)
    d_selves, d_lower, d_grown, dv = fresh(chunks.selves), fresh(chunks.inverse), fresh(chunks.w), du
    dbeta = torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    rq = rk = None
    if settings.normalise:
        rq, rk = (torch.empty(B, T, HV, dtype=torch.float32, device=k.device) for _ in range(2))
    BV = _block(V, 32 if narrow else 64)
    launch(pairs_backward, (programs,))(
        *(q, k, v, beta, chunks.G, chunks.lower, chunks.inverse, chunks.v_new, chunks.h, do, du),
        *(d_attend, d_selves, d_lower, d_grown, dv, dbeta, rq, rk, cu_seqlens, table, settings.scale, T),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *beta.stride()),
        H=H,
        HV=HV,
        K=K,
        V=V,
        SIZE=SIZE,
        BK=_block(K, 32 if narrow else 64),
        BV=BV,
        NORMALISE=settings.normalise,
        SIGMOID=settings.sigmoid,
        DOUBLE=settings.double,
        PACKED=layout.packed,
        PRECISION=precision,
        num_warps=4,
    )

    BK = _block(K, 32)
    kblocks = cdiv(K, BK)
    # the recurrence was the last to read these two
    dq_heads, dk_heads = fresh(chunks.qg), fresh(chunks.kg)
    dg = chunks.G if g.dtype == chunks.G.dtype and not keep else torch.empty_like(chunks.G, dtype=g.dtype)
    dA_parts = parts(kblocks) if settings.gate and A_log is not None else None
    dbias_parts = parts(K) if settings.gate and dt_bias is not None else None
    if WHOLE.value in kinds:
        launch(channels_backward, (kblocks * programs,))(
            *(q, k, g, A_log, dt_bias, chunks.G, chunks.kinds, chunks.v_new, chunks.h, dh, do),
            *(d_attend, d_selves, d_lower, d_grown, rq, rk, dq_heads, dk_heads, dg, dA_parts, dbias_parts),
            *(cu_seqlens, table, settings.scale, settings.lower_bound or 0.0, T),
            *(*q.stride()[:3], *k.stride()[:3], *g.stride()[:3]),
            **(_of_gates(saved, settings, layout) | {'BK': BK}),
            H=H,
            V=V,
            BV=BV,
            NORMALISE=settings.normalise,
            PRECISION=precision,
            num_warps=4,
        )
    if kinds[-1] != WHOLE.value:
        kept, carried = parts(K), parts(BLOCKS, K)
        wide = _block(K, 32 if narrow else 64)
        launch(products_with_states, (cdiv(K, wide) * programs,))(
            *(chunks.G, chunks.v_new, chunks.h, do, dh, chunks.kinds, dq_heads, dk_heads, kept),
            *(cu_seqlens, table, settings.scale, T),
            HV=HV,
            K=K,
            V=V,
            SIZE=SIZE,
            BK=wide,
            BV=BV,
            PACKED=layout.packed,
            PRECISION=precision,
            num_warps=4,
        )
        # the states have been read for the last time
        dG = _in_place_of(dh, (B, T, HV, K))
        launch(blocks_backward, (cdiv(K, wide) * BLOCKS * programs,))(
            *(q, k, chunks.G, chunks.kinds, d_attend, d_selves, d_lower, d_grown, dq_heads, dk_heads, rq, rk),
            *(dq_heads, dk_heads, dG, carried, cu_seqlens, table, T, *q.stride()[:3], *k.stride()[:3]),
            H=H,
            HV=HV,
            K=K,
            SIZE=SIZE,
            BK=wide,
            LEAST=kinds[0],
            MOST=kinds[-1],
            NORMALISE=settings.normalise,
            PACKED=layout.packed,
            PRECISION=precision,
            num_warps=2,
        )
        launch(gates_backward, (programs,))(
            *(g, A_log, dt_bias, dG, chunks.kinds, kept, carried, dg, dA_parts, dbias_parts, cu_seqlens, table),
            *(settings.lower_bound or 0.0, T, *g.stride()[:3]),
            **_of_gates(saved, settings, layout),
            PARTS=kblocks,
            WIDE=narrow,
            num_warps=4,
        )
    dA = None if dA_parts is None or A_log is None else dA_parts.sum((0, 2)).view(A_log.shape).to(A_log.dtype)
    dbias = None if dbias_parts is None or dt_bias is None else dbias_parts.sum(0).view(dt_bias.shape).to(dt_bias.dtype)

    return Within(dq_heads, dk_heads, dv, dg, dbeta, dA, dbias)


class _Prepared(NamedTuple):
    """What `_prepare` computes; see the kernels that write it."""

    G: torch.Tensor
    kinds: torch.Tensor
    attend: torch.Tensor
    selves: torch.Tensor
    lower: torch.Tensor | None
    inverse: torch.Tensor | None
    w: torch.Tensor
    kg: torch.Tensor
    qg: torch.Tensor
    u: torch.Tensor


def _chunks(saved: Saved, settings: Settings, layout: Layout, final: torch.Tensor | None, full: bool) -> _Chunks:
    """With the states before chunks, and with `full` all that the backward reads."""
    k, v = saved.k, saved.v
    prepared = _prepare(saved, settings, layout, full)
    h = torch.empty(layout.rows, v.shape[2], k.shape[-1], v.shape[-1], dtype=k.dtype, device=k.device)
    _recurrence(saved, settings, layout, prepared, final, h=h)
    # in which v_new has taken the place of u
    return _Chunks(*prepared[:-1], h, prepared.u)  # type: ignore[arg-type]


def _prepare(saved: Saved, settings: Settings, layout: Layout, full: bool) -> _Prepared:
    """What is parallel over chunks, with `full` also what only a backward reads."""
    q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens, table, _ = saved[:11]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    precision = precisions.of_products(k.dtype)

    def empty(width: int, dtype: torch.dtype = k.dtype) -> torch.Tensor:
        return torch.empty(B, T, HV, width, dtype=dtype, device=k.device)

    narrow = k.element_size() > 2
    possible = _kinds(settings, k.dtype)
    G = empty(K, precisions.of_sums(k.dtype))
    kinds = torch.empty(layout.rows, HV, BLOCKS, dtype=torch.int32, device=k.device)
    launch(decays, (layout.rows * HV,))(
        *(g, A_log, dt_bias, G, kinds, cu_seqlens, table, settings.lower_bound or 0.0, FURTHEST, T, *g.stride()[:3]),
        **_of_gates(saved, settings, layout),
        LEAST=possible[0],
        MOST=possible[-1],
        num_warps=1,
    )
    attend, w, u, kg, qg = (empty(width) for width in (SIZE, K, V, K, K))
    selves = torch.empty(B, T, HV, dtype=torch.float32, device=k.device)
    lower = inverse = None
    if full:
        lower, inverse = empty(SIZE, torch.float32), empty(SIZE)
    BV = _block(V, 32 if narrow else 64)
    if WHOLE.value in possible:
        launch(prepare, (layout.rows * HV,))(
            *(q, k, v, beta, G, kinds, attend, selves, lower, inverse, w, u, kg, qg),
            *(cu_seqlens, table, settings.scale, T),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *beta.stride()),
            H=H,
            HV=HV,
            K=K,
            V=V,
            SIZE=SIZE,
            BK=_block(K, 32 if narrow else 64),
            BK_ROWS=_block(K, 32 if narrow else 128),
            BV=BV,
            NORMALISE=settings.normalise,
            SIGMOID=settings.sigmoid,
            DOUBLE=settings.double,
            FULL=full,
            PACKED=layout.packed,
            PRECISION=precision,
            num_warps=4,
            # with its loads pipelined it was wrong on a Hopper with Triton 3.6: see docs/kernels.md
            num_stages=1,
        )
    if possible[-1] != WHOLE.value:
        of_chunks = lower
        if of_chunks is None:
            # where a step has as many bytes of either, what a program overwrites is its own
            same = V * u.element_size() == SIZE * 4
            of_chunks = u.view(torch.float32) if same else empty(SIZE, torch.float32)
        launch(scores, (layout.rows * HV * BLOCKS,))(
            *(q, k, G, kinds, attend, selves, of_chunks, w, kg, qg, cu_seqlens, table, settings.scale, T),
            *(*q.stride()[:3], *k.stride()[:3]),
            H=H,
            HV=HV,
            K=K,
            SIZE=SIZE,
            BK=_block(K, 256),
            LEAST=possible[0],
            MOST=possible[-1],
            NORMALISE=settings.normalise,
            PACKED=layout.packed,
            PRECISION=precision,
            num_warps=4 if narrow else 2,
            num_stages=1,
        )
        launch(updates, (layout.rows * HV,))(
            *(v, beta, kinds, of_chunks, inverse, w, u, cu_seqlens, table, T, *v.stride()[:3], *beta.stride()),
            HV=HV,
            K=K,
            V=V,
            SIZE=SIZE,
            BK=_block(K, 32 if narrow else 64),
            BV=BV,
            SIGMOID=settings.sigmoid,
            DOUBLE=settings.double,
            FULL=full,
            PACKED=layout.packed,
            PRECISION=precision,
            num_warps=4 if narrow else 2,
            num_stages=1,
        )
    return _Prepared(G, kinds, attend, selves, lower, inverse, w, kg, qg, u)


def _of_gates(saved: Saved, settings: Settings, layout: Layout) -> dict[str, Any]:
    """What kernels that read gates are compiled for."""
    K = saved.k.shape[3]
    return {
        'HV': saved.v.shape[2],
        'K': K,
        'SIZE': SIZE,
        'BK': _block(K, 256),
        'GATE': settings.gate,
        'HAS_A': settings.gate and saved.A_log is not None,
        'HAS_BIAS': settings.gate and saved.dt_bias is not None,
        'BOUNDED': settings.lower_bound is not None,
        'PACKED': layout.packed,
    }


def _kinds(settings: Settings, dtype: torch.dtype) -> tuple[int, ...]:
    """Of blocks that such a call can have, the least first: see forward.py."""
    if dtype == torch.float16:
        # has not the range for products through the middle of anything
        return (FAR.value,)
    lowest = -math.inf if not settings.gate or settings.lower_bound is None else settings.lower_bound
    if lowest >= -FURTHEST / (SIZE // 2):
        return (WHOLE.value,)
    if lowest >= -FURTHEST / (BLOCK.value // 2):
        return WHOLE.value, NEAR.value
    return WHOLE.value, NEAR.value, FAR.value


def _recurrence(
    saved: Saved,
    settings: Settings,
    layout: Layout,
    prepared: _Prepared,
    final: torch.Tensor | None,
    h: torch.Tensor | None = None,
    o: torch.Tensor | None = None,
) -> None:
    """Writes the states into h, and the updates into `prepared.u`; or outputs into o."""
    k, v, initial_state = saved.k, saved.v, saved.initial_state
    K, (HV, V) = k.shape[-1], v.shape[2:]
    BV = _state_block(k, V)
    stages = _stages(k, (2 * K + BV) * SIZE, K * BV + SIZE * BV, 3) if o is None else _stages_with_outputs(k, V)
    launch(states_forward, (cdiv(V, BV) * layout.count * HV,))(
        *(prepared.qg, prepared.kg, prepared.attend, prepared.selves, prepared.w, prepared.u, prepared.G),
        h,
        prepared.u,  # v_new: a program overwrites a tile of u that it alone has read
        *(o, initial_state, final, saved.cu_seqlens, layout.offsets, v.shape[1]),
        HV=HV,
        K=K,
        V=V,
        SIZE=SIZE,
        BK=_block(K, 256),
        BV=BV,
        OUTPUTS=o is not None,
        HAS_INITIAL=initial_state is not None,
        HAS_FINAL=final is not None,
        V_FIRST=settings.v_first,
        PACKED=layout.packed,
        PRECISION=precisions.of_products(k.dtype),
        STAGES=stages,
        num_warps=_state_warps(k),
    )


def _state_dims(saved: Saved, settings: Settings) -> tuple[int, int]:
    K, V = saved.k.shape[-1], saved.v.shape[-1]
    return (V, K) if settings.v_first else (K, V)


def _in_place_of(dead: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory for float32 of this shape: that of a contiguous tensor that is read no more, where it has enough."""
    count = math.prod(shape)
    if dead.numel() * dead.element_size() < 4 * count:
        return torch.empty(shape, dtype=torch.float32, device=dead.device)
    return dead.view(-1)[: 4 * count // dead.element_size()].view(torch.float32).view(shape)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.cache
def _block(width: int, most: int) -> int:
    """Columns of a tile: a power of two, at least 16 (for a product) and at most `most`."""
    return min(most, next_power_of_2(max(width, 16)))


def _state_block(k: torch.Tensor, V: int) -> int:
    """Value columns of one program of the recurrence, which keeps `[K, columns]` in registers."""
    small = _shared_memory(k.device) < shared_memory_of((8, 0))
    return _block(V, 32 if _wide(k) or small else 64)


def _state_warps(k: torch.Tensor) -> int:
    return 8 if _wide(k) else 4


def _wide(k: torch.Tensor) -> bool:
    """Whether a key is longer than 128 16-bit floats, for which the recurrence is tuned."""
    return _block(k.shape[-1], 256) * k.element_size() > 256


def _stages(k: torch.Tensor, per_stage: int, besides: int, most: int) -> int:
    """Chunks that the recurrence loads ahead, given elements of shared memory: `most` where they fit, as on an H200."""
    room = _shared_memory(k.device) // k.element_size() - besides
    return max(1, min(most, room // per_stage))


def _stages_with_outputs(k: torch.Tensor, V: int) -> int:
    """As `_stages` of the recurrence that also writes the outputs."""
    K, BV = k.shape[-1], _state_block(k, V)
    return _stages(k, (3 * K + BV + SIZE) * SIZE, K * BV + SIZE * BV, 3)


def _shared_memory(device: torch.device) -> int:
    """Bytes that one block may use."""
    return shared_memory_of(capability_of(device))
