"""Code in a forked process behaves as under `python -c`."""

import subprocess
import sys

import pytest

from tests import process


def test_output_status_and_arguments(tmp_path):
    done = process.run(
        """
        import atexit, os, sys
        atexit.register(print, 'at exit')
        print(sys.argv, os.getcwd(), os.environ['FLA_X'], __name__, sys.modules['__main__'].__dict__ is globals())
        print('wrong', file=sys.stderr)
        sys.exit(3)
        """,
        'one',
        cwd=tmp_path,
        FLA_X='1',
    )
    assert done.returncode == 3
    assert done.stdout == f"['-c', 'one'] {tmp_path} 1 __main__ True\nat exit\n"
    assert done.stderr == 'wrong\n'


def test_fla_and_the_environment_are_fresh(monkeypatch):
    monkeypatch.setenv('FLA_STRICT', '1')
    code = """
        import os, sys
        print([name for name in [*sys.modules, *os.environ] if name.lower().startswith('fla')], 'torch' in sys.modules)
        import fla.ops.kda
    """
    for _ in range(2):
        assert process.run(code).stdout == '[] True\n'


def test_an_exception_and_a_signal():
    done = process.run('\nraise KeyError(5)')
    assert done.returncode == 1
    assert done.stderr.startswith('Traceback')
    assert done.stderr.endswith('line 2, in <module>\nKeyError: 5\n')
    assert process.run('import os, signal; os.kill(os.getpid(), signal.SIGKILL)').returncode == -9


def test_a_child_that_hangs_is_killed_and_the_next_one_runs():
    with pytest.raises(subprocess.TimeoutExpired):
        process.run('import time; time.sleep(60)', timeout=0.5)
    assert process.run('print(1)').stdout == '1\n'


def test_modules_scripts_and_paths(tmp_path):
    (tmp_path / 'madeup_beside.py').write_text('VALUE = 1')
    (tmp_path / 'madeup_script.py').write_text(
        'import sys, madeup_beside\nprint(__name__, sys.argv[1:], madeup_beside.VALUE)'
    )
    expected = "__main__ ['x'] 1\n"
    assert process.run_script(tmp_path / 'madeup_script.py', 'x').stdout == expected
    assert process.run_module('madeup_script', 'x', cwd=tmp_path).stdout == expected
    assert process.run_module('madeup_script', 'x', PYTHONPATH=str(tmp_path)).stdout == expected
    assert 'madeup_beside' not in sys.modules
