"""Kernels compiled for a Hopper in further sizes: `compile_only` looks for memory that is refilled while asynchronous
products (wgmma) read it."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.kernels import launch as gated
from fla.ops.kda import chunk_kda
from fla.ops.kda.kernels import launch as kda
from fla.ops.launch.triton_call import triton_version
from fla.ops.recurrence.arguments import Inputs, Options
from tests.ops.delta_rules import CHUNKED, case, name_of
from tests.triton_support.compile_only import compile_only


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ('dtype', 'K', 'V', 'lens'),
    [
        (torch.bfloat16, 128, 128, [3, 0, 70]),
        *[(torch.bfloat16, 16, 16, None), (torch.bfloat16, 100, 72, None), (torch.bfloat16, 256, 256, None)],
        *[(torch.bfloat16, 64, 128, None), (torch.float16, 128, 128, [3, 0, 70])],
    ],
)
@pytest.mark.parametrize('function', CHUNKED, ids=name_of)
def test_nothing_is_refilled_too_early(function, dtype, K, V, lens):
    if triton_version() < (3, 9) and (dtype, K) != (torch.bfloat16, 128):
        pytest.skip('compiled without wgmma before Triton 3.9')
    given = case(function, dtype=dtype, K=K, V=V, HV=2, lens=lens, device='meta')
    inputs, options = Inputs(**given.tensors, cu_seqlens=given.cu_seqlens), Options(1.0, output_final_state=True)
    with compile_only((9, 0)) as compiled:
        if function is chunk_gated_delta_rule:
            o, final, G, inverse = gated.chunk_forward(inputs, options)
            gated.chunk_backward(inputs, options, G, inverse, o, final)
        else:
            assert function is chunk_kda
            o, final, saved, _ = kda.chunk_forward(inputs, options)
            kda.chunk_backward(inputs, options, saved, o, final)
    print(*compiled, sep='\n')
    assert any('wgmma' in one.kernel.asm['ptx'] for one in compiled if one.name == 'states_backward')
