"""Tile sizes, warps and pipeline stages of the kernels of chunked KDA, from the GPU, the dtype and the head dims.

Chosen on an H200 at K = V = 128 in bfloat16; elsewhere so that tiles fit into shared memory and registers.
"""

from __future__ import annotations

import functools

import torch

from fla.utils.devices import capability_of, shared_memory_of
from fla.utils.sizes import tile_width

SIZE = 64  # steps of a chunk


class Tuning:
    """Sizes for one kind of call; `block_k` and `block_v` are columns of a tile of keys and of values.

    Attributes:
        whole_k: all columns of a key in one tile.
        state_*: of the recurrences, whose programs hold a state `[K, state_block_v]` in registers.
        *_stages: chunks that a recurrence loads ahead: the most that fit into shared memory, up to 2 or 3.
    """

    def __init__(self, shared_memory: int, element_size: int, K: int, V: int) -> None:
        self.float32 = element_size > 2
        self.whole_k = tile_width(K)
        self.block_k = tile_width(K, 32 if self.float32 else 64)
        self.block_v = tile_width(V, 32 if self.float32 else 64)
        self.channels_block_k = tile_width(K, 32)
        self.prepare_rows_block_k = tile_width(K, 32 if self.float32 else 128)
        self.outputs_block_k = tile_width(K, 64 if self.float32 else 128)
        self.outputs_block_v = tile_width(V, 64)
        self.blocks_warps = 4 if self.float32 else 2
        # the recurrences are tuned for keys of at most 128 16-bit floats
        long_keys = self.whole_k * element_size > 256
        small = shared_memory < shared_memory_of((8, 0))
        BV = self.state_block_v = tile_width(V, 32 if long_keys or small else 64)
        self.state_warps = 8 if long_keys else 4

        def stages(per_stage: int, besides: int, most: int) -> int:
            room = shared_memory // element_size - besides
            return max(1, min(most, room // per_stage))

        self.forward_stages = stages((2 * K + BV) * SIZE, K * BV + SIZE * BV, 3)
        self.outputs_stages = stages((3 * K + BV + SIZE) * SIZE, K * BV + SIZE * BV, 3)
        self.backward_stages = stages((3 * K + BV + SIZE) * SIZE, K * BV + 2 * SIZE * BV, 2)


_cached = functools.cache(Tuning)


def tuning_of(k: torch.Tensor, V: int) -> Tuning:
    """The tuning for keys `[B, T, H, K]` and V value channels."""
    return _cached(shared_memory_of(capability_of(k.device)), k.element_size(), k.shape[3], V)
