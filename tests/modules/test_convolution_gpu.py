"""The short convolution on a card: numbers against float64, large tensors, graphs, streams, compiled code, other devices."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import trace
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from tests import bounds

from .convolution import UPDATES, check_update, convolved
from .oracle import served_by

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_triton(function, *args, **options):
    with trace() as recorded:
        result = function(*args, **options)
    assert recorded.last_backend(f'modules.{function.__name__}') == 'default'
    return result


def case(batch, length, channels, width, count, dtype, device='cuda'):
    generator = torch.Generator(device).manual_seed(0)
    shapes = {
        'x': (batch, length, channels),
        'weight': (channels, width),
        'bias': (channels,),
        'residual': (batch, length, channels),
        'initial_state': (count, channels, width),
    }
    return {n: torch.randn(shape, device=device, generator=generator).to(dtype) for n, shape in shapes.items()}


def compare(arguments, **options):
    """The definition in float64."""
    given = {n: t.clone().requires_grad_() for n, t in arguments.items()}
    exact = {n: t.double().requires_grad_() for n, t in arguments.items()}
    results = []
    for inputs, call in ((given, lambda **o: on_triton(causal_conv1d, **o)), (exact, convolved)):
        y, final = call(**inputs, **options)
        # incoming gradients that every dtype holds exactly
        generator = torch.Generator(y.device).manual_seed(1)
        results_of = [y] if final is None or not options.get('output_final_state') else [y, final]
        weights = [torch.randint(-8, 9, o.shape, device=o.device, generator=generator).to(o) for o in results_of]
        gradients = torch.autograd.grad(results_of, list(inputs.values()), weights, materialize_grads=True)
        results.append((results_of, gradients))
    (got, got_grads), (expected, expected_grads) = results
    names = (*('y', 'final')[: len(got)], *arguments)
    for name, a, b in zip(names, (*expected, *expected_grads), (*got, *got_grads), strict=True):
        assert bounds.relative_rms(a.detach(), b.detach()) <= bounds.of_convolution(b.dtype), name


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
@pytest.mark.parametrize('width', [1, 2, 3, 4, 8])
def test_everything(dtype, packed, width):
    cu = torch.tensor([0, 0, 1, 4, 137, 139, 1000, 2500, 2500], device='cuda') if packed else None
    batch, length, count = (1, 2500, 8) if packed else (3, 1100, 3)
    arguments = case(batch, length, 333, width, count, dtype)
    compare(arguments, activation='silu', cu_seqlens=cu, output_final_state=True)


@pytest.mark.parametrize('activation', [None, 'swish'])
@pytest.mark.parametrize('extras', [(), ('bias',), ('residual',), ('initial_state',)], ids=str)
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_one_at_a_time(packed, extras, activation):
    cu = torch.tensor([0, 5, 5, 500], device='cuda', dtype=torch.int32) if packed else None
    arguments = case(1, 500, 40, 4, 3, torch.float32) if packed else case(3, 500, 40, 4, 3, torch.float32)
    arguments = {name: arguments[name] for name in ('x', 'weight', *extras)}
    compare(arguments, activation=activation, cu_seqlens=cu, output_final_state='initial_state' in extras)


def test_strided_and_broadcast():
    arguments = case(2, 90, 40, 4, 2, torch.bfloat16)
    x = arguments['x']
    apart, columns = torch.cat([x, x], -1)[..., 20:60], torch.stack([x, x], -1)[..., 0]
    for one in (apart, columns, x[:, :1].expand_as(x), x.mT.contiguous().mT):
        given = {n: t.detach().requires_grad_() for n, t in {**arguments, 'x': one}.items()}
        exact = {n: t.detach().double().requires_grad_() for n, t in given.items()}
        y, expected = on_triton(causal_conv1d, **given, activation='silu')[0], convolved(**exact, activation='silu')[0]
        dy = torch.ones((), device='cuda').expand_as(y)
        found = torch.autograd.grad(y, list(given.values()), dy.to(y.dtype))
        wanted = torch.autograd.grad(expected, list(exact.values()), dy.double())
        for name, a, b in zip(('y', *arguments), (expected, *wanted), (y, *found), strict=True):
            assert bounds.relative_rms(a.detach(), b.detach()) <= bounds.of_convolution(torch.bfloat16), name


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('update', UPDATES)
def test_updates(update, dtype):
    for count, channels in ((3, 20), (70, 4096), (1, 1)):
        check_update(update, count, channels, dtype, 'cuda')


def test_update_of_65536_channels():
    check_update('everything', 2, 65536, torch.bfloat16, 'cuda')


@pytest.mark.parametrize('channels', [1, 65536])
def test_channels(channels):
    compare(case(2, 70, channels, 4, 2, torch.bfloat16), activation='swish', output_final_state=True)


def test_more_than_2_31_numbers():
    x = torch.zeros(1, 70000, 32768, device='cuda', dtype=torch.bfloat16)
    x[:, -40:] = torch.randn(40, 32768, device='cuda')
    weight = torch.randn(32768, 4, device='cuda').bfloat16()
    y, final = on_triton(causal_conv1d, x, weight, output_final_state=True, activation='silu')
    expected, last = convolved(x[:, -60:].double(), weight.double(), activation='silu')
    assert bounds.relative_rms(expected[:, -40:], y[:, -40:]) <= bounds.of_convolution(torch.bfloat16)
    assert torch.equal(final.double(), last)
    x.requires_grad_()
    y, _ = on_triton(causal_conv1d, x, weight, activation='silu')
    (dx,) = torch.autograd.grad(y, x, torch.ones((), device='cuda', dtype=torch.bfloat16).expand_as(y))
    few = x.detach()[:, -60:].double().requires_grad_()
    (wanted,) = torch.autograd.grad(convolved(few, weight.double(), activation='silu')[0].sum(), few)
    assert bounds.relative_rms(wanted[:, -40:], dx[:, -40:]) <= bounds.of_convolution(torch.bfloat16)


@served_by('default')
def test_the_same_bits():
    cu = torch.tensor([0, 700, 5000], device='cuda', dtype=torch.int32)

    def all_of_it():
        given = {n: t.requires_grad_() for n, t in case(1, 5000, 512, 4, 2, torch.bfloat16).items()}
        y, final = causal_conv1d(**given, output_final_state=True, activation='silu', cu_seqlens=cu)
        return y, final, *torch.autograd.grad(y.float().square().sum() + final.float().sum(), list(given.values()))

    for a, b in zip(all_of_it(), all_of_it(), strict=True):
        assert torch.equal(a, b)


@served_by('default')
def test_graph_and_stream():
    """A captured graph follows new lengths, and updates its cache."""
    given = {n: t.requires_grad_() for n, t in case(1, 600, 96, 4, 3, torch.bfloat16).items()}
    cu = torch.tensor([0, 100, 200, 600], device='cuda')
    cache, step = torch.zeros(5, 96, 4, device='cuda'), torch.randn(5, 96, device='cuda')
    weight = given['weight'].detach().float()

    def all_of_it():
        y, final = causal_conv1d(**given, output_final_state=True, activation='silu', cu_seqlens=cu)
        return y, final, *torch.autograd.grad(y.float().square().sum() + final.float().sum(), list(given.values()))

    def decode():
        with torch.no_grad():
            return causal_conv1d_update(step, cache, None, weight, None, 'silu')[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_of_it(), decode()
    torch.cuda.current_stream().wait_stream(stream)
    cache.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, decoded = all_of_it(), decode()
    cu.copy_(torch.tensor([0, 0, 17, 600]))
    for _ in range(2):
        graph.replay()
    for a, b in zip(all_of_it(), captured, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(cache[:, :, 2:], step[:, :, None].expand(5, 96, 2))
    cache.zero_()
    decode()
    assert torch.equal(decode(), decoded)


@served_by('default')
def test_no_synchronisation():
    given = case(1, 600, 96, 4, 2, torch.bfloat16)
    given = {n: t.requires_grad_() for n, t in given.items()}
    cu = torch.tensor([0, 100, 600], device='cuda')
    torch.cuda.set_sync_debug_mode('error')
    try:
        y, final = causal_conv1d(**given, output_final_state=True, activation='silu', cu_seqlens=cu)
        torch.autograd.grad(y.sum() + final.sum(), list(given.values()))
    finally:
        torch.cuda.set_sync_debug_mode('default')


@served_by('default')
@pytest.mark.parametrize('mode', ['default', 'reduce-overhead'])
def test_compiled(mode):
    given = case(2, 300, 96, 4, 2, torch.bfloat16)
    inputs = [t.requires_grad_() for t in given.values()]

    def call(x, weight, bias, residual, state):
        y, final = causal_conv1d(x * 2, weight, bias, residual, state, True, 'silu')
        return y.float().square().sum() + final.float().sum()

    compiled = torch.compile(call, fullgraph=True, mode=mode)
    wanted = torch.autograd.grad(call(*inputs), inputs)
    for _ in range(3):
        for a, b in zip(wanted, torch.autograd.grad(compiled(*inputs), inputs), strict=True):
            assert bounds.relative_rms(a, b) <= bounds.of_compiled(bounds.of_convolution(torch.bfloat16))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='one GPU')
def test_on_another_device():
    compare(case(2, 70, 64, 4, 2, torch.bfloat16, 'cuda:1'), activation='silu', output_final_state=True)
