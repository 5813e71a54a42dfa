"""The backends of vendors' packages with stand-ins for these: what each accepts and refuses, what the package gets, and what
comes back."""

import os
import sys
import types

import pytest
import torch

from fla.ops.attn import parallel_attn
from fla.ops.attn.backends import varlen
from fla.ops.attn.backends.flash_attn import FlashAttention2Backend, FlashAttention3Backend
from fla.ops.attn.backends.flashinfer import FlashInferBackend
from fla.ops.attn.backends.varlen import TorchVarlenBackend
from fla.ops.attn.backends.xformers import XFormersBackend
from fla.ops.attn.naive import naive_parallel_attn
from fla.ops.backends import default_dispatcher, explain
from fla.utils.devices import Device
from tests.ops.attn.attention import BF16, FP16, FP32, inputs
from tests.ops.vendors import H100, install, odd, on_16, pretend

B200 = Device('cuda', 0, 'NVIDIA B200', (10, 0))
CU = torch.tensor([0, 0, 1, 9, 24])
LENS = torch.tensor([0, 0])


@pytest.fixture(autouse=True)
def fresh_dispatch(monkeypatch):
    for name in [n for n in os.environ if n.startswith('FLA_')]:
        monkeypatch.delenv(name)
    default_dispatcher().reset()
    yield
    default_dispatcher().reset()


def within(cu_seqlens, length):
    """What kernels that trust them must be able to rely on."""
    return cu_seqlens[0] >= 0 and cu_seqlens[-1] <= length and bool((cu_seqlens.diff() >= 0).all())


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False
):
    assert causal
    assert deterministic
    assert (dropout_p, softcap) == (0.0, 0.0)
    assert on_16(q, k, v)
    left, right = window_size
    assert right == 0
    return naive_parallel_attn(q, k, v, None, softmax_scale, None if left == -1 else left + 1)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **more):
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == q.shape[0]
    assert within(cu_seqlens_q, q.shape[0])
    assert on_16(q, k, v)
    left = more['window_size'][0]
    window = None if left == -1 else left + 1
    return naive_parallel_attn(q[None], k[None], v[None], None, more['softmax_scale'], window, cu_seqlens_q)[0]


def with_lse(function):
    def returning(*args, **kwargs):
        o = function(*args, **kwargs)
        return o, o[..., 0]

    return returning


def single_prefill_with_kv_cache(q, k, v, *, causal, kv_layout, sm_scale, window_left):
    assert causal
    assert kv_layout == 'NHD'
    assert q.is_contiguous()
    assert on_16(q, k, v)
    window = None if window_left == -1 else window_left + 1
    return naive_parallel_attn(q[None], k[None], v[None], None, sm_scale, window)[0]


class Bias:
    """A bias of xFormers' by its name, and with a window."""

    window: int | None = None

    def make_local_attention(self, window):
        made = type(self)()
        made.window = window
        return made


class LowerTriangularMask(Bias):
    pass


class LowerTriangularFromBottomRightMask(Bias):
    pass


def memory_efficient_attention(q, k, v, *, attn_bias, scale):
    if q.dim() == 5:
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        o = memory_efficient_attention(q, k, v, attn_bias=attn_bias, scale=scale)
        return o.unflatten(2, (-1, 2))
    assert k.shape[2] == q.shape[2]
    assert on_16(q, k, v)
    if type(attn_bias) is LowerTriangularMask:
        assert k.shape[1] == q.shape[1]
    return naive_parallel_attn(q, k, v, None, scale, attn_bias.window)


BACKENDS = {
    'flash_attn': FlashAttention2Backend,
    'flash_attn_3': FlashAttention3Backend,
    'flashinfer': FlashInferBackend,
    'xformers': XFormersBackend,
}
VERSIONS = {'flash_attn': '2.8.3', 'flash_attn_3': '3.0.0', 'flashinfer': '0.7.4', 'xformers': '0.0.35'}
DISTRIBUTIONS = {'flash_attn': 'flash-attn', 'flash_attn_3': 'flash-attn-3', 'flashinfer': 'flashinfer-python'}
FUNCTIONS = {
    'flash_attn': {'flash_attn_func': flash_attn_func, 'flash_attn_varlen_func': flash_attn_varlen_func},
    'flash_attn_3': {
        'flash_attn_func': with_lse(flash_attn_func),
        'flash_attn_varlen_func': with_lse(flash_attn_varlen_func),
    },
    'flashinfer': {'single_prefill_with_kv_cache': single_prefill_with_kv_cache},
    'xformers': {},
}


def installed(monkeypatch, folder, name, device=H100, version=None):
    """The package is there and switched on, and the machine has that GPU."""
    backend = BACKENDS[name]
    module, distribution = backend.package_name, DISTRIBUTIONS.get(name, name)
    install(monkeypatch, folder, module, distribution, version or VERSIONS[name], __path__=[], **FUNCTIONS[name])
    if name == 'xformers':
        biases = {'LowerTriangularMask': LowerTriangularMask}
        biases['LowerTriangularFromBottomRightMask'] = LowerTriangularFromBottomRightMask
        contents = {'ops': {'memory_efficient_attention': memory_efficient_attention}, 'ops.fmha': {}}
        for path, attributes in {**contents, 'ops.fmha.attn_bias': biases}.items():
            part = types.ModuleType(f'xformers.{path}')
            part.__path__ = []
            vars(part).update(attributes)
            monkeypatch.setitem(sys.modules, part.__name__, part)
    monkeypatch.setenv(backend.env_var, '1')
    pretend(monkeypatch, device)
    return backend()


def given(**changes):
    return inputs(**{'dtype': BF16, 'value_dim': 8, **changes})


OPTIONS = {
    'plain': ({}, {}),
    'scaled, equal heads': ({'kv_heads': 4}, {'scale': 0.3}),
    'window': ({}, {'window_size': 5}),
    'window longer than T': ({}, {'window_size': 50}),
    'some queries': ({'queries': 5}, {}),
    'one query': ({'queries': 1}, {'window_size': 4}),
    'packed': ({'batch': 1}, {'cu_seqlens': CU}),
    'packed, window': ({'batch': 1}, {'cu_seqlens': CU.int(), 'window_size': 3}),
}
PACKS = ('flash_attn', 'flash_attn_3')


@pytest.mark.parametrize(
    ('name', 'case'), [(n, c) for n in BACKENDS for c in OPTIONS if n in PACKS or not c.startswith('packed')]
)
def test_what_the_package_gets(monkeypatch, tmp_path, name, case):
    """The translation of every argument, with a package that computes the formula."""
    shapes, options = OPTIONS[case]
    tensors = given(**{**shapes, **({'batch': 1} if name == 'flashinfer' else {})})
    backend = installed(monkeypatch, tmp_path, name)
    o = backend.parallel_attn(**tensors, **options)
    assert o.is_contiguous()
    assert torch.equal(o, naive_parallel_attn(**tensors, **options))


@pytest.mark.parametrize('name', BACKENDS)
def test_odd_addresses(monkeypatch, tmp_path, name):
    """Packages read 16 bytes at a time; the stand-ins check that they can."""
    backend = installed(monkeypatch, tmp_path, name)
    for kv_heads in (2, 4):
        tensors = {n: odd(x) for n, x in given(batch=1, kv_heads=kv_heads).items()}
        assert torch.equal(backend.parallel_attn(**tensors), naive_parallel_attn(**tensors))
    if name in PACKS:
        assert torch.equal(backend.parallel_attn(**tensors, cu_seqlens=CU), naive_parallel_attn(**tensors, cu_seqlens=CU))


BAD = {'outside': [-3, 2, 99], 'falling': [0, 20, 7, 24], 'both': [5, -(2**40), 2**40, 3]}


@pytest.mark.parametrize('ends', BAD)
@pytest.mark.parametrize('name', [*PACKS, 'torch_varlen'])
def test_bad_cu_seqlens_stay_within_the_rows(monkeypatch, tmp_path, name, ends):
    """Where they are on a device nobody has read them; the stand-ins check what a kernel may rely on."""
    if name == 'torch_varlen':
        module = types.ModuleType('torch.nn.attention.varlen')
        module.varlen_attn = varlen_attn
        monkeypatch.setitem(sys.modules, module.__name__, module)
        backend = TorchVarlenBackend()
    else:
        backend = installed(monkeypatch, tmp_path, name)
    tensors = given(batch=1)
    o = backend.parallel_attn(**tensors, cu_seqlens=torch.tensor(BAD[ends]))
    assert o.shape == tensors['q'].shape


@pytest.mark.parametrize('name', BACKENDS)
def test_accepted_on_its_gpu(monkeypatch, tmp_path, name):
    size = {'dim': 64, 'value_dim': 64, 'batch': 1}
    with torch.no_grad():
        installed(monkeypatch, tmp_path, name)
        for dtype in (BF16, FP16):
            decision = explain(parallel_attn, **given(dtype=dtype, **size), window_size=5, platform='h100')
            assert decision.winner == name
            assert decision[name].notes[0].startswith('unverified')


@pytest.mark.parametrize('name', BACKENDS)
def test_off_unless_switched_on(monkeypatch, tmp_path, name):
    installed(monkeypatch, tmp_path, name)
    monkeypatch.delenv(BACKENDS[name].env_var)
    assert explain(parallel_attn, **given(), platform='h100')[name].verdict == 'disabled'


REFUSED = {
    'g': ({}, {'g': torch.zeros(1, 24, 4)}, 'argument g is not supported'),
    'sink_bias': ({}, {'sink_bias': torch.zeros(4)}, 'argument sink_bias is not supported'),
    'float32': ({'dtype': FP32}, {}, 'float32'),
    'K and V differ': ({'value_dim': 128}, {}, '64 and 128'),
    'odd K': ({'dim': 36, 'value_dim': 36}, {}, '36'),
    'no steps': ({'length': 0}, {}, 'there are no steps'),
    'no sequences': ({'length': 0}, {'cu_seqlens': LENS[:1]}, 'there are no s|cu_seqlens is not supported'),
    'a CPU': ({}, {}, 'cpu'),
}


@pytest.mark.parametrize('name', BACKENDS)
@pytest.mark.parametrize('case', REFUSED)
def test_refused(monkeypatch, tmp_path, name, case):
    shapes, options, reason = REFUSED[case]
    installed(monkeypatch, tmp_path, name)
    tensors = given(**{'dim': 64, 'value_dim': 64, 'batch': 1, **shapes})
    with torch.no_grad():
        decision = explain(parallel_attn, **tensors, **options, platform=None if case == 'a CPU' else 'h100')
    assert not decision[name].can_run
    assert any(part in decision[name].reason for part in reason.split('|'))


def test_refused_by_one(monkeypatch, tmp_path):
    tensors = given(dim=64, value_dim=64)
    for name in BACKENDS:
        folder = tmp_path / name
        folder.mkdir()
        installed(monkeypatch, folder, name)
    decision = explain(parallel_attn, **tensors, platform='h100')
    assert 'inference' in decision['flashinfer'].reason or 'B = 2' in decision['flashinfer'].reason
    packed = explain(parallel_attn, **given(batch=1), cu_seqlens=CU, platform='h100')
    for name in ('flashinfer', 'xformers'):
        assert 'cu_seqlens is not supported' in packed[name].reason
    wants_gradient = {n: x.requires_grad_() for n, x in given(dim=64, value_dim=64, batch=1).items()}
    decision = explain(parallel_attn, **wants_gradient, platform='h100')
    assert not decision['flashinfer'].can_run
    assert 'grad' in decision['flashinfer'].reason


@pytest.mark.parametrize(
    ('name', 'version', 'reason'),
    [('flash_attn', '2.6.3', '>=2.7'), ('flashinfer', '0.6.13', '>=0.6.14'), ('xformers', '0.0.29', '>=0.0.30')],
)
def test_old_versions(monkeypatch, tmp_path, name, version, reason):
    installed(monkeypatch, tmp_path, name, version=version)
    decision = explain(parallel_attn, **given())
    assert decision[name].verdict == 'unavailable'
    assert reason in decision[name].reason


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, window_size[1]) == (max_k, 0)
    assert within(cu_seq_q, q.shape[0])
    assert on_16(q, k, v)
    assert enable_gqa == (q.shape[1] != k.shape[1])
    window = None if window_size[0] == -1 else window_size[0] + 1
    return naive_parallel_attn(q[None], k[None], v[None], None, scale, window, cu_seq_q)[0]


@pytest.mark.parametrize('case', ['plain', 'scaled, equal heads', 'window', 'packed', 'packed, window'])
def test_packed_attention_of_pytorch(monkeypatch, case):
    module = types.ModuleType('torch.nn.attention.varlen')
    module.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shapes, options = OPTIONS[case]
    tensors = given(**shapes)
    o = TorchVarlenBackend().parallel_attn(**{n: odd(x) for n, x in tensors.items()}, **options)
    assert o.is_contiguous()
    assert torch.equal(o, naive_parallel_attn(**tensors, **options))


@pytest.mark.parametrize(
    ('shapes', 'options', 'verdict', 'reason'),
    [
        ({}, {'window_size': 5}, 'chosen', None),
        ({'batch': 1}, {'cu_seqlens': CU}, 'chosen', None),
        ({}, {}, 'demoted', 'needs no mask'),
        ({'value_dim': 16}, {'window_size': 5}, 'rejected', '8 and 16'),
        ({'dim': 12, 'value_dim': 12}, {'window_size': 5}, 'rejected', '12'),
        ({'queries': 5}, {'window_size': 5}, 'rejected', '5 and 24'),
        ({'length': 0}, {'window_size': 5}, 'rejected', 'there are no steps'),
        ({'dtype': FP32}, {'window_size': 5}, 'rejected', 'float32'),
        ({}, {'sink_bias': torch.zeros(4)}, 'rejected', 'sink_bias'),
    ],
)
def test_what_packed_attention_of_pytorch_takes(monkeypatch, shapes, options, verdict, reason):
    monkeypatch.setattr(TorchVarlenBackend, 'is_available', classmethod(lambda cls: (True, None)))
    monkeypatch.setenv('FLA_TORCH_VARLEN', '1')
    pretend(monkeypatch, H100)
    found = explain(parallel_attn, **given(**shapes), **options, platform='h100')['torch_varlen']
    assert found.verdict == verdict
    assert reason is None or reason in found.reason


def test_old_pytorch(monkeypatch):
    monkeypatch.setattr(varlen, '_parameters', lambda: frozenset({'query', 'is_causal', 'scale'}))
    verdict, reason = TorchVarlenBackend.is_available()
    assert not verdict
    assert 'enable_gqa, window_size' in reason[0] % reason[1:]


def test_gpus():
    verdict, reason = FlashAttention3Backend().probe(B200)
    assert not verdict
    assert '10.0' in str(reason[0] % reason[1:])
    assert FlashAttention3Backend.min_capability == (9, 0)


@pytest.mark.parametrize('cu', [None, CU], ids=['equal', 'packed'])
def test_compiled(monkeypatch, tmp_path, cu):
    """What may be traced has no graph break: an address, which cannot be, is not looked at."""
    backend = installed(monkeypatch, tmp_path, 'flash_attn')
    monkeypatch.setattr(sys.modules['flash_attn'], 'flash_attn_func', lambda q, k, v, **_: q + v.repeat_interleave(2, 2))
    monkeypatch.setattr(
        sys.modules['flash_attn'], 'flash_attn_varlen_func', lambda q, k, v, *_, **more: q + v.repeat_interleave(2, 1)
    )
    tensors = given(batch=1)
    compiled = torch.compile(backend.parallel_attn, fullgraph=True, backend='eager', dynamic=True)
    for length in (24, 30):
        tensors = given(batch=1, length=length)
        assert torch.equal(compiled(**tensors, cu_seqlens=cu), backend.parallel_attn(**tensors, cu_seqlens=cu))
