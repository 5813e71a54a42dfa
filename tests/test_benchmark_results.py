"""benchmarks/_results.py and _fla_process.py: the result file, the command line, the process for FLA."""

import argparse
import importlib
import json

import pytest

from tests.markdown import ROOT


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    return importlib.import_module('_results')


def test_error_is_one_line_with_relative_paths(results):
    text = results.error_line(ValueError(f'{ROOT}/fla/ops/x.py, line 3\n  of {ROOT}/fla, ' + 'long ' * 100))
    assert text.startswith('ValueError: fla/ops/x.py, line 3 of ')
    assert len(text) == 300
    assert f'{ROOT}/' not in text


def test_command_repeats_the_run(results):
    options = argparse.Namespace(case=['one step', 'packed'], shape=[0], only=None, fla=ROOT / 'somewhere', quick=True)
    found = results.command('attention', options, 'case', 'shape', 'only')
    assert found == "python benchmarks/attention.py --case 'one step' --case packed --shape 0 --fla fla-core --quick"
    assert results.command('attention', argparse.Namespace(case=None), 'case') == 'python benchmarks/attention.py'


def test_command_leaves_out_the_path_of_the_result(results):
    for place in (['--json', '/some/where.json'], ['--json=/some/where.json']):
        assert list(results.without_json(['--quick', *place, '--only', 'kda'])) == ['--quick', '--only', 'kda']


def test_file_is_valid_after_each_row(results, tmp_path, capsys):
    path = tmp_path / 'folder' / 'x.json'
    file = results.ResultFile(path, 'x', cores=2)
    read = lambda: json.loads(path.read_text())  # noqa: E731
    file.add({'a': 1.23456})
    assert read() == {'benchmark': 'x', 'cores': 2, 'complete': False, 'rows': [{'a': 1.23456}]}
    file.add({'a': 2}, replace=True)
    assert read()['rows'] == [{'a': 2}]
    file.complete()
    assert read()['complete'] is True
    assert capsys.readouterr().out == '{"a": 1.23456}\n{"a": 2}\n'
    results.ResultFile(None, 'x').add({'a': 3})


def test_run_is_resumed(results, tmp_path):
    """Each part keeps its own fields under `earlier`, also in a third part; a complete file cannot be resumed."""
    path = tmp_path / 'x.json'
    about = {'card': 'a GPU', 'command': 'python x.py'}
    first = results.ResultFile(path, 'x', **about, began='1', note='stopped')
    first.add({'a': 1})
    first.add({'a': 2})
    second = results.ResultFile(path, 'x', **about, began='2')
    second.resume()
    second.add({'a': 3})
    third = results.ResultFile(path, 'x', **about, began='3')
    third.resume()
    assert third.rows == [{'a': 1}, {'a': 2}, {'a': 3}]
    third.complete()
    assert json.loads(path.read_text()) == {
        'benchmark': 'x',
        **about,
        'began': '3',
        'earlier': [{'began': '1', 'note': 'stopped', 'rows': 2}, {'began': '2', 'rows': 1}],
        'complete': True,
        'rows': [{'a': 1}, {'a': 2}, {'a': 3}],
    }
    with pytest.raises(SystemExit, match=r'x\.json is complete'):
        results.ResultFile(path, 'x', **about).resume()


@pytest.mark.parametrize('name', ['benchmark', 'card', 'versions', 'cores', 'command'])
def test_run_is_resumed_only_in_the_same_setting(results, tmp_path, name):
    path = tmp_path / 'x.json'
    about = {'benchmark': 'x', 'card': 'a', 'versions': {'torch': '2'}, 'cores': 2, 'command': 'c'}
    results.ResultFile(path, **about).add({'a': 1})
    before = path.read_text()
    with pytest.raises(SystemExit, match=f'{name} is other here'):
        results.ResultFile(path, **{**about, name: 'other'}).resume()
    assert path.read_text() == before
    for nothing in (None, tmp_path / 'y.json'):
        with pytest.raises(SystemExit, match='no such file'):
            results.ResultFile(nothing, **about).resume()


def test_machine(results):
    found = results.machine(cpu=True)
    assert found['card'] == 'CPU'
    assert {'torch', 'triton', 'python'} == found['versions'].keys()
    more = results.machine(cpu=True, packages=('pytest', 'not-installed'))['versions']
    assert more == {**found['versions'], 'pytest': pytest.__version__}


def test_version_of_fla(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    (tmp_path / 'fla_core-0.6.0.dist-info').mkdir()
    peer = importlib.import_module('_fla_process')
    assert peer.version_of(tmp_path) == '0.6.0'
    assert importlib.import_module('_results').machine(cpu=True, fla=tmp_path)['versions'][peer.FLA] == '0.6.0'
    assert peer.version_of(tmp_path / 'fla_core-0.6.0.dist-info') == 'unknown'


def test_fla_runs_its_own_kernels(monkeypatch, tmp_path):
    """Its dispatch is off, so that no vendor's kernel is chosen, and it is imported from its own folder."""
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    peer = importlib.import_module('_fla_process')
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    monkeypatch.delenv('FLA_DISABLE_BACKEND_DISPATCH', raising=False)
    script = tmp_path / 'script.py'
    script.write_text('import json, os; print("tuning"); print(json.dumps(dict(os.environ)))')
    (environment,) = peer.fla_rows(str(script), [], tmp_path)
    assert environment['FLA_DISABLE_BACKEND_DISPATCH'] == '1'
    assert environment['PYTHONPATH'] == str(tmp_path)


def test_each_script_has_the_shared_options():
    """`make bench BENCH_ARGS=--quick` passes --quick to all of them."""
    scripts = sorted((ROOT / 'benchmarks').glob('[a-z]*.py'))
    assert len(scripts) == 11
    assert [script.name for script in scripts if ' = parser(__doc__' not in script.read_text()] == []
