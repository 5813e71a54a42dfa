"""Layers' building blocks: norms, gates, short convolutions, rotary embedding. Each is a dispatched function of operation
`modules`, with a class that holds its parameters where it has any."""

from __future__ import annotations

from fla.modules import activations, l2norm
from fla.modules.convolution import ShortConvolution
from fla.modules.fused_cross_entropy import FusedCrossEntropyLoss
from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from fla.modules.fused_norm_gate import FusedRMSNormGated
from fla.modules.layernorm import GroupNorm, LayerNorm, RMSNorm
from fla.modules.rotary import RotaryEmbedding

__all__ = [
    'FusedCrossEntropyLoss',
    'FusedLinearCrossEntropyLoss',
    'FusedRMSNormGated',
    'GroupNorm',
    'LayerNorm',
    'RMSNorm',
    'RotaryEmbedding',
    'ShortConvolution',
    'activations',
    'l2norm',
]

TYPE_CHECKING = False
if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name):
        from fla.utils.owners import missing

        raise missing(__name__, name)
