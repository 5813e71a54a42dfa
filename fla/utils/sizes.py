"""Sizes of tiles and grids. Triton has functions of the same names, which take 2 to 4 us per call on the host."""

from __future__ import annotations


def cdiv(number: int, by: int) -> int:
    """`number / by`, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()
