"""The FlashKDA backend with a stand-in for its package: what it accepts, what the package gets, and what comes back."""

import os

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fla.backends import default_dispatcher, explain
from fla.ops.kda import chunk_kda
from fla.ops.kda.backends import flash_kda
from fla.ops.kda.backends.flash_kda import FlashKDABackend
from fla.ops.kda.backends.reference import KDAReference
from fla.ops.recurrence.naive import delta_rule_steps
from fla.utils.testing import assert_close
from tests.ops.vendors import A100, BF16, FP32, H100, fakes, install, pretend, ran

FLAGS = {
    'use_qk_l2norm_in_kernel': True,
    'use_gate_in_kernel': True,
    'use_beta_sigmoid_in_kernel': True,
    'lower_bound': -5.0,
}
VERSION = '0.0.1.post20260526'


class Package:
    """Stands for `flash_kda`: checks what the extension checks, and computes step by step."""

    def __init__(self):
        self.calls = []

    def fwd(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state=None,
        final_state=None,
        cu_seqlens=None,
    ):
        self.calls.append(
            {'scale': scale, 'lower_bound': lower_bound, 'initial': initial_state, 'final': final_state, 'cu': cu_seqlens}
        )
        batch, _, heads, dim = q.shape
        for x in (q, k, v, g, out):
            assert (x.shape, x.dtype, x.is_contiguous()) == (q.shape, BF16, True)
        assert (beta.shape, beta.dtype, beta.is_contiguous()) == (q.shape[:3], BF16, True)
        assert (A_log.shape, A_log.dtype, A_log.is_contiguous()) == ((heads,), FP32, True)
        assert (dt_bias.shape, dt_bias.dtype, dt_bias.is_contiguous()) == ((heads, dim), FP32, True)
        count = batch if cu_seqlens is None else len(cu_seqlens) - 1
        assert cu_seqlens is None or (batch, cu_seqlens.dtype) == (1, torch.int64)
        for state in (initial_state, final_state):
            if state is not None:
                assert (state.shape, state.dtype, state.is_contiguous()) == ((count, heads, dim, dim), FP32, True)
        q, k = (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        gate = lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g.float() + dt_bias))
        before = None if initial_state is None else initial_state.transpose(-1, -2)
        o, final = delta_rule_steps(q, k, v, gate, beta.float().sigmoid(), scale, before, cu_seqlens)
        out.copy_(o)
        if final_state is not None:
            final_state.copy_(final.transpose(-1, -2))


@pytest.fixture(autouse=True)
def fresh_dispatch(monkeypatch):
    for name in [n for n in os.environ if n.startswith('FLA_')]:
        monkeypatch.delenv(name)
    default_dispatcher().reset()
    yield
    default_dispatcher().reset()
    torch._dynamo.reset()


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The package is installed, works, and is switched on; the machine has an H100."""
    made = Package()
    install(monkeypatch, tmp_path, 'flash_kda', 'tokenspeed-flashkda', VERSION, fwd=made.fwd)
    monkeypatch.setenv('FLA_FLASH_KDA', '1')
    monkeypatch.setattr(FlashKDABackend, 'probe', lambda self, device: (True, None))
    pretend(monkeypatch, H100)
    return made


def case(B=1, T=5, H=2, HV=None, K=128, V=128, lens=None, dtype=BF16, initial=None, **changes):
    """Arguments that FlashKDA serves, unless they are changed."""
    torch.manual_seed(0)
    HV = HV or H
    T = sum(lens) if lens else T
    arguments = {
        'q': torch.randn(B, T, H, K).to(dtype),
        'k': torch.randn(B, T, H, K).to(dtype),
        'v': torch.randn(B, T, HV, V).to(dtype),
        'g': torch.randn(B, T, HV, K).to(dtype),
        'beta': torch.randn(B, T, HV).to(dtype),
        'A_log': torch.randn(HV) * 0.3,
        'dt_bias': torch.randn(HV * K),
        **FLAGS,
    }
    if lens:
        arguments['cu_seqlens'] = torch.tensor([0, *lens]).cumsum(0).int()
    if initial is not None:
        arguments['initial_state'] = torch.randn(len(lens) if lens else B, HV, K, V).to(initial)
    return {**arguments, **changes}


def reason(arguments):
    """Why FlashKDA does not serve a call; the default does."""
    decision = explain(chunk_kda, **fakes(arguments))
    assert decision.winner == 'default'
    assert decision['flash_kda'].verdict == 'rejected'
    return decision['flash_kda'].reason


# -- what it accepts --------------------------------------------------------------------------------------------------------

SERVED = {
    'plain': {},
    'batch': {'B': 3, 'T': 70},
    'one step': {'T': 1},
    'no rate': {'A_log': None},
    'no bias': {'dt_bias': None},
    'rate in bf16': {'A_log': torch.zeros(2, dtype=BF16)},
    'promised': {'safe_gate': True, 'lower_bound': -1.0},
    'promises nothing': {'lower_bound': -4},
    'scale': {'scale': 0.5},
    'final': {'output_final_state': True},
    'states': {'output_final_state': True, 'initial': FP32},
    'state in bf16': {'initial': BF16, 'state_v_first': True},
    'v first': {'output_final_state': True, 'initial': FP32, 'state_v_first': True},
    'packed': {'lens': [3, 0, 1, 4], 'output_final_state': True, 'initial': FP32},
    'packed, known on the host': {'lens': [3, 1], 'cu_seqlens_cpu': torch.tensor([0, 3, 4], dtype=torch.int32)},
    'nothing to recompute': {'disable_recompute': True},
}


@pytest.mark.parametrize('name', SERVED)
def test_served(package, name):
    arguments = case(**SERVED[name])
    with torch.no_grad():
        backend, (o, final) = ran(chunk_kda, 'kda', fakes(arguments))
    assert backend == 'flash_kda'
    assert not package.calls  # tensors without data never reach it
    assert (o.shape, o.dtype, o.device.type, o.is_contiguous()) == (arguments['v'].shape, BF16, 'cuda', True)
    if arguments.get('output_final_state'):
        count = len(SERVED[name].get('lens', [0]))
        assert (final.shape, final.dtype) == ((count, 2, 128, 128), FP32)
    else:
        assert final is None


def test_inference_only(package):
    arguments = fakes(case())
    arguments['A_log'].requires_grad_()
    decision = explain(chunk_kda, **arguments)
    assert decision.winner == 'default'
    assert decision['flash_kda'].reason == 'inference only, and a tensor argument requires grad'
    with torch.no_grad():
        assert explain(chunk_kda, **arguments).winner == 'flash_kda'


# -- what it refuses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('changes', 'why'),
    [
        (
            {'use_gate_in_kernel': False, 'lower_bound': None, 'A_log': None, 'dt_bias': None},
            'the kernel applies the gate itself: it needs use_gate_in_kernel=True and raw gates',
        ),
        ({'lower_bound': None}, 'the kernel has bounded gates only: it needs lower_bound'),
        ({'lower_bound': -5.5}, 'lower_bound must be at least -5, got -5.5'),
        (
            {'use_qk_l2norm_in_kernel': False},
            'the kernel normalises q and k: it needs use_qk_l2norm_in_kernel=True',
        ),
        (
            {'use_beta_sigmoid_in_kernel': False},
            'the kernel applies the sigmoid to beta: it needs use_beta_sigmoid_in_kernel=True and logits',
        ),
        ({'K': 64}, 'K and V must be 128, got 64 and 128'),
        ({'V': 256}, 'K and V must be 128, got 128 and 256'),
        ({'HV': 4}, 'grouped values are not supported: q has 2 heads, v has 4'),
        ({'T': 0}, 'there are no steps, and the kernel cannot be launched on nothing'),
        ({'B': 0}, 'there are no steps, and the kernel cannot be launched on nothing'),
        ({'allow_neg_eigval': True}, 'argument allow_neg_eigval is not supported'),
        ({'return_intermediate_states': True}, 'argument return_intermediate_states is not supported'),
        ({'chunk_size': 64}, 'argument chunk_size is not supported'),
        ({'dtype': torch.float16}, "dtype of 'q' must be torch.bfloat16, got torch.float16"),
        ({'g': torch.zeros(1, 5, 2, 128)}, "dtype of 'g' must be torch.bfloat16, got torch.float32"),
        ({'beta': torch.zeros(1, 5, 2)}, "dtype of 'beta' must be torch.bfloat16, got torch.float32"),
    ],
)
def test_refused(package, changes, why):
    assert reason(case(**changes)) == why


def test_refuses_what_32_bits_cannot_count(package):
    T = 2**31 // 256
    wide = {name: torch.empty(1, 1, 1, 1, dtype=BF16).expand(1, T, 2, 128) for name in 'qkvg'}
    arguments = case(**wide, beta=torch.empty(1, 1, 1, dtype=BF16).expand(1, T, 2))
    assert reason(arguments).endswith('q must have fewer than 2^31 elements, got 2147483648')
    shorter = {name: arguments[name][:, 1:] for name in ('q', 'k', 'v', 'g', 'beta')}
    assert explain(chunk_kda, **fakes({**arguments, **shorter})).winner == 'flash_kda'


def test_needs_hopper(package, monkeypatch):
    pretend(monkeypatch, A100)
    decision = explain(chunk_kda, **fakes(case()))
    assert decision.winner == 'default'
    assert decision['flash_kda'].reason == 'needs compute capability 9.0, NVIDIA A100 has 8.0'


def test_the_verifier_is_traceable():
    """And does not compile anew for another length."""
    backend, counter = FlashKDABackend(), CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def double_if_served(q, v):
        return q * 2 if backend.chunk_kda_verifier(q, v, True, True, True, -5.0)[0] else q

    for length in (7, 12, 33):
        q, wrong = torch.ones(2, length, 2, 128), torch.ones(2, length, 2, 64)
        assert double_if_served(q, q).eq(2).all()
        assert double_if_served(q, wrong).eq(1).all()
    assert counter.frame_count <= 2  # one for each answer; that which does nothing is no graph


# -- whether it can be used -------------------------------------------------------------------------------------------------


def test_on_by_default(package, monkeypatch):
    monkeypatch.delenv('FLA_FLASH_KDA')
    decision = explain(chunk_kda, **fakes(case()))
    assert (decision.winner, decision['flash_kda'].notes) == ('flash_kda', ())
    monkeypatch.setenv('FLA_FLASH_KDA', '0')
    assert explain(chunk_kda, **fakes(case()))['flash_kda'].verdict == 'disabled'


@pytest.mark.parametrize(
    ('version', 'winner'), [('0.0.1.post20260525', 'default'), (VERSION, 'flash_kda'), ('0.0.1.post20260901', 'flash_kda')]
)
def test_version(package, monkeypatch, tmp_path, version, winner):
    (tmp_path / 'other').mkdir()
    install(monkeypatch, tmp_path / 'other', 'flash_kda', 'tokenspeed-flashkda', version, fwd=package.fwd)
    decision = explain(chunk_kda, **fakes(case()))
    assert decision.winner == winner
    if winner == 'default':
        assert decision['flash_kda'].reason == f'tokenspeed-flashkda {version} is installed, >={VERSION} is needed'


def built_for_another_torch(*args, **kwargs):
    raise RuntimeError('all tensors must be on CUDA')


def computes_nonsense(q, k, v, g, beta, scale, out, **others):
    out.fill_(7.0)


probe = FlashKDABackend.probe


def test_the_probe_accepts_what_works(package, monkeypatch):
    one_step = flash_kda._one_step
    monkeypatch.setattr(flash_kda, '_one_step', lambda device: one_step(torch.device('cpu')))
    monkeypatch.setattr(FlashKDABackend, 'probe', probe)
    backend, _ = ran(chunk_kda, 'kda', fakes(case()))
    assert backend == 'flash_kda'
    assert len(package.calls) == 1  # with real tensors, although the call has none


def test_the_probe_is_not_tried_inside_a_capture(package, monkeypatch):
    monkeypatch.setattr(FlashKDABackend, 'probe', probe)
    pretend(monkeypatch, H100, capturing=True)
    decision = explain(chunk_kda, **fakes(case()))
    assert decision.winner == 'default'
    assert 'inside a CUDA graph capture' in decision['flash_kda'].reason
    assert not package.calls


@pytest.mark.parametrize(
    ('fwd', 'why'),
    [
        (built_for_another_torch, 'probe() raised RuntimeError: all tensors must be on CUDA'),
        (computes_nonsense, 'its smallest call is off by 6.5 where 0.5 is right'),
    ],
)
def test_an_unusable_package_falls_through(monkeypatch, tmp_path, fwd, why):
    install(monkeypatch, tmp_path, 'flash_kda', 'tokenspeed-flashkda', VERSION, fwd=fwd)
    monkeypatch.setenv('FLA_FLASH_KDA', '1')
    one_step = flash_kda._one_step
    monkeypatch.setattr(flash_kda, '_one_step', lambda device: one_step(torch.device('cpu')))
    pretend(monkeypatch, H100)
    arguments = fakes(case())
    decision = explain(chunk_kda, **arguments)
    assert decision.winner == 'default'
    assert (decision['flash_kda'].verdict, decision['flash_kda'].reason) == ('unavailable', why)
    backend, _ = ran(chunk_kda, 'kda', arguments)
    assert backend == 'default'


# -- what the package gets, and what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize('name', SERVED)
def test_numbers(package, name):
    """On the CPU, through the function that the operator runs."""
    arguments = case(**SERVED[name])
    expected = KDAReference().chunk_kda(**{key: arguments[key] for key in arguments if key != 'safe_gate'})
    flags = {key for key in FLAGS if key != 'lower_bound'} | {'safe_gate', 'disable_recompute', 'cu_seqlens_cpu'}
    given = {'initial_state': None, 'cu_seqlens': None, 'output_final_state': False, 'scale': None, **arguments}
    given = {key: value for key, value in given.items() if key not in flags}
    given['scale'] = 128**-0.5 if given['scale'] is None else given['scale']
    before = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    o, final = flash_kda._forward(**{'state_v_first': False, **given})
    assert (o.dtype, o.is_contiguous()) == (BF16, True)
    assert_close('o', expected[0], o, 5e-3)
    assert (final is None) == (expected[1] is None)
    if final is not None:
        assert final.is_contiguous()
        assert_close('final', expected[1], final, 5e-3)
    assert all(torch.equal(given[key], value) for key, value in before.items())
    (call,) = package.calls
    assert call['scale'] == given['scale']
    assert call['lower_bound'] == arguments['lower_bound']
    if 'cu_seqlens' in arguments:
        assert call['cu'].tolist() == arguments['cu_seqlens'].tolist()


@pytest.mark.parametrize('ends', [[0, 4, 2, 6], [0, -1, 3, 900]], ids=str)
def test_bad_lengths_stay_within_the_steps(package, ends):
    """The kernel trusts them."""
    arguments = case(lens=[1, 2, 3], cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    given = {key: value for key, value in arguments.items() if key not in FLAGS}
    given |= {'initial_state': None, 'scale': 1.0, 'lower_bound': -5.0, 'output_final_state': False}
    flash_kda._forward(**given, state_v_first=False)
    found = package.calls[0]['cu'].tolist()
    assert (found, found[0], found[-1]) == (sorted(found), 0, 6)


def test_strided_and_misplaced(package):
    arguments = case(T=6)
    given = {key: value for key, value in arguments.items() if key not in FLAGS}
    given |= {'initial_state': None, 'cu_seqlens': None, 'scale': 1.0, 'lower_bound': -5.0, 'output_final_state': False}
    o, _ = flash_kda._forward(**given, state_v_first=False)
    for name in 'qkvg':
        shifted = torch.empty(given[name].numel() + 1, dtype=BF16)[1:].view_as(given[name])
        given[name] = shifted.copy_(given[name])
        assert given[name].data_ptr() % 16
    given['beta'] = given['beta'].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(flash_kda._forward(**given, state_v_first=False)[0], o)
