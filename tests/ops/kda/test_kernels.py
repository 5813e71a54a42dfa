"""The kernels of Kimi delta attention, interpreted; tests/ops/test_kernels.py tests what both delta rules have."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.kda import chunk_kda
from fla.ops.kda.kernels import launch
from fla.ops.kda.kernels.gates import FAR, NEAR, WHOLE
from fla.ops.kda.kernels.launch import block_kinds, chunk_forward
from fla.ops.recurrence.arguments import Inputs, Options
from tests import bounds
from tests.ops.delta_rules import case
from tests.ops.kernels import BF16, EVERYTHING, FP32, assert_same, call, check, everything

pytestmark = pytest.mark.interpreted


def test_saved_intermediates_give_the_same_gradients_twice():
    given = case(chunk_kda, dtype=BF16, HV=2, **EVERYTHING)
    assert_same(everything(chunk_kda, given), everything(chunk_kda, given, disable_recompute=True))
    leaves = {name: x.requires_grad_() for name, x in given.tensors.items()}
    o, _ = call(chunk_kda, given, disable_recompute=True)
    first, second = (torch.autograd.grad(o.sum(), list(leaves.values()), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize('v_first', [False, True])
def test_intermediate_states(v_first):
    """The state before each chunk."""
    given = case(chunk_kda, T=130, B=2, HV=2, state_v_first=v_first)
    with torch.no_grad():
        *_, states = call(chunk_kda, given, return_intermediate_states=True)
        wide = given.with_tensors(**{n: x.double() for n, x in given.tensors.items()})
        *_, right = call(chunk_kda, wide, 'reference', return_intermediate_states=True, chunk_size=64)
    assert states.shape == right.shape
    assert bounds.relative_rms(right, states) <= bounds.of_kernel('final', FP32)[0]


@pytest.mark.pairwise
@pytest.mark.parametrize('lens', [None, [64, 33, 0, 1, 40]], ids=['equal', 'packed'])
@pytest.mark.parametrize('dtype', [FP32, BF16, torch.float16])
@pytest.mark.parametrize(('strength', 'kind'), [(-1.0, WHOLE), (-3.0, NEAR), (-7.4, NEAR), (-20.0, FAR)])
def test_decays_decide_the_kind_of_a_block(strength, kind, dtype, lens):
    """The kinds of blocks decide which kernels compute them. The end of a sequence may be short enough for its middle."""
    given = case(chunk_kda, dtype=dtype, T=138, lens=lens, strength=strength)
    q, k, v, g, beta = (given.tensors[name] for name in ('q', 'k', 'v', 'g', 'beta'))
    inputs = Inputs(q, k, v, g, beta, cu_seqlens=given.cu_seqlens)
    *_, saved, _ = chunk_forward(inputs, Options(1.0, disable_recompute=True))

    def right(count):
        """The kinds of blocks of a chunk with so many steps."""
        if dtype == torch.float16:
            return [FAR.value] * 4
        if abs(strength) * (count // 2) <= 60.0:
            return [WHOLE.value] * 4
        kinds = []
        for begin in range(0, 64, 16):
            steps = min(max(count - begin, 0), 16)
            middle = min(steps, 9)
            furthest = max(middle - 1, steps - middle) * abs(strength)
            kinds.append(NEAR.value if furthest <= 60.0 else FAR.value)
        return kinds

    chunks = [min(64, length - at) for length in lens or [138] for at in range(0, length, 64)]
    assert saved is not None
    found = saved.block_kind[: len(chunks), 0].tolist()
    assert found == [right(count) for count in chunks]
    assert dtype == torch.float16 or kind.value in found[0]


@pytest.mark.pairwise
@pytest.mark.parametrize('dtype', [FP32, BF16])
@pytest.mark.parametrize(('lower_bound', 'kinds'), [(-1.5, 1), (-1.875, 1), (-5.0, 2), (-7.5, 2), (-7.6, 3)])
def test_a_bound_skips_kernels_without_chunks(monkeypatch, lower_bound, kinds, dtype):
    """The other kernels serve gates at the bound itself, where sums in float32 may exceed it."""
    launched = []
    stock = launch.launch

    def spy(kernel, *more, **options):
        def run(*tensors, **constants):
            launched.append((kernel, constants.get('MOST')))
            return stock(kernel, *more, **options)(*tensors, **constants)

        return run

    monkeypatch.setattr(launch, 'launch', spy)
    raw = {'use_gate_in_kernel': True, 'lower_bound': lower_bound, 'A_log': False, 'dt_bias': False}
    given = case(chunk_kda, T=130, dtype=dtype, **raw)
    check(chunk_kda, given.with_tensors(g=torch.full_like(given.tensors['g'], 30.0)))
    names = [kernel for kernel, _ in launched]
    forward, backward = names.count(launch.decays), names.count(launch.pairs_backward)
    assert forward > backward > 0
    assert names.count(launch.prepare) == forward
    assert names.count(launch.channels_backward) == backward
    strong = kinds > 1
    assert [names.count(kernel) for kernel in (launch.scores, launch.updates)] == [forward * strong] * 2
    those = (launch.products_with_states, launch.blocks_backward, launch.gates_backward)
    assert [names.count(kernel) for kernel in those] == [backward * strong] * 3
    assert {most for kernel, most in launched if kernel in (launch.decays, launch.scores, launch.blocks_backward)} == {
        kinds - 1
    }


def test_gates_without_a_bound_may_need_every_kernel():
    assert block_kinds(Options(use_gate_in_kernel=True), FP32) == block_kinds(Options(), BF16) == (0, 1, 2)
    assert block_kinds(Options(use_gate_in_kernel=True, lower_bound=-1.0), torch.float16) == (2,)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [FP32, BF16])
def test_chunks_of_every_kind_in_one_call(dtype):
    """Kernels of one kind do not write chunks of another: weak gates, stronger ones, and blocks of two kinds."""
    given = case(chunk_kda, dtype=dtype, T=64 * 4 + 20, HV=2, strength=-0.1, dt_bias=False)
    g = given.tensors['g']
    g[:, 64:128] = -3.0
    g[:, 128:144] = -20.0
    g[:, 160:192] = -20.0
    q, k, v, beta = (given.tensors[name] for name in ('q', 'k', 'v', 'beta'))
    *_, saved, _ = chunk_forward(Inputs(q, k, v, g, beta), Options(1.0, disable_recompute=True))
    assert saved is not None
    assert saved.block_kind[:5, 0].tolist() == [[0] * 4, [1] * 4, [2, 1, 2, 2], [0] * 4, [0] * 4]
    check(chunk_kda, given)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [FP32, BF16])
def test_short_chunks_of_the_strongest_bounded_gates(dtype):
    """The sequences end before or after the middle of a block, or at a boundary."""
    lens = [8, 9, 16, 17, 33, 34, 48, 49, 50, 63, 64, 127]
    check(chunk_kda, case(chunk_kda, dtype=dtype, lens=lens, HV=2, strength=-4.99))
    given = case(chunk_kda, dtype=dtype, lens=lens, use_gate_in_kernel=True, lower_bound=-5.0, A_log=False, dt_bias=False)
    check(chunk_kda, given.with_tensors(g=torch.full_like(given.tensors['g'], 30.0)))


@pytest.mark.pairwise
@pytest.mark.parametrize('dtype', [FP32, BF16])
@pytest.mark.parametrize('gates', [-1.8, -5.0, -7.4, 'one of -59', 'one of -79'])
def test_the_size_of_numbers_does_not_matter(dtype, gates):
    """Neither that of a gradient, which a mean makes small, nor that of q and k: products relative to a middle have factors
    up to e^60. All results are linear in do, and o in q."""
    strength = gates if isinstance(gates, float) else -1e-3
    given = case(chunk_kda, dtype=dtype, T=64, K=16, V=16, strength=strength, initial=False)
    if isinstance(gates, str):
        given.tensors['g'][:, 16] = float(gates.split()[-1])
    leaves = {name: x.detach().requires_grad_() for name, x in given.tensors.items()}
    o, _ = call(chunk_kda, given.with_tensors(**leaves))
    do = torch.randn_like(o)

    def gradients(scale):
        found = torch.autograd.grad(o, list(leaves.values()), do * scale, retain_graph=True)
        return [x.double() / scale for x in found]

    # powers of two, by which bfloat16 loses nothing
    right = gradients(1.0)
    for scale in (2.0**-27, 2.0**20):
        for name, a, b in zip(leaves, right, gradients(scale), strict=True):
            assert bounds.relative_rms(a, b) <= 1e-6, (name, scale)
    for scale in (2.0**-17, 2.0**14):
        with torch.no_grad():
            scaled, _ = call(chunk_kda, given.with_tensors(q=given.tensors['q'] * scale))
        assert bounds.relative_rms(o.detach().double(), scaled.double() / scale) <= 1e-6, scale
