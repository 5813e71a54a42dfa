"""Token mixers with a cache for generation: gated delta net, Kimi delta attention, softmax attention."""

from __future__ import annotations

from fla.layers.attn import Attention
from fla.layers.cache import Cache
from fla.layers.gated_deltanet import GatedDeltaNet
from fla.layers.kda import KimiDeltaAttention

__all__ = ['Attention', 'Cache', 'GatedDeltaNet', 'KimiDeltaAttention']

TYPE_CHECKING = False
if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name):
        from fla.utils.owners import missing

        raise missing(__name__, name)
