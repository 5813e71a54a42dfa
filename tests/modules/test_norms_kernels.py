"""The Triton kernels of the norms, interpreted, and compiled for several GPUs without one."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip('triton')
from fla.backends import explain, trace, use_backend
from fla.modules.kernels import norms as kernels
from fla.modules.kernels import norms_autograd
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.modules.norm.l2norm import l2norm
from fla.modules.norm.layernorm import group_norm, layer_norm, rms_norm
from tests import bounds
from tests.modules.norms import (
    BARE,
    BF16,
    EVERYTHING,
    FP16,
    FP32,
    KINDS,
    call,
    check,
    everything,
    given,
    oracle,
    upstream,
)
from tests.triton_support.compile_only import compile_only

every_kind = pytest.mark.parametrize('kind', KINDS)
interpreted = pytest.mark.interpreted


@pytest.fixture
def long_rows(monkeypatch):
    """Rows of more than 16 elements are long, and their tiles 8. Rules are kept, and must be neither from before nor for
    other tests. What is launched."""
    rules = (kernels._forward_rule, kernels._backward_rule)
    for rule in rules:
        rule.cache_clear()
    monkeypatch.setattr(kernels, 'IN_REGISTERS', (16, 16))
    monkeypatch.setattr(kernels, 'TILE', 8)
    launched = []
    for name in ('norm_forward', 'norm_forward_long', 'norm_backward', 'norm_backward_long'):
        monkeypatch.setattr(kernels, name, Launched(getattr(kernels, name), launched))
    yield launched
    for rule in rules:
        rule.cache_clear()


@interpreted
@pytest.mark.parametrize('extras', [BARE, ('weight',), EVERYTHING], ids=len)
@every_kind
def test_float32(kind, extras):
    check(kind, given(kind, (2, 5, 100), extras=extras))


@interpreted
def test_eps_of_numpy():
    x, eps = torch.randn(3, 8), np.float32(1e-3)
    with trace() as recorded:
        y = rms_norm(x, None, eps=eps)
    assert recorded.last_backend('modules.rms_norm') == 'default'
    assert torch.equal(y, rms_norm(x, None, eps=float(eps)))


@pytest.mark.pairwise
@interpreted
@pytest.mark.parametrize('extras', [BARE, EVERYTHING], ids=len)
@every_kind
def test_long_rows(long_rows, kind, extras):
    """More rows than programs, so that a program accumulates over several rows."""
    check(kind, given(kind, (3, 5, 100), extras=extras))
    assert set(long_rows) == {('norm_forward_long', 8), ('norm_backward_long', 8)}


@interpreted
@pytest.mark.parametrize('dtype', [BF16, FP16], ids=str)
@every_kind
def test_half_precision(kind, dtype):
    check(kind, given(kind, (3, 64), dtype))
    check(kind, given(kind, (3, 64), dtype, wide=('weight', 'bias', 'residual')))


@interpreted
@every_kind
def test_half_precision_of_long_rows(long_rows, kind):
    check(kind, given(kind, (3, 100), BF16, wide=('residual',)))
    assert set(long_rows) == {('norm_forward_long', 8), ('norm_backward_long', 8)}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    ('dim', 'dtype', 'tiles'),
    [
        # for rms, gated and layer norms, and for rms norms with a residual
        (4096, BF16, (4096, 4096, 4096, 4096)),
        (7168, BF16, (8192, 8192, 8192, 8192)),
        (8192, BF16, (4096, 4096, 8192, 4096)),
        (8192, FP32, (4096, 4096, 8192, 8192)),
        (12288, BF16, (16384, 16384, 16384, 16384)),
        (16384, FP32, (8192, 8192, 8192, 16384)),
        (32768, FP32, (32768, 32768, 32768, 32768)),
        (40960, BF16, (8192, 8192, 8192, 8192)),
    ],
    ids=str,
)
def test_wide_rows(monkeypatch, dim, dtype, tiles):
    """Rows in registers and rows tile by tile."""
    launched = []
    for name in ('norm_forward', 'norm_forward_long'):
        monkeypatch.setattr(kernels, name, Launched(getattr(kernels, name), launched))
    check('rms', given('rms', (2, dim), dtype, ('weight',)))
    check('swish', given('swish', (2, dim), dtype, ('weight',)))
    check('layer', given('layer', (2, dim), dtype, ('weight', 'bias')))
    check('rms', given('rms', (2, dim), dtype, ('weight', 'residual')))
    assert launched == [('norm_forward_long' if tile < dim else 'norm_forward', tile) for tile in tiles]


class Launched:
    """A kernel that records the width of its tiles."""

    def __init__(self, kernel, launched: list) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launched.append((self.kernel.fn.__name__, options['BD']))
            return self.kernel[grid](*args, **options)

        return launch


@interpreted
@pytest.mark.parametrize('shape', [(1, 4), (4,), (1, 1, 4), (300, 4), (2, 132), (2, 1024 + 4)], ids=str)
@every_kind
def test_sizes(kind, shape):
    """eps is large enough that a row of few equal numbers is not only rounding error."""
    check(kind, given(kind, shape), eps=0.1)


@interpreted
@pytest.mark.parametrize('kind', [kind for kind in KINDS if 'groups' not in kind])
def test_one_element(kind):
    """layer_norm leaves only the bias, and of the gradient of x only rounding error."""
    tensors = given(kind, (3, 1))
    if 'layer' not in kind:
        return check(kind, tensors, eps=0.1)
    found = everything(kind, tensors)
    assert torch.equal(found['y'], tensors['bias'].expand(3, 1))
    assert not found['dweight'].any()
    assert torch.equal(found['dbias'], upstream((found['y'],))[0].sum(0))
    if 'total' in found:
        assert torch.equal(found['total'], tensors['x'] + tensors['residual'])


@interpreted
@pytest.mark.parametrize('dim', [1024, 1025, 4096, 4097])
@pytest.mark.parametrize('kind', ['rms prenorm', 'layer prenorm'])
def test_a_stored_sum_around_the_sizes_that_load_weights_ahead(kind, dim):
    for extras in (('residual',), EVERYTHING):
        check(kind, given(kind, (2, dim), BF16, extras))


@interpreted
@pytest.mark.parametrize('shape', [(1, 128), (7, 128), (8, 128), (17, 100), (3, 512), (3, 513), (257, 4)], ids=str)
@pytest.mark.parametrize('kind', ['l2', 'rms', 'layer prenorm'])
def test_gradients_without_sums(kind, shape):
    """Without gradients of parameters, for D up to 512, a program takes one tile, also if the last is partial."""
    check(kind, given(kind, shape, extras=('residual',)), eps=0.1)


@pytest.mark.pairwise
@interpreted
@pytest.mark.parametrize('dtype', [FP32, BF16], ids=str)
@pytest.mark.parametrize(('groups', 'dim'), [(8, 256), (6, 24), (12, 200), (16, 8), (3, 16), (2, 12), (2, 264)], ids=str)
def test_narrow_groups(groups, dim, dtype):
    """A program takes adjacent groups if their number is even, and their size a multiple of 8 up to 256."""
    rule = kernels._forward_rule(dim, groups, 'layer', False, False, False, 2 * dim)
    side = {8: 8, 6: 2, 12: 4, 16: 16}.get(groups, 1)
    assert side == rule.SIDE
    for rows, extras in ((1, BARE), (5, ('bias',)), (rule.ROWS + 1 if rule.ROWS < 100 else 3, EVERYTHING)):
        for kind in ('groups', 'rms groups'):
            check(kind, given(kind, (rows, groups * dim), dtype, extras), num_groups=groups)
    tensors = given('groups', (4, 3, 2 * groups * dim), dtype, ('residual',))
    strided = {name: x[..., : groups * dim].transpose(0, 1) for name, x in tensors.items()}
    check('groups', strided, num_groups=groups)


@interpreted
def test_narrow_groups_of_equal_numbers():
    """Only the bias remains, also in a program with rows past the end."""
    bias = torch.randn(64)
    y = call('groups', {'x': torch.full((3, 64), 7.0), 'bias': bias}, num_groups=4)[0]
    assert torch.equal(y, bias.expand(3, 64))


# options of a call
ARGUMENTS = {
    'a wide sum': ('rms prenorm', {'residual_in_fp32': True}, ('weight', 'bias')),
    'a wide sum of layer_norm': ('layer prenorm', {'residual_in_fp32': True}, ('weight', 'bias')),
    'a wide sum of groups': ('rms groups', {'residual_in_fp32': True}, ('weight', 'bias')),
    'a wide sum, gated': ('sigmoid', {'residual_in_fp32': True}, ('weight', 'bias')),
    'a residual keeps its dtype': ('rms prenorm', {'residual_in_fp32': True}, EVERYTHING),
    'no mean to subtract': ('layer', {'is_rms_norm': True}, EVERYTHING),
    'groups, no mean to subtract': ('groups', {'is_rms_norm': True, 'num_groups': 2}, ('weight',)),
    'one group': ('groups', {'num_groups': 1}, ('weight', 'bias')),
    'groups of one prime size': ('groups', {'num_groups': 3}, EVERYTHING),
    'silu': ('swish', {'activation': 'silu', 'prenorm': True}, EVERYTHING),
    'a large eps': ('swish', {'eps': 0.5}, ('weight',)),
    'a large eps of l2norm': ('l2', {'eps': 3.0}, ()),
}


def check_arguments(case, backend, dtype):
    kind, options, extras = ARGUMENTS[case]
    tensors = given(kind, (3, 5, 24), dtype, extras)
    check(kind, tensors, backend, **options)
    if 'residual_in_fp32' in options:
        _, total = call(kind, tensors, backend, **options)
        assert total.dtype == (dtype if 'residual' in tensors else FP32)


@interpreted
@pytest.mark.parametrize('case', ARGUMENTS)
def test_arguments(case):
    check_arguments(case, 'default', FP32)
    check_arguments(case, 'default', BF16)


@pytest.mark.parametrize('case', ARGUMENTS)
def test_arguments_of_the_reference(case):
    check_arguments(case, 'reference', FP32)
    check_arguments(case, 'reference', BF16)


@interpreted
@every_kind
def test_a_broadcast_gate_or_row(kind):
    """Strides of 0, and gradients of the shared memory; eps keeps groups of two from being only rounding error."""
    shared = given(kind, (1, 8))
    for name in ('x', 'g', 'residual'):
        if name in shared:
            tensors = given(kind, (4, 8), seed=1)
            leaf = shared[name].requires_grad_()
            y = call(kind, {**tensors, name: leaf.expand(4, 8)}, eps=0.5)[0]
            exact = leaf.detach().double().requires_grad_()
            wide = {n: x.double() for n, x in tensors.items()} | {name: exact.expand(4, 8)}
            expected = oracle(kind, **wide, **KINDS[kind][1], eps=0.5)[0]
            assert bounds.relative_rms(expected.detach(), y.detach()) <= bounds.of_norm(FP32)
            weights = upstream((y,))[0]
            (got,) = torch.autograd.grad(y, leaf, weights)
            (wanted,) = torch.autograd.grad(expected, exact, weights.double())
            assert bounds.relative_rms(wanted, got) <= bounds.of_norm(FP32), name


@interpreted
@pytest.mark.parametrize(
    ('kind', 'shape'),
    [(kind, shape) for kind in KINDS for shape in ((0, 8), (2, 0, 8), (2, 0)) if shape[-1] or 'groups' not in kind],
)
def test_nothing(kind, shape):
    tensors = given(kind, shape)
    found = everything(kind, tensors)
    for name, x in found.items():
        like = tensors[name[1:]] if name.startswith('d') else tensors['x']
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        assert name not in ('dweight', 'dbias') or x.eq(0).all()


@interpreted
@pytest.mark.parametrize('shape', [(4, 6, 8), (4, 3, 8)], ids=str)
@every_kind
def test_any_strides(kind, shape):
    """Rows of a wider tensor, transposed, with stride 0, with a step of 2, and the last dimension with stride 0."""
    tensors = given(kind, shape)
    layouts = (
        lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    )
    expected = everything(kind, tensors)
    for layout in layouts:
        strided = {name: layout(x) if x.dim() > 1 else x.repeat_interleave(2)[::2] for name, x in tensors.items()}
        found = everything(kind, strided)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        assert found['y'].is_contiguous()
    for narrowed in (tensors['x'][:1].expand(shape), tensors['x'][..., :1].expand(shape)):
        check(kind, {**tensors, 'x': narrowed}, eps=0.1)


@interpreted
@every_kind
def test_gradients_of_any_strides(kind):
    tensors = given(kind, (4, 6, 8))
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    results = call(kind, leaves)
    dense = upstream(results)
    for gradients in (
        [x[:1].expand(x.shape) for x in dense],
        [x.transpose(0, 2).contiguous().transpose(0, 2) for x in dense],
    ):
        found = torch.autograd.grad(results, list(leaves.values()), gradients, retain_graph=True)
        expected = torch.autograd.grad(
            results, list(leaves.values()), [x.contiguous() for x in gradients], retain_graph=True
        )
        assert all(map(torch.equal, found, expected))


@interpreted
def test_rows_that_are_not_there_do_not_spoil_sums():
    """Rows past the end of the last tile are zeros; with eps=0 their reciprocal norm is infinite."""
    x, weight = torch.ones(3, 4), torch.ones(4, requires_grad=True)
    with use_backend('default', op='modules'):
        (dweight,) = torch.autograd.grad(rms_norm(x, weight, eps=0.0).sum(), weight)
    assert dweight.tolist() == [3.0] * 4


@interpreted
@pytest.mark.parametrize('dtype', [FP16, BF16, FP32, torch.float64])
def test_l2norm_output_dtype(dtype):
    check('l2', given('l2', (3, 20), BF16), output_dtype=dtype)
    assert call('l2', given('l2', (3, 20), BF16), output_dtype=dtype)[0].dtype == dtype


@interpreted
def test_only_what_is_asked_for():
    """An unneeded gradient is None, and its sums are not computed."""
    tensors = given('sigmoid', (3, 8))
    expected = everything('sigmoid', tensors)
    for name in tensors:
        leaves = {n: x.detach().requires_grad_(n == name) for n, x in tensors.items()}
        results = call('sigmoid', leaves)
        results[0].backward(upstream(results)[0], retain_graph=True)
        results[1].backward(upstream(results)[1]) if results[1].requires_grad else None
        assert [n for n, x in leaves.items() if x.grad is not None] == [name]
        torch.testing.assert_close(leaves[name].grad, expected[f'd{name}'])


@interpreted
def test_a_shared_gradient_is_shared_by_no_leaves():
    """x and residual of one dtype share a gradient, which is returned twice; autograd stores two tensors."""
    tensors = given('rms prenorm', (3, 8))
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    y, total = call('rms prenorm', leaves)
    (y.sum() + total.sum()).backward()
    assert torch.equal(leaves['x'].grad, leaves['residual'].grad)
    assert leaves['x'].grad.data_ptr() != leaves['residual'].grad.data_ptr()


@interpreted
def test_the_sum_without_a_residual():
    x = torch.randn(3, 8).bfloat16()
    with use_backend('default', op='modules'):
        assert rms_norm(x, None, prenorm=True)[1] is x
        total = rms_norm(x, None, prenorm=True, residual_in_fp32=True)[1]
    assert torch.equal(total, x.float())


@interpreted
@every_kind
def test_same_bits_twice(kind):
    tensors = given(kind, (40, 72), BF16)
    first, second = everything(kind, tensors), everything(kind, tensors)
    assert all(torch.equal(first[name], second[name]) for name in first)


@interpreted
@every_kind
def test_differentiable_once(kind):
    """A second backward raises a clear error instead of returning wrong numbers."""
    leaves = {name: x.requires_grad_() for name, x in given(kind, (3, 8)).items()}
    results = call(kind, leaves)
    with pytest.raises(RuntimeError, match='double backward'):
        torch.autograd.grad(results[0].sum(), leaves['x'], create_graph=True)


@interpreted
@every_kind
def test_compiled(kind):
    torch._dynamo.reset()
    tensors = given(kind, (3, 8), wide=('residual',))
    function, options = KINDS[kind]
    compiled = torch.compile(function, fullgraph=True, backend='aot_eager')
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    optional = {} if function is l2norm else {'weight': None}
    with use_backend('default', op='modules'), trace() as recorded:
        results = compiled(**(optional | leaves), **options)
    assert [(record.backend, record.compiled) for record in recorded] == [('default', True)]
    results = results if isinstance(results, tuple) else (results,)
    found = [*results, *torch.autograd.grad(results, list(leaves.values()), upstream(results))]
    for got, right in zip(found, everything(kind, tensors).values(), strict=True):
        torch.testing.assert_close(got, right)
    torch._dynamo.reset()


@interpreted
@pytest.mark.parametrize('kind', ['rms prenorm', 'groups'])
def test_lengths_share_a_graph(kind):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend('aot_eager')
    function, options = KINDS[kind]
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for rows in (3, 5, 9, 13, 20):
        tensors = given(kind, (rows, 8))
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        with use_backend('default', op='modules'):
            results = compiled(**leaves, **options)
        results = results if isinstance(results, tuple) else (results,)
        found = [*results, *torch.autograd.grad(results, list(leaves.values()), upstream(results))]
        for got, right in zip(found, everything(kind, tensors).values(), strict=True):
            torch.testing.assert_close(got, right)
    assert counter.frame_count <= 3
    torch._dynamo.reset()


@interpreted
@pytest.mark.parametrize('strict', [False, True])
def test_exported(strict):
    class Layer(torch.nn.Module):
        def forward(self, x, weight, residual, g):
            y, total = rms_norm(x, weight, residual=residual, prenorm=True)
            return rms_norm_gated(y, g, weight), total

    arguments = [x.requires_grad_() for x in (torch.randn(3, 8), torch.randn(8), torch.randn(3, 8), torch.randn(3, 8))]
    with use_backend('default', op='modules'):
        program = torch.export.export(Layer(), tuple(arguments), strict=strict).module()
        right = Layer()(*arguments)
    found = program(*arguments)
    torch.testing.assert_close(found, right)
    for one, other in zip(found, right, strict=True):
        leaves = [x for x in arguments if one is found[0] or x is arguments[0]]
        got, expected = (torch.autograd.grad(y.sum(), leaves, retain_graph=True) for y in (one, other))
        torch.testing.assert_close(got, expected)


@interpreted
@pytest.mark.parametrize('kind', ['rms', 'layer prenorm', 'sigmoid', 'l2'])
def test_operators(kind):
    """`opcheck` compares an operator with its fake, strides included."""
    tensors = given(kind, (3, 8), BF16)
    x, residual, g, weight, bias = (tensors.get(name) for name in ('x', 'residual', 'g', 'weight', 'bias'))
    flags = (
        kind.split()[0] if kind in ('rms', 'layer prenorm', 'l2') else 'rms',
        1e-5,
        'sigmoid' if g is not None else '',
        1,
    )
    arguments = [one if one is None else one.requires_grad_() for one in (x, residual, g, weight, bias)]
    if KINDS[kind][1].get('prenorm'):
        torch.library.opcheck(norms_autograd._norm_prenorm.op, (*arguments, *flags, False))
    else:
        torch.library.opcheck(norms_autograd._norm.op, (*arguments, *flags, BF16, False))


@interpreted
@every_kind
def test_fake_tensors(kind):
    tensors = given(kind, (2, 3, 8), BF16, wide=('residual',))
    right = [(x.shape, x.dtype, x.stride()) for x in everything(kind, tensors).values()]
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in tensors.items()}
        found = everything(kind, fakes)
    assert [(x.shape, x.dtype, x.stride()) for x in found.values()] == right


@interpreted
@pytest.mark.parametrize('name', ['x', 'weight', 'bias', 'residual'])
def test_float64_goes_to_the_reference(name):
    tensors = given('rms', (3, 8))
    tensors[name] = tensors[name].double()
    decision = explain(rms_norm, **tensors)
    assert decision.winner == 'reference'
    assert f'dtype of {name!r} must be' in decision['default'].reason


@interpreted
def test_the_default_serves_what_it_can():
    x = torch.randn(2, 8)
    calls = {rms_norm: (x, None), layer_norm: (x, None), group_norm: (x, None), rms_norm_gated: (x, x, None), l2norm: (x,)}
    assert {explain(function, *arguments).winner for function, arguments in calls.items()} == {'default'}
    many = torch.randn(1, 65536)
    assert 'at most 65535 groups' in explain(group_norm, many, None, num_groups=65536)['default'].reason


@interpreted
def test_bad_calls_are_refused_before_any_backend():
    x = torch.randn(2, 4)
    for backend in ('default', 'reference'):
        with use_backend(backend, op='modules'), pytest.raises(ValueError, match=r'weight must be \[D\] = \[4\], got \[3\]'):
            rms_norm(x, torch.ones(3))


def test_a_cpu_gets_the_reference_and_the_default_says_what_it_needs():
    x = torch.randn(2, 8)
    calls = {rms_norm: (x, None), layer_norm: (x, None), group_norm: (x, None), rms_norm_gated: (x, x, None), l2norm: (x,)}
    for function, arguments in calls.items():
        with trace() as recorded:
            function(*arguments)
        assert recorded.last_backend(f'modules.{function.__name__}') == 'reference'
        with pytest.raises(RuntimeError, match=f'{function.__name__}: the default .* needs a GPU; x is on cpu'):
            function.__wrapped__(*arguments)


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.parametrize(
    ('capability', 'dim'), [((9, 0), 128), *((c, d) for c in ((8, 0), (9, 0), (10, 0), (12, 0)) for d in (8192, 65536))]
)
def test_compiles(capability, dim):
    """`compile_only` also checks that the kernels fit."""
    x, weight = (torch.empty(*shape, dim, dtype=BF16, device='meta') for shape in ((64,), ()))
    narrow, wide = kernels.Norm('layer', 1e-5), kernels.Norm('rms', 1e-5, 'swish')
    with compile_only(capability) as compiled:
        kernels.forward(x, x, None, weight, weight, narrow, BF16, True)
        kernels.backward(x, None, None, weight, weight, x, x, narrow, (BF16, None), (True, True))
        kernels.forward(x, None, x, weight, None, wide, BF16, False)
        kernels.backward(x, None, x, weight, None, x, None, wide, (BF16, None), (True, False))
    assert dim > 8192 or max(one.spilled for one in compiled) <= 64  # a thread has more than 256 bytes of data
    print(*compiled, sep='\n')


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize(
    ('capability', 'dtype'), [((9, 0), FP16), *((c, FP32) for c in ((8, 0), (9, 0), (10, 0), (12, 0)))], ids=str
)
def test_every_kind_compiles(capability, dtype):
    """For the width of a head and of a model."""
    norms = [(kernels.Norm('l2', 1e-6), 128), (kernels.Norm('rms', 1e-6, 'sigmoid'), 128), (kernels.Norm('rms', 1e-6), 2048)]
    with compile_only(capability) as compiled:
        for norm, dim in (*norms, (kernels.Norm('layer', 1e-5, num_groups=8), 2048)):
            x, weight = (torch.empty(*shape, dim, dtype=dtype, device='meta') for shape in ((64,), ()))
            g, weight = x if norm.activation else None, None if norm.kind == 'l2' else weight
            bias = weight if norm.kind == 'layer' else None
            kernels.forward(x, None, g, weight, bias, norm, dtype, False)
            wanted = (weight is not None, bias is not None)
            kernels.backward(x, None, g, weight, bias, x, None, norm, (dtype, None), wanted)
    print(*compiled, sep='\n')
    assert all(one.spilled == 0 for one in compiled)


@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_heads_in_one_step(capability):
    """Without parameters the backward has no loop, and accesses rows of a head 16 bytes at a time."""
    x = torch.empty(64, 128, dtype=BF16, device='meta')
    with compile_only(capability) as compiled:
        kernels.forward(x, None, None, None, None, kernels.Norm('l2', 1e-6), BF16, False)
        kernels.backward(x, None, None, None, None, x, None, kernels.Norm('l2', 1e-6), (BF16, None), (False, False))
    assert 'scf.for' not in compiled[1].kernel.asm['ttgir']
    for one, accesses in zip(compiled, (2, 3), strict=True):
        assert one.spilled == 0
        assert one.kernel.asm['ptx'].count('global.v4.b32') == accesses


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.parametrize('dtype', [BF16, FP32], ids=str)
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_a_stored_sum_in_wide_accesses(capability, dtype):
    norms = (kernels.Norm('rms', 1e-5), kernels.Norm('layer', 1e-5))
    with compile_only(capability) as compiled:
        for dim in (2048, 4096):
            x, weight = (torch.empty(*shape, dim, dtype=dtype, device='meta') for shape in ((64,), ()))
            for norm in norms:
                kernels.forward(x, x, None, weight, weight, norm, dtype, True)
    for one in compiled:
        code = one.kernel.asm['ptx']
        assert one.spilled == 0
        assert 'global.v4.b32' in code
        assert 'global.b16' not in code


@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_groups_side_by_side_in_wide_accesses(capability):
    """Groups of a bfloat16 row of a model's width use no shared memory."""
    with compile_only(capability) as compiled:
        for dtype, groups, dim in ((BF16, 8, 256), (BF16, 16, 128), (FP32, 8, 256), (BF16, 6, 200)):
            x, weight = (torch.empty(*shape, groups * dim, dtype=dtype, device='meta') for shape in ((64,), ()))
            kernels.forward(x, None, None, weight, weight, kernels.Norm('layer', 1e-5, num_groups=groups), dtype, False)
    assert [one.shared for one in compiled[:2]] == [0, 0]
    for one in compiled:
        code = one.kernel.asm['ptx']
        assert one.spilled == 0
        assert 'global.v4.b32' in code
        assert 'global.b16' not in code


@pytest.mark.triton
def test_few_specialisations():
    """Other lengths and strides do not recompile."""
    with compile_only((9, 0)) as compiled:
        for count, width in ((1, 64), (2, 64), (17, 128), (4096, 64), (16, 192)):
            x = torch.empty(count, width, device='meta')[:, :64]
            weight = torch.empty(64, device='meta')
            kernels.forward(x, x, None, weight, None, kernels.Norm('rms', 1e-5), FP32, True)
            kernels.backward(x, None, None, weight, None, x, x, kernels.Norm('rms', 1e-5), (FP32, None), (True, False))
    assert [one.name for one in compiled] == ['norm_forward', 'norm_backward', 'sum_programs']
