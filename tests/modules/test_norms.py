"""l2norm, rms_norm, layer_norm, group_norm, rms_norm_gated and their classes."""

import math
from fractions import Fraction

import pytest
import torch

from fla.backends import trace
from fla.modules import FusedRMSNormGated, GroupNorm, LayerNorm, RMSNorm
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.modules.norm.l2norm import l2_norm, l2norm
from fla.modules.norm.layernorm import group_norm, layer_norm, rms_norm
from tests import bounds
from tests.tables import table

from .oracle import DTYPES, check, error, tensor


def rms_oracle(x, weight=None, bias=None, residual=None, eps=1e-5, prenorm=False, **_):
    rows = []
    total = x if residual is None else x + residual
    for row in total.reshape(-1, x.shape[-1]):
        row = row / torch.sqrt((row * row).sum() / row.numel() + eps)
        row = row if weight is None else row * weight
        rows.append(row if bias is None else row + bias)
    y = torch.stack(rows).reshape(x.shape)
    return (y, total) if prenorm else y


def gated_oracle(x, g, weight=None, bias=None, activation='swish', residual=None, eps=1e-6, **_):
    gate = 1 / (1 + torch.exp(-g))
    return rms_oracle(x, weight, bias, residual, eps) * (gate if activation == 'sigmoid' else g * gate)


def group_oracle(x, weight=None, bias=None, residual=None, eps=1e-5, prenorm=False, is_rms_norm=False, num_groups=1, **_):
    total = x if residual is None else x + residual
    groups = []
    for group in total.reshape(-1, x.shape[-1] // num_groups):
        if not is_rms_norm:
            group = group - group.sum() / group.numel()
        groups.append(group / torch.sqrt((group * group).sum() / group.numel() + eps))
    y = torch.stack(groups).reshape(x.shape)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y, total) if prenorm else y


def l2_oracle(x, eps=1e-6):
    return torch.stack([row / torch.sqrt((row * row).sum() + eps) for row in x.reshape(-1, x.shape[-1])]).reshape(x.shape)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_l2norm(dtype):
    check(l2norm, l2_oracle, {'x': tensor(2, 3, 5, dtype=dtype)}, bounds.of_module(dtype))
    assert l2norm(tensor(3, 4, dtype=dtype), output_dtype=torch.float32).dtype == torch.float32
    assert l2_norm is l2norm
    assert torch.equal(l2norm(torch.zeros(2, 4, dtype=dtype)), torch.zeros(2, 4, dtype=dtype))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('extras', [(), ('weight',), ('weight', 'bias', 'residual')], ids=len)
def test_rms_norm(dtype, extras):
    shapes = {'weight': (6,), 'bias': (6,), 'residual': (2, 5, 6)}
    arguments = {'x': tensor(2, 5, 6, dtype=dtype), **{n: tensor(*shapes[n], dtype=dtype) for n in extras}}
    fixed = {} if 'weight' in extras else {'weight': None}
    check(rms_norm, rms_oracle, arguments, bounds.of_module(dtype), eps=1e-3, prenorm=True, **fixed)


def test_what_rms_norm_returns_before_the_norm():
    x, weight = tensor(3, 4, dtype=torch.bfloat16), torch.ones(4)
    assert rms_norm(x, weight, prenorm=True)[1] is x
    wide = rms_norm(x, weight, prenorm=True, residual_in_fp32=True)
    assert (wide[0].dtype, wide[1].dtype) == (torch.bfloat16, torch.float32)
    residual = tensor(3, 4, dtype=torch.float32)
    y, total = rms_norm(x, weight, residual=residual, prenorm=True)
    assert torch.equal(total, x.float() + residual)
    assert error(rms_oracle(x.double(), residual=residual.double()), y) < bounds.of_module(torch.bfloat16)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('is_rms_norm', [False, True])
@pytest.mark.parametrize('num_groups', [None, 1, 3, 6])
def test_layer_and_group_norm(dtype, is_rms_norm, num_groups):
    shapes = {'x': (2, 5, 6), 'weight': (6,), 'bias': (6,), 'residual': (2, 5, 6)}
    arguments = {name: tensor(*shape, dtype=dtype) for name, shape in shapes.items()}
    function = layer_norm if num_groups is None else group_norm
    groups = {} if num_groups is None else {'num_groups': num_groups}
    # any group of two numbers is normalised to -1 and 1
    eps = 1.0 if num_groups == 3 else 1e-3
    bound = bounds.of_difference(dtype)
    check(function, group_oracle, arguments, bound, eps=eps, prenorm=True, is_rms_norm=is_rms_norm, **groups)


def test_as_pytorch_has_them():
    x, weight, bias = tensor(4, 6), tensor(6), tensor(6)
    torch.testing.assert_close(layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (6,), weight, bias))
    expected = torch.nn.functional.group_norm(x, 3, weight, bias)
    torch.testing.assert_close(group_norm(x, weight, bias, num_groups=3), expected)
    assert torch.equal(layer_norm(x, weight, bias, is_rms_norm=True), rms_norm(x, weight, bias))


def test_a_large_mean_does_not_cancel():
    """The sums of these numbers are exact in float32; a difference of mean squares would be off by 1000^2 2^-24."""
    x = (tensor(3, 64, dtype=torch.float32) * 8).round() / 8 + 1000
    assert error(group_oracle(x.double()), layer_norm(x, None)) <= bounds.elementwise(torch.float32)


def test_large_values_of_a_narrow_dtype_do_not_overflow():
    x = torch.full((2, 8), 3e4, dtype=torch.float16)
    assert torch.equal(rms_norm(x, None), torch.ones_like(x))
    assert error(torch.full((2, 8), 8**-0.5), l2norm(x)) <= bounds.of_module(torch.float16)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('activation', ['swish', 'silu', 'sigmoid'])
def test_rms_norm_gated(dtype, activation):
    names = {'x': (2, 3, 4, 6), 'g': (2, 3, 4, 6), 'weight': (6,), 'bias': (6,), 'residual': (2, 3, 4, 6)}
    arguments = {name: tensor(*shape, dtype=dtype) for name, shape in names.items()}
    check(rms_norm_gated, gated_oracle, arguments, bounds.of_module(dtype), activation=activation)


def test_any_strides_and_mixed_dtypes():
    x, g = tensor(6, 4, 3).transpose(0, 2), tensor(3, 4, 12)[..., ::2]
    assert error(gated_oracle(x, g), rms_norm_gated(x, g, None)) <= bounds.of_module(torch.float64)
    narrow = rms_norm_gated(x.bfloat16(), g.float(), torch.ones(6, dtype=torch.float64))
    assert narrow.dtype == torch.bfloat16
    assert error(gated_oracle(x.bfloat16().double(), g), narrow) < bounds.of_module(torch.bfloat16)


def test_differentiable_twice():
    x, g, w = (tensor(*shape, grad=True) for shape in ((3, 4), (3, 4), (4,)))
    assert torch.autograd.gradgradcheck(lambda *a: rms_norm_gated(*a, activation='sigmoid'), (x, g, w))


@pytest.mark.parametrize('options', [{}, {'num_groups': 2}, {'num_groups': 2, 'is_rms_norm': True}])
def test_layer_and_group_norm_are_differentiable_twice(options):
    function = group_norm if options else layer_norm
    x, w, b, r = (tensor(*shape, grad=True) for shape in ((3, 4), (4,), (4,), (3, 4)))
    assert torch.autograd.gradgradcheck(lambda *a: function(*a, eps=0.1, prenorm=True, **options), (x, w, b, r))


def test_empty():
    for shape in ((0, 4), (2, 0, 4)):
        assert rms_norm(torch.zeros(shape), torch.ones(4)).shape == shape
        assert layer_norm(torch.zeros(shape), torch.ones(4)).shape == shape
        assert group_norm(torch.zeros(shape), torch.ones(4), num_groups=2).shape == shape
        assert l2norm(torch.zeros(shape)).shape == shape


def test_nan_passes_through():
    x = torch.ones(2, 4)
    x[0, 0] = math.nan
    assert rms_norm(x, None).isnan().any(1).tolist() == [True, False]


def test_classes():
    narrow = bounds.elementwise(torch.float32)
    norm = RMSNorm(6, bias=True, eps=1e-3)
    assert {n: tuple(p.shape) for n, p in norm.state_dict().items()} == {'weight': (6,), 'bias': (6,)}
    x = torch.randn(2, 6)
    assert error(rms_oracle(x.double(), eps=1e-3), norm(x)) <= narrow
    assert len(norm(x, residual=x, prenorm=True)) == 2
    assert RMSNorm(6, elementwise_affine=False).state_dict() == {}

    layer, group = LayerNorm(6, bias=True, eps=1e-3), GroupNorm(3, 6, eps=1e-3, is_rms_norm=True)
    assert list(layer.state_dict()) == ['weight', 'bias']
    assert list(group.state_dict()) == ['weight']
    assert error(group_oracle(x.double(), eps=1e-3), layer(x)) <= narrow
    assert error(group_oracle(x.double(), eps=1e-3, is_rms_norm=True, num_groups=3), group(x)) <= bounds.elementwise(
        torch.float32
    )
    assert len(layer(x, residual=x, prenorm=True)) == len(group(x, residual=x, prenorm=True)) == 2
    assert repr(group) == 'GroupNorm(3, 6, eps=0.001, elementwise_affine=True, is_rms_norm=True)'

    gated = FusedRMSNormGated(6, eps=1e-3, activation='sigmoid', device='cpu', dtype=torch.bfloat16)
    assert [(n, p.dtype) for n, p in gated.named_parameters()] == [('weight', torch.bfloat16)]
    with trace() as t:
        y = gated(x, x)
    assert error(gated_oracle(x.double(), x.double(), activation='sigmoid', eps=1e-3), y) <= bounds.elementwise(
        torch.float32
    )
    assert t.last_backend('modules.rms_norm_gated') == 'reference'
    assert FusedRMSNormGated(6).eps == RMSNorm(6).eps == 1e-5


@table(
    ('call', 'kind', 'message'),
    [
        (lambda x: l2norm(x.int()), TypeError, 'x must be float16'),
        (lambda x: l2norm([1.0]), TypeError, "argument 'x' must be a tensor"),
        (lambda x: l2norm(x, output_dtype=torch.int32), TypeError, 'output_dtype'),
        (lambda x: l2norm(torch.tensor(1.0)), ValueError, r'x must be \[..., D\]'),
        (lambda x: l2norm(x, eps=-1.0), ValueError, 'eps must be'),
        (lambda x: rms_norm(x, None, eps=math.inf), ValueError, 'eps must be finite, got inf'),
        (lambda x: rms_norm(x, None, eps=10**400), ValueError, 'eps must be within 64 bits'),
        (lambda x: rms_norm(x, None, eps='0'), TypeError, 'eps must be a number, got str'),
        (lambda x: group_norm(x, None, num_groups=2.0), TypeError, 'num_groups must be an int, got float'),
        (lambda x: GroupNorm(True, 4), TypeError, 'num_groups must be an int, got bool'),
        (lambda x: rms_norm(x, torch.ones(3)), ValueError, r'weight must be \[D\] = \[4\], got \[3\]'),
        (lambda x: rms_norm(x, torch.ones(4).long()), TypeError, 'weight must be float16'),
        (lambda x: rms_norm(x, None, bias=torch.ones(1, 4)), ValueError, r'bias must be \[D\]'),
        (lambda x: rms_norm(x, None, residual=x[0]), ValueError, 'residual must be shaped like x'),
        (lambda x: rms_norm(x, torch.ones(4, device='meta')), ValueError, "'weight' is on meta"),
        (lambda x: rms_norm_gated(x, x[0], None), ValueError, 'g must be shaped like x'),
        (lambda x: rms_norm_gated(x, x, None, eps='0'), TypeError, 'eps must be a number, got str'),
        (lambda x: rms_norm_gated(x, x.to('meta'), None), ValueError, "'g' is on meta"),
        (lambda x: l2norm(x, eps=math.nan), ValueError, 'eps must be finite, got nan'),
        (lambda x: group_norm(x, None, num_groups=True), TypeError, 'num_groups must be an int, got bool'),
        (lambda x: rms_norm(x, None, eps=Fraction(1, 9)), TypeError, 'eps must be a number, got Fraction'),
        *(
            (lambda x, kind=kind, size=size: kind(size), error, message)
            for kind in (RMSNorm, LayerNorm, FusedRMSNormGated, lambda size: GroupNorm(1, size))
            for size, error, message in (
                (-1, ValueError, 'hidden_size must be at least 0, got -1'),
                ([8], TypeError, 'hidden_size must be an int, got list'),
                (8.0, TypeError, 'hidden_size must be an int, got float'),
            )
        ),
        (lambda x: RMSNorm(4, eps='0'), TypeError, 'eps must be a number, got str'),
        (lambda x: FusedRMSNormGated(4, eps=-1.0), ValueError, 'eps must be at least 0, got -1.0'),
        (lambda x: rms_norm_gated(x, x, None, activation='relu'), ValueError, "activation must be one of .* got 'relu'"),
        (lambda x: FusedRMSNormGated(4, activation='gelu'), ValueError, 'activation must be one of'),
        (lambda x: layer_norm(x, torch.ones(3)), ValueError, r'weight must be \[D\] = \[4\], got \[3\]'),
        (lambda x: layer_norm(x, None, bias=torch.ones(4).int()), TypeError, 'bias must be float16'),
        (lambda x: group_norm(x, None, num_groups=3), ValueError, 'num_groups must .* divide D = 4, got 3'),
        (lambda x: group_norm(x, None, num_groups=0), ValueError, 'num_groups must be at least 1'),
        (lambda x: group_norm(x, None, residual=x[0]), ValueError, 'residual must be shaped like x'),
        (lambda x: GroupNorm(3, 4), ValueError, 'num_groups must .* divide D = 4, got 3'),
        (lambda x: LayerNorm(4, elementwise_affine=False, bias=True), ValueError, 'bias=True needs'),
        (lambda x: RMSNorm(4, elementwise_affine=False, bias=True), ValueError, 'bias=True needs'),
    ],
)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.randn(2, 4))
