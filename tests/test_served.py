"""Each shipped backend that runs on a CPU serves alone, and users' CI runs without dispatch: same numbers each way.

One process a setting. Vendors' packages and TileLang's compiler need a GPU: tests with stand-ins are beside each backend.
"""

import pytest
import torch

from tests import process

pytest.importorskip('triton')

OFF = {'FLA_SDPA': '0'}  # the other toggles are off unless set
SETTINGS = {
    'reference': {**OFF},
    'sdpa': {'FLA_SDPA': '1'},
    'default': {**OFF, 'TRITON_INTERPRET': '1'},
    'baseline': {'FLA_DISABLE_BACKEND_DISPATCH': '1', 'TRITON_INTERPRET': '1'},
}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    """Setting → function → the backends that served, and outputs and gradients."""
    found = {}

    def get(setting):
        if setting not in found:
            path = tmp_path_factory.mktemp('served') / 'results.pt'
            done = process.run_module('tests.served', str(path), **{'TRITON_INTERPRET': '0', **SETTINGS[setting]})
            assert done.returncode == 0, done.stderr
            found[setting] = torch.load(path)
        return found[setting]

    return get


@pytest.mark.triton
@pytest.mark.parametrize('setting', SETTINGS)
def test_it_serves_alone_with_the_same_numbers(results, setting):
    expected, found = results('reference'), results(setting)
    assert len(expected) > 15
    wrong = []
    for name, (backends, numbers) in found.items():
        should = (
            [] if setting == 'baseline' else ['reference'] if setting == 'sdpa' and name != 'parallel_attn' else [setting]
        )
        if backends != should:
            wrong.append(f'{name} was served by {backends}')
        for i, (one, other) in enumerate(zip(numbers, expected[name][1], strict=True)):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-4):
                wrong.append(f'{name}, number {i}: {(one - other).abs().max():.1e} apart')
    assert not wrong
