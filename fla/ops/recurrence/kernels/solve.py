"""The inverse of a unit lower-triangular 64 x 64 matrix, within one program.

By halves: where A and B are the inverses of two neighbouring blocks and C is the block of I + L below the diagonal between
them, the pair has the inverse [[A, 0], [-B C A, B]]. Starting from single steps, all pairs of one size are joined at once by
two products, and six sizes join everything. Up to 16 steps those are products of the four blocks on the diagonal, a
sixteenth of the work. A product of powers of I - L would need no masks, but its terms grow like binomials and cancel: with
equal keys and beta = 1 it loses four digits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def below(steps, half):
    """The pairs (i, j) with j in the first and i in the second block of one pair of blocks of `half` steps, a power of 2."""
    i, j = steps[:, None], steps[None, :]
    return ((i ^ j) < 2 * half) & ((i & half) != 0) & ((j & half) == 0)


@triton.jit
def diagonal_blocks(L):
    """The four 16 x 16 blocks on the diagonal of `[64, 64]`: `[4, 16, 16]`."""
    four = tl.arange(0, 4)
    same = (four[:, None] == four[None, :])[:, :, None, None]
    return tl.sum(tl.where(same, tl.permute(tl.reshape(L, (4, 16, 4, 16)), (0, 2, 1, 3)), 0.0), 1)


@triton.jit
def spread(blocks):
    """`[4, 16, 16]` to the blocks on the diagonal of `[64, 64]`, 0 elsewhere."""
    four = tl.arange(0, 4)
    same = (four[:, None] == four[None, :])[:, :, None, None]
    full = tl.where(same, blocks[:, None, :, :], 0.0)
    return tl.reshape(tl.permute(full, (0, 2, 1, 3)), (64, 64))


@triton.jit
def join(inverse, L, half, PRECISION: tl.constexpr):
    """The inverse of blocks of 2 `half` steps from that of blocks of `half`."""
    pair = below(tl.arange(0, 64), half)
    half_way = tl.dot(inverse, tl.where(pair, L, 0.0), input_precision=PRECISION)
    return inverse - tl.where(pair, tl.dot(half_way, inverse, input_precision=PRECISION), 0.0)


@triton.jit
def unit_lower_inverse(L, PRECISION: tl.constexpr, ROLLED: tl.constexpr = False):
    """`(I + L)^-1` of a strictly lower-triangular L `[64, 64]`, float32. ROLLED: in less code. A kernel of KDA that contains
    it takes a fifth less time to compile that way, and 2 to 4 % more to run."""
    near = tl.arange(0, 16)
    blocks = diagonal_blocks(L)
    small = tl.where(near[:, None] == near[None, :], 1.0, 0.0)[None, :, :]
    small = small - tl.where(below(near, 1)[None, :, :], blocks, 0.0)
    for level in tl.static_range(1, 4):
        pair = below(near, 1 << level)[None, :, :]
        half_way = tl.dot(small, tl.where(pair, blocks, 0.0), input_precision=PRECISION)
        small -= tl.where(pair, tl.dot(half_way, small, input_precision=PRECISION), 0.0)
    inverse = spread(small)
    if ROLLED:
        for level in tl.range(4, 6, num_stages=1):
            inverse = join(inverse, L, 1 << level, PRECISION)
    else:
        for level in tl.static_range(4, 6):
            inverse = join(inverse, L, 1 << level, PRECISION)
    return inverse
