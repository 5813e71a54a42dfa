"""The plugin tests/gpu_report.py."""

import json

import pytest

from tests import process

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


def report(folder, code, *options, status):
    """Runs a test file with the plugin; returns the report. The run must end with this status."""
    (folder / 'test_some.py').write_text(code)
    (folder / 'pytest.ini').write_text('[pytest]\n')
    path = folder / 'folder' / 'report.json'
    given = ['-p', 'tests.gpu_report', '-p', 'no:cacheprovider', '--gpu-report', str(path), *options]
    done = process.run_module('pytest', '-q', *given, 'test_some.py', cwd=folder, GPU_REPORT_COMMIT='abc')
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(path.read_text())


def test_interrupted_run_is_not_complete(tmp_path):
    code = 'def test_right():\n    pass\n\ndef test_stopped():\n    raise KeyboardInterrupt\n'
    result = report(tmp_path, code, status=pytest.ExitCode.INTERRUPTED)
    assert not result['complete']
    assert result['rows'] == [{'file': 'test_some.py', 'passed': 1}]


@pytest.mark.parametrize('workers', [[], ['-n', '2']], ids=['one process', 'workers'])
def test_outcomes_and_reasons(tmp_path, workers):
    result = report(tmp_path, TESTS, *workers, status=pytest.ExitCode.TESTS_FAILED)
    assert result['complete']
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
