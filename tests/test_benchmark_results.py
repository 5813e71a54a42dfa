"""What benchmarks write down."""

import argparse
import importlib
import json

import pytest

from tests.markdown import ROOT


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    return importlib.import_module('_results')


def test_a_refusal_is_a_line_without_folders(results):
    text = results.said(ValueError(f'{ROOT}/fla/ops/x.py, line 3\n  of {ROOT}/fla, ' + 'long ' * 100))
    assert text.startswith('ValueError: fla/ops/x.py, line 3 of ')
    assert len(text) == 300
    assert f'{ROOT}/' not in text


def test_a_command_repeats_a_run(results):
    options = argparse.Namespace(case=['one step', 'packed'], shape=[0], only=None, fla=ROOT / 'somewhere', dry=True)
    found = results.command('attention', options, 'case', 'shape', 'only')
    assert found == "python benchmarks/attention.py --case 'one step' --case packed --shape 0 --fla fla-core --dry"
    assert results.command('attention', argparse.Namespace(case=None), 'case') == 'python benchmarks/attention.py'


def test_a_file_is_whole_after_each_row(results, tmp_path, capsys):
    path = tmp_path / 'folder' / 'x.json'
    file = results.ResultFile(path, 'x', cores=2)
    read = lambda: json.loads(path.read_text())  # noqa: E731
    file.add({'a': 1.23456})
    assert read() == {'benchmark': 'x', 'cores': 2, 'complete': False, 'rows': [{'a': 1.23456}]}
    file.add({'a': 2}, instead=True)
    assert read()['rows'] == [{'a': 2}]
    file.complete()
    assert read()['complete'] is True
    assert capsys.readouterr().out == '{"a": 1.23456}\n{"a": 2}\n'
    results.ResultFile(None, 'x').add({'a': 3})


def test_the_machine(results):
    found = results.machine(dry=True)
    assert found['card'] == 'CPU'
    assert {'torch', 'triton', 'python'} == found['versions'].keys()
