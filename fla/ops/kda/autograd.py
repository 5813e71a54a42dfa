"""The Triton default of Kimi delta attention: its kernels as differentiable functions that compiled code can call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fla.opaque import opaque
from fla.ops.kda.kernels.launch import BLOCKS, SIZE, Saved, Settings, Within, chunk_backward, chunk_forward, within_chunks
from fla.ops.launch.kernels import precision as precisions
from fla.ops.launch.kernels.layout import layout_of
from fla.ops.launch.ptxas_workaround import avoid_wgmma_if_unsafe
from fla.ops.launch.triton_call import DEVICES, flat, in_rows, no_steps, on_device_of, resolve_neg
from fla.ops.recurrence.kernels.decode import decode

_TENSORS = (
    'Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, '
    'Tensor? cu_seqlens'
)
_FLAGS = (
    'float scale, bool output_final_state, bool l2norm, bool gate, float? lower_bound, bool sigmoid, bool double, '
    'bool v_first, bool keep, bool states'
)
_KEPT = ('G', 'kinds', 'attend', 'selves', 'lower', 'inverse', 'w', 'kg', 'qg', 'h', 'v_new')


def _forward(
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
    lower_bound: float | None,
    sigmoid: bool,
    double: bool,
    v_first: bool,
    keep: bool,
    states: bool,
) -> Any:
    settings = Settings(scale, l2norm, gate, lower_bound, sigmoid, double, v_first)
    q, k, v, g = (in_rows(x) for x in (q, k, v, g))
    beta, state = resolve_neg(beta), resolve_neg(initial_state)
    state = None if state is None else state.contiguous()
    with on_device_of(q), avoid_wgmma_if_unsafe(k, v):
        o, final, saved, h = chunk_forward(
            *(q, k, v, g, beta, settings, state, output_final_state),
            *(flat(A_log), flat(dt_bias), flat(cu_seqlens), keep, states),
        )
    kept = saved[11:] if keep else (None,) * len(_KEPT)
    if h is not None and keep:
        h = h.clone()
    return o, final, h if states else None, *kept


def _fake(
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
    lower_bound: float | None,
    sigmoid: bool,
    double: bool,
    v_first: bool,
    keep: bool,
    states: bool,
) -> Any:
    batch, length, _, dim = q.shape
    heads, value_dim = v.shape[2:]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    per_sequence = -(-length // SIZE)
    rows = batch * per_sequence if cu_seqlens is None else per_sequence + count
    final = None
    if output_final_state:
        dims = (value_dim, dim) if v_first else (dim, value_dim)
        final = v.new_empty((count, heads, *dims), dtype=torch.float32)
    h = q.new_empty((rows, heads, dim, value_dim))
    kept: tuple[torch.Tensor | None, ...] = (None,) * len(_KEPT)
    if keep:
        token = (batch, length, heads)
        kept = (
            q.new_empty((*token, dim), dtype=precisions.of_sums(q.dtype)),
            q.new_empty((rows, heads, BLOCKS), dtype=torch.int32),
            q.new_empty((*token, SIZE)),
            q.new_empty(token, dtype=torch.float32),
            q.new_empty((*token, SIZE), dtype=torch.float32),
            q.new_empty((*token, SIZE)),
            q.new_empty((*token, dim)),
            q.new_empty((*token, dim)),
            q.new_empty((*token, dim)),
            h.new_empty(h.shape),
            v.new_empty((*token, value_dim)),
        )
    return v.new_empty(v.shape), final, h if states else None, *kept


def backward_with(within: Callable[..., Within]) -> Callable[..., Any]:
    """The backward with another implementation of `within_chunks`."""

    def _backward(
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
        l2norm: bool,
        gate: bool,
        lower_bound: float | None,
        sigmoid: bool,
        double: bool,
        v_first: bool,
        G: torch.Tensor | None,
        kinds: torch.Tensor | None,
        attend: torch.Tensor | None,
        selves: torch.Tensor | None,
        lower: torch.Tensor | None,
        inverse: torch.Tensor | None,
        w: torch.Tensor | None,
        kg: torch.Tensor | None,
        qg: torch.Tensor | None,
        h: torch.Tensor | None,
        v_new: torch.Tensor | None,
        do: torch.Tensor,
        dfinal_state: torch.Tensor | None,
    ) -> Any:
        settings = Settings(scale, l2norm, gate, lower_bound, sigmoid, double, v_first)
        q, k, v, g = (in_rows(x) for x in (q, k, v, g))
        beta, state, do, dfinal_state = (resolve_neg(x) for x in (beta, initial_state, do, dfinal_state))
        state = None if state is None else state.contiguous()
        with on_device_of(q), avoid_wgmma_if_unsafe(k, v):
            ends = flat(cu_seqlens)
            layout = layout_of(q.shape[0], q.shape[1], SIZE, ends)
            kept = (G, kinds, attend, selves, lower, inverse, w, kg, qg, h, v_new)
            saved = Saved(q, k, v, g, beta, flat(A_log), flat(dt_bias), state, ends, layout.table, layout.offsets, *kept)
            final = None if dfinal_state is None else dfinal_state.contiguous()
            gradients = chunk_backward(saved, settings, do.contiguous(), final, within=within)
        d_A_log = None if A_log is None or gradients.A_log is None else gradients.A_log.reshape(A_log.shape)
        d_dt_bias = None if dt_bias is None or gradients.dt_bias is None else gradients.dt_bias.reshape(dt_bias.shape)
        return (*gradients[:5], d_A_log, d_dt_bias, gradients.initial_state)

    return _backward


SCHEMA = (
    f'({_TENSORS}, {_FLAGS}) -> (Tensor o, Tensor? final_state, Tensor? intermediate, '
    f'{", ".join(f"Tensor? {name}" for name in _KEPT)})'
)

_chunk = opaque(
    'fla::chunk_kda',
    schema=SCHEMA,
    forward=_forward,
    fake=_fake,
    backward=backward_with(within_chunks),
    grads=('q', 'k', 'v', 'g', 'beta', 'A_log', 'dt_bias', 'initial_state'),
    intermediates=_KEPT,
    non_differentiable=('intermediate',),
    devices=DEVICES,
)


def chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    disable_recompute: bool,
    return_intermediate_states: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    kernel: Callable[..., Any] = _chunk,
) -> Any:
    """`chunk_kda` on Triton; or by another `kernel` that takes and returns the same."""
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if q.shape[1] == 0 or count == 0:
        o, final = no_steps(q, v, count, initial_state, output_final_state, state_v_first)
        dims = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
        none = v.new_empty((q.shape[0], 0, v.shape[2], *dims), dtype=torch.float32)
        return (o, final, none) if return_intermediate_states else (o, final)
    o, final, h = kernel(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        float(lower_bound) if use_gate_in_kernel and lower_bound is not None else None,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        disable_recompute,
        return_intermediate_states,
    )
    if not return_intermediate_states:
        return o, final
    if cu_seqlens_cpu is not None:
        chunks = int((-(-cu_seqlens_cpu.diff() // SIZE)).sum())
        h = h[:chunks][None]
    else:
        h = h.unflatten(0, (q.shape[0], -1))
    return o, final, (h.transpose(-1, -2) if state_v_first else h).float()


def fused_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fused_recurrent_kda` on Triton. Its kernel has no gradient: the chunked form, which computes the same, serves a call
    that needs one."""
    given = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        o, final = chunk(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            lower_bound=lower_bound,
            disable_recompute=False,
            return_intermediate_states=False,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=None,
            A_log=A_log,
            dt_bias=dt_bias,
        )
        return o, final
    return decode(
        q,
        k,
        v,
        None,
        g,
        None,
        beta,
        flat(A_log),
        flat(dt_bias),
        initial_state,
        cu_seqlens,
        scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound if use_gate_in_kernel else None,
        state_v_first=state_v_first,
    )
