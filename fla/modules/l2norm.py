"""Alias of `fla.modules.norm.l2norm`, at a path that FLA 0.6 also has. Every name is the same object."""

from __future__ import annotations

from fla.modules.norm.l2norm import l2_norm, l2norm

__all__ = ['l2_norm', 'l2norm']
