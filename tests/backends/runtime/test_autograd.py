"""Selection with gradients: stages called in an autograd.Function, checkpointing, inference-only backends.

The operation is `y = scale * x ** 2` in stages: `stage(x, scale)` squares, `stage_backward(x, dy, scale)` differentiates.
Backends compute the same value by different formulas, and record that they ran.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    NoBackendError,
    checkpoint_contexts,
    default_dispatcher,
    deny_backends,
    dispatch,
    explain,
    trace,
    use_backend,
)
from tests.backends.toy import Toy


class Staged:
    """An operation with two dispatched stages, and the autograd.Function that calls them."""

    def __init__(self, number):
        self.op = op = f'staged{number}'
        self.registry = BackendRegistry(op)

        @dispatch(op)
        def stage(x: torch.Tensor, scale: float) -> torch.Tensor:
            return x * x * scale

        @dispatch(op)
        def stage_backward(x: torch.Tensor, dy: torch.Tensor, scale: float) -> torch.Tensor:
            return 2 * x * dy * scale

        self.stage, self.stage_backward = stage, stage_backward

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, scale):
                ctx.save_for_backward(x)
                ctx.scale = scale
                return stage(x, scale)

            @staticmethod
            def backward(ctx, dy):
                (x,) = ctx.saved_tensors
                return stage_backward(x, dy, ctx.scale), None

        self.function = Function

        class Vendor(BaseBackend):
            backend_type = 'vendor1'
            env_var = 'FLA_STAGED_VENDOR'

            def stage_verifier(self, x):
                return (x.shape[0] >= 4, 'short')

            def stage(self, x, scale):
                return scale * x**2

            def stage_backward_verifier(self, x, dy):
                return (dy.shape[-1] % 8 == 0, 'narrow')

            def stage_backward(self, x, dy, scale):
                return scale * dy * (x + x)

        class Backward(BaseBackend):
            backend_type = 'backward_only'
            env_var = 'FLA_STAGED_BACKWARD'
            priority = 1

            def stage_backward(self, x, dy, scale):
                return (dy * scale) * (2 * x)

        self.registry.register(Vendor())
        self.registry.register(Backward())

    def __call__(self, x, scale=0.5):
        return self.function.apply(x, scale)


@pytest.fixture
def staged(request):
    return Staged(abs(hash(request.node.nodeid)))


def gradient(function, x):
    x = x.clone().requires_grad_()
    function(x).sum().backward()
    return x.grad


def oracle(x, scale=0.5):
    """Returns the gradient in float64, from the formula."""
    return (2 * scale * x.double()).to(x.dtype)


CHOICES = [
    # toggles of vendor and backward_only → forward, backward
    ('1', '1', 'vendor1', 'backward_only'),
    ('1', '0', 'vendor1', 'vendor1'),
    ('0', '1', 'default', 'backward_only'),
    ('0', '0', 'default', 'default'),
]


def ran(records):
    return [record.backend for record in records]


def test_forward_and_backward_are_selected_on_their_own(staged, monkeypatch):
    torch.manual_seed(0)
    for vendor, backward, first, second in CHOICES:
        monkeypatch.setenv('FLA_STAGED_VENDOR', vendor)
        monkeypatch.setenv('FLA_STAGED_BACKWARD', backward)
        x = torch.randn(4, 8)
        with trace() as t:
            found = gradient(staged, x)
        assert ran(t) == [first, second]
        torch.testing.assert_close(found, oracle(x))
    monkeypatch.setenv('FLA_STAGED_VENDOR', '1')
    for shape, expected in (((3, 8), ['default', 'vendor1']), ((4, 6), ['vendor1', 'default']), ((3, 6), ['default'] * 2)):
        with trace() as t:
            found = gradient(staged, torch.ones(shape))
        assert ran(t) == expected
        torch.testing.assert_close(found, oracle(torch.ones(shape)))


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_both_in_one_compiled_function(staged, monkeypatch, backend):
    """Forward and backward are compiled as a pair; a toggle flipped before the forward pass re-selects both."""
    torch.manual_seed(0)
    with torch._dynamo.config.patch(recompile_limit=64):
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(lambda x: staged(x), backend=counter, fullgraph=True)
        for vendor, backward, _, _ in CHOICES + CHOICES[::-1]:
            monkeypatch.setenv('FLA_STAGED_VENDOR', vendor)
            monkeypatch.setenv('FLA_STAGED_BACKWARD', backward)
            x = torch.randn(4, 8)
            torch.testing.assert_close(gradient(compiled, x), oracle(x))
        assert counter.frame_count == len(CHOICES)
        with trace() as t:
            gradient(compiled, torch.ones(4, 8))
        assert set(ran(t)) == {'vendor1', 'backward_only'}
        with trace() as t:
            gradient(compiled, torch.ones(3, 8))
        assert set(ran(t)) <= {'default', 'backward_only'}


def test_compiled_selects_the_backward_by_its_own_shapes(staged):
    compiled = torch.compile(lambda x: staged(x), backend='aot_eager', fullgraph=True)
    with deny_backends('backward_only', op=staged.op):
        for shape, expected in (((4, 8), {'vendor1'}), ((4, 6), {'vendor1', 'default'}), ((3, 6), {'default'})):
            torch._dynamo.reset()
            with trace() as t:
                found = gradient(compiled, torch.ones(shape))
            assert set(ran(t)) == expected
            torch.testing.assert_close(found, oracle(torch.ones(shape)))


def test_a_toggle_between_forward_and_backward(staged, monkeypatch):
    """Eager code selects the backward when it runs; a compiled pair stays as it was compiled."""
    for function, expected in ((staged, 'default'), (torch.compile(staged, backend='aot_eager'), None)):
        monkeypatch.setenv('FLA_STAGED_BACKWARD', '0')
        monkeypatch.setenv('FLA_STAGED_VENDOR', '1')
        x = torch.full((4, 8), 3.0, requires_grad=True)
        y = function(x)
        monkeypatch.setenv('FLA_STAGED_VENDOR', '0')
        with trace() as t:
            y.sum().backward()
        assert ran(t) == ([expected] if expected else [])
        torch.testing.assert_close(x.grad, oracle(x.detach()))


def test_double_backward_and_gradcheck(staged):
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(staged, (x,))
    for choice in ('default', 'vendor1'):
        with use_backend(choice, op=staged.op):
            assert torch.autograd.gradcheck(staged, (x,))


# -- checkpointing ------------------------------------------------------------------------------------------------------


class Unequal(Toy):
    """Two backends with different results: `a` multiplies by 2, `b` by 3. They therefore save different tensors for
    backward.

    The gradient of `(n * x) * x` is the graph's `n * x` plus the saved or recomputed `n * x`.
    """

    def __init__(self):
        super().__init__()
        for number, name in ((2, 'a'), (3, 'b')):
            members = {'backend_type': name, 'env_var': f'FLA_TOY_{name.upper()}', 'priority': number, 'f': _times(number)}
            self.registry.register(type(name, (BaseBackend,), members)())


def _times(number):
    def f(self, q, k, scale=None, flag=False):
        return (number * q) * k

    return f


def recomputed_gradient(toy, between, **options):
    """Returns half the gradient of `n * x * x` at 1; calls `between()` before the recomputation."""
    x = torch.ones(2, 8, requires_grad=True)
    y = checkpoint(lambda value: toy.f(value, value), x, **options)
    between()
    y.sum().backward()
    return x.grad[0, 0].item() / 2


def test_checkpoint_contexts_restore_the_choice(monkeypatch):
    toy = Unequal()
    options = {'use_reentrant': False, 'context_fn': checkpoint_contexts}
    assert recomputed_gradient(toy, lambda: None, **options) == 2
    assert recomputed_gradient(toy, lambda: monkeypatch.setenv('FLA_TOY_A', '0'), **options) == 2
    assert recomputed_gradient(toy, lambda: monkeypatch.setenv('FLA_TOY_A', '1'), **options) == 3
    monkeypatch.delenv('FLA_TOY_A')

    def enter():
        scope.__enter__()

    scope = use_backend('b', op=toy.op)
    assert recomputed_gradient(toy, enter, **options) == 2
    assert recomputed_gradient(toy, lambda: scope.__exit__(None, None, None), **options) == 3
    assert recomputed_gradient(toy, lambda: None, **options) == 2
    assert not default_dispatcher().control.now.scopes


def test_checkpoint_contexts_of_nested_checkpoints(monkeypatch):
    toy = Unequal()
    x = torch.ones(2, 8, requires_grad=True)
    options = {'use_reentrant': False, 'context_fn': checkpoint_contexts}

    def inner(value):
        return toy.f(value, value)

    def outer(value):
        return checkpoint(inner, value, **options) + toy.f(value, value)

    y = checkpoint(outer, x, **options)
    with use_backend('b', op=toy.op):
        y.sum().backward()
    assert x.grad[0, 0].item() == 2 * (2 + 2)
    assert toy.f(torch.ones(1, 1), torch.ones(1, 1)).item() == 2
    assert not default_dispatcher().control.now.scopes


def test_without_checkpoint_contexts_the_recomputation_selects_anew(monkeypatch):
    """PyTorch compares only metadata, so it does not report this. `checkpoint_contexts` or freezing prevents it."""
    toy = Unequal()
    between = lambda: monkeypatch.setenv('FLA_TOY_A', '0')  # noqa: E731
    assert recomputed_gradient(toy, between, use_reentrant=False) == (2 + 3) / 2


def test_reentrant_checkpoint():
    """The first pass runs without grad mode, so an inference-only backend may serve it; the gradient must be right."""
    toy = Unequal()
    toy.add('inference', priority=0, grad='none')
    with trace() as t:
        assert recomputed_gradient(toy, lambda: None, use_reentrant=True) == 2
    assert ran(t) == ['inference', 'a']


def test_checkpoint_in_compiled_code():
    toy = Unequal()

    def function(x):
        return checkpoint(lambda value: toy.f(value, value), x, use_reentrant=False)

    for choice, factor in ((None, 2), ('b', 3)):
        x = torch.ones(2, 8, requires_grad=True)
        compiled = torch.compile(function, backend='aot_eager', fullgraph=True)
        if choice is None:
            compiled(x).sum().backward()
        else:
            with use_backend(choice, op=toy.op):
                compiled(x).sum().backward()
        assert x.grad[0, 0].item() == 2 * factor


def test_checkpoint_around_compiled_code(monkeypatch):
    toy = Unequal()
    compiled = torch.compile(lambda value: toy.f(value, value), backend='aot_eager', fullgraph=True)
    x = torch.ones(2, 8, requires_grad=True)
    y = checkpoint(compiled, x, use_reentrant=False, context_fn=checkpoint_contexts)
    monkeypatch.setenv('FLA_TOY_A', '0')
    y.sum().backward()
    assert x.grad[0, 0].item() == 2 * 2


# -- inference only -----------------------------------------------------------------------------------------------------


@pytest.fixture
def toy():
    made = Toy()
    made.add('fast', grad='none', priority=1)
    made.add('slow', priority=2)
    return made


def test_inference_only_backends_serve_what_needs_no_gradient(toy):
    x, w = torch.zeros(2, 8), torch.zeros(2, 8, requires_grad=True)
    assert toy.ran(x, x) == 'fast'
    for args in ((w, x), (x, w), (torch.nn.Parameter(x), x), (w * 1, x)):
        assert toy.ran(*args) == 'slow'
        assert 'requires grad' in explain(toy.f, *args)['fast'].reason
        with torch.no_grad():
            assert toy.ran(*args) == 'fast'
        with torch.inference_mode():
            assert toy.ran(*args) == 'fast'
    with torch.no_grad(), torch.enable_grad():
        assert toy.ran(w, x) == 'slow'
    with torch.set_grad_enabled(False):
        assert toy.ran(w, x) == 'fast'
    with torch.inference_mode():
        made = torch.zeros(2, 8)
    assert toy.ran(made, x) == 'fast'
    with use_backend('fast', op=toy.op), pytest.raises(NoBackendError, match='requires grad'):
        toy.ran(w, x)


def test_optional_tensors_and_lists_of_tensors_count():
    registry = BackendRegistry('toygroups')

    @dispatch('toygroups')
    def grouped(
        q: torch.Tensor, state: torch.Tensor | None = None, extra: list[torch.Tensor] | None = None, **rest: torch.Tensor
    ) -> str:
        return 'default'

    class Fast(BaseBackend):
        backend_type, grad = 'fast', 'none'

        def grouped(self, q, state=None, extra=None, **rest):
            return 'fast'

    handle = registry.register(Fast())
    q, w = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert grouped(q) == 'fast'
    assert grouped(q, state=w) == grouped(q, extra=[q, w]) == grouped(q, extra=(q, [w])) == 'default'
    assert grouped(q, other=w) == 'default'
    assert grouped(q, q, [q], other=q) == 'fast'
    handle.remove()


def test_a_tensor_or_a_number():
    registry = BackendRegistry('toynumber')

    @dispatch('toynumber')
    def scaled(q: torch.Tensor, scale: torch.Tensor | float = 1.0, bias: torch.Tensor | None = None) -> str:
        return 'default'

    class Fast(BaseBackend):
        backend_type, grad = 'fast', 'none'

        def scaled(self, q, scale=1.0, bias=None):
            return 'fast'

    handle = registry.register(Fast())
    q, w = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert scaled(q, 2.0) == scaled(q, 2.0, q) == scaled(q, q) == 'fast'
    assert scaled(q, w) == scaled(q, 2.0, w) == 'default'
    handle.remove()


def test_forward_mode_refuses_inference_only_backends(toy):
    """`no_grad` does not disable forward-mode AD: the tangent would be lost."""
    import torch.autograd.forward_ad as forward_ad

    x = torch.ones(2, 8)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(2, 8))
        assert toy.ran(dual, x) == 'slow'
        assert 'forward-mode' in explain(toy.f, dual, x)['fast'].reason
    assert toy.ran(x, x) == 'fast'


def test_jvp():
    toy = Unequal()
    toy.add('fast', grad='none', priority=0)
    x = torch.ones(2, 8)
    value, tangent = torch.func.jvp(lambda v: toy.f(v, v), (x,), (x,))
    assert (value[0, 0].item(), tangent[0, 0].item()) == (2, 4)
    with torch.no_grad():
        _, tangent = torch.func.jvp(lambda v: toy.f(v, v), (x,), (x,))
    assert tangent[0, 0].item() == 4


@pytest.mark.parametrize('compiled', [False, True])
def test_func_grad(compiled):
    """In torch.func.grad a tensor requires grad only at its own level."""
    toy = Unequal()
    toy.add('fast', grad='none', priority=0)
    function = torch.func.grad(lambda v: toy.f(v, v).sum())
    vmapped = torch.func.vmap(lambda v: toy.f(v, v))
    if compiled:
        function = torch.compile(function, backend='aot_eager', fullgraph=True)
        vmapped = torch.compile(vmapped, backend='aot_eager', fullgraph=True)
    for _ in range(2):
        assert function(torch.ones(2, 8))[0, 0].item() == 4
        assert vmapped(torch.ones(2, 8))[0, 0].item() == 2
    assert toy.ran() == 'fast'


def test_compiled_code_under_a_transform():
    """Dynamo cannot trace it, and eager code runs."""
    toy = Unequal()
    toy.add('fast', grad='none', priority=0)
    compiled = torch.compile(lambda v: toy.f(v, v) + 0, backend='aot_eager')
    for _ in range(2):
        assert toy.name_of(compiled(torch.zeros(2, 8))) == 'fast'
        assert torch.func.grad(lambda v: compiled(v).sum())(torch.ones(2, 8))[0, 0].item() == 4


def test_func_vjp_and_hessian():
    toy = Unequal()
    toy.add('fast', grad='none', priority=0)
    x = torch.ones(3)
    _, vjp = torch.func.vjp(lambda v: toy.f(v, v).sum(), x)
    torch.testing.assert_close(vjp(torch.tensor(1.0))[0], 4 * x)
    torch.testing.assert_close(torch.func.hessian(lambda v: toy.f(v, v).sum())(x), 4 * torch.eye(3))


def test_inference_only_under_compile(toy):
    f = torch.compile(lambda q: toy.f(q, q) + 0, backend='aot_eager', fullgraph=True)
    x, w = torch.zeros(2, 8), torch.zeros(2, 8, requires_grad=True)
    for _ in range(2):
        assert toy.name_of(f(x)) == 'fast'
        assert toy.name_of(f(w)) == 'slow'
        with torch.no_grad():
            assert toy.name_of(f(w)) == 'fast'
        with torch.inference_mode():
            assert toy.name_of(f(w)) == 'fast'
    assert f(w).requires_grad


def test_hooks_and_retained_graphs(staged):
    x = torch.full((4, 8), 2.0, requires_grad=True)
    seen = []
    y = staged(x)
    y.register_hook(lambda grad: seen.append('hook'))
    with trace() as t:
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    assert ran(t) == ['backward_only'] * 2
    assert seen == ['hook'] * 2
    torch.testing.assert_close(x.grad, 2 * oracle(x.detach()))


def test_backward_on_another_thread(staged):
    """Autograd runs an accelerator's backward on its own thread; a policy applies to the whole process."""
    import threading

    x = torch.full((4, 8), 2.0, requires_grad=True)
    with use_backend('default', op=staged.op), trace() as t:
        y = staged(x).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert ran(t) == ['default', 'default']
