"""The layer of Kimi Linear."""

from __future__ import annotations

import torch
from torch import nn

from fla.layers.delta import DeltaLayer
from fla.modules.fused_norm_gate import FusedRMSNormGated
from fla.ops.kda import chunk_kda, fused_recurrent_kda


class KimiDeltaAttention(DeltaLayer):
    """The token mixer of Kimi Linear: short convolutions, the delta rule with a decay per channel, a gated norm.

    Args:
        hidden_size: size of the input and output.
        expand_v: V / K, the size of a value head relative to a key head.
        head_dim: K.
        num_heads: number of query and key heads, H.
        num_v_heads: number of value heads, HV, a multiple of H. Default: H.
        mode: 'chunk', or 'fused_recurrent' to use that for whole sequences too; a single step is always recurrent.
        use_short_conv: whether q, k and v pass a causal convolution before their silu.
        allow_neg_eigval: whether beta goes up to 2, which allows negative eigenvalues of a step's transition.
        conv_size: W, the number of steps that a convolution sees.
        conv_bias: whether convolutions have a bias.
        layer_idx: the layer's index in the cache.
        norm_eps: eps of the output norm.

    Parameters have the names of flash-linear-attention's layer: `q_proj`, `k_proj`, `v_proj`, `b_proj`, `o_proj`, the
    low-rank projections of the decay, `f_proj.0` and `f_proj.1`, and of the output gate, `g_proj.0` and `g_proj.1` (with a
    bias), `A_log` `[HV]`, `dt_bias` `[HV * K]`, `q_conv1d.weight` `[D, 1, W]`, …, `o_norm.weight` `[V]`.
    Checkpoints of Kimi Linear call the low-rank projections `f_a_proj`, `f_b_proj`, `g_a_proj` and `g_b_proj`.

    Raises:
        TypeError, ValueError: for sizes that do not fit together.

    Source: Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv 2510.26692.
    """

    chunk = chunk_kda
    fused_recurrent = fused_recurrent_kda
    min_A = 1

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = 'chunk',
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
            dt_biases_per_head=head_dim,
        )
        gates = self.num_v_heads * self.head_k_dim
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, gates, bias=False)
        )
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, self.value_dim, bias=True)
        )
        self.o_norm = FusedRMSNormGated(self.head_v_dim, eps=norm_eps, activation='sigmoid')

    def raw_gate(self, x: torch.Tensor) -> torch.Tensor:
        raw: torch.Tensor = self.f_proj(x)
        return raw.view(*x.shape[:2], self.num_v_heads, self.head_k_dim)

    def output_gate(self, x: torch.Tensor) -> torch.Tensor | None:
        gate: torch.Tensor = self.g_proj(x)
        return gate
