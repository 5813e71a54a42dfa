"""Plain PyTorch: serves CPUs, and tests compare every other backend with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fla.backends import BaseBackend
from fla.ops.recurrence.gates import beta_sigmoid, kda_gate, l2norms
from fla.ops.recurrence.reference import delta_rule, notes_of


class KDAReference(BaseBackend):
    """Every device, dtype and argument; differentiable twice."""

    backend_type = 'reference'
    kind = 'reference'

    def explain_notes(self, function: str, arguments: Mapping[str, Any]) -> Sequence[str]:
        return notes_of(function, arguments)

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
        safe_gate: bool = False,  # lint: allow ignored-argument because no computation here needs the promise
        lower_bound: float | None = None,
        disable_recompute: bool = False,  # lint: allow ignored-argument because autograd saves all intermediates
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        cp_context: object = None,  # lint: allow ignored-argument because the check rejects one
        *,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        q, k = l2norms(q, k) if use_qk_l2norm_in_kernel else (q, k)
        g = kda_gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
        beta = beta_sigmoid(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta
        result = delta_rule(
            *(q, k, v, g, beta, scale, initial_state, state_v_first, cu_seqlens),
            chunk_size=chunk_size,
            states=return_intermediate_states,
        )
        final = result.final if output_final_state else None
        if result.states is None:
            return result.o, final
        if cu_seqlens_cpu is None:
            return result.o, final, result.states
        size = chunk_size or 64
        chunks = int((-(-cu_seqlens_cpu.diff() // size)).sum())
        return result.o, final, result.states[:, :chunks]

    def fused_recurrent_kda(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k = l2norms(q, k) if use_qk_l2norm_in_kernel else (q, k)
        g = kda_gate(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
        beta = beta_sigmoid(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta
        result = delta_rule(q, k, v, g, beta, scale, initial_state, state_v_first, cu_seqlens)
        return result.o, result.final if output_final_state else None
