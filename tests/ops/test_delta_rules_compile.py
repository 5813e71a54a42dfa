"""The reference backend under torch.compile, torch.export, fake and meta tensors."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fla.backends import explain, trace
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from tests.ops.delta_rules import CHUNKED, FUNCTIONS, case, name_of

every_function = pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def results(function, given):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.tensors.items()}
    o, final = given.with_tensors(**leaves).call(function)
    return [o, final, *torch.autograd.grad(o.square().sum() + final.sum(), list(leaves.values()))]


STEP, SEQUENCE, PACKED = {'T': 1, 'B': 2}, {'T': 20}, {'lens': [3, 0, 17], 'state_v_first': True}
COMPILED = [(f, options) for f in FUNCTIONS for options in (SEQUENCE, PACKED if f in CHUNKED else STEP)]


@pytest.mark.pairwise
@pytest.mark.parametrize(('function', 'options'), COMPILED)
def test_compiled(function, options):
    given = case(function, HV=2, K=4, V=3, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, **options)
    with trace() as t:
        found = results(torch.compile(function, fullgraph=True, backend='aot_eager'), given)
    assert [(record.backend, record.compiled) for record in t] == [('reference', True)]
    for got, right in zip(found, results(function, given), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('packed', [False, True])
def test_lengths_share_a_graph(packed):
    """One graph for all lengths of one number of chunks, none of which takes minutes."""
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(chunk_gated_delta_rule, fullgraph=True, backend=counter)
    for T in (33, 40, 45, 48) if packed else (33, 40, 48, 70):
        given = case(chunk_gated_delta_rule, K=4, V=3, **({'lens': [3, T - 3]} if packed else {'T': T}))
        with torch.no_grad():
            for got, right in zip(given.call(compiled), given.call(chunk_gated_delta_rule), strict=True):
                torch.testing.assert_close(got, right)
    assert counter.frame_count <= 3


@pytest.mark.slow
def test_inductor():
    given = case(chunk_gated_delta_rule, T=16, K=4, V=4)
    with torch.no_grad():
        found = given.call(torch.compile(chunk_gated_delta_rule, fullgraph=True))
        for got, right in zip(found, given.call(chunk_gated_delta_rule), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


class Layer(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q, k, v, g, beta, state, cu_seqlens):
        return self.function(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
        )  # fmt: skip


@pytest.mark.pairwise
@pytest.mark.parametrize('strict', [False, True])
@pytest.mark.parametrize('options', [{'T': 20}, {'lens': [3, 0, 17]}], ids=str)
@pytest.mark.parametrize('function', CHUNKED, ids=name_of)
def test_exported(function, options, strict):
    given = case(function, HV=2, K=4, V=3, **options)
    arguments = (*given.tensors.values(), given.cu_seqlens)
    program = torch.export.export(Layer(function), arguments, strict=strict)
    torch.testing.assert_close(program.module()(*arguments), given.call(function))


OPTIONS = [{'T': 0}, {'T': 1, 'B': 2}, {'T': 70, 'state_v_first': True}, {'lens': [3, 0, 67]}, {'lens': []}]


@pytest.mark.parametrize('options', OPTIONS, ids=str)
@every_function
def test_fake_and_meta_have_the_right_shapes(function, options):
    given = case(function, H=2, HV=4, K=4, V=3, dtype=torch.bfloat16, **options)
    right = [(x.shape, x.dtype, x.stride()) for x in given.call(function)]
    with FakeTensorMode() as mode:
        fakes = given.with_tensors(**{name: mode.from_tensor(x) for name, x in given.tensors.items()})
        fakes.cu_seqlens = None if given.cu_seqlens is None else mode.from_tensor(given.cu_seqlens)
        assert [(x.shape, x.dtype, x.stride()) for x in fakes.call(function)] == right
    meta = case(function, H=2, HV=4, K=4, V=3, dtype=torch.bfloat16, device='meta', **options)
    out = meta.call(function)
    assert [(x.shape, x.dtype, x.stride()) for x in out] == right
    assert all(x.is_meta for x in out)
    assert meta.call(partial(explain, function)).winner == 'reference'


def test_nothing_is_read_on_the_host():
    """Of packed sequences on a device: every operation on them is one that a fake tensor, which has no values, can do."""
    given = case(chunk_kda, lens=[3, 0, 67], HV=2)
    with FakeTensorMode() as mode:
        leaves = {name: mode.from_tensor(x).requires_grad_() for name, x in given.tensors.items()}
        fakes = given.with_tensors(**leaves)
        fakes.cu_seqlens = mode.from_tensor(given.cu_seqlens)
        o, final = fakes.call(chunk_kda)
        gradients = torch.autograd.grad(o.sum() + final.sum(), list(leaves.values()))
    assert [x.shape for x in gradients] == [x.shape for x in given.tensors.values()]
