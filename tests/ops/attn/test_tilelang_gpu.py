"""The TileLang backend of attention on a Hopper GPU: errors, bits, what stands behind a sequence, CUDA graphs, streams,
compiled callers."""

import importlib.util

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import use_backend
from fla.ops.attn import parallel_attn
from tests.ops.attn.attention import BF16, FP16, check, inputs, results, upstream

pytestmark = pytest.mark.gpu

LENS = [0, 0, 1, 130, 130, 300, 333, 333]
CASES = {
    'plain': ({}, {}),
    'one head of keys': ({'kv_heads': 1}, {'scale': 0.3}),
    'negative scale': ({'kv_heads': 4}, {'scale': -2.0}),
    'scale of 0': ({'kv_heads': 4}, {'scale': 0}),
    'window of 1': ({}, {'window_size': 1}),
    'window': ({}, {'window_size': 70}),
    'long window': ({'length': 1000}, {'window_size': 300}),
    'cached': ({'queries': 100}, {}),
    'cached, window': ({'queries': 200, 'length': 1000}, {'window_size': 70}),
    'one query': ({'queries': 1}, {}),
    'packed': ({'batch': 1}, {'cu_seqlens': LENS}),
    'packed, window': ({'batch': 1}, {'cu_seqlens': LENS, 'window_size': 70}),
}


@pytest.fixture(autouse=True)
def hopper():
    if importlib.util.find_spec('tilelang') is None:
        pytest.skip('TileLang is not installed')
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip('the kernel is for compute capability 9.x')


def given(dim=128, **shapes):
    return inputs(**{'dtype': BF16, 'length': 333, 'dim': dim, 'value_dim': dim, 'device': 'cuda', **shapes})


@pytest.mark.parametrize('dtype', [BF16, FP16], ids=['bf16', 'fp16'])
@pytest.mark.parametrize('dim', [64, 128])
def test_cases(dtype, dim):
    """One test, because all calls share two kernels of each kind."""
    for shapes, options in CASES.values():
        for index in (torch.int32, torch.int64) if 'cu_seqlens' in options else (None,):
            more = dict(options)
            if index is not None:
                more['cu_seqlens'] = torch.tensor(options['cu_seqlens'], dtype=index, device='cuda')
            check('tilelang', given(dim, dtype=dtype, **shapes), **more)


def test_lengths():
    for length in (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 2051):
        check('tilelang', given(length=length, batch=1, heads=2, kv_heads=1))


@pytest.mark.parametrize('lens', [[0, 333], [0, *range(1, 71)], [0, 0, 100, 100], [0, 64, 128, 1024]], ids=len)
def test_packed_sequences(lens):
    check('tilelang', given(batch=1, length=lens[-1]), cu_seqlens=torch.tensor(lens, device='cuda'))


@pytest.mark.parametrize('bad', [torch.nan, torch.inf])
def test_what_stands_behind_a_sequence_does_not_matter(bad):
    """In a batch row, and in a packed sequence."""
    for batch, cu_seqlens in ((2, None), (1, torch.tensor([0, 70, 333], device='cuda'))):
        tensors = given(batch=batch)
        spoiled = {name: x.clone() for name, x in tensors.items()}
        for x in spoiled.values():
            (x[1:] if cu_seqlens is None else x[:, 70:]).fill_(bad)
        steps = 333 if cu_seqlens is None else 70
        clean, found = (results('tilelang', x, False, cu_seqlens=cu_seqlens)['o'][:1, :steps] for x in (tensors, spoiled))
        assert torch.equal(clean, found)


def test_strides_and_same_bits_twice():
    tensors = given()
    strided = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in tensors.items()}
    first, second, third = (results('tilelang', x) for x in (tensors, tensors, strided))
    for name, x in first.items():
        assert torch.equal(x, second[name])
        assert torch.equal(x, third[name])


def test_captured():
    """A graph replays on new numbers and lengths; the first call was not captured."""
    leaves = {name: x.requires_grad_() for name, x in given(batch=1).items()}
    lens = torch.tensor(LENS, device='cuda')

    def step():
        with use_backend('tilelang', op='attn'):
            o = parallel_attn(**leaves, cu_seqlens=lens)
        return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for x in leaves.values():
            x.copy_(x.flip(1))
    lens.copy_(torch.tensor([0, 5, 5, 100, 200, 200, 201, 333]))
    graph.replay()
    torch.cuda.synchronize()
    found = [x.clone() for x in captured]
    assert all(torch.equal(x, y) for x, y in zip(found, step(), strict=True))


def test_on_the_current_stream():
    """The kernel waits for earlier work of its stream."""
    tensors = given()
    with torch.no_grad(), use_backend('tilelang', op='attn'):
        right = parallel_attn(**tensors)
        busy = torch.zeros(2**28, device='cuda')
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            v = torch.zeros_like(tensors['v'])
            for _ in range(20):
                busy.add_(1)
            v.copy_(tensors['v'])
            late = parallel_attn(tensors['q'], tensors['k'], v)
        torch.cuda.synchronize()
    assert torch.equal(late, right)


def test_compiled_callers():
    tensors = given()
    wanted = results('tilelang', tensors)
    leaves = [x.requires_grad_() for x in tensors.values()]
    compiled = torch.compile(lambda q, k, v: parallel_attn(q, k, v), fullgraph=True, backend='aot_eager')
    with use_backend('tilelang', op='attn'):
        o = compiled(*leaves)
        got = torch.autograd.grad(o, leaves, upstream(o))
    assert all(torch.equal(x, y) for x, y in zip((o, *got), wanted.values(), strict=True))


def test_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip('one GPU')
    assert torch.cuda.current_device() == 0
    check('tilelang', given(device='cuda:1'))
