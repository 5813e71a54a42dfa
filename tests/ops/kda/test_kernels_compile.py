"""The kernels of chunked KDA compile, and fit, on GPUs that are not here."""

import pytest

pytest.importorskip('triton')
from fla.ops.kda import chunk_kda
from fla.ops.kda.kernels.launch import chunk_backward, chunk_forward
from fla.ops.launch.triton_call import triton_version
from fla.ops.recurrence.arguments import Inputs, Options
from tests.ops.delta_rules import case
from tests.ops.kernels import BF16, EVERYTHING, FP32
from tests.triton_support.compile_only import compile_only

OLD_TRITON = triton_version() < (3, 9)

pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ('capability', 'dtype', 'dim'),
    [
        *[((9, 0), BF16, 128), ((8, 0), BF16, 128), ((10, 0), BF16, 128), ((12, 0), BF16, 128)],
        *[((9, 0), FP32, 256), ((12, 0), FP32, 256), ((10, 0), FP32, 256)],
    ],
)
def test_compiles(request, capability, dtype, dim):
    if capability == (10, 0) and dtype == FP32 and OLD_TRITON:
        request.applymarker(pytest.mark.xfail(strict=True, reason='Triton before 3.9; the default says so there'))
    given = case(chunk_kda, dtype=dtype, T=8, HV=2, K=dim, V=dim, **EVERYTHING)
    inputs, options = Inputs(**given.tensors), Options(dim**-0.5, output_final_state=True, **EVERYTHING)
    with compile_only(capability) as compiled:
        o, final, saved, _ = chunk_forward(inputs, options)
        chunk_backward(inputs, options, saved, o, final)
    print(*compiled, sep='\n')
    names = {one.name for one in compiled}
    assert {'decays', 'prepare', 'scores', 'updates', 'states_forward'} <= names
    assert {'states_backward', 'pairs_backward', 'channels_backward', 'heads_backward'} <= names
    assert {'products_with_states', 'blocks_backward', 'gates_backward'} <= names
    if dtype == BF16 and capability == (9, 0):
        # `states_backward` with the state V first spills 72 bytes on Triton 3.9, none without an initial and final state.
        # The last two, of two warps, were quicker on an H200 than of four; with Triton 3.9 they spill this much.
        most = {'states_backward': 80, 'prepare': 160, 'updates': 480, 'blocks_backward': 272}
        spilled = {one.name: one.spilled for one in compiled if one.spilled > most.get(one.name, 64)}
        assert spilled == {}
