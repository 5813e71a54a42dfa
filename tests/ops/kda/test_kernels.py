"""What only the kernels of Kimi delta attention have, interpreted. What both delta rules have: tests/ops/test_kernels.py."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.kda import chunk_kda
from tests import bounds
from tests.ops.delta_rules import case
from tests.ops.kernels import BF16, EVERYTHING, FP32, assert_same, call, everything

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
