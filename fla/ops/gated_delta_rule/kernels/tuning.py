"""Tile sizes, warps and pipeline stages of the kernels of the chunked gated delta rule, from the GPU, the dtype and the head
dims.

Measured on an H200 (torch 2.11, Triton 3.6) at K = V = 128 in bfloat16; elsewhere chosen to fit and to spill little.
"""

from __future__ import annotations

import functools

import torch

from fla.ops.gated_delta_rule.kernels.turns import turns_of
from fla.ops.launch.ptxas_workaround import launch_options
from fla.utils.devices import capability_of, multiprocessors_of, shared_memory_of
from fla.utils.sizes import cdiv, tile_width

CHUNK = 64


class Tuning:
    """Sizes for one kind of call; `block_k` and `block_v` are columns of a tile of keys and of values."""

    def __init__(self, capability: tuple[int, int] | None, float32: bool, wgmma: bool, dim_k: int, dim_v: int) -> None:
        """float32: a product takes three instructions, and three times the registers."""
        major = capability[0] if capability else 0
        small = shared_memory_of(capability) < shared_memory_of((8, 0))
        block = 32 if float32 else 64
        self.block_k = tile_width(dim_k, block)
        self.block_v = tile_width(dim_v, block)
        self.output_block_v = tile_width(dim_v, 64 if float32 or small else 128)
        self.warps = 8 if float32 else 4
        hopper, few_stages = major in (9, 10), float32 or small
        self.stages = 1 if few_stages else 3
        # A third program fits a multiprocessor. On other GPUs such a limit could cost more than that brings.
        self.prepare_options = {'maxnreg': 168} if major == 9 and not float32 else {}
        # With a third stage only one program fits a multiprocessor of a Hopper, and more is spilled where there is no wgmma.
        self.inter_chunk_stages = 1 if few_stages else 2
        self.intra_chunk_options = {'BK': self.block_k, 'BV': self.block_v, 'num_stages': self.stages}
        if major == 9 and not float32 and wgmma:
            # Products are asynchronous, and tiles are used outside of them too: none may be loaded ahead (docs/kernels.md).
            block_v = 64 if dim_v > 128 else tile_width(dim_v)
            self.intra_chunk_options = {'BK': tile_width(dim_k, 128), 'BV': block_v, 'num_stages': 1}
        # A program of the recurrences keeps [whole_k, block] in registers and 64 steps of each operand in shared memory.
        self.whole_k = tile_width(dim_k)
        large = few_stages or self.whole_k > 128
        self.state_block_v = min(32 if large else 64, self.block_v)
        self.state_stages = 1 if large else 3
        # a stage of the recurrence that also writes outputs takes 57 KiB
        self.outputs_with_states = not large
        self.outputs_stages = 3 if hopper else 2
        # With so many stages a program that writes outputs fills a multiprocessor, unless its blocks are small. Rows whose
        # bytes are not a multiple of 32 are not loaded ahead.
        self.fills_multiprocessor = (
            hopper and not large and self.whole_k > 32 and self.state_block_v > 16 and dim_k % 16 == 0
        )
        self.state_warps = 8 if self.whole_k > (64 if float32 else 128) else 4
        self.backward_block_v = min(32 if large or major < 9 else 64, self.block_v)
        self.backward_stages = 1 if large else 3 if hopper else 2

    def turns(self, v: torch.Tensor, packed: bool, outputs: bool = True) -> int:
        """The number of turns of a recurrence; see `turns.py`.

        A multiprocessor holds two programs of the recurrence that writes states and no `outputs`. With the largest blocks
        two take 1.7 times as long there as one (0.44 ms; 0.38 ms in three turns of two thirds, so 0.25 ms for one: H200),
        which is more than turns take.
        """
        largest = self.whole_k == 128 and self.state_block_v == 64
        if packed or not self.fills_multiprocessor or not (outputs or largest):
            return 1
        batch, length, heads, dim_v = v.shape
        blocks, chunks = cdiv(dim_v, self.state_block_v), cdiv(length, CHUNK)
        return turns_of(batch * heads, blocks, chunks, multiprocessors_of(v.device))


_cached = functools.cache(Tuning)


def tuning_of(q: torch.Tensor, dim_v: int) -> Tuning:
    """The tuning for queries `[B, T, H, K]` and dim_v value channels, on this thread's assembler."""
    return _cached(capability_of(q.device), q.element_size() > 2, not launch_options(), q.shape[3], dim_v)
