"""What is exported of every public function: under `default` operators that keep PyTorch's rules, PyTorch's own under
`reference`; with results that fake tensors tell beforehand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip('triton')
from fla.backends import trace, use_backend
from fla.modules.activations import silu_and_mul, swiglu, swiglu_linear
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.modules.norm.l2norm import l2norm
from fla.modules.norm.layernorm import group_norm, layer_norm, rms_norm
from fla.modules.rotary import rotary_embedding


def new(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


# function, its tensors (or None), its options
CASES = {
    'l2norm': (l2norm, lambda: (new(3, 8),), {}),
    'rms_norm': (rms_norm, lambda: (new(3, 8), new(8), None, new(3, 8)), {'prenorm': True}),
    'layer_norm': (layer_norm, lambda: (new(3, 8), new(8), new(8)), {}),
    'group_norm': (group_norm, lambda: (new(3, 8), new(8), new(8), new(3, 8)), {'num_groups': 2}),
    'rms_norm_gated': (rms_norm_gated, lambda: (new(3, 8), new(3, 8), new(8)), {'activation': 'sigmoid'}),
    'swiglu': (swiglu, lambda: (new(3, 8), new(3, 8)), {}),
    'silu_and_mul': (silu_and_mul, lambda: (new(3, 8),), {}),
    'swiglu_linear': (swiglu_linear, lambda: (new(3, 8), new(3, 8), new(5, 8), new(5)), {}),
    'rotary_embedding': (rotary_embedding, lambda: (new(2, 5, 2, 6), new(9, 2), new(9, 2)), {'seqlen_offsets': 2}),
    'rotary_embedding, in place, packed': (
        lambda x, cos, sin, cu: rotary_embedding(x, cos, sin, True, True, 1, cu),
        lambda: (new(1, 5, 2, 6), new(9, 2), new(9, 2), torch.tensor([0, 2, 5])),
        {},
    ),
    'causal_conv1d': (
        causal_conv1d,
        lambda: (new(2, 7, 3), new(3, 4), new(3), new(2, 7, 3), new(2, 3, 4)),
        {'output_final_state': True, 'activation': 'silu'},
    ),
    'causal_conv1d, packed': (
        lambda x, weight, cu: causal_conv1d(x, weight, None, None, None, True, None, cu),
        lambda: (new(1, 7, 3), new(3, 4), torch.tensor([0, 2, 7])),
        {},
    ),
    'causal_conv1d_update': (
        lambda x, cache, weight: causal_conv1d_update(x, cache, None, weight, None, 'silu')[0],
        lambda: (new(2, 3), new(2, 3, 4), new(3, 4)),
        {},
    ),
    'cross_entropy_loss': (
        cross_entropy_loss,
        lambda: (new(4, 9), torch.tensor([1, 8, 0, -100])),
        {'label_smoothing': 0.1, 'lse_square_scale': 0.1, 'logit_softcapping': 5.0},
    ),
    'fused_linear_cross_entropy_loss': (
        fused_linear_cross_entropy_loss,
        lambda: (new(4, 6), torch.tensor([1, 8, 0, -100]), new(9, 6), new(9)),
        {'label_smoothing': 0.1},
    ),
}
WRITES = ('rotary_embedding, in place, packed', 'causal_conv1d_update')
FIXED = {'rotary_embedding': (1, 2)}  # tensors without gradients


class Program(torch.nn.Module):
    def __init__(self, case, backend):
        super().__init__()
        self.function, _, self.options = CASES[case]
        self.backend = backend

    def forward(self, *tensors):
        with use_backend(self.backend, op='modules'):
            results = self.function(*tensors, **self.options)
        return [one for one in (results if isinstance(results, tuple) else (results,)) if one is not None]


class Recorder(torch.fx.Interpreter):
    """Runs a graph, and records the calls of our operators."""

    def __init__(self, program):
        super().__init__(program)
        self.calls = []

    def call_function(self, target, args, kwargs):
        if str(target).startswith('fla.'):
            self.calls.append((target, args, kwargs))
        return super().call_function(target, args, kwargs)


def inputs_of(case):
    """Leaf tensors, which require gradients if the call has any."""
    tensors = CASES[case][1]()
    for i, x in enumerate(tensors):
        if x is not None and x.is_floating_point() and case not in WRITES and i not in FIXED.get(case, ()):
            x.requires_grad_()
    return list(tensors)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def exported(case, backend):
    program = Program(case, backend)
    expected_inputs, inputs = inputs_of(case), inputs_of(case)
    with trace() as recorded:
        expected = program(*expected_inputs)
    assert {record.backend for record in recorded} == {backend}
    found = torch.export.export(program, tuple(inputs_of(case)), strict=False).module()
    results = found(*inputs)
    assert_same(results, expected)
    assert_same([x for x in inputs if x is not None], [x for x in expected_inputs if x is not None])  # written arguments
    if case not in WRITES:
        leaves, right = ([x for x in given if x is not None and x.requires_grad] for given in (inputs, expected_inputs))
        results, expected = ([one for one in given if one.requires_grad] for given in (results, expected))
        ones = [torch.ones_like(one) for one in expected]
        assert_same(torch.autograd.grad(results, leaves, ones), torch.autograd.grad(expected, right, ones))
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize('case', CASES)
def test_default_is_exported_and_keeps_the_rules(case):
    recorder = Recorder(exported(case, 'default'))
    recorder.run(*inputs_of(case))
    ((operator, args, kwargs),) = recorder.calls
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args]
    torch.library.opcheck(operator, tuple(leaves), kwargs)


@pytest.mark.parametrize('case', CASES)
def test_reference_is_exported(case):
    found = exported(case, 'reference')
    assert not any(str(node.target).startswith('fla.') for node in found.graph.nodes)


def assert_foretold(case, backend):
    program = Program(case, backend)
    right = [(x.shape, x.dtype, x.stride()) for x in program(*inputs_of(case))]
    with FakeTensorMode() as mode:
        fakes = [None if x is None else mode.from_tensor(x) for x in inputs_of(case)]
        found = [(x.shape, x.dtype, x.stride()) for x in program(*fakes)]
    assert found == right


@pytest.mark.interpreted
@pytest.mark.parametrize('case', CASES)
def test_default_is_foretold(case):
    assert_foretold(case, 'default')


@pytest.mark.parametrize('case', CASES)
def test_reference_is_foretold(case):
    assert_foretold(case, 'reference')
