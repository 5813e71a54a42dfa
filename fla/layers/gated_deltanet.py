"""The layer of Gated DeltaNet."""

from __future__ import annotations

import torch
from torch import nn

from fla.layers.delta import DeltaLayer
from fla.modules.fused_norm_gate import FusedRMSNormGated
from fla.modules.layernorm import RMSNorm
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


class GatedDeltaNet(DeltaLayer):
    """The token mixer of Gated DeltaNet: short convolutions, the gated delta rule with a decay per head, a gated norm.

    Args:
        hidden_size: size of the input and output.
        expand_v: V / K, the size of a value head relative to a key head.
        head_dim: K.
        num_heads: number of query and key heads, H.
        num_v_heads: number of value heads, HV, a multiple of H. Default: H.
        mode: 'chunk', or 'fused_recurrent' to use that for whole sequences too; a single step is always recurrent.
        use_gate: whether the output norm is gated.
        use_short_conv: whether q, k and v pass a causal convolution before their silu.
        allow_neg_eigval: whether beta goes up to 2, which allows negative eigenvalues of a step's transition.
        conv_size: W, the number of steps that a convolution sees.
        conv_bias: whether convolutions have a bias.
        layer_idx: the layer's index in the cache.
        norm_eps: eps of the output norm.

    Parameters have the names of flash-linear-attention's layer: `q_proj`, `k_proj`, `v_proj`, `a_proj`, `b_proj`,
    `g_proj`, `o_proj`, `A_log` `[HV]`, `dt_bias` `[HV]`, `q_conv1d.weight` `[D, 1, W]`, …, `o_norm.weight` `[V]`.

    Raises:
        TypeError, ValueError: for sizes that do not fit together.

    Source: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464.
    """

    chunk = chunk_gated_delta_rule
    fused_recurrent = fused_recurrent_gated_delta_rule
    min_A = 0.01  # above 0, which has no logarithm

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = 'chunk',
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(
            hidden_size,
            expand_v,
            head_dim,
            num_heads,
            num_v_heads,
            mode,
            use_short_conv,
            allow_neg_eigval,
            conv_size,
            conv_bias,
            layer_idx,
            norm_eps,
            dt_biases_per_head=1,
        )
        self.use_gate = use_gate
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
            self.o_norm = FusedRMSNormGated(self.head_v_dim, eps=norm_eps, activation='swish')
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps)

    def raw_gate(self, x: torch.Tensor) -> torch.Tensor:
        raw: torch.Tensor = self.a_proj(x)
        return raw

    def output_gate(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.g_proj(x) if self.use_gate else None
