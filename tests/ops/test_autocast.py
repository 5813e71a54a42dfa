"""Whether autocast is on, asked in compiled code, and that it rounds nothing of what is computed in float32."""

import pytest
import torch

from fla.backends import trace, use_backend
from fla.ops.attn import parallel_attn
from fla.ops.autocast import autocast_is_on
from tests import bounds
from tests.ops.delta_rules import FUNCTIONS, case, name_of


def test_compiled_where_pytorch_cannot_trace_its_own_question(monkeypatch):
    """As with PyTorch 2.11, whose Dynamo breaks the graph at `is_autocast_available`."""
    monkeypatch.setattr(torch.amp, 'is_autocast_available', torch.compiler.disable(torch.amp.is_autocast_available))
    asked = torch.compile(lambda x: (autocast_is_on(x.device.type), x + 1), fullgraph=True, backend='eager')
    x = torch.ones(2)
    assert not asked(x)[0]
    with torch.autocast('cpu', torch.bfloat16):
        assert asked(x)[0]
    assert not asked(x)[0]
    assert not asked(x.to('meta'))[0]


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_is_off_by_default(device):
    assert not autocast_is_on(device)


@pytest.mark.parametrize('cu_seqlens', [None, torch.tensor([0, 4, 9])], ids=['whole', 'packed'])
@pytest.mark.parametrize('value_dim', [16, 8])
@pytest.mark.parametrize('backend', ['reference', 'sdpa'])
def test_a_step_of_training_with_attention_under_autocast(backend, value_dim, cu_seqlens):
    """Forward and backward, and outside of it the backward of that, as without."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 9, 4, 16), (1, 9, 2, 16), (1, 9, 2, value_dim))
    q, k, v = (torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)
    dense = {'g': -torch.rand(1, 9, 4, requires_grad=True)} if backend == 'reference' else {}
    leaves, found = (q, k, v, *dense.values()), []
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled), use_backend(backend, op='attn'), trace() as recorded:
            o = parallel_attn(q, k, v, cu_seqlens=cu_seqlens, **dense)
            first = torch.autograd.grad(o.square().sum(), leaves, create_graph=backend == 'reference')
        assert recorded.last_backend('attn.parallel_attn') == backend
        second = torch.autograd.grad(first[0].square().sum(), leaves) if backend == 'reference' else ()
        found.append([o, *first, *second])
    for without, under in zip(*found, strict=True):
        assert under.dtype == torch.float32
        assert bounds.relative_rms(without.detach().double(), under.detach()) <= bounds.EXACT[torch.float32]


def compiled_gradients(run, tensors, gradients):
    leaves = [x.clone().requires_grad_() for x in tensors]
    results = torch.compile(run, fullgraph=True, backend='aot_eager')(*leaves)
    return results, torch.autograd.grad(results, leaves, gradients)


def functional_gradients(run, tensors, gradients):
    results, pull = torch.func.vjp(run, *tensors)
    return results, pull(gradients)


@pytest.mark.pairwise(pairs=False)
@pytest.mark.parametrize('derive', [compiled_gradients, functional_gradients])
@pytest.mark.parametrize('options', [{'T': 70}, {'T': 1, 'B': 2}, {'lens': [3, 0, 30]}], ids=str)
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_no_autocast_in_a_backward_by_any_derivation(function, options, derive):
    """It is float32's, though nothing of this package runs in it."""
    torch._dynamo.reset()
    given = case(function, HV=2, **options)
    tensors = tuple(given.tensors.values())

    def run(*tensors):
        return given.with_tensors(**dict(zip(given.tensors, tensors, strict=True))).call(function)

    gradients = tuple(torch.randn_like(x) for x in run(*tensors))
    found = []
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled), trace() as recorded:
            results, derived = derive(run, tensors, gradients)
        if derive is functional_gradients:  # what runs in compiled code leaves no trace
            assert {one.backend for one in recorded} == {'reference'}
        found.append((*results, *derived))
    for without, under in zip(*found, strict=True):
        assert under.dtype == torch.float32
        assert bounds.relative_rms(without.detach().double(), under.detach()) <= bounds.EXACT[torch.float32]


@pytest.mark.parametrize('derive', [compiled_gradients, functional_gradients])
@pytest.mark.parametrize('backend', ['reference', 'sdpa'])
def test_no_autocast_in_a_backward_of_attention(backend, derive):
    torch._dynamo.reset()
    tensors = tuple(torch.randn(1, 9, heads, dim) for heads, dim in ((4, 16), (2, 16), (2, 8)))
    found = []
    for enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled), use_backend(backend, op='attn'):
            results, derived = derive(lambda *x: (parallel_attn(*x),), tensors, (torch.ones(1, 9, 4, 8),))
        found.append((*results, *derived))
    for without, under in zip(*found, strict=True):
        assert under.dtype == torch.float32
        assert bounds.relative_rms(without.detach().double(), under.detach()) <= bounds.EXACT[torch.float32]
