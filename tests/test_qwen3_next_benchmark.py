"""benchmarks/qwen3_next.py on a CPU: backends, errors, and the process for FLA (with this package in its place)."""

import argparse
import importlib
import json
import sys

import pytest
import torch

from tests import markdown

pytest.importorskip('transformers.models.qwen3_next', reason="needs transformers 5: pip install -e '.[clients]'")
SCRIPT = markdown.ROOT / 'benchmarks' / 'qwen3_next.py'
OURS, FLA, ALONE = 'this package', 'flash-linear-attention', 'transformers'
RUNS = {
    'prefill': 'gated_delta_rule.chunk_gated_delta_rule',
    'train': 'gated_delta_rule.chunk_gated_delta_rule',
    'decode': 'gated_delta_rule.fused_recurrent_gated_delta_rule',
}


@pytest.fixture
def qwen3_next(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    # this package takes the place of FLA, and needs its reference backend here
    monkeypatch.setenv('FLA_DISABLE_BACKEND_DISPATCH', '0')
    qwen3_next = importlib.import_module('qwen3_next')
    monkeypatch.setattr(qwen3_next, 'STEPS', 3)
    return qwen3_next


@pytest.fixture
def run(qwen3_next, tmp_path, capsys):
    """Runs prefill with the FLA in a folder; returns the rows, which are also printed."""

    def prefill(fla):
        path = tmp_path / 'folder' / 'qwen3_next.json'
        qwen3_next.main(['--quick', '--only=prefill', '--json', str(path), '--fla', str(fla)])
        result = json.loads(path.read_text(encoding='utf-8'))
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == result['rows']
        assert result['complete']
        assert str(fla) not in json.dumps(result)
        assert result['command'] == 'python benchmarks/qwen3_next.py --only prefill --fla fla-core --quick'
        return result['rows']

    return prefill


def test_every_phase(qwen3_next):
    rows = list(qwen3_next.rows(OURS, list(qwen3_next.CASES), quick=True))
    assert len(rows) == 5 * 3
    of = {(row['phase'], tuple(row['shape']), row['backend']): row for row in rows if not row['modules']}
    assert len(of) == 5 * 2
    for row in rows:
        assert not [key for key in row if key.endswith('refused')], row
        assert row['wall_ms'] > 0
        base = of[row['phase'], tuple(row['shape']), ALONE]
        assert row['weights'] == base['weights']
        assert row['errors'].keys() == base['errors'].keys()
        for name, error in row['errors'].items():
            # on a CPU the only error is rounding to bfloat16, equal up to chance
            assert 0 < error < max(1.5 * base['errors'][name], 1e-2 if name == 'loss' else 0), row
        ran, serves = row['ran'], row['serves']
        expected = {}
        if row['backend'] == OURS:
            expected[f'{RUNS[row["phase"]]}: reference'] = 3
        if row['modules']:
            convolution = 'causal_conv1d_update' if row['phase'] == 'decode' else 'causal_conv1d'
            expected |= {f'modules.{convolution}: reference': 3, 'modules.rms_norm_gated: reference': 3}
        assert ran == expected
        assert serves['torch_chunk_gated_delta_rule'].startswith('fla.' if row['backend'] == OURS else 'transformers.')
        assert serves['norm'].startswith('fla.' if row['modules'] else 'transformers.')


@pytest.mark.slow
def test_process_for_fla(run):
    """FLA's process has the same weights, and its rows follow ours."""
    rows = run(markdown.ROOT)
    theirs = [row for row in rows if row['backend'] == FLA]
    assert rows[-4:] == theirs
    assert [(row['shape'], row['modules']) for row in theirs] == [
        (shape, modules) for shape in ([1, 80], [2, 40]) for modules in (False, True)
    ]
    assert all('errors' in row for row in theirs)
    assert {row['weights'] for row in rows} == {theirs[0]['weights']}


def test_without_fla(run, tmp_path):
    """If `fla` cannot be imported, its rows give the reason and the other rows remain."""
    (tmp_path / 'fla').mkdir()
    (tmp_path / 'fla' / '__init__.py').write_text('raise ImportError("no kernels here")\n', encoding='utf-8')
    refused = [row for row in run(tmp_path) if 'refused' in row]
    assert [row['backend'] for row in refused] == [FLA] * 4
    assert all('did not find' in row['refused'] and 'no kernels here' in row['refused'] for row in refused)


def test_process_that_ends_early(qwen3_next, monkeypatch):
    """A process that fails becomes one row with the error."""

    def ended(*_):
        yield {'backend': FLA, 'phase': 'decode'}
        sys.exit('ended with status 1')

    monkeypatch.setattr(qwen3_next, 'fla_rows', ended)
    options = argparse.Namespace(quick=True, only=None, fla='folder')
    assert list(qwen3_next.rows_of_fla(options))[1] == {'backend': FLA, 'refused': 'ended with status 1'}


def test_without_a_gpu(qwen3_next, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    qwen3_next.main([])
    assert 'needs a GPU' in capsys.readouterr().out
