"""Alias of `fla.modules.causal_conv1d`, at a path that FLA 0.6 also has. Every name is the same object.

As in FLA, the attribute `causal_conv1d` is the function, which clients import from here. The submodule of that name is only
reached by importing from it: `from fla.modules.conv.causal_conv1d import ShortConvolution`.
"""

from __future__ import annotations

# The submodule is imported first: a later import of it would replace the function in this namespace.
from fla.modules.conv.causal_conv1d import ShortConvolution, causal_conv1d, causal_conv1d_update

__all__ = ['ShortConvolution', 'causal_conv1d', 'causal_conv1d_update']
