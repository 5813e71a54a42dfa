"""Who does not serve a call, and why: a call for each thing that the Triton defaults do not take. And bad calls, whose error
is one, whoever would serve them."""

import importlib
import inspect

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import default_dispatcher, explain, on_error, trace, use_backend
from fla.modules import RotaryEmbedding, ShortConvolution
from fla.modules.activations import silu_and_mul, swiglu, swiglu_linear
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.modules.norm.l2norm import l2norm
from fla.modules.norm.layernorm import group_norm, layer_norm, rms_norm
from fla.modules.rotary import rotary_embedding

from .test_paths import CALLS, REQUIRED

ROW, WIDE, VECTOR, WIDE_VECTOR = torch.ones(2, 8), torch.ones(2, 8).double(), torch.ones(8), torch.ones(8).double()
X, TABLE, TARGET = torch.ones(1, 3, 2, 4), torch.ones(5, 2), torch.tensor([0, 1])
STEPS, FILTER, STATE = torch.ones(2, 5, 3), torch.ones(3, 4), torch.ones(2, 3, 4)
WIDER_FILTER = 'the Triton kernels take filters of at most 8 steps, got W = 9'


def learnt(x):
    return x.clone().requires_grad_()


def dtype_of(name):
    return f'dtype of {name!r} must be torch.float16, torch.bfloat16, torch.float32, got torch.float64'


# function, arguments, the default's reason
REJECTIONS = [
    *((one, {'x': WIDE, 'weight': None}, dtype_of('x')) for one in (rms_norm, layer_norm, group_norm)),
    *((one, {'x': ROW, 'weight': WIDE_VECTOR}, dtype_of('weight')) for one in (rms_norm, layer_norm, group_norm)),
    (layer_norm, {'x': ROW, 'weight': None, 'bias': WIDE_VECTOR}, dtype_of('bias')),
    (group_norm, {'x': ROW, 'weight': None, 'residual': WIDE}, dtype_of('residual')),
    (rms_norm_gated, {'x': WIDE, 'g': ROW, 'weight': None}, dtype_of('x')),
    (rms_norm_gated, {'x': ROW, 'g': WIDE, 'weight': None}, dtype_of('g')),
    (l2norm, {'x': WIDE}, dtype_of('x')),
    (swiglu, {'x': WIDE, 'y': WIDE}, dtype_of('x')),
    (silu_and_mul, {'x': WIDE}, dtype_of('x')),
    (swiglu_linear, {'x': WIDE, 'y': WIDE, 'weight': WIDE, 'bias': None}, dtype_of('x')),
    (rotary_embedding, {'x': X.double(), 'cos': TABLE, 'sin': TABLE}, dtype_of('x')),
    (rotary_embedding, {'x': X, 'cos': learnt(TABLE), 'sin': TABLE}, 'the Triton kernel has no gradient of cos and sin'),
    (rotary_embedding, {'x': X, 'cos': TABLE, 'sin': learnt(TABLE)}, 'the Triton kernel has no gradient of cos and sin'),
    (cross_entropy_loss, {'logits': WIDE, 'target': TARGET}, dtype_of('logits')),
    (fused_linear_cross_entropy_loss, {'x': WIDE, 'target': TARGET, 'weight': WIDE}, dtype_of('x')),
    *(
        (causal_conv1d, {'x': STEPS, 'weight': FILTER, name: one.double()}, dtype_of(name))
        for name, one in {
            'x': STEPS,
            'weight': FILTER,
            'bias': FILTER[:, 0],
            'residual': STEPS,
            'initial_state': STATE,
        }.items()
    ),
    (causal_conv1d, {'x': STEPS, 'weight': torch.ones(3, 9)}, WIDER_FILTER),
    *(
        (causal_conv1d_update, {'x': STEPS[:, 0], 'cache': STATE, 'weight': FILTER, name: one.double()}, dtype_of(name))
        for name, one in {
            'x': STEPS[:, 0],
            'cache': STATE,
            'weight': FILTER,
            'bias': FILTER[:, 0],
            'residual': STEPS[:, 0],
        }.items()
    ),
    (causal_conv1d_update, {'x': STEPS[:, 0], 'cache': torch.ones(2, 3, 9), 'weight': torch.ones(3, 9)}, WIDER_FILTER),
    *(
        (causal_conv1d_update, {'x': STEPS[:, 0], 'cache': STATE, 'weight': FILTER, name: learnt(one)}, 'inference only')
        for name, one in {'x': STEPS[:, 0], 'weight': FILTER, 'bias': FILTER[:, 0]}.items()
    ),
]


@pytest.mark.interpreted
@pytest.mark.parametrize(('function', 'arguments', 'why'), REJECTIONS)
def test_rejected_by_the_default(function, arguments, why):
    decision = explain(function, **arguments)
    assert decision.winner == 'reference'
    assert why in decision['default'].reason


# functions that write in place, so that a failure must not fall back: module, launch, call, and the tensors
WRITTEN = {
    'causal_conv1d_update': (
        'convolution_autograd',
        'update',
        lambda x, cache: causal_conv1d_update(x, cache, None, FILTER),
        lambda: (torch.ones(2, 3), torch.ones(2, 3, 4)),
    ),
    'rotary_embedding': (
        'rotary',
        'rotate_in_place',
        lambda cos, x: rotary_embedding(x, cos, cos, inplace=True),
        lambda: (TABLE, torch.ones(1, 3, 2, 4)),
    ),
    'cross_entropy_loss': (
        'cross_entropy_autograd',
        '_InPlace',
        lambda target, logits: cross_entropy_loss(logits.requires_grad_() * 1, target, inplace_backward=True),
        lambda: (TARGET, torch.ones(2, 8)),
    ),
}


@pytest.mark.interpreted
@pytest.mark.parametrize('name', WRITTEN)
def test_what_may_be_half_written_never_runs_twice(monkeypatch, name):
    """After a failure of the default no other backend runs, whatever the policy is."""
    module, launch, call, new = WRITTEN[name]
    module = importlib.import_module(f'fla.modules.kernels.{module}')
    first, written = new()

    class Failing:
        def __call__(self, *_):
            with torch.no_grad():
                written.neg_()
            raise NotImplementedError('half way')

        apply = __call__

    monkeypatch.setattr(module, launch, Failing())
    for function in (name, 'swiglu'):
        default = default_dispatcher().catalogue.entry(f'modules.{function}').default
        monkeypatch.setattr(type(default), 'retryable', (NotImplementedError,))
    default_dispatcher().reset()
    with on_error('fallback'), pytest.raises(NotImplementedError, match='half way'):
        call(first, written)
    assert (written == -1).all()
    # a function that writes nothing falls back
    monkeypatch.setattr(importlib.import_module('fla.modules.kernels.activations'), 'swiglu', Failing())
    with on_error('fallback'), trace() as recorded:
        swiglu(ROW, ROW)
    assert recorded.last_backend('modules.swiglu') == 'reference'
    default_dispatcher().reset()


@pytest.mark.interpreted
@pytest.mark.parametrize('name', CALLS)
def test_one_error_from_every_backend(name):
    """A wrong dtype, a wrong shape or no tensor: the error names the argument before any backend is tried."""
    module, function = name.split('.')
    call = getattr(importlib.import_module(f'fla.modules.{module}'), function)
    for required in REQUIRED[name].split():
        for worse in (lambda x: x.to(torch.complex64), lambda x: x[None, None, None, None], lambda x: [1.0]):
            errors = set()
            for backend in ('default', 'reference'):
                bound = inspect.signature(call).bind(*CALLS[name](torch.randn(2, 8, 6)))
                bound.arguments[required] = worse(bound.arguments[required])
                with use_backend(backend, op='modules'), torch.no_grad():
                    try:
                        call(*bound.args, **bound.kwargs)
                    except (TypeError, ValueError) as error:
                        errors.add(f'{type(error).__name__}: {error}')
                    else:
                        errors.add(f'{backend} took it')
            if errors == {'default took it', 'reference took it'}:
                continue  # norms and activations take any leading dimensions
            assert len(errors) == 1, errors
            assert required in errors.pop()


SPARSE = {  # arguments that `CALLS` leave out
    'residual': lambda one: rms_norm(ROW, VECTOR, residual=one(ROW)),
    'bias': lambda one: layer_norm(ROW, VECTOR, one(VECTOR)),
    'y': lambda one: swiglu(ROW, one(ROW)),
    'cu_seqlens': lambda one: causal_conv1d(STEPS[:1], FILTER, cu_seqlens=one(torch.tensor([0, 5]))),
    'initial_state': lambda one: causal_conv1d(STEPS, FILTER, initial_state=one(STATE)),
    'cache': lambda one: causal_conv1d_update(STEPS[:, 0], one(STATE), weight=FILTER),
    'seqlen_offsets': lambda one: rotary_embedding(X, TABLE, TABLE, seqlen_offsets=one(torch.tensor([1]))),
    'seqlen_offset': lambda one: RotaryEmbedding(4)(X, X, one(torch.tensor([1]))),
    'position_ids': lambda one: RotaryEmbedding(4)(X, X, position_ids=one(torch.tensor([[1, 2, 3]]))),
    'mask': lambda one: ShortConvolution(3, 4)(STEPS, mask=one(torch.ones(2, 5))),
}


def nested(x):
    """Nested tensors of PyTorch's first layout, which claims to be strided and has no sizes."""
    return torch.nested.nested_tensor(list(x.detach()))


@pytest.mark.interpreted
@pytest.mark.parametrize('made', [torch.Tensor.to_sparse, nested])
@pytest.mark.parametrize('name', SPARSE)
def test_sparse_and_nested_tensors_are_named(name, made):
    for backend in ('default', 'reference'):
        with use_backend(backend, op='modules'), pytest.raises(TypeError, match=f"'{name}' must be a dense tensor, got"):
            SPARSE[name](made)


@pytest.mark.interpreted
@pytest.mark.parametrize('made', [torch.Tensor.to_sparse, nested])
@pytest.mark.parametrize('name', CALLS)
def test_what_is_required_is_dense(name, made):
    module, function = name.split('.')
    call = getattr(importlib.import_module(f'fla.modules.{module}'), function)
    for required in REQUIRED[name].split():
        bound = inspect.signature(call).bind(*CALLS[name](torch.randn(2, 8, 6)))
        bound.arguments[required] = made(bound.arguments[required].detach())
        for backend in ('default', 'reference'):
            with (
                use_backend(backend, op='modules'),
                pytest.raises(TypeError, match=f"'{required}' must be a dense tensor, got"),
            ):
                call(*bound.args, **bound.kwargs)
