"""The package causal-conv1d with a stand-in for it: what is accepted, what it gets, and what comes back. On a GPU the
package itself, where it is installed."""

import inspect

import pytest
import torch

from fla.backends import default_dispatcher, explain, use_backend
from fla.modules.backends import causal_conv1d as backend
from fla.modules.backends.causal_conv1d import CausalConv1dBackend
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from tests import bounds
from tests.ops.vendors import BF16, FP32, H100, fakes, install, odd, on_16, pretend, ran, trust
from tests.vendor_signatures import SIGNATURES

from .convolution import convolved
from .oracle import opcheck
from .test_convolution import oracle


def causal_conv1d_fn(
    x, weight, bias, seq_idx, initial_states=None, return_final_states=False, final_states_out=None, activation=None
):
    """With what the package checks, and that it takes x for what it is: otherwise it reads `[B, D, T]`."""
    assert x.shape[1] == weight.shape[0]
    assert x.stride(1) == 1 < x.stride(2)
    assert x.stride(0) % 8 == x.stride(2) % 8 == 0
    assert on_16(x)
    assert bias is None or bias.is_contiguous()
    cu = None
    if seq_idx is not None:
        assert (seq_idx.shape, seq_idx.dtype) == ((1, x.shape[2]), torch.int32)
        cu = torch.tensor([0, *(seq_idx[0].diff().nonzero()[:, 0] + 1).tolist(), x.shape[2]])
    wide = (None if one is None else one.float() for one in (x.transpose(1, 2), weight, bias))
    y = oracle(*wide, activation=activation, cu_seqlens=cu)[0].transpose(1, 2).to(x.dtype)
    if y.requires_grad:
        y.register_hook(lambda dy: ALIGNED.append(on_16(dy) and dy.stride(0) % 8 == dy.stride(2) % 8 == 0))
    return y


ALIGNED: list[bool] = []  # whether each gradient was aligned when the stand-in got it


def conv_update(x, conv_state, weight, bias, activation):
    assert x.dim() == 2
    assert conv_state.dtype == x.dtype
    assert bias is None or bias.is_contiguous()
    wide = [None if one is None else one.float() for one in (x[:, None], weight, bias)]
    y, state = oracle(*wide, initial_state=conv_state.float(), activation=activation)
    conv_state.copy_(state)
    return y[:, 0].to(x.dtype)


for name, stand_in in (('causal_conv1d_fn', causal_conv1d_fn), ('causal_conv1d_update', conv_update)):
    assert tuple(inspect.signature(stand_in).parameters) == SIGNATURES[f'causal_conv1d.{name}']


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The backend for the package, enabled, seemingly on an H100."""
    functions = {'causal_conv1d_fn': causal_conv1d_fn, 'causal_conv1d_update': conv_update}
    install(monkeypatch, tmp_path, 'causal_conv1d', 'causal-conv1d', '1.5.0', **functions)
    monkeypatch.setenv('FLA_CAUSAL_CONV1D', '1')
    pretend(monkeypatch, H100)
    trust(monkeypatch, CausalConv1dBackend)
    default_dispatcher().reset()
    yield
    default_dispatcher().reset()


def tensors(dtype=BF16, length=6, channels=8, width=4, **changes):
    return {'x': torch.randn(1, length, channels).to(dtype), 'weight': torch.randn(channels, width).to(dtype), **changes}


def step(dtype=BF16, count=3, channels=8, width=4, **changes):
    given = {'x': torch.randn(count, channels).to(dtype), 'cache': torch.randn(count, channels, width).to(dtype)}
    return {**given, 'weight': torch.randn(channels, width).to(dtype), **changes}


def reason(function, arguments):
    decision = explain(function, **fakes(arguments))
    assert decision.winner != 'causal_conv1d'
    return decision['causal_conv1d'].reason


def test_served(package):
    cu = torch.tensor([0, 2, 6])
    served, (y, none) = ran(causal_conv1d, 'modules', fakes(tensors(activation='silu', cu_seqlens=cu)))
    assert (served, y.shape, none) == ('causal_conv1d', (1, 6, 8), None)
    assert y.is_contiguous()
    served, (y, _) = ran(causal_conv1d_update, 'modules', fakes(step(activation='swish')))
    assert (served, y.shape) == ('causal_conv1d', (3, 8))


HUGE = {'x': torch.empty(1, 1, 1, dtype=BF16).expand(1, 2**15, 2**16), 'weight': torch.empty(2**16, 4, dtype=BF16)}
STATE = torch.zeros(1, 8, 4, dtype=BF16)


@pytest.mark.parametrize(
    ('function', 'changes', 'why'),
    [
        (causal_conv1d, {'width': 5}, 'filters have 2 to 4 steps, got W = 5'),
        (causal_conv1d, {'width': 1}, 'filters have 2 to 4 steps, got W = 1'),
        (causal_conv1d, {'channels': 12}, 'D must be a multiple of 8, got 12'),
        (causal_conv1d, {'length': 0}, 'x is empty'),
        (causal_conv1d, {'bias': torch.zeros(8)}, 'bias must have the dtype of weight'),
        (causal_conv1d, {'dtype': torch.float64}, "dtype of 'x' must be"),
        (causal_conv1d, HUGE, 'fewer than 2^31 elements, got 2147483648'),
        (causal_conv1d, {'initial_state': STATE}, 'argument initial_state is not supported'),
        (causal_conv1d, {'output_final_state': True}, 'argument output_final_state is not supported'),
        (causal_conv1d, {'residual': torch.zeros(1, 6, 8, dtype=BF16)}, 'argument residual is not supported'),
        (causal_conv1d, {'weight': torch.zeros(8, 4, dtype=torch.float64)}, "dtype of 'weight' must be"),
        (causal_conv1d, {'bias': torch.zeros(8, dtype=torch.float64)}, "dtype of 'bias' must be"),
        (causal_conv1d_update, {'bias': torch.zeros(8)}, 'bias must have the dtype of weight'),
        (
            causal_conv1d_update,
            {
                'x': torch.empty(1, 1, dtype=BF16).expand(2**15, 2**16),
                'cache': torch.empty(2**15, 2**16, 4, dtype=BF16, device='meta'),
                'weight': HUGE['weight'],
            },
            'fewer than 2^31 elements, got 2147483648',
        ),
        (causal_conv1d_update, {'width': 5}, 'filters have 2 to 4 steps, got W = 5'),
        (causal_conv1d_update, {'channels': 12}, 'D must be a multiple of 8, got 12'),
        (causal_conv1d_update, {'count': 0}, 'x is empty'),
        (causal_conv1d_update, {'cache': torch.zeros(3, 8, 4)}, 'the cache must have the dtype of x'),
        (causal_conv1d_update, {'residual': torch.zeros(3, 8, dtype=BF16)}, 'argument residual is not supported'),
    ],
)
def test_refused(package, function, changes, why):
    arguments = tensors(**changes) if function is causal_conv1d else step(**changes)
    assert why in reason(function, arguments)


def test_a_step_has_no_gradient(package):
    for name in ('x', 'cache', 'weight', 'bias'):
        arguments = fakes(step(bias=torch.zeros(8, dtype=BF16)))
        arguments[name].requires_grad_()
        decision = explain(causal_conv1d_update, **arguments)
        assert decision['causal_conv1d'].reason == 'a step is for inference only'
        with torch.no_grad():
            assert explain(causal_conv1d_update, **arguments).winner == 'causal_conv1d'


def test_off_until_somebody_switches_it_on(package, monkeypatch):
    monkeypatch.delenv('FLA_CAUSAL_CONV1D')
    decision = explain(causal_conv1d, **fakes(tensors()))
    assert (decision.winner, decision['causal_conv1d'].verdict) == ('default', 'disabled')


@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_numbers(package, packed):
    """The arguments that the stand-in receives and checks, and the results."""
    cu = torch.tensor([0, 2, 2, 9]) if packed else None
    x, weight, bias = torch.randn(9, 8, 1).permute(2, 0, 1), torch.randn(4, 8).t(), torch.randn(8, 2)[:, 0]
    others = (torch.randn(8, 9, 1).permute(2, 1, 0), odd(x), odd(x.contiguous()), x[:, :1].expand(1, 9, 8))
    for given in (x, *others, torch.randn(1, 9, 16)[..., :8]):
        exact = [one.double().requires_grad_() for one in (given, weight, bias)]
        expected, _ = oracle(*exact, activation='silu', cu_seqlens=cu)
        y = backend._forward(given, weight, bias, 'silu', cu)
        assert y.is_contiguous()
        assert bounds.relative_rms(expected.detach(), y) <= bounds.of_convolution(FP32)
        for dy in (odd(torch.randn(1, 9, 8)), torch.randn(9, 8, 1).permute(2, 0, 1)):
            ALIGNED.clear()
            found = backend._backward(given, weight, bias, 'silu', cu, dy, (True, False, True))
            assert found[1] is None
            assert ALIGNED == [True]
            wanted = torch.autograd.grad(expected, exact, dy.double(), retain_graph=True)
            for a, b in zip(wanted[::2], found[::2], strict=True):
                assert bounds.relative_rms(a, b) <= bounds.of_convolution(FP32)


@pytest.mark.parametrize('shape', [(1, 1, 8), (3, 1, 8)])
@pytest.mark.parametrize('stride', [(1, 1, 1), (8, 0, 1), (1, 8, 1), (0, 3, 1)])
def test_a_dimension_of_one_has_any_stride(package, shape, stride):
    """The package refuses packed sequences in a layout that it cannot read."""
    x, weight = torch.randn(64).as_strided(shape, stride), torch.randn(8, 4)
    cu = torch.tensor([0, 1]) if shape[0] == 1 else None
    y = backend._forward(x, weight, None, 'silu', cu)
    assert bounds.relative_rms(oracle(x.double(), weight.double(), activation='silu')[0], y) <= bounds.of_convolution(FP32)


@pytest.mark.parametrize('shape', [(3, 8), (3, 1, 8), (1, 3, 8)])
def test_numbers_of_a_step(package, shape):
    x, cache, weight, bias = torch.randn(3, 8), torch.randn(3, 8, 4), torch.randn(8, 4), torch.randn(1).expand(8)
    wide = (one.double() for one in (x[:, None], weight, bias))
    expected, state = oracle(*wide, initial_state=cache.double(), activation='silu')
    y = backend._update(x.view(shape), cache, weight, bias, 'silu')
    assert bounds.relative_rms(expected.reshape(shape), y) <= bounds.of_convolution(FP32)
    assert torch.equal(cache, state.float())


@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_operators_keep_the_rules(package, packed):
    cu = torch.tensor([0, 2, 6]) if packed else None
    x, weight, bias = (one.requires_grad_() for one in (*tensors().values(), torch.randn(8).bfloat16()))
    opcheck(backend._convolution, x, weight, bias, 'silu', cu)
    opcheck(backend._convolution, x, weight.detach(), None, None, cu)
    if not packed:
        opcheck(backend._step, *step().values(), None, 'silu')


def test_the_operator_has_gradients():
    given = {n: one.to('meta').requires_grad_() for n, one in tensors(bias=torch.zeros(8, dtype=BF16)).items()}
    y, _ = CausalConv1dBackend().causal_conv1d(**given)
    for one, gradient in zip(given.values(), torch.autograd.grad(y.sum(), list(given.values())), strict=True):
        assert (gradient.shape, gradient.dtype) == (one.shape, one.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_the_package_itself(monkeypatch, packed):
    pytest.importorskip('causal_conv1d')
    monkeypatch.setenv('FLA_CAUSAL_CONV1D', '1')
    cu = torch.tensor([0, 100, 500], device='cuda', dtype=torch.int32) if packed else None
    made = [torch.randn(shape, device='cuda').bfloat16() for shape in ((1, 500, 64), (64, 4), (64,))]
    given, exact = [one.clone().requires_grad_() for one in made], [one.double().requires_grad_() for one in made]
    with use_backend('causal_conv1d', op='modules'):
        y, _ = causal_conv1d(*given, activation='silu', cu_seqlens=cu)
    expected, _ = convolved(*exact, activation='silu', cu_seqlens=cu)
    assert bounds.relative_rms(expected.detach(), y.detach()) <= bounds.of_convolution(BF16)
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(expected, exact, dy.double()), torch.autograd.grad(y, given, dy), strict=True):
        assert bounds.relative_rms(a, b) <= bounds.of_convolution(BF16)
    cache, step = torch.randn(3, 64, 4, device='cuda').bfloat16(), torch.randn(3, 64, device='cuda').bfloat16()
    wide = (one.detach().double() for one in (step[:, None], *made[1:]))
    expected, state = convolved(*wide, None, cache.double(), 'silu')
    with use_backend('causal_conv1d', op='modules'), torch.no_grad():
        y, _ = causal_conv1d_update(step, cache, None, made[1], made[2], 'silu')
    assert bounds.relative_rms(expected[:, 0], y) <= bounds.of_convolution(BF16)
    assert torch.equal(cache.double(), state)
