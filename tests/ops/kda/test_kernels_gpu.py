"""The kernels of chunked KDA on a GPU, at sizes that the interpreter is too slow for."""

import pytest

pytest.importorskip('triton')
from tests.ops.kda.test_kernels import BF16, EVERYTHING, FP16, FP32, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize('dtype', [BF16, FP16, FP32])
@pytest.mark.parametrize('dim', [128, 64, 256, 100])
@pytest.mark.parametrize('gates', [{'strength': 1.0}, {'strength': 1e-3}, {'strength': 10.0}])
def test_against_definition(dtype, dim, gates):
    check(dtype, T=333, B=2, H=2, HV=4, K=dim, V=dim, device='cuda', **gates)


@pytest.mark.parametrize('dtype', [BF16, FP32])
@pytest.mark.parametrize('raw', ['softplus', 'bounded', 'bounded, no rate'])
def test_packed_with_everything(dtype, raw):
    check(dtype, lens=[0, 1, 130, 64, 0, 65, 3], K=128, V=128, raw=raw, keep=True, device='cuda', **EVERYTHING)
