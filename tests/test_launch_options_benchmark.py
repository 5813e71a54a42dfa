"""benchmarks/launch_options.py on a CPU: the changed launch options, and the message without a GPU."""

import importlib

import pytest
import torch

from tests import markdown, process


@pytest.fixture
def launch_options(monkeypatch):
    monkeypatch.syspath_prepend(str(markdown.ROOT / 'benchmarks'))
    return importlib.import_module('launch_options')


def test_variants(launch_options):
    pytest.importorskip('triton')
    found = launch_options.parsed('gated_delta_rule', 'intra_chunk_bwd BK=64 num_stages=3, inter_chunk_bwd num_warps=8')
    assert found == {'intra_chunk_bwd': {'BK': 64, 'num_stages': 3}, 'inter_chunk_bwd': {'num_warps': 8}}
    assert launch_options.parsed('kda', 'prepare num_stages=2') == {'prepare': {'num_stages': 2}}
    with pytest.raises(ValueError, match='invalid literal'):
        launch_options.parsed('gated_delta_rule', 'intra_chunk_bwd BK')
    for text, name in (
        ('intra_chunks_bwd BK=64', 'intra_chunks_bwd'),
        ('launch BK=64', 'launch'),
        ('intra_chunk_bwd BK=64,', ''),
        ('', ''),
    ):
        with pytest.raises(ValueError, match=f"gated_delta_rule has no kernel '{name}'"):
            launch_options.parsed('gated_delta_rule', text)
    for text in ('intra_chunk_bwd', 'intra_chunk_bwd BK=64, intra_chunk_bwd BV=32'):
        with pytest.raises(ValueError, match='name intra_chunk_bwd once, with its options'):
            launch_options.parsed('gated_delta_rule', text)


@pytest.mark.interpreted
def test_launch_options_are_overridden(launch_options, monkeypatch):
    pytest.importorskip('triton')
    from fla.ops.gated_delta_rule.kernels import launch
    from fla.ops.recurrence.arguments import Inputs, Options

    launched = []

    def real(kernel, grid):
        return lambda *tensors, **options: launched.append((kernel.fn.__name__, options['BK'], options['num_warps']))

    monkeypatch.setattr(launch, 'launch', real)
    variant = launch_options.override_launches('gated_delta_rule')
    q, beta = torch.randn(1, 3, 1, 32), torch.rand(1, 3, 1)
    for given in ('', 'prepare BK=16, outputs num_warps=2'):
        variant.update(launch_options.parsed('gated_delta_rule', given) if given else {})
        launch.chunk_forward(Inputs(q, q, q, -beta, beta), Options(1.0))
    blocks = [[found for found in launched if found[0] == name] for name in ('prepare', 'outputs')]
    (_, whole, warps), (_, half, _) = blocks[0]
    assert (whole, half) == (32, 16)
    assert [found[1:] for found in blocks[1]] == [(32, warps), (32, 2)]


def test_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip('a GPU is available')
    script = markdown.ROOT / 'benchmarks' / 'launch_options.py'
    done = process.run_script(script)
    assert (done.returncode, done.stdout) == (0, 'This benchmark needs a GPU: nothing is measured.\n')
