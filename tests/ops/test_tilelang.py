"""The TileLang backends: which calls they take, with a stand-in for the package, and that it is asked for nothing before."""

import pytest
import torch

from fla.backends import default_dispatcher, explain, use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.backends.tilelang import GatedDeltaRuleTileLang
from fla.ops.kda import chunk_kda
from fla.ops.kda.backends.tilelang import KDATileLang
from fla.ops.launch import tilelang_call
from fla.utils.devices import Device
from tests.ops.vendors import A100, BF16, FP16, FP32, H100, fakes, pretend
from tests.tilelang_support.backends import switched_on, unusable

pytest.importorskip('triton')

B200 = Device('cuda', 0, 'NVIDIA B200', (10, 0))
BACKENDS = {chunk_gated_delta_rule: GatedDeltaRuleTileLang, chunk_kda: KDATileLang}
BOTH = pytest.mark.parametrize('function', BACKENDS, ids=lambda f: f.__name__)
GATES = {'use_gate_in_kernel': True, 'use_qk_l2norm_in_kernel': True, 'use_beta_sigmoid_in_kernel': True}


@pytest.fixture(autouse=True)
def package(monkeypatch, tmp_path):
    switched_on(monkeypatch, tmp_path, *BACKENDS.values())
    yield
    default_dispatcher().reset()


def case(function, B=1, T=5, H=2, HV=None, K=128, V=128, lens=None, dtype=BF16, gates=FP32, grad=True, **changes):
    """Arguments that both backends serve, unless they are changed, on a GPU and without data."""
    HV = HV or H
    T = sum(lens) if lens else T
    shape = (B, T, HV, K) if function is chunk_kda else (B, T, HV)
    tensors = {
        'q': torch.empty(B, T, H, K, dtype=dtype),
        'k': torch.empty(B, T, H, K, dtype=dtype),
        'v': torch.empty(B, T, HV, V, dtype=dtype),
        'g': torch.empty(shape, dtype=gates),
        'beta': torch.empty(B, T, HV, dtype=gates),
    }
    if lens is not None:
        changes['cu_seqlens'] = torch.tensor([0, *lens]).cumsum(0).int()
    made = fakes({**tensors, **changes})
    made['q'].requires_grad_(grad)
    return made


SERVED = {
    'plain': {},
    'float16': {'dtype': FP16},
    'gates in bf16': {'gates': BF16},
    'one step': {'T': 1},
    'any length': {'B': 3, 'T': 77},
    'narrow keys': {'K': 64},
    'narrow values': {'V': 64},
    'grouped values': {'H': 2, 'HV': 6},
    'packed': {'lens': [3, 0, 1]},
    'packed, lengths on the host too': {'lens': [3, 0], 'cu_seqlens_cpu': torch.tensor([0, 3, 3])},
    'states': {'initial_state': torch.empty(1, 2, 128, 128), 'output_final_state': True, 'state_v_first': True},
    'raw': {**GATES, 'allow_neg_eigval': True, 'A_log': torch.empty(2)},
    'scale': {'scale': 0.0},
    'chunk of 64': {'chunk_size': 64},
}
ONE = {
    'chunks laid out': (chunk_gated_delta_rule, {'lens': [3, 1], 'chunk_indices': torch.zeros(2, 2, dtype=torch.int32)}),
    'bounded': (chunk_kda, {**GATES, 'lower_bound': -5.0, 'safe_gate': True}),
    'kept': (chunk_kda, {'disable_recompute': True}),
}


@BOTH
@pytest.mark.parametrize('name', SERVED)
def test_served(function, name):
    assert explain(function, **case(function, **SERVED[name])).winner == 'tilelang'


@pytest.mark.parametrize('name', ONE)
def test_served_by_one(name):
    function, options = ONE[name]
    assert explain(function, **case(function, **options)).winner == 'tilelang'


REFUSED = {
    'float32': ({'dtype': FP32}, "dtype of 'q' must be torch.bfloat16, torch.float16, got torch.float32"),
    'wide keys': ({'K': 256}, 'K and V must be 64 or 128, got 256 and 128'),
    'odd values': ({'V': 96}, 'K and V must be 64 or 128, got 128 and 96'),
    'short chunks': ({'chunk_size': 32}, 'the kernels work in chunks of 64'),
    'no steps': ({'T': 0}, 'there are no steps, and the kernels cannot be launched on nothing'),
    'no sequences': ({'B': 0}, 'there are no steps, and the kernels cannot be launched on nothing'),
    'no packed sequence': (
        {'T': 0, 'cu_seqlens': torch.zeros(1, dtype=torch.int32)},
        'there are no steps, and the kernels cannot be launched on nothing',
    ),
}


def reason(function, arguments):
    """Why TileLang does not serve a call; another backend does."""
    decision = explain(function, **arguments)
    assert decision.winner != 'tilelang'
    assert decision['tilelang'].verdict == 'rejected'
    return decision['tilelang'].reason


@BOTH
@pytest.mark.parametrize('name', REFUSED)
def test_refused(function, name):
    changes, why = REFUSED[name]
    assert reason(function, case(function, **changes)) == why


@BOTH
def test_refuses_untested_sizes(function):
    def wide(T):
        shapes = {'q': (128,), 'k': (128,), 'v': (128,), 'g': (128,) if function is chunk_kda else (), 'beta': ()}
        return fakes({n: torch.empty(1, dtype=BF16).expand(1, T, 2, *s) for n, s in shapes.items()})

    assert reason(function, wide(2**23)).endswith('v must have fewer than 2^31 elements, got 2147483648')
    assert explain(function, **wide(2**23 - 1)).winner == 'tilelang'


def test_kda_refuses_intermediate_states():
    why = 'return_intermediate_states is for inference, and only the backward is in TileLang'
    with torch.no_grad():
        assert reason(chunk_kda, case(chunk_kda, return_intermediate_states=True)) == why


def test_kda_prefers_not_to_serve_without_gradients():
    arguments = case(chunk_kda)
    with torch.no_grad():
        assert explain(chunk_kda, **arguments).winner == 'default'
        with use_backend('tilelang', op='kda'):
            assert explain(chunk_kda, **arguments).winner == 'tilelang'
        assert explain(chunk_gated_delta_rule, **case(chunk_gated_delta_rule)).winner == 'tilelang'


@BOTH
def test_off_by_default(function, monkeypatch):
    monkeypatch.delenv('FLA_TILELANG')
    decision = explain(function, **case(function))
    assert (decision.winner, decision['tilelang'].verdict) == ('default', 'disabled')


@BOTH
def test_needs_hopper(function, monkeypatch):
    pretend(monkeypatch, A100)
    assert explain(function, **case(function))['tilelang'].reason == 'needs compute capability 9.0, NVIDIA A100 has 8.0'


@pytest.mark.parametrize(
    ('device', 'verdict'),
    [
        (H100, (True, None)),
        (B200, (False, ('the kernels are for compute capability 9.x, %s has %s.%s', 'NVIDIA B200', 10, 0))),
    ],
)
def test_the_probe_asks_for_the_generation_first(device, verdict):
    assert tilelang_call.on_hopper(device) == verdict


@BOTH
def test_an_unusable_package_falls_through(function, monkeypatch):
    """The probe is the real one."""
    unusable(monkeypatch, BACKENDS[function])
    decision = explain(function, **case(function))
    assert decision.winner == 'default'
    assert decision['tilelang'].verdict == 'unavailable'
    assert decision['tilelang'].reason == 'probe() raised ImportError: cannot import name from tvm_ffi'


def test_needs_triton(monkeypatch):
    monkeypatch.setattr(tilelang_call.importlib.util, 'find_spec', lambda name: None)
    ok, why = tilelang_call.usable('tilelang', None)
    assert not ok
    assert why.startswith("package 'triton' is not installed")


def test_nothing_is_compiled_in_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    with pytest.raises(RuntimeError, match='inside a CUDA graph capture'):
        tilelang_call.kernels_of((case, (1,)))


def test_a_kernel_is_compiled_once(monkeypatch):
    made = []
    monkeypatch.setattr(tilelang_call, '_compiled', {})
    monkeypatch.setattr(tilelang_call, 'compiled_for_hopper', lambda function: made.append(function) or [function])
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)

    def recipe(size):
        return size * 10

    assert tilelang_call.kernels_of((recipe, (1,)), (recipe, (2,)), (recipe, (1,))) == [[10], [20], [10]]
    assert tilelang_call.kernels_of((recipe, (2,)), (recipe, (3,))) == [[20], [30]]
    assert sorted(made) == [10, 20, 30]
