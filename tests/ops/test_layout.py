"""The chunk table of packed sequences."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.common.kernels import layout
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.kernels import launch as gdn
from fla.ops.kda import chunk_kda
from fla.ops.kda.kernels import launch as kda
from tests.ops.delta_rules import case, name_of

pytestmark = pytest.mark.interpreted


def test_lengths_that_overlap_more_than_int32_can_count():
    """The interpreter raises for what would be written outside of the table."""
    longest, count, rows = 2**31 - 64, 300, 8
    lens = torch.tensor([0, longest]).repeat(count // 2 + 1)[: count + 1]
    table, offsets = torch.empty(rows, 2, dtype=torch.int32), torch.empty(count + 1, dtype=torch.int32)
    layout._fill_table[(count + 1,)](lens, table, offsets, longest, count, rows, SIZE=64, BLOCK=256)
    assert offsets.tolist() == [0, *[rows] * count]
    assert table.tolist() == [[0, chunk] for chunk in range(rows)]


@pytest.mark.parametrize('function', [chunk_gated_delta_rule, chunk_kda], ids=name_of)
@pytest.mark.parametrize(
    'ends', [[0, 640, 0, 640, 0, 640], [0, 100, 640, 700], [-5, 70, 30, 640], [0, 1000000, -4, 64]], ids=str
)
def test_bad_lengths_touch_nothing_else(function, ends):
    """On a GPU they are not read. The interpreter raises for what would lie outside of a tensor."""
    given = case(function, T=640, H=1, HV=1, K=16, V=16, initial=False)
    q, k, v, g, beta = (given.tensors[name] for name in ('q', 'k', 'v', 'g', 'beta'))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    if function is chunk_kda:
        settings = kda.Settings(1.0)
        for states in (False, True):
            o, final, saved, _ = kda.chunk_forward(
                q, k, v, g, beta, settings, None, True, None, None, cu_seqlens, states=states
            )
        kda.chunk_backward(saved, settings, o, final)
    else:
        options = gdn.Options(1.0, False, False, False, False, False)
        nothing = (None, None, None, cu_seqlens)
        o, final, G, inverse = gdn.chunk_forward(q, k, v, g, beta, *nothing, options, True)
        gdn.chunk_backward(q, k, v, g, beta, *nothing, G, inverse, o, final, options)
    assert (o.shape, final.shape[0]) == (v.shape, len(ends) - 1)
