"""Sizes of tiles and grids, against their definitions."""

import math

from fla.utils.sizes import cdiv, next_power_of_2


def test_sizes():
    for number in (*range(1, 70), 2**31 - 1, 2**31, 2**40 + 1):
        power = next_power_of_2(number)
        assert power == 2 ** math.ceil(math.log2(power))
        assert power // 2 < number <= power
        for by in (1, 3, 64):
            assert (cdiv(number, by) - 1) * by < number <= cdiv(number, by) * by
    assert cdiv(0, 64) == 0
