"""Sizes of tiles and grids, against their definitions."""

import math

from fla.utils.sizes import cdiv, next_power_of_2, tile_width


def test_sizes():
    for number in (*range(1, 70), 2**31 - 1, 2**31, 2**40 + 1):
        power = next_power_of_2(number)
        assert power == 2 ** math.ceil(math.log2(power))
        assert power // 2 < number <= power
        for by in (1, 3, 64):
            assert (cdiv(number, by) - 1) * by < number <= cdiv(number, by) * by
    assert cdiv(0, 64) == 0


def test_tiles_hold_a_width_or_are_the_largest():
    assert [tile_width(width) for width in (1, 16, 17, 100, 256, 300)] == [16, 16, 32, 128, 256, 256]
    assert [tile_width(width, 64) for width in (1, 64, 65)] == [16, 64, 64]
