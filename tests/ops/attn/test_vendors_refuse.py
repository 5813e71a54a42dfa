"""What the backends of vendors' packages refuse, with stand-ins for these: one case for each branch, by the reason that
`explain` gives, and another backend serves."""

import pytest
import torch

from fla.backends import explain
from fla.ops.attn import parallel_attn
from fla.utils.devices import Device
from tests.ops.attn.attention import BF16, FP32, inputs
from tests.ops.attn.stand_ins import BACKENDS, PACKS, installed
from tests.ops.vendors import A100, B200, H100, fakes, pretend, trust

T4 = Device('cuda', 0, 'Tesla T4', (7, 5))
LENS = torch.tensor([0, 5, 24])


pytestmark = pytest.mark.usefixtures('fresh_dispatch')


def call(grad=False, **changes):
    """Arguments without data that every backend takes, with changes."""
    names = ('dtype', 'batch', 'length', 'queries', 'dim', 'value_dim')
    shapes = {name: changes.pop(name) for name in names if name in changes}
    tensors = inputs(**{'dtype': BF16, 'batch': 1, 'dim': 64, 'value_dim': 64, **shapes})
    made = fakes({**tensors, 'window_size': 5, **changes})
    made['q'].requires_grad_(grad)
    return made


def refused(name, arguments, verdict='rejected'):
    """The reason why it does not serve a call; another backend does."""
    decision = explain(parallel_attn, **arguments)
    assert decision.winner not in (None, name)
    assert decision[name].verdict == verdict
    return decision[name].reason


def unsupported(name):
    return f'argument {name} is not supported'


HALF = "dtype of 'q' must be torch.float16, torch.bfloat16, got torch.float32"
NOTHING = 'there are no steps, and the kernels cannot be launched on nothing'
OTHER, SIZES = 'K and V must be equal, got 64 and 128', 'K = V must be 64, 128 or 256, got %s and %s'
ROWS = 'takes one sequence, got B = 2'
EIGHT, QUERIES = 'K must be a multiple of 8, got 36', 'takes as many queries as keys, got 5 and 24'
GRADIENT = 'inference only, and a tensor argument requires grad'
LAID_OUT = {'cu_seqlens': LENS, 'chunk_indices': torch.zeros(2, 2, dtype=torch.int32)}

# the reasons for each case: one for all backends, or by name
CASES = {
    'decays': ({'g': torch.zeros(1, 24, 4)}, unsupported('g')),
    'sinks': ({'sink_bias': torch.zeros(4)}, unsupported('sink_bias')),
    'float32': ({'dtype': FP32}, HALF),
    'unequal dims': ({'value_dim': 128}, {**dict.fromkeys(BACKENDS, OTHER), 'flashinfer': SIZES % (64, 128)}),
    'odd dims': ({'dim': 36, 'value_dim': 36}, {**dict.fromkeys(BACKENDS, EIGHT), 'flashinfer': SIZES % (36, 36)}),
    'other dims': ({'dim': 96, 'value_dim': 96}, {'flashinfer': SIZES % (96, 96)}),
    'no steps': ({'length': 0}, NOTHING),
    'no rows': ({'batch': 0}, {**dict.fromkeys(BACKENDS, NOTHING), 'flashinfer': 'takes one sequence, got B = 0'}),
    'no sequences': (
        {'length': 0, 'cu_seqlens': LENS[:1]},
        {**dict.fromkeys(BACKENDS, unsupported('cu_seqlens')), **dict.fromkeys(PACKS, NOTHING)},
    ),
    'rows': ({'batch': 2}, {'flashinfer': ROWS}),
    'packed': ({'cu_seqlens': LENS}, dict.fromkeys(['flashinfer', 'xformers'], unsupported('cu_seqlens'))),
    'chunks': (LAID_OUT, dict.fromkeys(['flashinfer', 'xformers'], unsupported('cu_seqlens'))),
    'chunks alone': (
        {'chunk_indices': LAID_OUT['chunk_indices']},
        dict.fromkeys(['flashinfer', 'xformers'], unsupported('chunk_indices')),
    ),
    'fewer queries': ({'queries': 5}, {'torch_varlen': QUERIES}),
    'a gradient': ({'grad': True}, {'flashinfer': GRADIENT}),
}


def of_each(case):
    reasons = CASES[case][1]
    return dict.fromkeys(BACKENDS, reasons) if isinstance(reasons, str) else reasons


@pytest.mark.parametrize(('case', 'name'), [(case, name) for case in CASES for name in of_each(case)])
def test_refused(monkeypatch, tmp_path, case, name):
    installed(monkeypatch, tmp_path, name)
    trust(monkeypatch, BACKENDS[name])
    assert refused(name, call(**CASES[case][0])) == of_each(case)[name]


@pytest.mark.parametrize('name', BACKENDS)
def test_what_is_refused_by_others_alone_is_served(monkeypatch, tmp_path, name):
    installed(monkeypatch, tmp_path, name)
    trust(monkeypatch, BACKENDS[name])
    for case, (changes, _) in CASES.items():
        if name not in of_each(case):
            assert explain(parallel_attn, **call(**changes)).winner == name, case


@pytest.mark.parametrize('name', BACKENDS)
def test_older_gpus(monkeypatch, tmp_path, name):
    device, needed = (A100, '9.0') if name == 'flash_attn_3' else (T4, '8.0')
    installed(monkeypatch, tmp_path, name, device)
    trust(monkeypatch, BACKENDS[name])
    major, minor = device.capability
    why = f'needs compute capability {needed}, {device.name} has {major}.{minor}'
    assert refused(name, call(), 'unavailable') == why


def test_newer_gpus(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, 'flash_attn_3', B200)
    why = 'its kernels are for compute capability 9.0, this is 10.0'
    assert refused('flash_attn_3', call(), 'unavailable') == why


@pytest.mark.parametrize('name', BACKENDS)
def test_not_tried_inside_a_capture(monkeypatch, tmp_path, name):
    installed(monkeypatch, tmp_path, name)
    pretend(monkeypatch, H100, capturing=True)
    why = 'asked for inside a CUDA graph capture, where it cannot be tried: call it once before, then refresh()'
    assert refused(name, call(), 'unavailable') == why


@pytest.mark.parametrize('name', BACKENDS)
def test_a_cpu(monkeypatch, tmp_path, name):
    installed(monkeypatch, tmp_path, name)
    tensors = inputs(dtype=BF16, batch=1, dim=64, value_dim=64)
    assert refused(name, {**tensors, 'window_size': 5}, 'unavailable') == "runs on cuda; 'q' is on cpu"


@pytest.mark.parametrize('name', BACKENDS)
def test_off_unless_switched_on(monkeypatch, tmp_path, name):
    installed(monkeypatch, tmp_path, name)
    monkeypatch.delenv(BACKENDS[name].env_var)
    refused(name, call(), 'disabled')


def test_packed_attention_of_pytorch_is_for_masks(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, 'torch_varlen')
    trust(monkeypatch, BACKENDS['torch_varlen'])
    why = 'the call needs no mask, so `sdpa` can choose among more kernels'
    assert refused('torch_varlen', call(window_size=None), 'demoted') == why


@pytest.mark.parametrize(
    ('name', 'version', 'found', 'needed'),
    [
        ('flash_attn', '2.6.3', 'flash-attn', '<3,>=2.7'),
        ('flash_attn', '3.0.0', 'flash-attn', '<3,>=2.7'),
        ('flashinfer', '0.6.13', 'flashinfer-python', '>=0.6.14'),
        ('xformers', '0.0.29', 'xformers', '>=0.0.30'),
    ],
)
def test_other_versions(monkeypatch, tmp_path, name, version, found, needed):
    installed(monkeypatch, tmp_path, name, version=version)
    assert refused(name, call(), 'unavailable') == f'{found} {version} is installed, {needed} is needed'
