"""The norms on a GPU: numbers at many sizes, CUDA graphs, streams, compiled callers, a second GPU."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import trace, use_backend
from fla.modules import GroupNorm, LayerNorm, RMSNorm
from fla.modules.norm.layernorm import rms_norm
from tests import bounds
from tests.modules.norms import BARE, BF16, EVERYTHING, FP16, FP32, KINDS, call, check, everything, given, upstream

pytestmark = pytest.mark.gpu
every_kind = pytest.mark.parametrize('kind', KINDS)
every_dtype = pytest.mark.parametrize('dtype', [BF16, FP16, FP32], ids=['bf16', 'fp16', 'fp32'])
two_gpus = pytest.mark.skipif("__import__('torch').cuda.device_count() < 2", reason='needs two GPUs')


@pytest.mark.parametrize('dim', [64, 100, 128, 1000, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 40000, 65536])
@every_dtype
@every_kind
def test_sizes(kind, dtype, dim):
    for extras in (BARE, EVERYTHING):
        check(kind, given(kind, (3, 50, dim), dtype, extras, device='cuda'))


@pytest.mark.parametrize('shape', [(1, 4), (1, 1, 4096), (100_000, 4), (20_000, 128), (3000, 8192)], ids=str)
@every_kind
def test_shapes(kind, shape):
    check(kind, given(kind, shape, BF16, device='cuda'), eps=0.1)
    check(kind, given(kind, shape, BF16, wide=('weight', 'bias', 'residual'), device='cuda'), eps=0.1)


@every_kind
def test_nothing(kind):
    for shape in ((0, 8), (2, 0, 8)):
        for name, x in everything(kind, given(kind, shape, device='cuda')).items():
            assert x.numel() == 0 or name in ('dweight', 'dbias')


@every_kind
def test_strided(kind):
    tensors = given(kind, (6, 40, 128), BF16, device='cuda')
    expected = everything(kind, tensors)
    for layout in (
        lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat((x[..., :1], x), -1)[..., 1:],  # an address that vector loads cannot take
    ):
        found = everything(kind, {name: layout(x) if x.dim() > 1 else x for name, x in tensors.items()})
        for name, x in expected.items():
            assert bounds.relative_rms(x, found[name]) <= bounds.of_norm(BF16), name


@every_kind
def test_same_bits_twice(kind):
    for dim in (128, 4096, 65536):
        tensors = given(kind, (700, dim), BF16, device='cuda')
        first, second = everything(kind, tensors), everything(kind, tensors)
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize('dim', [4096, 8192])
def test_more_than_two_to_the_31_elements(dim):
    """Rows in registers and rows tile by tile."""
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip('needs 24 GB')
    rows = 2**31 // dim + 3
    x = torch.empty(rows, dim, dtype=BF16, device='cuda')
    x[:-2] = 0
    x[-2:].normal_()
    x.requires_grad_()
    weight = torch.ones(dim, device='cuda', requires_grad=True)
    y = rms_norm(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones((), dtype=BF16, device='cuda').expand_as(y))
    last = x[-2:].detach().double().requires_grad_()
    exact = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-5)
    (right,) = torch.autograd.grad(exact.sum(), last)
    assert bounds.relative_rms(exact, y[-2:]) <= bounds.of_norm(BF16)
    assert bounds.relative_rms(right, dx[-2:]) <= bounds.of_norm(BF16)
    assert bounds.relative_rms(exact.sum(0), dweight) <= bounds.of_norm(torch.float32)


@every_kind
def test_no_synchronisation(kind):
    leaves = {name: x.requires_grad_() for name, x in given(kind, (64, 256), BF16, device='cuda').items()}
    gradients = upstream(call(kind, leaves))

    def step():
        return torch.autograd.grad(call(kind, leaves), list(leaves.values()), gradients)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode('default')


@every_kind
def test_captured(kind):
    """A CUDA graph from another stream replays on new numbers."""
    tensors = given(kind, (64, 256), BF16, device='cuda')
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    gradients = upstream(call(kind, leaves))

    def step():
        results = call(kind, leaves)
        return [*results, *torch.autograd.grad(results, list(leaves.values()), gradients)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    fresh = given(kind, (64, 256), BF16, device='cuda', seed=1)
    with torch.no_grad():
        for name, x in fresh.items():
            leaves[name].copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    right = everything(kind, fresh).values()
    assert all(torch.equal(got.detach(), x.detach()) for got, x in zip(results, right, strict=True))


@pytest.mark.parametrize('mode', ['default', 'reduce-overhead'])
@pytest.mark.parametrize('kind', ['rms prenorm', 'layer', 'sigmoid', 'l2'])
def test_compiled(kind, mode):
    torch._dynamo.reset()
    function, options = KINDS[kind]
    compiled = torch.compile(function, fullgraph=True, mode=mode)
    optional = {} if kind == 'l2' else {'weight': None}
    tensors = given(kind, (64, 256), BF16, device='cuda')
    right = everything(kind, tensors).values()
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
        with use_backend('default', op='modules'):
            results = compiled(**(optional | leaves), **options)
        results = results if isinstance(results, tuple) else (results,)
        found = [*results, *torch.autograd.grad(results, list(leaves.values()), upstream(results))]
        for got, x in zip(found, right, strict=True):
            assert bounds.relative_rms(x, got) <= bounds.of_norm(BF16)
    torch._dynamo.reset()


@two_gpus
@every_kind
def test_a_gpu_that_is_not_the_current_one(kind):
    here, there = (everything(kind, given(kind, (50, 256), BF16, device=device)) for device in ('cuda:0', 'cuda:1'))
    assert all(torch.equal(x.cpu(), there[name].cpu()) for name, x in here.items())


def test_classes_run_the_default():
    x = torch.randn(4, 64, device='cuda', dtype=BF16)
    for norm in (RMSNorm(64), LayerNorm(64, bias=True), GroupNorm(4, 64)):
        with trace() as recorded:
            norm.cuda()(x).float().sum().backward()
        assert recorded.last_backend('modules') == 'default'
        assert norm.weight.grad is not None
