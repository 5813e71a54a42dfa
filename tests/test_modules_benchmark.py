"""benchmarks/modules.py on a CPU: every module, a process for FLA (this package stands for it), and what a result holds."""

import json
import os
import subprocess
import sys

import pytest

from tests import markdown

SCRIPT = markdown.ROOT / 'benchmarks' / 'modules.py'
ERROR = {'cross_entropy': 1e-2, 'fused_linear_cross_entropy': 2e-2, 'causal_conv1d': 1e-2}


def run(tmp_path, *options):
    path = tmp_path / 'folder' / 'modules.json'
    # this package takes the place of the peer, and needs its reference on a CPU
    environment = {**os.environ, 'FLA_DISABLE_BACKEND_DISPATCH': '0'}
    command = [sys.executable, SCRIPT, '--json', path, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding='utf-8')), done.stdout


@pytest.mark.slow
def test_every_module(tmp_path):
    backends = ['reference', 'torch', 'flash-linear-attention']
    result, _ = run(tmp_path, '--dry', '--fla', markdown.ROOT, '--size', 'large', *(f'--backend={one}' for one in backends))
    assert result['complete']
    assert result['command'].endswith('--fla fla-core --dry')
    assert str(markdown.ROOT) not in json.dumps(result)
    named = {(row['module'], row['backend']) for row in result['rows']}
    modules = {module for module, _ in named}
    assert len(modules) == 14
    assert named == {(module, backend) for module in modules for backend in backends}
    for row in result['rows']:
        step = row['module'] == 'causal_conv1d_update'
        assert [key for key in row if key.endswith('refused')] == (['both_refused'] if step else []), row
        assert row['forward_ms'] > 0
        if step:
            assert row['errors']['out'] < ERROR['causal_conv1d']
            continue
        assert row['both_ms'] > 0
        assert ('both_gbs' in row) == (row['module'] not in ('swiglu_linear', 'fused_linear_cross_entropy'))
        assert max(row['errors'].values()) < ERROR.get(row['module'], 8e-3), row
        assert len(row['errors']) >= 2
        assert ('sum' in row['errors']) == (row['module'] == 'rms_norm_of_sum')


def test_filters_and_refusals(tmp_path):
    """A refused call gives its reason, and the rest of the run continues."""
    backends = ['liger', 'liger-kernel', 'reference']
    options = ['--only=swiglu', '--only=l2norm', '--size=small', *(f'--backend={one}' for one in backends)]
    result, lines = run(tmp_path, '--dry', *options)
    assert [(row['module'], row['size'], row['backend']) for row in result['rows']] == [
        *(('swiglu', 'small', backend) for backend in backends),
        *(('l2norm', 'small', backend) for backend in ('liger', 'reference')),
    ]
    assert 'NoBackendError' in result['rows'][0]['forward_refused']
    assert 'benchmarks/modules.py' in result['rows'][0]['forward_refused']
    assert str(markdown.ROOT) not in json.dumps(result)
    assert 'errors' in result['rows'][2]
    assert lines.count('\n') == 5


def test_a_stopped_run_goes_on(tmp_path):
    """A resumed run adds only what is missing, in this process and in FLA's."""
    path = tmp_path / 'folder' / 'modules.json'
    options = ['--dry', '--fla', markdown.ROOT, '--only=l2norm', '--only=swiglu', '--size=small']
    options += [f'--backend={one}' for one in ('torch', 'reference', 'flash-linear-attention')]
    whole, _ = run(tmp_path, *options)
    key = lambda row: (row['module'], row['size'], row['backend'])  # noqa: E731
    for stop in (1, 5):
        path.write_text(json.dumps({**whole, 'complete': False, 'note': 'stopped', 'rows': whole['rows'][:stop]}))
        result, lines = run(tmp_path, *options, '--continue')
        assert lines.count('\n') == len(whole['rows']) - stop
        assert result['complete']
        assert [*map(key, result['rows'])] == [*map(key, whole['rows'])]
        assert result['rows'][:stop] == whole['rows'][:stop]
        assert result['earlier'] == [
            {'began': whole['began'], 'copy_gbs': whole['copy_gbs'], 'note': 'stopped', 'rows': stop},
        ]
        assert 'note' not in result
    done = subprocess.run([sys.executable, SCRIPT, '--json', path, *options, '--continue'], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'modules.json is complete' in done.stderr


def test_without_a_gpu():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env={'CUDA_VISIBLE_DEVICES': ''})
    assert done.returncode == 0
    assert 'need a GPU' in done.stdout
