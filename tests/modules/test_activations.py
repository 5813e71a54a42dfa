"""swiglu, silu_and_mul, swiglu_linear."""

import pytest
import torch

from fla.modules.activations import silu_and_mul, swiglu, swiglu_linear
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from tests import bounds

from .losses import linear_oracle
from .oracle import DTYPES, check, error, served_by, tensor


def oracle(x, y):
    return x / (1 + torch.exp(-x)) * y


@served_by('reference')
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_against_the_formula(dtype):
    x, y, weight, bias = (tensor(*shape, dtype=dtype) for shape in ((3, 6), (3, 6), (5, 6), (5,)))
    check(swiglu, oracle, {'x': x, 'y': y}, bounds.of_module(dtype))
    check(silu_and_mul, lambda x: oracle(x[..., :6], x[..., 6:]), {'x': torch.cat([x, y], -1)}, bounds.of_module(dtype))
    check(
        swiglu_linear,
        lambda x, y, weight, bias: oracle(x, y) @ weight.T + bias,
        {'x': x, 'y': y, 'weight': weight, 'bias': bias},
        # the product is rounded as the input of the linear map
        bounds.of_rounded_input(dtype),
    )


def test_strides_empties_and_second_derivatives():
    x, y = tensor(6, 4).t(), tensor(4, 12)[:, ::2]
    assert error(oracle(x, y), swiglu(x, y)) <= bounds.TWO_ORACLES
    assert swiglu(x[:0], y[:0]).shape == (0, 6)
    assert silu_and_mul(torch.zeros(2, 0)).shape == (2, 0)
    assert torch.autograd.gradgradcheck(swiglu, (x.detach().requires_grad_(), y.detach().requires_grad_()))


def test_linear_under_autocast():
    x, weight = tensor(3, 6, dtype=torch.float32), tensor(5, 6, dtype=torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        y = swiglu_linear(x.bfloat16(), x.bfloat16(), weight, None)
    assert y.dtype == torch.bfloat16
    assert error(oracle(x.double(), x.double()) @ weight.double().T, y) <= bounds.of_sums(torch.bfloat16)


@pytest.mark.parametrize('name', ['weight', 'bias', 'x'])
def test_autocast_does_not_cast_float64(name):
    """float64 is accepted alone, and refused by name with another dtype."""
    made = {'x': torch.randn(3, 6), 'weight': torch.randn(5, 6), 'bias': torch.randn(5)}
    given, target = {**made, name: made[name].double()}, torch.tensor([0, 4, 2])
    wide = {n: one.double() for n, one in made.items()}
    message = r'weight must have the dtype of x, torch.float64, got .*32' if name == 'x' else f'{name} must have .*64: auto'
    with torch.autocast('cpu', torch.bfloat16):
        with pytest.raises(TypeError, match=message):
            swiglu_linear(given['x'], given['x'], given['weight'], given['bias'])
        with pytest.raises(TypeError, match=message):
            fused_linear_cross_entropy_loss(given['x'], target, given['weight'], given['bias'])
        y = swiglu_linear(wide['x'], wide['x'], wide['weight'], wide['bias'])
        loss = fused_linear_cross_entropy_loss(wide['x'], target, wide['weight'], wide['bias'])
    assert y.dtype == loss.dtype == torch.float64
    assert error(oracle(wide['x'], wide['x']) @ wide['weight'].T + wide['bias'], y) <= bounds.TWO_ORACLES
    assert error(linear_oracle(wide['x'], target, wide['weight'], wide['bias']), loss) <= bounds.TWO_ORACLES


@pytest.mark.parametrize(
    ('call', 'kind', 'message'),
    [
        (lambda x: swiglu(x[0, 0], x[0, 0]), ValueError, r'x must be \[..., D\]'),
        (lambda x: swiglu(x, x[0]), ValueError, 'y must be shaped like x'),
        (lambda x: swiglu(x, x.double()), TypeError, 'y must have the dtype of x'),
        (lambda x: swiglu(x.int(), x), TypeError, 'x must be float16'),
        (lambda x: silu_and_mul(x[:, :3]), ValueError, 'must be even'),
        (lambda x: swiglu_linear(x, x, x[0], None), ValueError, r'weight must be \[out, D\]'),
        (lambda x: swiglu_linear(x, x, torch.ones(2, 3), None), ValueError, r'weight must be \[out, D\] = \[2, 4\]'),
        (lambda x: swiglu_linear(x, x, torch.ones(2, 4), torch.ones(3)), ValueError, r'bias must be \[out\] = \[2\]'),
        (lambda x: swiglu_linear(x, x, torch.ones(2, 4).double(), None), TypeError, 'weight must have the dtype of x'),
        (
            lambda x: swiglu_linear(x, x, torch.ones(2, 4), torch.ones(2).double()),
            TypeError,
            'bias must have the dtype of x, torch.float32, outside autocast, got torch.float64',
        ),
    ],
)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.randn(2, 4))
