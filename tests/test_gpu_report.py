"""The plugin that writes what tests on a GPU came to."""

import json
import os
import subprocess
import sys

import pytest

from tests import markdown

TESTS = """
import pytest

@pytest.mark.parametrize('x', range(3))
def test_right(x):
    pass

def test_wrong():
    assert False

def test_left_out():
    pytest.skip('needs two GPUs')

@pytest.mark.xfail
def test_expected():
    assert False

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_torn_down(broken):
    pass
"""


@pytest.mark.parametrize('workers', [[], ['-n', '2']], ids=['one process', 'workers'])
def test_outcomes(tmp_path, workers):
    (tmp_path / 'test_some.py').write_text(TESTS)
    (tmp_path / 'pytest.ini').write_text('[pytest]\n')
    path = tmp_path / 'folder' / 'report.json'
    options = ['-p', 'tests.gpu_report', '-p', 'no:cacheprovider', '--gpu-report', str(path), *workers]
    command = [sys.executable, '-m', 'pytest', '-q', *options, 'test_some.py']
    environment = {**os.environ, 'PYTHONPATH': str(markdown.ROOT), 'GPU_REPORT_COMMIT': 'abc'}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert (result['benchmark'], result['commit']) == ('gpu_tests', 'abc')
    assert 'torch' in result['versions']
    assert result['rows'] == [
        {
            'file': 'test_some.py',
            'xfailed': 1,
            'skipped': 1,
            'passed': 3,
            'failed': 2,
            'failures': ['test_torn_down', 'test_wrong'],
            'skips': {'needs two GPUs': 1},
        }
    ]
