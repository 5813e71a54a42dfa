"""Alias of `fla.modules.causal_conv1d.ops`, at a path that FLA 0.6 also has. Every name is the same object."""

from __future__ import annotations

from fla.modules.causal_conv1d.ops import ShortConvolution, causal_conv1d, causal_conv1d_update

__all__ = ['ShortConvolution', 'causal_conv1d', 'causal_conv1d_update']
