"""`examples/dispatch.py` succeeds, and fails if one of its claims is false."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def example(**environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith('FLA_')}
    command = [sys.executable, str(ROOT / 'examples/dispatch.py')]
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=300, check=False)


def test_succeeds():
    done = example()
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Every claim holds.' in done.stdout
    assert 'FALSE' not in done.stdout
    assert done.stderr == ''


def test_a_false_claim_ends_it():
    done = example(FLA_DENY_BACKENDS='chunked')
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'FALSE' in done.stdout
    assert 'Every claim holds.' not in done.stdout
