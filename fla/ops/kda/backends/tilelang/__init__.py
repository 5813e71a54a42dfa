"""Our TileLang kernel for the backward of chunked Kimi delta attention."""

from __future__ import annotations

from typing import Any

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.ops.launch.tilelang_call import on_hopper, usable
from fla.ops.launch.vendor import smallest_call
from fla.ops.recurrence.arguments import Inputs, Options
from fla.utils.devices import Device

DIMS = (64, 128)


class KDATileLang(BaseBackend):
    """`chunk_kda` for training on Hopper: the intra-chunk part of its backward is one TileLang kernel, the rest is that of
    the Triton default. Takes bfloat16 or float16, K and V of 64 or 128, and every argument of a call with gradients. Without
    gradients nothing of TileLang would run, and it prefers not to serve.

    Off by default, because it is correct but slow: on an H200 (torch 2.11, Triton 3.6, TileLang 0.1.15), at
    (B, T, H, K = V) = (4, 2048, 16, 128) in bfloat16, it took 1386 us, and the two Triton kernels of that time 561 us
    together. The default's backward has become faster since. Its errors in fourteen cases are those that the default had
    when it, too, rounded beta and the gradients of scores.
    """

    backend_type = 'tilelang'
    kind = 'native'
    package_name = 'tilelang'
    package_version = '>=0.1.15,<0.2'
    env_var = 'FLA_TILELANG'
    default_enable = False
    priority = 4
    devices = ('cuda',)
    min_capability = (9, 0)
    dtypes = (torch.bfloat16, torch.float16)
    grad = 'backward'
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
    verified = True

    @classmethod
    def is_available(cls) -> Verdict:
        return usable(cls.package_name, cls.package_version)

    def probe(self, device: Device) -> Verdict:
        fits = on_hopper(device)
        # TileLang may import and then fail to compile: without nvcc, or beside a newer apache-tvm-ffi
        return smallest_call(device, _one_step, 0.5) if fits[0] else fits

    def chunk_kda_prefers(self) -> Verdict:
        return torch.is_grad_enabled(), 'only the backward is in TileLang, and gradients are off'

    def chunk_kda_verifier(
        self,
        q: torch.Tensor,
        v: torch.Tensor,
        chunk_size: int | None,
        return_intermediate_states: bool,
    ) -> Verdict:
        if chunk_size not in (None, 64):
            return False, 'the kernels work in chunks of 64'
        if return_intermediate_states:
            return False, 'return_intermediate_states is for inference, and only the backward is in TileLang'
        if q.shape[3] not in DIMS or v.shape[3] not in DIMS:
            return False, ('K and V must be 64 or 128, got %s and %s', q.shape[3], v.shape[3])
        if v.numel() == 0:
            return False, 'there are no steps, and the kernels cannot be launched on nothing'
        if v.numel() >= 2**31:
            return False, ('larger tensors are not tested: v must have fewer than 2^31 elements, got %s', v.numel())
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
        allow_neg_eigval: bool = False,
        # lint: allow ignored-argument because the kernels serve gates of any strength
        safe_gate: bool = False,
        lower_bound: float | None = None,
        disable_recompute: bool = False,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        *,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        from fla.ops.kda.autograd import chunk
        from fla.ops.kda.backends.tilelang.launch import kernel

        options = Options(
            scale=scale,
            lower_bound=lower_bound,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            disable_recompute=disable_recompute,
            return_intermediate_states=return_intermediate_states,
        )
        inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        return chunk(inputs, options, cu_seqlens_cpu, kernel)


def _one_step(device: torch.device) -> torch.Tensor:
    """q, k and v of ones, without decay and from an empty state: o = beta v, whose gradient by v is beta = 0.5."""
    from fla.ops.kda.backends.tilelang.launch import intra_chunk_bwd
    from fla.ops.kda.kernels.launch import chunk_backward

    ones = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    gate = torch.zeros(1, 1, 1, 128, device=device)
    inputs, options = Inputs(ones, ones, ones, gate, gate[..., 0] + 0.5), Options(1.0, use_qk_l2norm_in_kernel=True)
    with torch.cuda.device(device):
        return chunk_backward(inputs, options, None, ones, intra_chunk=intra_chunk_bwd).v
