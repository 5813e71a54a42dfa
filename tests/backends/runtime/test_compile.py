"""Compiled callers select the same backend as eager callers, without graph breaks, stale choices or needless recompilations.

Each expectation is also compared with eager code. `Compiled.frames` counts the graphs that the compiler received.
"""

import contextlib
import logging
import os
import threading
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fla.backends import (
    BaseBackend,
    NoBackendError,
    Policy,
    allow_backends,
    default_dispatcher,
    deny_backends,
    explain,
    freeze_dispatch,
    prefer_backend,
    reset_policy,
    set_policy,
    strict_mode,
    thaw_dispatch,
    trace,
    use_backend,
)
from tests.backends.compiled import LONG, SHORT, Compiled, Q, inside_plain, nothing_is_left, toggled, two
from tests.backends.toy import Toy

pytestmark = pytest.mark.usefixtures('many_recompiles')

# -- re-selection -------------------------------------------------------------------------------------------------------


class Scenario:
    """One kind of condition for a selection. `rows` yields each change and the backend that must then run."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        toy = self.toy = Toy()

        def long(backend, q):
            return (True, None) if q.shape[1] >= 64 else (False, ('T >= 64 is needed, got %s', q.shape[1]))

        self.half = toy.add('half', priority=1, dtypes=(torch.float16, torch.bfloat16))
        self.long = toy.add('long', priority=2, env_var='FLA_TOY_LONG', grad='none', accepts=long)
        self.scaled = toy.add('scaled', priority=3, accepts=lambda backend, scale: (scale is not None, 'needs a scale'))
        self.flagged = toy.add('flagged', priority=4, accepts=lambda backend, flag: (flag, 'needs flag'))

    def rows(self):
        patch, toy = self.monkeypatch, self.toy
        yield 'a short call', [SHORT], {}, 'default'
        yield 'over the boundary', [LONG], {}, 'long'
        yield 'on the other side again', [torch.zeros(2, 63, 8)], {}, 'default'
        yield 'another rank', [torch.zeros(2, 128)], {}, 'long'
        yield 'dtype', [LONG.half()], {}, 'half'
        yield 'another dtype', [LONG.bfloat16()], {}, 'half'
        yield 'a dtype nobody declares', [LONG.double()], {}, 'long'
        yield 'requires grad', [LONG.clone().requires_grad_()], {}, 'default'
        with torch.no_grad():
            yield 'no_grad', [LONG.clone().requires_grad_()], {}, 'long'
        with torch.inference_mode():
            yield 'inference mode', [LONG.clone()], {}, 'long'
        yield 'an argument', [SHORT], {'scale': 0.5}, 'scaled'
        yield 'another value of it', [SHORT], {'scale': 2.0}, 'scaled'
        yield 'a flag', [SHORT], {'flag': True}, 'flagged'
        for spelling, expected in (('0', 'default'), ('1', 'long'), ('off', 'default'), (' YES ', 'long'), ('', 'long')):
            patch.setenv('FLA_TOY_LONG', spelling)
            yield f'toggle {spelling!r}', [LONG], {}, expected
        patch.delenv('FLA_TOY_LONG')
        yield 'toggle deleted', [LONG], {}, 'long'
        with mock.patch.dict(os.environ, {'FLA_TOY_LONG': 'no'}):
            yield 'toggle by patch.dict', [LONG], {}, 'default'
        patch.setenv('FLA_TOY_LONG', '0')
        with mock.patch.dict(os.environ, clear=True):
            yield 'environment cleared', [LONG], {}, 'long'
        os.environ.pop('FLA_TOY_LONG')
        os.environb[b'FLA_TOY_LONG'] = b'0'
        yield 'toggle by os.environb', [LONG], {}, 'default'
        del os.environb[b'FLA_TOY_LONG']
        patch.setattr(type(self.flagged), 'priority', 0)
        yield 'priority of the class', [LONG], {'flag': True}, 'flagged'
        patch.setattr(self.flagged, 'priority', 9)
        yield 'priority of the instance', [LONG], {'flag': True}, 'long'
        patch.setattr(type(self.long), 'f_verifier', lambda backend, q: (False, 'patched'))
        yield 'verifier patched on the class', [LONG], {}, 'default'
        patch.setattr(self.long, 'f_verifier', lambda q: (True, None))
        yield 'verifier patched on the instance', [SHORT], {}, 'long'
        patch.setattr(self.long, 'is_available', lambda: (False, 'patched'))
        yield 'availability', [LONG], {}, 'default'
        set_policy(Policy(prefer='scaled'))
        yield 'set_policy', [LONG.half()], {'scale': 1.0}, 'scaled'
        reset_policy()
        yield 'reset_policy', [LONG.half()], {'scale': 1.0}, 'half'
        with use_backend('default', op=toy.op):
            yield 'a scope', [LONG.half()], {}, 'default'
            with deny_backends('half'), allow_backends('half', 'scaled'):
                yield 'scopes in it, which it overrides', [LONG.half()], {'scale': 1.0}, 'default'
        with deny_backends('half'), allow_backends('half', 'scaled'):
            yield 'filters', [LONG.half()], {'scale': 1.0}, 'scaled'
        new = toy.add('new', priority=0)
        yield 'registered', [LONG], {}, 'new'
        toy.handle.remove()
        yield 'removed', [LONG], {'flag': True}, 'flagged'
        toy.registry.register(new)
        yield 'registered again', [LONG], {}, 'new'
        toy.registry.unregister('new')
        yield 'unregistered', [LONG], {'flag': True}, 'flagged'


@pytest.mark.slow
@pytest.mark.parametrize(('backend', 'dynamic'), [('eager', None), ('eager', True), ('aot_eager', None)])
def test_what_changes_is_selected_anew(monkeypatch, backend, dynamic):
    scenario = Scenario(monkeypatch)
    f = Compiled(scenario.toy, lambda q, **kwargs: scenario.toy.f(q, q, **kwargs) + 0, backend, dynamic=dynamic)
    for label, args, kwargs, expected in scenario.rows():
        # compiled before eager, then after: neither may warm up the other
        assert (label, f(*args, **kwargs)) == (label, expected)
        assert (label, f.eager(*args, **kwargs)) == (label, expected)
        assert (label, f(*args, **kwargs)) == (label, expected)


@pytest.mark.slow
def test_inductor(monkeypatch):
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_A', accepts=lambda backend, q: (q.shape[1] >= 64, 'short'))
    toy.add('b')

    def function(q):
        with use_backend('b', op=toy.op):
            inside = toy.f(q, q)
        return toy.f(q, q), inside

    f = Compiled(toy, function, 'inductor')
    assert f.agrees(LONG) == ['a', 'b']
    assert f.agrees(SHORT) == ['b', 'b']
    for value, expected in (('0', 'b'), ('1', 'a'), ('0', 'b')):
        monkeypatch.setenv('FLA_TOY_A', value)
        assert f.agrees(LONG) == [expected, 'b']
    monkeypatch.delenv('FLA_TOY_A')
    with deny_backends('a', op=toy.op):
        assert f.agrees(LONG) == ['b', 'b']
    assert f.agrees(LONG) == ['a', 'b']
    assert f.frames <= 5


def test_a_toggle_that_was_unset_is_not_stale(monkeypatch):
    """Dynamo reads `os.environ.get` of an unset variable without a guard."""
    f = Compiled(toggled())
    assert f.agrees() == 'a'
    monkeypatch.setenv('FLA_TOY_A', '0')
    assert f.agrees() == 'default'


# -- how many graphs ----------------------------------------------------------------------------------------------------


def test_one_graph_when_cold_and_when_warm():
    for warm in (False, True):
        toy = toggled()
        f = Compiled(toy)
        if warm:
            toy.ran()
        for _ in range(3):
            assert f() == 'a'
        toy.ran()
        assert f() == 'a'
        assert f.frames == 1


def test_twelve_flips_of_a_toggle_are_two_graphs(monkeypatch):
    f = Compiled(toggled())
    for flip in range(12):
        monkeypatch.setenv('FLA_TOY_A', str(flip % 2))
        assert f.agrees() == ('default', 'a')[flip % 2]
    assert f.frames == 2
    monkeypatch.delenv('FLA_TOY_A')
    assert f() == 'a'
    graphs = f.frames
    for spelling in ('0', '1') * 3:
        monkeypatch.setenv('FLA_TOY_A', spelling)
        assert f() == ('a' if spelling == '1' else 'default')
    assert f.frames == graphs


def test_canonical_spellings_are_known_and_another_one_costs_a_graph(monkeypatch):
    f = Compiled(toggled())
    spellings = {'0': 'default', 'off': 'default', '1': 'a', 'yes': 'a'}
    for spelling, expected in spellings.items():
        monkeypatch.setenv('FLA_TOY_A', spelling)
        assert f.agrees() == expected
    graphs = f.frames
    monkeypatch.setenv('FLA_TOY_A', ' OFF ')
    assert f.agrees() == 'default'
    assert f.frames == graphs + 1
    before = f.toy.f.__code__
    for spelling in ('1', ' OFF ') * 3:
        monkeypatch.setenv('FLA_TOY_A', spelling)
        assert f.agrees() == ('a' if spelling == '1' else 'default')
    assert f.toy.f.__code__ is before, 'a value that is known must not plan again'
    assert f.frames <= graphs + 2


def test_twelve_entries_of_a_scope_are_two_graphs():
    f = Compiled(two())
    for flip in range(12):
        with prefer_backend('b', op=f.toy.op) if flip % 2 else contextlib.nullcontext():
            assert f.agrees() == 'ab'[flip % 2]
    assert f.frames == 2


def test_equal_policies_of_different_scopes_share_a_graph():
    f = Compiled(two())
    for _ in range(3):
        with prefer_backend('b', op=f.toy.op):
            assert f() == 'b'
        with prefer_backend('b'):
            assert f() == 'b'
        set_policy(Policy(prefer='b'))
        assert f() == 'b'
        reset_policy()
        assert f() == 'a'
    assert f.frames == 2


def test_policies_of_other_operations_cost_nothing():
    f, other = Compiled(two()), two()
    assert f() == 'a'
    with prefer_backend('b', op=other.op):
        assert other.ran() == 'b'
        assert f() == 'a'
    with use_backend('a', op=f'{other.op}.f'):
        assert f() == 'a'
    other.add('c', priority=0)
    assert f() == 'a'
    assert f.frames == 1


def test_other_environment_variables_cost_nothing(monkeypatch):
    f = Compiled(toggled())
    assert f() == 'a'
    for number in range(4):
        monkeypatch.setenv('FLA_SOMETHING_ELSE', str(number))
        monkeypatch.setenv(f'UNRELATED_{number}', '1')
        assert f() == 'a'
    assert f.frames == 1


def test_the_profiler_costs_nothing():
    f = Compiled(toggled())
    assert f() == 'a'
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert f() == 'a'
        assert f.toy.ran() == 'a'
    with torch.autograd.profiler.profile():
        assert f() == 'a'
    assert f.frames == 1


def test_scopes_around_other_code_cost_nothing():
    """A scope in the compiled region must not affect the calls outside the scope."""
    toy, other = two(), two()

    def function(q, k):
        with use_backend('b', op=other.op):
            inside = other.f(q, k)
        return toy.f(q, k) + 0, inside

    f = Compiled(toy, function)
    for _ in range(3):
        assert f.agrees() == ['a', 'b']
    assert f.frames == 1


# -- shapes -------------------------------------------------------------------------------------------------------------


def lazily(backend, q, k):
    """Reads sizes of both tensors; its reason holds them unformatted."""
    if q.shape[-1] % 8 != 0 or k.shape[-1] > 256:
        return False, ('K must be a multiple of 8 up to 256, got %s and %s', q.shape[-1], k.shape[-1])
    return (True, None) if q.shape[1] >= 4 else (False, ('T=%s is short', q.shape[1]))


@pytest.mark.parametrize('accepted', [True, False])
def test_lazy_reasons_keep_shapes_dynamic(accepted):
    toy = Toy()
    toy.add('a', accepts=lazily)
    f = Compiled(toy, lambda q: toy.f(q, q) + 0, dynamic=None if accepted else True)
    width = 8 if accepted else 12
    for length in range(5, 15):
        assert f.agrees(torch.zeros(2, length, width)) == ('a' if accepted else 'default')
    assert f.frames <= 2


def test_mark_dynamic():
    toy = Toy()
    toy.add('a', accepts=lazily)
    f = Compiled(toy, lambda q: toy.f(q, q) + 0)
    for length in (8, 9, 31):
        q = torch.zeros(2, length, 8)
        torch._dynamo.mark_dynamic(q, 1, min=4, max=1024)
        assert f(q) == 'a'
    assert f.frames == 1


def test_integers_may_stay_dynamic():
    toy = Toy()
    toy.add('a', accepts=lambda backend, scale: (scale is None or scale >= 4, ('scale %s', scale)))
    f = Compiled(toy, lambda q, scale: toy.f(q, q, scale) + 0, dynamic=True)
    assert [f.agrees(Q, scale) for scale in (2, 3, 4, 5, 6, 7, None)] == ['default'] * 2 + ['a'] * 5
    assert f.frames <= 4


def test_more_than_one_backend_over_one_boundary():
    toy = Toy()
    toy.add('big', priority=1, accepts=lambda backend, q: (q.shape[1] >= 64, 'big only'))
    toy.add('middle', priority=2, accepts=lambda backend, q: (q.shape[1] >= 32, 'middle only'))
    f = Compiled(toy, lambda q: toy.f(q, q) + 0, dynamic=True)
    for length, expected in ((100, 'big'), (40, 'middle'), (10, 'default'), (63, 'middle'), (64, 'big'), (31, 'default')):
        assert f.agrees(torch.zeros(2, length, 8)) == expected
    assert f.frames == 3


# -- where a trace begins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_the_function_itself_is_compiled(backend, monkeypatch):
    toy = toggled()
    counter = CompileCounterWithBackend(backend)
    f = torch.compile(toy.f, backend=counter, fullgraph=True)
    for value, expected in ((None, 'a'), (None, 'a'), ('0', 'default'), ('1', 'a'), ('0', 'default')):
        if value is not None:
            monkeypatch.setenv('FLA_TOY_A', value)
        assert toy.name_of(f(Q, Q)) == expected == toy.ran()
    # cold and hot code; unset, off and on
    assert counter.frame_count <= 4
    assert toy.name_of(f(k=Q, q=Q, flag=True)) == 'default'


def test_several_cold_functions_in_one_trace():
    toys = [two() for _ in range(5)]

    def function(q):
        return [toy.f(q, q) for toy in toys] + [toy.f(q, q) for toy in toys]

    counter = CompileCounterWithBackend('aot_eager')
    f = torch.compile(function, backend=counter, fullgraph=True)
    for _ in range(2):
        assert [toy.name_of(x) for toy, x in zip(toys * 2, f(Q), strict=True)] == ['a'] * 10
    assert counter.frame_count == 1


@pytest.mark.parametrize('after', [False, True])
def test_a_cold_function_beside_a_graph_break(after):
    """Dynamo then traces the caller twice, and requires the same result."""
    toy = toggled()

    def function(q):
        if not after:
            torch._dynamo.graph_break()
        q = toy.f(q + 1, q)
        if after:
            torch._dynamo.graph_break()
        return q + 0

    f = Compiled(toy, function, fullgraph=False)
    assert f(Q) == 'a'
    assert f(Q) == 'a'


def test_an_unknown_spelling_beside_a_graph_break(monkeypatch):
    toy = toggled()

    def function(q):
        q = toy.f(q + 1, q)
        torch._dynamo.graph_break()
        return q + 0

    f = Compiled(toy, function, fullgraph=False)
    assert f(Q) == 'a'
    for value in (' 0', ' 1', ' no'):
        monkeypatch.setenv('FLA_TOY_A', value)
        assert f(Q) == f.eager(Q) == ('a' if value == ' 1' else 'default')


def test_a_new_platform_in_a_trace():
    toy = Toy()
    toy.add('cpu', devices=('cpu',))
    toy.add('meta', devices=('meta',))
    counter = CompileCounterWithBackend('eager')
    f = torch.compile(lambda q: toy.f(q, q) + 0, backend=counter, fullgraph=True)
    assert toy.name_of(f(Q)) == 'cpu'
    meta = torch.zeros(2, 8, device='meta')
    assert f(meta).device.type == 'meta'
    assert explain(toy.f, meta, meta).winner == 'meta'
    assert toy.name_of(f(Q)) == 'cpu'


def test_an_implementation_with_a_graph_break():
    """The break is inside the implementation; selection still works, and the rest is compiled."""
    toy = toggled()

    class Breaking(BaseBackend):
        backend_type = 'breaking'
        priority = 1

        def f(self, q, k, scale=None, flag=False):
            q = q + 1
            torch._dynamo.graph_break()
            return q * 0 + 7

    toy.registry.register(Breaking())
    toy.names[7] = 'breaking'
    f = Compiled(toy, fullgraph=False)
    for _ in range(2):
        assert f.agrees() == 'breaking'
    with deny_backends('breaking', op=toy.op):
        assert f.agrees() == 'a'
    assert f.agrees() == 'breaking'
    with pytest.raises(torch._dynamo.exc.Unsupported):
        Compiled(toy)()


def test_a_module_with_parameters():
    """Parameters are not plain tensors; a module is compiled as a whole."""
    toy = toggled()

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 8))

        def forward(self, x):
            return toy.f(self.weight, x) + toy.f(x, self.weight) * 0

    counter = CompileCounterWithBackend('aot_eager')
    layer = torch.compile(Layer(), backend=counter, fullgraph=True)
    out = layer(Q)
    assert toy.name_of(out) == 'a'
    out.sum().backward()
    assert counter.frame_count == 1


def test_threads_compile_at_the_same_time(monkeypatch):
    toy = toggled()
    wrong = []

    def work(number):
        f = torch.compile(lambda q: toy.f(q, q) + 0 * number, backend='eager', fullgraph=True)
        for _ in range(5):
            if toy.name_of(f(Q)) != 'a':
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_compiled_callers_survive_a_thousand_plans():
    """Code objects of old plans are freed and their addresses reused: no guard may confuse two of them."""
    f = Compiled(two())
    assert f() == 'a'
    for number in range(1000):
        default_dispatcher().replan()
        f.toy.f(Q, Q)
        if number % 100 == 0:
            type(f.toy.registry.get('b')).priority = 0 if number % 200 else 2
            assert f.agrees() == ('b' if number % 200 else 'a')


# -- what cannot be traced ----------------------------------------------------------------------------------------------


def test_traceable_false_is_skipped_under_compile(caplog):
    toy = Toy()
    toy.add('a', traceable=False, accepts=lambda backend, q: (q.data_ptr() >= 0, None))
    f = Compiled(toy)
    with caplog.at_level(logging.WARNING, 'fla'):
        for _ in range(2):
            torch._dynamo.reset()
            assert f() == 'default'
    assert toy.ran() == 'a'
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert 'traceable = False' in messages[0]
    assert 'compiled' in messages[0]
    assert 'compiled' in ' '.join(explain(toy.f, Q, Q)['a'].notes)


def test_untraceable_verifiers_are_skipped_with_one_warning(caplog):
    toy = Toy()

    def reads_environment(backend, q):
        return os.environ.get('SOMETHING') is None, 'SOMETHING is set'

    toy.add('a', accepts=reads_environment)
    toy.add('b', accepts=lambda backend, q: (not torch.is_inference_mode_enabled(), 'inference'))
    f = Compiled(toy)
    with caplog.at_level(logging.WARNING, 'fla'):
        assert f() == 'default'
        torch._dynamo.reset()
        assert f() == 'default'
    assert toy.ran() == 'a'
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    line = reads_environment.__code__.co_firstlineno + 1
    assert f'test_compile.py:{line}: reads the environment' in messages[0]
    assert 'declare env_var or extra_env' in messages[0]
    assert 'torch.is_grad_enabled()' in messages[1]


def test_a_verifier_that_raises_is_skipped_as_in_eager(caplog):
    toy = Toy()
    toy.add('a', accepts=lambda backend, q: {}['no such key'])
    toy.add('b', accepts=lambda backend, q: 'yes')
    f = Compiled(toy)
    assert f.agrees() == 'default'
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 2


def test_extra_env_of_an_overridden_is_enabled(monkeypatch):
    toy = Toy()
    toy.add(
        'a',
        extra_env=('FLA_TOY_MODE', 'FLA_TOY_LEVEL'),
        is_enabled=lambda backend: (
            os.environ.get('FLA_TOY_MODE') != 'slow' and int(os.environ.get('FLA_TOY_LEVEL', '1')) > 0
        ),
    )
    f = Compiled(toy)
    states = [('slow', '1', 'default'), ('fast', '1', 'a'), ('fast', '0', 'default'), (None, None, 'a')]
    for _ in range(2):
        for mode, level, expected in states:
            for name, value in (('FLA_TOY_MODE', mode), ('FLA_TOY_LEVEL', level)):
                monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
            assert f.agrees() == expected
    graphs = f.frames
    for mode, level, expected in states:
        for name, value in (('FLA_TOY_MODE', mode), ('FLA_TOY_LEVEL', level)):
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
        assert f.agrees() == expected
    assert f.frames == graphs


# -- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('fullgraph', [True, False])
def test_no_backend_in_compiled_code(fullgraph):
    toy = Toy(default_verifier=lambda q: (q.shape[-1] == 8, ('K must be 8, got %s', q.shape[-1])))
    toy.add('a', dtypes=(torch.float16,))
    f = Compiled(toy, fullgraph=fullgraph)
    assert f() == 'default'
    bad = torch.zeros(2, 4)
    with pytest.raises(NoBackendError, match='K must be 8, got 4'):
        f.eager(bad, bad)
    with pytest.raises((NoBackendError, torch._dynamo.exc.Unsupported), match=r'no backend accepts this call|K must be 8'):
        f(bad, bad)
    assert f() == 'default'


def test_no_backend_is_caught_in_compiled_code():
    toy = Toy(default_verifier=lambda q: (q.shape[-1] == 8, 'K must be 8'))

    def function(q):
        try:
            return toy.f(q, q)
        except NoBackendError:
            return torch.zeros(1)

    f = Compiled(toy, function)
    assert f(torch.zeros(2, 4)) == 'default'
    assert f.frames == 1


def test_a_check_that_raises():
    def check(q, k):
        if q.shape != k.shape:
            raise ValueError('q and k differ')

    toy = Toy(check=check)
    toy.add('a')
    f = Compiled(toy, fullgraph=False)
    assert f.agrees() == 'a'
    with pytest.raises(ValueError, match='q and k differ'):
        f(Q, SHORT)
    assert f.agrees() == 'a'
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match='q and k differ'):
        Compiled(toy)(Q, SHORT)

    def caught(q, k):
        try:
            return toy.f(q, k)
        except ValueError:
            return q * 0

    assert Compiled(toy, caught)(Q, SHORT) == 'default'


def test_a_wrong_call_is_a_type_error():
    toy = two()

    def function(q):
        try:
            return toy.f(q, q, nobody=1)
        except TypeError:
            return q * 0

    assert Compiled(toy, lambda q: toy.f(q, q) + 0)(Q) == 'a'
    with pytest.raises((TypeError, torch._dynamo.exc.Unsupported)):
        Compiled(toy, lambda q: toy.f(q, q, nobody=1))(Q)
    assert Compiled(toy, function, fullgraph=False)(Q) == 'default'


def test_strict_mode_inside_and_outside():
    toy = Toy()
    toy.add('a', accepts=lambda backend, q: 1 / 0)

    def function(q):
        with strict_mode():
            return toy.f(q, q)

    with pytest.raises(Exception, match="verifier of backend 'a' raised"):
        Compiled(toy, function)(Q)
    assert nothing_is_left()
    f = Compiled(toy)
    assert f() == 'default'
    with strict_mode(), pytest.raises(Exception, match="verifier of backend 'a' raised"):
        f()
    assert f() == 'default'


# -- bound, frozen, traced ----------------------------------------------------------------------------------------------


def test_bound_functions():
    toy = two()
    bound = toy.f.bind('b')

    def function(q):
        with use_backend('default', op=toy.op):
            inside = bound(q, q)
        return toy.f(q, q), bound(q, q), inside

    f = Compiled(toy, function)
    assert f.agrees(Q) == ['a', 'b', 'b']
    with use_backend('default', op=toy.op):
        assert f.agrees(Q) == ['default', 'b', 'b']
    toy.registry.get('b').priority = 0
    assert f.agrees(Q) == ['b', 'b', 'b']


def test_resolve_is_compiled_as_what_it_is():
    toy = toggled()
    resolved = toy.f.resolve(Q, Q)
    f = Compiled(toy, lambda q: resolved(q, q) + 0)
    assert f.agrees(Q) == 'a'
    assert f.frames == 1


def test_frozen(monkeypatch):
    toy = toggled()
    f = Compiled(toy)
    assert f() == 'a'
    freeze_dispatch()
    monkeypatch.setenv('FLA_TOY_A', '0')
    assert f.agrees() == 'a'
    monkeypatch.setenv('FLA_TOY_A', '1')
    assert f.agrees() == 'a'
    assert f.frames <= 2
    thaw_dispatch()
    monkeypatch.setenv('FLA_TOY_A', '0')
    assert f.agrees() == 'default'


@pytest.mark.parametrize('fullgraph', [True, False])
def test_a_scope_inside_while_frozen(fullgraph):
    """Raises as eager code does; never makes a choice that is not in the manifest."""
    toy = two()
    f = Compiled(toy, lambda q: inside_plain(toy, q), fullgraph=fullgraph)
    freeze_dispatch()
    with pytest.raises(Exception, match='frozen'):
        f(Q)
    thaw_dispatch()
    assert nothing_is_left()
    assert f(Q) == ['a', 'b']
    freeze_dispatch()
    with pytest.raises(Exception, match='frozen'):
        f(Q)
    assert nothing_is_left()


def test_a_trace_records_a_compiled_call_once():
    toy = two()
    f = Compiled(toy)
    assert f() == 'a'
    with trace() as t:
        for _ in range(3):
            assert f() == 'a'
        assert [(r.function, r.backend, r.compiled) for r in t] == [(f'{toy.op}.f', 'a', True)]
        toy.ran()
        assert [r.compiled for r in t] == [True, False]
    for _ in range(2):
        assert f() == 'a'
    assert len(t) == 2
    assert f.frames == 2
    with trace():
        assert f() == 'a'
    assert f.frames == 2


def test_force_eager():
    f = Compiled(toggled())
    with torch.compiler.set_stance('force_eager'):
        assert f() == 'a'
    assert f.frames == 0
    assert f() == 'a'
    with torch.compiler.set_stance('force_eager'):
        assert f() == 'a'
    assert f.frames == 1


def test_inference_then_training():
    toy = Toy()
    toy.add('fast', grad='none')
    f = Compiled(toy, backend='aot_eager')
    weight = torch.zeros(2, 8, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            assert f.agrees(weight, weight) == 'fast'
        assert f.agrees(weight, weight) == 'default'
    assert f.frames == 2


# -- other tracers ------------------------------------------------------------------------------------------------------


class Exported(torch.nn.Module):
    def __init__(self, toy, scope=None):
        super().__init__()
        self.toy, self.scope = toy, scope

    def forward(self, q):
        if self.scope is None:
            return self.toy.f(q, q) + 0
        with use_backend(self.scope, op=self.toy.op):
            return self.toy.f(q, q) + 0


@pytest.mark.parametrize('strict', [True, False])
def test_export(strict):
    toy = Toy()
    toy.add('a', accepts=lambda backend, q: (q.shape[1] >= 4, ('T=%s', q.shape[1])))
    length = torch.export.Dim('length', min=4, max=1024)
    program = torch.export.export(Exported(toy), (LONG,), dynamic_shapes=({1: length},), strict=strict)
    assert toy.name_of(program.module()(LONG)) == 'a'
    assert toy.name_of(program.module()(torch.zeros(2, 5, 8))) == 'a'
    with use_backend('default', op=toy.op):
        frozen = program.module()(LONG)
        again = torch.export.export(Exported(toy), (LONG,), strict=strict).module()(LONG)
    assert toy.name_of(frozen) == 'a', 'an exported program keeps its choice'
    assert toy.name_of(again) == 'default'


@pytest.mark.parametrize('strict', [True, False])
def test_export_with_a_scope_inside(strict):
    toy = two()
    program = torch.export.export(Exported(toy, 'b'), (LONG,), strict=strict)
    assert toy.name_of(program.module()(LONG)) == 'b'
    assert nothing_is_left()
    assert toy.ran() == 'a'


@pytest.mark.parametrize('strict', [True, False])
def test_export_over_a_boundary_is_an_error(strict):
    toy = Toy()
    toy.add('a', accepts=lambda backend, q: (q.shape[1] >= 32, ('T=%s', q.shape[1])))
    length = torch.export.Dim('length', min=4, max=1024)
    with pytest.raises(Exception, match='length'):
        torch.export.export(Exported(toy), (LONG,), dynamic_shapes=({1: length},), strict=strict)
    with use_backend('a', op=toy.op):
        lower = torch.export.Dim('length', min=32, max=1024)
        torch.export.export(Exported(toy), (LONG,), dynamic_shapes=({1: lower},), strict=strict)


def test_fake_and_meta_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    toy = Toy()
    toy.add('long', accepts=lambda backend, q: (q.shape[1] >= 64, 'short'))
    with FakeTensorMode(), trace() as t:
        toy.f(torch.zeros(2, 64, 8), torch.zeros(2, 64, 8))
        toy.f(torch.zeros(2, 32, 8), torch.zeros(2, 32, 8))
    assert [r.backend for r in t] == ['long', 'default']
    with trace() as t:
        out = toy.f(torch.zeros(2, 64, 8, device='meta'), torch.zeros(2, 64, 8, device='meta'))
    assert out.shape == (2, 64, 8)
    assert [r.backend for r in t] == ['long']


@pytest.mark.parametrize('mode', ['real', 'fake', 'symbolic'])
def test_make_fx(mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    toy = Toy()
    toy.add('long', accepts=lambda backend, q: (q.shape[1] >= 64, 'short'))
    graph = make_fx(lambda q: toy.f(q, q), tracing_mode=mode)(LONG)
    assert toy.name_of(graph(LONG)) == 'long'


def test_vmap_and_grad():
    toy = Toy()
    toy.add('narrow', accepts=lambda backend, q: (q.ndim == 1, 'one dimension'))

    class Square(BaseBackend):
        backend_type = 'square'
        priority = 9

        def f(self, q, k, scale=None, flag=False):
            return q * q

    toy.registry.register(Square())
    q = torch.arange(8.0)
    assert toy.name_of(torch.func.vmap(toy.f)(Q, Q)) == 'narrow'

    def loss(q):
        with use_backend('square', op=toy.op):
            return toy.f(q, q).sum()

    torch.testing.assert_close(torch.func.grad(loss)(q), 2 * q)
    for transform, x in ((torch.func.grad(loss), q), (torch.func.vmap(torch.func.grad(loss)), q.expand(3, 8))):
        compiled = torch.compile(transform, backend='aot_eager', fullgraph=True)
        torch.testing.assert_close(compiled(x), transform(x))


def test_vmap_in_compiled_code():
    toy = Toy()
    toy.add('narrow', accepts=lambda backend, q: (q.ndim == 1, 'one dimension'))
    f = Compiled(toy, lambda q: torch.func.vmap(toy.f)(q, q) + 0, backend='aot_eager')
    assert f.agrees(Q) == 'narrow'
    assert f.agrees(LONG) == 'default'


def test_autocast():
    toy = Toy()
    toy.add(
        'amp',
        accepts=lambda backend, q: (
            torch.is_autocast_enabled('cpu') and torch.get_autocast_dtype('cpu') is torch.bfloat16,
            'autocast to bfloat16 only',
        ),
    )
    f = Compiled(toy, backend='aot_eager')
    for _ in range(2):
        assert f.agrees() == 'default'
        with torch.autocast('cpu', dtype=torch.bfloat16):
            assert f.agrees() == 'amp'
        with torch.autocast('cpu', dtype=torch.float16):
            assert f.agrees() == 'default'

    def inside(q):
        with torch.autocast('cpu', dtype=torch.bfloat16):
            one = toy.f(q, q)
        return one, toy.f(q, q)

    assert Compiled(toy, inside, 'aot_eager').agrees(Q) == ['amp', 'default']


def test_checkpoint_in_compiled_code():
    from torch.utils.checkpoint import checkpoint

    toy = toggled()

    def function(q):
        return checkpoint(lambda x: toy.f(x, x) + 0, q, use_reentrant=False)

    f = Compiled(toy, function, 'aot_eager')
    q = torch.zeros(2, 8, requires_grad=True)
    assert f.agrees(q) == 'a'
    assert f.frames == 1


def test_a_backend_may_keep_something_for_itself_in_a_compiled_call():
    toy = Toy()

    def f(self, q, k, scale=None, flag=False):
        self.workspace = 5 if flag else 3
        return q * 0 + 1

    backend = toy.add('a', f=f)
    compiled = torch.compile(lambda q, flag: toy.f(q, q, flag=flag), backend='eager', fullgraph=True)
    for flag, kept in ((True, 5), (False, 3), (True, 5)):
        assert toy.name_of(compiled(Q, flag)) == 'a'
        assert backend.workspace == kept
