"""Plain PyTorch: serves CPUs, and tests compare every other backend with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fla.backends import BaseBackend
from fla.ops.recurrence.gates import beta_sigmoid, gdn_gate, l2norms, wide
from fla.ops.recurrence.reference import delta_rule, notes_of


class GatedDeltaRuleReference(BaseBackend):
    """Every device, dtype and argument; differentiable twice."""

    backend_type = 'reference'
    kind = 'reference'

    def explain_notes(self, function: str, arguments: Mapping[str, Any]) -> Sequence[str]:
        return notes_of(function, arguments)

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
        cu_seqlens_cpu: torch.Tensor | None = None,  # lint: allow ignored-argument because it is a copy of cu_seqlens
        chunk_indices: torch.Tensor | None = None,  # lint: allow ignored-argument because they follow from cu_seqlens
        cp_context: object = None,  # lint: allow ignored-argument because the check rejects one
        *,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k = l2norms(q, k) if use_qk_l2norm_in_kernel else (q, k)
        if use_gate_in_kernel and A_log is not None:
            g = gdn_gate(g, A_log, dt_bias)
        beta = beta_sigmoid(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta
        result = delta_rule(q, k, v, g, beta, scale, initial_state, state_v_first, cu_seqlens, chunk_size=chunk_size)
        return result.o, result.final if output_final_state else None

    def fused_recurrent_gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        gk: torch.Tensor | None = None,
        gv: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        *,
        use_gate_in_kernel: bool = False,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k = l2norms(q, k) if use_qk_l2norm_in_kernel else (q, k)
        if use_gate_in_kernel and g is not None and A_log is not None:
            g = gdn_gate(g, A_log, dt_bias)
        if gk is not None:
            g = gk if g is None else wide(gk) + wide(g)[..., None]
        if beta is None:
            beta = torch.ones_like(v[..., 0])
        elif use_beta_sigmoid_in_kernel:
            beta = beta_sigmoid(beta, allow_neg_eigval)
        result = delta_rule(q, k, v, g, beta, scale, initial_state, state_v_first, cu_seqlens, gv=gv)
        return result.o, result.final if output_final_state else None
