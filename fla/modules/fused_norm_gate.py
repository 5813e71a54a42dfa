"""Alias of `fla.modules.norm.fused_norm_gate`, at a path that FLA 0.6 also has. Every name is the same object."""

from __future__ import annotations

from fla.modules.norm.fused_norm_gate import FusedRMSNormGated, rms_norm_gated

__all__ = ['FusedRMSNormGated', 'rms_norm_gated']
