"""FlashQLA: TileLang kernels for the chunked gated delta rule, by the Qwen team."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import captured, for_tma, smallest_call
from fla.ops.recurrence.arguments import count_of
from fla.utils.devices import Device, is_nvidia_sm120

DIM = 128  # K and V


class _Packing:
    """Packed sequences without the empty ones, which FlashQLA's chunk tables assign to the wrong sequence.

    `cu_seqlens` is a new tensor in each call: FlashQLA caches by identity what it derives from one, although its values may
    change.
    """

    cu_seqlens: torch.Tensor | None = None
    places: torch.Tensor | None = None  # indices of the sequences with steps, if others are empty

    def __init__(self, cu_seqlens_cpu: torch.Tensor | None, device: torch.device) -> None:
        if cu_seqlens_cpu is None:
            return
        from flash_qla.utils.index import prepare_varlen_metadata

        filled = cu_seqlens_cpu.diff() > 0
        ends = cu_seqlens_cpu[1:][filled]
        ends = torch.cat((ends.new_zeros(1), ends))
        self.cu_seqlens = prepare_varlen_metadata(ends.to(device, non_blocking=True), ends)
        if len(ends) < len(cu_seqlens_cpu):
            self.places = filled.nonzero()[:, 0].to(device, non_blocking=True)

    def without_empty(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """The states of the sequences with steps, in float32."""
        if states is None:
            return None
        states = states.float()
        return for_tma(states if self.places is None else states[self.places])

    def with_empty(
        self, states: torch.Tensor | None, before: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The states of all sequences: those without steps have their state from `before`, or zero."""
        if states is None or self.places is None or cu_seqlens_cpu is None:
            return states
        if before is None:
            result = states.new_zeros((cu_seqlens_cpu.shape[0] - 1, *states.shape[1:]))
        else:
            result = before.to(torch.float32, copy=True)
        return result.index_copy(0, self.places, states)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    scale: float,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
) -> Any:
    with on_device_of(q):
        import flash_qla

        packing = _Packing(cu_seqlens_cpu, q.device)
        cumulative, inverse, o, _, final, _ = flash_qla.chunk_gated_delta_rule_fwd(
            _normalized(q, use_qk_l2norm_in_kernel),
            _normalized(k, use_qk_l2norm_in_kernel),
            for_tma(v),
            g.float().contiguous(),  # FlashQLA sums it in its own dtype
            beta.contiguous(),
            scale=scale,
            initial_state=packing.without_empty(initial_state),
            cu_seqlens=packing.cu_seqlens,
            output_final_state=output_final_state,
            auto_cp=cu_seqlens_cpu is None,  # with sequences it would read cu_seqlens back from the device
            state_v_first=state_v_first,
        )
        return o, packing.with_empty(final, initial_state, cu_seqlens_cpu), cumulative, inverse


def _backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    scale: float,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    cumulative: torch.Tensor,
    inverse: torch.Tensor,
    do: torch.Tensor,
    dfinal_state: torch.Tensor | None,
) -> Any:
    with on_device_of(q):
        import flash_qla

        packing = _Packing(cu_seqlens_cpu, q.device)
        dq, dk, dv, dbeta, dg, dinitial = flash_qla.chunk_gated_delta_rule_bwd(
            _normalized(q, use_qk_l2norm_in_kernel),
            _normalized(k, use_qk_l2norm_in_kernel),
            for_tma(v),
            cumulative,
            beta.contiguous(),
            inverse,
            for_tma(do),
            dht=packing.without_empty(dfinal_state),
            scale=scale,
            initial_state=packing.without_empty(initial_state),
            cu_seqlens=packing.cu_seqlens,
            auto_cp=cu_seqlens_cpu is None,
            state_v_first=state_v_first,
        )
        if use_qk_l2norm_in_kernel:
            dq, dk = _normalized_backward(q, dq), _normalized_backward(k, dk)
        dinitial = packing.with_empty(dinitial, dfinal_state, cu_seqlens_cpu)
        if initial_state is None or dinitial is None:
            return dq, dk, dv, dg.to(g.dtype), dbeta.to(beta.dtype), None
        return dq, dk, dv, dg.to(g.dtype), dbeta.to(beta.dtype), dinitial.to(initial_state.dtype)


def _normalized(x: torch.Tensor, use_qk_l2norm_in_kernel: bool) -> torch.Tensor:
    if not use_qk_l2norm_in_kernel:
        return for_tma(x)
    from fla.ops.recurrence.kernels.l2norm import normalized

    return normalized(x.contiguous())


def _normalized_backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    from fla.ops.recurrence.kernels.l2norm import normalized_backward

    return normalized_backward(x.contiguous(), dy.contiguous())


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    scale: float,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
) -> Any:
    batch, length, heads = v.shape[:3]
    count = count_of(q, cu_seqlens_cpu)
    final = q.new_empty((count, heads, DIM, DIM), dtype=torch.float32) if output_final_state else None
    chunk = 32 if is_nvidia_sm120(q.device) else 64
    cumulative = q.new_empty((batch, length, heads), dtype=torch.float32)
    return v.new_empty(v.shape), final, cumulative, q.new_empty((batch, length, heads, chunk))


_chunk = opaque(
    'fla::flash_qla',
    schema=(
        '(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens_cpu, float scale, '
        'bool output_final_state, bool use_qk_l2norm_in_kernel, bool state_v_first) '
        '-> (Tensor o, Tensor? final_state, Tensor cumulative, Tensor inverse)'
    ),
    forward=_forward,
    fake=_fake,
    backward=_backward,
    grads=('q', 'k', 'v', 'g', 'beta', 'initial_state'),
    intermediates=('cumulative', 'inverse'),
)


class FlashQLABackend(BaseBackend):
    """`chunk_gated_delta_rule`, forward and backward, on Hopper and Blackwell: bfloat16 or float16, K = V = 128, gates and
    beta computed by the caller. Our own kernel normalises q and k, because FlashQLA would compile one with Inductor.

    FlashQLA makes its chunk tables on the host. Packed sequences therefore need `cu_seqlens_cpu`: reading `cu_seqlens` back
    would synchronise on every call. A CUDA graph capture allows no copy of the tables: there packed sequences are refused.
    """

    backend_type = 'flash_qla'
    package_name = 'flash_qla'
    package_version = 'flash-qla>=0.1.3,<0.2'
    env_var = 'FLA_FLASH_QLA'
    # verified on an H200 with 0.1.3, and with backward faster than the default; but its first call compiles for most of a
    # minute
    default_enable = False
    priority = 3
    vendor = 'qwen'
    devices = ('cuda',)
    min_capability = (9, 0)
    dtypes = (torch.bfloat16, torch.float16)
    grad = 'backward'
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
    verified = True

    def probe(self, device: Device) -> Verdict:
        # its import raises without a GPU or without nvcc
        return smallest_call(device, _one_chunk, 0.5)

    def chunk_gated_delta_rule_verifier(
        self,
        q: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        cu_seqlens: torch.Tensor | None,
        cu_seqlens_cpu: torch.Tensor | None,
    ) -> Verdict:
        if scale == 0:
            return False, 'FlashQLA takes scale=0 for no scale'
        if cu_seqlens is not None and cu_seqlens_cpu is None:
            return False, 'FlashQLA lays chunks out on the host: cu_seqlens needs cu_seqlens_cpu beside it'
        if cu_seqlens is not None and captured():
            return False, 'FlashQLA copies what it makes of cu_seqlens_cpu to the GPU, which a CUDA graph capture refuses'
        if q.shape[3] != DIM or v.shape[3] != DIM:
            return False, ('K and V must be 128, got %s and %s', q.shape[3], v.shape[3])
        if v.numel() == 0:
            return False, 'there are no steps, and the kernels cannot be launched on nothing'
        if v.numel() >= 2**29:
            # the states before each chunk of 32 steps, which the backward saves, have four times as many elements as v
            return False, ('the kernels count in 32 bits: v must have fewer than 2^29 elements, got %s', v.numel())
        return True, None

    def chunk_gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        # lint: allow ignored-argument because it follows from cu_seqlens
        chunk_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, final = _chunk(
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            cu_seqlens_cpu,
            DIM**-0.5 if scale is None else scale,
            output_final_state,
            use_qk_l2norm_in_kernel,
            state_v_first,
        )
        return o, final


def _one_chunk(device: torch.device) -> torch.Tensor:
    """q, k and v of ones, without decay and from an empty state: the first o is beta v = 0.5."""
    ones = torch.ones(1, 64, 1, DIM, dtype=torch.bfloat16, device=device)
    gate = torch.zeros(1, 64, 1, device=device)
    o: torch.Tensor = _forward(ones, ones, ones, gate, gate + 0.5, None, None, 1.0, False, True, False)[0]
    return o[:, 0]
