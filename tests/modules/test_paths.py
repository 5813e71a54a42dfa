"""Names and import paths that client code uses, and properties of every function of the modules."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import fla.modules
from fla.backends import describe, explain

ACTIVATIONS = ['silu_and_mul', 'swiglu', 'swiglu_linear']
CONVOLUTION = ['ShortConvolution', 'causal_conv1d', 'causal_conv1d_update']
CROSS_ENTROPY = ['FusedCrossEntropyLoss', 'cross_entropy_loss']
LINEAR_CROSS_ENTROPY = ['FusedLinearCrossEntropyLoss', 'fused_linear_cross_entropy_loss']
NORMS = ['GroupNorm', 'LayerNorm', 'RMSNorm']
GATED_NORM = ['FusedRMSNormGated', 'rms_norm_gated']
NORM_FUNCTIONS = [*NORMS, 'group_norm', 'layer_norm', 'rms_norm']
ROTARY = ['RotaryEmbedding', 'rotary_embedding', 'rotary_embedding_ref']

# every module of FLA 0.6.0 and of older releases that has names which this package has: the names
PATHS = {
    'fla.modules': [
        *(*NORMS, 'FusedRMSNormGated', 'ShortConvolution', 'RotaryEmbedding'),
        *('FusedCrossEntropyLoss', 'FusedLinearCrossEntropyLoss', 'l2norm', 'activations'),
    ],
    'fla.modules.activations': ACTIVATIONS,
    'fla.modules.activations.ops': ACTIVATIONS,
    'fla.modules.causal_conv1d': CONVOLUTION,
    'fla.modules.causal_conv1d.ops': CONVOLUTION,
    'fla.modules.conv': CONVOLUTION,
    'fla.modules.conv.causal_conv1d': CONVOLUTION,
    'fla.modules.conv.short_conv': CONVOLUTION,
    'fla.modules.conv.triton': CONVOLUTION,
    'fla.modules.conv.triton.kernels': CONVOLUTION,
    'fla.modules.conv.triton.ops': CONVOLUTION,
    'fla.modules.convolution': CONVOLUTION,
    'fla.modules.fused_cross_entropy': CROSS_ENTROPY,
    'fla.modules.fused_cross_entropy.ops': CROSS_ENTROPY,
    'fla.modules.fused_linear_cross_entropy': LINEAR_CROSS_ENTROPY,
    'fla.modules.fused_linear_cross_entropy.ops': LINEAR_CROSS_ENTROPY,
    'fla.modules.fused_norm_gate': GATED_NORM,
    'fla.modules.l2norm': ['l2_norm', 'l2norm'],
    'fla.modules.layernorm': NORM_FUNCTIONS,
    'fla.modules.norm': [*NORMS, 'FusedRMSNormGated'],
    'fla.modules.norm.fused_norm_gate': GATED_NORM,
    'fla.modules.norm.l2norm': ['l2_norm', 'l2norm'],
    'fla.modules.norm.layernorm': NORM_FUNCTIONS,
    'fla.modules.rotary': ROTARY,
    'fla.modules.rotary.ops': ROTARY,
}

SIGNATURES = {
    'layernorm.rms_norm': 'x, weight, bias=None, residual=None, eps=1e-05, prenorm=False, residual_in_fp32=False',
    'layernorm.layer_norm': 'x, weight, bias=None, residual=None, eps=1e-05, prenorm=False, residual_in_fp32=False, '
    'is_rms_norm=False',
    'layernorm.group_norm': 'x, weight, bias=None, residual=None, eps=1e-05, prenorm=False, residual_in_fp32=False, '
    'is_rms_norm=False, num_groups=1',
    'fused_norm_gate.rms_norm_gated': "x, g, weight, bias=None, activation='swish', residual=None, prenorm=False, "
    'residual_in_fp32=False, eps=1e-06',
    'l2norm.l2norm': 'x, eps=1e-06, output_dtype=None',
    'activations.swiglu': 'x, y',
    'activations.silu_and_mul': 'x',
    'activations.swiglu_linear': 'x, y, weight, bias',
    'rotary.rotary_embedding': 'x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None',
    'convolution.causal_conv1d': 'x, weight, bias=None, residual=None, initial_state=None, output_final_state=False, '
    'activation=None, cu_seqlens=None',
    'fused_cross_entropy.cross_entropy_loss': 'logits, target, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, '
    'logit_softcapping=None, ignore_index=-100, inplace_backward=False, process_group=None',
    'fused_linear_cross_entropy.fused_linear_cross_entropy_loss': 'x, target, weight, bias=None, ignore_index=-100, '
    "label_smoothing=0.0, logit_scale=1.0, logit_softcapping=None, num_chunks=8, reduction='mean'",
    'convolution.causal_conv1d_update': 'x, cache, residual=None, weight=None, bias=None, activation=None',
}


def test_paths_give_the_same_objects():
    """Each name is one object, whatever path it is imported by."""
    objects = {}
    for path, names in PATHS.items():
        scope = {}
        exec(f'from {path} import {", ".join(names)}', scope)
        for name in names:
            if not inspect.ismodule(scope[name]):  # `l2norm`, a module in fla.modules and a function elsewhere
                assert objects.setdefault(name, scope[name]) is scope[name], (path, name)


def test_no_submodule_is_hidden_by_a_function():
    """One is, as in FLA: clients import the function `causal_conv1d` from `fla.modules.conv`."""
    paths = [name for _, name, _ in pkgutil.walk_packages(fla.modules.__path__, 'fla.modules.') if '.backends.' not in name]
    for path in paths:
        importlib.import_module(path)
    hidden = []
    for path in paths:
        parent, _, name = path.rpartition('.')
        if not inspect.ismodule(getattr(importlib.import_module(parent), name)):
            hidden.append(path)
    assert hidden == ['fla.modules.conv.causal_conv1d']


@pytest.mark.parametrize('name', SIGNATURES)
def test_signatures(name):
    module, function = name.split('.')
    signature = inspect.signature(getattr(importlib.import_module(f'fla.modules.{module}'), function))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert ', '.join(str(p) for p in bare) == SIGNATURES[name]


CALLS = {
    'layernorm.rms_norm': lambda x: (x, x[0, 0]),
    'layernorm.layer_norm': lambda x: (x, x[0, 0]),
    'layernorm.group_norm': lambda x: (x, x[0, 0]),
    'fused_norm_gate.rms_norm_gated': lambda x: (x, x, x[0, 0]),
    'l2norm.l2norm': lambda x: (x,),
    'activations.swiglu': lambda x: (x, x),
    'activations.silu_and_mul': lambda x: (x,),
    'activations.swiglu_linear': lambda x: (x, x, x[0], None),
    'rotary.rotary_embedding': lambda x: (x[:, :, None], x[0, :, :3], x[0, :, :3]),
    'fused_cross_entropy.cross_entropy_loss': lambda x: (x[0], torch.arange(8, device=x.device) % 6),
    'fused_linear_cross_entropy.fused_linear_cross_entropy_loss': lambda x: (
        *(x[0], torch.arange(8, device=x.device) % 6, x[1, :6]),
    ),
    'convolution.causal_conv1d': lambda x: (x, x[0, :4].t()),
    'convolution.causal_conv1d_update': lambda x: (x[:, 0], x[:, :4].transpose(1, 2).clone(), None, x[0, :4].t()),
}


TWICE = [
    *(f'layernorm.{norm}' for norm in ('rms_norm', 'layer_norm', 'group_norm')),
    *('fused_norm_gate.rms_norm_gated', 'l2norm.l2norm', 'rotary.rotary_embedding', 'convolution.causal_conv1d'),
    *(f'activations.{one}' for one in ('swiglu', 'silu_and_mul', 'swiglu_linear')),
]


@pytest.mark.parametrize('name', TWICE)
def test_differentiable_twice(name):
    """On the reference; for losses see test_losses.py."""
    module, function = name.split('.')
    call = getattr(importlib.import_module(f'fla.modules.{module}'), function)
    x = torch.randn(1, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(2, 8, 6)
    given = [one[:, :4] if one is not None and one.shape[:2] == (2, 8) else one for one in CALLS[name](x)]
    leaves = [one.detach().clone().requires_grad_() for one in given if one is not None]

    def plain(*tensors):
        y = call(*tensors, *(None for one in given if one is None))
        return y[0] if isinstance(y, tuple) else y

    assert torch.autograd.gradgradcheck(plain, leaves)


@pytest.mark.parametrize('name', CALLS)
def test_meta_tensors_compile_and_autocast(name):
    module, function = name.split('.')
    call = getattr(importlib.import_module(f'fla.modules.{module}'), function)
    x = torch.randn(2, 8, 6)
    expected = call(*CALLS[name](x))
    first = expected if isinstance(expected, torch.Tensor) else expected[0]
    on_meta = call(*CALLS[name](x.to('meta')))
    on_meta = on_meta if isinstance(on_meta, torch.Tensor) else on_meta[0]
    assert (on_meta.shape, on_meta.dtype) == (first.shape, first.dtype)

    compiled = torch.compile(call, fullgraph=True, backend='aot_eager')(*CALLS[name](x))
    torch.testing.assert_close(compiled, expected)

    if function not in ('swiglu_linear', 'fused_linear_cross_entropy_loss'):  # autocast changes linear maps
        with torch.autocast('cpu', torch.bfloat16):
            torch.testing.assert_close(call(*CALLS[name](x)), expected, rtol=0, atol=0)


# required tensors, by function
REQUIRED = {
    'layernorm.rms_norm': 'x',
    'layernorm.layer_norm': 'x',
    'layernorm.group_norm': 'x',
    'fused_norm_gate.rms_norm_gated': 'x g',
    'l2norm.l2norm': 'x',
    'activations.swiglu': 'x y',
    'activations.silu_and_mul': 'x',
    'activations.swiglu_linear': 'x y weight',
    'rotary.rotary_embedding': 'x cos sin',
    'fused_cross_entropy.cross_entropy_loss': 'logits target',
    'fused_linear_cross_entropy.fused_linear_cross_entropy_loss': 'x target weight',
    'convolution.causal_conv1d': 'x weight',
    'convolution.causal_conv1d_update': 'x cache weight',
}


@pytest.mark.parametrize('name', CALLS)
@pytest.mark.parametrize('dispatched', [True, False])
def test_none_for_a_tensor(name, dispatched):
    """Also with dispatch off, where a call runs the decorated function itself."""
    module, function = name.split('.')
    call = getattr(importlib.import_module(f'fla.modules.{module}'), function)
    call = call if dispatched else call.__wrapped__
    for required in REQUIRED[name].split():
        bound = inspect.signature(call).bind(*CALLS[name](torch.randn(2, 8, 6)))
        bound.arguments[required] = None
        with pytest.raises(TypeError, match=f'argument {required!r} must be a tensor, got None'):
            call(*bound.args, **bound.kwargs)


@pytest.mark.parametrize('name', CALLS)
def test_the_default_says_that_it_needs_a_gpu(name):
    """With dispatch off; otherwise `reference` serves CPU tensors."""
    module, function = name.split('.')
    call = getattr(importlib.import_module(f'fla.modules.{module}'), function)
    first = REQUIRED[name].split()[0]
    with pytest.raises(
        RuntimeError, match=f'{function}: the default .* written in Triton and needs a GPU; {first} is on cpu'
    ):
        call.__wrapped__(*CALLS[name](torch.randn(2, 8, 6)))
    assert explain(call, *CALLS[name](torch.randn(2, 8, 6))).winner == 'reference'


@pytest.mark.parametrize('layer', [fla.modules.ShortConvolution(3, 4), fla.modules.RotaryEmbedding(2)], ids=str)
def test_none_for_a_tensor_of_a_layer(layer):
    names = [p.name for p in inspect.signature(layer.forward).parameters.values() if p.default is p.empty]
    for required in names:
        given = {name: torch.randn(1, 2, 3, 3) for name in names} | {required: None}
        with pytest.raises(TypeError, match=f'argument {required!r} must be a tensor, got None'):
            layer(**given)


def test_described_and_explained():
    table = describe('modules')
    assert [name for name in CALLS if f'modules.{name.split(".")[1]}' not in table and name.split('.')[1] not in table] == []
    x = torch.randn(2, 4)
    assert explain(importlib.import_module('fla.modules.activations').swiglu, x, x).winner == 'reference'
