"""The kernel that divides rows by their norms, for vendors' kernels that do not."""

import pytest
import torch

pytest.importorskip('triton')
from fla.ops.recurrence.gates import l2norm
from fla.ops.recurrence.kernels.l2norm import normalized, normalized_backward
from tests import bounds
from tests.triton_support.compile_only import compile_only


@pytest.mark.interpreted
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('shape', [(2, 5, 3, 128), (1, 1, 1, 100), (16, 64)])
def test_against_definition(dtype, shape):
    torch.manual_seed(0)
    x, dy = (torch.randn(shape).to(dtype) for _ in range(2))
    wide = x.double().requires_grad_()
    y = l2norm(wide)
    (dx,) = torch.autograd.grad(y, wide, dy.double())
    assert bounds.relative_rms(y, normalized(x)) <= bounds.of_norm(dtype)
    assert bounds.relative_rms(dx, normalized_backward(x, dy)) <= bounds.of_norm(dtype)
    assert normalized(torch.zeros_like(x)).eq(0).all()


@pytest.mark.triton
@pytest.mark.parametrize('capability', [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_compiles(capability):
    x = torch.empty(1, 64, 2, 128, dtype=torch.bfloat16, device='meta')
    with compile_only(capability) as compiled:
        normalized_backward(x, normalized(x))
    print(*compiled, sep='\n')
