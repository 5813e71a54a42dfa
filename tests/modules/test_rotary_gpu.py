"""The rotary embedding on a GPU."""

import pytest
import torch

from fla.modules import RotaryEmbedding
from fla.modules.rotary import rotary_embedding
from tests import bounds

from .gpu import captured_equals_eager, compare, compiled_equals_eager, gpu_tensor, other_device
from .oracle import error, served_by
from .rotary import rotated

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tables(rows, half, device='cuda'):
    angles = torch.arange(rows, device=device)[:, None] * 1e4 ** (-torch.arange(half, device=device) / max(half, 1))
    return angles.cos(), angles.sin()


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('interleaved', [False, True], ids=['halves', 'interleaved'])
@pytest.mark.parametrize(('shape', 'half'), [((2, 77, 3, 128), 64), ((4, 512, 32, 100), 25), ((1, 1, 1, 2), 1)], ids=str)
def test_numerics(shape, half, interleaved, dtype):
    x, (cos, sin) = gpu_tensor(*shape, dtype=dtype, grad=True), tables(2048, half)
    bound = bounds.elementwise(dtype)
    offsets = torch.arange(shape[0], device='cuda') * 7
    for given in (0, 9, offsets):
        compare(rotary_embedding, rotated, (x, cos, sin), bound, interleaved=interleaved, seqlen_offsets=given)
        with torch.no_grad():
            options = {'interleaved': interleaved, 'seqlen_offsets': given}
            packed = torch.stack([x, x, x], 2)
            rotary_embedding(packed[:, :, 1], cos, sin, inplace=True, **options)
            assert torch.equal(packed[:, :, 1], rotary_embedding(x, cos, sin, **options))
            assert torch.equal(packed[:, :, 2], x)


@pytest.mark.parametrize('kind', [torch.int32, torch.int64], ids=str)
def test_packed(kind):
    lengths = torch.randint(0, 300, (777,), generator=torch.Generator().manual_seed(0))
    cu = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to('cuda', kind)
    x = gpu_tensor(1, int(lengths.sum()), 2, 64, dtype=torch.bfloat16, grad=True)
    offsets = (torch.arange(777, device='cuda') % 50).to(kind)
    for given, interleaved in ((5, False), (offsets, False), (offsets, True)):
        options = {'seqlen_offsets': given, 'cu_seqlens': cu, 'interleaved': interleaved}
        compare(rotary_embedding, rotated, (x, *tables(400, 32)), bounds.elementwise(torch.bfloat16), **options)


def test_strided_and_broadcast():
    packed, (cos, sin) = gpu_tensor(2, 64, 3, 8, 128, dtype=torch.bfloat16), tables(64, 64)
    for x in (packed[:, :, 1], packed[:, :, 2].transpose(1, 2), packed[:1, :, 0].expand(2, 64, 8, 128)):
        compare(rotary_embedding, rotated, (x.detach().requires_grad_(), cos, sin), bounds.elementwise(torch.bfloat16))


@served_by('default')
def test_more_than_32_bits():
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip('needs 20 GiB')
    length = 2**31 // 4096 + 5
    x = torch.ones(1, length, 32, 128, dtype=torch.bfloat16, device='cuda')
    cos, sin = tables(length, 64)
    expected = rotated(x[:, -1:].double(), cos[-1:].double(), sin[-1:].double())
    assert error(expected, rotary_embedding(x, cos, sin)[:, -1:]) <= bounds.elementwise(torch.bfloat16)


def test_capture_and_compile():
    x, (cos, sin) = gpu_tensor(2, 64, 4, 128, dtype=torch.bfloat16, grad=True), tables(128, 64)
    cu = torch.tensor([0, 30, 64], dtype=torch.int32, device='cuda')

    def both(x):
        packed = rotary_embedding(x[:1], cos, sin, cu_seqlens=cu)
        return rotary_embedding(packed * 2, cos, sin, interleaved=True, inplace=True, seqlen_offsets=3)

    compiled_equals_eager(both, (x,))
    captured_equals_eager(both, (x.detach(),))


@served_by('default')
def test_layer_does_not_wait():
    layer, q = RotaryEmbedding(128), gpu_tensor(1, 64, 4, 128, dtype=torch.bfloat16)
    cu = torch.tensor([0, 30, 64], dtype=torch.int32, device='cuda')
    layer(q, q, cu_seqlens=cu)
    torch.cuda.set_sync_debug_mode('error')
    try:
        layer(q, q, cu_seqlens=cu)
    finally:
        torch.cuda.set_sync_debug_mode('default')


def test_device_that_is_not_current():
    device = other_device()
    x = gpu_tensor(2, 5, 3, 16, dtype=torch.float32, grad=True, device=device)
    compare(rotary_embedding, rotated, (x, *tables(5, 8, device)), bounds.elementwise(torch.float32))
