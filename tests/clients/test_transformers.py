"""Unchanged transformers models call our operations and compute the same as with transformers' own PyTorch code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from fla.backends import trace
from tests.clients.models import MODELS, results

NEEDED = "needs transformers 5.24 or newer, which `make setup` installs: pip install -e '.[clients]'"
transformers = pytest.importorskip('transformers', reason=NEEDED)
if Version(transformers.__version__) < Version('5.24'):
    pytest.skip(f'{NEEDED}; has {transformers.__version__}', allow_module_level=True)

# Both sides are float32 and differ in the order of sums. Gradients pass through every layer twice.
LOGITS, GRADIENTS = 2e-5, 2e-4


@pytest.fixture(scope='module', params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope='module')
def without_fla(tmp_path_factory, device):
    """The results without `fla` and in float64, from a process that runs while tests compute ours."""
    out = tmp_path_factory.mktemp('clients') / 'results.pt'
    script = Path(__file__).with_name('models.py')
    environ = {**os.environ, 'OMP_NUM_THREADS': '1'}
    command, log = [sys.executable, str(script), str(out), device], out.with_suffix('.txt')
    with log.open('w') as file, subprocess.Popen(command, env=environ, stdout=file, stderr=file) as process:
        found = []

        def get(name):
            if not found:
                assert process.wait(timeout=300) == 0, log.read_text()
                found.extend(torch.load(out))
            return [one[name] for one in found]

        yield get
        process.kill()


def error(expected, got):
    expected, got = expected.double(), got.double()
    assert expected.shape == got.shape
    return float((expected - got).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30))


def compare(what, bound, device, exact, theirs, ours):
    """Our error is within the bound or twice theirs, and ours differs from theirs by less than the bound. On a GPU, where
    kernels round products at other places, it may also differ by as much as the error of theirs."""
    exact, theirs, ours = exact[what], theirs[what], ours[what]
    off = error(exact, theirs)
    assert error(exact, ours) < max(bound, 2 * off), what
    assert error(theirs, ours) < (bound if device == 'cpu' else max(bound, off)), what


@pytest.mark.parametrize('name', MODELS)
def test_same_as_without_fla(name, device, without_fla):
    operation, backend = MODELS[name][2], 'reference' if device == 'cpu' else 'default'
    with trace() as t:
        ours = results(name, device)
    chunk, recurrent = f'{operation}.chunk_{operation}', f'{operation}.fused_recurrent_{operation}'
    assert {key: count for key, count in t.counters.items() if key[0].split('.')[0] == operation} == {
        # three layers: logits, training and prefill, then each further token
        (chunk, backend): 3 * 3,
        (recurrent, backend): 3 * 7,
    }
    theirs, exact = without_fla(name)
    assert theirs['logits'].std() > 0.1
    for what, bound in (('logits', LOGITS), ('loss', 1e-6), ('generated logits', LOGITS)):
        compare(what, bound, device, exact, theirs, ours)
    assert torch.equal(theirs['generated'], ours['generated'])
    assert theirs['gradients'].keys() == ours['gradients'].keys()
    for parameter in theirs['gradients']:
        compare(parameter, GRADIENTS, device, *(one['gradients'] for one in (exact, theirs, ours)))
