"""Numbers of 16 bits whose rounding is kept beside them.

A product of 16-bit floats takes half the time of one in tf32, and takes operands that are stored either way round. Where
rounding an operand would be most of a result's error, it is two such numbers, which hold 16 bits of it (bfloat16) or more.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def parts_of(x, DTYPE: tl.constexpr):
    """A float32 x as what DTYPE holds of it, and of the rest. Of float32 the first is all."""
    high = x.to(DTYPE)
    return high, (x - high.to(tl.float32)).to(DTYPE)


@triton.jit
def dot_of_parts(high, low, y, PRECISION: tl.constexpr):
    """x y, for the two parts of x, float32."""
    product = tl.dot(high, y, input_precision=PRECISION)
    if high.dtype != tl.float32:
        product = tl.dot(low, y, product, input_precision=PRECISION)
    return product


@triton.jit
def dot_with_parts(x, high, low, PRECISION: tl.constexpr):
    """x y, for the two parts of y, float32."""
    product = tl.dot(x, high, input_precision=PRECISION)
    if high.dtype != tl.float32:
        product = tl.dot(x, low, product, input_precision=PRECISION)
    return product
