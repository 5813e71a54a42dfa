"""The layers on interpreted Triton kernels: as in test_layers, and a kernel serves every function that has one."""

import itertools

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import trace, use_backend
from tests import bounds

from .test_layers import LAYERS, RECURRENT, error, hidden, make, oracle

pytestmark = pytest.mark.interpreted
FP32 = torch.float32
BOUND = bounds.EXACT[FP32]


def served(recorded):
    """Each function that ran, and the backend that served it."""
    return {function.rpartition('.')[2]: backend for function, backend in recorded.counters}


def expected_of(name):
    if 'attn' in name:
        norm = {'rms_norm': 'default'} if name == 'attn window' else {}
        turned = {} if name == 'attn nope' else {'rotary_embedding': 'default'}
        # sdpa serves plain attention on a CPU
        return {'parallel_attn': 'sdpa', **norm, **turned}
    operation = 'kda' if 'kda' in name else 'gated_delta_rule'
    short = {} if name == 'gdn plain' else {'causal_conv1d': 'default'}
    norm = 'rms_norm' if name == 'gdn plain' else 'rms_norm_gated'
    return {f'chunk_{operation}': 'default', norm: 'default', **short}


@pytest.mark.parametrize('name', LAYERS)
def test_against_the_formula(name):
    layer, x = make(name, FP32), hidden(2, 70, dtype=FP32).requires_grad_()
    exact, wide = make(name, FP32).double(), x.detach().double().requires_grad_()
    with trace() as recorded:
        o = layer(x)[0]
    assert served(recorded) == expected_of(name)
    right = oracle(name, exact, wide)
    assert error(right, o) < BOUND
    weights = hidden(*o.shape[:2], seed=5)
    (dx,), (right_dx,) = torch.autograd.grad((o * weights).sum(), x), torch.autograd.grad((right * weights).sum(), wide)
    assert error(right_dx, dx) < BOUND


SPANS = [(0, 3), (3, 4), (4, 11)]


@pytest.mark.slow
@pytest.mark.parametrize('name', LAYERS)
def test_packed_and_padded_sequences(name):
    """With gradients, and with attention's own kernels, which are not chosen on a CPU by default."""
    layer, x = make(name, FP32), hidden(1, 11, dtype=FP32).requires_grad_()
    exact, wide = make(name, FP32).double(), x.detach().double().requires_grad_()
    right = torch.cat([oracle(name, exact, wide[:, a:b]) for a, b in SPANS], 1)
    with use_backend('default', op='attn'), trace() as recorded:
        o = layer(x, cu_seqlens=torch.tensor([0, 3, 3, 4, 11]))[0]
    assert set(served(recorded).values()) == {'default'}
    assert error(right, o) < BOUND
    weights = hidden(1, 11, seed=5)
    (dx,), (right_dx,) = torch.autograd.grad((o * weights).sum(), x), torch.autograd.grad((right * weights).sum(), wide)
    assert error(right_dx, dx) < BOUND
    mask = torch.zeros(3, 9)
    for row, (a, b) in zip(mask, SPANS, strict=True):
        row[2 : 2 + b - a] = 1
    padded = x.new_full((3, 9, x.shape[2]), torch.nan)
    padded[mask.bool()] = x[0].detach()
    with use_backend('default', op='attn'), trace() as recorded:
        found = layer(padded, attention_mask=mask)[0]
    assert set(served(recorded).values()) == {'default'}
    assert error(right[0], found[mask.bool()]) < BOUND
    assert not found[mask == 0].any()


@pytest.mark.parametrize('name', [name for name in LAYERS if 'attn' in name])
def test_generation_of_attention(name):
    """As below; the kernel for few queries serves single steps."""
    layer, x = make(name, FP32), hidden(2, 9, dtype=FP32)
    right = oracle(name, make(name, FP32).double(), x.double())
    with torch.no_grad(), use_backend('default', op='attn'), trace() as recorded:
        o, _, cache = layer(x[:, :5], use_cache=True)
        pieces = [o, *(layer(part, past_key_values=cache)[0] for part in x[:, 5:].split([2, 1, 1], 1))]
    assert set(served(recorded).values()) == {'default'}
    assert error(right, torch.cat(pieces, 1)) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize('name', RECURRENT)
def test_generation(name):
    """Prefill, more prefill, then single steps give the same as one call."""
    layer, x = make(name, FP32), hidden(2, 13, dtype=FP32)
    right = oracle(name, make(name, FP32).double(), x.double())
    with torch.no_grad():
        o, _, cache = layer(x[:, :5], use_cache=True)
        pieces = [o]
        for a, b in itertools.pairwise([5, 9, *range(10, 14)]):
            with trace() as recorded:
                pieces.append(layer(x[:, a:b], past_key_values=cache)[0])
    operation = 'kda' if 'kda' in name else 'gated_delta_rule'
    assert set(served(recorded).values()) == {'default'}
    assert f'fused_recurrent_{operation}' in served(recorded)
    assert error(right, torch.cat(pieces, 1)) < BOUND


OPERATORS = {
    'gdn': {'causal_conv1d', 'chunk_gated_delta_rule', 'norm'},
    'kda': {'causal_conv1d', 'chunk_kda', 'norm'},
    'attn window': {'norm', 'parallel_attn', 'rotary_embedding'},
}


@pytest.mark.pairwise
@pytest.mark.parametrize('name', OPERATORS)
def test_exported_for_any_length(name):
    """Kernels are operators of the exported program, for any T."""
    layer, x = make(name, FP32), hidden(1, 20, dtype=FP32)
    shapes = ({1: torch.export.Dim('T', min=2, max=4096)},)
    with use_backend('default', op='attn'):
        exported = torch.export.export(layer, (x,), dynamic_shapes=shapes)
        targets = [str(node.target).split('.') for node in exported.graph.nodes]
        assert {target[1] for target in targets if target[0] == 'fla'} == OPERATORS[name]
        for length in (20, 9):
            x = hidden(1, length, dtype=FP32)
            assert torch.equal(layer(x)[0], exported.module()(x)[0])
