"""Opaque kernels. NumPy stands in for an extension that PyTorch cannot trace; plain float64 PyTorch is the oracle."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch._inductor.config
import torch.autograd.forward_ad as fwad
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fla.opaque import opaque
from tests.tables import table

# A gated sum over time: o_t = h0 + sum over s <= t of tanh(scale * q_s) * n, ht = o_T; `n` derives from a size.
calls: list[str] = []


def array(tensor: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().numpy())


def scan_forward(q, h0, scale, n, final):
    calls.append('forward')
    gate = np.tanh(array(q) * scale)
    o = np.cumsum(gate * n, 0) + (0 if h0 is None else array(h0))
    return torch.from_numpy(o), torch.from_numpy(o[-1].copy()) if final else None, torch.from_numpy(1 - gate**2)


def scan_fake(q, h0, scale, n, final):
    return q.new_empty(q.shape), q.new_empty(q.shape[1:]) if final else None, q.new_empty(q.shape)


def scan_backward(do, dht, h0, q, slope, scale, n, needs_input_grad):
    calls.append(f'backward{"".join("01"[one] for one in needs_input_grad)}')
    gradient = array(do).copy()
    if dht is not None:
        gradient[-1] += array(dht)
    suffix = np.cumsum(gradient[::-1], 0)[::-1]
    dq = torch.from_numpy(suffix * array(slope) * scale * n) if needs_input_grad[0] else None
    dh0 = torch.from_numpy(suffix[0].copy()) if h0 is not None and needs_input_grad[1] else None
    return dq, dh0


scan = opaque(
    'opaque_test::scan',
    schema='(Tensor q, Tensor? h0, float scale, SymInt n, bool final) -> (Tensor o, Tensor? ht, Tensor slope)',
    forward=scan_forward,
    fake=scan_fake,
    backward=scan_backward,
    grads=('q', 'h0'),
    intermediates=('slope',),
    devices=('cpu',),
)


def scan_oracle(q, h0, scale, n, final):
    o = torch.tanh(q * scale).cumsum(0) * n
    if h0 is not None:
        o = o + h0
    return o, o[-1] if final else None


def triple_forward(x):
    calls.append('triple')
    return torch.from_numpy(array(x) * 3)


def triple_fake(x):
    return x.new_empty(x.shape)


triple = opaque(
    'opaque_test::triple', schema='(Tensor x) -> Tensor', forward=triple_forward, fake=triple_fake, devices=('cpu',)
)


def rank_forward(x, weight, mask):
    product = array(x) * array(weight) * array(mask)
    return torch.from_numpy(product), torch.from_numpy(np.argsort(product, -1)), torch.from_numpy(product.max(-1))


rank = opaque(
    'opaque_test::rank',
    schema='(Tensor x, Tensor weight, Tensor mask) -> (Tensor o, Tensor order, Tensor peak)',
    forward=rank_forward,
    fake=lambda x, weight, mask: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64), x.new_empty(x.shape[:-1])),
    backward=lambda do, x, weight, mask: (do * weight * mask, (do * x * mask).double()),  # double: forgiven in eager
    grads=('x', 'weight'),
    non_differentiable=('order', 'peak'),
    devices=('cpu',),
)


def append_forward(x, cache):
    memory = cache.detach().numpy()
    memory += array(x)
    return torch.from_numpy(memory * 2)


append = opaque(
    'opaque_test::append',
    schema='(Tensor x, Tensor(a!) cache) -> Tensor',
    forward=append_forward,
    fake=lambda x, cache: x.new_empty(x.shape),
    devices=('cpu',),
)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    calls.clear()
    torch.manual_seed(0)


def inputs(length=5, *, h0=True, grad=(True, True)):
    q = torch.randn(length, 3, requires_grad=grad[0])
    return q, torch.randn(3, requires_grad=grad[1]) if h0 else None


def loss(function, q, h0, final=True):
    o, ht = function(q, h0, 0.5, q.shape[0], final)
    assert (ht is not None) == final
    return (o * o.detach().cos()).sum() + (0 if ht is None else ht.square().sum())


def oracle(q, h0, final=True):
    """Value and gradients in float64."""
    doubles = [None if one is None else one.detach().double().requires_grad_(one.requires_grad) for one in (q, h0)]
    value = loss(scan_oracle, *doubles, final)
    wanted = [one for one in doubles if one is not None and one.requires_grad]
    return value, torch.autograd.grad(value, wanted) if wanted else ()


def check(function, q, h0, final=True):
    value = function(q, h0, final)
    expected, gradients = oracle(q, h0, final)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    assert value.requires_grad == bool(gradients)
    wanted = [one for one in (q, h0) if one is not None and one.requires_grad]
    if wanted:
        for got, want in zip(torch.autograd.grad(value, wanted), gradients, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def operators_of(function):
    """Names of this file's operators that PyTorch's dispatcher saw: none on the eager path."""
    with torch.autograd.profiler.profile() as profile:
        function()
    return sorted({event.name for event in profile.function_events if event.name.startswith('opaque_test::')})


# The eager path


@pytest.mark.parametrize('final', [True, False])
@pytest.mark.parametrize('h0', [True, False])
@pytest.mark.parametrize('grad', [(True, True), (True, False), (False, True), (False, False)])
def test_eager_calls_run_the_kernel_directly(final, h0, grad):
    q, h0 = inputs(h0=h0, grad=grad)
    assert operators_of(lambda: check(partial(loss, scan), q, h0, final)) == []
    needs = (grad[0], grad[1] and h0 is not None)
    assert calls == ['forward', *[f'backward{"".join("01"[one] for one in needs)}'] * any(needs)]


def test_no_graph_without_gradients():
    q, h0 = inputs()
    with torch.no_grad():
        assert operators_of(lambda: scan(q, h0, 0.5, 5, True)) == []
        assert not scan(q, h0, 0.5, 5, True)[0].requires_grad
    with torch.inference_mode():
        assert scan(q, h0, 0.5, 5, True)[0].is_inference()


def test_parameters_take_the_eager_path():
    q, h0 = (torch.nn.Parameter(one) for one in inputs())
    assert operators_of(lambda: check(partial(loss, scan), q, h0)) == []


def test_strided_inputs_and_expanded_gradients():
    q = torch.randn(3, 5).t().requires_grad_()
    scan(q, None, 0.5, 5, False)[0].sum().backward()  # the gradient of sum() has stride 0
    double = q.detach().double().requires_grad_()
    scan_oracle(double, None, 0.5, 5, False)[0].sum().backward()
    torch.testing.assert_close(q.grad.double(), double.grad, rtol=1e-5, atol=1e-5)


def test_function_has_signature_name_and_source():
    assert str(inspect.signature(scan)) == '(q, h0, scale, n, final)'
    assert (scan.__name__, scan.__module__) == ('scan', __name__)
    assert inspect.getsource(scan).startswith('def scan(q, h0, scale, n, final):')
    q, h0 = inputs(grad=(False, False))
    o, _ = scan(final=True, n=5, scale=0.5, h0=h0, q=q)
    torch.testing.assert_close(o.double(), scan_oracle(q.double(), h0.double(), 0.5, 5, True)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match='final'):
        scan(q, h0, 0.5, 5)


# torch.compile


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
@pytest.mark.parametrize('grad', [(True, True), (False, True), (False, False)])
def test_compiled(backend, grad):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(partial(loss, scan), backend=counter, fullgraph=True, dynamic=True)
    for length in (5, 8, 6):
        check(compiled, *inputs(length, grad=grad))
    assert counter.frame_count == 1, 'one graph for all lengths'
    ran = operators_of(lambda: check(compiled, *inputs(7, grad=grad)))
    assert counter.frame_count == 1
    # aot_eager holds the operators below autograd; `eager` calls the public one, which ends in them.
    below = ['opaque_test::scan_backward'] * any(grad) + ['opaque_test::scan_forward']
    assert ran == (below if backend == 'aot_eager' else ['opaque_test::scan', *below])


@pytest.mark.parametrize(('h0', 'final'), [(True, False), (False, True), (False, False)])
def test_compiled_optionals(h0, final):
    compiled = torch.compile(partial(loss, scan), backend='aot_eager', fullgraph=True)
    check(compiled, *inputs(h0=h0), final)


@pytest.mark.slow
def test_inductor():
    counter = CompileCounterWithBackend('inductor')
    compiled = torch.compile(partial(loss, scan), backend=counter, fullgraph=True, dynamic=True)
    for length in (5, 8):
        # transposed: Inductor checks that the gradient is contiguous, as the default fake_backward says
        q = torch.randn(3, length).t().requires_grad_()
        check(compiled, q, inputs()[1])
    assert counter.frame_count == 1


# Inductor's disk cache ignores an operator's tags, so it could return code compiled for an older version of them.
@torch._inductor.config.patch(force_disable_caches=True)
def test_inductor_keeps_strides():
    """Without the tag Inductor would give the sum the layout of `y`, and a verifier would have seen other strides."""

    def forward(x):
        strides.append(x.stride())
        return torch.from_numpy(array(x))

    strides: list[tuple[int, ...]] = []
    function = opaque(
        'opaque_test::strided', schema='(Tensor x) -> Tensor', forward=forward, fake=triple_fake, devices=('cpu',)
    )
    x, y = torch.randn(8, 6, 5), torch.randn(5, 6, 8)
    got = torch.compile(lambda x, y: function(x.transpose(0, 2) + y), fullgraph=True)(x, y)
    torch.testing.assert_close(got.double(), x.double().transpose(0, 2) + y.double(), rtol=1e-6, atol=1e-6)
    assert strides == [(1, 5, 30)]


def test_compiled_inference_only():
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(lambda x: triple(x + 1) * 2, backend=counter, fullgraph=True)
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x).double(), (x.double() + 1) * 6, rtol=1e-6, atol=1e-6)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x).double(), (x.double() + 1) * 6, rtol=1e-6, atol=1e-6)
    assert operators_of(lambda: compiled(x)) == ['opaque_test::triple_forward']


def test_gradients_get_the_dtype_and_strides_of_inputs():
    """Eager autograd casts a float64 gradient of a float32 input; a compiled graph would misread its memory."""
    mask = torch.ones(3, 4)
    for function in (rank, torch.compile(rank, backend='aot_eager', fullgraph=True)):
        x, weight = torch.randn(4, 3).t().requires_grad_(), torch.randn(3, 4, requires_grad=True)
        o, order, peak = function(x, weight, mask)
        assert (o.requires_grad, order.requires_grad, peak.requires_grad) == (True, False, False)
        o.sum().backward()
        assert x.grad.dtype == weight.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad.double(), weight.detach().double())
        torch.testing.assert_close(weight.grad.double(), x.detach().double())


def test_autocast_changes_nothing():
    q, h0 = inputs()
    compiled = torch.compile(partial(loss, scan), backend='aot_eager', fullgraph=True)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        check(partial(loss, scan), q, h0)
        check(compiled, q, h0)


# Export, fake and meta tensors, modes, subclasses


class Scan(torch.nn.Module):
    def forward(self, q, h0):
        return scan(q, h0, 0.5, q.shape[0], True)


@pytest.mark.parametrize('strict', [True, False])
@pytest.mark.parametrize('grad', [True, False])
def test_export_stays_differentiable(strict, grad):
    length = torch.export.Dim('length', min=2, max=64)
    example = inputs(5, grad=(grad, grad))
    program = torch.export.export(Scan(), example, dynamic_shapes=({0: length}, None), strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == 'call_function']
    assert targets.count(scan.op) == 1
    module = program.module()
    check(lambda q, h0, final: loss(lambda q, h0, *_: module(q, h0), q, h0, final), *inputs(9))
    lowered = program.run_decompositions()
    assert [node.target for node in lowered.graph.nodes].count(scan.forward_op) == 1


def test_fake_tensors():
    with FakeTensorMode() as mode:
        q, h0 = (mode.from_tensor(one) for one in inputs())
        o, ht = scan(q, h0, 0.5, 5, True)
        dq, dh0 = torch.autograd.grad(o.sum() + ht.sum(), (q, h0))
    assert (o.shape, ht.shape, dq.shape, dh0.shape) == ((5, 3), (3,), (5, 3), (3,))
    assert calls == []


def test_meta_tensors():
    q, h0 = (one.to('meta') for one in inputs())
    o, ht = scan(q, h0, 0.5, 5, True)
    assert (o.device.type, o.shape, ht.shape, o.requires_grad) == ('meta', (5, 3), (3,), True)
    assert calls == []


def test_real_tensors_in_fake_mode_do_not_reach_the_kernel():
    q, h0 = inputs()
    with FakeTensorMode(), pytest.raises(AssertionError, match='FakeTensor'):
        scan(q, h0, 0.5, 5, True)
    assert calls == []


def test_make_fx_records_the_operator():
    """With real tensors. The eager path would leave the numbers of this run in the graph as a constant."""
    graph = make_fx(lambda x: triple(x) + 1)(torch.randn(3))
    x = torch.randn(3)
    torch.testing.assert_close(graph(x).double(), x.double() * 3 + 1, rtol=1e-6, atol=1e-6)


def test_dispatch_modes_see_the_operator():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    q, h0 = inputs()
    with Seen():
        check(partial(loss, scan), q, h0)
    assert seen.count(scan.forward_op) == 1
    assert seen.count(scan.backward_op) == 1


def test_subclasses_go_through_the_operator():
    class Named(torch.Tensor):
        pass

    q, h0 = inputs(grad=(False, False))
    for arguments in ((q.as_subclass(Named), h0), (q, h0.as_subclass(Named))):
        assert 'opaque_test::scan_forward' in operators_of(partial(check, partial(loss, scan), *arguments))


def test_another_device_is_refused():
    only_cuda = opaque('opaque_test::only_cuda', schema='(Tensor x) -> Tensor', forward=triple_forward, fake=triple_fake)
    with pytest.raises(NotImplementedError, match=r'opaque_test::only_cuda.*CPU'):
        only_cuda(torch.randn(3))
    assert calls == []


@pytest.mark.parametrize('selective', [False, True])
def test_checkpointing(selective):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is scan.forward_op else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {'context_fn': partial(create_selective_checkpoint_contexts, policy)} if selective else {}
    check(lambda q, h0, final: checkpoint(partial(loss, scan), q, h0, final, use_reentrant=False, **contexts), *inputs())
    assert calls.count('forward') == (1 if selective else 2)


# vmap loops; derivatives that a kernel cannot give are refused


def compiled_or_not(function, how):
    return function if how == 'plain' else torch.compile(function, backend=how, fullgraph=True)


HOW = ['plain', 'eager', 'aot_eager']


@pytest.mark.parametrize('how', HOW)
def test_vmap_loops(how):
    q, weight, mask = (torch.randn(2, 3, 4) for _ in range(3))
    function = compiled_or_not(lambda *args: torch.vmap(rank)(*args)[0], how)
    torch.testing.assert_close(function(q, weight, mask).double(), q.double() * weight.double() * mask.double())


@pytest.mark.pairwise
@pytest.mark.parametrize('how', HOW)
@pytest.mark.parametrize('final', [False, True])
@pytest.mark.parametrize('dims', [(0, 0), (2, None), (None, 1)], ids=str)
def test_vmap_of_results_that_may_be_none(how, final, dims):
    q, h0 = torch.randn(5, 3), torch.randn(3)
    many = tuple(
        x if dim is None else torch.randn(4, *x.shape).movedim(0, dim) for x, dim in zip((q, h0), dims, strict=True)
    )

    def run(function):
        given = torch.vmap(lambda q, h0: [y for y in function(q, h0, 0.5, 5, final) if y is not None], dims)
        return compiled_or_not(given, how)(*many)

    found, expected = run(scan), run(scan_oracle)
    assert len(found) == 1 + final
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_vmap_of_no_samples():
    o, ht = torch.vmap(lambda q: scan(q, None, 0.5, 5, True))(torch.randn(0, 5, 3))
    assert (o.shape, ht.shape) == ((0, 5, 3), (0, 3))


def test_vmap_around_vmap():
    q, h0 = torch.randn(2, 3, 5, 3), torch.randn(3, 3)
    inner = torch.vmap(lambda q, h0: scan(q, h0, 0.5, 5, True))
    each = torch.vmap(torch.vmap(lambda q, h0: scan_oracle(q, h0, 0.5, 5, True)), (0, None))
    torch.testing.assert_close(torch.vmap(inner, (0, None))(q, h0), each(q, h0))


def test_vmap_of_a_kernel_that_writes():
    x, cache = torch.randn(4, 3), torch.randn(3, 4)
    expected = cache + x.t()
    o = torch.vmap(append, (0, 1))(x, cache)
    torch.testing.assert_close(cache, expected)
    torch.testing.assert_close(o, 2 * expected.t())
    with pytest.raises(RuntimeError, match=r"writes into 'cache', which under .* is one for all samples"):
        torch.vmap(append, (0, None))(x, cache[:, 0].contiguous())


@pytest.mark.parametrize('h0', [False, True])
def test_gradients_of_many_samples(h0):
    q, state = inputs(h0=h0)
    leaves = [q, state] if h0 else [q]
    do, dht = torch.randn(4, 5, 3), torch.randn(4, 3)
    found = []
    for function in (scan, scan_oracle):
        o, ht = function(q, state, 0.5, 5, True)

        def gradient(do, dht, o=o, ht=ht):
            return torch.autograd.grad((o, ht), leaves, (do, dht), retain_graph=True)

        found.append(torch.vmap(gradient)(do, dht))
        many = torch.vmap(torch.vmap(gradient), (0, None))(torch.stack([do, do]), dht)
        for one, two in zip(many, found[-1], strict=True):
            torch.testing.assert_close(one, torch.stack([two, two]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize('how', HOW)
@pytest.mark.parametrize('transform', ['grad', 'jvp', 'jacrev', 'jacfwd'])
@pytest.mark.parametrize('kernel', ['scan', 'triple'])
def test_functional_derivatives_are_refused(how, transform, kernel):
    call = {'scan': lambda q: scan(q, None, 0.5, 5, False)[0].sum(), 'triple': lambda q: triple(q).sum()}[kernel]
    q = inputs(grad=(False, False))[0]
    if transform == 'jvp':
        function = compiled_or_not(lambda q: torch.func.jvp(call, (q,), (q,))[1], how)
    else:
        function = compiled_or_not(getattr(torch.func, transform)(call), how)
    with pytest.raises(RuntimeError, match=r'opaque kernel|no backward'):
        function(q)


def test_transforms_of_other_inputs_work():
    q, h0 = inputs(grad=(False, False))
    gradient = torch.func.grad(lambda h0: (h0 * triple(q)[0]).sum())(h0)
    torch.testing.assert_close(gradient.double(), 3 * q[0].double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('how', HOW)
@pytest.mark.parametrize('warm', [True, False])
@pytest.mark.parametrize('grad', [True, False])
@pytest.mark.parametrize('kernel', ['scan', 'triple'])
def test_tangents_are_not_lost(how, warm, grad, kernel):
    call = {'scan': lambda q: scan(q, None, 0.5, 5, False)[0], 'triple': triple}[kernel]
    function = compiled_or_not(call, how)
    q = inputs(grad=(False, False))[0]
    with torch.set_grad_enabled(grad):
        if warm:  # the code for this call is compiled already, without tangents
            function(q)
        with fwad.dual_level(), pytest.raises(RuntimeError, match='opaque kernel'):
            function(fwad.make_dual(q, torch.ones_like(q)))


def test_tensors_without_tangent_in_a_dual_level():
    q, h0 = inputs()
    with fwad.dual_level():
        with torch.no_grad():
            value = loss(scan, q, h0)
        torch.testing.assert_close(value.double(), oracle(q, h0)[0].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('how', HOW)
def test_double_backward_is_refused(how):
    """Also where the first gradient depends on the input only through saved tensors, which `once_differentiable` allows."""
    q, h0 = inputs()
    function = compiled_or_not(lambda q, h0: scan(q, h0, 0.5, 5, False)[0].sum(), how)

    def penalty():
        (dq,) = torch.autograd.grad(function(q, h0), q, create_graph=True)
        return torch.autograd.grad(dq.sum() + q.sum(), q)

    with pytest.raises(RuntimeError, match='double backward'):
        penalty()


@pytest.mark.parametrize('how', HOW)
def test_gradients_that_do_not_exist_are_refused(how):
    x = torch.randn(3, 4, requires_grad=True)
    plain = x.detach()
    with pytest.raises(RuntimeError, match="opaque_test::triple has no backward, and 'x' requires grad"):
        compiled_or_not(triple, how)(x)
    with pytest.raises(RuntimeError, match="no gradient for 'mask'"):
        compiled_or_not(rank, how)(plain, plain, x)
    with torch.no_grad():
        got = compiled_or_not(rank, how)(plain, plain, x)[0]
    torch.testing.assert_close(got.double(), plain.double() ** 3)


@pytest.mark.parametrize('how', ['eager', 'aot_eager'])
def test_results_that_share_memory_are_refused_in_compiled_code(how):
    def define(name, forward, backward=None):
        gradient = {'backward': backward, 'grads': ('x',)} if backward else {}
        return opaque(
            f'opaque_test::{name}',
            schema='(Tensor x) -> (Tensor o)',
            forward=forward,
            fake=lambda x: torch.empty_like(x[1:] if name == 'tail' else x),
            devices=('cpu',),
            **gradient,
        )

    tail = define('tail', lambda x: x[1:])
    with pytest.raises(RuntimeError, match='opaque_test::tail: result 0 shares memory'):
        compiled_or_not(tail, how)(torch.randn(3))
    identity = define('identity', lambda x: x.clone(), lambda do, x: do)
    x = torch.randn(3, requires_grad=True)
    o = compiled_or_not(identity, how)(x)
    with pytest.raises(RuntimeError, match='opaque_test::identity_backward: result 0 shares memory'):
        o.backward(torch.ones(3))


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        (lambda do, x: torch.ones(2), r'\(2,\) as gradient of .x., which has shape \(3,\)'),
        (lambda do, x: None, 'None as gradient of .x.'),
        (lambda do, x: (do.clone(),), 'its schema says 1 results'),
    ],
)
def test_wrong_gradients_are_refused_in_compiled_code(wrong, message):
    function = opaque(
        'opaque_test::wrong',
        schema='(Tensor x) -> (Tensor o)',
        forward=lambda x: x.clone(),
        fake=torch.empty_like,
        backward=wrong,
        grads=('x',),
        devices=('cpu',),
    )
    o = torch.compile(function, backend='aot_eager', fullgraph=True)(torch.randn(3, requires_grad=True))
    with pytest.raises(RuntimeError, match=message):
        o.sum().backward()


def test_extensions_may_return_lists():
    function = opaque(
        'opaque_test::pair',
        schema='(Tensor x) -> (Tensor, Tensor)',
        forward=lambda x: [x + 1, x + 2],
        fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
        devices=('cpu',),
    )
    x = torch.randn(3)
    for one in (function, torch.compile(function, backend='aot_eager', fullgraph=True)):
        assert isinstance(one(x), tuple)
        torch.testing.assert_close(one(x)[1].double(), x.double() + 2, rtol=1e-6, atol=1e-6)


def test_custom_fake_backward():
    """Backward takes no input, so that the gradient's shape comes from `fake_backward`."""
    function = opaque(
        'opaque_test::exp',
        schema='(Tensor x) -> (Tensor o)',
        forward=lambda x: torch.from_numpy(np.exp(array(x))),
        fake=lambda x: x.new_empty(x.shape),
        backward=lambda o, do: torch.from_numpy(array(o) * array(do)),
        grads=('x',),
        fake_backward=lambda o, do: o.new_empty(o.shape),
        devices=('cpu',),
    )
    for how in HOW:
        x = torch.randn(3, requires_grad=True)
        compiled_or_not(function, how)(x).sum().backward()
        torch.testing.assert_close(x.grad.double(), x.detach().double().exp(), rtol=1e-6, atol=1e-6)


# Kernels that write into their inputs


@pytest.mark.parametrize('how', [*HOW])
def test_mutation(how):
    x, cache = torch.randn(4), torch.randn(4)
    before = cache.double()
    got = compiled_or_not(lambda x, cache: append(x * 2, cache) + cache, how)(x, cache)
    torch.testing.assert_close(cache.double(), before + 2 * x.double())
    torch.testing.assert_close(got.double(), 3 * (before + 2 * x.double()))
    with torch.inference_mode():
        append(torch.ones(4), torch.zeros(4))  # has no version to count


def test_mutation_of_saved_tensors_is_noticed():
    q, cache = torch.randn(4, requires_grad=True), torch.randn(4)
    product = q * cache
    append(torch.ones(4), cache)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        product.sum().backward()


# Defining again


def doubled(factor, **changes):
    declared = {
        'schema': '(Tensor x) -> (Tensor o)',
        'forward': lambda x: torch.from_numpy(array(x) * factor),
        'fake': lambda x: x.new_empty(x.shape),
        'devices': ('cpu',),
    }
    return opaque('opaque_test::again', **{**declared, **changes})


def test_defining_again_replaces_the_kernels():
    x = torch.ones(3)
    compiled = torch.compile(doubled(2), backend='aot_eager', fullgraph=True)
    assert compiled(x).tolist() == [2, 2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        again = doubled(5)
    assert again(x).tolist() == compiled(x).tolist() == [5, 5, 5]


def test_defining_again_cannot_change_the_schema():
    doubled(2)
    with pytest.raises(
        ValueError, match=r'opaque_test::again is defined in .*test_opaque.py with schema .*choose another name'
    ):
        doubled(2, schema='(Tensor y) -> (Tensor o)', forward=lambda y: y, fake=lambda y: y)
    with pytest.raises(ValueError, match='backward_schema'):
        doubled(2, backward=lambda do, x: do, grads=('x',))
    with pytest.raises(ValueError, match='devices'):
        doubled(2, devices=('cuda',))


def test_a_module_imported_twice(tmp_path, monkeypatch):
    """Under another name and with another copy of `opaque`, as test runners and plugin loaders do."""

    def load(path, name):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    source = inspect.getsource(inspect.getmodule(opaque))
    (tmp_path / 'helper.py').write_text(source)
    text = (
        'def define(opaque):\n'
        '    return opaque("opaque_test::twice", schema="(Tensor x) -> Tensor", forward=lambda x: x * 7,\n'
        '                  fake=lambda x: x.new_empty(x.shape), devices=("cpu",))\n'
    )
    (tmp_path / 'first.py').write_text(text)
    (tmp_path / 'second.py').write_text(text)
    first = load(tmp_path / 'first.py', 'opaque_first')
    first.define(opaque)
    copy = load(tmp_path / 'helper.py', 'opaque_copy')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        function = load(tmp_path / 'first.py', 'opaque_first_again').define(copy.opaque)
    compiled = torch.compile(function, backend='aot_eager', fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [7, 7]
    with pytest.warns(UserWarning, match=r'opaque_test::twice is defined in .*first.py and again in .*second.py'):
        load(tmp_path / 'second.py', 'opaque_second').define(opaque)


def test_names_of_foreign_operators_are_refused():
    library = torch.library.Library('opaque_test', 'FRAGMENT')
    library.define('foreign_backward(Tensor x) -> Tensor')
    with pytest.raises(ValueError, match='opaque_test::foreign_backward is already defined by other code'):
        opaque('opaque_test::foreign', schema='(Tensor x) -> Tensor', forward=triple_forward, fake=triple_forward)


# Bad declarations

GOOD = {
    'schema': '(Tensor x, Tensor? w, float s) -> (Tensor o, Tensor lse)',
    'forward': lambda x, w, s: None,
    'fake': lambda x, w, s: None,
    'backward': lambda do, x, w, lse: None,
    'grads': ('x', 'w'),
    'intermediates': ('lse',),
    'devices': ('cpu',),
}
LONE = {'backward': None, 'grads': (), 'intermediates': ()}


@table(
    ('changes', 'error', 'message'),
    [
        ({'name': 'scan'}, ValueError, "name='scan' is not a namespaced operator name"),
        ({'name': 'a::b.c'}, ValueError, 'not a namespaced operator name'),
        ({'forward': None}, TypeError, 'forward=None is not a function'),
        ({'fake': None}, TypeError, 'fake=None is not a function'),
        ({'backward': 3}, TypeError, 'backward=3 is not a function'),
        ({'schema': None}, TypeError, 'schema=None is not a string'),
        ({'schema': 'Tensor x -> Tensor'}, ValueError, "is malformed; write it like '\\(Tensor q"),
        ({'schema': '(Tensr x, Tensor? w, float s) -> (Tensor o, Tensor lse)'}, ValueError, 'before any Tensor'),
        ({'schema': '(Tensor x, Tensor? w, flot s) -> (Tensor o, Tensor lse)'}, ValueError, 'PyTorch cannot take schema'),
        ({'schema': '(Tensor x, Tensor? w, float s=1.0) -> Tensor'}, ValueError, 'without defaults'),
        ({'schema': '(Tensor x, Tensor? w, *, float s) -> Tensor'}, ValueError, 'plain positional arguments'),
        ({'schema': '(Tensor x, Tensor[] w, float s) -> Tensor'}, ValueError, 'pass the tensors one by one'),
        ({'schema': '(Tensor(a) x, Tensor? w, float s) -> Tensor(a)'}, ValueError, 'not a list or view'),
        ({'schema': '(Tensor? x, Tensor w, float s) -> Tensor'}, ValueError, 'a Tensor argument before any Tensor'),
        ({'schema': '(Tensor x, Tensor? lambda, float s) -> Tensor'}, ValueError, "'lambda' cannot name it"),
        ({'schema': '(Tensor x, Tensor? _w, float s) -> Tensor'}, ValueError, 'without leading underscore'),
        ({'schema': '(Tensor x, Tensor? x, float s) -> Tensor'}, ValueError, "name 'x' twice"),
        ({'schema': '(Tensor x, Tensor? w, float s) -> (Tensor o, Tensor x)'}, ValueError, "name 'x' twice"),
        (
            {'schema': '(Tensor x, Tensor? w, float s) -> (Tensor, Tensor)'},
            ValueError,
            'without a name, which backward needs',
        ),
        ({'schema': '(Tensor x, Tensor? w, float s) -> (Tensor o, int lse)'}, ValueError, 'a result is a Tensor or Tensor?'),
        (
            {'schema': '(Tensor x, Tensor? w, float do) -> (Tensor o, Tensor lse)'},
            ValueError,
            "'do' could be an argument or",
        ),
        ({'schema': '(Tensor x, Tensor(a!)? w, float s) -> (Tensor o, Tensor lse)'}, ValueError, "writes into 'w'"),
        ({'forward': lambda x, w: None}, TypeError, r'forward must take \(x, w, s\) by position'),
        ({'forward': lambda w, x, s: None}, ValueError, r'forward takes \(w, x, s\), but gets \(x, w, s\)'),
        ({'fake': lambda x, s, w: None}, ValueError, r'fake takes \(x, s, w\)'),
        ({'backward': lambda do, x, w, lsd: None}, ValueError, "backward asks for 'lsd'; it may name x, w, s, o, lse, do"),
        ({'backward': lambda *args: None}, TypeError, 'plain named parameters'),
        ({'backward': lambda x, w, lse: None}, ValueError, "ignores the gradient of 'o'"),
        ({'backward': lambda do, x, w, dlse: None}, ValueError, "takes 'dlse', but 'lse' has no gradient"),
        ({'backward': lambda do, x, lse: None}, ValueError, "gradient of 'w' has no known shape"),
        ({'fake_backward': lambda do, x: None}, TypeError, 'fake_backward must take'),
        ({'grads': ()}, ValueError, r'grads=\(\) must name the inputs .* out of x, w'),
        ({'grads': ('x', 'x')}, ValueError, 'each once'),
        ({'grads': ('x', 's')}, ValueError, "grads has 's', which is not a tensor argument; choose from x, w"),
        ({'grads': 'x'}, TypeError, "grads='x' is not a tuple of names"),
        ({'intermediates': ('o',)}, ValueError, 'must be the last results'),
        ({'intermediates': ('o', 'lse')}, ValueError, 'after at least one visible'),
        ({'non_differentiable': ('lse',)}, ValueError, "non_differentiable has 'lse'; choose from o"),
        ({'backward': None}, ValueError, 'grads= is given without backward='),
        ({**LONE, 'fake_backward': lambda: None}, ValueError, 'fake_backward= is given without backward='),
        ({'devices': ()}, ValueError, r'devices=\(\) is empty'),
        ({'devices': 'cuda'}, TypeError, "devices='cuda' is not a tuple"),
        ({'devices': ('rocm',)}, ValueError, "devices has 'rocm'; .* 'cuda' \\(ROCm too\\)"),
        ({'devices': ('cuda:0',)}, ValueError, "devices has 'cuda:0'"),
        ({'devices': ('meta',)}, ValueError, 'meta tensors are served by fake='),
    ],
)
def test_bad_declarations(changes, error, message):
    declaration = {'name': 'opaque_test::bad', **GOOD, **changes}
    with pytest.raises(error, match=message):
        opaque(declaration.pop('name'), **declaration)
    assert not hasattr(torch.ops.opaque_test, 'bad'), 'a refused declaration leaves nothing behind'


def test_a_good_declaration_passes():
    """`GOOD`, from which the bad ones are made."""
    assert opaque('opaque_test::good', **GOOD).backward_op is not None


# PyTorch's own check of operators: schema, autograd registration, fake implementation, AOT with dynamic shapes


@pytest.mark.parametrize(
    ('op', 'arguments'),
    [
        (scan.op, (*inputs(), 0.5, 5, True)),
        (scan.op, (*inputs(h0=False), 0.5, 5, False)),
        (scan.op, (*inputs(grad=(False, False)), 0.5, 5, True)),
        (
            scan.backward_op,
            (torch.randn(5, 3), torch.randn(3), torch.randn(3), *(torch.randn(5, 3),) * 2, 0.5, 5, [True, True]),
        ),
        (triple.op, (torch.randn(3),)),
        (append.op, (torch.randn(3), torch.randn(3))),
    ],
)
def test_opcheck(op, arguments):
    torch.library.opcheck(op, arguments)
