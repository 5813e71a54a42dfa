"""The kernels of Kimi delta attention on a GPU, at sizes that the interpreter is too slow for."""

import pytest

pytest.importorskip('triton')
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from tests.ops import gpu

pytestmark = pytest.mark.gpu
CHUNK, RECURRENT = chunk_kda, fused_recurrent_kda
RAW = [
    {'use_gate_in_kernel': True},
    {'use_gate_in_kernel': True, 'lower_bound': -5.0},
    {'use_gate_in_kernel': True, 'lower_bound': -5.0, 'A_log': False, 'dt_bias': False},
]


@gpu.every_dtype
@gpu.every_size
def test_sizes(dtype, sizes):
    gpu.sizes(CHUNK, dtype, sizes)


@gpu.every_dtype
def test_gates(dtype):
    gpu.gates(CHUNK, dtype)


@gpu.every_dtype
def test_lengths(dtype):
    gpu.lengths(CHUNK, dtype)


@gpu.every_dtype
def test_packed(dtype):
    gpu.packed(CHUNK, dtype)


@pytest.mark.parametrize('flags', [*gpu.FLAG_SETS, *RAW], ids=gpu.name_of_flags)
@gpu.every_dtype
def test_flags(dtype, flags):
    gpu.flags(CHUNK, dtype, flags)


@pytest.mark.parametrize('flags', [{}, *gpu.FLAG_SETS, *RAW], ids=gpu.name_of_flags)
@gpu.every_dtype
def test_decoding(dtype, flags):
    gpu.decoding(RECURRENT, dtype, flags)


@pytest.mark.parametrize('function', [CHUNK, RECURRENT], ids=['chunk', 'recurrent'])
def test_strided_inputs(function):
    gpu.strided_inputs(function)


def test_same_bits_twice():
    gpu.same_bits_twice(CHUNK)


def test_same_bits_on_a_full_gpu():
    gpu.same_bits_on_a_full_gpu(CHUNK)


def test_saved_intermediates_give_the_same_gradients():
    """Another kernel writes o, which adds in another order."""
    gpu.same_bits_twice(CHUNK, but=('o',), disable_recompute=True)
    gpu.check(CHUNK, gpu.case(CHUNK, dtype=gpu.BF16, **gpu.LARGE, T=333, B=2, disable_recompute=True))


def test_without_dispatch():
    gpu.without_dispatch(CHUNK)


@gpu.every_place_of_nan
@pytest.mark.parametrize('function', [CHUNK, RECURRENT], ids=['chunk', 'recurrent'])
def test_nan_passes_through(function, lens, name):
    gpu.nan_passes_through(function, lens, name, 'cuda')


@pytest.mark.parametrize('function', [CHUNK, RECURRENT], ids=['chunk', 'recurrent'])
def test_same_bits_of_other_kernels(function):
    gpu.same_bits_of_other_kernels(function)


@gpu.every_dtype
@pytest.mark.parametrize('function', [CHUNK, RECURRENT], ids=['chunk', 'recurrent'])
def test_the_reference(function, dtype):
    gpu.reference_on_a_gpu(function, dtype)
