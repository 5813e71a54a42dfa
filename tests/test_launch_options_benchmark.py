"""benchmarks/launch_options.py on a CPU: what it changes, and what it says where it cannot run."""

import importlib

import pytest
import torch

from tests import markdown, process


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(markdown.ROOT / 'benchmarks'))
    return importlib.import_module('launch_options')


def test_variants(benchmark):
    pytest.importorskip('triton')
    found = benchmark.parsed('gated_delta_rule', 'within BK=64 num_stages=3, through num_warps=8')
    assert found == {'within': {'BK': 64, 'num_stages': 3}, 'through': {'num_warps': 8}}
    assert benchmark.parsed('kda', 'prepare num_stages=2') == {'prepare': {'num_stages': 2}}
    with pytest.raises(ValueError, match='invalid literal'):
        benchmark.parsed('gated_delta_rule', 'within BK')
    for text, name in (('withing BK=64', 'withing'), ('launch BK=64', 'launch'), ('within BK=64,', ''), ('', '')):
        with pytest.raises(ValueError, match=f"gated_delta_rule has no kernel '{name}'"):
            benchmark.parsed('gated_delta_rule', text)
    for text in ('within', 'within BK=64, within BV=32'):
        with pytest.raises(ValueError, match='name within once, with its options'):
            benchmark.parsed('gated_delta_rule', text)


@pytest.mark.interpreted
def test_launches_change(benchmark, monkeypatch):
    pytest.importorskip('triton')
    from fla.ops.gated_delta_rule.kernels import launch

    asked = []

    def real(kernel, grid):
        return lambda *tensors, **options: asked.append((kernel.fn.__name__, options['BK'], options['num_warps']))

    monkeypatch.setattr(launch, 'launch', real)
    variant = benchmark.let_vary('gated_delta_rule')
    q, beta = torch.randn(1, 3, 1, 32), torch.rand(1, 3, 1)
    for given in ('', 'prepare BK=16, outputs num_warps=2'):
        variant.update(benchmark.parsed('gated_delta_rule', given) if given else {})
        launch.chunk_forward(q, q, q, -beta, beta, None, None, None, None, launch.Options(1.0))
    blocks = [[found for found in asked if found[0] == name] for name in ('prepare', 'outputs')]
    (_, whole, warps), (_, half, _) = blocks[0]
    assert (whole, half) == (32, 16)
    assert [found[1:] for found in blocks[1]] == [(32, warps), (32, 2)]


def test_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip('there is one')
    script = markdown.ROOT / 'benchmarks' / 'launch_options.py'
    done = process.run_script(script)
    assert (done.returncode, done.stdout) == (0, 'These kernels need a GPU: nothing is measured here.\n')
