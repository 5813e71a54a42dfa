"""Registration of backends: checks, handles, provenance, listeners."""

import ast
import logging
import math
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import fla.backends
from fla.backends import (
    BackendRegistry,
    BaseBackend,
    Dispatcher,
    UnknownNameError,
    default_dispatcher,
    describe,
    dispatch,
    explain,
    refresh,
    reset,
    strict_mode,
    validate,
)
from fla.backends.core.errors import BackendBugError, RegistrationError
from fla.backends.core.locking import lock
from fla.backends.observe import snapshot
from tests.backends.toy import Q, Toy
from tests.tables import table


def make(name='a', answer=None, method='f', **attributes):
    """Returns an instance of a new class with a method that returns `answer`, its name by default."""

    def implementation(self, q, k, scale=None, flag=False):
        return answer or name

    return type(f'Made_{name}', (BaseBackend,), {'backend_type': name, method: implementation, **attributes})()


@pytest.fixture
def toy():
    return Toy()


def warnings_of(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# -- what may be registered ---------------------------------------------------------------------------------------------


def test_one_registry_per_operation_and_namespace():
    one = BackendRegistry('registry_once')
    assert BackendRegistry('registry_once') is one
    assert BackendRegistry('registry_once', default_dispatcher()) is one
    assert default_dispatcher().registry('registry_once') is one
    one.register(make())
    assert 'a' in BackendRegistry('registry_once')
    assert BackendRegistry('registry_once', Dispatcher('registry_elsewhere.ops', 'ELSEWHERE')) is not one


@pytest.mark.parametrize('operation', [None, '', '  ', 3, ['kda'], 'no such', 'kda.', '1a', '.kda', 'kda '])
def test_registry_needs_the_name_of_an_operation(operation):
    with pytest.raises(TypeError, match='operation'):
        BackendRegistry(operation)


def test_registry_takes_no_other_object_for_a_namespace():
    with pytest.raises(TypeError, match='Dispatcher'):
        BackendRegistry('registry_where', 'mylib.ops')


@pytest.mark.parametrize(
    'wrong', [None, 3, object(), 'kda', 'a.b.C', 'a:', ':C', 'a b:C', 'a:b:C', 'a..b:C', '.a:C', 'a:C()', lambda: None]
)
def test_register_refuses_what_is_no_backend(toy, wrong):
    with pytest.raises(TypeError, match=r'register\(\) takes|path must look like'):
        toy.registry.register(wrong)
    assert len(toy.registry) == 0


def test_register_refuses_a_class_and_says_what_to_write(toy):
    class Mine(BaseBackend):
        backend_type = 'mine'

    with pytest.raises(TypeError, match=r'register\(Mine\(\)\)'):
        toy.registry.register(Mine)


@table(
    ('attribute', 'value', 'allowed'),
    [
        ('backend_type', 'base', 'a name'),
        ('backend_type', '', 'a name'),
        ('backend_type', '  ', 'a name'),
        ('backend_type', None, 'a name'),
        ('backend_type', 7, 'a name'),
        ('backend_type', 'two words', 'a name'),
        ('backend_type', 'a,b', 'a name'),
        ('backend_type', 'a|b', 'a name'),
        ('backend_type', 'a;b', 'a name'),
        ('backend_type', 'a=b', 'a name'),
        ('backend_type', 'vendor:a', 'a name'),
        ('backend_type', 'tab\tbed', 'a name'),
        ('backend_type', 'default', 'reserved'),
        ('backend_type', 'Default', 'reserved'),
        ('backend_type', 'triton', 'reserved'),
        ('backend_type', 'TRITON', 'reserved'),
        ('backend_type', 'reference', 'reserved'),
        ('backend_type', 'vendor', 'reserved'),
        ('backend_type', 'native', 'reserved'),
        ('kind', 'default', "'vendor'"),
        ('kind', 'sparse', "'vendor'"),
        ('kind', None, "'vendor'"),
        ('kind', ['vendor'], "'vendor'"),
        ('priority', True, 'number'),
        ('priority', '3', 'number'),
        ('priority', None, 'number'),
        ('priority', math.nan, 'number'),
        ('grad', True, "'none'"),
        ('grad', 'forward', "'none'"),
        ('devices', 'cuda', 'platforms'),
        ('devices', ('gpu',), 'platforms'),
        ('devices', 5, 'platforms'),
        ('devices', {'q': 'cuda'}, 'platforms'),
        ('devices', {'q': ('gpu',)}, 'platforms'),
        ('devices', {'q': None}, 'platforms'),
        ('devices', (torch.device('cpu'),), 'platforms'),
        ('dtypes', 'bfloat16', 'dtype'),
        ('dtypes', ('bfloat16',), 'dtype'),
        ('dtypes', torch.bfloat16, 'dtype'),
        ('dtypes', {'q': torch.bfloat16}, 'dtype'),
        ('dtypes', {'q': ('bf16',)}, 'dtype'),
        ('min_capability', 9, r'\(9, 0\)'),
        ('min_capability', (9.0, 0), r'\(9, 0\)'),
        ('min_capability', '9.0', r'\(9, 0\)'),
        ('min_capability', (9,), r'\(9, 0\)'),
        ('min_capability', (9, 0, 1), r'\(9, 0\)'),
        ('min_capability', (True, False), r'\(9, 0\)'),
        ('extra_env', 'FLA_X', 'tuple'),
        ('extra_env', (1,), 'tuple'),
        ('extra_env', None, 'tuple'),
        ('extra_env', ('',), 'tuple'),
        ('env_var', '', 'variable'),
        ('env_var', 3, 'variable'),
        ('env_var', ('FLA_X',), 'variable'),
        ('env_var', 'FLA_X=1', 'variable'),
        ('default_enable', '0', 'bool'),
        ('default_enable', 0, 'bool'),
        ('default_enable', None, 'bool'),
        ('package_name', 3, 'module'),
        ('package_name', '', 'module'),
        ('package_name', 'flash-kda', 'module'),
        ('package_name', 'flash_kda>=1', 'module'),
        ('package_version', 1.2, 'version'),
        ('package_version', 'one dot two', 'version'),
        ('package_version', '>=', 'version'),
        ('package_version', '1.2', 'version'),
        ('package_version', '>=1.2', 'package_name'),
        ('vendor', 3, 'vendor'),
        ('vendor', '', 'vendor'),
        ('vendor', 'a,b', 'vendor'),
        ('tolerance', 1e-3, 'dtype'),
        ('tolerance', {'bfloat16': 1e-3}, 'dtype'),
        ('tolerance', {torch.bfloat16: '1e-3'}, 'dtype'),
        ('tolerance', {torch.bfloat16: -1.0}, 'dtype'),
        ('traceable', 'no', 'bool'),
        ('traceable', None, 'bool'),
        ('verified', 'yes', 'bool'),
        ('retryable', RuntimeError, 'exception'),
        ('retryable', ('RuntimeError',), 'exception'),
        ('retryable', (int,), 'exception'),
        ('retryable', None, 'exception'),
    ],
)
def test_a_bad_declaration_names_attribute_value_and_choices(toy, attribute, value, allowed):
    declared = {'backend_type': 'a', attribute: value}
    backend = type('Wrong', (BaseBackend,), declared)()
    with pytest.raises(RegistrationError) as caught:
        toy.registry.register(backend)
    text = str(caught.value)
    assert f'Wrong.{attribute}' in text
    assert repr(value) in text
    with pytest.raises(RegistrationError, match=allowed):
        toy.registry.register(backend)
    assert len(toy.registry) == 0


@pytest.mark.parametrize(
    'attributes',
    [
        {'devices': ['cuda', 'rocm']},
        {'devices': {'q': ('cpu',), 'k': ('cpu', 'cuda')}},
        {'devices': ('meta', 'cpu')},
        {'dtypes': [torch.float32]},
        {'dtypes': {torch.float32}},
        {'dtypes': {'q': (torch.float32,), 'k': (torch.float32, torch.bfloat16)}},
        {'min_capability': (9, 0)},
        {'extra_env': ['FLA_X']},
        {'priority': 2.5},
        {'priority': -1},
        {'priority': math.inf},
        {'package_name': 'torch', 'package_version': '>=2'},
        {'package_name': 'torch.nn'},
        {'package_name': 'torch', 'package_version': 'torch>=2,<99'},
        {'vendor': 'ACME'},
        {'tolerance': {torch.bfloat16: 1e-2, torch.float32: 0}},
        {'retryable': (NotImplementedError,)},
        {'retryable': [OSError, RuntimeError]},
        {'kind': 'native'},
        {'traceable': False, 'verified': False},
    ],
    ids=lambda attributes: '-'.join(attributes),
)
def test_good_declarations_are_taken_and_run(toy, attributes):
    toy.add('a', **attributes)
    assert toy.ran() in ('a', 'default')
    assert 'a' in toy.registry


def test_a_reference_may_be_called_reference(toy):
    toy.add('reference', kind='reference')
    assert toy.ran() == 'default'
    with pytest.raises(RegistrationError, match='reserved'):
        toy.add('reference')


def test_properties_may_declare(toy):
    class Computed(BaseBackend):
        @property
        def backend_type(self):
            return 'computed'

        @property
        def devices(self):
            return ('cpu',)

        def f(self, q, k, scale=None, flag=False):
            return 'computed'

    toy.registry.register(Computed())
    assert toy.f(Q, Q) == 'computed'


@pytest.mark.parametrize('value', [True, False])
@pytest.mark.parametrize('form', ['bool', 'function', 'lambda', 'static', 'class'])
def test_default_enable_forms(toy, form, value):
    def enabled():
        return value

    forms = {
        'bool': value,
        'function': enabled,
        'lambda': lambda: value,
        'static': staticmethod(enabled),
        'class': classmethod(lambda cls: value),
    }
    backend = toy.add('a', default_enable=forms[form])
    assert toy.ran() == ('a' if value else 'default')
    assert backend.is_enabled() is value
    assert type(backend).is_enabled() is value
    assert backend.can_use() is value


@pytest.mark.parametrize('value', ['1', '0'])
def test_a_set_toggle_wins_over_every_default_enable(toy, monkeypatch, value):
    toy.add('a', default_enable=lambda: value == '0', env_var='FLA_REGISTRY_A')
    assert toy.ran() == ('a' if value == '0' else 'default')
    monkeypatch.setenv('FLA_REGISTRY_A', value)
    assert toy.ran() == ('default' if value == '0' else 'a')


@pytest.mark.parametrize('where', ['default_enable', 'is_enabled', 'is_enabled with a variable'])
def test_an_enabled_question_that_raises_harms_no_sibling(toy, caplog, monkeypatch, where):
    def boom(*_):
        raise ZeroDivisionError('not today')

    def reading(cls):
        return 1 / int(os.environ.get('FLA_REGISTRY_BOOM', '0')) > 0

    broken = {
        'default_enable': {'default_enable': boom},
        'is_enabled': {'is_enabled': classmethod(boom)},
        'is_enabled with a variable': {'is_enabled': classmethod(reading), 'extra_env': ('FLA_REGISTRY_BOOM',)},
    }[where]
    toy.add('broken', priority=1, **broken)
    toy.add('good', priority=2)
    for _ in range(3):
        assert toy.ran() == 'good'
    said = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(said) == 1
    assert 'broken' in said[0].getMessage()
    assert said[0].exc_info
    assert explain(toy.f, Q, Q)['broken'].verdict == 'disabled'
    assert 'disabled' in toy.f.backends['broken']
    with strict_mode():
        with pytest.raises(BackendBugError, match='broken'):
            toy.ran()


# -- reading ------------------------------------------------------------------------------------------------------------


def test_reading_a_registry(toy):
    a, b = toy.add('a'), toy.add('b')
    assert list(toy.registry) == [a, b]
    assert len(toy.registry) == 2
    assert 'a' in toy.registry
    assert 'z' not in toy.registry
    assert toy.registry.get('b') is b
    assert toy.registry.get('z') is None
    assert 'a, b' in repr(toy.registry)


def test_ties_keep_registration_order_and_priority_wins(toy):
    for name, priority in [('a', 5), ('b', 5), ('c', 1), ('d', 5)]:
        toy.add(name, priority=priority)
    assert list(toy.f.backends) == ['c', 'a', 'b', 'd', 'default']


def test_provenance_is_the_line_that_registered(toy):
    backend = make()
    handle = toy.registry.register(backend)
    line = sys._getframe().f_lineno - 1
    entry = toy.registry.registrations()[0]
    assert entry.origin == f'{__file__}:{line}'
    assert entry.by == 'user'
    assert snapshot()[toy.op]['a']['origin'] == f'{__file__}:{line}'
    assert f'{__file__}:{line}' in describe(toy.op)
    handle.remove()
    toy.registry.register('tests.backends.no_such_module:Thing')
    assert toy.registry.registrations()[0].origin == f'{__file__}:{sys._getframe().f_lineno - 1}'


def test_snapshot_is_a_picture(toy):
    toy.add('a')
    before = snapshot()
    toy.add('b')
    assert list(before[toy.op]) == ['a']
    assert list(snapshot()[toy.op]) == ['a', 'b']
    with pytest.raises(TypeError):
        before[toy.op]['a']['priority'] = 1
    with pytest.raises(TypeError):
        before[toy.op]['z'] = {}


# -- handles ------------------------------------------------------------------------------------------------------------


def test_a_handle_takes_its_registration_back(toy):
    toy.add('a')
    assert toy.ran() == 'a'
    toy.handle.remove()
    assert toy.ran() == 'default'
    toy.handle.remove()
    assert toy.ran() == 'default'


def stack(toy, caplog):
    """Three backends named 'a', each from another place."""
    handles = [toy.registry.register(make(answer='first'))]
    handles.append(toy.registry.register(make(answer='second')))
    handles.append(toy.registry.register(make(answer='third')))
    caplog.clear()
    return handles


def test_handles_taken_back_in_reverse(toy, caplog):
    first, second, third = stack(toy, caplog)
    for handle, left in [(third, 'second'), (second, 'first')]:
        handle.remove()
        assert toy.f(Q, Q) == left
    first.remove()
    assert toy.ran() == 'default'


def test_handles_taken_back_out_of_order(toy, caplog):
    first, second, third = stack(toy, caplog)
    second.remove()
    assert toy.f(Q, Q) == 'third'
    third.remove()
    assert toy.f(Q, Q) == 'first'
    second.remove()
    third.remove()
    assert toy.f(Q, Q) == 'first'
    first.remove()
    assert toy.ran() == 'default'


def test_first_handle_taken_back_first(toy, caplog):
    first, second, third = stack(toy, caplog)
    first.remove()
    assert toy.f(Q, Q) == 'third'
    third.remove()
    assert toy.f(Q, Q) == 'second'
    second.remove()
    assert toy.ran() == 'default'


def test_a_replacement_inherits_its_place_among_equals(toy):
    toy.registry.register(make('a'))
    toy.registry.register(make('b'))
    handle = toy.registry.register(make('a', answer='new a'))
    assert toy.f(Q, Q) == 'new a'
    assert list(toy.f.backends) == ['a', 'b', 'default']
    handle.remove()
    assert toy.f(Q, Q) == 'a'


def test_removing_while_another_registry_has_the_same_backend():
    one, two = Toy(), Toy()
    backend = make()
    handle = one.registry.register(backend)
    two.registry.register(backend)
    assert one.f(Q, Q) == two.f(Q, Q) == 'a'
    handle.remove()
    assert one.ran() == 'default'
    assert two.f(Q, Q) == 'a'


def test_unregister_removes_every_registration_of_a_name(toy, caplog):
    stack(toy, caplog)
    toy.registry.register(make('other'))
    toy.registry.unregister('a')
    assert toy.f(Q, Q) == 'other'
    with pytest.raises(UnknownNameError, match=r"'othr'.*Did you mean 'other'"):
        toy.registry.unregister('othr')


def test_two_places_warn_with_both_and_the_newest_wins(toy, caplog):
    toy.registry.register(make(answer='old'))
    first = sys._getframe().f_lineno - 1
    toy.registry.register(make(answer='new'))
    second = sys._getframe().f_lineno - 1
    assert toy.f(Q, Q) == 'new'
    (text,) = warnings_of(caplog)
    assert f'{__file__}:{first}' in text
    assert f'{__file__}:{second}' in text
    assert "'a'" in text
    assert toy.op in text


def run_cell(source, names, filename):
    exec(compile(source, filename, 'exec'), names)


CELL = """
class Mine(BaseBackend):
    backend_type = 'mine'
    def f(self, q, k, scale=None, flag=False):
        return ANSWER
handle = registry.register(Mine())
"""


@pytest.mark.parametrize(
    ('one', 'two'),
    [
        ('<ipython-input-3-0badc0de>', '<ipython-input-4-0badc0de>'),
        ('elsewhere/ipykernel_11/1234.py', 'elsewhere/ipykernel_11/5678.py'),
        ('elsewhere/ipython-input-1-1234.py', 'elsewhere/ipython-input-2-5678.py'),
        ('module.py', 'module.py'),
    ],
)
def test_a_notebook_cell_run_again_replaces_silently(toy, caplog, one, two):
    names = {'BaseBackend': BaseBackend, 'registry': toy.registry, '__name__': '__main__', 'ANSWER': 'one'}
    run_cell(CELL, names, one)
    assert toy.f(Q, Q) == 'one'
    names['ANSWER'] = 'two'
    old = names['handle']
    run_cell(CELL, names, two)
    assert toy.f(Q, Q) == 'two'
    assert not warnings_of(caplog)
    assert len(toy.registry) == 1
    old.remove()
    assert toy.f(Q, Q) == 'two'
    names['handle'].remove()
    assert toy.ran() == 'default'


def test_an_edited_notebook_cell_replaces_silently(toy, caplog):
    names = {'BaseBackend': BaseBackend, 'registry': toy.registry, '__name__': '__main__', 'ANSWER': 'one'}
    run_cell(CELL, names, 'elsewhere/ipykernel_11/1234.py')
    run_cell('# a line more\n' + CELL.replace('ANSWER', "'edited'"), names, 'elsewhere/ipykernel_11/5678.py')
    assert toy.f(Q, Q) == 'edited'
    assert not warnings_of(caplog)
    names['handle'].remove()
    assert toy.ran() == 'default'


# -- listeners ----------------------------------------------------------------------------------------------------------


def test_listeners_hear_of_registration_and_removal(toy):
    heard, everywhere = [], []
    end = toy.registry.add_listener(lambda event, registry, entry: heard.append((event, registry, entry.name)))
    end_all = default_dispatcher().add_listener(lambda event, registry, entry: everywhere.append((event, entry.name)))
    toy.add('a')
    toy.handle.remove()
    assert heard == [('registered', toy.registry, 'a'), ('removed', toy.registry, 'a')]
    assert everywhere == [('registered', 'a'), ('removed', 'a')]
    end()
    end()
    Toy().add('b')
    assert len(heard) == 2
    assert everywhere[-1] == ('registered', 'b')
    end_all()
    toy.add('c')
    assert everywhere[-1] == ('registered', 'b')


def test_listeners_run_outside_the_lock(toy):
    free = []

    def listener(event, registry, entry):
        def take():
            got = lock.acquire(timeout=5)
            free.append(got)
            if got:
                lock.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()

    toy.registry.add_listener(listener)
    toy.add('a')
    toy.handle.remove()
    assert free == [True, True]


def test_a_raising_listener_harms_nobody(toy, caplog):
    heard = []

    def broken(*_):
        raise ValueError('deaf')

    toy.registry.add_listener(broken)
    toy.registry.add_listener(lambda *_: heard.append(1))
    toy.add('a')
    assert toy.ran() == 'a'
    assert heard == [1]
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert 'listener' in record.getMessage()
    assert record.exc_info


def test_a_listener_may_call_register_and_dispatch(toy):
    ran = []

    def listener(event, registry, entry):
        if entry.name == 'a':
            toy.add('b', priority=1)
            ran.append(toy.ran())

    toy.registry.add_listener(listener)
    toy.add('a')
    assert ran == ['b']


# -- paths --------------------------------------------------------------------------------------------------------------


def write_backend(folder, monkeypatch, name, source):
    monkeypatch.syspath_prepend(str(folder))
    (folder / f'{name}.py').write_text(source)
    monkeypatch.delitem(sys.modules, name, raising=False)


GOOD = """
from fla.backends import BaseBackend
class Thing(BaseBackend):
    backend_type = 'thing'
    def f(self, q, k, scale=None, flag=False):
        return 'thing'
instance = Thing()
number = 3
"""

BAD_INIT = """
from fla.backends import BaseBackend
class Thing(BaseBackend):
    backend_type = 'thing'
    def __init__(self):
        raise OSError('no driver')
"""


def test_a_path_is_imported_at_the_first_call(toy, tmp_path, monkeypatch):
    write_backend(tmp_path, monkeypatch, 'path_lazy', GOOD)
    toy.registry.register('path_lazy:Thing')
    assert 'path_lazy' not in sys.modules
    assert list(toy.registry) == []
    assert toy.f(Q, Q) == 'thing'
    assert 'path_lazy' in sys.modules
    assert toy.registry.get('thing') is not None
    assert snapshot()[toy.op]['thing']['impl_id'] == 'vendor.thing'


def test_a_path_may_name_an_instance(toy, tmp_path, monkeypatch):
    write_backend(tmp_path, monkeypatch, 'path_instance', GOOD)
    toy.registry.register('path_instance:instance')
    assert toy.f(Q, Q) == 'thing'


def test_a_path_keeps_its_place_and_its_handle(toy, tmp_path, monkeypatch):
    write_backend(tmp_path, monkeypatch, 'path_place', GOOD)
    handle = toy.registry.register('path_place:Thing')
    toy.registry.register(make('later'))
    assert toy.f(Q, Q) == 'thing'
    assert list(toy.f.backends) == ['thing', 'later', 'default']
    handle.remove()
    assert toy.f(Q, Q) == 'later'


def test_a_path_that_loads_later_does_not_cover_a_newer_registration(toy, tmp_path, monkeypatch, caplog):
    write_backend(tmp_path, monkeypatch, 'path_older', GOOD)
    toy.registry.register('path_older:Thing')
    handle = toy.registry.register(make('thing', answer='newer'))
    assert toy.f(Q, Q) == 'newer'
    (text,) = warnings_of(caplog)
    assert "'thing'" in text
    handle.remove()
    assert toy.f(Q, Q) == 'thing'


def test_the_same_path_again_replaces_silently(toy, tmp_path, monkeypatch, caplog):
    write_backend(tmp_path, monkeypatch, 'path_twice', GOOD)
    toy.registry.register('path_twice:Thing')
    toy.registry.register('path_twice:Thing')
    assert toy.f(Q, Q) == 'thing'
    handle = toy.registry.register('path_twice:Thing')
    assert toy.f(Q, Q) == 'thing'
    assert not warnings_of(caplog)
    handle.remove()
    assert toy.ran() == 'default'


@pytest.mark.parametrize(
    ('source', 'what', 'error', 'loud'),
    [
        ('import surely_not_installed_zz', 'Thing', 'surely_not_installed_zz', False),
        ('import surely_not_installed_zz.part', 'Thing', 'surely_not_installed_zz', False),
        ('from torch import surely_no_such_name', 'Thing', 'surely_no_such_name', True),
        ('1 / 0', 'Thing', 'ZeroDivisionError', True),
        ('def broken(:\n', 'Thing', 'SyntaxError', True),
        (GOOD, 'Missing', 'Missing', True),
        (GOOD, 'number', 'BaseBackend', True),
        (GOOD.replace("backend_type = 'thing'", "backend_type = 'triton'"), 'Thing', 'reserved', True),
        (BAD_INIT, 'Thing', 'no driver', True),
        (None, 'Thing', 'No module named', True),
    ],
)
def test_one_path_that_fails_harms_no_sibling(toy, tmp_path, monkeypatch, caplog, source, what, error, loud):
    name = f'path_broken_{toy.op}'
    if source is not None:
        write_backend(tmp_path, monkeypatch, name, source)
    write_backend(tmp_path, monkeypatch, f'{name}_sibling', GOOD)
    caplog.set_level(logging.INFO, logger='fla')
    toy.registry.register(f'{name}:{what}')
    toy.registry.register(f'{name}_sibling:Thing')
    for _ in range(3):
        assert toy.f(Q, Q) == 'thing'
    said = [r for r in caplog.records if f'{name}:{what}' in r.getMessage() and 'is out' in r.getMessage()]
    assert len(said) == 1
    assert (said[0].levelno >= logging.WARNING) is loud
    assert bool(said[0].exc_info) is loud
    report = explain(toy.f, Q, Q)[f'{name}:{what}']
    assert report.verdict == 'unavailable'
    assert error in report.reason
    assert any(f'{name}:{what}' in line and error in line for line in validate())
    assert f'{name}:{what}' in describe(toy.op)
    assert 'cannot be imported' in toy.f.backends[f'{name}:{what}']


def test_a_path_that_failed_is_tried_again_by_refresh(toy, tmp_path, monkeypatch, caplog):
    write_backend(tmp_path, monkeypatch, 'path_repaired', '1 / 0')
    toy.registry.register('path_repaired:Thing')
    assert toy.ran() == 'default'
    write_backend(tmp_path, monkeypatch, 'path_repaired', GOOD + '# longer, so that no cached bytecode fits\n')
    assert toy.ran() == 'default'
    refresh()
    assert toy.f(Q, Q) == 'thing'


def test_a_path_that_fails_raises_under_strict(toy, tmp_path, monkeypatch):
    write_backend(tmp_path, monkeypatch, 'path_strict', '1 / 0')
    toy.registry.register('path_strict:Thing')
    with strict_mode():
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                toy.f(Q, Q)
    assert toy.ran() == 'default'


def test_a_missing_optional_package_is_fine_under_strict(toy, tmp_path, monkeypatch):
    write_backend(tmp_path, monkeypatch, 'path_optional', 'import surely_not_installed_zz')
    toy.registry.register('path_optional:Thing')
    with strict_mode():
        assert toy.ran() == 'default'


# -- signatures ---------------------------------------------------------------------------------------------------------


def drifting(method='f'):
    def f(self, q, k, scale=1.0, flag=False, chunk=64):
        return 'drift'

    def f_verifier(self, q, chunk=64):
        return True, None

    members = {'f': f} if method == 'f' else {'f': make().f.__func__, 'f_verifier': f_verifier}
    return type('Drifting', (BaseBackend,), {'backend_type': 'drift', **members})()


@pytest.mark.parametrize('first', ['function', 'backend'])
def test_drift_warns_once_with_both_places(caplog, first):
    registry = BackendRegistry(f'drift_{first}')

    def define():
        @dispatch(f'drift_{first}')
        def f(q, k, scale=None, flag=False):
            return 'default'

        return f

    if first == 'function':
        function = define()
        registry.register(drifting())
        assert len(warnings_of(caplog)) == 2
    else:
        registry.register(drifting())
        function = define()
    for _ in range(2):
        assert function(Q, Q) == 'drift'
        assert explain(function, Q, Q).winner == 'drift'
    said = warnings_of(caplog)
    assert len(said) == 2
    (unknown,) = [text for text in said if "'chunk'" in text]
    (default,) = [text for text in said if "'scale'" in text]
    assert 'unknown to the public function' in unknown
    assert '1.0' in default
    assert 'None' in default
    for text in said:
        assert text.count(__file__) == 2
        assert 'Drifting.f' in text
    assert any("'chunk'" in line for line in validate())


def test_drift_of_a_verifier_warns(toy, caplog):
    toy.registry.register(drifting('verifier'))
    (text,) = warnings_of(caplog)
    assert 'f_verifier' in text
    assert "'chunk'" in text


def test_drift_is_an_error_under_strict(toy):
    with strict_mode():
        with pytest.raises(RegistrationError, match="'scale'"):
            toy.registry.register(drifting())
    assert len(toy.registry) == 0


def test_drift_from_the_environment_is_an_error(toy, monkeypatch):
    monkeypatch.setenv('FLA_STRICT', '1')
    refresh()
    with pytest.raises(RegistrationError, match=r'Drifting\.f'):
        toy.registry.register(drifting())


def test_a_parameter_that_nobody_can_fill_takes_the_backend_out(toy, caplog):
    def f(self, q, k, workspace, scale=None, flag=False):
        return 'never'

    toy.registry.register(type('Needy', (BaseBackend,), {'backend_type': 'needy', 'f': f})())
    assert toy.ran() == 'default'
    report = explain(toy.f, Q, Q)['needy']
    assert report.verdict == 'unavailable'
    assert "'workspace'" in report.reason


@pytest.mark.parametrize('method', ['f', 'f_verifier'])
def test_a_method_without_a_signature_harms_no_sibling(toy, caplog, method):
    members = {'f': make().f.__func__, method: staticmethod(torch.add)}
    toy.add('good')
    backend = type('Opaque', (BaseBackend,), {'backend_type': 'opaque', 'priority': 1, **members})()
    toy.registry.register(backend)
    (text,) = warnings_of(caplog)
    assert f'Opaque.{method}' in text
    assert 'signature' in text
    assert explain(toy.f, Q, Q)['opaque'].verdict == 'unavailable'
    assert 'signature' in explain(toy.f, Q, Q)['opaque'].reason
    assert toy.ran() == 'good'
    assert any('signature' in line for line in validate())
    with strict_mode(), pytest.raises(RegistrationError, match='signature'):
        toy.registry.register(backend)


def test_pending_names_are_reported(caplog):
    registry = BackendRegistry('pending_op')
    registry.register(make('early', method='not_yet'))
    assert not warnings_of(caplog)
    assert any('pending_op.early' in line and 'not_yet' in line for line in validate())
    assert 'pending: pending_op.early: not_yet' in describe()

    @dispatch('pending_op')
    def not_yet(q, k, scale=None, flag=False):
        return 'default'

    assert not any('pending_op.early' in line for line in validate())
    assert not_yet(Q, Q) == 'early'


def test_a_verifier_without_a_method_is_reported(toy):
    members = {'backend_type': 'lonely', 'g_verifier': lambda self, q: (True, None), 'f': make().f.__func__}
    toy.registry.register(type('Lonely', (BaseBackend,), members)())
    assert any('g_verifier' in line and 'lonely' in line for line in validate())


def test_facts_for_a_parameter_that_nobody_has_are_reported(toy):
    toy.add('a', dtypes={'q': (torch.float32,), 'kk': (torch.float32,)}, devices={'w': ('cpu',)})
    assert toy.ran() == 'a'
    said = [line for line in validate() if f'{toy.op}.a' in line]
    assert len(said) == 2
    assert any("dtypes names parameter 'kk'" in line for line in said)
    assert any("devices names parameter 'w'" in line for line in said)


def test_looking_at_a_backend_asks_no_property(toy):
    class Proud(BaseBackend):
        backend_type = 'proud'

        @property
        def handle(self):
            raise RuntimeError('needs a GPU')

        def f(self, q, k, scale=None, flag=False):
            return 'proud'

    toy.registry.register(Proud())
    validate()
    describe(toy.op)
    assert toy.f(Q, Q) == 'proud'


# -- everything else ----------------------------------------------------------------------------------------------------


def test_star_serves_every_operation_last_among_equals():
    one, two = Toy(), Toy()
    handle = BackendRegistry('*').register(make('everywhere'))
    assert one.f(Q, Q) == two.f(Q, Q) == 'everywhere'
    one.registry.register(make('own'))
    assert one.f(Q, Q) == 'own'
    assert list(one.f.backends) == ['own', 'everywhere', 'default']
    assert two.f(Q, Q) == 'everywhere'
    handle.remove()
    assert two.ran() == 'default'


def test_star_with_a_better_priority_comes_first():
    toy = Toy()
    toy.registry.register(make('own'))
    BackendRegistry('*').register(make('everywhere', priority=1))
    assert toy.f(Q, Q) == 'everywhere'


def test_star_and_own_backend_of_one_name():
    toy = Toy()
    BackendRegistry('*').register(make('same', answer='star'))
    toy.registry.register(make('same', answer='own'))
    assert toy.f(Q, Q) == 'own'


@pytest.mark.parametrize('attribute', ['priority', 'env_var', 'default_enable', 'devices'])
def test_a_changed_attribute_is_seen_by_the_next_call(toy, attribute, monkeypatch):
    first, second = toy.add('a'), toy.add('b')
    assert toy.ran() == 'a'
    monkeypatch.setenv('FLA_REGISTRY_OFF', '0')
    value = {'priority': 9, 'env_var': 'FLA_REGISTRY_OFF', 'default_enable': False, 'devices': ('npu',)}[attribute]
    for owner in (first, type(first)):
        monkeypatch.setattr(owner, attribute, value)
        assert toy.ran() == 'b'
        monkeypatch.undo()
        monkeypatch.setenv('FLA_REGISTRY_OFF', '0')
        assert toy.ran() == 'a'
    assert second.priority == 5


def test_a_replaced_method_is_seen_by_the_next_call(toy, monkeypatch):
    backend = toy.add('a')
    assert toy.ran() == 'a'
    monkeypatch.setattr(type(backend), 'f', lambda self, q, k, scale=None, flag=False: 'patched')
    assert toy.f(Q, Q) == 'patched'
    monkeypatch.setattr(type(backend), 'f_verifier', lambda self, q: (False, 'no'), raising=False)
    assert toy.ran() == 'default'
    monkeypatch.undo()
    assert toy.ran() == 'a'


def test_a_backend_that_keeps_state_is_not_planned_anew(toy):
    class Counting(BaseBackend):
        backend_type = 'counting'
        calls = 0

        def f(self, q, k, scale=None, flag=False):
            self.calls += 1
            self.workspace = q
            type(self).last = k
            return 'counting'

    backend = Counting()
    toy.registry.register(backend)
    toy.f(Q, Q)
    code = toy.f.__code__
    for _ in range(5):
        assert toy.f(Q, Q) == 'counting'
    assert toy.f.__code__ is code
    assert backend.calls == 6


def test_reset_forgets_users_and_keeps_packages(library):
    from tests.backends.library import backend_source

    library.add('op', backend_source('own', 'registry'))
    f, dispatcher = library.f('op'), library.dispatcher
    assert f() == 'own'
    guest = type('Guest', (BaseBackend,), {'backend_type': 'guest', 'priority': 1, 'f': lambda self, x=None: 'guest'})
    dispatcher.registry('op').register(guest())
    assert f() == 'guest'
    dispatcher.registry('op').unregister('own')
    dispatcher.registry('op').unregister('guest')
    assert f() == 'default'
    dispatcher.reset()
    assert f() == 'own'
    assert library.loads('op') == 1


def test_reset_ends_listeners(toy):
    heard = []
    toy.registry.add_listener(lambda *_: heard.append(1))
    default_dispatcher().add_listener(lambda *_: heard.append(2))
    reset()
    toy.add('a')
    assert heard == []


def test_a_new_backend_at_the_address_of_an_old_one_is_asked_itself(toy, monkeypatch):
    """Answers are cached per instance; a freed instance must not answer for the next one at its address."""
    monkeypatch.setenv('FLA_REGISTRY_ID', 'x')

    def one(answer):
        def is_enabled(cls):
            return answer and os.environ.get('FLA_REGISTRY_ID') == 'x'

        return make(is_enabled=classmethod(is_enabled), extra_env=('FLA_REGISTRY_ID',))

    for n in range(40):
        handle = toy.registry.register(one(n % 2 == 0))
        assert (toy.f(Q, Q) if n % 2 == 0 else toy.ran()) == ('a' if n % 2 == 0 else 'default')
        handle.remove()


def test_every_declared_fact_is_read():
    """A declared fact without a reader would not be enforced."""
    package = Path(fla.backends.__file__).parent
    read = set()
    for file in package.rglob('*.py'):
        if file.name != 'declaration.py':  # checks the form of all facts, and enforces none
            nodes = ast.walk(ast.parse(file.read_text(encoding='utf-8')))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    facts = {name for name, kind in vars(BaseBackend)['__annotations__'].items() if 'ClassVar' in str(kind)}
    assert {'priority', 'devices', 'dtypes', 'min_capability', 'grad'} <= facts
    # read by tests of kernels
    assert facts - read <= {'tolerance'}


def test_a_function_declared_in_two_files_warns_with_both(caplog):
    source = "@dispatch('registry_twice')\ndef f(q):\n    return VERSION\n"
    made = []
    for file in ('elsewhere/one.py', 'elsewhere/two.py'):
        scope = {'dispatch': dispatch, 'VERSION': file, '__name__': 'registry_twice'}
        exec(compile(source, file, 'exec'), scope)
        made.append(scope['f'])
    (text,) = warnings_of(caplog)
    assert 'registry_twice.f' in text
    assert 'elsewhere/one.py:' in text
    assert 'elsewhere/two.py:' in text
    BackendRegistry('registry_twice')
    assert [f(Q) for f in made] == ['elsewhere/one.py', 'elsewhere/two.py']
    assert default_dispatcher().catalogue.named('registry_twice.f') is made[1]
