"""The chunk table of packed sequences."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.kernels import launch as gdn
from fla.ops.kda import chunk_kda
from fla.ops.kda.kernels import launch as kda
from fla.ops.launch.kernels import layout
from fla.ops.recurrence.arguments import Inputs, Options
from tests.ops.delta_rules import RAW, case, name_of

pytestmark = pytest.mark.interpreted


def test_lengths_that_overlap_more_than_int32_can_count():
    """The interpreter raises for writes outside the table."""
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
    """On a GPU lengths are not checked. The interpreter raises for accesses outside a tensor."""
    given = case(function, T=640, H=1, HV=1, K=16, V=16, initial=False)
    inputs = Inputs(**given.tensors, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    for states in (False, True):
        options = Options(1.0, output_final_state=True, return_intermediate_states=states)
        if function is chunk_kda:
            o, final, saved, _ = kda.chunk_forward(inputs, options)
            kda.chunk_backward(inputs, options, saved, o, final)
        elif not states:
            o, final, G, inverse = gdn.chunk_forward(inputs, options)
            gdn.chunk_backward(inputs, options, G, inverse, o, final)
    assert (o.shape, final.shape[0]) == (inputs.v.shape, len(ends) - 1)


@pytest.fixture
def unwritten_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize('function', [chunk_gated_delta_rule, chunk_kda], ids=name_of)
def test_steps_of_no_sequence_add_nothing(unwritten_memory_is_nan, function):
    """Gradients that sum over all steps ignore steps after the last sequence."""
    given = case(function, T=130, H=1, HV=2, K=16, V=16, initial=False, **RAW)
    tensors = [given.tensors[name] for name in ('q', 'k', 'v', 'g', 'beta')]
    parameters = given.tensors['A_log'], given.tensors['dt_bias'].reshape(-1)
    cu_seqlens = torch.tensor([0, 3, 70], dtype=torch.int32)
    found = []
    for steps in (130, 70):
        q, k, v, g, beta = (x[:, :steps].contiguous() for x in tensors)
        inputs, options = Inputs(q, k, v, g, beta, *parameters, None, cu_seqlens), Options(1.0, use_gate_in_kernel=True)
        if function is chunk_kda:
            o, _, saved, _ = kda.chunk_forward(inputs, options)
            gradients = kda.chunk_backward(inputs, options, saved, torch.ones_like(o))
        else:
            o, _, G, inverse = gdn.chunk_forward(inputs, options)
            gradients = gdn.chunk_backward(inputs, options, G, inverse, torch.ones_like(o))
        found.append((gradients.A_log, gradients.dt_bias))
    for longer, shorter in zip(*found, strict=True):
        torch.testing.assert_close(longer, shorter, rtol=1e-6, atol=0)
