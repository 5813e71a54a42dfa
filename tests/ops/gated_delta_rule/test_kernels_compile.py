"""The kernels of the chunked gated delta rule compile, and fit, on GPUs that are not here."""

import pytest

pytest.importorskip('triton')
import triton

from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.kernels.launch import chunk_backward, chunk_forward
from fla.ops.launch.triton_call import triton_version
from fla.ops.recurrence.arguments import Inputs, Options
from fla.ops.recurrence.on_triton import ChunksOnTriton
from fla.utils.devices import Device
from tests.ops.delta_rules import FLAGS, RAW, case
from tests.ops.kernels import BF16, FP32
from tests.triton_support.compile_only import compile_only

OLD_TRITON = triton_version() < (3, 9)


@pytest.mark.parametrize(
    ('capability', 'version', 'usable'), [((10, 0), '3.6.0', False), ((10, 0), '3.9.0', True), ((9, 0), '3.6.0', True)]
)
def test_the_default_says_where_it_does_not_compile(monkeypatch, capability, version, usable):
    monkeypatch.setattr(triton, '__version__', version)
    verdict, reason = ChunksOnTriton().probe(Device('cuda', 0, 'some GPU', capability))
    assert (verdict, 'needs Triton 3.9' in str(reason)) == (usable, not usable)


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(('dtype', 'dim'), [(BF16, 128), (FP32, 256)])
def test_compiles(request, capability, dtype, dim):
    """And fits: see `compile_only`."""
    if capability == (10, 0) and OLD_TRITON:
        request.applymarker(pytest.mark.xfail(strict=True, reason='Triton before 3.9; the default says so there'))
    given = case(chunk_gated_delta_rule, dtype=dtype, K=dim, V=dim, device='meta', **RAW, **FLAGS)
    inputs, options = Inputs(**given.tensors), Options(dim**-0.5, output_final_state=True, **RAW, **FLAGS)
    with compile_only(capability) as compiled:
        o, final, G, inverse = chunk_forward(inputs, options)
        chunk_backward(inputs, options, G, inverse, o, final)
    print(*compiled, sep='\n')
