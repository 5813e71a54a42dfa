"""Gated activations."""

from __future__ import annotations

from fla.modules.activations.ops import silu_and_mul, swiglu, swiglu_linear

__all__ = ['silu_and_mul', 'swiglu', 'swiglu_linear']
