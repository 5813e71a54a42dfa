"""Tensors with PyTorch's negative bit, whose memory holds the opposite sign, in kernels that read any strides."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import trace
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla.modules.rotary import rotary_embedding
from fla.ops.attn import parallel_attn

pytestmark = pytest.mark.interpreted


def negated(*shape):
    x = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    return x


def plain(x):
    return x.resolve_neg().clone()


def agree(function, operation, **arguments):
    """Results and gradients equal those of plain tensors, also for incoming gradients with the negative bit."""
    found = []
    for change in (lambda x: x, plain):
        leaves = {name: change(x).detach().requires_grad_() for name, x in arguments.items()}
        with trace() as recorded:
            out = [y for y in function(**leaves) if y is not None]
        assert recorded.last_backend(operation) == 'default'
        torch.manual_seed(0)
        gradients = [change(negated(*y.shape)) for y in out]
        found.append([*out, *torch.autograd.grad(out, list(leaves.values()), gradients)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize('interleaved', [False, True])
def test_rotary(interleaved):
    tables = torch.randn(5, 4), torch.randn(5, 4)
    turned = {'cos': tables[0], 'sin': tables[1], 'interleaved': interleaved}
    agree(lambda x: [rotary_embedding(x, **turned)], 'modules.rotary_embedding', x=negated(2, 5, 3, 8))
    x = negated(2, 5, 3, 8)
    expected = rotary_embedding(plain(x), **turned)
    assert rotary_embedding(x, **turned, inplace=True) is x
    assert torch.equal(x, expected)


def test_convolution():
    def call(x, weight, bias, initial_state):
        return causal_conv1d(x, weight, bias, initial_state=initial_state, output_final_state=True, activation='silu')

    given = {'x': negated(2, 5, 6), 'weight': negated(6, 3), 'bias': negated(6), 'initial_state': negated(2, 6, 3)}
    agree(call, 'modules.causal_conv1d', **given)


def test_step_of_a_convolution():
    x, cache, weight, bias = negated(2, 6), negated(2, 6, 3), negated(6, 3), negated(6)
    with torch.no_grad(), trace() as recorded:
        expected, after = causal_conv1d_update(plain(x), plain(cache), None, plain(weight), plain(bias))
        y, same = causal_conv1d_update(x, cache, None, weight, bias)
    assert recorded.last_backend('modules.causal_conv1d_update') == 'default'
    assert same is cache
    assert torch.equal(y, expected)
    assert torch.equal(cache, after)


def test_attention():
    def call(q, k, v, g, sink_bias):
        return [parallel_attn(q, k, v, g, sink_bias=sink_bias)]

    shapes = {'q': (1, 5, 2, 16), 'k': (1, 5, 1, 16), 'v': (1, 5, 1, 16), 'sink_bias': (2,)}
    given = {name: negated(*shape) for name, shape in shapes.items()}
    # negative, as decays are
    given['g'] = torch.complex(torch.zeros(1, 5, 2), torch.rand(1, 5, 2)).conj().imag
    agree(call, 'attn.parallel_attn', **given)
