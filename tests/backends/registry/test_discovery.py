"""Discovery of an operation's own backends: lazy, once, and without one failure affecting another package."""

import inspect
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fla.backends import (
    BaseBackend,
    UnknownNameError,
    default_dispatcher,
    describe,
    dispatch,
    explain,
    prefer_backend,
    strict_mode,
    validate,
)
from fla.backends.observe.describe import describe as describe_namespace
from tests.backends.library import Library, backend_source


def errors_of(caplog):
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


# -- lazily -------------------------------------------------------------------------------------------------------------


def test_backends_are_imported_at_the_first_call_and_never_earlier(library):
    library.add('op', backend_source('a', 'registry'))
    library.add('other', backend_source('b', 'registry'))
    f = library.f('op')
    library.f('other')
    assert not library.loaded('op')
    inspect.signature(f)
    repr(f)
    repr(library.dispatcher.registry('op'))
    library.dispatcher.catalogue.functions()
    assert not library.loaded('op')
    assert f() == 'a'
    assert library.loaded('op')
    assert not library.loaded('other')
    assert f() == 'a'
    assert library.loads('op') == 1


@pytest.mark.parametrize('question', ['backends', 'explain', 'resolve', 'bind', 'scope', 'describe', 'validate'])
def test_a_question_about_backends_loads_them(library, question):
    library.add('op', backend_source('a', 'registry'))
    f, dispatcher = library.f('op'), library.dispatcher
    if question == 'backends':
        assert list(f.backends) == ['a', 'default']
    elif question == 'explain':
        assert explain(f).winner == 'a'
    elif question == 'resolve':
        assert f.resolve()() == 'a'
    elif question == 'bind':
        assert f.bind('a')() == 'a'
    elif question == 'scope':
        with prefer_backend('a', op='op', dispatcher=dispatcher):
            pass
    elif question == 'describe':
        assert 'op.f' in describe_namespace(dispatcher, 'op')
    else:
        validate(dispatcher)
    assert library.loads('op') == 1


def test_an_operation_without_a_backends_package(library, caplog):
    library.add('op')
    f = library.f('op')
    assert f() == 'default'
    assert list(f.backends) == ['default']
    assert not errors_of(caplog)
    assert not validate(library.dispatcher)


def test_an_operation_without_any_package_but_with_a_registry(library, caplog):
    dispatcher = library.dispatcher

    @dispatch('only_registered', dispatcher=dispatcher)
    def f(x=None, flag=False):
        return 'default'

    exec(backend_source('a', 'registry'), {'BaseBackend': BaseBackend, 'registry': dispatcher.registry('only_registered')})
    assert f() == 'a'
    assert not errors_of(caplog)


def test_the_module_of_an_operation_is_no_package(library):
    library.write(
        'ops/flat.py',
        f"""
        from {library.name} import dispatcher
        from fla.backends import dispatch

        @dispatch('flat', dispatcher=dispatcher)
        def f(x=None):
            return 'default'
        """,
    )
    assert library.f('flat')() == 'default'


def test_backends_may_be_a_plain_module(library):
    library.add('op')
    library.backends('op', backend_source('a', 'registry')).rename(library.root / library.name / 'ops/op/backends.py')
    (library.root / library.name / 'ops/op/backends').rmdir()
    assert library.f('op')() == 'a'


def test_nested_operations(library):
    library.add('family.member', backend_source('a', 'registry'))
    library.add('family.other.deep', backend_source('b', 'registry'))
    assert library.f('family.member')() == 'a'
    assert not library.loaded('family.other.deep')
    assert library.f('family.other.deep')() == 'b'
    dispatcher = library.dispatcher
    assert dispatcher.catalogue.entry('family.member.f').wrapper() == 'a'
    with prefer_backend('default', op='family.member', dispatcher=dispatcher):
        assert library.f('family.member')() == 'default'
        assert library.f('family.other.deep')() == 'b'


def test_nested_operations_are_known_before_they_are_loaded(library):
    library.add('family.member', backend_source('a', 'registry'))
    library.write('ops/family/kernels/__init__.py', '')
    library.write('ops/plain/__init__.py', '')
    dispatcher = library.dispatcher
    assert dispatcher.discovery.operations() == ['family', 'family.member', 'plain']
    assert not any(name.startswith(f'{library.name}.ops.family') for name in sys.modules)
    validate(dispatcher)
    assert library.loads('family.member') == 1


def test_modules_may_live_elsewhere(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    library = Library(tmp_path, "modules={'layers': f'{__name__}.layers.backends'}")
    library.write(
        'layers/__init__.py',
        f"""
        from {library.name} import dispatcher
        from fla.backends import dispatch

        @dispatch('layers', dispatcher=dispatcher)
        def f(x=None, flag=False):
            return 'default'
        """,
    )
    library.backends('layers', backend_source('a', 'registry'))
    (library.root / library.name / 'ops/layers/backends').rename(library.root / library.name / 'layers/backends')
    try:
        f = library.module('layers').f
        assert f'{library.name}.layers.backends' not in sys.modules
        assert f() == 'a'
        assert 'layers' in library.dispatcher.discovery.operations()
        assert library.dispatcher.registry('layers').registrations()[0].by == 'package'
    finally:
        library.forget()


# -- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('wrong', 'meant'), [('attentoin', 'attention'), ('family.membre', 'family.member'), ('famly.member', 'family.member')]
)
def test_a_misspelt_operation_raises_at_the_first_call_and_names_the_nearest(library, wrong, meant):
    library.add('attention', backend_source('a', 'registry'))
    library.add('family.member', backend_source('b', 'registry'))

    @dispatch(wrong, dispatcher=library.dispatcher)
    def f(x=None):
        return 'default'

    for _ in range(2):
        with pytest.raises(UnknownNameError) as caught:
            f()
        text = str(caught.value)
        assert repr(wrong) in text
        assert f"Did you mean '{meant}'?" in text
        assert __file__ in text
    with pytest.raises(UnknownNameError):
        list(f.backends)
    with pytest.raises(UnknownNameError):
        explain(f)


def test_a_misspelt_operation_of_fla_raises():
    @dispatch('no_such_operation_zz')
    def f(x=None):
        return 'default'

    with pytest.raises(UnknownNameError, match='no_such_operation_zz'):
        f()
    with pytest.raises(UnknownNameError, match='no_such_operation_zz'):
        describe('no_such_operation_zz')


def test_a_registry_made_later_makes_the_name_known():
    @dispatch('late_operation_zz')
    def f(x=None):
        return 'default'

    with pytest.raises(UnknownNameError):
        f()
    default_dispatcher().registry('late_operation_zz')
    assert f() == 'default'


@pytest.mark.parametrize('name', ['', ' ', 'two words', 'a..b', 'a.', 3, None, 'a-b'])
def test_dispatch_needs_the_name_of_an_operation(name):
    with pytest.raises(TypeError, match='operation'):
        dispatch(name)


# -- broken packages ----------------------------------------------------------------------------------------------------

BROKEN = {
    'ImportError': 'from torch import surely_no_such_name',
    'ModuleNotFoundError': 'import surely_not_installed_zz',
    'ModuleNotFoundError of its own': 'from . import no_such_submodule_zz',
    'ModuleNotFoundError of a sibling': 'import NAME.ops.no_such_operation_zz',
    'SyntaxError': 'def broken(:',
    'ZeroDivisionError': '1 / 0',
    'NotImplementedError': 'raise NotImplementedError("not on this machine")',
    'AssertionError': 'assert False, "never"',
}
KIND = {
    'ModuleNotFoundError of its own': 'ImportError',
    'ModuleNotFoundError of a sibling': 'ModuleNotFoundError',
}


@pytest.mark.parametrize('kind', BROKEN)
def test_a_broken_package_is_one_error_and_harms_nothing_else(library, caplog, kind):
    failing = BROKEN[kind].replace('NAME', library.name)
    partial = kind != 'SyntaxError'
    library.add('op', f'{backend_source("a", "registry")}\n{failing}\n{backend_source("late", "registry")}')
    library.add('other', backend_source('b', 'registry'))
    f = library.f('op')
    for _ in range(3):
        assert f() == ('a' if partial else 'default')
    assert library.f('other')() == 'b'
    (record,) = errors_of(caplog)
    text = record.getMessage()
    assert "'op'" in text
    assert f'{library.name}.ops.op.backends' in text
    assert KIND.get(kind, kind) in text
    assert record.exc_info
    # since Python 3.12, printing the traceback of `cannot import name` imports the package again to suggest a name
    again = 1 if kind == 'ModuleNotFoundError of its own' and sys.version_info >= (3, 12) else 0
    assert library.loads('op') == (1 + again if partial else 0)
    assert list(f.backends) == (['a', 'default'] if partial else ['default'])
    problems = validate(library.dispatcher)
    assert any("'op'" in line and KIND.get(kind, kind) in line for line in problems)
    assert len(errors_of(caplog)) == 1


def test_a_broken_package_is_tried_again_by_refresh(library, caplog):
    library.add('op', f'{backend_source("a", "registry")}\n1 / 0\n')
    f = library.f('op')
    assert f() == 'a'
    library.dispatcher.refresh()
    assert f() == 'a'
    assert library.loads('op') == 2
    assert len(library.dispatcher.registry('op')) == 1
    library.backends('op', f'{backend_source("a", "registry")}\n{backend_source("b", "registry", "priority = 1")}\n')
    assert f() == 'a'
    library.dispatcher.refresh()
    assert f() == 'b'
    assert list(f.backends) == ['b', 'a', 'default']
    assert not validate(library.dispatcher)
    library.dispatcher.refresh()
    assert f() == 'b'
    assert library.loads('op') == 3


def test_a_broken_package_raises_under_strict_each_time(library):
    library.add('op', f'{backend_source("a", "registry")}\n1 / 0\n')
    f = library.f('op')
    with strict_mode(dispatcher=library.dispatcher):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                f()
    assert f() == 'a'


def test_a_broken_operation_package_is_its_importers_error(library):
    library.add('op', backend_source('a', 'registry'))
    library.write('ops/op/__init__.py', '1 / 0')
    with pytest.raises(ZeroDivisionError):
        library.f('op')


def test_a_function_declared_outside_a_broken_operation_package(library, caplog):
    library.add('op', backend_source('a', 'registry'))
    library.write('ops/op/__init__.py', '1 / 0')

    @dispatch('op', dispatcher=library.dispatcher)
    def f(x=None):
        return 'default'

    assert f() == 'default'
    (record,) = errors_of(caplog)
    assert 'ZeroDivisionError' in record.getMessage()


@pytest.mark.parametrize('stop', ['KeyboardInterrupt', 'SystemExit'])
def test_an_interrupted_load_is_done_again(library, stop):
    interrupt = f'\nif len(LOADS) < 2: raise {stop}\n'
    library.add('op', backend_source('a', 'registry') + interrupt + backend_source('b', 'registry'))
    f = library.f('op')
    with pytest.raises(BaseException) as caught:
        f()
    assert type(caught.value).__name__ == stop
    assert not library.dispatcher.discovery.is_loading()
    assert f() == 'a'
    assert list(f.backends) == ['a', 'b', 'default']


def test_a_policy_that_names_a_broken_operation_harms_no_other(library, monkeypatch, caplog):
    library.add('op', backend_source('a', 'registry'))
    library.add('broken', backend_source('b', 'registry'))
    library.write('ops/broken/__init__.py', 'raise OSError("no driver")')
    monkeypatch.setenv(f'{library.prefix}_PER_OP', 'broken.f=b')
    assert library.f('op')() == 'a'
    assert any('no driver' in record.getMessage() for record in caplog.records)


# -- calls while loading ------------------------------------------------------------------------------------------------


def test_a_backend_module_may_call_its_own_operation_while_it_loads(library):
    library.add(
        'op',
        f"""
{backend_source('early', 'registry', 'priority = 2')}
from {library.name}.ops.op import f
WHILE_LOADING = [f(), f()]
{backend_source('late', 'registry', 'priority = 1')}
WHILE_LOADING.append(f())
""",
    )
    f = library.f('op')
    assert f() == 'late'
    assert library.module('ops.op.backends').WHILE_LOADING == ['early', 'early', 'late']
    assert f() == 'late'
    assert library.loads('op') == 1
    code = f.__code__
    assert f() == 'late'
    assert f.__code__ is code


def test_a_backend_module_imported_directly_may_call_its_operation(library):
    library.add(
        'op',
        f"""
from {library.name}.ops.op import f
WHILE_LOADING = f()
{backend_source('late', 'registry')}
""",
    )
    assert library.module('ops.op.backends').WHILE_LOADING == 'default'
    assert library.f('op')() == 'late'


def test_a_backend_module_may_call_another_operation_while_it_loads(library):
    library.add(
        'one',
        f"""
from {library.name}.ops.two import f as two
WHILE_LOADING = two()
{backend_source('a', 'registry')}
""",
    )
    library.add('two', backend_source('b', 'registry'))
    assert library.f('one')() == 'a'
    assert library.module('ops.one.backends').WHILE_LOADING == 'b'
    assert library.f('two')() == 'b'


def test_two_backend_modules_may_call_each_others_operation_while_they_load(library):
    for mine, theirs in (('one', 'two'), ('two', 'one')):
        library.add(
            mine,
            f"""
from {library.name}.ops.{theirs} import f as theirs
WHILE_LOADING = theirs()
{backend_source(mine, 'registry')}
""",
        )
    assert library.f('one')() == 'one'
    assert library.f('two')() == 'two'
    assert library.module('ops.two.backends').WHILE_LOADING == 'default'
    assert library.module('ops.one.backends').WHILE_LOADING == 'two'


def test_a_registration_by_path_may_call_the_operation_while_it_loads(library):
    library.add('op', f"registry.register('{library.name}.vendor:Backend_a')\n" + backend_source('b', 'registry'))
    call = f'\nfrom {library.name}.ops.op import f\nWHILE_LOADING = f()\n'
    library.write(
        'vendor.py',
        'from fla.backends import BaseBackend\n' + call + backend_source('a', '', 'priority = 1', register=False),
    )
    assert library.f('op')() == 'a'
    assert library.module('vendor').WHILE_LOADING == 'b'


def test_policies_may_be_entered_while_loading(library):
    library.add(
        'op',
        f"""
from fla.backends import use_backend
from {library.name}.ops.op import f
{backend_source('a', 'registry')}
with use_backend('default', op='op', dispatcher=dispatcher):
    WHILE_LOADING = [f()]
WHILE_LOADING.append(f())
""",
    )
    f = library.f('op')
    assert f() == 'a'
    assert library.module('ops.op.backends').WHILE_LOADING == ['default', 'a']


# -- threads ------------------------------------------------------------------------------------------------------------


def all_at_once(calls, timeout=30):
    """Runs each call on its own thread, all starting together; returns their results."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait(timeout)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout) for future in [pool.submit(run, call) for call in calls]]


def test_threads_that_race_the_first_call_import_once(library):
    library.add('op', f'import time\ntime.sleep(0.2)\n{backend_source("a", "registry")}\ntime.sleep(0.1)\n')
    f = library.f('op')
    assert all_at_once([f] * 8) == ['a'] * 8
    assert library.loads('op') == 1
    assert f() == 'a'


def test_threads_that_race_a_broken_package_get_one_error(library, caplog):
    library.add('op', f'import time\ntime.sleep(0.1)\n{backend_source("a", "registry")}\ntime.sleep(0.1)\n1 / 0\n')
    assert all_at_once([library.f('op')] * 6) == ['a'] * 6
    assert library.f('op')() == 'a'
    assert len([r for r in errors_of(caplog) if r.exc_info]) == 1


def test_threads_that_race_a_path_import_and_instantiate_once(library, caplog):
    library.add('op', f"registry.register('{library.name}.vendor:Backend_a')\nregistry.register('{library.name}.bad:B')\n")
    library.write(
        'vendor.py',
        'import time\ntime.sleep(0.2)\nfrom fla.backends import BaseBackend\n' + backend_source('a', '', register=False),
    )
    library.write('bad.py', 'import time\ntime.sleep(0.1)\n1 / 0\n')
    f = library.f('op')
    assert all_at_once([f] * 6) == ['a'] * 6
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert [entry.name for entry in library.dispatcher.registry('op').registrations()] == ['a', f'{library.name}.bad:B']


def test_two_threads_that_load_two_operations_that_call_each_other(library, caplog):
    """The threads take their import locks in opposite orders. Python detects that; dispatch must not treat it as a
    failure."""
    for mine, theirs in (('one', 'two'), ('two', 'one')):
        library.add(
            mine,
            f"""
import time
{backend_source('early_' + mine, 'registry', 'priority = 2')}
from {library.name}.ops.{theirs} import f as theirs
time.sleep(0.3)
WHILE_LOADING = theirs()
{backend_source('late_' + mine, 'registry', 'priority = 1')}
""",
        )
    one, two = library.f('one'), library.f('two')
    results = all_at_once([one, two, one, two])
    assert set(results) <= {'early_one', 'late_one', 'early_two', 'late_two'}
    assert (one(), two()) == ('late_one', 'late_two')
    assert (library.loads('one'), library.loads('two')) == (1, 1)
    assert not errors_of(caplog)
    assert not validate(library.dispatcher)


def test_a_thread_started_by_a_backend_module_may_call_what_is_loaded(library):
    """A module that waits for a thread which needs that module can only hang; another operation must work."""
    library.add('two', backend_source('b', 'registry'))
    body = f"""
import threading
from {library.name}.ops.two import f as two
found = []
thread = threading.Thread(target=lambda: found.append(two()))
thread.start()
thread.join(20)
{backend_source('a', 'registry')}
"""
    library.add('one', body)
    assert library.f('one')() == 'a'
    assert library.module('ops.one.backends').found == ['b']
