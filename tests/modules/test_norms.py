"""l2norm, rms_norm, rms_norm_gated and their classes."""

import math

import pytest
import torch

from fla.modules import FusedRMSNormGated, RMSNorm
from fla.modules.fused_norm_gate import rms_norm_gated
from fla.modules.l2norm import l2_norm, l2norm
from fla.modules.layernorm import rms_norm
from fla.ops.backends import trace

from .oracle import BOUND, DTYPES, check, error, tensor


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


def l2_oracle(x, eps=1e-6):
    return torch.stack([row / torch.sqrt((row * row).sum() + eps) for row in x.reshape(-1, x.shape[-1])]).reshape(x.shape)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_l2norm(dtype):
    check(l2norm, l2_oracle, {'x': tensor(2, 3, 5, dtype=dtype)}, BOUND[dtype])
    assert l2norm(tensor(3, 4, dtype=dtype), output_dtype=torch.float32).dtype == torch.float32
    assert l2_norm is l2norm
    assert torch.equal(l2norm(torch.zeros(2, 4, dtype=dtype)), torch.zeros(2, 4, dtype=dtype))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('extras', [(), ('weight',), ('weight', 'bias', 'residual')], ids=len)
def test_rms_norm(dtype, extras):
    shapes = {'weight': (6,), 'bias': (6,), 'residual': (2, 5, 6)}
    arguments = {'x': tensor(2, 5, 6, dtype=dtype), **{n: tensor(*shapes[n], dtype=dtype) for n in extras}}
    fixed = {} if 'weight' in extras else {'weight': None}
    check(rms_norm, rms_oracle, arguments, BOUND[dtype], eps=1e-3, prenorm=True, **fixed)


def test_what_rms_norm_returns_before_the_norm():
    x, weight = tensor(3, 4, dtype=torch.bfloat16), torch.ones(4)
    assert rms_norm(x, weight, prenorm=True)[1] is x
    wide = rms_norm(x, weight, prenorm=True, residual_in_fp32=True)
    assert (wide[0].dtype, wide[1].dtype) == (torch.bfloat16, torch.float32)
    residual = tensor(3, 4, dtype=torch.float32)
    y, total = rms_norm(x, weight, residual=residual, prenorm=True)
    assert torch.equal(total, x.float() + residual)
    assert error(rms_oracle(x.double(), residual=residual.double()), y) < BOUND[torch.bfloat16]


def test_large_values_of_a_narrow_dtype_do_not_overflow():
    x = torch.full((2, 8), 3e4, dtype=torch.float16)
    assert torch.equal(rms_norm(x, None), torch.ones_like(x))
    assert error(torch.full((2, 8), 8**-0.5), l2norm(x)) < 1e-3


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('activation', ['swish', 'silu', 'sigmoid'])
def test_rms_norm_gated(dtype, activation):
    names = {'x': (2, 3, 4, 6), 'g': (2, 3, 4, 6), 'weight': (6,), 'bias': (6,), 'residual': (2, 3, 4, 6)}
    arguments = {name: tensor(*shape, dtype=dtype) for name, shape in names.items()}
    check(rms_norm_gated, gated_oracle, arguments, BOUND[dtype], activation=activation)


def test_any_strides_and_mixed_dtypes():
    x, g = tensor(6, 4, 3).transpose(0, 2), tensor(3, 4, 12)[..., ::2]
    assert error(gated_oracle(x, g), rms_norm_gated(x, g, None)) < 1e-13
    narrow = rms_norm_gated(x.bfloat16(), g.float(), torch.ones(6, dtype=torch.float64))
    assert narrow.dtype == torch.bfloat16
    assert error(gated_oracle(x.bfloat16().double(), g), narrow) < BOUND[torch.bfloat16]


def test_differentiable_twice():
    x, g, w = (tensor(*shape, grad=True) for shape in ((3, 4), (3, 4), (4,)))
    assert torch.autograd.gradgradcheck(lambda *a: rms_norm_gated(*a, activation='sigmoid'), (x, g, w))


def test_empty():
    for shape in ((0, 4), (2, 0, 4)):
        assert rms_norm(torch.zeros(shape), torch.ones(4)).shape == shape
        assert l2norm(torch.zeros(shape)).shape == shape


def test_nan_passes_through():
    x = torch.ones(2, 4)
    x[0, 0] = math.nan
    assert rms_norm(x, None).isnan().any(1).tolist() == [True, False]


def test_classes():
    norm = RMSNorm(6, bias=True, eps=1e-3)
    assert {n: tuple(p.shape) for n, p in norm.state_dict().items()} == {'weight': (6,), 'bias': (6,)}
    x = torch.randn(2, 6)
    assert error(rms_oracle(x.double(), eps=1e-3), norm(x)) < 1e-6
    assert len(norm(x, residual=x, prenorm=True)) == 2
    assert RMSNorm(6, elementwise_affine=False).state_dict() == {}

    gated = FusedRMSNormGated(6, eps=1e-3, activation='sigmoid', device='cpu', dtype=torch.bfloat16)
    assert [(n, p.dtype) for n, p in gated.named_parameters()] == [('weight', torch.bfloat16)]
    with trace() as t:
        y = gated(x, x)
    assert error(gated_oracle(x.double(), x.double(), activation='sigmoid', eps=1e-3), y) < 1e-6
    assert t.last_backend('modules.rms_norm_gated') == 'default'
    assert FusedRMSNormGated(6).eps == RMSNorm(6).eps == 1e-5


@pytest.mark.parametrize(
    ('call', 'kind', 'message'),
    [
        (lambda x: l2norm(x.int()), TypeError, 'x must be float16'),
        (lambda x: l2norm([1.0]), TypeError, "argument 'x' must be a tensor"),
        (lambda x: l2norm(x, output_dtype=torch.int32), TypeError, 'output_dtype'),
        (lambda x: l2norm(torch.tensor(1.0)), ValueError, r'x must be \[..., D\]'),
        (lambda x: l2norm(x, eps=-1.0), ValueError, 'eps must be'),
        (lambda x: rms_norm(x, torch.ones(3)), ValueError, r'weight must be \[D\] = \[4\], got \[3\]'),
        (lambda x: rms_norm(x, torch.ones(4).long()), TypeError, 'weight must be float16'),
        (lambda x: rms_norm(x, None, bias=torch.ones(1, 4)), ValueError, r'bias must be \[D\]'),
        (lambda x: rms_norm(x, None, residual=x[0]), ValueError, 'residual must be shaped like x'),
        (lambda x: rms_norm(x, torch.ones(4, device='meta')), ValueError, "'weight' is on meta"),
        (lambda x: rms_norm_gated(x, x[0], None), ValueError, 'g must be shaped like x'),
        (lambda x: rms_norm_gated(x, x, None, activation='relu'), ValueError, "activation must be one of .* got 'relu'"),
        (lambda x: FusedRMSNormGated(4, activation='gelu'), ValueError, 'activation must be one of'),
        (lambda x: RMSNorm(4, elementwise_affine=False, bias=True), ValueError, 'bias=True needs'),
    ],
)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call(torch.randn(2, 4))
