"""`examples/dispatch.py` succeeds, and fails if one of its claims is false."""

import subprocess

from tests import process


def example(**environment: str) -> subprocess.CompletedProcess[str]:
    return process.run_script(process.ROOT / 'examples/dispatch.py', **environment)


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
