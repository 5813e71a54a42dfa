"""The inverse of a unit lower-triangular 64 x 64 matrix, within one program.

By halves: where A and B are the inverses of two neighbouring blocks and C is the block of I + L below the diagonal between
them, the pair has the inverse [[A, 0], [-B C A, B]]. Starting from single steps, all pairs of one size are joined at once by
two products, and six sizes join everything. A product of powers of I - L would need no masks, but its terms grow like
binomials and cancel: with equal keys and beta = 1 it loses four digits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def below(steps, half):
    """The pairs (i, j) with j in the first and i in the second block of one pair of blocks of `half` steps."""
    i, j = steps[:, None] // half, steps[None, :] // half
    return (i == j + 1) & (j % 2 == 0)


@triton.jit
def unit_lower_inverse(L, PRECISION: tl.constexpr):
    """`(I + L)^-1` of a strictly lower-triangular L `[64, 64]`, float32."""
    steps = tl.arange(0, 64)
    inverse = tl.where(steps[:, None] == steps[None, :], 1.0, 0.0) - tl.where(below(steps, 1), L, 0.0)
    for level in range(1, 6):
        pair = below(steps, 1 << level)
        half_way = tl.dot(inverse, tl.where(pair, L, 0.0), input_precision=PRECISION)
        inverse -= tl.where(pair, tl.dot(half_way, inverse, input_precision=PRECISION), 0.0)
    return inverse
