"""Token mixers with a cache for generation: Gated DeltaNet, Kimi delta attention, softmax attention.

The path of a call, for `KimiDeltaAttention` and `GatedDeltaNet`:
    1. delta.py, `DeltaLayer.forward`: checks.py checks the arguments and finds the layer's state in the cache (cache.py);
       padding.py packs a padded batch.
    2. delta.py, `DeltaLayer._mix`: projections, short convolutions, the operation (`fla.ops.kda`,
       `fla.ops.gated_delta_rule`), gated norm and output projection, then the new state.
    3. kda.py, gated_deltanet.py: the projections of the gates.
`Attention` does the same in attn.py, with `fla.ops.attn`; keys.py appends keys and values to the cache.
"""

from __future__ import annotations

from fla.layers.attn import Attention
from fla.layers.cache import Cache
from fla.layers.gated_deltanet import GatedDeltaNet
from fla.layers.kda import KimiDeltaAttention

__all__ = ['Attention', 'Cache', 'GatedDeltaNet', 'KimiDeltaAttention']

TYPE_CHECKING = False
if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name

    def __getattr__(name):
        from fla.utils.owners import missing

        raise missing(__name__, name)
