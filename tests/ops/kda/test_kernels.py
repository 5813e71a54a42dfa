"""What only the kernels of Kimi delta attention have, interpreted. What both delta rules have: tests/ops/test_kernels.py."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.kda import chunk_kda
from fla.ops.kda.kernels import launch
from fla.ops.kda.kernels.forward import HALVES, LEVELS, WHOLE
from fla.ops.kda.kernels.launch import Settings, chunk_forward
from tests import bounds
from tests.ops.delta_rules import case
from tests.ops.kernels import BF16, EVERYTHING, FP32, assert_same, call, check, everything

pytestmark = pytest.mark.interpreted


def test_kept_tensors_give_the_same_gradients_and_serve_twice():
    given = case(chunk_kda, dtype=BF16, HV=2, **EVERYTHING)
    assert_same(everything(chunk_kda, given), everything(chunk_kda, given, disable_recompute=True))
    leaves = {name: x.requires_grad_() for name, x in given.tensors.items()}
    o, _ = call(chunk_kda, given, disable_recompute=True)
    first, second = (torch.autograd.grad(o.sum(), list(leaves.values()), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize('v_first', [False, True])
def test_intermediate_states(v_first):
    """The state before each chunk, of KDA."""
    given = case(chunk_kda, T=130, B=2, HV=2, state_v_first=v_first)
    with torch.no_grad():
        *_, states = call(chunk_kda, given, return_intermediate_states=True)
        wide = given.with_tensors(**{n: x.double() for n, x in given.tensors.items()})
        *_, right = call(chunk_kda, wide, 'reference', return_intermediate_states=True, chunk_size=64)
    assert states.shape == right.shape
    assert bounds.relative_rms(right, states) <= bounds.of_kernel('final', FP32)[0]


@pytest.mark.parametrize('lens', [None, [64, 33, 0, 1, 40]], ids=['equal', 'packed'])
@pytest.mark.parametrize('dtype', [FP32, BF16, torch.float16])
@pytest.mark.parametrize(('strength', 'kind'), [(-1.0, WHOLE), (-3.0, HALVES), (-4.9, HALVES), (-20.0, LEVELS)])
def test_how_a_chunk_goes_depends_on_its_decays(strength, kind, dtype, lens):
    """By which kernels the cases of the grid are computed. What is left of a sequence may be short enough for its middle."""
    given = case(chunk_kda, dtype=dtype, T=138, lens=lens, strength=strength)
    q, k, v, g, beta = (given.tensors[name] for name in ('q', 'k', 'v', 'g', 'beta'))
    *_, saved, _ = chunk_forward(q, k, v, g, beta, Settings(1.0), cu_seqlens=given.cu_seqlens, keep=True)
    lengths = lens or [138]
    chunks = [min(64, length - at) for length in lengths for at in range(0, length, 64)]
    half = dtype == torch.float16
    whole = [abs(strength) * (chunk // 2) <= 60.0 for chunk in chunks]
    right = [LEVELS if half else WHOLE if middle else kind for middle in whole]
    assert saved.kinds is not None
    assert saved.kinds[: len(chunks), 0].tolist() == [one.value for one in right]
    assert kind == WHOLE or not all(whole)


@pytest.mark.parametrize(('lower_bound', 'kinds'), [(-1.5, 1), (-1.875, 1), (-5.0, 2), (-5.1, 3), (None, 3)])
def test_a_bound_of_the_gates_leaves_out_kernels_that_would_find_no_chunk(monkeypatch, lower_bound, kinds):
    """And what is left serves gates at the bound itself, where float32 sums are beyond it."""
    launched = []
    stock = launch.launch

    def spy(kernel, *more, **options):
        launched.append(kernel)
        return stock(kernel, *more, **options)

    monkeypatch.setattr(launch, 'launch', spy)
    given = case(chunk_kda, T=130, use_gate_in_kernel=True, lower_bound=lower_bound, A_log=False, dt_bias=False)
    given = given.with_tensors(g=torch.full_like(given.tensors['g'], 30.0).requires_grad_())
    if lower_bound is not None:
        check(chunk_kda, given)
        forward = [kernel for kernel in launched if kernel in (launch.prepare, launch.prepare_by_levels)]
        assert len(forward) == 2 * kinds  # computed again for the backward
        assert launched.count(launch.channels_backward) == kinds
    else:
        assert len(launch._kinds(Settings(1.0, gate=True), FP32)) == kinds


@pytest.mark.parametrize('dtype', [FP32, BF16])
def test_short_chunks_and_the_strongest_bounded_gates_go_through_the_middles_of_halves(dtype):
    """Where what is left of a sequence ends before or behind a middle, and at e^80 to either side of it."""
    lens = [17, 33, 34, 48, 49, 50, 63, 64, 127]
    check(chunk_kda, case(chunk_kda, dtype=dtype, lens=lens, HV=2, strength=-4.99))
    given = case(chunk_kda, dtype=dtype, lens=lens, use_gate_in_kernel=True, lower_bound=-5.0, A_log=False, dt_bias=False)
    check(chunk_kda, given.with_tensors(g=torch.full_like(given.tensors['g'], 30.0)))
