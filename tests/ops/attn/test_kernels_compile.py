"""The kernels of attention compile for several GPUs, and fit their resources."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.attn.kernels.launch import attention_backward, attention_forward
from tests.ops.attn.attention import BF16, FP16, FP32
from tests.triton_support.compile_only import compile_only


def compiled_for(capability, dtype, dim, everything, packed=False, queries=256):
    """Compiles forward and backward, and checks their resources against the GPU's."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device='meta')

    q, k, v = empty(1, queries, 4, dim), empty(1, 256, 2, dim), empty(1, 256, 2, dim)
    g = empty(1, 256, 4, dtype=FP32) if everything else None
    sink = empty(4, dtype=FP32) if everything else None
    lens = empty(3, dtype=torch.int32) if packed else None
    window = 100 if everything else 0
    with compile_only(capability) as compiled:
        o, lse = attention_forward(q, k, v, g, sink, lens, 1.0, window)
        attention_backward(q, k, v, g, sink, lens, 1.0, window, o, lse, o)
    print(*compiled, sep='\n')


@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_compiles(capability):
    compiled_for(capability, BF16, 128, everything=False)


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(
    ('dtype', 'dim'), [(BF16, 64), (BF16, 128), (BF16, 256), (FP16, 128), (FP32, 64), (FP32, 128), (FP32, 256)]
)
def test_compiles_with_everything(capability, dtype, dim):
    """`compile_only` also checks that the kernels fit."""
    compiled_for(capability, dtype, dim, everything=True)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (12, 0)])
def test_packed_sequences_and_few_queries(capability):
    compiled_for(capability, BF16, 128, everything=True, packed=True)
    compiled_for(capability, BF16, 256, everything=False, queries=1)
