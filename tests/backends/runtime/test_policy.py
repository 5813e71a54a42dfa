"""Policy layers, scopes, filters, tokens and preferences. Each test names the backend that ran."""

import contextlib
import itertools
import logging
import threading

import pytest
import torch

from fla.backends import (
    DispatchError,
    NoBackendError,
    Policy,
    Rule,
    UnknownNameError,
    allow_backends,
    default_dispatcher,
    deny_backends,
    explain,
    get_policy,
    policy_context,
    prefer_backend,
    refresh,
    reset_policy,
    set_policy,
    strict_mode,
    use_backend,
)
from tests.backends.toy import Q, Toy


def warnings(caplog, *words):
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in texts if all(word in text for word in words)]


@pytest.fixture
def toy():
    """Backends a (vendor NVIDIA, toggle FLA_TOY_A), b (native), c and d (vendor), in this order, then default and plain."""
    made = Toy()
    made.add('a', vendor='NVIDIA', env_var='FLA_TOY_A')
    made.add('b', kind='native')
    made.add('c')
    made.add('d')
    made.add('plain', kind='reference')
    return made


def left(toy):
    """Returns the candidates that the policy allows, in order."""
    return [c.name for c in explain(toy.f, Q, Q).candidates if c.verdict not in ('excluded', 'disabled')]


# -- order: the highest layer that speaks wins ------------------------------------------------------------------------------


@contextlib.contextmanager
def by_scope(toy, name, monkeypatch):
    with prefer_backend(name, op=toy.op):
        yield


@contextlib.contextmanager
def by_code(toy, name, monkeypatch):
    set_policy(Policy(prefer=name))
    yield
    reset_policy()


@contextlib.contextmanager
def by_variable(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    refresh()
    yield
    monkeypatch.delenv(variable)
    refresh()


LAYERS = {
    'scope': by_scope,
    'code': by_code,
    'per op': lambda toy, name, m: by_variable('FLA_PER_OP', f'{toy.op}={name}|default', m),
    'prefer': lambda toy, name, m: by_variable('FLA_PREFER', name, m),
}
SOURCES = {'scope': 'prefer_backend()', 'code': 'set_policy()', 'per op': 'FLA_PER_OP', 'prefer': 'FLA_PREFER'}


@pytest.mark.parametrize('layers', [pair for n in (1, 2, 3, 4) for pair in itertools.combinations(LAYERS, n)], ids='>'.join)
@pytest.mark.parametrize('lowest_first', [True, False])
def test_the_highest_layer_that_speaks_wins(toy, monkeypatch, layers, lowest_first):
    names = dict(zip(layers, 'dcb', strict=False))
    names.setdefault(layers[-1], 'b')
    with contextlib.ExitStack() as stack:
        for layer in reversed(layers) if lowest_first else layers:
            stack.enter_context(LAYERS[layer](toy, names[layer], monkeypatch))
        assert toy.ran() == names[layers[0]]
        decision = explain(toy.f, Q, Q)
        assert decision.winner == names[layers[0]]
        assert decision.order.startswith(SOURCES[layers[0]])
        assert decision[names[layers[0]]].source == decision.order
    assert toy.ran() == 'a'
    assert explain(toy.f, Q, Q).order == 'priority'


def test_order_is_one_layer_whole(toy, monkeypatch):
    """Candidates that the winning layer does not name follow by priority; a lower layer's order is ignored."""
    monkeypatch.setenv('FLA_PREFER', 'd')
    assert left(toy) == ['d', 'a', 'b', 'c', 'default', 'plain']
    with prefer_backend('c', op=toy.op):
        assert left(toy) == ['c', 'a', 'b', 'd', 'default', 'plain']
        assert toy.ran() == 'c'


def test_a_layer_for_another_function_does_not_speak(toy, monkeypatch):
    other = Toy()
    other.add('x')
    monkeypatch.setenv('FLA_PER_OP', f'{other.op}=default')
    with prefer_backend('default', op=other.op):
        assert toy.ran() == 'a'
        assert explain(toy.f, Q, Q).order == 'priority'
        assert other.ran() == 'default'


@pytest.mark.parametrize(
    ('value', 'order'),
    [('{op}=b|c', 'b c'), ('{op}=default', 'default'), ('{op}=b', 'b'), ('{op}.f=c;{op}=b', 'c'), ('{op}=', '')],
)
def test_per_op_is_exclusive(toy, monkeypatch, value, order):
    """Unlisted candidates are not tried, including the default."""
    monkeypatch.setenv('FLA_PER_OP', value.format(op=toy.op))
    assert left(toy) == order.split()
    if order:
        assert toy.ran() == order.split()[0]
    else:
        with pytest.raises(NoBackendError):
            toy.f(Q, Q)


def test_per_op_does_not_fall_through_to_the_default(monkeypatch):
    toy = Toy()
    toy.add('a', accepts=lambda self, flag: (not flag, 'no flag'))
    monkeypatch.setenv('FLA_PER_OP', f'{toy.op}=a')
    assert toy.ran() == 'a'
    with pytest.raises(NoBackendError, match='not listed: only a'):
        toy.f(Q, Q, flag=True)


def test_a_scope_that_speaks_ends_the_exclusivity_of_per_op(toy, monkeypatch, caplog):
    monkeypatch.setenv('FLA_PER_OP', f'{toy.op}=b')
    assert left(toy) == ['b']
    for _ in range(3):
        with prefer_backend('c', op=toy.op):
            assert left(toy) == ['c', 'a', 'b', 'd', 'default', 'plain']
            assert toy.ran() == 'c'
    (text,) = warnings(caplog, 'exclusivity')
    assert 'prefer_backend()' in text
    assert 'FLA_PER_OP' in text
    assert toy.ran() == 'b'


@pytest.mark.parametrize('scope', [lambda: allow_backends('b', 'c'), strict_mode, lambda: deny_backends('a')])
def test_a_scope_without_an_order_leaves_per_op_alone(toy, monkeypatch, caplog, scope):
    monkeypatch.setenv('FLA_PER_OP', f'{toy.op}=c|b')
    with scope():
        assert left(toy) == ['c', 'b']
        assert toy.ran() == 'c'
    assert warnings(caplog, 'exclusivity') == []


def test_a_forced_choice_that_does_not_concern_a_function_leaves_its_per_op_alone(toy, monkeypatch, caplog):
    other = Toy()
    other.add('x')
    monkeypatch.setenv('FLA_PER_OP', f'{toy.op}=c|b')
    with use_backend('x'):
        assert toy.ran() == 'c'
        assert left(toy) == ['c', 'b']
        assert other.ran() == 'x'
    assert warnings(caplog, 'exclusivity') == []


# -- scopes -----------------------------------------------------------------------------------------------------------------


def test_the_innermost_scope_wins(toy):
    with prefer_backend('b', op=toy.op):
        with prefer_backend('c'):
            assert toy.ran() == 'c'
            with use_backend('d', op=f'{toy.op}.f'):
                assert toy.ran() == 'd'
                with prefer_backend('b'):
                    assert toy.ran() == 'b'
                assert toy.ran() == 'd'
        assert toy.ran() == 'b'
    assert toy.ran() == 'a'


def test_an_exception_leaves_the_scope(toy):
    ran = []

    def fail():
        with use_backend('d'):
            ran.append(toy.ran())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [*ran, toy.ran()] == ['d', 'a']


def test_a_scope_can_be_entered_again_inside_itself(toy):
    scope = prefer_backend('c')
    for _ in range(2):
        with scope:
            with scope:
                assert toy.ran() == 'c'
            assert toy.ran() == 'c'
        assert toy.ran() == 'a'


def generator(name):
    with prefer_backend(name):
        yield name


def test_interleaved_generators_leave_no_stale_policy(toy):
    for first, second in (('b', 'c'), ('c', 'b')):
        one, two = generator(first), generator(second)
        assert (next(one), toy.ran()) == (first, first)
        assert (next(two), toy.ran()) == (second, second)
        one.close()  # the outer scope ends first
        assert toy.ran() == second
        two.close()
        assert toy.ran() == 'a'
    one, two = generator('b'), generator('c')
    assert (next(one), next(two)) == ('b', 'c')
    two.close()
    assert toy.ran() == 'b'
    one.close()
    assert toy.ran() == 'a'


def test_interleaved_threads_leave_no_stale_policy_and_are_warned_once(toy, caplog):
    seen = []
    entered, leave = threading.Event(), threading.Event()

    def other():
        with prefer_backend('c'):
            entered.set()
            assert leave.wait(30)
        seen.append(toy.ran())

    for _ in range(2):
        entered.clear()
        leave.clear()
        with prefer_backend('b'):
            thread = threading.Thread(target=other)
            thread.start()
            assert entered.wait(30)
            assert toy.ran() == 'c'  # scopes apply to the process: the newest one counts, from any thread
        assert toy.ran() == 'c'
        leave.set()
        thread.join(30)
        assert toy.ran() == 'a'
    assert seen == ['a', 'a']
    (text,) = warnings(caplog, 'another thread holds a scope')
    assert 'bind()' in text


def test_one_thread_alone_is_not_warned(toy, caplog):
    with prefer_backend('b'), prefer_backend('c'):
        assert toy.ran() == 'c'
    assert warnings(caplog, 'another thread') == []


def test_a_scope_left_open_before_reset_is_forgotten(toy, caplog):
    thread = threading.Thread(target=lambda: prefer_backend('c').__enter__())
    thread.start()
    thread.join()
    assert toy.ran() == 'c'
    default_dispatcher().reset()
    toy.add('a')
    with prefer_backend('default'):
        assert toy.ran() == 'default'
    assert warnings(caplog, 'another thread') == []


@pytest.mark.parametrize('enter', [use_backend, prefer_backend, deny_backends])
def test_a_verb_needs_a_name(enter):
    with pytest.raises(TypeError, match='at least one backend name'):
        enter()


# -- filters accumulate -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_policy(policy):
    set_policy(policy)
    yield
    reset_policy()


@contextlib.contextmanager
def by_toggle(monkeypatch):
    monkeypatch.setenv('FLA_TOY_A', '0')
    yield
    monkeypatch.delenv('FLA_TOY_A')


WITHOUT_A = ('b', 'c', 'd', 'default', 'reference')
FILTERS = {
    'allow scope': (lambda toy, m: allow_backends(*WITHOUT_A), 'excluded', 'allow_backends()'),
    'deny scope': (lambda toy, m: deny_backends('a', op=toy.op), 'excluded', 'deny_backends()'),
    'policy scope': (lambda toy, m: policy_context(Policy(deny='a')), 'excluded', 'policy_context()'),
    'allow code': (lambda toy, m: by_policy(Policy(allow=WITHOUT_A)), 'excluded', 'set_policy()'),
    'deny code': (lambda toy, m: by_policy(Policy(deny='impl:vendor.a')), 'excluded', 'set_policy()'),
    'allow env': (
        lambda toy, m: by_variable('FLA_ALLOW_BACKENDS', ','.join(WITHOUT_A), m),
        'excluded',
        'FLA_ALLOW_BACKENDS',
    ),
    'deny env': (lambda toy, m: by_variable('FLA_DENY_BACKENDS', 'vendor:nvidia', m), 'excluded', 'FLA_DENY_BACKENDS'),
    'toggle': (lambda toy, m: by_toggle(m), 'disabled', 'FLA_TOY_A'),
}


@pytest.mark.parametrize('name', FILTERS)
def test_no_order_overrides_a_filter_but_force_does_and_says_so(toy, monkeypatch, name):
    enter, verdict, source = FILTERS[name]
    with enter(toy, monkeypatch):
        assert toy.ran() == 'b'
        report = explain(toy.f, Q, Q)['a']
        assert report.verdict == verdict
        assert report.source.startswith(source)
        assert source in report.reason
        for layer in LAYERS:
            if layer == 'code' and 'code' in name:
                continue
            with LAYERS[layer](toy, 'a', monkeypatch):
                assert toy.ran() == ('default' if layer == 'per op' else 'b')
                assert explain(toy.f, Q, Q)['a'].verdict == verdict
        with use_backend('a', op=toy.op):
            assert toy.ran() == 'a'
            forced = explain(toy.f, Q, Q)['a']
            assert (forced.verdict, forced.source.partition(' ')[0]) == ('chosen', 'use_backend()')
            assert any(source in note for note in forced.notes), forced.notes
        bound = toy.f.bind(backend='a')
        assert toy.name_of(bound(Q, Q)) == 'a'
        forced = bound.explain(Q, Q)['a']
        assert (forced.verdict, forced.source) == ('chosen', 'bind()')
        assert any(source in note for note in forced.notes)
        assert toy.ran() == 'b'
    assert toy.ran() == 'a'
    assert explain(toy.f, Q, Q)['a'].notes == ()


# there is only one code layer
PAIRS = [pair for pair in itertools.combinations(FILTERS, 2) if pair != ('allow code', 'deny code')]


@pytest.mark.parametrize('pair', PAIRS, ids=' and '.join)
def test_filters_of_two_layers_add_up(toy, monkeypatch, pair):
    with FILTERS[pair[0]][0](toy, monkeypatch), FILTERS[pair[1]][0](toy, monkeypatch):
        assert toy.ran() == 'b'
    with FILTERS[pair[0]][0](toy, monkeypatch), deny_backends('b'), allow_backends('a', 'b', 'd', 'default'):
        assert left(toy) == ['d', 'default']
        assert toy.ran() == 'd'


def test_allow_lists_intersect_and_allowing_nothing_is_expressible(toy):
    with allow_backends('vendor', 'default'):
        assert left(toy) == ['a', 'c', 'd', 'default']
        with allow_backends('native', 'c', 'default'):
            assert left(toy) == ['c', 'default']
            assert toy.ran() == 'c'
            with allow_backends():
                assert left(toy) == []
                with pytest.raises(NoBackendError, match='nothing'):
                    toy.f(Q, Q)
    with policy_context(Policy(allow=())), pytest.raises(NoBackendError):
        toy.f(Q, Q)


@pytest.mark.parametrize(
    ('token', 'kept'),
    [
        ('a', 'a'),
        (' A ', 'a'),
        ('VENDOR', 'a c d'),
        ('native', 'b'),
        ('default', 'default'),
        ('Triton', 'default'),
        ('reference', 'plain'),
        ('plain', 'plain'),
        ('vendor:NVIDIA', 'a'),
        ('Vendor:nvidia', 'a'),
        ('impl:vendor.a', 'a'),
        ('IMPL:Native.B', 'b'),
        ('impl:reference.plain', 'plain'),
        ('impl:default.default', 'default'),
    ],
)
def test_tokens_mean_the_same_everywhere(toy, monkeypatch, token, kept):
    kept = kept.split()
    rest = [name for name in ('a', 'b', 'c', 'd', 'default', 'plain') if name not in kept]
    with allow_backends(token):
        assert (left(toy), toy.ran()) == (kept, kept[0])
    with deny_backends(token, op=toy.op):
        assert (left(toy), toy.ran()) == (rest, rest[0])
    with prefer_backend(token):
        assert (left(toy), toy.ran()) == (kept + rest, kept[0])
    with use_backend(token):
        assert (left(toy), toy.ran()) == (kept, kept[0])
    with policy_context(Policy(order={toy.op: token})):
        assert (left(toy), toy.ran()) == (kept, kept[0])
    assert toy.name_of(toy.f.bind(backend=token)(Q, Q)) == kept[0]
    for variable, value, expected in [
        ('FLA_ALLOW_BACKENDS', token, kept),
        ('FLA_DENY_BACKENDS', token, rest),
        ('FLA_PREFER', token, kept + rest),
        ('FLA_PER_OP', f'{toy.op}={token}', kept),
    ]:
        with by_variable(variable, value, monkeypatch):
            assert (left(toy), toy.ran()) == (expected, expected[0])


def test_names_of_backends_are_case_folded(monkeypatch):
    toy = Toy()
    toy.add('FlashKDA', vendor='MoonShot')
    toy.add('b', priority=1)
    for token in ('flashkda', 'FLASHKDA', 'FlashKDA', 'vendor:moonshot', 'impl:VENDOR.flashKDA'):
        with use_backend(token):
            assert toy.ran() == 'FlashKDA'
        with by_variable('FLA_PREFER', token, monkeypatch):
            assert toy.ran() == 'FlashKDA'


# -- use_backend: must run or raise -----------------------------------------------------------------------------------------


def test_use_backend_tries_in_its_own_order_and_raises_if_none_can():
    toy = Toy()
    toy.add('a', accepts=lambda self, flag: (not flag, 'no flag'))
    toy.add('b', accepts=lambda self, scale: (scale is None, 'no scale'))
    toy.add('c')
    with use_backend('b', 'a', op=toy.op):
        assert toy.ran() == 'b'
        assert toy.ran(Q, Q, scale=1.0) == 'a'
        with pytest.raises(NoBackendError) as info:
            toy.f(Q, Q, scale=1.0, flag=True)
    text = str(info.value)
    assert 'no flag' in text
    assert 'no scale' in text
    assert 'not listed: only b, a' in text
    assert info.value.decision['c'].verdict == 'excluded'


def test_use_backend_without_an_address_leaves_alone_what_it_does_not_serve(toy):
    other = Toy()
    other.add('x')
    with use_backend('x'):
        assert (toy.ran(), other.ran()) == ('a', 'x')
    with use_backend('c'):
        assert (toy.ran(), other.ran()) == ('c', 'x')


def test_use_backend_with_an_address_raises_for_a_function_it_does_not_serve(toy):
    elsewhere = Toy()
    elsewhere.add('x')
    with pytest.raises(UnknownNameError, match="unknown backend 'x'"):
        use_backend('x', op=toy.op).__enter__()
    with use_backend('vendor:nvidia'), use_backend('reference', op=elsewhere.op):
        assert toy.ran() == 'a'
        with pytest.raises(NoBackendError):
            elsewhere.f(Q, Q)


def test_bind_beats_every_scope(toy, monkeypatch):
    bound = toy.f.bind(backend='b')
    preferring = toy.f.bind(prefer='d')
    with use_backend('c'), deny_backends('b', 'd'):
        assert toy.ran() == 'c'
        assert toy.name_of(bound(Q, Q)) == 'b'
        assert toy.name_of(preferring(Q, Q)) == 'a'  # a preference overrides no filter
    with prefer_backend('c'):
        assert toy.name_of(preferring(Q, Q)) == 'd'
    with by_variable('FLA_PER_OP', f'{toy.op}=c', monkeypatch):
        assert toy.name_of(bound(Q, Q)) == 'b'
        assert toy.name_of(preferring(Q, Q)) == 'd'
    assert toy.name_of(toy.f.bind(policy=Policy(order={toy.op: ('c', 'a')}))(Q, Q)) == 'c'
    assert toy.ran() == 'a'


def test_two_bound_functions_differ_in_one_process(toy):
    one, two = toy.f.bind(backend='b'), toy.f.bind(backend='c')
    for _ in range(2):
        assert (toy.name_of(one(Q, Q)), toy.name_of(two(Q, Q)), toy.ran()) == ('b', 'c', 'a')


@pytest.mark.parametrize(
    ('arguments', 'error', 'text'),
    [
        ({'backend': 'aa'}, UnknownNameError, "unknown backend 'aa'"),
        ({'prefer': 'plainn'}, UnknownNameError, "Did you mean 'plain'"),
        ({}, TypeError, 'needs a backend'),
        ({'backend': 'a', 'policy': Policy()}, TypeError, 'not both'),
        ({'preferred': 'a'}, TypeError, 'preferred'),
        ({'strict': 'yes'}, TypeError, 'strict must be'),
        ({'backend': ''}, TypeError, 'use takes'),
    ],
)
def test_bind_refuses(toy, arguments, error, text):
    with pytest.raises(error, match=text):
        toy.f.bind(**arguments)


# -- names nobody knows -----------------------------------------------------------------------------------------------------

UNKNOWN = [
    (lambda op: use_backend('plainn').__enter__(), "unknown backend 'plainn'", "'plain'"),
    (lambda op: use_backend('plainn', op=op).__enter__(), "unknown backend 'plainn' of operation", "'plain'"),
    (lambda op: prefer_backend('b', 'plainn', op=f'{op}.f').__enter__(), "unknown backend 'plainn'", "'plain'"),
    (lambda op: allow_backends('plainn').__enter__(), "unknown backend 'plainn'", "'plain'"),
    (lambda op: deny_backends('vendor:nvida').__enter__(), "unknown backend 'vendor:nvida'", "'vendor:nvidia'"),
    (lambda op: deny_backends('impl:native.bb').__enter__(), "unknown backend 'impl:native.bb'", "'impl:native.b'"),
    (lambda op: policy_context(Policy(prefer='plainn')).__enter__(), "unknown backend 'plainn'", "'plain'"),
    (lambda op: set_policy(Policy(deny='plainn')), "unknown backend 'plainn'", "'plain'"),
    (lambda op: set_policy(Policy(order={op: ('b', 'plainn')})), "unknown backend 'plainn'", "'plain'"),
    (lambda op: set_policy(Policy(order={f'{op}.f': 'plainn'})), "unknown backend 'plainn'", "'plain'"),
    (lambda op: set_policy(Policy(order={f'{op}.ff': 'plain'})), "unknown function 'ff'", "'f'"),
    (lambda op: set_policy(Policy(order={f'{op}x': 'plain'})), "unknown operation 'toy", "'toy"),
    (lambda op: use_backend('plain', op=f'{op}x').__enter__(), "unknown operation 'toy", "'toy"),
    (lambda op: use_backend('plain', op=f'{op}.ff').__enter__(), "unknown function 'ff'", "'f'"),
    (lambda op: strict_mode(op=f'{op}.ff').__enter__(), "unknown function 'ff'", "'f'"),
    (lambda op: use_backend('default', op='modulez').__enter__(), "unknown operation 'modulez'", "'modules'"),
]


@pytest.mark.parametrize('row', UNKNOWN, ids=[f'{i}: {row[1]}' for i, row in enumerate(UNKNOWN)])
def test_an_unknown_name_is_an_error_with_the_nearest_match(toy, row):
    act, text, nearest = row
    with pytest.raises(UnknownNameError) as info:
        act(toy.op)
    assert text in str(info.value)
    assert f'Did you mean {nearest}' in str(info.value)
    assert toy.ran() == 'a'  # none of it remains in force
    assert get_policy() is None
    assert default_dispatcher().control.now.scopes == ()


@pytest.mark.parametrize(
    'fields',
    [
        {'prefer': ('a', '')},
        {'use': (1,)},
        {'allow': ('a', None)},
        {'deny': ' '},
        {'op': ''},
        {'op': 3},
        {'strict': 'yes'},
        {'require_first': 2},
        {'order': {'x': (1,)}},
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_right_is_refused(fields):
    with pytest.raises(TypeError, match=next(iter(fields))):
        Policy(**fields)


def test_policies_are_values():
    one = Policy(prefer='A', order={'kda': ('B', 'triton')}, allow=['c'], strict=True)
    assert one == Policy(prefer=('a',), order=(('kda', ('b', 'default')),), allow=('C',), strict=True)
    assert hash(one) == hash(Policy(*one.spec))
    assert Policy(*one.spec) == one
    assert one.to_dict() == {'prefer': ['a'], 'order': {'kda': ['b', 'default']}, 'allow': ['c'], 'strict': True}
    assert Policy(allow=()).to_dict() == {'allow': []}
    assert Policy(strict=False).to_dict() == {'strict': False}
    assert Policy().to_dict() == {}
    assert Policy(allow=()) != Policy()


# -- the code layer ---------------------------------------------------------------------------------------------------------


def test_set_get_and_reset_policy(toy):
    assert get_policy() is None
    first, second = Policy(prefer='b'), Policy(use='c', op=toy.op)
    assert set_policy(first) is None
    assert get_policy() == first
    assert toy.ran() == 'b'
    assert set_policy(second) == first
    assert toy.ran() == 'c'
    with prefer_backend('d'):
        assert toy.ran() == 'd'
    reset_policy()
    assert get_policy() is None
    assert toy.ran() == 'a'
    reset_policy()
    for wrong in ('a', None, {'prefer': 'a'}):
        with pytest.raises(TypeError, match='takes a Policy'):
            set_policy(wrong)
        with pytest.raises(TypeError, match='takes a Policy'):
            policy_context(wrong)


def test_a_policy_for_one_function_concerns_that_one_alone(toy):
    other = Toy()
    other.add('b')
    set_policy(Policy(use='b', op=f'{toy.op}.f'))
    assert (toy.ran(), other.ran()) == ('b', 'b')
    set_policy(Policy(deny='b', op=f'{toy.op}.f'))
    with prefer_backend('b'):
        assert (toy.ran(), other.ran()) == ('a', 'b')


def test_each_field_comes_from_the_highest_layer_that_sets_it(toy, monkeypatch):
    toy.add('broken', priority=0, accepts=lambda self, q: 1 / 0)
    monkeypatch.setenv('FLA_STRICT', '1')
    with pytest.raises(DispatchError, match='broken'):
        toy.f(Q, Q)
    with strict_mode(False):
        assert toy.ran() == 'a'
        with prefer_backend('b'):
            assert toy.ran() == 'b'
        with strict_mode(op=toy.op), pytest.raises(DispatchError):
            toy.f(Q, Q)
    set_policy(Policy(strict=False))
    assert toy.ran() == 'a'


# -- wishes -----------------------------------------------------------------------------------------------------------------


def picky(**options):
    toy = Toy(**options)
    toy.add('b', priority=1)
    toy.add('a', priority=2, accepts=lambda self, flag: (not flag, 'no flag'), env_var='FLA_TOY_A')
    toy.add('gone', package_name='no_such_package_anywhere')
    return toy


@pytest.mark.parametrize('layer', ['scope', 'code', 'prefer'])
@pytest.mark.parametrize('why', ['verifier', 'toggle', 'filter', 'unavailable'])
@pytest.mark.parametrize('strict', [False, True])
def test_an_unmet_wish_warns_once_and_raises_under_strict(monkeypatch, caplog, layer, why, strict):
    toy = picky()
    name = 'gone' if why == 'unavailable' else 'a'
    with contextlib.ExitStack() as stack:
        if why == 'toggle':
            monkeypatch.setenv('FLA_TOY_A', '0')
        if why == 'filter':
            stack.enter_context(deny_backends('a'))
        stack.enter_context(LAYERS[layer](toy, name, monkeypatch))
        if strict:
            stack.enter_context(strict_mode())
            with pytest.raises(NoBackendError, match='preferred'):
                toy.f(Q, Q, flag=why == 'verifier')
            assert explain(toy.f, Q, Q, flag=why == 'verifier').winner is None
        else:
            for _ in range(2):
                assert toy.ran(Q, Q, flag=why == 'verifier') == 'b'
            assert len(warnings(caplog, repr(name), 'asked for')) == 1


@pytest.mark.parametrize('strict', [False, True])
@pytest.mark.parametrize(
    ('wish', 'flag', 'ran'),
    [
        (('a',), False, 'a'),
        (('a', 'b'), True, 'b'),  # one of the preferences is met
        (('vendor',), True, 'b'),  # a kind is a general preference, not one for a specific backend
        (('reference',), True, 'b'),
        (('vendor:nobody',), True, 'b'),
        (('gone', 'a'), False, 'a'),
    ],
)
def test_a_wish_that_is_met_is_no_problem(strict, wish, flag, ran):
    toy = picky()
    toy.add('other', vendor='nobody', accepts=lambda self: (False, 'never'))
    with strict_mode(strict), prefer_backend(*wish):
        assert toy.ran(Q, Q, flag=flag) == ran


def test_a_wish_of_one_operation_is_not_unmet_in_another(toy):
    other = picky()
    with strict_mode(), prefer_backend('a'):
        assert toy.ran() == 'a'
        assert other.ran() == 'a'
    with strict_mode(), prefer_backend('gone', op=other.op):
        assert toy.ran() == 'a'
        with pytest.raises(NoBackendError):
            other.f(Q, Q)
    with strict_mode(), prefer_backend('d'):
        assert (toy.ran(), other.ran()) == ('d', 'b')


# -- require_first ----------------------------------------------------------------------------------------------------------


def test_require_first(monkeypatch, toy):
    picked = picky()
    with policy_context(Policy(require_first=True)):
        assert picked.ran() == 'b'
        assert picked.ran(Q, Q, flag=True) == 'b'
        with prefer_backend('a'):
            assert picked.ran() == 'a'
            with pytest.raises(NoBackendError, match='require_first'):
                picked.f(Q, Q, flag=True)
            assert explain(picked.f, Q, Q, flag=True).winner is None
            # an unavailable or disabled backend is not the first candidate
            monkeypatch.setenv('FLA_TOY_A', '0')
            assert picked.ran(Q, Q, flag=True) == 'b'
            monkeypatch.delenv('FLA_TOY_A')
            with deny_backends('a'):
                assert picked.ran(Q, Q, flag=True) == 'b'
        with prefer_backend('gone'):
            assert picked.ran() == 'b'
    assert picked.ran(Q, Q, flag=True) == 'b'


@pytest.mark.parametrize('why', ['rejects', 'demotes itself', 'is broken'])
def test_require_first_raises_for_whatever_keeps_the_first_from_running(why):
    methods = {
        'rejects': {'accepts': lambda self: (False, 'never')},
        'demotes itself': {'prefers': lambda self: (False, 'slow')},
        'is broken': {'accepts': lambda self: None},
    }
    toy = Toy()
    toy.add('a', **methods[why])
    toy.add('b')
    assert toy.ran() == 'b'
    with policy_context(Policy(require_first=True)):
        with pytest.raises(NoBackendError, match='require_first'):
            toy.f(Q, Q)
        assert explain(toy.f, Q, Q).winner is None
    assert toy.ran() == 'b'


# -- cost of a change -------------------------------------------------------------------------------------------------------


def test_coming_back_to_a_policy_brings_back_its_very_code(toy):
    codes = {}
    for _ in range(3):
        for name in ('b', 'c'):
            with prefer_backend(name):
                assert toy.ran() == name
                codes.setdefault(name, toy.f.__code__)
                assert toy.f.__code__ is codes[name]
        assert toy.ran() == 'a'
        codes.setdefault('none', toy.f.__code__)
        assert toy.f.__code__ is codes['none']


def test_a_scope_for_another_operation_costs_a_function_nothing(toy):
    other = Toy()
    other.add('x')
    assert (toy.ran(), other.ran()) == ('a', 'x')
    code = toy.f.__code__
    with use_backend('x', op=other.op):
        assert toy.f.__code__ is code
        assert toy.ran() == 'a'
        assert toy.f.__code__ is code
    assert torch.equal(toy.f(Q, Q), Q + 1)


@pytest.mark.parametrize(
    ('make', 'words'),
    [
        (lambda: Policy(order=['kda']), 'order is a mapping from names to backends'),
        (lambda: Policy(order={3: 'a'}), 'order is a mapping from names'),
        (lambda: Policy(lock={' ': 'a'}), 'lock is a mapping from names'),
        (lambda: Policy(boost={3: {'a': 1}}), 'boost is a mapping from names to numbers'),
        (lambda: Policy(boost=3), 'boost is a mapping'),
        (lambda: Policy(boost={'kda': 3}), r"boost\['kda'\] is a mapping from names to numbers; got 3"),
        (lambda: Policy(boost={'kda': {'a': 'b'}}), 'a number to add to its priority'),
        (lambda: Rule(3, 'x'), 'ops of a rule takes globs'),
        (lambda: Policy(rules=[{'ops': 'kda', 'uses': 'x'}]), r"rules\[0\] has no field 'uses'. Did you mean 'use'"),
        (lambda: Policy(rules=[{'ops': 'kda'}]), r"rules\[0\] has no 'use'"),
        (lambda: Policy(rules=[('kda',)]), 'rules must be a list of Rule'),
        (lambda: Policy(strict=torch.ones(2)), 'strict must be True, False or None'),
        (lambda: Policy(strict=1), 'strict must be True, False or None, got 1'),
        (lambda: Policy(breaker={'treshold': 3}), "breaker has no setting 'treshold'. Did you mean 'threshold'"),
        (lambda: Policy(breaker=(3,)), 'breaker must be BreakerSettings'),
        (lambda: Policy(deny={'a': 1}), "deny takes names, got {'a': 1}"),
        (lambda: Policy(use=b'one'), "use takes names, got b'one'"),
        (lambda: Policy(use='a', lock={'kda': 'b'}), 'use and lock say who runs in one policy'),
        (lambda: Policy(order={'kda': 'a'}, lock={'kda': 'b'}), "order and lock both have 'kda'"),
        (lambda: Policy(on_error=['raise']), r"on_error must be 'raise', 'fallback' or None, got \['raise'\]\.$"),
        (lambda: Policy(on_error='rase'), r"got 'rase'\. Did you mean 'raise'"),
    ],
)
def test_fields_of_the_wrong_kind(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize(
    ('make', 'words'),
    [
        (lambda op: Policy(order={f'{op}.g': 'a'}), "unknown function 'g'"),
        (lambda op: Policy(order={op: 'none_such'}), "unknown backend 'none_such'"),
        (lambda op: Policy(lock={op: 'none_such'}), "unknown backend 'none_such'"),
        (lambda op: Policy(lock={'none_such': 'a'}), "unknown operation 'none_such'"),
        (lambda op: Policy(boost={op: {'none_such': 1}}), "boost: unknown backend 'none_such'"),
        (lambda op: Policy(boost={'none_such*': {'a': 1}}), 'matches no operation'),
        (lambda op: Policy(rules=[Rule(op, 'none_such')]), r"rules\[0\]: unknown backend 'none_such'"),
        (lambda op: Policy(rules=[Rule(op, 'a', 'v.shape[0] > 1')]), "there is no parameter 'v'"),
    ],
)
def test_unknown_names_in_any_field_are_errors(make, words):
    toy = Toy()
    toy.add('a')
    policy = make(toy.op)
    with pytest.raises(UnknownNameError, match=words):
        set_policy(policy)
    with pytest.raises(UnknownNameError, match=words), policy_context(policy):
        pass
    with pytest.raises(UnknownNameError, match=words):
        toy.f.bind(policy=policy)
    assert get_policy() is None


@pytest.mark.parametrize('field', ['order', 'lock', 'boost', 'rules'])
def test_a_binding_says_something_of_its_function(field):
    toy, other = Toy(), Toy()
    toy.add('a')
    other.add('a')
    value = {'order': 'a', 'lock': 'a', 'boost': {'a': -1}}.get(field)
    value = [Rule(other.op, 'a')] if field == 'rules' else {other.op: value}
    with pytest.raises(ValueError, match=rf'{field}\[.*does not concern {toy.op}\.f'):
        toy.f.bind(**{field: value})
