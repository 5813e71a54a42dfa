"""The kernels of chunked KDA, interpreted, against the step-by-step definition differentiated in float64."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.common.gates import beta_sigmoid, kda_gate, l2norm
from fla.ops.common.naive import delta_rule_steps
from fla.ops.kda.kernels.launch import Settings, chunk_backward, chunk_forward
from fla.utils.testing import relative_rms

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ('q', 'k', 'v', 'g', 'beta', 'A_log', 'dt_bias', 'initial_state')
# relative RMS errors; gates, beta and what is summed over their gradients count as gates
BOUNDS = {FP32: (1e-5, 1e-5), FP16: (2e-3, 4e-3), BF16: (8e-3, 1.5e-2)}


def case(
    dtype=FP32,
    T=70,
    lens=None,
    B=1,
    H=1,
    HV=1,
    K=40,
    V=24,
    strength=1.0,
    gate=None,
    raw=None,
    initial=True,
    device='cpu',
    **settings,
):
    """Arguments of a call and the settings.

    `strength` multiplies gates that are drawn, `gate` is that of every step and channel. `raw` is None, 'softplus',
    'bounded' or 'bounded, no rate'.
    """
    torch.manual_seed(0)
    cu_seqlens = None
    if lens is not None:
        cu_seqlens = torch.tensor([0, *lens]).cumsum(0).int()
        B, T = 1, sum(lens)
    N = B if lens is None else len(lens)
    settings = Settings(K**-0.5, gate=raw is not None, lower_bound=-5.0 if raw and 'bounded' in raw else None, **settings)
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    if not settings.normalise:
        k = l2norm(k)
    v = torch.randn(B, T, HV, V)
    g = torch.randn(B, T, HV, K)
    if not raw:
        g = strength * torch.nn.functional.logsigmoid(g) if gate is None else torch.full_like(g, gate)
    beta = torch.randn(B, T, HV) if settings.sigmoid else torch.rand(B, T, HV)
    A_log = torch.randn(HV) if raw in ('softplus', 'bounded') else None
    dt_bias = torch.randn(HV * K) if raw else None
    state = torch.randn(N, HV, *((V, K) if settings.v_first else (K, V))) if initial else None
    inputs = dict(zip(NAMES, (q.to(dtype), k.to(dtype), v.to(dtype), g, beta, A_log, dt_bias, state), strict=True))
    inputs = {name: None if x is None else x.to(device) for name, x in inputs.items()}
    return inputs, settings, None if cu_seqlens is None else cu_seqlens.to(device)


def oracle(inputs, settings, cu_seqlens, do, d_final):
    """o, the final state and the gradients, in float64."""
    wide = {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}
    q, k, v, g, beta, A_log, dt_bias, state = wide.values()
    if settings.normalise:
        q, k = l2norm(q), l2norm(k)
    if settings.gate:
        g = kda_gate(g, A_log, dt_bias, settings.lower_bound)
    if settings.sigmoid:
        beta = beta_sigmoid(beta, settings.double)
    if settings.v_first and state is not None:
        state = state.transpose(-1, -2)
    o, final = delta_rule_steps(q, k, v, g, beta, settings.scale, state, cu_seqlens)
    if settings.v_first:
        final = final.transpose(-1, -2)
    loss = (o * do.double()).sum() + (0 if d_final is None else (final * d_final.double()).sum())
    given = {name: x for name, x in wide.items() if x is not None}
    grads = torch.autograd.grad(loss, list(given.values()), allow_unused=True, materialize_grads=True)
    return o, final, dict(zip(given, grads, strict=True))


def errors(inputs, settings, cu_seqlens, with_final=True, keep=False):
    """Relative RMS error of every result; zero gradients count by their absolute size."""
    call = dict(inputs)
    state, A_log, dt_bias = (call.pop(name) for name in ('initial_state', 'A_log', 'dt_bias'))
    before = {name: None if x is None else x.clone() for name, x in inputs.items()}
    o, final, saved, _ = chunk_forward(*call.values(), settings, state, with_final, A_log, dt_bias, cu_seqlens, keep)
    do = torch.randn_like(o)
    d_final = torch.randn_like(final) if with_final else None
    gradients = chunk_backward(saved, settings, do, d_final)._asdict()
    if keep:
        again = chunk_backward(saved, settings, do, d_final)._asdict()
        for name, x in gradients.items():
            assert x is None or torch.equal(x, again[name])
    expected_o, expected_final, expected = oracle(inputs, settings, cu_seqlens, do, d_final)
    pairs = {'o': (expected_o, o)}
    if with_final:
        pairs['final'] = (expected_final, final)
    for name, x in inputs.items():
        if x is None:
            assert gradients[name] is None
            continue
        assert torch.equal(x, before[name])
        assert (gradients[name].shape, gradients[name].dtype) == (x.shape, x.dtype)
        pairs[f'd{name}'] = (expected[name], gradients[name])
    return {name: float(y.detach().abs().max()) if not x.any() else relative_rms(x, y) for name, (x, y) in pairs.items()}


def check(dtype, slack=1, **options):
    run = {name: options.pop(name) for name in ('with_final', 'keep') if name in options}
    found = errors(*case(dtype, **options), **run)
    gates = ('dg', 'dbeta', 'dA_log', 'ddt_bias')
    wrong = {name: e for name, e in found.items() if not e < slack * BOUNDS[dtype][name in gates]}
    assert not wrong, f'{wrong} of {found}'


pytestmark = pytest.mark.interpreted
EVERYTHING = {'H': 1, 'HV': 2, 'normalise': True, 'sigmoid': True, 'double': True, 'v_first': True}


@pytest.mark.parametrize('T', [1, 17, 64, 65, 130])
def test_lengths(T):
    check(FP32, T=T)


@pytest.mark.parametrize(
    ('dtype', 'gates'),
    [
        (FP32, {'strength': 1e-4}),
        (FP32, {'strength': 5.0}),
        # sums of 64 gates reach -1000, which float32 holds to 6e-5
        (FP32, {'strength': 20.0, 'slack': 3}),
        (FP32, {'gate': 0.0}),
        (FP32, {'gate': -1e-4}),
        (FP32, {'gate': -20.0}),
        (BF16, {'strength': 1e-4}),
        (BF16, {'strength': 20.0}),
        (BF16, {'gate': -20.0}),
    ],
)
def test_gates_of_any_strength(dtype, gates):
    check(dtype, T=70, **gates)


def test_gates_that_forget_everything():
    inputs, settings, cu_seqlens = case(gate=-1000.0)
    found = errors(inputs, settings, cu_seqlens)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize('raw', ['softplus', 'bounded', 'bounded, no rate'])
@pytest.mark.parametrize('dtype', [FP32, BF16])
def test_raw_gates(raw, dtype):
    check(dtype, raw=raw, T=66, **EVERYTHING)


@pytest.mark.parametrize('dtype', [FP32, BF16])
def test_packed(dtype):
    check(dtype, lens=[0, 1, 65, 0, 3], raw='softplus', **EVERYTHING)


@pytest.mark.parametrize('dtype', [FP16, BF16])
@pytest.mark.parametrize('sizes', [{'K': 64, 'V': 128}, {'K': 20, 'V': 80}])
def test_halves(dtype, sizes):
    check(dtype, T=130, **sizes)


@pytest.mark.parametrize('sizes', [{'K': 256, 'V': 16}, {'K': 16, 'V': 256}, {'K': 100, 'V': 5}])
def test_sizes(sizes):
    check(FP32, T=66, normalise=True, **sizes)


@pytest.mark.parametrize(('initial', 'with_final'), [(False, False), (True, False), (False, True)])
def test_without_states(initial, with_final):
    check(FP32, initial=initial, with_final=with_final, T=33, B=2, H=2, HV=4, K=16, V=16)


def test_kept_tensors_serve_twice():
    check(FP32, keep=True, raw='softplus', **EVERYTHING)


def test_strided_inputs():
    (inputs, settings, cu_seqlens) = case(T=33, B=2, H=2, HV=2, K=16, V=16)
    for name in ('q', 'k', 'v', 'g'):
        x = inputs[name]
        room = x.new_full((x.shape[0], x.shape[2], x.shape[1] + 1, x.shape[3] + 3), float('nan'))
        inputs[name] = room[:, :, 1:, 2:-1].transpose(1, 2).copy_(x)
    inputs['beta'] = inputs['beta'].transpose(1, 2).contiguous().transpose(1, 2)
    found = errors(inputs, settings, cu_seqlens)
    assert max(found.values()) < 1e-5, found
