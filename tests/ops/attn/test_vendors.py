"""The backends of vendors' packages with stand-ins for these: what the package gets, and what comes back. What they refuse
is in `test_vendors_refuse`."""

import pytest
import torch

from fla.backends import explain, trace
from fla.ops.attn import parallel_attn
from fla.ops.attn.backends import varlen
from fla.ops.attn.backends.varlen import TorchVarlenBackend
from fla.ops.attn.naive import naive_parallel_attn
from tests.ops.attn.attention import BF16, FP16, inputs
from tests.ops.attn.stand_ins import BACKENDS, PACKS, installed
from tests.ops.vendors import fakes, odd, trust

CU = torch.tensor([0, 0, 1, 9, 24])


pytestmark = pytest.mark.usefixtures('fresh_dispatch')


def given(**changes):
    return inputs(**{'dtype': BF16, 'value_dim': 8, **changes})


OPTIONS = {
    'plain': ({}, {}),
    'scaled, equal heads': ({'kv_heads': 4}, {'scale': 0.3}),
    'one head of keys': ({'heads': 3, 'kv_heads': 1}, {}),
    'negative scale': ({}, {'scale': -0.3}),
    'scale of 0': ({}, {'scale': 0}),
    'packed, negative scale': ({'batch': 1}, {'cu_seqlens': CU, 'scale': -2.0}),
    'window': ({}, {'window_size': 5}),
    'window longer than T': ({}, {'window_size': 50}),
    'some queries': ({'queries': 5}, {}),
    'one query': ({'queries': 1}, {'window_size': 4}),
    'packed': ({'batch': 1}, {'cu_seqlens': CU}),
    'packed, window': ({'batch': 1}, {'cu_seqlens': CU.int(), 'window_size': 3}),
    'packed, chunks laid out': ({'batch': 1}, {'cu_seqlens': CU, 'chunk_indices': torch.zeros(4, 2, dtype=torch.int32)}),
}


def serves(name, case):
    """Whether the backend takes the case; `test_vendors_refuse` tests the reasons for the others."""
    return name in PACKS if case.startswith('packed') else name != 'torch_varlen' or 'quer' not in case


@pytest.mark.parametrize(('name', 'case'), [(n, c) for n in BACKENDS for c in OPTIONS if serves(n, c)])
def test_what_the_package_gets(monkeypatch, tmp_path, name, case):
    """Every argument is translated correctly for a stand-in that computes the formula."""
    shapes, options = OPTIONS[case]
    tensors = given(**{**shapes, **({'batch': 1} if name == 'flashinfer' else {})})
    backend = installed(monkeypatch, tmp_path, name)
    o = backend.parallel_attn(**tensors, **options)
    assert o.is_contiguous()
    formula = {key: value for key, value in options.items() if key != 'chunk_indices'}
    assert torch.equal(o, naive_parallel_attn(**tensors, **formula))


@pytest.mark.parametrize('name', BACKENDS)
def test_odd_addresses(monkeypatch, tmp_path, name):
    """Packages read 16 bytes at a time; the stand-ins check the alignment."""
    backend = installed(monkeypatch, tmp_path, name)
    for kv_heads in (2, 4):
        tensors = {n: odd(x) for n, x in given(batch=1, kv_heads=kv_heads).items()}
        assert torch.equal(backend.parallel_attn(**tensors), naive_parallel_attn(**tensors))
    if name in PACKS:
        assert torch.equal(backend.parallel_attn(**tensors, cu_seqlens=CU), naive_parallel_attn(**tensors, cu_seqlens=CU))


BAD = {'outside': [-3, 2, 99], 'falling': [0, 20, 7, 24], 'both': [5, -(2**40), 2**40, 3]}


@pytest.mark.parametrize('ends', BAD)
@pytest.mark.parametrize('name', PACKS)
def test_bad_cu_seqlens_stay_within_the_rows(monkeypatch, tmp_path, name, ends):
    """Bad lengths on a device are not read; the stand-ins check what a kernel relies on."""
    backend = installed(monkeypatch, tmp_path, name)
    tensors = given(batch=1)
    o = backend.parallel_attn(**tensors, cu_seqlens=torch.tensor(BAD[ends]))
    assert o.shape == tensors['q'].shape


@pytest.mark.parametrize('name', BACKENDS)
def test_accepted_on_its_gpu(monkeypatch, tmp_path, name):
    installed(monkeypatch, tmp_path, name)
    trust(monkeypatch, BACKENDS[name])
    for dtype in (BF16, FP16):
        with torch.no_grad():
            decision = explain(parallel_attn, **fakes(given(dtype=dtype, dim=64, value_dim=64, batch=1)), window_size=5)
        assert decision.winner == name
        assert any(note.startswith('unverified') for note in decision[name].notes) != BACKENDS[name].verified


@pytest.mark.parametrize('name', BACKENDS)
def test_compiled_code_goes_without_them(monkeypatch, tmp_path, name):
    """Compiled code does not see addresses, and packages need alignment. Here they take CPU tensors."""
    installed(monkeypatch, tmp_path, name)
    trust(monkeypatch, BACKENDS[name])
    monkeypatch.setattr(BACKENDS[name], 'devices', ('cpu',))
    monkeypatch.setattr(BACKENDS[name], 'min_capability', None)
    tensors = given(batch=1, dim=64, value_dim=64)

    def call():
        return parallel_attn(**tensors, window_size=5)

    with torch.no_grad():
        for function, backend in ((call, name), (torch.compile(call, fullgraph=True, backend='eager'), 'sdpa')):
            with trace() as recorded:
                function()
            assert recorded.last_backend('attn.parallel_attn') == backend
        notes = explain(parallel_attn, **tensors, window_size=5)[name].notes
    assert 'skipped in compiled code: the backend says traceable = False' in notes


def test_old_pytorch(monkeypatch):
    monkeypatch.setattr(varlen, '_parameters', lambda: frozenset({'query', 'is_causal', 'scale'}))
    verdict, reason = TorchVarlenBackend.is_available()
    assert not verdict
    assert 'enable_gqa, window_size' in reason[0] % reason[1:]
