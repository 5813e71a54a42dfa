"""benchmarks/delta_rules.py and launch_options.py on a CPU, with the GPU's clocks replaced: measured calls and rows."""

import importlib

import pytest
import torch

from fla.backends import trace
from tests import markdown


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(markdown.ROOT / 'benchmarks'))
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    monkeypatch.setattr(importlib.import_module('_delta_rule_inputs'), 'DEVICE', 'cpu')

    def ms(function, **options):
        function()
        return 1.0

    def with_replaced_clocks(name):
        module = importlib.import_module(name)
        for user in (module, importlib.import_module('_gpu')):
            for clock in ('gpu_ms', 'wall_ms', 'peak_mib'):
                monkeypatch.setattr(user, clock, ms, raising=False)
        return module

    return with_replaced_clocks


def test_rows(load, monkeypatch):
    delta_rules = load('delta_rules')
    monkeypatch.setattr(delta_rules, 'PACKED', (3, 40, 2, 16))
    with trace() as recorded:
        rows = list(delta_rules.rows(['reference'], ['kda'], [(2, 64, 2, 16)], ['chunk', 'packed', 'bounded']))
    assert {one.backend for one in recorded} == {'reference'}
    complete = [row for row in rows if 'errors' in row]
    kinds = [(row['shape'], row.get('packed'), row.get('bounded')) for row in complete]
    assert kinds == [([2, 64, 2, 16], None, None), ([3, 40, 2, 16], True, None), ([2, 64, 2, 16], None, True)]
    for row in complete:
        assert not [key for key in row if key.endswith('refused')], row
        assert {'forward_ms', 'both_ms', 'forward_first_s', 'both_first_s', 'both_peak_mib'} <= set(row)
        assert set(row['errors']) == {'o', 'state', 'dq', 'dk', 'dv', 'dg', 'dbeta'}
        assert max(row['errors'].values()) < 4e-3  # one rounding of a result to bfloat16


@pytest.mark.parametrize('packed', [False, True], ids=['equal', 'packed'])
def test_variant(load, monkeypatch, packed):
    launch_options = load('launch_options')
    load('delta_rules')
    monkeypatch.setattr(launch_options, 'by_kernel', lambda function: {'a kernel': [1, 1.0]})
    with trace() as recorded:
        row, first = launch_options.measured('gated_delta_rule', (2, 64, 2, 16), packed, None)
    assert {one.backend for one in recorded} == {'reference'}
    assert first[0].shape == ((1, 128, 2, 16) if packed else (2, 64, 2, 16))
    assert (row['unsteady'], row['forward_ms'], row['both_ms']) == (0, 1.0, 1.0)
    assert row['error'] < 4e-3
    again, _ = launch_options.measured('gated_delta_rule', (2, 64, 2, 16), packed, first)
    assert again['as_before']
