"""FlashKDA: CUTLASS kernels for the forward pass of chunked KDA, by Moonshot AI."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.opaque import opaque
from fla.ops.launch.triton_call import on_device_of
from fla.ops.launch.vendor import for_tma, ordered, smallest_call
from fla.ops.recurrence.arguments import count_of
from fla.utils.devices import Device

DIM = 128  # K and V
LOWEST_BOUND = -5.0  # of log decays: the kernel computes e^{-x} of their sum over a chunk of 16 steps


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
    lower_bound: float,
    output_final_state: bool,
    state_v_first: bool,
) -> Any:
    import flash_kda

    heads = q.shape[2]
    with on_device_of(q):
        v = for_tma(v)
        o = torch.empty_like(v)
        rate = q.new_zeros(heads) if A_log is None else A_log
        bias = q.new_zeros(heads * DIM) if dt_bias is None else dt_bias
        initial = final = ends = None
        if initial_state is not None:
            initial = for_tma((initial_state if state_v_first else initial_state.transpose(-1, -2)).float())
        if output_final_state:
            final = q.new_empty((count_of(q, cu_seqlens), heads, DIM, DIM), dtype=torch.float32)
        if cu_seqlens is not None:
            ends = ordered(cu_seqlens, q.shape[1]).long()
        flash_kda.fwd(
            for_tma(q),
            for_tma(k),
            v,
            for_tma(g),
            beta.contiguous(),
            scale,
            o,
            A_log=rate.float().reshape(heads).contiguous(),
            dt_bias=for_tma(bias.float().reshape(heads, DIM)),
            lower_bound=lower_bound,
            initial_state=initial,
            final_state=final,
            cu_seqlens=ends,
        )
        if final is not None and not state_v_first:
            final = final.transpose(-1, -2).contiguous()
        return o, final


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
    lower_bound: float,
    output_final_state: bool,
    state_v_first: bool,
) -> Any:
    final = None
    if output_final_state:
        final = q.new_empty((count_of(q, cu_seqlens), q.shape[2], DIM, DIM), dtype=torch.float32)
    return v.new_empty(v.shape), final


_chunk = opaque(
    'fla::flash_kda',
    schema=(
        '(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, '
        'Tensor? cu_seqlens, float scale, float lower_bound, bool output_final_state, bool state_v_first) '
        '-> (Tensor o, Tensor? final_state)'
    ),
    forward=_forward,
    fake=_fake,
)


class FlashKDABackend(BaseBackend):
    """`chunk_kda` for inference on Hopper and Blackwell: bfloat16, K = V = 128, HV = H, with norms of q and k, bounded
    gates and the sigmoid of beta in the kernel. Its states are `[V, K]`; other states are transposed."""

    backend_type = 'flash_kda'
    package_name = 'flash_kda'
    # each build works with few versions of PyTorch only; the probe finds out
    package_version = 'tokenspeed-flashkda>=0.0.1.post20260526'
    env_var = 'FLA_FLASH_KDA'
    default_enable = True
    priority = 3
    vendor = 'moonshot'
    devices = ('cuda',)
    min_capability = (9, 0)
    dtypes = {'q': (torch.bfloat16,), 'g': (torch.bfloat16,), 'beta': (torch.bfloat16,)}
    grad = 'none'
    tolerance = {torch.bfloat16: 1e-2}
    verified = True

    def probe(self, device: Device) -> Verdict:
        return smallest_call(device, _one_step, 0.5)

    def chunk_kda_verifier(
        self,
        q: torch.Tensor,
        v: torch.Tensor,
        use_qk_l2norm_in_kernel: bool,
        use_gate_in_kernel: bool,
        use_beta_sigmoid_in_kernel: bool,
        lower_bound: float | None,
    ) -> Verdict:
        if not use_gate_in_kernel:
            return False, 'the kernel applies the gate itself: it needs use_gate_in_kernel=True and raw gates'
        if lower_bound is None:
            return False, 'the kernel has bounded gates only: it needs lower_bound'
        if lower_bound < LOWEST_BOUND:
            return False, ('lower_bound must be at least -5, got %s', lower_bound)
        if not use_qk_l2norm_in_kernel:
            return False, 'the kernel normalises q and k: it needs use_qk_l2norm_in_kernel=True'
        if not use_beta_sigmoid_in_kernel:
            return False, 'the kernel applies the sigmoid to beta: it needs use_beta_sigmoid_in_kernel=True and logits'
        if q.shape[3] != DIM or v.shape[3] != DIM:
            return False, ('K and V must be 128, got %s and %s', q.shape[3], v.shape[3])
        if q.shape[2] != v.shape[2]:
            return False, ('grouped values are not supported: q has %s heads, v has %s', q.shape[2], v.shape[2])
        if q.numel() == 0:
            return False, 'there are no steps, and the kernel cannot be launched on nothing'
        if q.numel() >= 2**31:
            return False, ('the kernel counts in 32 bits: q must have fewer than 2^31 elements, got %s', q.numel())
        return True, None

    def chunk_kda(
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
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        # lint: allow ignored-argument because a lower_bound of at least -5 fulfils the promise
        safe_gate: bool = False,
        lower_bound: float | None = None,
        # lint: allow ignored-argument because there is no backward pass
        disable_recompute: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        # lint: allow ignored-argument because it is a copy of cu_seqlens
        cu_seqlens_cpu: torch.Tensor | None = None,
        *,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, final = _chunk(
            q,
            k,
            v,
            g,
            beta,
            A_log,
            dt_bias,
            initial_state,
            cu_seqlens,
            DIM**-0.5 if scale is None else scale,
            LOWEST_BOUND if lower_bound is None else lower_bound,
            output_final_state,
            state_v_first,
        )
        return o, final


def _one_step(device: torch.device) -> torch.Tensor:
    """q, k and v of ones, from an empty state: o = sigmoid(0) v = 0.5."""
    ones = torch.ones(1, 1, 1, DIM, dtype=torch.bfloat16, device=device)
    beta = torch.zeros(1, 1, 1, dtype=torch.bfloat16, device=device)
    o: torch.Tensor = _forward(ones, ones, ones, ones, beta, None, None, None, None, 1.0, LOWEST_BOUND, False, True)[0]
    return o
