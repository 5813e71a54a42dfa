"""The interpreting child process, seen from tests that run in it and from outside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('triton')

ROOT = Path(__file__).parents[2]

OUTCOMES = """
import os, pytest

@pytest.fixture(scope='module')
def token():
    assert os.environ['TRITON_INTERPRET'] == '1'
    yield [object()]
    print('token torn down')

@pytest.fixture(scope='module')
def here():
    yield 'TRITON_INTERPRET' in os.environ
    print('here torn down')

seen = []

def test_plain(here): assert not here

@pytest.mark.interpreted
def test_passes(token): seen.append(token)

@pytest.mark.interpreted
def test_shares_fixture(token): assert seen == [token]

@pytest.mark.interpreted
@pytest.mark.parametrize('n', [1, 2])
def test_half_fails(n): print('printed'); assert n == 1

@pytest.mark.interpreted
def test_skips(): pytest.skip('because')

@pytest.mark.interpreted
@pytest.mark.xfail(strict=True)
def test_xfails(): assert False

@pytest.mark.interpreted
@pytest.mark.xfail(strict=True)
def test_xpasses(): pass

@pytest.fixture
def broken(): raise RuntimeError('broken')

@pytest.mark.interpreted
def test_error(broken): pass

@pytest.mark.interpreted
def test_dies(): os.abort()

@pytest.mark.interpreted
def test_after_death(token): pass
"""


@pytest.mark.interpreted
def test_marked_tests_run_in_the_child():
    import triton

    assert os.environ['TRITON_INTERPRET'] == '1'
    assert triton.knobs.runtime.interpret


def test_other_tests_do_not():
    assert os.environ.get('TRITON_INTERPRET') != '1'


@pytest.mark.triton
def test_every_outcome_is_counted(tmp_path):
    (tmp_path / 'test_outcomes.py').write_text(OUTCOMES)
    (tmp_path / 'test_other.py').write_text('def test_neighbour(): pass')
    (tmp_path / 'conftest.py').write_text("pytest_plugins = ['tests.triton_support.plugin']")
    (tmp_path / 'pytest.ini').write_text(f'[pytest]\npythonpath = {ROOT}\nmarkers =\n    interpreted\n    triton\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith('PYTEST')}
    environment['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    command = [sys.executable, '-m', 'pytest', '-n2', '--dist=loadfile', '-rA', 'test_outcomes.py', 'test_other.py']
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert '3 failed, 6 passed, 1 skipped, 1 xfailed, 1 error' in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    for text in ('assert 2 == 1', 'printed', 'ended with status -6', 'SKIPPED', 'because', 'XPASS(strict)'):
        assert text in done.stdout, text
