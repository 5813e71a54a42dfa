"""Sizes of tiles and grids. Triton has functions of the same names, which take 2 to 4 us per call on the host."""

from __future__ import annotations


def cdiv(number: int, by: int) -> int:
    """`number / by`, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


def tile_width(width: int, most: int = 256) -> int:
    """Columns of a tile that `tl.dot` can take: the least power of two from 16 on that holds `width`, at most `most`."""
    return min(most, next_power_of_2(max(width, 16)))
