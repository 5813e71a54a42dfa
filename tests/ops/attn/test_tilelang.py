"""The TileLang backend of attention: which calls it takes, with a stand-in for the package, and that it is off before."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import default_dispatcher, explain, use_backend
from fla.ops.attn import parallel_attn
from fla.ops.attn.backends.tilelang import AttentionTileLang
from tests.ops.attn.attention import BF16, FP16, FP32, FP64
from tests.ops.vendors import A100, B200, H100, fakes, pretend
from tests.tilelang_support.backends import switched_on, unusable


@pytest.fixture(autouse=True)
def package(monkeypatch, tmp_path):
    switched_on(monkeypatch, tmp_path, AttentionTileLang)
    yield
    default_dispatcher().reset()


def case(B=1, T=5, S=None, H=2, HQ=4, K=128, V=None, lens=None, dtype=BF16, grad=True, **changes):
    """Arguments without data on a GPU that it takes, with changes."""
    if lens is not None:
        T = sum(lens)
        changes['cu_seqlens'] = torch.tensor([0, *lens]).cumsum(0)
    tensors = {
        'q': torch.empty(B, T, HQ, K, dtype=dtype),
        'k': torch.empty(B, S or T, H, K, dtype=dtype),
        'v': torch.empty(B, S or T, H, V or K, dtype=dtype),
    }
    made = fakes({**tensors, **changes})
    made['q'].requires_grad_(grad)
    return made


SERVED = {
    'plain': {},
    'float16, inference': {'dtype': FP16, 'grad': False},
    'one step': {'T': 1},
    'any length': {'B': 3, 'T': 777},
    'heads of 64': {'K': 64},
    'equal heads': {'HQ': 2},
    'one head of keys': {'H': 1, 'HQ': 7},
    'cached': {'T': 5, 'S': 50},
    'window': {'window_size': 3},
    'packed': {'lens': [3, 0, 1]},
    'packed, window, chunks laid out': {
        'lens': [3, 1],
        'window_size': 2,
        'chunk_indices': torch.zeros(2, 2, dtype=torch.int32),
    },
    'scale': {'scale': 0.0},
}


@pytest.mark.parametrize('name', SERVED)
def test_served(name):
    decision = explain(parallel_attn, **case(**SERVED[name]))
    assert decision.winner == 'tilelang'
    assert not any(note.startswith('unverified') for note in decision['tilelang'].notes)


NOTHING = 'there are no steps, and the kernel cannot be launched on nothing'
REFUSED = {
    'float32': ({'dtype': FP32}, "dtype of 'q' must be torch.bfloat16, torch.float16, got torch.float32"),
    'float64': ({'dtype': FP64}, "dtype of 'q' must be torch.bfloat16, torch.float16, got torch.float64"),
    'other heads': ({'K': 96}, 'K and V must both be 64 or both 128, got 96 and 96'),
    'unequal heads': ({'K': 64, 'V': 128}, 'K and V must both be 64 or both 128, got 64 and 128'),
    'decay': ({'g': torch.zeros(1, 5, 4)}, 'argument g is not supported'),
    'sinks': ({'sink_bias': torch.zeros(4)}, 'argument sink_bias is not supported'),
    'no steps': ({'T': 0}, NOTHING),
    'no queries': ({'T': 0, 'S': 5}, NOTHING),
    'no batch': ({'B': 0}, NOTHING),
    'no sequence': ({'T': 0, 'cu_seqlens': torch.zeros(1, dtype=torch.int32)}, NOTHING),
}


def reason(arguments):
    """The reason why TileLang does not serve a call; another backend does."""
    decision = explain(parallel_attn, **arguments)
    assert decision.winner != 'tilelang'
    assert decision['tilelang'].verdict == 'rejected'
    return decision['tilelang'].reason


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name):
    changes, why = REFUSED[name]
    assert reason(case(**changes)) == why


def test_refuses_what_was_not_tried():
    """More than 2^31 elements of q or k."""

    def wide(HQ, T, S):
        shapes = {'q': (T, HQ), 'k': (S, 1), 'v': (S, 1)}
        return fakes({name: torch.empty(1, dtype=BF16).expand(1, *shape, 128) for name, shape in shapes.items()})

    assert reason(wide(2, 2**23, 2**23)).endswith('q must have fewer than 2^31, got 2147483648')
    assert reason(wide(2, 5, 2**24)).endswith('k must have fewer than 2^31, got 2147483648')
    for most in (wide(2, 2**23 - 1, 2**23 - 1), wide(2, 5, 2**24 - 1)):
        assert explain(parallel_attn, **most).winner == 'tilelang'


def test_a_cpu():
    tensors = {name: torch.zeros(1, 5, 2, 64, dtype=BF16) for name in ('q', 'k', 'v')}
    assert 'cpu' in explain(parallel_attn, **tensors)['tilelang'].reason


def test_off_until_somebody_switches_it_on(monkeypatch):
    monkeypatch.delenv('FLA_TILELANG_ATTN')  # FLA_TILELANG is for the delta rules' kernels
    decision = explain(parallel_attn, **case())
    assert (decision.winner, decision['tilelang'].verdict) == ('sdpa', 'disabled')
    with use_backend('tilelang', op='attn'):
        assert explain(parallel_attn, **case()).winner == 'tilelang'


def test_needs_hopper(monkeypatch):
    pretend(monkeypatch, A100)
    assert explain(parallel_attn, **case())['tilelang'].reason == 'needs compute capability 9.0, NVIDIA A100 has 8.0'


def test_not_for_newer_gpus(monkeypatch):
    """Runs the real probe, which stops there."""
    unusable(monkeypatch, AttentionTileLang)
    pretend(monkeypatch, B200)
    decision = explain(parallel_attn, **case())
    assert decision.winner == 'sdpa'
    assert decision['tilelang'].reason == 'the kernels are for compute capability 9.x, NVIDIA B200 has 10.0'


def test_not_tried_inside_a_capture(monkeypatch):
    unusable(monkeypatch, AttentionTileLang)
    pretend(monkeypatch, H100, capturing=True)
    decision = explain(parallel_attn, **case())
    assert decision.winner == 'sdpa'
    assert decision['tilelang'].reason.startswith('asked for inside a CUDA graph capture')


def test_an_unusable_package_falls_through(monkeypatch):
    """Runs the real probe."""
    unusable(monkeypatch, AttentionTileLang)
    decision = explain(parallel_attn, **case())
    assert decision.winner == 'sdpa'
    assert decision['tilelang'].verdict == 'unavailable'
    assert decision['tilelang'].reason == 'probe() raised ImportError: cannot import name from tvm_ffi'


def test_without_the_package(monkeypatch):
    monkeypatch.undo()
    assert "package 'tilelang' is not installed" in explain(parallel_attn, **case())['tilelang'].reason
