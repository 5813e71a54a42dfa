"""Alias of `fla.modules.norm.layernorm`, at a path that FLA 0.6 also has. Every name is the same object."""

from __future__ import annotations

from fla.modules.norm.layernorm import GroupNorm, LayerNorm, RMSNorm, group_norm, layer_norm, rms_norm

__all__ = ['GroupNorm', 'LayerNorm', 'RMSNorm', 'group_norm', 'layer_norm', 'rms_norm']
