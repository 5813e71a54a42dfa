"""The fixed interpreter against torch and float64, and the stock one, which shows that these tests can fail."""

import pytest
import torch

pytest.importorskip('triton')
from tests import process
from tests.triton_support import kernels

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
interpreted = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def exactly(got, expected):
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@interpreted
@pytest.mark.parametrize('dtype', [BF16, FP16])
@pytest.mark.parametrize('precision', ['ieee', 'tf32'])
def test_dot_of_halves_accumulates_in_fp32(dtype, precision):
    a, b = torch.randn(32, 64, dtype=dtype), torch.randn(64, 16, dtype=dtype)
    c = torch.empty(32, 16)
    kernels.dot[(1,)](a, b, c, 32, 64, 16, precision)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=0, atol=2e-5)


@interpreted
@pytest.mark.parametrize(('precision', 'least', 'most'), [('ieee', 0, 2e-5), ('tf32x3', 0, 2e-5), ('tf32', 1e-3, 5e-2)])
def test_dot_of_fp32_reads_as_a_tensor_core_does(precision, least, most):
    a, b = torch.randn(32, 64), torch.randn(64, 16)
    c = torch.empty(32, 16)
    kernels.dot[(1,)](a, b, c, 32, 64, 16, precision)
    assert least <= (c - a.double() @ b.double()).abs().max() <= most
    if precision == 'tf32':
        cut = [(x.view(torch.int32) & ~0x1FFF).view(FP32).double() for x in (a, b)]
        torch.testing.assert_close(c.double(), cut[0] @ cut[1], rtol=0, atol=2e-5)


@interpreted
def test_dot_with_fp16_result_rounds_once():
    a, b = torch.randn(64, 64, dtype=FP16), torch.randn(64, 64, dtype=FP16)
    c = torch.empty(64, 64, dtype=FP16)
    kernels.dot_half[(1,)](a, b, c, 64)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=2**-11, atol=1e-5)


ARITHMETIC = {
    'add': lambda x, y: x + y,
    'sub': lambda x, y: x - y,
    'mul': lambda x, y: x * y,
    'div': lambda x, y: x / y,
    'neg': lambda x, y: -x,
    'abs': lambda x, y: x.abs(),
    'max': torch.maximum,
    'min': torch.minimum,
    'where': lambda x, y: torch.where(x > y, x, y),
    'clamp': lambda x, y: torch.maximum(torch.minimum(x, y), -y),
    'fma': lambda x, y: (x.double() * y.double() + x.double()).to(x.dtype),
    'scalar': lambda x, y: x * torch.tensor(0.1, dtype=x.dtype) + 1,
    'full': lambda x, y: x + torch.tensor(0.3, dtype=BF16),
}


@interpreted
@pytest.mark.parametrize('operation', ARITHMETIC)
def test_bf16_arithmetic_is_exact(operation):
    a, b = torch.randn(256, dtype=BF16), torch.randn(256, dtype=BF16).abs() + 0.01
    c = torch.empty_like(a)
    kernels.arithmetic[(1,)](a, b, c, 256, operation)
    exactly(c, ARITHMETIC[operation](a, b))


@interpreted
@pytest.mark.parametrize('operation', ['lt', 'le', 'gt', 'ge', 'eq', 'ne'])
def test_bf16_comparisons(operation):
    a, b = torch.randn(256, dtype=BF16), torch.randn(256, dtype=BF16)
    b[::3] = a[::3]
    a[0], b[0] = -0.0, 0.0
    c = torch.empty(256, dtype=torch.int32)
    kernels.compare[(1,)](a, b, c, 256, operation)
    exactly(c, getattr(torch, operation)(a, b).int())


@interpreted
@pytest.mark.parametrize('operation', ['and', 'or', 'not'])
def test_blocks_are_joined_element_by_element(operation):
    a, b = torch.randn(256), torch.randn(256)
    c = torch.empty(256, dtype=torch.int32)
    kernels.join[(1,)](a, b, c, 256, operation)
    expected = {'and': (a > 0) & (b > 0), 'or': (a > 0) | (b > 0), 'not': ~(a > 0)}
    exactly(c, expected[operation].int())


@interpreted
@pytest.mark.parametrize('target', [BF16, FP16, FP32, FP64, torch.int32])
@pytest.mark.parametrize('source', [BF16, FP16, FP32, FP64, torch.int32])
def test_conversions_round_to_nearest_even(source, target):
    x = (torch.randn(256, dtype=FP64) * 100).to(source)
    if source.is_floating_point and target.is_floating_point:
        x[:3] = torch.tensor([float('inf'), -float('inf'), float('nan')])
        x[3:6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])  # two ties and one just above
        x[6:8] = torch.tensor([3e38, 1e-40], dtype=FP64).to(source)
    y = torch.empty(256, dtype=target)
    kernels.convert[(1,)](x, y, 256)
    exactly(y, x.to(target))


@interpreted
def test_fp64_to_bf16_rounds_once():
    x = torch.tensor([1 + 2**-8 + 2**-40] * 16, dtype=FP64)  # rounding to float32 first would make it a tie
    y = torch.empty(16, dtype=BF16)
    kernels.convert[(1,)](x, y, 16)
    assert (y == 1 + 2**-7).all()


@interpreted
def test_fp32_to_bf16_towards_zero():
    x = torch.randn(256)
    y = torch.empty(256, dtype=BF16)
    kernels.convert_towards_zero[(1,)](x, y, 256)
    exactly(y.float(), (x.view(torch.int32) & ~0xFFFF).view(FP32))


FUNCTIONS = {
    'exp': torch.exp,
    'own exp': torch.exp,
    'math.exp': torch.exp,
    'exp2': torch.exp2,
    'log': lambda x: x.abs().log(),
    'log2': lambda x: x.abs().log2(),
    'sqrt': lambda x: x.abs().sqrt(),
    'rsqrt': lambda x: x.abs().rsqrt(),
    'sigmoid': torch.sigmoid,
}


@interpreted
@pytest.mark.parametrize('name', FUNCTIONS)
def test_functions(name):
    x = torch.randn(64)
    y = torch.empty(64)
    kernels.function[(1,)](x, y, 64, name)
    torch.testing.assert_close(y, FUNCTIONS[name](x), rtol=1e-6, atol=1e-6)


REDUCTIONS = {
    'sum': lambda x: x.sum(1),
    'max': lambda x: x.amax(1),
    'min': lambda x: x.amin(1),
    'argmax': lambda x: x.argmax(1).int(),
    'keep_dims': lambda x: x.amax(1),
    'all': lambda x: x.amax().expand(x.shape[0]),
    'own': lambda x: x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0],
}


@interpreted
@pytest.mark.parametrize('operation', REDUCTIONS)
@pytest.mark.parametrize('dtype', [BF16, FP16, FP32])
def test_reductions(dtype, operation):
    x = torch.randn(4, 64, dtype=dtype) - 3
    expected = REDUCTIONS[operation](x)
    y = torch.empty(4, dtype=expected.dtype)
    kernels.reduce[(1,)](x, y, 4, 64, operation)
    if operation == 'sum':
        bound = 6 * torch.finfo(dtype).eps / 2  # six roundings
        assert ((y - x.double().sum(1)).abs() <= bound * x.double().abs().sum(1)).all()
    else:
        exactly(y, expected)


@interpreted
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('operation', ['cumsum', 'own'])
@pytest.mark.parametrize('dtype', [BF16, FP32])
def test_scans(dtype, operation, reverse):
    x = torch.randn(32, 4, dtype=dtype)
    y = torch.empty_like(x)
    kernels.scan[(1,)](x, y, 32, 4, operation, reverse)
    forward = x.flip(0) if reverse else x
    if operation == 'cumsum':
        bound = 32 * torch.finfo(dtype).eps / 2
        expected, scale = forward.double().cumsum(0), forward.double().abs().cumsum(0)
        expected, scale = (t.flip(0) if reverse else t for t in (expected, scale))
        assert ((y - expected).abs() <= bound * scale).all()
    else:
        rows = forward.abs().cummax(0).indices
        expected = forward.gather(0, rows)
        exactly(y, expected.flip(0) if reverse else expected)


@interpreted
def test_scan_of_a_pair():
    a, x = torch.rand(32), torch.randn(32)
    y = torch.empty(32)
    kernels.linear_recurrence[(1,)](a, x, y, 32)
    state, expected = torch.zeros(()), []
    for decay, value in zip(a, x, strict=True):
        state = state * decay + value
        expected.append(state)
    torch.testing.assert_close(y, torch.stack(expected))


@interpreted
@pytest.mark.parametrize('step', [1, 2, -1])
def test_loops_with_bounds_known_at_run_time(step):
    out = torch.empty(1, dtype=torch.int64)
    start, end = (9, 2) if step < 0 else (2, 9)
    kernels.loops[(1,)](out, start, end, step, 4)
    assert out.item() == 3 * sum(range(start, end, step)) + sum(range(end)) + 6 + 6 + max(start, end)


@interpreted
@pytest.mark.parametrize('how', ['T', 'trans', 'permute', 'reshape'])
@pytest.mark.parametrize('dtype', [BF16, FP32])
def test_transposes(dtype, how):
    x = torch.randn(16, 32, dtype=dtype)
    y = torch.empty(32, 16, dtype=dtype)
    kernels.transpose[(1,)](x, y, 16, 32, how)
    exactly(y, x.T)


@interpreted
@pytest.mark.parametrize('dtype', [BF16, FP32])
@pytest.mark.parametrize('other', [0.0, 1.5])
def test_masked_lanes_take_other(dtype, other):
    x = torch.randn(16, dtype=dtype)
    y = torch.empty(16, dtype=dtype)
    kernels.masked_copy[(1,)](x[:10], y, 10, other, 16)
    exactly(y, torch.cat([x[:10], torch.full((6,), other, dtype=dtype)]))


@interpreted
@pytest.mark.parametrize('dtype', [BF16, FP16, FP32])
def test_masked_lanes_without_other_are_nan(dtype):
    x, y = torch.randn(16, dtype=dtype), torch.empty(16, dtype=dtype)
    kernels.masked_copy[(1,)](x, y, 10, None, 16)
    assert y[10:].isnan().all()
    assert not y[:10].isnan().any()


@interpreted
def test_masked_scalar_takes_other():
    y = torch.ones(1)
    kernels.masked_scalar[(1,)](torch.ones(4), y, 2)
    assert y.item() == 0


@interpreted
@pytest.mark.parametrize(('source', 'target'), [(16, 15), (15, 16)])
def test_access_outside_the_tensors_is_refused(source, target):
    with pytest.raises(Exception, match=r'1 of the 16 lanes .* lane 15 of shape'):
        kernels.unmasked_copy[(1,)](torch.zeros(source), torch.zeros(target), 16)


@interpreted
@pytest.mark.parametrize('dtype', [BF16, FP16, FP32])
def test_atomic_add_with_shared_addresses(dtype):
    x = torch.arange(16).to(dtype)
    y = torch.ones(4, dtype=dtype)
    kernels.scatter_add[(1,)](x, y, 16)
    exactly(y, torch.tensor([25, 29, 19, 22], dtype=dtype))


@interpreted
@pytest.mark.parametrize('dtype', [BF16, FP32])
def test_tensor_descriptors(dtype):
    x = torch.randn(24, 16, dtype=dtype)  # the second block of 16 rows is half outside
    y = torch.empty_like(x)
    kernels.copy_by_descriptors[(2,)](x, y, 24, 16, 16)
    exactly(y, x * 2)


@interpreted
def test_first_of_several_configurations():
    x, y = torch.randn(40), torch.empty(40)
    kernels.tuned[lambda meta: (-(-40 // meta['S']),)](x, y, 40)
    exactly(y, x + 16)


@interpreted
def test_matmul():
    a, b = torch.randn(32, 64, dtype=BF16), torch.randn(64, 32, dtype=BF16)
    c = torch.empty(32, 32, dtype=BF16)
    kernels.matmul[(1,)](a, b, c, 64, 32, 32, 16)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=2**-8, atol=1e-5)


REFUSED = {
    'inline assembly': 'inline_asm not supported',
    'libdevice': '',
    'block as a truth value': 'a block has no truth value',
    'float8': 'float8',
    'fp16 rounded towards zero': 'RTZ',
}


@interpreted
@pytest.mark.parametrize('what', REFUSED)
def test_unsupported_code_is_refused(what):
    with pytest.raises(Exception, match=REFUSED[what]) as refusal:
        kernels.refused[(1,)](torch.zeros(16), torch.zeros(16), 16, what)
    assert type(refusal.value).__name__ == 'InterpreterError'


STOCK = """
import torch
from tests.triton_support import kernels
torch.manual_seed(0)
a, b, c = torch.randn(32, 64).bfloat16(), torch.randn(64, 16).bfloat16(), torch.empty(32, 16)
kernels.dot[(1,)](a, b, c, 32, 64, 16, 'ieee')
print((c - a.double() @ b.double()).abs().max().item() > 1e3)
x, y, z = torch.randn(3, 256).bfloat16()
kernels.arithmetic[(1,)](x, y, z, 256, 'add')
print(not (z - (x + y)).abs().max().item() < 1)
"""


@pytest.mark.triton
def test_the_stock_interpreter_is_wrong_about_bf16():
    """If this fails, Triton has fixed its interpreter: check which parts of `interpreter` are still needed."""
    done = process.run(STOCK, TRITON_INTERPRET='1')
    assert done.stdout.split() == ['True', 'True'], done.stdout + done.stderr
