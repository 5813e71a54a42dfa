"""The Triton kernels of the activations, interpreted and compiled."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import trace
from fla.modules.activations import silu_and_mul, swiglu, swiglu_linear
from tests import bounds
from tests.triton_support.compile_only import compile_only

from .oracle import error, served_by, tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gated(x, y):
    return x / (1 + torch.exp(-x)) * y


def halves(x):
    first, second = x.chunk(2, -1)
    return gated(first, second)


def linear(x, y, weight, bias):
    z = gated(x, y) @ weight.T
    return z if bias is None else z + bias


def against(function, oracle, arguments, bound):
    """Output and gradients of the default against float64; the incoming gradient is rounded like the output."""
    exact = [None if x is None else x.detach().double().requires_grad_() for x in arguments]
    expected = oracle(*exact)
    with trace() as recorded:
        out = function(*arguments)
    assert recorded.last_backend(f'modules.{function.__name__}') == 'default'
    leaves = [x for x in arguments if x is not None]
    do = tensor(*out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, leaves, do)
    wanted = torch.autograd.grad(expected, [x for x in exact if x is not None], do.double())
    assert out.is_contiguous()
    assert out.dtype == arguments[0].dtype
    assert error(expected, out) <= bound
    for leaf, a, b in zip(leaves, wanted, found, strict=True):
        assert (b.shape, b.dtype) == (leaf.shape, leaf.dtype)
        assert error(a, b) <= bound


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('shape', [(2, 3, 20), (1,), (3, 1), (2, 2100), (5, 128)], ids=str)
def test_swiglu(shape, dtype):
    x, y = (tensor(*shape, dtype=dtype, grad=True) for _ in range(2))
    against(swiglu, gated, (x, y), bounds.elementwise(dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('shape', [(2, 3, 40), (2,), (3, 2), (2, 4200), (5, 256)], ids=str)
def test_silu_and_mul(shape, dtype):
    against(silu_and_mul, halves, (tensor(*shape, dtype=dtype, grad=True),), bounds.elementwise(dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('bias', [True, False], ids=['bias', 'no bias'])
def test_swiglu_linear(bias, dtype):
    x, y = (tensor(2, 3, 40, dtype=dtype, grad=True) for _ in range(2))
    weight, b = tensor(7, 40, dtype=dtype, grad=True), tensor(7, dtype=dtype, grad=True) if bias else None
    # the activation is rounded before the product, and the gradient of the activation before those of x and y
    against(swiglu_linear, linear, (x, y, weight, b), bounds.of_sums(dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize(('rows', 'D', 'out'), [(3, 1, 5), (1, 8, 1), (1, 1, 1)])
def test_swiglu_linear_of_one(rows, D, out):
    shapes = (rows, D), (rows, D), (out, D), (out,)
    leaves = [tensor(*one, dtype=torch.float32, grad=True) for one in shapes]
    against(swiglu_linear, linear, leaves, bounds.of_sums(torch.float32))


@pytest.mark.interpreted
def test_strides_of_the_linear_map():
    packed, weight = tensor(2, 3, 50, dtype=torch.float32), tensor(40, 5, dtype=torch.float32)
    columns = weight[:20].t(), weight.t()[:, ::2], weight[:1, :].t().expand(5, 20)
    views = (
        (packed[..., :20], packed[..., 20:40]),
        (packed[..., 0:40:2], packed[..., 1:40:2]),
        (packed[:, :1, :20].expand(2, 3, 20), packed[..., :1].expand(2, 3, 20)),
    )
    for (x, y), w in zip(views, columns, strict=True):
        leaves = [one.detach().requires_grad_() for one in (x, y, w)]
        against(swiglu_linear, linear, (*leaves, None), bounds.of_sums(torch.float32))


@pytest.mark.interpreted
@pytest.mark.parametrize('view', ['columns apart', 'transposed', 'rows broadcast', 'columns broadcast'])
def test_strides_of_halves(view):
    packed = tensor(2, 3, 40, dtype=torch.float32)
    x = {
        'columns apart': packed[..., ::2],
        'transposed': packed.transpose(0, 1),
        'rows broadcast': packed[:1].expand(4, 3, 40),
        'columns broadcast': packed[..., :1].expand(2, 3, 40),
    }[view]
    against(silu_and_mul, halves, (x.detach().requires_grad_(),), bounds.elementwise(torch.float32))


@pytest.mark.interpreted
@served_by('default')
def test_strides():
    """Strided rows, strided columns, broadcast; the first and the last need no copy."""
    packed = tensor(2, 3, 50, dtype=torch.float32, grad=True)
    bound = bounds.elementwise(torch.float32)
    views = {
        'rows apart': lambda x: (x[..., :20], x[..., 20:40]),
        'columns apart': lambda x: (x[..., 0:40:2], x[..., 1:40:2]),
        'transposed': lambda x: (x[..., :20].transpose(0, 1), x[..., 20:40].transpose(0, 1)),
        'rows broadcast': lambda x: (x[..., :20], x[0, 0, :20].expand(2, 3, 20)),
        'one broadcast': lambda x: (x[..., :20], x[:, :1, :20].expand(2, 3, 20)),
        'columns broadcast': lambda x: (x[..., :20], x[..., :1].expand(2, 3, 20)),
    }
    for view in views.values():

        def function(x, view=view):
            return swiglu(*view(x))

        def oracle(x, view=view):
            return gated(*view(x))

        function.__name__ = 'swiglu'
        against(function, oracle, (packed,), bound)
    x = tensor(3, 2, 4, dtype=torch.float32)
    assert error(halves(x.double()[:, 1]), silu_and_mul(x[:, 1])) <= bound


@pytest.mark.interpreted
@served_by('default')
def test_strides_of_the_gradient():
    x, y = (tensor(4, 6, dtype=torch.float32, grad=True) for _ in range(2))
    for do in (
        torch.ones(1, 1).expand(4, 6),
        tensor(6, 4, dtype=torch.float32).t(),
        tensor(4, 12, dtype=torch.float32)[:, :6],
    ):
        found = torch.autograd.grad(swiglu(x, y), (x, y), do)
        wide = [one.detach().double().requires_grad_() for one in (x, y)]
        for a, b in zip(torch.autograd.grad(gated(*wide), wide, do.double()), found, strict=True):
            assert error(a, b) <= bounds.elementwise(torch.float32)


@pytest.mark.interpreted
@served_by('default')
def test_large_values():
    """silu tends to 0 and to x, without infinite intermediates."""
    x = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4], requires_grad=True)
    y = torch.ones(7, requires_grad=True)
    z = swiglu(x, y)
    dx, dy = torch.autograd.grad(z.sum(), (x, y))
    torch.testing.assert_close(z, torch.nn.functional.silu(x), rtol=bounds.elementwise(torch.float32), atol=bounds.TINY)
    torch.testing.assert_close(dx, torch.tensor([0.0, 0, 0, 0.5, 1, 1, 1]), rtol=0, atol=bounds.TINY)
    torch.testing.assert_close(dy, z)


@pytest.mark.interpreted
def test_empty_and_second_derivatives():
    for shape in ((0, 4), (3, 0)):
        x, y = (torch.zeros(shape, requires_grad=True) for _ in range(2))
        assert [g.shape for g in torch.autograd.grad(swiglu(x, y).sum(), (x, y))] == [shape, shape]
        assert torch.autograd.grad(silu_and_mul(x).sum(), x)[0].shape == shape
    x, y = (torch.zeros(0, 4, requires_grad=True) for _ in range(2))
    weight = torch.ones(5, 4, requires_grad=True)
    o = swiglu_linear(x, y, weight, None)
    assert o.shape == (0, 5)
    assert torch.autograd.grad(o.sum(), weight)[0].eq(0).all()

    x, y = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
    (dx,) = torch.autograd.grad(swiglu(x, y).sum(), x)
    assert not dx.requires_grad
    with pytest.raises(RuntimeError, match='double backward'):
        torch.autograd.grad(swiglu(x, y).sum(), x, create_graph=True)
    with trace() as recorded:
        swiglu(x.double(), y.double())
    assert recorded.last_backend('modules.swiglu') == 'reference'


@pytest.mark.interpreted
@served_by('default')
def test_linear_computes_only_what_is_wanted():
    x, y, weight, bias = (tensor(*shape, dtype=torch.float32) for shape in ((3, 4), (3, 4), (5, 4), (5,)))
    for wanted in ('x', 'y', 'weight', 'bias'):
        given = {'x': x, 'y': y, 'weight': weight, 'bias': bias}
        leaf = given[wanted] = given[wanted].clone().requires_grad_()
        (found,) = torch.autograd.grad(swiglu_linear(**given).sum(), leaf)
        exact = {name: one.detach().double() for name, one in given.items()}
        exact[wanted].requires_grad_()
        (expected,) = torch.autograd.grad(linear(**exact).sum(), exact[wanted])
        assert error(expected, found) <= bounds.of_module(torch.float32)


@pytest.mark.interpreted
@served_by('default')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_linear_under_autocast(dtype):
    x, y = (tensor(3, 6, dtype=dtype, grad=True) for _ in range(2))
    weight, bias = tensor(5, 6, dtype=torch.float32, grad=True), tensor(5, dtype=torch.float32, grad=True)
    leaves = (x, y, weight, bias)
    with torch.autocast('cpu', torch.bfloat16):
        o = swiglu_linear(x, y, weight, bias)
        inside = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    assert o.dtype == torch.bfloat16
    found = torch.autograd.grad(o.sum(), leaves)
    exact = [one.detach().double().requires_grad_() for one in leaves]
    wanted = torch.autograd.grad(linear(*exact).sum(), exact)
    for leaf, a, b, c in zip(leaves, wanted, found, inside, strict=True):
        assert b.dtype == leaf.dtype
        assert error(a, b) <= bounds.of_sums(torch.bfloat16)
        assert torch.equal(b, c)


@pytest.mark.interpreted
@served_by('default')
def test_backward_of_float32_within_autocast():
    """float32 arguments have float32 gradients."""
    leaves = [tensor(*shape, dtype=torch.float32, grad=True) for shape in ((3, 6), (3, 6), (5, 6))]
    o = swiglu_linear(*leaves, None)
    outside = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    with torch.autocast('cpu', torch.bfloat16):
        within = torch.autograd.grad(o.sum(), leaves)
    for a, b in zip(outside, within, strict=True):
        assert torch.equal(a, b)


@pytest.mark.interpreted
@served_by('default')
def test_compiled_under_autocast():
    x, y = (tensor(3, 6, dtype=torch.float32, grad=True) for _ in range(2))
    weight = tensor(5, 6, dtype=torch.float32, grad=True)

    def block(x, y, weight):
        with torch.autocast('cpu', torch.bfloat16):
            return swiglu_linear(x, y, weight, None)

    eager, compiled = block(x, y, weight), torch.compile(block, fullgraph=True, backend='aot_eager')(x, y, weight)
    assert torch.equal(eager, compiled)
    for a, b in zip(*(torch.autograd.grad(o.sum(), (x, y, weight)) for o in (eager, compiled)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.interpreted
@served_by('default')
def test_operators_and_compiled_callers():
    from fla.modules.kernels import activations

    x, y = (tensor(3, 8, dtype=torch.float32, grad=True) for _ in range(2))
    weight, bias = tensor(5, 8, dtype=torch.float32, grad=True), tensor(5, dtype=torch.float32, grad=True)
    torch.library.opcheck(activations.swiglu.op, (x, y))
    torch.library.opcheck(activations.silu_and_mul.op, (x,))
    torch.library.opcheck(activations.swiglu_linear.op, (x, y, weight, bias))

    def block(x, y, weight, bias):
        return swiglu_linear(swiglu(x, y), silu_and_mul(torch.cat([x, y], -1)), weight, bias)

    compiled = torch.compile(block, fullgraph=True, backend='aot_eager', dynamic=True)
    for rows in (3, 5):
        leaves = [tensor(rows, 8, dtype=torch.float32, grad=True) for _ in range(2)] + [weight, bias]
        eager, ours = block(*leaves), compiled(*leaves)
        torch.testing.assert_close(ours, eager)
        for a, b in zip(torch.autograd.grad(eager.sum(), leaves), torch.autograd.grad(ours.sum(), leaves), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.pairwise
@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_compiles(capability):
    """No spills, and 16-byte accesses for aligned rows."""
    from fla.modules.kernels.activations import _launch_backward, _launch_forward

    with compile_only(capability) as compiled:
        for dtype, width in ((torch.bfloat16, 11008), (torch.float32, 1024), (torch.bfloat16, 77)):
            if width == 77:
                assert all('global.b' not in one.kernel.asm['ptx'] for one in compiled)
            x = torch.empty(64, width, dtype=dtype, device='meta')
            _launch_forward(x, x, dtype)
            _launch_backward(x, x, x, torch.empty_like(x))
            packed = torch.empty(64, 2 * width, dtype=dtype, device='meta')
            _launch_backward(packed, None, _launch_forward(packed, None, dtype))
    print(*compiled, sep='\n')
    assert all(one.spilled == 0 for one in compiled)
