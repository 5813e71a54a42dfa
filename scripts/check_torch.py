"""Checks, in one short run, that dispatch works with the installed torch: decorating, tracing, selecting again, scopes,
autograd, export.

It is for releases of torch that the test suite does not run with, and needs torch and packaging only. Prints a line for each
check, writes the results as JSON with `--output`, and exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pickle
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

sys.path.insert(0, str(Path(__file__).parents[1]))

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    NoBackendError,
    checkpoint_contexts,
    default_dispatcher,
    deny_backends,
    dispatch,
    explain,
    prefer_backend,
    trace,
    use_backend,
)
from tests.backends.toy import Q, Toy

CHECKS: list[Callable[[], None]] = []
LONG, SHORT = torch.zeros(2, 64, 8), torch.zeros(2, 32, 8)
TOGGLE = 'FLA_TOY_A'


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def two() -> Toy:
    toy = Toy()
    toy.add('a', priority=1, env_var=TOGGLE)
    toy.add('b', priority=2)
    return toy


def compiled(function: Callable[..., Any], backend: str = 'eager', **options: Any) -> tuple[Callable[..., Any], Any]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=options.pop('fullgraph', True), **options), counter


def names(toy: Toy, result: Any) -> list[str]:
    return [toy.name_of(part) for part in (result if isinstance(result, (tuple, list)) else [result])]


@dispatch('checktorch')
def at_module_level(q: torch.Tensor, scale: float = 1.0) -> str:
    """At module level, for pickle."""
    return 'default'


BackendRegistry('checktorch')


@check
def the_function_looks_like_the_plain_one() -> None:
    assert str(inspect.signature(at_module_level)) == "(q: 'torch.Tensor', scale: 'float' = 1.0) -> 'str'"
    assert 'for pickle' in inspect.getsource(at_module_level)
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level


@check
def compiler_disable_does_not_lose_dispatch() -> None:
    registry = BackendRegistry('checkdisable')

    @dispatch('checkdisable')
    @torch.compiler.disable
    def under(q: torch.Tensor) -> str:
        return 'default'

    @torch.compiler.disable
    @dispatch('checkdisable')
    def above(q: torch.Tensor) -> str:
        return 'default'

    class Backend(BaseBackend):
        backend_type = 'backend'

        def under(self, q: torch.Tensor) -> str:
            return 'backend'

        above = under

    registry.register(Backend())
    for function in (under, above):
        assert function(Q) == 'backend'
        assert torch.compile(lambda q, function=function: (q + 1, function(q)), backend='eager')(Q)[1] == 'backend'


def _reselects(backend: str, dynamic: bool | None) -> None:
    toy = Toy()

    def long(backend: Any, q: torch.Tensor) -> tuple[bool, Any]:
        return (q.shape[1] >= 64, ('T=%s is short', q.shape[1]))

    toy.add('half', priority=1, dtypes=(torch.float16,))
    chosen = toy.add('long', priority=2, env_var=TOGGLE, grad='none', accepts=long)
    toy.add('flagged', priority=3, accepts=lambda backend, flag: (flag, 'needs flag'))
    f, _ = compiled(lambda q, **kwargs: toy.f(q, q, **kwargs) + 0, backend, dynamic=dynamic)

    def expect(name: str, q: torch.Tensor, **kwargs: Any) -> None:
        for function in (f, toy.f if kwargs else lambda q: toy.f(q, q), f):
            found = toy.name_of(function(q, **kwargs) if function is not toy.f else toy.f(q, q, **kwargs))
            assert found == name, (found, name, kwargs)

    expect('default', SHORT)
    expect('long', LONG)
    expect('default', torch.zeros(2, 63, 8))
    expect('half', LONG.half())
    expect('flagged', SHORT, flag=True)
    weight = LONG.clone().requires_grad_()
    expect('default', weight)
    with torch.no_grad():
        expect('long', weight)
    for value, name in (('0', 'default'), ('1', 'long'), ('0', 'default'), (' OFF', 'default'), ('1', 'long')):
        os.environ[TOGGLE] = value
        expect(name, LONG)
    del os.environ[TOGGLE]
    expect('long', LONG)
    type(chosen).priority = 9
    expect('flagged', LONG, flag=True)
    type(chosen).f_verifier = lambda self, q: (False, 'patched')
    expect('default', LONG)
    with use_backend('flagged', 'default', op=toy.op):
        expect('default', LONG.half())
    with deny_backends('half'):
        expect('default', LONG.half())
    toy.add('new', priority=0)
    expect('new', LONG)
    toy.handle.remove()
    expect('default', LONG)


@check
def compiled_reselects_eager() -> None:
    _reselects('eager', None)


@check
def compiled_reselects_aot_eager() -> None:
    _reselects('aot_eager', None)


@check
def compiled_reselects_dynamic() -> None:
    _reselects('eager', True)


@check
def inductor() -> None:
    toy = two()
    f, counter = compiled(lambda q: toy.f(q, q) + 0, 'inductor')
    assert names(toy, f(Q)) == ['a']
    os.environ[TOGGLE] = '0'
    assert names(toy, f(Q)) == ['b']
    del os.environ[TOGGLE]
    assert names(toy, f(Q)) == ['a']
    assert counter.frame_count == 2


@check
def twelve_flips_are_two_graphs() -> None:
    toy = two()
    f, counter = compiled(lambda q: toy.f(q, q) + 0)
    for flip in range(12):
        os.environ[TOGGLE] = str(flip % 2)
        assert names(toy, f(Q)) == ['ba'[flip % 2]]
    del os.environ[TOGGLE]
    assert counter.frame_count == 2
    f, counter = compiled(lambda q: toy.f(q, q) + 1 - 1)
    for flip in range(12):
        if flip % 2:
            with prefer_backend('b', op=toy.op):
                assert names(toy, f(Q)) == ['b']
        else:
            assert names(toy, f(Q)) == ['a']
    assert counter.frame_count == 2


@check
def nothing_else_recompiles() -> None:
    toy = two()
    f, counter = compiled(lambda q: toy.f(q, q) + 0)
    f(Q)
    os.environ['UNRELATED_VARIABLE'] = '1'
    f(Q)
    with torch.autograd.profiler.profile():
        f(Q)
    del os.environ['UNRELATED_VARIABLE']
    f(Q)
    assert counter.frame_count == 1


@check
def the_function_as_root_frame() -> None:
    toy = two()
    f, _ = compiled(toy.f)
    assert names(toy, f(Q, Q)) == names(toy, f(Q, Q)) == ['a']
    os.environ[TOGGLE] = ' off'
    assert names(toy, f(Q, Q)) == ['b']
    del os.environ[TOGGLE]
    assert names(toy, f(Q, Q)) == ['a']


@check
def cold_beside_a_graph_break() -> None:
    for before in (True, False):
        toy = two()

        def function(q: torch.Tensor, before: bool = before, toy: Toy = toy) -> torch.Tensor:
            if before:
                torch._dynamo.graph_break()
            q = toy.f(q + 1, q)
            if not before:
                torch._dynamo.graph_break()
            return q + 0

        f, _ = compiled(function, fullgraph=False)
        assert names(toy, f(Q)) == names(toy, f(Q)) == ['a']


def _no_scope_left() -> bool:
    dispatcher = default_dispatcher()
    return not dispatcher.control.now.scopes and not dispatcher.scopes_in_trace.layers


def _scope(broken: bool) -> None:
    toy = two()

    def function(q: torch.Tensor) -> Any:
        with use_backend('b', op=toy.op):
            one = toy.f(q, q)
            if broken:
                torch._dynamo.graph_break()
            with deny_backends('a', op=toy.op):
                two = toy.f(q, q)
        return toy.f(q, q), one, two

    f, counter = compiled(function, fullgraph=not broken)
    for _ in range(3):
        assert names(toy, f(Q)) == ['a', 'b', 'b']
        assert _no_scope_left()
    if not broken:
        assert counter.frame_count == 1


@check
def a_scope_inside() -> None:
    _scope(broken=False)


@check
def a_scope_inside_with_a_graph_break() -> None:
    _scope(broken=True)


@check
def a_scope_inside_that_an_error_leaves() -> None:
    toy = two()

    def function(q: torch.Tensor) -> Any:
        with use_backend('b', op=toy.op):
            toy.f(q, q)
            raise KeyError('mine')

    f, _ = compiled(function, fullgraph=False)
    try:
        f(Q)
    except KeyError:
        assert _no_scope_left()
        return
    raise AssertionError('no KeyError')


@check
def a_disabled_function_inside_a_scope() -> None:
    toy = two()
    call = torch.compiler.disable(lambda q: toy.f(q, q))

    def function(q: torch.Tensor) -> Any:
        scope = use_backend('b', op=toy.op)
        scope.__enter__()
        one = toy.f(q, q)
        two = call(q)
        scope.__exit__(None, None, None)
        return toy.f(q, q), one, two

    f, _ = compiled(function, fullgraph=False)
    assert names(toy, f(Q)) == ['a', 'b', 'b']
    assert _no_scope_left()


@check
def sizes_stay_dynamic() -> None:
    toy = Toy()
    toy.add('a', accepts=lambda backend, q: (q.shape[1] % 4 != 3, ('T=%s', q.shape[1])))
    f, counter = compiled(lambda q: toy.f(q, q) + 0)
    for length in (4, 8, 9, 10, 12, 13):
        assert names(toy, f(torch.zeros(2, length, 8))) == ['a']
    assert counter.frame_count == 2


@check
def untraceable_verifiers_are_skipped() -> None:
    toy = Toy()
    toy.add('a', accepts=lambda backend, q: (q.data_ptr() >= 0, None))
    toy.add('b', traceable=False)
    f, _ = compiled(lambda q: toy.f(q, q) + 0)
    assert names(toy, f(Q)) == ['default']
    assert toy.ran() == 'a'


@check
def no_backend_in_compiled_code() -> None:
    toy = Toy(default_verifier=lambda q: (q.shape[-1] == 8, 'K must be 8'))
    f, _ = compiled(lambda q: toy.f(q, q) + 0, fullgraph=False)
    assert names(toy, f(Q)) == ['default']
    try:
        f(torch.zeros(2, 4))
    except NoBackendError:
        return
    raise AssertionError('no NoBackendError')


class _Layer(torch.nn.Module):
    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.toy = toy

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.toy.f(q, q) + 0


@check
def export() -> None:
    toy = Toy()
    toy.add('a', accepts=lambda backend, q: (q.shape[1] >= 4, ('T=%s', q.shape[1])))
    length = torch.export.Dim('length', min=4, max=1024)
    for strict in (True, False):
        program = torch.export.export(_Layer(toy), (LONG,), dynamic_shapes=({1: length},), strict=strict)
        assert names(toy, program.module()(SHORT)) == ['a']


@check
def stages_of_an_autograd_function() -> None:
    registry = BackendRegistry('checkstages')

    @dispatch('checkstages')
    def forward_stage(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @dispatch('checkstages')
    def backward_stage(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return 2 * x * dy

    class Backend(BaseBackend):
        backend_type, env_var = 'backend', TOGGLE

        def backward_stage(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
            return (x + x) * dy + 1

    registry.register(Backend())

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return forward_stage(x)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return backward_stage(ctx.saved_tensors[0], dy)

    f, _ = compiled(lambda x: Square.apply(x), 'aot_eager')
    for function in (Square.apply, f):
        for value, expected in (('1', 7.0), ('0', 6.0), ('1', 7.0)):
            os.environ[TOGGLE] = value
            x = torch.full((2, 8), 3.0, requires_grad=True)
            function(x).sum().backward()
            assert x.grad is not None
            assert x.grad[0, 0].item() == expected
        del os.environ[TOGGLE]


@check
def checkpoint_restores_the_choice() -> None:
    from torch.utils.checkpoint import checkpoint

    toy = two()
    x = torch.zeros(2, 8, requires_grad=True)
    with trace() as t:
        y = checkpoint(lambda v: toy.f(v, v) * v, x, use_reentrant=False, context_fn=checkpoint_contexts)
        with use_backend('b', op=toy.op):
            y.sum().backward()
    assert [record.backend for record in t] == ['a', 'a']


@check
def inference_only_backends() -> None:
    toy = Toy()
    toy.add('fast', grad='none')
    x, w = torch.zeros(2, 8), torch.zeros(2, 8, requires_grad=True)
    f, _ = compiled(lambda q: toy.f(q, q) + 0, 'aot_eager')
    for function in (f, lambda q: toy.f(q, q)):
        assert names(toy, function(x)) == ['fast']
        assert names(toy, function(w)) == ['default']
        with torch.no_grad():
            assert names(toy, function(w)) == ['fast']
    import torch.autograd.forward_ad as forward_ad

    with torch.no_grad(), forward_ad.dual_level():
        assert toy.ran(forward_ad.make_dual(x, x), x) == 'default'


@check
def torch_func() -> None:
    toy = Toy()
    toy.add('fast', grad='none')

    class Square(BaseBackend):
        backend_type, priority = 'square', 9

        def f(self, q: torch.Tensor, k: torch.Tensor, scale: Any = None, flag: bool = False) -> torch.Tensor:
            return q * k

    toy.registry.register(Square())
    gradient = torch.func.grad(lambda v: toy.f(v, v).sum())
    x = torch.arange(4.0)
    torch.testing.assert_close(gradient(x), 2 * x)
    torch.testing.assert_close(torch.func.vmap(gradient)(x.expand(3, 4)), 2 * x.expand(3, 4))
    f, _ = compiled(gradient, 'aot_eager')
    torch.testing.assert_close(f(x), 2 * x)


@check
def fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    toy = two()
    with FakeTensorMode():
        q = torch.zeros(2, 8)
        assert explain(toy.f, q, q).winner == 'a'
        assert toy.f(q, q).shape == (2, 8)


def run() -> dict[str, Any]:
    results = {}
    torch._dynamo.config.recompile_limit = 64
    for function in CHECKS:
        torch._dynamo.reset()
        default_dispatcher().reset()
        os.environ.pop(TOGGLE, None)
        began = time.perf_counter()
        try:
            function()
            outcome = 'ok'
        except Exception as error:
            traceback.print_exc()
            outcome = f'{type(error).__name__}: {error}'.splitlines()[0][:300]
        results[function.__name__] = outcome
        print(f'{function.__name__:<48} {time.perf_counter() - began:6.1f} s  {outcome}', flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--output', type=Path, help='file for the results, as JSON')
    options = parser.parse_args()
    results = run()
    failed = sorted(name for name, outcome in results.items() if outcome != 'ok')
    result = {
        'torch': torch.__version__,
        'python': platform.python_version(),
        'passed': len(results) - len(failed),
        'failed': failed,
        'checks': results,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
    print(json.dumps({name: value for name, value in result.items() if name != 'checks'}))
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
