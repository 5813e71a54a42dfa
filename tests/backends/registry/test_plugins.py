"""Backends from other distributions and modules: entry points and the plugin variable."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import fla
from fla.backends import default_dispatcher, describe, dispatch, plugins, reset, validate
from fla.backends.registry.discovery import Plugin
from tests.backends.library import backend_source
from tests.backends.registry.test_discovery import all_at_once
from tests.backends.toy import Q, Toy

HEAD = 'from fla.backends import BaseBackend\nCALLS = []\n'


def plugin_source(name, operation='op', body='priority = 1', tail=''):
    """Returns source of a module whose `register` registers the backend `name` for an operation."""
    return f"""{HEAD}
{backend_source(name, '', body, register=False)}

def register(registries):
    CALLS.append(registries)
    registries({operation!r}).register(Backend_{name}())
{tail}
"""


def install(folder: Path, name: str, entry_points: str, version: str = '1.0', group: str = 'fla.backends') -> None:
    """Writes a distribution's metadata, as an installer does."""
    info = folder / f'{name.replace("-", "_")}-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
    (info / 'entry_points.txt').write_text(f'[{group}]\n{entry_points}\n')
    (info / 'RECORD').write_text('')
    (info / 'INSTALLER').write_text('hand\n')


@pytest.fixture
def plugged(library, tmp_path, monkeypatch):
    """A library with an operation `op`, and functions that add plugins to it."""
    library.add('op', backend_source('own', 'registry'))
    library.plugin_names = []

    def module(name, source):
        (tmp_path / f'{name}.py').write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        library.plugin_names.append(name)

    def variable(*names):
        monkeypatch.setenv(f'{library.prefix}_PLUGIN_MODULES', ','.join(names))

    library.plugin, library.variable = module, variable
    library.install = lambda name, points, version='1.0': install(
        tmp_path, name, points, version, f'{library.name}.backends'
    )
    yield library
    for name in library.plugin_names:
        sys.modules.pop(name, None)


# -- the variable -------------------------------------------------------------------------------------------------------


def test_plugin_modules_are_loaded_at_the_first_call(plugged):
    plugged.plugin('plug_one', plugin_source('one'))
    plugged.plugin('plug_two', plugin_source('two', body='priority = 2') + "__version__ = '2.5'\n")
    plugged.variable(' plug_one', '', 'plug_two ')
    f = plugged.f('op')
    assert 'plug_one' not in sys.modules
    assert f() == 'one'
    assert list(f.backends) == ['one', 'two', 'own', 'default']
    variable = f'{plugged.prefix}_PLUGIN_MODULES'
    assert plugged.dispatcher.plugins() == (
        Plugin('plug_one', variable, None, None),
        Plugin('plug_two', variable, '2.5', None),
    )
    assert [entry.by for entry in plugged.dispatcher.registry('op').registrations()] == ['plugin', 'plugin', 'package']
    f()
    plugged.dispatcher.plugins()
    assert len(sys.modules['plug_one'].CALLS) == 1


def test_asking_for_plugins_loads_them_and_no_operation(plugged):
    plugged.plugin('plug_ask', plugin_source('one'))
    plugged.variable('plug_ask')
    assert [plugin.name for plugin in plugged.dispatcher.plugins()] == ['plug_ask']
    assert not plugged.loaded('op')
    assert plugged.f('op')() == 'one'


def test_a_plugin_may_be_in_a_package_and_register_paths(plugged, tmp_path):
    package = tmp_path / 'plug_package'
    package.mkdir()
    (package / '__init__.py').write_text('')
    (package / 'hooks.py').write_text(
        "def register(registries):\n    registries['op'].register('plug_package.impl:Backend_deep')\n"
    )
    (package / 'impl.py').write_text(HEAD + backend_source('deep', '', 'priority = 1', register=False))
    plugged.variable('plug_package.hooks')
    f = plugged.f('op')
    plugged.dispatcher.plugins()
    assert 'plug_package.impl' not in sys.modules
    assert f() == 'deep'
    (entry, _) = plugged.dispatcher.registry('op').registrations()
    assert entry.path == 'plug_package.impl:Backend_deep'
    assert entry.origin.startswith(str(package / 'hooks.py'))


def test_a_plugin_for_every_operation(plugged):
    plugged.add('other', backend_source('own', 'registry'))
    plugged.plugin('plug_star', plugin_source('everywhere', operation='*'))
    plugged.variable('plug_star')
    assert plugged.f('op')() == 'everywhere'
    assert plugged.f('other')() == 'everywhere'


BAD = {
    'missing': (None, 'ModuleNotFoundError'),
    'optional dependency': ('import surely_not_installed_zz', 'surely_not_installed_zz'),
    'raises at import': ('1 / 0', 'ZeroDivisionError'),
    'syntax': ('def broken(:', 'SyntaxError'),
    'no hook': ('x = 1', 'register'),
    'hook is no function': ('register = 3', 'register'),
    'hook without argument': ('def register(): pass', 'TypeError'),
    'hook raises': ('def register(registries): raise OSError("no driver")', 'no driver'),
    'bad backend': ('def register(registries): registries("op").register(3)', 'TypeError'),
    'bad operation': ('def register(registries): registries("no such")', 'TypeError'),
}


@pytest.mark.parametrize('how', ['variable', 'entry point'])
@pytest.mark.parametrize('kind', BAD)
def test_a_failing_plugin_harms_no_other(plugged, caplog, kind, how):
    source, error = BAD[kind]
    plugged.plugin('plug_bad', source if source is not None else '')
    if source is None:
        (plugged.root / 'plug_bad.py').unlink()
    plugged.plugin('plug_good', plugin_source('good'))
    if how == 'variable':
        plugged.variable('plug_bad', 'plug_good')
    else:
        plugged.install('plug-bad', 'bad = plug_bad')
        plugged.install('plug-good', 'good = plug_good')
    f = plugged.f('op')
    for _ in range(2):
        assert f() == 'good'
    bad, good = sorted(plugged.dispatcher.plugins(), key=lambda plugin: plugin.name)
    assert error in bad.error
    assert good.error is None
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert bad.name in record.getMessage()
    assert record.exc_info
    assert any(bad.name in line and error in line for line in validate(plugged.dispatcher))


def test_what_a_failing_plugin_registered_before_it_failed_is_used(plugged, caplog):
    plugged.plugin('plug_half', plugin_source('half', tail='    raise OSError("later")\n'))
    plugged.variable('plug_half')
    assert plugged.f('op')() == 'half'
    assert 'later' in plugged.dispatcher.plugins()[0].error


def test_a_plugin_may_call_dispatched_functions_while_it_registers(plugged):
    call = f'    from {plugged.name}.ops.op import f\n    CALLS.append(f())\n'
    plugged.plugin('plug_calls', plugin_source('late', tail=call))
    plugged.variable('plug_calls')
    assert plugged.f('op')() == 'late'
    assert sys.modules['plug_calls'].CALLS[1] == 'late'


def test_threads_that_race_the_first_call_load_plugins_once(plugged):
    plugged.plugin('plug_slow', 'import time\ntime.sleep(0.2)\n' + plugin_source('slow'))
    plugged.variable('plug_slow')
    f = plugged.f('op')
    assert all_at_once([f] * 6) == ['slow'] * 6
    assert len(sys.modules['plug_slow'].CALLS) == 1
    assert len(plugged.dispatcher.plugins()) == 1


def test_an_interrupted_plugin_load_is_done_again(plugged):
    plugged.plugin('plug_stop', plugin_source('once', tail='    if len(CALLS) < 2: raise KeyboardInterrupt\n'))
    plugged.variable('plug_stop')
    f = plugged.f('op')
    with pytest.raises(KeyboardInterrupt):
        f()
    assert f() == 'once'
    assert plugged.dispatcher.plugins()[0].error is None


def test_reset_forgets_plugins_and_loads_them_again(plugged, monkeypatch):
    plugged.plugin('plug_again', plugin_source('again'))
    plugged.plugin('plug_second', plugin_source('second', body='priority = 0'))
    plugged.variable('plug_again')
    f = plugged.f('op')
    assert f() == 'again'
    plugged.variable('plug_again', 'plug_second')
    assert f() == 'again'
    plugged.dispatcher.reset()
    assert len(plugged.dispatcher.registry('op')) == 1
    assert f() == 'second'
    assert [plugin.name for plugin in plugged.dispatcher.plugins()] == ['plug_again', 'plug_second']
    monkeypatch.delenv(f'{plugged.prefix}_PLUGIN_MODULES')
    plugged.dispatcher.reset()
    assert f() == 'own'
    assert plugged.dispatcher.plugins() == ()


# -- entry points -------------------------------------------------------------------------------------------------------


def test_entry_points_name_a_module_or_a_function(plugged):
    plugged.plugin('point_module', plugin_source('one'))
    plugged.plugin('point_function', plugin_source('two').replace('def register', 'def enter'))
    plugged.install('point-module', 'first = point_module', '3.1')
    plugged.install('point-function', 'second = point_function:enter', '0.2rc1')
    f = plugged.f('op')
    assert set(f.backends) == {'one', 'two', 'own', 'default'}
    assert set(plugged.dispatcher.plugins()) == {
        Plugin('first', 'entry point', '3.1', None),
        Plugin('second', 'entry point', '0.2rc1', None),
    }


def test_an_entry_point_of_another_group_is_left_alone(plugged, tmp_path):
    plugged.plugin('point_foreign', plugin_source('foreign'))
    install(tmp_path, 'point-foreign', 'x = point_foreign', group='somebody.else')
    assert plugged.f('op')() == 'own'
    assert 'point_foreign' not in sys.modules


@pytest.mark.parametrize('metadata', ['', 'Metadata-Version: 2.1\n', None])
def test_a_distribution_with_broken_metadata_harms_nobody(plugged, tmp_path, metadata):
    plugged.plugin('point_odd', plugin_source('odd'))
    plugged.install('point-odd', 'odd = point_odd')
    file = tmp_path / 'point_odd-1.0.dist-info' / 'METADATA'
    if metadata is None:
        file.unlink()
    else:
        file.write_text(metadata)
    assert plugged.f('op')() == 'odd'
    (plugin,) = plugged.dispatcher.plugins()
    assert plugin.version is None


def test_the_group_can_be_chosen(tmp_path, monkeypatch):
    from tests.backends.library import Library

    monkeypatch.syspath_prepend(str(tmp_path))
    library = Library(tmp_path, "entry_points='my.own.group'")
    library.add('op')
    (tmp_path / 'point_group.py').write_text(plugin_source('grouped'))
    install(tmp_path, 'point-group', 'x = point_group', group='my.own.group')
    try:
        assert library.f('op')() == 'grouped'
    finally:
        library.forget()
        sys.modules.pop('point_group', None)


def test_an_installed_distribution_extends_fla(tmp_path):
    """The distribution on the path is enough: the process sets no variable and imports nothing."""
    (tmp_path / 'acme_kernels.py').write_text(plugin_source('acme', operation='acme_op'))
    install(tmp_path, 'acme-kernels', 'acme = acme_kernels:register\nbroken = acme_no_such_module', '4.2.0')
    (tmp_path / 'use.py').write_text(
        dedent(
            """
            import sys
            from fla.backends import BackendRegistry, describe, dispatch, plugins, validate

            BackendRegistry('acme_op')

            @dispatch('acme_op')
            def f(x=None, flag=False):
                return 'default'

            assert 'acme_kernels' not in sys.modules
            assert f() == 'acme'
            for plugin in plugins():
                print(plugin.name, plugin.source, plugin.version, plugin.error)
            print(describe('acme_op'))
            print(validate())
            """
        )
    )
    root = str(Path(fla.__file__).parents[1])
    environ = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), root])}
    done = subprocess.run(
        [sys.executable, str(tmp_path / 'use.py')], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 'acme entry point 4.2.0 None' in done.stdout
    assert 'broken entry point 4.2.0 ModuleNotFoundError' in done.stdout
    assert 'plugin acme (entry point) 4.2.0: loaded' in done.stdout
    assert 'acme_no_such_module' in done.stderr


# -- fla's own namespace ------------------------------------------------------------------------------------------------


def test_a_plugin_of_fla(tmp_path, monkeypatch):
    toy = Toy()
    source = plugin_source('plugged', operation=toy.op).replace('x=None, flag=False', 'q, k, scale=None, flag=False')
    (tmp_path / 'fla_plugin_for_test.py').write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv('FLA_PLUGIN_MODULES', 'fla_plugin_for_test')
    reset()
    toy.add('a')
    assert toy.f(Q, Q) == 'plugged'
    assert 'fla_plugin_for_test' in [plugin.name for plugin in plugins()]
    assert 'plugin fla_plugin_for_test (FLA_PLUGIN_MODULES)' in describe(toy.op)
    assert not any('fla_plugin_for_test' in line for line in validate())
    monkeypatch.delenv('FLA_PLUGIN_MODULES')
    reset()
    toy.add('a')
    assert toy.ran() == 'a'
    sys.modules.pop('fla_plugin_for_test')


def test_fla_reads_the_group_fla_backends():
    assert default_dispatcher().discovery.group == 'fla.backends'

    @dispatch('plugin_group_zz')
    def f(x=None):
        return 'default'

    default_dispatcher().registry('plugin_group_zz')
    assert f() == 'default'
