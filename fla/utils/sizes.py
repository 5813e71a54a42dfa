"""Sizes of tiles and grids. Triton's functions of these names can be called by kernels as well, and take 2 to 4 us each on
the host, in every launch."""

from __future__ import annotations


def cdiv(number: int, by: int) -> int:
    """How many parts of a size `by` hold `number`."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not smaller than a positive number."""
    return 1 << (number - 1).bit_length()


def tile_width(width: int, most: int = 256) -> int:
    """Columns of a tile that `tl.dot` can take: the least power of two from 16 on that holds `width`, at most `most`."""
    return min(most, next_power_of_2(max(width, 16)))
