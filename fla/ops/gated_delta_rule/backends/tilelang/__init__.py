"""Our TileLang kernels for the forward of the chunked gated delta rule."""

from __future__ import annotations

import torch

from fla.backends import BaseBackend
from fla.backends.backend.base import Verdict
from fla.ops.launch.tilelang_call import on_hopper, usable
from fla.ops.launch.vendor import smallest_call
from fla.ops.recurrence.arguments import Inputs, Options
from fla.utils.devices import Device

DIMS = (64, 128)


class GatedDeltaRuleTileLang(BaseBackend):
    """`chunk_gated_delta_rule` on Hopper: the forward in TileLang, and the Triton backward, which starts from the same saved
    tensors. Takes bfloat16 or float16, K and V of 64 or 128, and every argument. Copies q, k and v that are not contiguous.

    Off by default, because it is slower: on an H200 (torch 2.11, Triton 3.6, bfloat16) the forward of
    (B, T, H, K = V) = (4, 2048, 16, 128) took 0.190 ms, that of the Triton kernels 0.134 ms. It also starts slowly: its
    first use took 23 s (69 s beside an H100, and 17 s in later processes, 8 s of them the import of TileLang), that of the
    default 2 to 5 s.
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

    def chunk_gated_delta_rule_verifier(self, q: torch.Tensor, v: torch.Tensor, chunk_size: int | None) -> Verdict:
        if chunk_size not in (None, 64):
            return False, 'the kernels work in chunks of 64'
        if q.shape[3] not in DIMS or v.shape[3] not in DIMS:
            return False, ('K and V must be 64 or 128, got %s and %s', q.shape[3], v.shape[3])
        if v.numel() == 0:
            return False, 'there are no steps, and the kernels cannot be launched on nothing'
        if v.numel() >= 2**31:
            return False, ('larger tensors are not tested: v must have fewer than 2^31 elements, got %s', v.numel())
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
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        # lint: allow ignored-argument because it is a copy of cu_seqlens
        cu_seqlens_cpu: torch.Tensor | None = None,
        # lint: allow ignored-argument because they follow from cu_seqlens
        chunk_indices: torch.Tensor | None = None,
        *,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from fla.ops.gated_delta_rule.autograd import chunk
        from fla.ops.gated_delta_rule.backends.tilelang.launch import kernel

        options = Options(
            scale=scale,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
        )
        return chunk(Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens), options, kernel)


def _one_step(device: torch.device) -> torch.Tensor:
    """q, k and v of ones, without decay and from an empty state: o = beta v = 0.5."""
    from fla.ops.gated_delta_rule.backends.tilelang.launch import chunk_forward

    ones = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    gate = torch.zeros(1, 1, 1, device=device)
    with torch.cuda.device(device):
        return chunk_forward(Inputs(ones, ones, ones, gate, gate + 0.5), Options(1.0, use_qk_l2norm_in_kernel=True))[0]
