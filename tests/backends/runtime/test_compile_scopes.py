"""Policy scopes inside and around a compiled region select as in eager code, and leave nothing behind."""

import contextlib

import pytest
import torch

from fla.backends import (
    Policy,
    UnknownNameError,
    allow_backends,
    default_dispatcher,
    deny_backends,
    policy_context,
    prefer_backend,
    strict_mode,
    use_backend,
)
from tests.backends.compiled import Compiled, Q, inside_plain, nothing_is_left, two

pytestmark = pytest.mark.usefixtures('many_recompiles')

# made outside the region: Dynamo cannot construct a Policy
ONLY_DEFAULT = Policy(use='default')


def inside_nested(toy, q):
    with prefer_backend('b', op=toy.op):
        one = toy.f(q, q)
        with use_backend('default', op=toy.op):
            two = toy.f(q, q)
        three = toy.f(q, q)
    return toy.f(q, q), one, two, three


def inside_filters(toy, q):
    with deny_backends('a'), strict_mode(False):
        one = toy.f(q, q)
        with allow_backends('b', 'default'), deny_backends('b', op=toy.op):
            two = toy.f(q, q)
    with policy_context(ONLY_DEFAULT):
        three = toy.f(q, q)
    return toy.f(q, q), one, two, three


def inside_returning(toy, q):
    with use_backend('b', op=toy.op):
        return toy.f(q, q), toy.f(q, q)


def inside_raising(toy, q):
    try:
        with use_backend('b', op=toy.op):
            inside = toy.f(q, q)
            raise ValueError
    except ValueError:
        return toy.f(q, q), inside


def inside_exit_stack(toy, q):
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_backend('b', op=toy.op))
        inside = toy.f(q, q)
    return toy.f(q, q), inside


def inside_loop(toy, q):
    found = []
    for name in ('a', 'b', 'default', 'b'):
        with use_backend(name, op=toy.op):
            found.append(toy.f(q, q))
    return found


def inside_reentered(toy, q):
    scope = use_backend('b', op=toy.op)
    with scope, scope:
        one = toy.f(q, q)
    with scope:
        two = toy.f(q, q)
    return toy.f(q, q), one, two


@contextlib.contextmanager
def my_scope(toy):
    with use_backend('b', op=toy.op):
        yield


def inside_own_contextmanager(toy, q):
    with my_scope(toy):
        inside = toy.f(q, q)
    return toy.f(q, q), inside


def inside_by_hand(toy, q):
    scope = use_backend('b', op=toy.op)
    scope.__enter__()
    inside = toy.f(q, q)
    scope.__exit__(None, None, None)
    return toy.f(q, q), inside


INSIDE = {
    inside_plain: ['a', 'b'],
    inside_nested: ['a', 'b', 'default', 'b'],
    inside_filters: ['a', 'b', 'default', 'default'],
    inside_returning: ['b', 'b'],
    inside_raising: ['a', 'b'],
    inside_exit_stack: ['a', 'b'],
    inside_loop: ['a', 'b', 'default', 'b'],
    inside_reentered: ['a', 'b', 'b'],
    inside_own_contextmanager: ['a', 'b'],
    inside_by_hand: ['a', 'b'],
}


@pytest.mark.pairwise
@pytest.mark.parametrize('warm', [False, True])
@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
@pytest.mark.parametrize('function', INSIDE)
def test_a_scope_inside(function, backend, warm):
    """With fullgraph, compiled before any eager call (cold) and after one."""
    toy = two()
    expected = INSIDE[function]
    f = Compiled(toy, lambda q: function(toy, q), backend)
    if warm:
        assert f.eager(Q) == expected
    for _ in range(3):
        assert f(Q) == expected
        assert nothing_is_left()
    assert f.frames == 1
    assert f.eager(Q) == expected
    assert f(Q) == expected
    assert f.frames == 1


@torch.compiler.disable
def opaque_call(toy, q):
    return toy.f(q, q)


@torch.compiler.disable
def opaque_scope(toy, q):
    with prefer_backend('default', op=toy.op):
        return toy.f(q, q)


def breaking(toy, q):
    torch._dynamo.graph_break()
    return toy.f(q, q)


def broken_before_and_after(toy, q):
    torch._dynamo.graph_break()
    first = toy.f(q, q)
    with use_backend('b', op=toy.op):
        inside = toy.f(q, q)
    torch._dynamo.graph_break()
    return first, inside, toy.f(q, q)


def broken_inside(toy, q):
    with use_backend('b', op=toy.op):
        one = toy.f(q, q)
        torch._dynamo.graph_break()
        two = toy.f(q, q)
    return toy.f(q, q), one, two


def broken_by_print(toy, q):
    with prefer_backend('b', op=toy.op):
        one = toy.f(q, q)
        print('', end='')
        with deny_backends('b', op=toy.op):
            two = toy.f(q, q)
    return toy.f(q, q), one, two


def broken_in_a_callee(toy, q):
    with use_backend('b', op=toy.op):
        one = breaking(toy, q)
    return breaking(toy, q), one


def broken_by_a_disabled_function(toy, q):
    with use_backend('b', op=toy.op):
        one = opaque_call(toy, q)
        with deny_backends('a', op=toy.op):
            two = opaque_scope(toy, q)
        three = toy.f(q, q)
    return opaque_call(toy, q), one, two, three


def broken_by_hand(toy, q):
    """Enters a scope in one graph and leaves it in another; code in between runs eagerly, with scopes that it may enter."""
    scope = use_backend('b', op=toy.op)
    scope.__enter__()
    one = toy.f(q, q)
    two = opaque_call(toy, q)
    three = opaque_scope(toy, q)
    four = toy.f(q, q)
    scope.__exit__(None, None, None)
    return toy.f(q, q), one, two, three, four


def broken_exit_stack(toy, q):
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_backend('b', op=toy.op))
        one = toy.f(q, q)
        torch._dynamo.graph_break()
        two = opaque_call(toy, q)
    return toy.f(q, q), one, two


def broken_own_contextmanager(toy, q):
    with my_scope(toy):
        one = toy.f(q, q)
        torch._dynamo.graph_break()
        two = toy.f(q, q)
    return toy.f(q, q), one, two


def broken_by_a_caught_error(toy, q):
    try:
        with use_backend('b', op=toy.op):
            one = toy.f(q, q)
            torch._dynamo.graph_break()
            raise ValueError
    except ValueError:
        return toy.f(q, q), one


BROKEN = {
    broken_before_and_after: ['a', 'b', 'a'],
    broken_inside: ['a', 'b', 'b'],
    broken_by_print: ['a', 'b', 'a'],
    broken_in_a_callee: ['a', 'b'],
    broken_by_a_disabled_function: ['a', 'b', 'default', 'b'],
    broken_by_hand: ['a', 'b', 'b', 'default', 'b'],
    broken_exit_stack: ['a', 'b', 'b'],
    broken_own_contextmanager: ['a', 'b', 'b'],
    broken_by_a_caught_error: ['a', 'b'],
}


@pytest.mark.pairwise
@pytest.mark.parametrize('warm', [False, True])
@pytest.mark.parametrize('function', BROKEN)
def test_a_graph_break_inside_a_scope(function, warm):
    """Dynamo restarts or abandons a trace at a graph break: a scope must not leak, be lost or apply twice."""
    toy = two()
    f = Compiled(toy, lambda q: function(toy, q), fullgraph=False)
    if warm:
        assert f.eager(Q) == BROKEN[function]
    for _ in range(3):
        assert f(Q) == BROKEN[function]
        assert nothing_is_left()
    assert f.eager(Q) == BROKEN[function]


@pytest.mark.parametrize('broken', [False, True])
def test_an_error_that_leaves_a_scope(broken):
    toy = two()

    def function(q):
        with use_backend('b', op=toy.op):
            if broken:
                torch._dynamo.graph_break()
            toy.f(q, q)
            raise KeyError('mine')

    f = Compiled(toy, function, fullgraph=False)
    for _ in range(2):
        with pytest.raises(KeyError, match='mine'):
            f(Q)
        assert nothing_is_left()
        assert toy.ran() == 'a'


def test_a_scope_that_was_made_outside():
    """Dynamo cannot enter a context manager from outside the region: with fullgraph it must raise, never ignore the
    scope."""
    toy = two()
    scope = use_backend('b', op=toy.op)

    def function(q):
        with scope:
            inside = toy.f(q, q)
        return toy.f(q, q), inside

    assert Compiled(toy, function, fullgraph=False)(Q) == ['a', 'b']
    with pytest.raises(torch._dynamo.exc.Unsupported, match='context manager'):
        Compiled(toy, function)(Q)
    assert nothing_is_left()


def test_an_unknown_name_in_a_scope_inside():
    toy = two()

    def function(q):
        with use_backend('nobody', op=toy.op):
            return toy.f(q, q)

    # with fullgraph, Dynamo wraps the program's error in its own
    for fullgraph, error in ((True, torch._dynamo.exc.Unsupported), (False, UnknownNameError)):
        with pytest.raises(error, match="unknown backend 'nobody'"):
            Compiled(toy, function, fullgraph=fullgraph)(Q)
        assert nothing_is_left()


def test_outside_and_inside_scopes_together(monkeypatch):
    toy = two()
    toy.add('c', priority=3, env_var='FLA_TOY_C')

    def function(q):
        with deny_backends('b', op=toy.op):
            one = toy.f(q, q)
            with prefer_backend('c', op=toy.op):
                two = toy.f(q, q)
        return toy.f(q, q), one, two

    f = Compiled(toy, function)
    for _ in range(2):
        assert f.agrees(Q) == ['a', 'a', 'c']
        with prefer_backend('b', op=toy.op):
            assert f.agrees(Q) == ['b', 'a', 'c']
        with use_backend('b', 'default', op=toy.op):
            assert f.agrees(Q) == ['b', 'b', 'c']
        with deny_backends('a', op=toy.op):
            assert f.agrees(Q) == ['b', 'c', 'c']
            for value in ('0', '1', 'oFF', 'oN'):
                monkeypatch.setenv('FLA_TOY_C', value)
                off = value in ('0', 'oFF')
                assert f.agrees(Q) == (['b', 'default', 'default'] if off else ['b', 'c', 'c'])
    assert nothing_is_left()


def test_a_verifier_and_a_registration_under_a_scope_inside():
    toy = two()
    toy.add('narrow', priority=9, accepts=lambda backend, q: (q.shape[-1] == 8, 'K=8'))

    def function(q):
        with prefer_backend('narrow', op=toy.op):
            inside = toy.f(q, q)
        return toy.f(q, q), inside

    f = Compiled(toy, function)
    assert f.agrees(Q) == ['a', 'narrow']
    assert f.agrees(torch.zeros(2, 16)) == ['a', 'a']
    new = toy.add('new', priority=0)
    assert f.agrees(torch.zeros(2, 16)) == ['new', 'new']
    assert f.agrees(Q) == ['new', 'narrow']
    new.priority = 20
    assert f.agrees(torch.zeros(2, 16)) == ['a', 'a']


def test_plans_for_scopes_inside_are_bounded():
    """A trace must not add a plan each time."""
    toy = two()
    box = toy.f.__fla_entry__._traced.box
    f = Compiled(toy, lambda q: inside_plain(toy, q))
    for _ in range(5):
        torch._dynamo.reset()
        assert f(Q) == ['a', 'b']
    assert len(vars(box)) == 1
    for number in range(100):
        default_dispatcher().replan()
        entry = toy.f.__fla_entry__
        toy.ran()
        entry._traced.select((Policy(prefer='b', op=toy.op).spec,))
        assert len(vars(box)) <= 64, number
