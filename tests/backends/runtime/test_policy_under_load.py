"""benchmarks/policy_under_load.py, in a short run."""

import json
import os
import subprocess
import sys

import pytest

from tests.markdown import ROOT

pytest.importorskip('watchfiles')
pytest.importorskip('ruamel.yaml')
pytest.importorskip('pydantic')


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork')
def test_nothing_is_wrong_lost_doubled_or_stuck(tmp_path):
    script = ROOT / 'benchmarks/policy_under_load.py'
    command = [sys.executable, str(script), '--seconds', '3', '--rewrites', '6', '--json', str(tmp_path / 'found.json')]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / 'found.json').read_text())
    assert found['good']
    assert found['calls'] > 100
    assert found['failures'] > 0
    assert found['reloads'] >= 2
    assert found['refused'] >= found['bad_files'] == 1
    assert found['bad_files_that_changed_something'] == 0
    assert found['mutating_calls'] > found['mutating_calls_that_raised'] > 0
    assert found['final_file_in_force']
