"""Norms over the last dimension. Here, `l2norm` is the submodule; the function is `fla.modules.norm.l2norm.l2norm`."""

from __future__ import annotations

from fla.modules.norm.fused_norm_gate import FusedRMSNormGated
from fla.modules.norm.layernorm import GroupNorm, LayerNorm, RMSNorm

__all__ = ['FusedRMSNormGated', 'GroupNorm', 'LayerNorm', 'RMSNorm']
