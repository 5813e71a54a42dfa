"""The chunk table of packed sequences."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.common.kernels import layout

pytestmark = pytest.mark.interpreted


def test_lengths_that_overlap_more_than_int32_can_count():
    """The interpreter raises for what would be written outside of the table."""
    longest, count, rows = 2**31 - 64, 300, 8
    lens = torch.tensor([0, longest]).repeat(count // 2 + 1)[: count + 1]
    table, offsets = torch.empty(rows, 2, dtype=torch.int32), torch.empty(count + 1, dtype=torch.int32)
    layout._fill_table[(count + 1,)](lens, table, offsets, longest, count, rows, SIZE=64, BLOCK=256)
    assert offsets.tolist() == [0, *[rows] * count]
    assert table.tolist() == [[0, chunk] for chunk in range(rows)]
