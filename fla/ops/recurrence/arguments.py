"""The arguments of a delta rule from the signature to the launch: `Inputs` are its tensors, `Options` are the rest.

Both keep the public names. They are tuples because the schema of an opaque operator is flat: it takes `(*inputs, *options)`.
Code that Dynamo traces only constructs, unpacks and reads them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch


class Inputs(NamedTuple):
    """The tensors of a chunked call.

    Attributes:
        q, k: `[B, T, H, K]`. v: `[B, T, HV, V]`.
        g: log decay or raw gate, `[B, T, HV]` or per channel `[B, T, HV, K]`. beta: `[B, T, HV]`.
        A_log: `[HV]`. dt_bias: `[HV]` or per channel `[HV * K]`. Read with `use_gate_in_kernel` only.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`.
        cu_seqlens: `[N + 1]`, int32 or int64.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None

    def empty_final_state(self, options: Options) -> torch.Tensor | None:
        """Uninitialised memory for the final state in float32, or None if it is not wanted."""
        if not options.output_final_state:
            return None
        dims = (self.k.shape[3], self.v.shape[3])
        dims = dims[::-1] if options.state_v_first else dims
        return self.v.new_empty((count_of(self.q, self.cu_seqlens), self.v.shape[2], *dims), dtype=torch.float32)


class Options(NamedTuple):
    """The flags and numbers of a call; the docstrings of the operations explain them."""

    scale: float | None = None
    lower_bound: float | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    disable_recompute: bool = False
    return_intermediate_states: bool = False


class Gradients(NamedTuple):
    """Gradients of `Inputs`, each in the shape and dtype of its input; None for inputs that are None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None


def count_of(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """The number of sequences N."""
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def resolve(options: Options, dim: int) -> Options:
    """The options with Python floats for scale, None meaning dim ** -0.5, and for the lower_bound of raw gates."""
    bounded = options.use_gate_in_kernel and options.lower_bound is not None
    return Options(
        dim**-0.5 if options.scale is None else float(options.scale),
        float(options.lower_bound) if bounded else None,  # type: ignore[arg-type]
        *options[2:],
    )


def compile_key(inputs: Inputs, options: Options) -> tuple[Hashable, ...]:
    """The facts of a call for which its kernels are compiled: sizes of one step, dtypes, and options other than scale."""
    q, v = inputs.q, inputs.v
    dtypes = [None if x is None else x.dtype for x in inputs[3:]]
    return (q.dtype, q.device, q.shape[2:], v.shape[2:], *dtypes, options[1:])


def without_steps(inputs: Inputs, options: Options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results of a call without steps or sequences: an empty o, and the initial state or zeros as the final state."""
    q, v, state = inputs.q, inputs.v, inputs.initial_state
    final = None
    if options.output_final_state:
        dims = (v.shape[3], q.shape[3]) if options.state_v_first else (q.shape[3], v.shape[3])
        final = v.new_zeros((count_of(q, inputs.cu_seqlens), v.shape[2], *dims), dtype=torch.float32)
        if state is not None:
            final = state.to(torch.float32, copy=True)
    # zeros that stay in the graph of v; not a product with 0, which leaves infinite values NaN
    return v.masked_fill(torch.ones((), dtype=torch.bool, device=v.device), 0.0), final
