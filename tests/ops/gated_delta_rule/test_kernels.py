"""The kernels of the chunked gated delta rule: interpreted, against the step-by-step definition differentiated in float64;
and compiled, for GPUs that need not be here."""

import importlib.metadata

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.common.gates import beta_sigmoid, gdn_gate, l2norm
from fla.ops.common.naive import delta_rule_steps
from fla.ops.gated_delta_rule.kernels.launch import Options, chunk_backward, chunk_forward
from fla.utils.testing import relative_rms
from tests.triton_support.compile_only import compile_only

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ('q', 'k', 'v', 'g', 'beta', 'A_log', 'dt_bias', 'initial_state')
# Relative RMS errors: of most results, of dg and dbeta, and of the sums over all steps, whose terms cancel.
BOUNDS = {FP32: (1e-5, 1e-5, 5e-5), FP16: (1e-3, 2e-3, 4e-3), BF16: (6e-3, 1.2e-2, 2e-2)}
KIND = {'dg': 1, 'dbeta': 1, 'dA_log': 2, 'ddt_bias': 2}
IN_KERNEL = {'use_qk_l2norm_in_kernel': True, 'use_beta_sigmoid_in_kernel': True, 'use_gate_in_kernel': True}
EVERYTHING = {**IN_KERNEL, 'allow_neg_eigval': True, 'state_v_first': True, 'HV': 2}


def case(
    dtype=FP32,
    T=70,
    lens=None,
    B=1,
    H=1,
    HV=1,
    K=40,
    V=24,
    strength=None,
    initial=True,
    bias=True,
    gate_dtype=FP32,
    device='cpu',
    **options,
):
    """Tensor arguments in their order, `cu_seqlens` and the options. `strength` is None for gates like log(sigmoid(normal)),
    else those are spread evenly over the orders of magnitude from -1e-4 to -strength."""
    torch.manual_seed(0)
    cu_seqlens = None
    if lens is not None:
        cu_seqlens = torch.tensor([0, *lens]).cumsum(0).int().to(device)
        B, T = 1, sum(lens)
    N = B if lens is None else len(lens)
    options = Options(K**-0.5, **options)
    gate = options.use_gate_in_kernel
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    if not options.use_qk_l2norm_in_kernel:
        k = l2norm(k)
    v = torch.randn(B, T, HV, V)
    g = torch.randn(B, T, HV)
    if not gate:
        spread = (-9.21 + torch.rand(B, T, HV) * (9.21 + torch.tensor(strength or 1.0).log())).exp()
        g = torch.nn.functional.logsigmoid(g) if strength is None else -spread
    beta = torch.randn(B, T, HV) if options.use_beta_sigmoid_in_kernel else torch.rand(B, T, HV)
    A_log = torch.randn(HV) if gate else None
    dt_bias = torch.randn(HV) if gate and bias else None
    state = torch.randn(N, HV, *((V, K) if options.state_v_first else (K, V))) if initial else None
    tensors = (q.to(dtype), k.to(dtype), v.to(dtype), g.to(gate_dtype), beta.to(gate_dtype), A_log, dt_bias, state)
    return [None if x is None else x.to(device) for x in tensors], cu_seqlens, options


def oracle(tensors, cu_seqlens, options, do, d_final):
    """o, the final state and the gradients, in float64."""
    wide = [None if x is None else x.detach().double().requires_grad_() for x in tensors]
    q, k, v, g, beta, A_log, dt_bias, state = wide
    if options.use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if options.use_gate_in_kernel:
        g = gdn_gate(g, A_log, dt_bias)
    if options.use_beta_sigmoid_in_kernel:
        beta = beta_sigmoid(beta, options.allow_neg_eigval)
    if options.state_v_first and state is not None:
        state = state.transpose(-1, -2)
    o, final = delta_rule_steps(q, k, v, g, beta, options.scale, state, cu_seqlens)
    if options.state_v_first:
        final = final.transpose(-1, -2)
    loss = (o * do.double()).sum() + (0 if d_final is None else (final * d_final.double()).sum())
    given = [x for x in wide if x is not None]
    grads = iter(torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True))
    return o.detach(), final.detach(), [None if x is None else next(grads) for x in wide]


def run(tensors, cu_seqlens, options, do, d_final):
    """o, the final state if there is a gradient for it, and the gradients, from the kernels."""
    o, final, G, inverse = chunk_forward(*tensors, cu_seqlens, options, d_final is not None)
    return o, final, chunk_backward(*tensors, cu_seqlens, G, inverse, do, d_final, options)


def errors(tensors, cu_seqlens, options, with_final=True):
    """Relative RMS error of every result; zero gradients count by their absolute size."""
    N = tensors[0].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    K, V = tensors[0].shape[-1], tensors[2].shape[-1]
    do = torch.randn_like(tensors[2])
    dims = (V, K) if options.state_v_first else (K, V)
    d_final = torch.randn(N, tensors[2].shape[2], *dims, device=do.device) if with_final else None
    before = [None if x is None else x.clone() for x in tensors]
    o, final, gradients = run(tensors, cu_seqlens, options, do, d_final)
    expected_o, expected_final, expected = oracle(tensors, cu_seqlens, options, do, d_final)
    pairs = {'o': (expected_o, o)}
    assert o.dtype == tensors[2].dtype
    assert o.is_contiguous()
    if with_final:
        pairs['final'] = (expected_final, final)
    for name, x, same, gradient, right in zip(NAMES, tensors, before, gradients, expected, strict=True):
        if x is None:
            assert gradient is None
            continue
        assert torch.equal(x, same)
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        pairs[f'd{name}'] = (right, gradient)
    return {name: float(y.abs().max()) if not x.any() else relative_rms(x, y) for name, (x, y) in pairs.items()}


def check(dtype=FP32, with_final=True, **options):
    found = errors(*case(dtype, **options), with_final)
    wrong = {name: e for name, e in found.items() if not e < BOUNDS[dtype][KIND.get(name, 0)]}
    assert not wrong, f'{wrong} of {found}'


@pytest.mark.interpreted
@pytest.mark.parametrize('T', [1, 2, 17, 63, 64, 65, 130])
def test_lengths(T):
    check(T=T)


@pytest.mark.interpreted
@pytest.mark.parametrize('strength', [1e-3, 20.0])
@pytest.mark.parametrize('dtype', [FP32, BF16])
def test_gates_of_any_strength(strength, dtype):
    check(dtype, T=130, strength=strength)


@pytest.mark.interpreted
@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('dtype', [FP32, BF16])
def test_raw_gates(bias, dtype):
    check(dtype, T=80, bias=bias, **EVERYTHING)


@pytest.mark.interpreted
def test_gates_in_half_precision():
    """A gradient in bf16 is rounded once."""
    found = errors(*case(T=80, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, gate_dtype=BF16))
    rounded = {name: found.pop(name) for name in ('dg', 'dbeta')}
    assert max(found.values()) < 5e-5, found
    assert max(rounded.values()) < 3e-3, rounded


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', [FP32, BF16])
def test_packed(dtype):
    check(dtype, lens=[0, 1, 64, 0, 65, 3], **EVERYTHING)


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', [FP16, BF16])
@pytest.mark.parametrize('sizes', [{'K': 128, 'V': 128}, {'K': 20, 'V': 80}])
def test_halves(dtype, sizes):
    check(dtype, T=130, **sizes)


@pytest.mark.interpreted
@pytest.mark.parametrize('sizes', [{'K': 256, 'V': 16}, {'K': 16, 'V': 256}, {'K': 100, 'V': 5}])
def test_sizes(sizes):
    check(T=66, use_qk_l2norm_in_kernel=True, **sizes)


@pytest.mark.interpreted
@pytest.mark.parametrize(('initial', 'with_final'), [(False, False), (True, False), (False, True)])
def test_without_states(initial, with_final):
    check(initial=initial, with_final=with_final, B=2, H=2, HV=6, K=16, V=16)


@pytest.mark.interpreted
def test_beta_of_zero():
    """What would divide by beta fails here."""
    tensors, *call = case(T=20)
    tensors[4][:, ::3] = 0
    found = errors(tensors, *call)
    assert max(found.values()) < 1e-5, found


@pytest.mark.interpreted
def test_equal_keys():
    """The inverse of the worst condition: beta = 1, no decay and every key the same."""
    tensors, *call = case(T=64, K=16, V=16)
    tensors[1][:] = tensors[1][:, :1].clone()
    tensors[3].zero_()
    tensors[4].fill_(1.0)
    found = errors(tensors, *call)
    assert max(found.values()) < 1e-5, found


@pytest.mark.interpreted
def test_strided_inputs():
    tensors, cu_seqlens, options = case(B=2, H=2, HV=2, K=16, V=16)
    for i in range(3):
        x = tensors[i]
        room = x.new_full((x.shape[0], x.shape[2], x.shape[1] + 1, x.shape[3] + 3), float('nan'))
        tensors[i] = room[:, :, 1:, 2:-1].transpose(1, 2).copy_(x)
    tensors[0] = tensors[0].transpose(2, 3).contiguous().transpose(2, 3)
    for i in (3, 4):
        tensors[i] = tensors[i].transpose(1, 2).contiguous().transpose(1, 2)
    tensors[7] = tensors[7].transpose(2, 3).contiguous().transpose(2, 3)
    found = errors(tensors, cu_seqlens, options)
    assert max(found.values()) < 1e-5, found


@pytest.mark.interpreted
def test_gradients_of_a_sum():
    """Its gradient is one number, expanded."""
    tensors, cu_seqlens, options = case(T=20)
    do = torch.ones(()).expand(tensors[2].shape)
    _, _, gradients = run(tensors, cu_seqlens, options, do, None)
    _, _, expected = oracle(tensors, cu_seqlens, options, do, None)
    for x, y in zip(expected, gradients, strict=True):
        assert x is None or relative_rms(x, y) < 1e-5


@pytest.mark.interpreted
def test_same_bits():
    tensors, cu_seqlens, options = case(BF16, T=70, **EVERYTHING)
    do, d_final = torch.randn_like(tensors[2]), torch.randn_like(tensors[7])
    first, second = (run(tensors, cu_seqlens, options, do, d_final) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert all(map(torch.equal, first[2], second[2]))


# not by importing it: the child that interprets kernels has to set TRITON_INTERPRET first
OLD_TRITON = tuple(int(part) for part in importlib.metadata.version('triton').split('.')[:2]) < (3, 9)


@pytest.mark.parametrize(
    ('capability', 'version', 'usable'), [((10, 0), '3.6.0', False), ((10, 0), '3.9.0', True), ((9, 0), '3.6.0', True)]
)
def test_the_default_says_where_it_does_not_compile(monkeypatch, capability, version, usable):
    import triton

    from fla.ops.gated_delta_rule.chunk import CompilesHere
    from fla.utils.devices import Device

    monkeypatch.setattr(triton, '__version__', version)
    verdict, reason = CompilesHere().probe(Device('cuda', 0, 'some GPU', capability))
    assert (verdict, 'needs Triton 3.9' in str(reason)) == (usable, not usable)


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(('dtype', 'dim'), [(BF16, 128), (FP32, 256)])
def test_compiles(request, capability, dtype, dim):
    if capability == (10, 0) and OLD_TRITON:
        request.applymarker(pytest.mark.xfail(strict=True, reason='Triton before 3.9; the default says so there'))
    """And fits: see `compile_only`."""
    tensors, cu_seqlens, options = case(dtype, K=dim, V=dim, device='meta', **IN_KERNEL)
    with compile_only(capability) as compiled:
        o, final, G, inverse = chunk_forward(*tensors, cu_seqlens, options, True)
        chunk_backward(*tensors, cu_seqlens, G, inverse, o, final, options)
    print(*compiled, sep='\n')
