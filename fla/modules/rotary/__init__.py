"""Rotary position embedding."""

from __future__ import annotations

from fla.modules.rotary.ops import RotaryEmbedding, rotary_embedding, rotary_embedding_ref

__all__ = ['RotaryEmbedding', 'rotary_embedding', 'rotary_embedding_ref']
