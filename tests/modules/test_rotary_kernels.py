"""The Triton kernel of the rotary embedding, interpreted and compiled."""

import pytest
import torch

pytest.importorskip('triton')
import triton
import triton.language as tl

from fla.backends import trace
from fla.modules.kernels.rotary import _quotient, _reciprocal
from fla.modules.rotary import rotary_embedding
from tests import bounds
from tests.triton_support.compile_only import compile_only

from .oracle import error, served_by, tensor
from .test_rotary import oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def against(x, cos, sin, bound, **options):
    """Output and gradient of x of the default against float64."""
    x = x.detach().requires_grad_()
    wide = x.detach().double().requires_grad_()
    with trace() as recorded:
        y = rotary_embedding(x, cos, sin, **options)
    assert recorded.last_backend('modules.rotary_embedding') == 'default'
    expected = oracle(wide, cos.double(), sin.double(), **options)
    dy = tensor(*y.shape, dtype=y.dtype)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, True)
    assert error(expected, y) <= bound
    (dx,) = torch.autograd.grad(y, x, dy)
    (wanted,) = torch.autograd.grad(expected, wide, dy.double())
    assert error(wanted, dx) <= bound
    with torch.no_grad():
        out = x.detach().clone(memory_format=torch.preserve_format)
        assert rotary_embedding(out, cos, sin, inplace=True, **options) is out
        assert torch.equal(out, y)


@pytest.mark.pairwise
@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('interleaved', [False, True], ids=['halves', 'interleaved'])
@pytest.mark.parametrize(('rotated', 'dim'), [(6, 6), (4, 7), (16, 16), (2, 2), (0, 3)])
def test_numerics(rotated, dim, interleaved, dtype):
    x = tensor(2, 5, 3, dim, dtype=dtype)
    cos, sin = (tensor(9, rotated // 2, dtype=torch.float32) for _ in range(2))
    for offsets in (0, 4, torch.tensor([3, 1])):
        against(x, cos, sin, bounds.elementwise(dtype), interleaved=interleaved, seqlen_offsets=offsets)


@pytest.mark.interpreted
@pytest.mark.parametrize('kind', [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize('lengths', [(3, 0, 1, 5, 0), (9,), (0, 0, 9), (1,) * 9, (2, 7)], ids=str)
def test_packed(lengths, kind):
    cu = torch.tensor([0, *lengths]).cumsum(0).to(kind)
    x, cos, sin = tensor(1, 9, 2, 6, dtype=torch.float32), tensor(14, 2), tensor(14, 2)
    bound = bounds.elementwise(torch.float32)
    offsets = torch.arange(len(lengths), dtype=kind) % 4
    for given, interleaved in ((0, False), (3, True), (offsets, False), (offsets, True)):
        against(x, cos, sin, bound, seqlen_offsets=given, cu_seqlens=cu, interleaved=interleaved)


@pytest.mark.interpreted
def test_many_rows():
    """Programs span several steps, heads and batch rows, and the last one is partial."""
    cos, sin = tensor(7, 16, dtype=torch.bfloat16), tensor(7, 16, dtype=torch.float16)
    x = tensor(3, 7, 5, 32, dtype=torch.bfloat16)
    against(x, cos, sin, bounds.elementwise(torch.bfloat16))


@triton.jit
def divide(n, out, d, reciprocal, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, _quotient(tl.load(n + at), d, reciprocal))


@pytest.mark.interpreted
def test_quotients():
    """Exact where a truncated product is most easily wrong: around multiples of d, up to 2^31."""
    top = 2**31 - 1
    for d in (1, 2, 3, 5, 7, 12, 641, 2047, 2048, 2049, 65537, 2**30 - 1, 2**30, 2**30 + 1, top - 1, top):
        assert _reciprocal(d) >= 2**32  # otherwise Triton would pass it as 32 bits
        multiples = [d * (top // d * i // 63) for i in range(64)]
        n = torch.tensor([max(0, min(top, one + more)) for one in multiples for more in (-1, 0, 1, d // 2)])
        for dtype in (torch.int32, torch.int64):
            out = torch.empty(256, dtype=dtype)
            divide[(1,)](n.to(dtype), out, d, _reciprocal(d), 256)
            assert torch.equal(out.long(), n // d), d


@pytest.mark.interpreted
@pytest.mark.parametrize('shape', [(5, 1, 3, 32), (2, 9, 1, 32), (1, 3, 40, 16), (40, 1, 1, 8), (2, 3, 16, 32)], ids=str)
def test_rows_of_several_steps_and_batches(shape):
    """A program has a part of a step, several steps, or several batch rows."""
    cos, sin = (tensor(12, shape[3] // 2, dtype=torch.float32) for _ in range(2))
    for offsets in (0, torch.arange(shape[0]) % 4):
        against(tensor(*shape, dtype=torch.float32), cos, sin, bounds.elementwise(torch.float32), seqlen_offsets=offsets)


@pytest.mark.interpreted
@served_by('default')
def test_strides():
    bound = bounds.elementwise(torch.float32)
    cos, sin = tensor(12, 8, dtype=torch.float32)[::2, 2:4], tensor(2, 6, dtype=torch.float32).t()
    packed = tensor(2, 5, 3, 3, 6, dtype=torch.float32)
    for x in (
        packed[:, :, 1],
        packed[:, :, :, 1],
        tensor(6, 3, 5, 2, dtype=torch.float32).permute(3, 2, 1, 0),
        tensor(2, 5, 3, 12, dtype=torch.float32)[..., ::2],
        packed[:, :1, 0].transpose(1, 2),
    ):
        against(x, cos, sin, bound)
    broadcast = tensor(1, 5, 1, 6, dtype=torch.float32).expand(2, 5, 3, 6)
    against(broadcast.contiguous(), cos, sin, bound)
    assert torch.equal(rotary_embedding(broadcast, cos, sin), rotary_embedding(broadcast.contiguous(), cos, sin))
    x = torch.ones(1, 5, 1, 6, requires_grad=True)
    (dx,) = torch.autograd.grad(rotary_embedding(x, cos, sin).sum(), x)
    (wanted,) = torch.autograd.grad(oracle(x.double(), cos.double(), sin.double()).sum(), x)
    assert error(wanted, dx) <= bound


@pytest.mark.interpreted
@served_by('default')
def test_in_place():
    """Rotates a slice of packed queries, keys and values in place, once, and leaves the rest, also in training."""
    cos, sin = tensor(5, 3, dtype=torch.float32), tensor(5, 3, dtype=torch.float32)
    qkv = tensor(2, 5, 3, 2, 6, dtype=torch.float32)
    before = qkv.clone()
    version = qkv._version
    rotary_embedding(qkv[:, :, 1], cos, sin, inplace=True)
    assert qkv._version > version
    assert torch.equal(qkv[:, :, 0::2], before[:, :, 0::2])
    expected = oracle(before[:, :, 1].double(), cos.double(), sin.double())
    assert error(expected, qkv[:, :, 1]) <= bounds.elementwise(torch.float32)

    leaf = tensor(1, 5, 1, 6, dtype=torch.float32, grad=True)
    with trace() as recorded:
        y = rotary_embedding(leaf * 2, cos, sin, inplace=True)
    assert recorded.last_backend('modules.rotary_embedding') == 'default'
    (dx,) = torch.autograd.grad(y.square().sum(), leaf)
    wide = leaf.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(oracle(wide * 2, cos.double(), sin.double()).square().sum(), wide)
    assert error(wanted, dx) <= bounds.of_module(torch.float32)


@pytest.mark.interpreted
@served_by('default')
def test_nothing_is_read_beyond_the_tables(monkeypatch):
    monkeypatch.setattr('fla.modules.rotary.ops.readable', lambda one: False)  # as on a GPU
    x, table = torch.ones(1, 3, 1, 2), torch.arange(4.0)[:, None]
    y = rotary_embedding(x, table, 0 * table, seqlen_offsets=torch.tensor([2]))
    assert y[0, :, 0, 0].tolist() == [2, 3, 3]
    y = rotary_embedding(x, table, 0 * table, seqlen_offsets=torch.tensor([-2]))
    assert y[0, :, 0, 0].tolist() == [0, 0, 0]


@pytest.mark.interpreted
def test_empty_and_who_serves():
    table = torch.ones(4, 2)
    for shape in ((0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4)):
        x = torch.zeros(shape, requires_grad=True)
        y = rotary_embedding(x, table, table)
        assert y.shape == shape
        assert torch.autograd.grad(y.sum(), x)[0].shape == shape
    none = torch.zeros(1, dtype=torch.int32)
    assert rotary_embedding(torch.zeros(1, 0, 2, 4), table, table, cu_seqlens=none).shape == (1, 0, 2, 4)
    x = torch.ones(1, 3, 2, 4)
    for arguments in ((x.double(), table, table), (x, table.clone().requires_grad_(), table)):
        with trace() as recorded:
            rotary_embedding(*arguments)
        assert recorded.last_backend('modules.rotary_embedding') == 'reference'
    x.requires_grad_()
    with pytest.raises(RuntimeError, match='double backward'):
        torch.autograd.grad(rotary_embedding(x, table, table).sum(), x, create_graph=True)


@pytest.mark.interpreted
@served_by('default')
def test_operators_and_compiled_callers():
    from fla.modules.kernels import rotary

    cos, sin = tensor(12, 3, dtype=torch.float32), tensor(12, 3, dtype=torch.float32)
    x = tensor(1, 5, 2, 6, dtype=torch.float32, grad=True)
    offsets, cu = torch.tensor([1, 2]), torch.tensor([0, 2, 5])
    torch.library.opcheck(rotary.rotate.op, (x, cos, sin, offsets, cu, 0, False))
    torch.library.opcheck(rotary.rotate_in_place.op, (x.detach(), cos, sin, None, None, 1, True))

    def both(x, offset):
        y = rotary_embedding(x * 2, cos, sin, seqlen_offsets=offset)
        return rotary_embedding(y, cos, sin, interleaved=True, inplace=True)

    compiled = torch.compile(both, fullgraph=True, backend='aot_eager', dynamic=True)
    for length, offset in ((5, 1), (7, 3)):
        x = tensor(2, length, 2, 6, dtype=torch.float32, grad=True)
        eager, ours = both(x, offset), compiled(x, offset)
        torch.testing.assert_close(ours, eager)
        (a,), (b,) = torch.autograd.grad(eager.sum(), x), torch.autograd.grad(ours.sum(), x)
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        x = tensor(2, 4, 2, 6, dtype=torch.float32)
        torch.testing.assert_close(compiled(x, 2), both(x, 2))


@pytest.mark.pairwise
@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_compiles(capability):
    """No spills, and 16-byte accesses, also for slices of packed queries, keys and values."""
    from fla.modules.kernels.rotary import _backward, _forward, _in_place

    with compile_only(capability) as compiled:
        cu = torch.empty(4, dtype=torch.int32, device='meta')
        for dtype, half in ((torch.bfloat16, 64), (torch.bfloat16, 32), (torch.float32, 64)):
            q = torch.empty(2, 64, 3, 8, 128, dtype=dtype, device='meta')[:, :, 0]
            table = torch.empty(64, half, device='meta')
            for interleaved in (False, True):
                _forward(q, table, table, None, None, 0, interleaved)
                _in_place(q, table, table, cu[:2].long(), None, 0, interleaved)
            _backward(table, table, None, cu, 0, False, q)
    print(*compiled, sep='\n')
    assert all(one.spilled == 0 for one in compiled)
    assert all('global.b16' not in one.kernel.asm['ptx'] for one in compiled)
    assert all('global.v4.b32' in one.kernel.asm['ptx'] for one in compiled)
    assert all('div.s32' not in one.kernel.asm['ptx'] for one in compiled)
