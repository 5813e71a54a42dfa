"""The TileLang forward of the gated delta rule with the Triton backward, which starts from the same saved tensors."""

from __future__ import annotations

from typing import Any

import torch

from fla.opaque import opaque
from fla.ops.gated_delta_rule import autograd
from fla.ops.gated_delta_rule.backends.tilelang import kernels
from fla.ops.launch.kernels.layout import Layout, layout_of
from fla.ops.launch.tilelang_call import Recipe, kernels_of, name_of
from fla.ops.launch.triton_call import DEVICES, flat, on_device_of
from fla.ops.launch.vendor import for_tma


def _recipes(
    q: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    indices: torch.Tensor,
    packed: bool,
    output_final_state: bool,
    flags: tuple[bool, bool, bool, bool],
    v_first: bool,
) -> tuple[Recipe, Recipe]:
    """What the code of the two kernels depends on."""
    K, V, dtype, index = q.shape[3], v.shape[3], name_of(q.dtype), name_of(indices.dtype)
    state = 'float32' if initial_state is None else name_of(initial_state.dtype)
    has_initial = initial_state is not None
    # without a state its layout is nothing that the code depends on
    v_first = v_first and (has_initial or output_final_state)
    return (
        (kernels.prepare, (K, dtype, name_of(g.dtype), name_of(beta.dtype), index, packed, *flags)),
        (kernels.scan, (K, V, dtype, state, index, packed, has_initial, output_final_state, v_first)),
    )


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
    scale: float,
    output_final_state: bool,
    l2norm: bool,
    gate: bool,
    sigmoid: bool,
    double: bool,
    v_first: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """o, the final state or None, and what the backward starts from: see `fla.ops.gated_delta_rule.kernels.launch`."""
    batch, length, groups, dim_k = q.shape
    heads, dim_v = v.shape[2:]
    tokens = batch * length
    cu_seqlens = flat(cu_seqlens)
    layout: Layout = layout_of(batch, length, kernels.CHUNK, cu_seqlens)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    G = empty(batch, length, heads)
    inverse = empty(batch, length, heads, kernels.CHUNK, dtype=q.dtype)
    attend = empty(tokens, heads, kernels.CHUNK, dtype=q.dtype)
    factors = empty(layout.rows, heads, kernels.FACTORS, kernels.CHUNK)
    o = empty(*v.shape, dtype=v.dtype)
    final = None
    if output_final_state:
        final = empty(layout.count, heads, *((dim_v, dim_k) if v_first else (dim_k, dim_v)))
    # stands for tensors that the compiled code does not read
    unread = empty(2, dtype=torch.int32)
    indices = unread if cu_seqlens is None else cu_seqlens
    flags = (l2norm, gate, sigmoid, sigmoid and double)
    prepare, scan = kernels_of(
        *_recipes(q, v, g, beta, initial_state, indices, layout.packed, output_final_state, flags, v_first)
    )
    q, k = (for_tma(x).view(tokens, groups, dim_k) for x in (q, k))
    v = for_tma(v).view(tokens, heads, dim_v)
    some = factors.view(-1)[:heads]
    prepare(
        *(q, k, g.contiguous().view(tokens, heads), beta.contiguous().view(tokens, heads)),
        some if A_log is None or not gate else A_log.float().reshape(-1).contiguous(),
        # without a bias the code adds 0
        (some if not gate else torch.zeros_like(some)) if dt_bias is None else dt_bias.float().reshape(-1).contiguous(),
        *(indices, unread.view(1, 2) if layout.table is None else layout.table),
        *(G.view(tokens, heads), inverse.view(tokens, heads, -1), attend, factors, length, heads // groups, scale),
    )
    scan(
        *(q, k, v, inverse.view(tokens, heads, -1), attend, factors),
        some if initial_state is None else initial_state.contiguous().view(-1),
        some if final is None else final.view(-1),
        *(indices, unread if layout.offsets is None else layout.offsets),
        *(o.view(tokens, heads, dim_v), layout.count, length, heads // groups),
    )
    return o, final, G, inverse


def _forward(q: torch.Tensor, *others: Any) -> Any:
    with on_device_of(q):
        return chunk_forward(q, *others)


chunk = opaque(
    'fla::tilelang_gated_delta_rule',
    schema=f'({autograd._TENSORS}, {autograd._FLAGS}) -> (Tensor o, Tensor? final_state, Tensor G, Tensor inverse)',
    forward=_forward,
    fake=autograd._fake,
    backward=autograd._backward,
    grads=('q', 'k', 'v', 'g', 'beta', 'A_log', 'dt_bias', 'initial_state'),
    intermediates=('G', 'inverse'),
    devices=DEVICES,
)
