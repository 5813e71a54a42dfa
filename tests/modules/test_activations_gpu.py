"""Activations on a GPU."""

import pytest
import torch

from fla.modules.activations import silu_and_mul, swiglu, swiglu_linear
from tests import bounds

from .gpu import captured_equals_eager, compare, compiled_equals_eager, gpu_tensor, other_device
from .oracle import error

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 1), (7, 77), (4, 128, 4096), (33, 11008), (2, 65536)]


VIEWS = {
    'rows apart': lambda x: x[..., :100],
    'columns apart': lambda x: x[..., ::2],
    'transposed': lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    'rows broadcast': lambda x: x[:, :1].expand_as(x),
    'columns broadcast': lambda x: x[..., :1].expand_as(x),
}


def gated(x, y):
    return x * torch.sigmoid(x) * y


def halves(x):
    return gated(*x.chunk(2, -1))


def linear(x, y, weight, bias):
    z = gated(x, y) @ weight.T
    return z if bias is None else z + bias


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_numerics(shape, dtype):
    x, y = (gpu_tensor(*shape, dtype=dtype, grad=True, seed=seed) for seed in (0, 1))
    bound = bounds.elementwise(dtype)
    compare(swiglu, gated, (x, y), bound)
    packed = gpu_tensor(*shape[:-1], 2 * shape[-1], dtype=dtype, grad=True)
    compare(silu_and_mul, halves, (packed,), bound)
    apart = packed.detach().chunk(2, -1)
    compare(swiglu, gated, [one.requires_grad_() for one in apart], bound)


@pytest.mark.parametrize('view', VIEWS)
def test_strided_and_broadcast(view):
    x, y = (VIEWS[view](gpu_tensor(6, 40, 200, dtype=torch.bfloat16, seed=seed)).requires_grad_() for seed in (0, 1))
    compare(swiglu, gated, (x, y), bounds.elementwise(torch.bfloat16))
    compare(silu_and_mul, halves, (x,), bounds.elementwise(torch.bfloat16))
    weight = VIEWS[view](gpu_tensor(6, 40, 200, dtype=torch.bfloat16, seed=2))[0].requires_grad_()
    compare(swiglu_linear, linear, (x, y, weight, None), bounds.of_sums(torch.bfloat16))


# not float32 with the longest sums, whose rounding exceeds the bound
@pytest.mark.parametrize(
    ('out', 'D', 'dtype'),
    [
        *((out, D, dtype) for out, D in ((64, 100), (1, 1)) for dtype in DTYPES),
        *((40, 65536, dtype) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_linear(out, D, dtype):
    x, y = (gpu_tensor(5, D, dtype=dtype, grad=True, seed=seed) for seed in (0, 1))
    weight, bias = gpu_tensor(out, D, dtype=dtype, grad=True, seed=2), gpu_tensor(out, dtype=dtype, grad=True, seed=3)
    # operands are rounded, and so is the gradient of the activation
    compare(swiglu_linear, linear, (x, y, weight, bias), bounds.of_sums(dtype))


def test_linear_keeps_no_activation():
    x, y = (gpu_tensor(4096, 4096, dtype=torch.bfloat16, grad=True) for _ in range(2))
    weight = gpu_tensor(16, 4096, dtype=torch.bfloat16, grad=True)
    swiglu_linear(x, y, weight, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o = swiglu_linear(x, y, weight, None)
    assert torch.cuda.memory_allocated() - before < 2 * o.numel() * o.element_size() + 2**20


def test_more_than_32_bits():
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip('needs 30 GiB')
    rows = 2**31 // 8192 + 5
    x = torch.ones(rows, 8192, dtype=torch.bfloat16, device='cuda')
    x[-1] = gpu_tensor(8192, dtype=torch.bfloat16)
    assert error(gated(x[-1].double(), x[-1].double()), swiglu(x, x)[-1]) <= bounds.elementwise(torch.bfloat16)
    assert error(halves(x[-1].double()), silu_and_mul(x)[-1]) <= bounds.elementwise(torch.bfloat16)


def test_capture_and_compile():
    x, y = (gpu_tensor(64, 256, dtype=torch.bfloat16, grad=True, seed=seed) for seed in (0, 1))
    weight = gpu_tensor(32, 256, dtype=torch.bfloat16, grad=True)

    def block(x, y, weight):
        return swiglu_linear(swiglu(x, y), silu_and_mul(torch.cat([x, y], -1)), weight, None)

    compiled_equals_eager(block, (x, y, weight))
    captured_equals_eager(block, tuple(one.detach() for one in (x, y, weight)))


def test_device_that_is_not_current():
    device = other_device()
    x, y = (gpu_tensor(5, 40, dtype=torch.float32, grad=True, device=device) for _ in range(2))
    compare(swiglu, gated, (x, y), bounds.elementwise(torch.float32))
