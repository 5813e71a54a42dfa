"""Each environment variable: every literal in several spellings, unset, empty, invalid. Each row names the backend that
ran."""

import ast
import logging
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

import fla
from fla.backends import (
    BackendRegistry,
    Dispatcher,
    DispatchError,
    NoBackendError,
    UnknownNameError,
    default_dispatcher,
    dispatch,
    explain,
    plugins,
    refresh,
    strict_mode,
    use_backend,
)
from fla.backends.core import logs
from fla.backends.core.errors import BackendBugError
from fla.backends.observe import last_backend
from tests import process
from tests.backends.library import backend_source
from tests.backends.toy import Q, Toy

TRUE = ['1', 'true', 'TRUE', 'True', 'yes', 'Yes', 'on', 'ON', ' 1 ', '\ttrue\n']
FALSE = ['0', 'false', 'FALSE', 'no', 'No', 'off', 'OFF', ' 0', '\toff ']
GARBAGE = ['', ' ', '2', 'maybe', 'tru', '1.0', '-1', 'None', '1,0', 'yes please', 'ünïcode']
CHOICES = '1, true, yes, on or 0, false, no, off'


def messages(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno == level and record.name == 'fla']


def set_or_unset(monkeypatch, name, value):
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)


def three():
    """Backends a (vendor NVIDIA), b (native) and c (vendor), asked in this order, then the default, then a reference."""
    toy = Toy()
    toy.add('a', vendor='NVIDIA')
    toy.add('b', kind='native')
    toy.add('c')
    toy.add('plain', kind='reference')
    return toy


def tried(toy, *args, **kwargs):
    """Returns the names of the candidates that the policy allows, in order."""
    decision = explain(toy.f, *(args or (Q, Q)), **kwargs)
    return [c.name for c in decision.candidates if c.verdict not in ('excluded', 'disabled')]


# -- toggles ----------------------------------------------------------------------------------------------------------------

DEFAULTS = {
    'True': (True, True),
    'False': (False, False),
    'callable True': (lambda: True, True),
    'callable False': (lambda: False, False),
}
TOGGLE = (
    [(None, None)] + [(text, True) for text in TRUE] + [(text, False) for text in FALSE] + [(text, None) for text in GARBAGE]
)


@pytest.mark.parametrize('default', DEFAULTS)
@pytest.mark.parametrize(('value', 'says'), TOGGLE, ids=[repr(value) for value, _ in TOGGLE])
def test_toggle(monkeypatch, caplog, default, value, says):
    given, unset_means = DEFAULTS[default]
    expected = unset_means if says is None else says
    set_or_unset(monkeypatch, 'FLA_TOY_A', value)
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_A', default_enable=given)
    for _ in range(2):
        assert toy.ran() == ('a' if expected else 'default')
    report = explain(toy.f, Q, Q)['a']
    assert report.verdict == ('chosen' if expected else 'disabled')
    if not expected:
        assert 'FLA_TOY_A' in report.reason
        assert report.source == 'FLA_TOY_A'
    warned = [text for text in messages(caplog) if 'FLA_TOY_A' in text]
    if value in GARBAGE:
        assert len(warned) == 1
        assert repr(value) in warned[0]
        assert CHOICES in warned[0]
    else:
        assert warned == []


def test_a_toggle_is_live_through_every_value(monkeypatch, caplog):
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_A')
    for value, says in [*TOGGLE, *reversed(TOGGLE)]:
        set_or_unset(monkeypatch, 'FLA_TOY_A', value)
        assert toy.ran() == ('default' if says is False else 'a'), value
        assert explain(toy.f, Q, Q).winner == ('default' if says is False else 'a'), value
    assert len([text for text in messages(caplog) if 'FLA_TOY_A' in text]) == len(GARBAGE)  # once per value


def test_a_toggle_without_a_variable_is_its_default():
    toy = Toy()
    toy.add('off', default_enable=False)
    toy.add('asked', default_enable=lambda: False)
    toy.add('on')
    assert toy.ran() == 'on'
    decision = explain(toy.f, Q, Q)
    for name in ('off', 'asked'):
        assert (decision[name].verdict, decision[name].source) == ('disabled', 'default_enable')


def test_default_enable_is_asked_at_plan_time_and_only_where_the_toggle_is_silent(monkeypatch):
    asked = []
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_A', default_enable=lambda: asked.append(1) is None)
    assert toy.ran() == 'a'
    count = len(asked)
    assert count >= 1
    for value in ('1', '0', 'on', '1'):
        monkeypatch.setenv('FLA_TOY_A', value)
        assert toy.ran() == ('default' if value == '0' else 'a')
    assert len(asked) == count


@pytest.mark.parametrize('where', ['default_enable', 'is_enabled'])
def test_a_toggle_that_raises_harms_only_its_own_backend(caplog, where):
    def boom(*_):
        raise ValueError('no such thing')

    toy = Toy()
    toy.add('a', **({where: boom} if where == 'default_enable' else {where: classmethod(boom)}))
    toy.add('b')
    assert toy.ran() == 'b'
    assert toy.ran() == 'b'
    report = explain(toy.f, Q, Q)['a']
    assert report.verdict in ('disabled', 'bug')
    assert 'no such thing' in report.reason
    said = [text for text in messages(caplog, logging.ERROR) if 'no such thing' in text or repr('a') in text]
    assert len(said) == 1
    with strict_mode(), pytest.raises(BackendBugError) as info:
        toy.f(Q, Q)
    assert str(info.value.__cause__) == 'no such thing'


def test_two_backends_may_share_a_toggle(monkeypatch):
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_A', accepts=lambda self, flag: (not flag, 'no flag'))
    toy.add('b', env_var='FLA_TOY_A')
    assert (toy.ran(), toy.ran(Q, Q, flag=True)) == ('a', 'b')
    monkeypatch.setenv('FLA_TOY_A', 'off')
    assert (toy.ran(), toy.ran(Q, Q, flag=True)) == ('default', 'default')


# -- is_enabled, overridden as in FLA --------------------------------------------------------------------------------------


def _helper():
    return os.environ.get('FLA_TOY_' + 'HIDDEN', '1') == '1'


def literal(cls):
    return os.environ.get('FLA_TOY_LITERAL', '1') == '1'


def subscript(cls):
    return 'FLA_TOY_LITERAL' not in os.environ or os.environ['FLA_TOY_LITERAL'] == '1'


def getenv(cls):
    return os.getenv('FLA_TOY_LITERAL', '1') == '1'


def by_attribute(cls):
    return os.environ.get(cls.env_var, '1') == '1'


def hidden(cls):
    return _helper()


def hidden_beside_its_own(cls):
    return super(type(cls), cls) is not None and _helper()


OVERRIDES = {
    'literal name': (literal, {}, 'FLA_TOY_LITERAL'),
    'subscript': (subscript, {}, 'FLA_TOY_LITERAL'),
    'getenv': (getenv, {}, 'FLA_TOY_LITERAL'),
    'through cls.env_var': (by_attribute, {'env_var': 'FLA_TOY_A'}, 'FLA_TOY_A'),
    'declared': (hidden, {'extra_env': ('FLA_TOY_HIDDEN',)}, 'FLA_TOY_HIDDEN'),
    'undeclared': (hidden, {}, 'FLA_TOY_HIDDEN'),
    'undeclared beside env_var': (hidden_beside_its_own, {'env_var': 'FLA_TOY_A'}, 'FLA_TOY_HIDDEN'),
}


@pytest.mark.parametrize('case', OVERRIDES)
def test_an_overridden_is_enabled_is_live(monkeypatch, case):
    function, attributes, variable = OVERRIDES[case]
    toy = Toy()
    toy.add('a', is_enabled=classmethod(function), **attributes)
    for value, expected in [(None, 'a'), ('0', 'default'), ('1', 'a'), ('x', 'default'), (None, 'a'), ('0', 'default')]:
        set_or_unset(monkeypatch, variable, value)
        assert toy.ran() == expected, value
        assert explain(toy.f, Q, Q).winner == expected, value


def test_a_replaced_is_enabled_forgets_the_old_answers(monkeypatch):
    toy = Toy()
    backend = toy.add('a', is_enabled=classmethod(literal))
    for value in ('1', '0'):
        monkeypatch.setenv('FLA_TOY_LITERAL', value)
        toy.ran()

    def inverse(cls):
        return os.environ.get('FLA_TOY_LITERAL', '1') != '1'

    monkeypatch.setattr(type(backend), 'is_enabled', classmethod(inverse))
    for value, expected in [('1', 'default'), ('0', 'a'), ('1', 'default')]:
        monkeypatch.setenv('FLA_TOY_LITERAL', value)
        assert toy.ran() == expected, value


# -- policy variables: booleans ---------------------------------------------------------------------------------------------


def raises(error, toy):
    try:
        toy.f(Q, Q)
    except error:
        return True
    return False


def strict():
    toy = Toy()
    toy.add('a', accepts=lambda self, q: 1 / 0)
    on = raises(BackendBugError, toy)
    return on, None if on else toy.ran(), 'default'


def require_first():
    toy = Toy()
    toy.add('a', accepts=lambda self, flag: (flag, 'needs flag'))
    on = raises(NoBackendError, toy)
    return on, None if on else toy.ran(), 'default'


def check_values():
    seen = []
    toy = Toy(check=lambda q, check_values: seen.append(check_values))
    toy.add('a')
    ran = toy.ran()
    assert seen[-1] in (True, False)
    return seen[-1], ran, 'a'


def dispatch_trace():
    toy = Toy()
    toy.add('a')
    ran = toy.ran()
    if not default_dispatcher().recorders:
        with pytest.raises(DispatchError, match='nothing is recorded'):
            last_backend(toy.op)
        return False, ran, 'a'
    assert last_backend(f'{toy.op}.f') == 'a'
    return True, ran, 'a'


BOOLEANS = {
    'FLA_STRICT': strict,
    'FLA_REQUIRE_FIRST': require_first,
    'FLA_CHECK_VALUES': check_values,
    'FLA_DISPATCH_TRACE': dispatch_trace,
}


@pytest.mark.parametrize('variable', BOOLEANS)
@pytest.mark.parametrize(('value', 'says'), TOGGLE, ids=[repr(value) for value, _ in TOGGLE])
def test_boolean_policy_variable(monkeypatch, caplog, variable, value, says):
    set_or_unset(monkeypatch, variable, value)
    on, ran, expected = BOOLEANS[variable]()
    assert on is bool(says)
    assert ran in (None, expected)
    warned = [text for text in messages(caplog) if variable in text]
    assert len(warned) == (value in GARBAGE)
    assert all(repr(value) in text and CHOICES in text for text in warned)


@pytest.mark.parametrize('variable', BOOLEANS)
def test_boolean_policy_variable_is_read_again_by_refresh_alone(monkeypatch, variable):
    observe = BOOLEANS[variable]
    for value in ('1', '0', 'true', None, 'on'):
        before = observe()[0]
        set_or_unset(monkeypatch, variable, value)
        assert observe()[0] is before
        refresh()
        assert observe()[0] is (value in ('1', 'true', 'on'))


def test_dispatch_trace_is_read_again_after_reset(monkeypatch):
    monkeypatch.setenv('FLA_DISPATCH_TRACE', '1')
    for _ in range(2):
        assert dispatch_trace()[0]
        default_dispatcher().reset()


# -- policy variables: lists ------------------------------------------------------------------------------------------------

LISTS = [
    # (variables, the allowed candidates in order)
    ({}, 'a b c default plain'),
    ({'PER_OP': '{op}=c|default'}, 'c default'),
    ({'PER_OP': '{op}=default|c'}, 'default c'),
    ({'PER_OP': '{op}=TRITON'}, 'default'),
    ({'PER_OP': ' {op} = C , A ; '}, 'c a'),
    ({'PER_OP': '{op}=b;{op}.f=c'}, 'c'),
    ({'PER_OP': '{op}.f=c;{op}=b'}, 'c'),
    ({'PER_OP': '{op}.f=vendor'}, 'a c'),
    ({'PER_OP': '{op}=reference|native'}, 'plain b'),
    ({'PER_OP': '{op}=vendor:nvidia|impl:Native.B'}, 'a b'),
    ({'PER_OP': '{op}=c|c|vendor'}, 'c a'),
    ({'PER_OP': '{op}='}, ''),
    ({'PER_OP': ''}, 'a b c default plain'),
    ({'PER_OP': ' ; ;'}, 'a b c default plain'),
    ({'PREFER': 'c'}, 'c a b default plain'),
    ({'PREFER': 'C|B'}, 'c b a default plain'),
    ({'PREFER': 'default'}, 'default a b c plain'),
    ({'PREFER': 'triton'}, 'default a b c plain'),
    ({'PREFER': 'reference'}, 'plain a b c default'),
    ({'PREFER': 'native, vendor'}, 'b a c default plain'),
    ({'PREFER': 'vendor:NVIDIA'}, 'a b c default plain'),
    ({'PREFER': 'impl:vendor.c'}, 'c a b default plain'),
    ({'PREFER': ''}, 'a b c default plain'),
    ({'PREFER': ' , | '}, 'a b c default plain'),
    ({'ALLOW_BACKENDS': 'c,default'}, 'c default'),
    ({'ALLOW_BACKENDS': 'VENDOR'}, 'a c'),
    ({'ALLOW_BACKENDS': 'vendor:nvidia|triton'}, 'a default'),
    ({'ALLOW_BACKENDS': 'impl:reference.plain'}, 'plain'),
    ({'ALLOW_BACKENDS': ''}, ''),
    ({'ALLOW_BACKENDS': ' , '}, ''),
    ({'DENY_BACKENDS': 'a'}, 'b c default plain'),
    ({'DENY_BACKENDS': 'A,B'}, 'c default plain'),
    ({'DENY_BACKENDS': 'vendor,native,default'}, 'plain'),
    ({'DENY_BACKENDS': 'triton'}, 'a b c plain'),
    ({'DENY_BACKENDS': ''}, 'a b c default plain'),
    ({'DENY_BACKENDS': 'vendor,native,default,reference'}, ''),
    ({'ALLOW_BACKENDS': 'a,b', 'DENY_BACKENDS': 'a'}, 'b'),
    ({'PREFER': 'c', 'DENY_BACKENDS': 'c'}, 'a b default plain'),
    ({'PER_OP': '{op}=a|b', 'ALLOW_BACKENDS': 'b,c'}, 'b'),
    ({'PER_OP': '{op}=a|b', 'PREFER': 'c'}, 'a b'),
]


@pytest.mark.parametrize(('variables', 'left'), LISTS, ids=[str(row[0]) for row in LISTS])
def test_lists(monkeypatch, caplog, variables, left):
    toy = three()
    for name, value in variables.items():
        monkeypatch.setenv(f'FLA_{name}', value.format(op=toy.op))
    left = left.split()
    if left:
        assert toy.ran() == left[0]
    else:
        with pytest.raises(NoBackendError):
            toy.f(Q, Q)
    assert tried(toy) == left
    for report in explain(toy.f, Q, Q).candidates:
        if report.name not in left:
            assert report.verdict == 'excluded'
            assert report.source in {f'FLA_{name}' for name in variables}
    assert [text for text in messages(caplog) if 'asked for by FLA_P' not in text] == []


@pytest.mark.parametrize(
    ('variable', 'value', 'ran', 'word', 'nearest'),
    [
        ('PREFER', 'flash_kdaa', 'flash_kda', 'flash_kdaa', "'flash_kda'"),
        ('PREFER', 'flash_kdaa|b', 'b', 'flash_kdaa', "'flash_kda'"),
        ('PREFER', 'vendor:NVIDA', 'flash_kda', 'vendor:nvida', "'vendor:nvidia'"),
        ('PREFER', 'impl:vendor.b', 'flash_kda', 'impl:vendor.b', 'impl:'),
        ('DENY_BACKENDS', 'flash_kdaa', 'flash_kda', 'flash_kdaa', "'flash_kda'"),
        ('ALLOW_BACKENDS', 'flash_kdaa,b', 'b', 'flash_kdaa', "'flash_kda'"),
        ('ALLOW_BACKENDS', 'flash_kdaa', None, 'flash_kdaa', "'flash_kda'"),
        ('PER_OP', '{op}=flash_kdaa|b', 'b', 'flash_kdaa', "'flash_kda'"),
        ('PER_OP', '{op}.f=flash_kdaa|b', 'b', 'flash_kdaa', "'flash_kda'"),
        ('PER_OP', '{op}=flash_kdaa', None, 'flash_kdaa', "'flash_kda'"),
        ('PER_OP', '{op}.ff=b', 'flash_kda', "'ff'", "'f'"),
        ('PER_OP', '{op}x=b', 'flash_kda', '{op}x', '{op}'),
        ('PER_OP', '{op}', 'flash_kda', "'{op}'", 'operation=backend'),
        ('PER_OP', '=b', 'flash_kda', "'=b'", 'operation=backend'),
        ('PER_OP', '{op};{op}=b', 'b', "'{op}'", 'operation=backend'),
    ],
)
@pytest.mark.parametrize('is_strict', [False, True])
def test_a_bad_word_warns_once_and_names_the_nearest(monkeypatch, caplog, variable, value, ran, word, nearest, is_strict):
    toy = Toy()
    toy.add('flash_kda', vendor='nvidia')
    toy.add('b', kind='native')
    monkeypatch.setenv(f'FLA_{variable}', value.format(op=toy.op))
    malformed = nearest == 'operation=backend'
    if is_strict and not malformed:
        monkeypatch.setenv('FLA_STRICT', '1')
        for _ in range(2):  # the second call raises like the first
            with pytest.raises(UnknownNameError, match=f'FLA_{variable}') as info:
                toy.f(Q, Q)
            assert word.format(op=toy.op) in str(info.value)
            assert nearest.format(op=toy.op) in str(info.value)
        return
    for _ in range(2):
        if ran is None:
            with pytest.raises(NoBackendError):
                toy.f(Q, Q)
        else:
            assert toy.ran() == ran
    (warning,) = [text for text in messages(caplog) if f'FLA_{variable}' in text]
    assert word.format(op=toy.op) in warning
    assert nearest.format(op=toy.op) in warning


def test_a_module_of_an_operation_is_no_operation(monkeypatch, caplog, library):
    """`foo.chunk` is the file of the function `foo.chunk_foo`: an easy mistake, which must be reported."""
    library.add('foo', '')
    library.write('ops/foo/ff.py', '')
    monkeypatch.setenv(f'{library.prefix}_PER_OP', 'foo.ff=default')
    assert library.f('foo')() == 'default'
    (warning,) = [text for text in messages(caplog) if f'{library.prefix}_PER_OP' in text]
    assert "unknown function 'ff' of operation 'foo'. Did you mean 'f'?" in warning
    with pytest.raises(UnknownNameError, match="Did you mean 'f'"):
        use_backend('default', op='foo.ff', dispatcher=library.dispatcher).__enter__()


def test_lists_are_read_again_by_refresh_alone(monkeypatch):
    toy = three()
    assert toy.ran() == 'a'
    for name, value, ran in [
        ('PREFER', 'c', 'c'),
        ('DENY_BACKENDS', 'c', 'a'),
        ('PER_OP', f'{toy.op}=b', 'b'),
        ('ALLOW_BACKENDS', 'b', 'b'),
    ]:
        before = toy.ran()
        monkeypatch.setenv(f'FLA_{name}', value)
        assert toy.ran() == before
        refresh()
        assert toy.ran() == ran
    for name in ('PREFER', 'DENY_BACKENDS', 'PER_OP', 'ALLOW_BACKENDS'):
        monkeypatch.delenv(f'FLA_{name}')
    assert toy.ran() == 'b'
    refresh()
    assert toy.ran() == 'a'


# -- unknown and retired names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'nearest'),
    [
        ('FLA_PREFFER', 'FLA_PREFER'),
        ('FLA_DENY_BACKEND', 'FLA_DENY_BACKENDS'),
        ('FLA_STRIKT', 'FLA_STRICT'),
        ('FLA_TOY_FLASHH', 'FLA_TOY_FLASH'),
        ('FLA_ZZZZZZZZZZZZ', None),
    ],
)
def test_an_unknown_variable_is_one_warning(monkeypatch, caplog, name, nearest):
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_FLASH')
    monkeypatch.setenv(name, '1')
    for _ in range(3):
        assert toy.ran() == 'a'
    (warning,) = [text for text in messages(caplog) if name in text]
    assert f"Did you mean '{nearest}'?" in warning if nearest else 'Did you mean' not in warning


def test_known_variables_are_not_warned_about(monkeypatch, caplog):
    toy = Toy()
    toy.add('a', env_var='FLA_TOY_A')
    toy.add('b', is_enabled=classmethod(hidden), extra_env=('FLA_TOY_HIDDEN',))
    for name in ('FLA_TOY_A', 'FLA_TOY_HIDDEN', 'FLA_CHECK_VALUES', 'FLA_STRICT', 'FLASK_DEBUG', 'FLATTEN'):
        monkeypatch.setenv(name, '1')
    assert toy.ran() == 'a'
    assert messages(caplog) == []


def test_toggles_of_unloaded_operations_are_known(monkeypatch, caplog, library):
    prefix = library.prefix
    library.add('foo', '')
    library.add('bar', backend_source('a', 'registry', body=f"env_var = '{prefix}_BAR_SWITCH'"))
    monkeypatch.setenv(f'{prefix}_BAR_SWITCH', '1')
    assert library.f('foo')() == 'default'
    assert not messages(caplog)


def test_an_unknown_variable_gets_the_nearest_name(monkeypatch, caplog, library):
    prefix = library.prefix
    library.add('foo', '')
    library.add('bar', backend_source('a', 'registry', body=f"env_var = '{prefix}_BAR_SWITCH'"))
    monkeypatch.setenv(f'{prefix}_BAR_SWITCHH', '1')
    assert library.f('foo')() == 'default'
    (warning,) = messages(caplog)
    assert warning.startswith(f'environment variable {prefix}_BAR_SWITCHH is set')
    assert f"Did you mean '{prefix}_BAR_SWITCH'?" in warning


def test_declared_variables_are_known(monkeypatch, caplog):
    dispatcher = Dispatcher('declares.ops', 'DECLARES', variables=('DECLARES_CACHE_DIR',))
    BackendRegistry('op', dispatcher)

    @dispatch('op', dispatcher=dispatcher)
    def f():
        return 'default'

    monkeypatch.setenv('DECLARES_CACHE_DIR', '/somewhere')
    monkeypatch.setenv('DECLARES_CACHE_DR', '/somewhere')
    assert f() == 'default'
    (warning,) = messages(caplog)
    assert warning.startswith('environment variable DECLARES_CACHE_DR is set')
    assert "Did you mean 'DECLARES_CACHE_DIR'?" in warning


RETIRED = {'MYLIB_OLD_PREFER': 'MYLIB_PREFER', 'MYLIB_OLD_STRICT': 'MYLIB_STRICT', 'MYLIB_OLD_A': 'MYLIB_TOY_A'}


def retired_toy():
    toy = Toy(dispatcher=Dispatcher('mylib.ops', 'MYLIB', retired_env=RETIRED))
    toy.add('a', env_var='MYLIB_TOY_A')
    toy.add('b')
    return toy


@pytest.mark.parametrize(
    ('variables', 'ran', 'says'),
    [
        ({'MYLIB_OLD_PREFER': 'b'}, 'b', {'MYLIB_OLD_PREFER'}),
        ({'MYLIB_OLD_PREFER': 'b', 'MYLIB_PREFER': 'a'}, 'a', {'MYLIB_OLD_PREFER'}),
        ({'MYLIB_OLD_A': '0'}, 'b', {'MYLIB_OLD_A'}),
        ({'MYLIB_OLD_A': '0', 'MYLIB_TOY_A': '1'}, 'a', {'MYLIB_OLD_A'}),
        ({'MYLIB_OLD_A': '1', 'MYLIB_TOY_A': '0'}, 'b', {'MYLIB_OLD_A'}),
        ({}, 'a', set()),
    ],
)
def test_retired_names_keep_working_and_say_so(monkeypatch, caplog, variables, ran, says):
    toy = retired_toy()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert toy.ran() == ran
    assert toy.ran() == ran
    assert explain(toy.f, Q, Q).winner == ran
    texts = messages(caplog)
    assert len(texts) == len(says)
    for name in says:
        assert any(name in text and 'retired' in text and RETIRED[name] in text for text in texts)


def test_a_retired_toggle_is_live(monkeypatch):
    toy = retired_toy()
    for old, new, ran in [(None, None, 'a'), ('0', None, 'b'), ('0', '1', 'a'), (None, '0', 'b'), ('off', None, 'b')]:
        set_or_unset(monkeypatch, 'MYLIB_OLD_A', old)
        set_or_unset(monkeypatch, 'MYLIB_TOY_A', new)
        assert toy.ran() == ran, (old, new)


def test_a_retired_boolean(monkeypatch, caplog):
    monkeypatch.setenv('MYLIB_OLD_STRICT', 'yes')
    toy = retired_toy()
    toy.add('first', priority=0, accepts=lambda self, q: 1 / 0)
    with pytest.raises(BackendBugError):
        toy.f(Q, Q)
    assert any('MYLIB_OLD_STRICT is retired' in text for text in messages(caplog))


# -- FLA_LOG_LEVEL ----------------------------------------------------------------------------------------------------------

LEVELS = [
    ('DEBUG', logging.DEBUG),
    ('debug', logging.DEBUG),
    (' Info ', logging.INFO),
    ('WARNING', logging.WARNING),
    ('error', logging.ERROR),
    ('10', logging.DEBUG),
    (' 40 ', logging.ERROR),
    (None, None),
    ('', None),
    ('loud', None),
    ('-3', None),
    ('²', None),
    ('1.5', None),
]


@pytest.mark.parametrize(('value', 'level'), LEVELS)
def test_log_level(monkeypatch, caplog, value, level):
    set_or_unset(monkeypatch, 'FLA_LOG_LEVEL', value)
    toy = Toy()
    toy.add('a')
    before = logs.logger.level
    assert toy.ran() == 'a'
    assert logs.logger.level == (before if level is None else level)
    warned = [text for text in messages(caplog) if 'FLA_LOG_LEVEL' in text]
    assert len(warned) == (level is None and value is not None)
    if warned:
        assert 'DEBUG, INFO, WARNING, ERROR' in warned[0]


# -- FLA_PLUGIN_MODULES -----------------------------------------------------------------------------------------------------

PLUGIN = """
    from fla.backends import BaseBackend
    __version__ = '1.{number}'
    class Plugged(BaseBackend):
        backend_type = 'plugged{number}'
        def f(self, q, k, scale=None, flag=False):
            return q * 0 + {number}
    def register(registries):
        registries('{op}').register(Plugged())
    """


@pytest.mark.parametrize(
    ('value', 'ran', 'errors'),
    [
        (None, 'default', {}),
        ('', 'default', {}),
        (' , ,', 'default', {}),
        ('PLUG1', 'plugged1', {'PLUG1': None}),
        (' PLUG2 , PLUG1 ', 'plugged2', {'PLUG2': None, 'PLUG1': None}),
        ('no_such_plugin_module,PLUG1', 'plugged1', {'no_such_plugin_module': 'ModuleNotFoundError', 'PLUG1': None}),
        ('PLUGBAD,PLUG1', 'plugged1', {'PLUGBAD': 'ZeroDivisionError', 'PLUG1': None}),
        ('PLUGEMPTY,PLUG1', 'plugged1', {'PLUGEMPTY': 'AttributeError', 'PLUG1': None}),
        ('not a module!,PLUG1', 'plugged1', {'not a module!': 'ModuleNotFoundError', 'PLUG1': None}),
    ],
)
def test_plugin_modules(monkeypatch, caplog, tmp_path, value, ran, errors):
    toy = Toy()
    toy.names = {0: 'default', 1: 'plugged1', 2: 'plugged2'}
    stem = f'fla_test_{toy.op}_'
    for number in (1, 2):
        (tmp_path / f'{stem}{number}.py').write_text(textwrap.dedent(PLUGIN.format(number=number, op=toy.op)))
    (tmp_path / f'{stem}BAD.py').write_text('1 / 0')
    (tmp_path / f'{stem}EMPTY.py').write_text('')
    monkeypatch.syspath_prepend(tmp_path)
    set_or_unset(monkeypatch, 'FLA_PLUGIN_MODULES', value and value.replace('PLUG', stem))
    assert toy.ran() == ran
    found = {p.name.replace(stem, 'PLUG'): p for p in plugins() if p.source == 'FLA_PLUGIN_MODULES'}
    assert list(found) == list(errors)
    for name, error in errors.items():
        if error is None:
            assert (found[name].error, found[name].version) == (None, f'1.{name[-1]}')
        else:
            assert found[name].error.startswith(error)
            assert any(name.replace('PLUG', stem) in text for text in messages(caplog))
    for module in [m for m in sys.modules if m.startswith(stem)]:
        monkeypatch.delitem(sys.modules, module)


# -- FLA_DISABLE_BACKEND_DISPATCH -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(('value', 'says'), TOGGLE, ids=[repr(value) for value, _ in TOGGLE])
def test_disable(monkeypatch, caplog, value, says):
    set_or_unset(monkeypatch, 'MYLIB_DISABLE_BACKEND_DISPATCH', value)
    dispatcher = Dispatcher('mylib.ops', 'MYLIB')
    checked = []
    toy = Toy(dispatcher=dispatcher, check=lambda q: checked.append(q))
    toy.add('a')
    assert toy.ran() == ('default' if says else 'a')
    assert len(checked) == (0 if says else 1)
    assert hasattr(toy.f, '__wrapped__') is not bool(says)
    warned = [text for text in messages(caplog) if 'MYLIB_DISABLE_BACKEND_DISPATCH' in text]
    assert len(warned) == (value in GARBAGE)


def test_disabled_functions_still_answer(monkeypatch):
    monkeypatch.setenv('MYLIB_DISABLE_BACKEND_DISPATCH', '1')
    toy = Toy(dispatcher=Dispatcher('mylib.ops', 'MYLIB'), default_verifier=lambda q: (False, 'never'))
    toy.add('a')
    assert toy.ran() == 'default'
    assert set(toy.f.backends) == {'a', 'default'}
    assert toy.f.bind(backend='a') is toy.f
    assert toy.f.resolve(Q, Q) is toy.f
    decision = explain(toy.f, Q, Q)
    assert decision.winner == 'default'
    assert decision['a'].verdict == 'excluded'
    assert 'MYLIB_DISABLE_BACKEND_DISPATCH' in decision['a'].reason
    with pytest.raises(DispatchError, match='MYLIB_DISABLE_BACKEND_DISPATCH'):
        use_backend('a', dispatcher=toy.dispatcher).__enter__()


SCRIPT = """
import torch
from fla.backends import call_op, explain, resolve_op, validate
from tests.backends.library import backend_source
from tests.backends.toy import Q, Toy
toy = Toy()
toy.add('a', env_var='FLA_TOY_A')
print(toy.ran(), hasattr(toy.f, '__wrapped__'), explain(toy.f, Q, Q).winner)
print(toy.name_of(call_op(f'{toy.op}.f', Q, Q)), toy.name_of(resolve_op(f'{toy.op}.f', Q, Q)(Q, Q)))
"""


@pytest.mark.parametrize(
    ('environment', 'printed'),
    [
        ({'FLA_DISABLE_BACKEND_DISPATCH': 'Yes'}, 'default False default\ndefault default\n'),
        (
            {
                'FLA_DISABLE_BACKEND_DISPATCH': 'maybe',
                'FLA_STRICT': '?',
                'FLA_PER_OP': 'x',
                'FLA_LOG_LEVEL': 'loud',
                'FLA_PREFER': 'typo',
                'FLA_TOY_A': 'perhaps',
                'FLA_PLUGIN_MODULES': '..,no.such',
            },
            'a True a\na a\n',
        ),
    ],
)
def test_import_survives_every_value(environment, printed):
    done = process.run(SCRIPT, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
    for name, value in environment.items():
        if value != 'Yes':
            assert name in done.stderr


# -- one way to choose ------------------------------------------------------------------------------------------------------


def test_operations_have_no_variables_of_their_own():
    """An implementation is chosen by a backend's toggle, so that it is checked, explained and documented as a backend."""
    root = Path(fla.__file__).parent
    named = []
    for file in root.rglob('*.py'):
        where = file.relative_to(root)
        if 'backends' not in where.parts:
            for node in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
                if isinstance(node, ast.Constant) and re.fullmatch(r'FLA_[A-Z0-9_]+', str(node.value)):
                    named.append(f'{where}:{node.lineno} {node.value}')
    assert named == []
