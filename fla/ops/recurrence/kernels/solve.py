"""The inverse of a unit lower-triangular 64 x 64 matrix, computed by one program.

Neighbouring diagonal blocks are joined in pairs. Let A and B be the inverses of two neighbouring blocks, and C the block
of I + L below the diagonal between them. Then the pair has the inverse [[A, 0], [-B C A, B]]. Two products join all pairs
of one size at once, and six sizes, from 1 step to 32, join everything. Pairs of up to 16 steps are products of the four 16
x 16 blocks on the diagonal, a sixteenth of the work. A product of powers of I - L would need no masks, but its terms grow
like binomials and cancel: with equal keys and beta = 1 it loses four digits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pair_mask(steps, half):
    """Returns the mask of pairs (i, j) with j in the first and i in the second of two neighbouring blocks of `half` steps.
    `half` is a power of 2."""
    i, j = steps[:, None], steps[None, :]
    return ((i ^ j) < 2 * half) & ((i & half) != 0) & ((j & half) == 0)


@triton.jit
def diagonal_blocks(L):
    """Returns the four 16 x 16 blocks on the diagonal of L `[64, 64]` as `[4, 16, 16]`."""
    four = tl.arange(0, 4)
    same = (four[:, None] == four[None, :])[:, :, None, None]
    return tl.sum(tl.where(same, tl.permute(tl.reshape(L, (4, 16, 4, 16)), (0, 2, 1, 3)), 0.0), 1)


@triton.jit
def block_diagonal(blocks):
    """Returns the block-diagonal matrix `[64, 64]` of the blocks `[4, 16, 16]`."""
    four = tl.arange(0, 4)
    same = (four[:, None] == four[None, :])[:, :, None, None]
    full = tl.where(same, blocks[:, None, :, :], 0.0)
    return tl.reshape(tl.permute(full, (0, 2, 1, 3)), (64, 64))


@triton.jit
def join_pairs(inverse, L, half, PRECISION: tl.constexpr):
    """Returns the inverses of blocks of 2 `half` steps, given those of blocks of `half` steps."""
    pair = pair_mask(tl.arange(0, 64), half)
    product = tl.dot(inverse, tl.where(pair, L, 0.0), input_precision=PRECISION)
    return inverse - tl.where(pair, tl.dot(product, inverse, input_precision=PRECISION), 0.0)


@triton.jit
def unit_lower_inverse(L, PRECISION: tl.constexpr, ROLLED: tl.constexpr = False):
    """Returns `(I + L)^-1` in float32 for a strictly lower-triangular L, both `[64, 64]`.

    ROLLED has the last two levels in a loop: a KDA kernel then compiles in a fifth less time, and runs 2 to 4 % longer."""
    steps = tl.arange(0, 16)
    blocks = diagonal_blocks(L)
    small = tl.where(steps[:, None] == steps[None, :], 1.0, 0.0)[None, :, :]
    small = small - tl.where(pair_mask(steps, 1)[None, :, :], blocks, 0.0)
    for level in tl.static_range(1, 4):
        pair = pair_mask(steps, 1 << level)[None, :, :]
        product = tl.dot(small, tl.where(pair, blocks, 0.0), input_precision=PRECISION)
        small -= tl.where(pair, tl.dot(product, small, input_precision=PRECISION), 0.0)
    inverse = block_diagonal(small)
    if ROLLED:
        for level in tl.range(4, 6, num_stages=1):
            inverse = join_pairs(inverse, L, 1 << level, PRECISION)
    else:
        for level in tl.static_range(4, 6):
            inverse = join_pairs(inverse, L, 1 << level, PRECISION)
    return inverse
