"""`AlgorithmOperands`, from which the delta rules' bounds off the grid come: the reference with the algorithm's products."""

from collections import Counter
from functools import partial

import pytest
import torch

from fla.ops.kda import chunk_kda
from fla.ops.recurrence import chunked
from tests import bounds
from tests.ops.delta_rules import CHUNKED, RAW, case, measure, name_of
from tests.ops.kernels import EVERYTHING, call, emulate

SIGMOID = {'use_beta_sigmoid_in_kernel': True, 'allow_neg_eigval': True}
# no norms for a single channel: they would leave only its sign, and gradients that are pure rounding
SHAPES = {
    'one channel': {'T': 130, 'B': 2, 'H': 2, 'HV': 4, 'K': 1, 'V': 5},
    'one channel, packed': {'lens': [0, 1, 65, 0, 20], 'HV': 2, 'K': 1, 'V': 5, 'state_v_first': True, **SIGMOID},
    'one channel, raw gates': {'T': 70, 'HV': 2, 'K': 1, 'V': 5, **RAW, **SIGMOID},
    'one channel, no state': {'T': 20, 'K': 1, 'V': 1, 'initial': False},
    'channels': {'T': 130, 'HV': 2, **EVERYTHING},
    'channels, packed': {'lens': [3, 0, 65], 'HV': 2, **EVERYTHING},
}
every_shape = pytest.mark.parametrize('shape', SHAPES)
every_chunked = pytest.mark.parametrize('function', CHUNKED, ids=name_of)


def errors(function, given, mode):
    with mode, torch.autograd.set_multithreading_enabled(False):
        return measure(given, lambda tensors: call(function, given.with_tensors(**tensors), 'reference'), blocks=True)


@pytest.mark.pairwise(pairs=False)
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=str)
@every_shape
@every_chunked
def test_without_rounding_equals_the_definition(function, shape, dtype):
    given = case(function, dtype=dtype, **SHAPES[shape])
    for name, (rms, row, _) in errors(function, given, bounds.AlgorithmOperands(dtype, given.per_channel)).items():
        assert rms <= bounds.EXACT[dtype], name
        assert row <= bounds.of_kernel(name, dtype)[1], name


@pytest.mark.pairwise
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@every_shape
@every_chunked
def test_each_replacement_is_called_and_removed(monkeypatch, function, shape, dtype):
    """Each draw calls each replaced function, and the originals are restored."""
    given = case(function, dtype=dtype, **SHAPES[shape])
    before, called = dict(vars(chunked)), Counter()
    replaced = bounds.AlgorithmOperands.replaced

    def counted(self):
        return {name: partial(once, name, replacement) for name, replacement in replaced(self).items()}

    def once(name, replacement, *arguments):
        called[name] += 1
        return replacement(*arguments)

    monkeypatch.setattr(bounds.AlgorithmOperands, 'replaced', counted)
    found = emulate(function, given)
    assert vars(chunked) == before
    assert called.keys() == {'_solve', '_decayed', *(['_decayed_products'] if function is chunk_kda else [])}
    assert min(called.values()) == called['_solve'] == len(bounds.DRAWS)
    assert found.keys() == {'o', 'final', *(f'd{name}' for name in given.tensors)}
    assert all(0 < rms < 1 and 0 < row < 1 for rms, row in found.values()), found


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@every_chunked
def test_inverse_is_rounded_as_an_operand(function, dtype):
    """All but its diagonal of ones, forward and backward. KDA computes the system's gradient from the inverse's."""
    torch.manual_seed(0)
    lower, right, gradient = (torch.randn(2, 32, n) for n in (32, 6, 6))
    lower = (lower / 8).tril(-1).requires_grad_()
    right.requires_grad_()
    with bounds.AlgorithmOperands(dtype, function is chunk_kda), torch.autograd.set_multithreading_enabled(False):
        solved = chunked._solve(lower, right)
        d_lower, d_right = torch.autograd.grad(solved, [lower, right], gradient)

    def times(x, y):
        return x.to(dtype).float() @ y.to(dtype).float()

    inverse = torch.linalg.inv(torch.eye(32) + lower.detach().double()).float()
    below, turned = inverse.tril(-1), inverse.mT
    expected = right + times(below, right)
    wanted = gradient + times(below.mT, gradient)
    if function is chunk_kda:
        slope = -times(times(turned, times(gradient, right.mT).tril(-1)), turned).tril(-1)
    else:
        slope = -times(wanted, expected.mT).tril(-1)
    for ours, theirs in ((solved, expected), (d_right, wanted), (d_lower, slope)):
        # values computed in another order may round the other way
        assert bounds.relative_rms(theirs.detach(), ours.detach()) < bounds.ROUNDING[dtype] / 100


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@every_chunked
def test_single_channel_is_decayed_before_the_product(function, dtype):
    """For one gate a head, products of half-precision numbers of one channel are exact; KDA rounds the decayed ones."""
    torch.manual_seed(0)
    x, y, k = (torch.randn(2, 64, 1).to(dtype).float() for _ in range(3))
    g = -torch.rand(2, 64, 1, dtype=torch.float64).cumsum(-2) / 4
    exact = [(a * k.mT * (g - g.mT).exp()).tril() for a in (x, y)]
    with bounds.AlgorithmOperands(dtype, function is chunk_kda):
        found = [product.tril() for product in chunked._decayed_products(x, y, k, g)]
    for ours, theirs in zip(found, exact, strict=True):
        error = bounds.relative_rms(theirs, ours)
        assert 0.3 < error / bounds.ROUNDING[dtype] < 1 if function is chunk_kda else error < 1e-6


def test_single_channels_err_more():
    """For one channel this rounding is most of the error of the gates' gradient, which `HalfOperands` alone misses. For two
    channels it is not."""
    ratios = []
    for channels in (1, 2):
        given = case(chunk_kda, dtype=torch.bfloat16, B=2, T=333, H=2, HV=4, K=channels, V=5)
        half = errors(chunk_kda, given, bounds.HalfOperands(torch.bfloat16))['dg'][0]
        ratios.append(errors(chunk_kda, given, bounds.AlgorithmOperands(torch.bfloat16, True))['dg'][0] / half)
    assert ratios[0] > 1.6
    assert 0.8 < ratios[1] < 1.4
