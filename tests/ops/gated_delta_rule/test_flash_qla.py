"""The FlashQLA backend with a stand-in for its package: what it accepts, what the package gets, and what comes back."""

import os
import sys
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fla.backends import default_dispatcher, explain
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.backends import flash_qla
from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend
from fla.ops.gated_delta_rule.backends.reference import GatedDeltaRuleReference
from fla.ops.recurrence.naive import delta_rule_steps
from fla.utils.testing import assert_close
from tests.ops.vendors import A100, BF16, FP16, FP32, H100, fakes, install, pretend, ran

VERSION = '0.1.3'
OP = 'gated_delta_rule'
NAMES = ('q', 'k', 'v', 'g', 'beta', 'initial_state')


class Package:
    """Stands for `flash_qla`: checks what the package assumes, and computes step by step."""

    def __init__(self):
        self.calls = []

    def prepare_varlen_metadata(self, cu_seqlens, cu_seqlens_cpu):
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        cu_seqlens._flash_qla_prepared_varlen = True
        return cu_seqlens

    def check(self, q, k, v, g, beta, initial_state, cu_seqlens, auto_cp):
        batch, length, _, dim = q.shape
        value_heads = v.shape[2]
        assert dim == v.shape[3] == 128
        assert q.dtype in (BF16, FP16)
        assert (k.shape, k.dtype, v.dtype) == (q.shape, q.dtype, q.dtype)
        assert (g.shape, g.dtype) == ((batch, length, value_heads), FP32)
        assert beta.shape == g.shape
        assert all(x.is_contiguous() for x in (q, k, v, g, beta))
        count = batch
        if cu_seqlens is not None:
            # it would look the tables up by the identity of the tensor, and assign them wrongly beside an empty sequence
            assert cu_seqlens._flash_qla_prepared_varlen
            assert bool((cu_seqlens.diff() > 0).all())
            assert not auto_cp
            count = len(cu_seqlens) - 1
        if initial_state is not None:
            assert (initial_state.shape, initial_state.dtype) == ((count, value_heads, 128, 128), FP32)
            assert initial_state.is_contiguous()

    def chunk_gated_delta_rule_fwd(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        cu_seqlens=None,
        output_final_state=True,
        auto_cp=True,
        state_v_first=False,
    ):
        self.check(q, k, v, g, beta, initial_state, cu_seqlens, auto_cp)
        self.calls.append({'scale': scale, 'auto_cp': auto_cp, 'cu': cu_seqlens, 'state_v_first': state_v_first})
        before = initial_state.transpose(-1, -2) if state_v_first and initial_state is not None else initial_state
        o, final = delta_rule_steps(q, k, v, g, beta, scale, before, cu_seqlens)
        final = final.transpose(-1, -2).contiguous() if state_v_first else final
        return g.clone(), v.new_empty(*g.shape, 64), o.to(v.dtype), None, final if output_final_state else None, None

    def chunk_gated_delta_rule_bwd(
        self,
        q,
        k,
        v,
        g,
        beta,
        A,
        do,
        dht=None,
        scale=None,
        initial_state=None,
        cu_seqlens=None,
        state_v_first=False,
        auto_cp=True,
    ):
        self.check(q, k, v, g, beta, initial_state, cu_seqlens, auto_cp)
        self.check(q, k, do, g, beta, dht, cu_seqlens, auto_cp)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        state = None if initial_state is None else initial_state.detach().requires_grad_()
        with torch.enable_grad():
            before = state.transpose(-1, -2) if state_v_first and state is not None else state
            o, final = delta_rule_steps(*leaves, scale, before, cu_seqlens)
            final = final.transpose(-1, -2) if state_v_first else final
            loss = (o * do).sum() + (0 if dht is None else (final * dht).sum())
        given = leaves if state is None else [*leaves, state]
        dq, dk, dv, dg, db, *dh0 = torch.autograd.grad(loss, given)
        return dq, dk, dv, db, dg, dh0[0] if dh0 else None


@pytest.fixture(autouse=True)
def fresh_dispatch(monkeypatch):
    for name in [n for n in os.environ if n.startswith('FLA_')]:
        monkeypatch.delenv(name)
    default_dispatcher().reset()
    yield
    default_dispatcher().reset()
    torch._dynamo.reset()


def install_package(monkeypatch, folder, version=VERSION):
    made = Package()
    functions = {name: getattr(made, name) for name in ('chunk_gated_delta_rule_fwd', 'chunk_gated_delta_rule_bwd')}
    install(monkeypatch, folder, 'flash_qla', 'flash-qla', version, __path__=[], **functions)
    for name in ('utils', 'utils.index'):
        module = types.ModuleType(f'flash_qla.{name}')
        module.__path__ = []
        monkeypatch.setitem(sys.modules, f'flash_qla.{name}', module)
    module.prepare_varlen_metadata = made.prepare_varlen_metadata
    monkeypatch.setenv('FLA_FLASH_QLA', '1')
    pretend(monkeypatch, H100)
    return made


probe = FlashQLABackend.probe


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The package is installed, works, and is switched on; the machine has an H100."""
    monkeypatch.setattr(FlashQLABackend, 'probe', lambda self, device: (True, None))
    return install_package(monkeypatch, tmp_path)


def case(B=1, T=5, H=2, HV=None, K=128, V=128, lens=None, dtype=BF16, gates=FP32, initial=None, **changes):
    """Arguments that FlashQLA serves, unless they are changed."""
    torch.manual_seed(0)
    HV = HV or H
    T = sum(lens) if lens else T
    arguments = {
        'q': torch.randn(B, T, H, K).to(dtype),
        'k': torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype),
        'v': torch.randn(B, T, HV, V).to(dtype),
        'g': torch.nn.functional.logsigmoid(torch.randn(B, T, HV)).to(gates),
        'beta': torch.rand(B, T, HV).to(gates),
    }
    if lens:
        arguments['cu_seqlens'] = torch.tensor([0, *lens]).cumsum(0).int()
        arguments['cu_seqlens_cpu'] = arguments['cu_seqlens'].clone()
    if initial is not None:
        arguments['initial_state'] = torch.randn(len(lens) if lens else B, HV, K, V).to(initial)
    return {**arguments, **changes}


def reason(arguments):
    """Why FlashQLA does not serve a call; the default does."""
    decision = explain(chunk_gated_delta_rule, **fakes(arguments))
    assert decision.winner == 'default'
    assert decision['flash_qla'].verdict == 'rejected'
    return decision['flash_qla'].reason


# -- what it accepts --------------------------------------------------------------------------------------------------------

SERVED = {
    'plain': {},
    'batch': {'B': 3, 'T': 70},
    'one step': {'T': 1},
    'float16': {'dtype': FP16},
    'gates in bf16': {'gates': BF16},
    'grouped values': {'H': 2, 'HV': 4},
    'scale': {'scale': 0.5},
    'final': {'output_final_state': True},
    'states': {'output_final_state': True, 'initial': FP32},
    'state in bf16': {'initial': BF16, 'state_v_first': True},
    'v first': {'output_final_state': True, 'initial': FP32, 'state_v_first': True},
    'packed': {'lens': [3, 1, 4]},
    'packed, some empty': {'lens': [0, 3, 0, 1, 4], 'output_final_state': True, 'initial': FP32},
    'packed, some empty, no state': {'lens': [3, 0, 1], 'output_final_state': True},
    'packed, v first': {'lens': [3, 0, 1], 'initial': BF16, 'output_final_state': True, 'state_v_first': True},
    'chunks laid out': {'lens': [3, 1], 'chunk_indices': torch.zeros(2, 2, dtype=torch.int32)},
}


@pytest.mark.parametrize('l2norm', [False, True])
@pytest.mark.parametrize('name', SERVED)
def test_served(package, name, l2norm):
    arguments = case(**SERVED[name], use_qk_l2norm_in_kernel=l2norm)
    backend, (o, final) = ran(chunk_gated_delta_rule, OP, fakes(arguments))
    assert backend == 'flash_qla'
    assert not package.calls  # tensors without data never reach it
    v = arguments['v']
    assert (o.shape, o.dtype, o.device.type, o.is_contiguous()) == (v.shape, v.dtype, 'cuda', True)
    if arguments.get('output_final_state'):
        count = len(SERVED[name].get('lens', [0]))
        assert (final.shape, final.dtype) == ((count, v.shape[2], 128, 128), FP32)
    else:
        assert final is None


def test_differentiable(package):
    arguments = fakes(case(initial=BF16, output_final_state=True))
    tensors = [value.requires_grad_() for value in arguments.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert explain(chunk_gated_delta_rule, **arguments).winner == 'flash_qla'


@pytest.mark.parametrize('name', SERVED)
def test_gradients_of_the_operator(name):
    """Through the backend, as compiled code calls it; on meta tensors, since autograd on fake GPU ones needs a GPU."""
    arguments = {k: v.to('meta') if isinstance(v, torch.Tensor) else v for k, v in case(**SERVED[name]).items()}
    tensors = [arguments[key].requires_grad_() for key in NAMES if key in arguments]
    o, final = FlashQLABackend().chunk_gated_delta_rule(**arguments)
    loss = o.sum() if final is None else o.sum() + final.sum()
    for tensor, gradient in zip(tensors, torch.autograd.grad(loss, tensors), strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)


# -- what it refuses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('changes', 'why'),
    [
        ({'scale': 0.0}, 'FlashQLA takes scale=0 for no scale'),
        (
            {'lens': [3, 1], 'cu_seqlens_cpu': None},
            'FlashQLA lays chunks out on the host: cu_seqlens needs cu_seqlens_cpu beside it',
        ),
        ({'K': 64}, 'K and V must be 128, got 64 and 128'),
        ({'V': 256}, 'K and V must be 128, got 128 and 256'),
        ({'T': 0}, 'there are no steps, and the kernels cannot be launched on nothing'),
        ({'B': 0}, 'there are no steps, and the kernels cannot be launched on nothing'),
        ({'use_beta_sigmoid_in_kernel': True}, 'argument use_beta_sigmoid_in_kernel is not supported'),
        ({'allow_neg_eigval': True}, 'argument allow_neg_eigval is not supported'),
        ({'use_gate_in_kernel': True, 'A_log': torch.zeros(2)}, 'argument use_gate_in_kernel is not supported'),
        ({'chunk_size': 64}, 'argument chunk_size is not supported'),
        ({'dtype': FP32}, "dtype of 'q' must be torch.bfloat16, torch.float16, got torch.float32"),
    ],
)
def test_refused(package, changes, why):
    assert reason(case(**changes)) == why


def test_refuses_packed_sequences_in_a_graph_capture(package, monkeypatch):
    """Its chunk tables are copied from the host."""
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    assert reason(case(lens=[3, 1])).startswith(
        'FlashQLA copies what it makes of cu_seqlens_cpu to the GPU, which a CUDA graph'
    )
    assert explain(chunk_gated_delta_rule, **fakes(case())).winner == 'flash_qla'


def test_refuses_what_32_bits_cannot_count(package):
    T = 2**29 // 256
    wide = {name: torch.empty(1, 1, 1, 1, dtype=BF16).expand(1, T, 2, 128) for name in 'qkv'}
    wide |= {name: torch.empty(1, 1, 1).expand(1, T, 2) for name in ('g', 'beta')}
    assert reason(case(**wide)).endswith('v must have fewer than 2^29 elements, got 536870912')
    shorter = {name: value[:, 1:] for name, value in wide.items()}
    assert explain(chunk_gated_delta_rule, **fakes(shorter)).winner == 'flash_qla'


def test_needs_hopper(package, monkeypatch):
    pretend(monkeypatch, A100)
    decision = explain(chunk_gated_delta_rule, **fakes(case()))
    assert decision.winner == 'default'
    assert decision['flash_qla'].reason == 'needs compute capability 9.0, NVIDIA A100 has 8.0'


def test_the_verifier_is_traceable():
    """And does not compile anew for another length."""
    backend, counter, ends = FlashQLABackend(), CompileCounter(), torch.tensor([0, 3, 7])

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def double_if_served(q, v):
        return q * 2 if backend.chunk_gated_delta_rule_verifier(q, v, None, ends, ends)[0] else q

    for length in (7, 12, 33):
        q, wrong = torch.ones(2, length, 2, 128), torch.ones(2, length, 2, 64)
        assert double_if_served(q, q).eq(2).all()
        assert double_if_served(q, wrong).eq(1).all()
    assert counter.frame_count <= 2  # one for each answer; that which does nothing is no graph


# -- whether it can be used -------------------------------------------------------------------------------------------------


def test_off_by_default(package, monkeypatch):
    monkeypatch.delenv('FLA_FLASH_QLA')
    decision = explain(chunk_gated_delta_rule, **fakes(case()))
    assert decision.winner == 'default'
    assert decision['flash_qla'].verdict == 'disabled'
    assert decision['flash_qla'].notes == ()


@pytest.mark.parametrize('version', ['0.1.2', '0.2'])
def test_version(monkeypatch, tmp_path, version):
    install_package(monkeypatch, tmp_path, version)
    decision = explain(chunk_gated_delta_rule, **fakes(case()))
    assert decision.winner == 'default'
    assert decision['flash_qla'].reason == f'flash-qla {version} is installed, <0.2,>=0.1.3 is needed'


def on_the_cpu(monkeypatch):
    """The probe's call, where the stand-in can compute; our own kernel cannot run there."""
    one_chunk = flash_qla._one_chunk
    monkeypatch.setattr(flash_qla, '_one_chunk', lambda device: one_chunk(torch.device('cpu')))
    monkeypatch.setattr(flash_qla, '_normalized', lambda x, wanted: torch.nn.functional.normalize(x.float(), dim=-1).to(x))


def test_the_probe_accepts_what_works(monkeypatch, tmp_path):
    package = install_package(monkeypatch, tmp_path)
    on_the_cpu(monkeypatch)
    backend, _ = ran(chunk_gated_delta_rule, OP, fakes(case()))
    assert backend == 'flash_qla'
    assert len(package.calls) == 1  # with real tensors, although the call has none


def computes_nonsense(q, k, v, g, beta, **others):
    return g, g, v * 7, None, None, None


def no_kernel(*args, **others):
    raise ValueError('FlashQLA now support sm90, sm100, sm103, sm120 and sm121 only')


@pytest.mark.parametrize(
    ('forward', 'why'),
    [
        (no_kernel, 'probe() raised ValueError: FlashQLA now support sm90, sm100, sm103, sm120 and sm121 only'),
        (computes_nonsense, 'its smallest call is off by 6.5 where 0.5 is right'),
    ],
)
def test_an_unusable_package_falls_through(monkeypatch, tmp_path, forward, why):
    install_package(monkeypatch, tmp_path)
    monkeypatch.setattr(sys.modules['flash_qla'], 'chunk_gated_delta_rule_fwd', forward)
    on_the_cpu(monkeypatch)
    arguments = fakes(case())
    decision = explain(chunk_gated_delta_rule, **arguments)
    assert decision.winner == 'default'
    assert (decision['flash_qla'].verdict, decision['flash_qla'].reason) == ('unavailable', why)
    backend, _ = ran(chunk_gated_delta_rule, OP, arguments)
    assert backend == 'default'


def test_a_package_that_cannot_be_imported_here(monkeypatch, tmp_path):
    """As without a GPU: it asks for one while it is imported."""
    (tmp_path / 'flash_qla').mkdir()
    (tmp_path / 'flash_qla' / '__init__.py').write_text("raise RuntimeError('no CUDA GPUs are available')\n")
    install_package(monkeypatch, tmp_path)
    monkeypatch.delitem(sys.modules, 'flash_qla')
    on_the_cpu(monkeypatch)
    decision = explain(chunk_gated_delta_rule, **fakes(case()))
    assert decision.winner == 'default'
    assert decision['flash_qla'].reason == 'probe() raised RuntimeError: no CUDA GPUs are available'


# -- what the package gets, and what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize('with_final', [False, True])
@pytest.mark.parametrize('name', SERVED)
def test_numbers(package, name, with_final):
    """On the CPU, through the functions that the operators run."""
    arguments = case(**SERVED[name])
    arguments['output_final_state'] = with_final
    leaves = {key: arguments[key].double().requires_grad_() for key in NAMES if key in arguments}
    expected = GatedDeltaRuleReference().chunk_gated_delta_rule(**{**arguments, **leaves})
    do = torch.randn(expected[0].shape).to(arguments['v'])
    d_final = torch.randn(expected[1].shape) if with_final else None
    loss = (expected[0] * do).sum() + ((expected[1] * d_final).sum() if with_final else 0)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    tensors = [arguments.get(key) for key in (*NAMES, 'cu_seqlens_cpu')]
    before = [None if x is None else x.clone() for x in tensors]
    scale = arguments.get('scale', 128**-0.5)
    v_first = arguments.get('state_v_first', False)
    o, final, *kept = flash_qla._forward(*tensors, scale, with_final, False, v_first)
    found = flash_qla._backward(*tensors, scale, False, v_first, *kept, do, d_final)
    assert all(x is None or torch.equal(x, y) for x, y in zip(tensors, before, strict=True))

    bound = FlashQLABackend.tolerance[BF16]
    assert (o.dtype, o.is_contiguous()) == (arguments['v'].dtype, True)
    assert_close('o', expected[0], o, bound)
    assert (final is None) == (not with_final)
    if with_final:
        assert final.dtype == FP32
        assert_close('final', expected[1], final, bound)
    for key, gradient in zip(NAMES, found, strict=True):
        if key not in arguments:
            assert gradient is None
            continue
        assert (gradient.shape, gradient.dtype) == (arguments[key].shape, arguments[key].dtype)
        assert_close(f'd{key}', gradients[key], gradient, bound)
    (call,) = package.calls
    assert call['scale'] == scale
    assert call['auto_cp'] == ('lens' not in SERVED[name])
    if call['cu'] is not None:
        assert call['cu'] is not arguments['cu_seqlens']
        assert call['cu'].dtype == arguments['cu_seqlens'].dtype


def test_strided_and_misplaced(package):
    arguments = case(T=6)
    tensors = [arguments[key] for key in NAMES[:5]]
    o = flash_qla._forward(*tensors, None, None, 1.0, False, False, False)[0]
    moved = [torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x) for x in tensors[:3]]
    assert all(x.data_ptr() % 16 for x in moved)
    moved += [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[3:]]
    assert torch.equal(flash_qla._forward(*moved, None, None, 1.0, False, False, False)[0], o)


@pytest.mark.interpreted
def test_normalised(monkeypatch, tmp_path):
    """Our own kernel stands before and behind the package's."""
    install_package(monkeypatch, tmp_path)
    arguments = case(T=20, B=2)
    leaves = [arguments[key].double().requires_grad_() for key in NAMES[:5]]
    expected, _ = GatedDeltaRuleReference().chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)
    do = torch.randn(expected.shape).to(BF16)
    gradients = torch.autograd.grad((expected * do).sum(), leaves)
    tensors = [arguments.get(key) for key in (*NAMES, 'cu_seqlens_cpu')]
    scale = 128**-0.5
    o, _, *kept = flash_qla._forward(*tensors, scale, False, True, False)
    assert_close('o', expected, o, 1e-2)
    found = flash_qla._backward(*tensors, scale, True, False, *kept, do, None)
    for name, gradient, exact in zip(NAMES[:5], found[:5], gradients, strict=True):
        assert_close(f'd{name}', exact, gradient, 1e-2)
