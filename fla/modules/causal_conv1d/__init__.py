"""The short causal convolution: over whole sequences, for one decode step, and as a layer."""

from __future__ import annotations

from fla.modules.causal_conv1d.ops import ShortConvolution, causal_conv1d, causal_conv1d_update

__all__ = ['ShortConvolution', 'causal_conv1d', 'causal_conv1d_update']
