"""The norms of Liger-Kernel, FlashInfer and FlagGems with stand-ins for the packages: what is accepted, what a package gets,
and what comes back. On a GPU the packages themselves, where they are installed."""

import inspect
import sys
import types

import pytest
import torch

from fla.backends import default_dispatcher, explain
from fla.modules.backends import flag_gems as flag_gems_backend
from fla.modules.backends.flag_gems import FlagGemsBackend
from fla.modules.backends.flashinfer import FlashInferBackend
from fla.modules.backends.flashinfer import norms as flashinfer_norms
from fla.modules.backends.liger import LigerBackend
from fla.modules.backends.liger import norms as liger_norms
from fla.modules.norm.layernorm import group_norm, layer_norm, rms_norm
from tests import bounds
from tests.modules.norms import check, given
from tests.modules.oracle import opcheck
from tests.ops.vendors import BF16, FP16, FP32, H100, fakes, install, odd, on_16, pretend, ran, trust
from tests.vendor_signatures import SIGNATURES, installed

FP64 = torch.float64
BACKENDS = {'liger': LigerBackend, 'flashinfer': FlashInferBackend, 'flag_gems': FlagGemsBackend}


def takes(path):
    """Checks that a stand-in has the parameters that the backend assumes of the vendor's function."""

    def decorate(function):
        assert tuple(inspect.signature(function).parameters) == SIGNATURES[path]
        return function

    return decorate


def exact(x, weight, bias, eps):
    """The norm, and its gradients for an incoming one."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    s = x if bias is None else x - x.mean(-1, keepdim=True)
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias.double(), x, weight


def from_kept(dy, x, weight, mean, scale):
    """The gradients of x and weight, of the mean (0 for RMS norms) and the scale that a forward has kept: others of those
    give other gradients."""
    dy, x, weight, scale = dy.double(), x.double(), weight.double(), scale.double()[:, None]
    xhat = (x - mean) * scale
    g = dy * weight
    centred = 0.0 if isinstance(mean, float) else g.mean(-1, keepdim=True)
    return scale * (g - centred - xhat * (g * xhat).mean(-1, keepdim=True)), (dy * xhat).sum(0)


@takes('liger_kernel.ops.rms_norm.rms_norm_forward')
def liger_rms_forward(X, W, eps, offset, casting_mode, row_mode):
    assert X.dim() == 2
    assert X.is_contiguous()
    assert (offset, casting_mode, row_mode) == (0.0, 1, True)
    scale = torch.rsqrt(X.float().square().mean(-1) + eps)
    return (X.float() * scale[:, None] * W.float()).to(X.dtype), X, scale, 128, 4, casting_mode


@takes('liger_kernel.ops.rms_norm.rms_norm_backward')
def liger_rms_backward(dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode):
    assert (offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode) == (0.0, 1, 128, 4, False, True)
    assert dY.shape == X.shape
    assert dY.is_contiguous()
    assert (RSTD.shape, RSTD.dtype) == (X.shape[:1], FP32)
    dx, dweight = from_kept(dY, X, W, 0.0, RSTD)
    return dx.to(X.dtype), dweight.to(W.dtype)


@takes('liger_kernel.ops.layer_norm.layer_norm_forward')
def liger_layer_forward(X, W, B, eps):
    assert X.dim() == 2
    wide = X.float()
    mean, scale = wide.mean(-1), torch.rsqrt(wide.var(-1, unbiased=False) + eps)
    y = (wide - mean[:, None]) * scale[:, None] * W.float() + B.float()
    return y.to(X.dtype), X, mean, scale, 128, 4


@takes('liger_kernel.ops.layer_norm.layer_norm_backward')
def liger_layer_backward(dY, X, W, B, Mean, RSTD):
    assert dY.is_contiguous()
    assert Mean.shape == RSTD.shape == X.shape[:1]
    assert Mean.dtype == RSTD.dtype == FP32
    dx, dweight = from_kept(dY, X, W, Mean.double()[:, None], RSTD)
    return dx.to(X.dtype), dweight.to(W.dtype), dY.double().sum(0).to(B.dtype)


@takes('liger_kernel.ops.utils.calculate_settings')
def calculate_settings(n):
    return 128, 4


@takes('flashinfer.norm.rmsnorm')
def flashinfer_rmsnorm(input, weight, eps):
    assert input.dim() == 2
    assert input.dtype == weight.dtype
    assert on_16(input, weight)
    return exact(input, weight, None, eps)[0].detach().to(input.dtype)


@takes('flashinfer.norm.layernorm')
def flashinfer_layernorm(input, gemma, beta, eps):
    assert (input.dtype, gemma.dtype, beta.dtype) == (BF16, FP32, FP32)
    assert on_16(input, gemma, beta)
    return exact(input, gemma, beta, eps)[0].detach().to(input.dtype)


@takes('flag_gems.ops.rms_norm')
def flag_gems_rms_norm(x, normalized_shape, weight, eps):
    assert tuple(normalized_shape) == x.shape[-1:]
    return exact(x, weight, None, eps)[0].detach().to(x.dtype)


@takes('flag_gems.ops.layer_norm')
def flag_gems_layer_norm(input, normalized_shape, weight, bias, eps):
    assert tuple(normalized_shape) == input.shape[-1:]
    y = exact(input, weight, bias, eps)[0].detach().to(input.dtype)
    return y, input.mean(-1), input.var(-1)


PACKAGES = {
    'liger': (
        ('liger_kernel', 'liger-kernel', '0.8.5'),
        {
            'ops.rms_norm': {'rms_norm_forward': liger_rms_forward, 'rms_norm_backward': liger_rms_backward},
            'ops.layer_norm': {'layer_norm_forward': liger_layer_forward, 'layer_norm_backward': liger_layer_backward},
            'ops.utils': {'calculate_settings': calculate_settings},
        },
    ),
    'flashinfer': (
        ('flashinfer', 'flashinfer-python', '0.7.4'),
        {'norm': {'rmsnorm': flashinfer_rmsnorm, 'layernorm': flashinfer_layernorm}},
    ),
    'flag_gems': (
        ('flag_gems', 'flag-gems', '5.0.2'),
        {'ops': {'rms_norm': flag_gems_rms_norm, 'layer_norm': flag_gems_layer_norm}},
    ),
}


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Installs the stand-in for a backend's package and enables the backend; the machine seems to have an H100."""

    def make(backend):
        (module, distribution, version), contents = PACKAGES[backend]
        stub = install(monkeypatch, tmp_path, module, distribution, version, __path__=[])
        for path, functions in contents.items():
            for name in {path.partition('.')[0], path}:
                made = types.ModuleType(f'{module}.{name}')
                made.__path__ = []
                monkeypatch.setitem(sys.modules, f'{module}.{name}', made)
            vars(made if made.__name__.endswith(path) else sys.modules[f'{module}.{path}']).update(functions)
            if '.' not in path:
                setattr(stub, path, sys.modules[f'{module}.{path}'])
        monkeypatch.setenv(BACKENDS[backend].env_var, '1')
        pretend(monkeypatch, H100)
        trust(monkeypatch, BACKENDS[backend])
        default_dispatcher().reset()

    yield make
    default_dispatcher().reset()


def tensors(dtype=BF16, D=16, rows=3, parameters=None, layer=False, **changes):
    """Arguments that all packages take, with changes."""
    torch.manual_seed(0)
    made = {'x': torch.randn(rows, D).to(dtype), 'weight': torch.randn(D).to(parameters or dtype)}
    if layer:
        made['bias'] = torch.randn(D).to(parameters or dtype)
    return {**made, **changes}


def reason(backend, function, arguments):
    """The reason why a backend does not serve a call; another one does."""
    decision = explain(function, **fakes(arguments))
    assert decision.winner != backend
    assert decision[backend].verdict == 'rejected'
    return decision[backend].reason


LAYER = {'liger': {}, 'flashinfer': {'parameters': FP32}, 'flag_gems': {}}


@pytest.mark.parametrize('options', [{}, {'prenorm': True}, {'prenorm': True, 'residual_in_fp32': True}], ids=len)
@pytest.mark.parametrize('function', [rms_norm, layer_norm])
@pytest.mark.parametrize('backend', BACKENDS)
def test_served(package, backend, function, options):
    package(backend)
    layer = function is layer_norm
    arguments = tensors(layer=layer, **(LAYER[backend] if layer else {}))
    with torch.no_grad():
        served, out = ran(function, 'modules', fakes({**arguments, **options}))
    assert served == backend
    y, *total = out if options else (out,)
    assert (y.shape, y.dtype, y.is_contiguous()) == (arguments['x'].shape, BF16, True)
    assert [one.dtype for one in total] == [FP32 if 'residual_in_fp32' in options else BF16] * len(total)


@pytest.mark.parametrize('D', [16, 8, 24])
@pytest.mark.parametrize('backend', BACKENDS)
def test_numbers(package, backend, D):
    """The arguments that the stand-ins receive and check, and the results."""
    package(backend)
    where = {'liger': liger_norms, 'flashinfer': flashinfer_norms, 'flag_gems': flag_gems_backend}[backend]
    made = tensors(D=D, rows=6)
    x = made['x'].view(2, 3, D).transpose(0, 1)
    y = where._rms_forward(x, made['weight'], 1e-5)
    y = y[0] if backend == 'liger' else y
    assert bounds.relative_rms(exact(x, made['weight'], None, 1e-5)[0].detach(), y) <= bounds.of_norm(BF16)
    made = tensors(D=D, rows=6, layer=True, **LAYER[backend])
    x = made['x'].view(2, 3, D).transpose(0, 1)
    y = where._layer_forward(x, made['weight'], made['bias'], 1e-5)
    y = y[0] if backend == 'liger' else y
    assert y.shape == x.shape
    right = exact(x, made['weight'], made['bias'], 1e-5)[0].detach()
    assert bounds.relative_rms(right, y) <= bounds.of_norm(BF16)


def test_odd_addresses(package):
    """FlashInfer reads 16 bytes at a time; its stand-in checks the alignment."""
    package('flashinfer')
    made = {name: odd(x) for name, x in tensors().items()}
    y = flashinfer_norms._rms_forward(made['x'], made['weight'], 1e-5)
    assert bounds.relative_rms(exact(*made.values(), None, 1e-5)[0].detach(), y) <= bounds.of_norm(BF16)
    made = {name: odd(x) for name, x in tensors(layer=True, parameters=FP32).items()}
    y = flashinfer_norms._layer_forward(*made.values(), 1e-5)
    assert bounds.relative_rms(exact(*made.values(), 1e-5)[0].detach(), y) <= bounds.of_norm(BF16)


@pytest.mark.parametrize('eps', [1e-5, 0.5])
def test_gradients_of_liger(package, eps):
    """The package's backward needs what its forward saved."""
    package('liger')
    made = tensors(layer=True, rows=6)
    x, weight, bias = made['x'].view(2, 3, 16).transpose(0, 1), made['weight'], made['bias']
    dy = torch.randn(16, 2, 3).bfloat16().permute(2, 1, 0)
    _, scale = liger_norms._rms_forward(x, weight, eps)
    found = liger_norms._rms_backward(x, weight, scale, dy)
    y, *inputs = exact(x, weight, None, eps)
    for got, right in zip(found, torch.autograd.grad(y, inputs, dy.double()), strict=True):
        assert got.shape == right.shape
        assert bounds.relative_rms(right, got) <= bounds.of_norm(BF16)
    _, mean, scale = liger_norms._layer_forward(x, weight, bias, eps)
    found = liger_norms._layer_backward(x, weight, bias, mean, scale, dy)
    y, *inputs = exact(x, weight, bias, eps)
    wanted = (*torch.autograd.grad(y, inputs, dy.double()), dy.double().sum((0, 1)))
    for got, right in zip(found, wanted, strict=True):
        assert got.shape == right.shape
        assert bounds.relative_rms(right, got) <= bounds.of_norm(BF16)


@pytest.mark.parametrize('backend', BACKENDS)
def test_operators_keep_the_rules(package, backend):
    package(backend)
    where = {'liger': liger_norms, 'flashinfer': flashinfer_norms, 'flag_gems': flag_gems_backend}[backend]
    for kernel, layer in ((where._rms_norm, False), (where._layer_norm, True)):
        made = tensors(layer=layer, **(LAYER[backend] if layer else {}))
        opcheck(kernel, *(x.requires_grad_(backend == 'liger') for x in made.values()), 1e-5)


@pytest.mark.parametrize('function', [rms_norm, layer_norm])
def test_liger_is_differentiable_and_the_others_are_not(package, function):
    for backend in BACKENDS:
        package(backend)
        layer = function is layer_norm
        arguments = fakes(tensors(layer=layer, **(LAYER[backend] if layer else {})))
        arguments['weight'].requires_grad_()
        decision = explain(function, **arguments)
        assert (decision.winner == backend) == (backend == 'liger')
        if backend != 'liger':
            assert 'inference only' in decision[backend].reason


@pytest.mark.parametrize('function', [rms_norm, layer_norm])
def test_gradients_of_the_operators_of_liger(function):
    """Called through the backend, as in compiled code."""
    arguments = {name: x.to('meta').requires_grad_() for name, x in tensors(layer=function is layer_norm).items()}
    y = getattr(LigerBackend(), function.__name__)(**arguments)
    for x, gradient in zip(arguments.values(), torch.autograd.grad(y.sum(), list(arguments.values())), strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


ALL, NOTHING = tuple(BACKENDS), 'x is empty, and the kernels cannot be launched on nothing'
HUGE = {'x': torch.empty(1, 1, dtype=BF16).expand(2**15, 2**16), 'weight': torch.empty(2**16, dtype=BF16)}
HUGE_LAYER = {**HUGE, 'bias': HUGE['weight']}
NO_WEIGHT = {
    'liger': 'rms_norm needs a weight',
    'flashinfer': 'rmsnorm needs a weight in the dtype of x',
    'flag_gems': 'weight, and bias of layer_norm, must be given in the dtype of x',
}


@pytest.mark.parametrize(
    ('backends', 'changes', 'why'),
    [
        (ALL, {'residual': torch.ones(3, 16, dtype=BF16)}, 'argument residual is not supported'),
        (ALL, {'bias': torch.ones(16, dtype=BF16)}, 'argument bias is not supported'),
        (ALL, {'weight': None}, NO_WEIGHT),
        (('flashinfer', 'flag_gems'), {'parameters': FP32}, NO_WEIGHT),
        (ALL, {'rows': 0}, NOTHING),
        (ALL, HUGE, 'x must have fewer than 2^31 elements, got 2147483648'),
        (('liger',), {'D': 65537}, 'a row must have at most 65536 elements, got 65537'),
        (('flashinfer',), {'D': 12}, 'rows are read 16 bytes at a time: D must be a multiple of 8, got 12'),
        (ALL, {'dtype': FP64}, "dtype of 'x' must be"),
        (('flashinfer',), {'dtype': FP32}, "dtype of 'x' must be torch.float16, torch.bfloat16, got torch.float32"),
        (('liger',), {'parameters': FP64}, "dtype of 'weight' must be"),
    ],
)
def test_refused_by_rms_norm(package, backends, changes, why):
    for backend in backends:
        package(backend)
        expected = why[backend] if isinstance(why, dict) else why
        assert expected in reason(backend, rms_norm, tensors(**changes))


@pytest.mark.parametrize(
    ('backend', 'changes', 'why'),
    [
        ('liger', {'weight': None}, 'layer_norm needs a weight and a bias'),
        ('liger', {'bias': None}, 'layer_norm needs a weight and a bias'),
        ('liger', {'bias': torch.ones(16, dtype=FP64)}, "dtype of 'bias' must be"),
        ('liger', {'rows': 0}, NOTHING),
        ('liger', {'is_rms_norm': True}, 'argument is_rms_norm is not supported'),
        ('liger', {'residual': torch.ones(3, 16, dtype=BF16)}, 'argument residual is not supported'),
        ('flashinfer', {'dtype': FP16, 'parameters': FP32}, 'layernorm is for bfloat16, got torch.float16'),
        ('flashinfer', {}, 'layernorm needs a weight and a bias in float32'),
        ('flashinfer', {'parameters': FP32, 'bias': None}, 'layernorm needs a weight and a bias in float32'),
        ('flashinfer', {'parameters': FP32, 'D': 12}, 'D must be a multiple of 8, got 12'),
        ('flashinfer', {'parameters': FP32, 'is_rms_norm': True}, 'argument is_rms_norm is not supported'),
        ('liger', {'D': 65537}, 'a row must have at most 65536 elements, got 65537'),
        ('liger', HUGE_LAYER, 'x must have fewer than 2^31 elements, got 2147483648'),
        ('flashinfer', {'parameters': FP32, 'weight': None}, 'layernorm needs a weight and a bias in float32'),
        ('flashinfer', {'parameters': FP32, 'rows': 0}, NOTHING),
        ('flashinfer', {**HUGE_LAYER, 'weight': HUGE['weight'].float(), 'bias': HUGE['weight'].float()}, 'fewer than 2^31'),
        (
            'flashinfer',
            {'parameters': FP32, 'residual': torch.ones(3, 16, dtype=BF16)},
            'argument residual is not supported',
        ),
        ('flag_gems', {'weight': None}, NO_WEIGHT['flag_gems']),
        ('flag_gems', HUGE_LAYER, 'x must have fewer than 2^31 elements, got 2147483648'),
        ('flag_gems', {'residual': torch.ones(3, 16, dtype=BF16)}, 'argument residual is not supported'),
        ('flag_gems', {'is_rms_norm': True}, 'argument is_rms_norm is not supported'),
        ('flag_gems', {'parameters': FP32}, NO_WEIGHT['flag_gems']),
        ('flag_gems', {'bias': None}, NO_WEIGHT['flag_gems']),
        ('flag_gems', {'rows': 0}, NOTHING),
    ],
)
def test_refused_by_layer_norm(package, backend, changes, why):
    package(backend)
    assert why in reason(backend, layer_norm, tensors(layer=True, **changes))


def test_group_norm_is_nobodys():
    decision = explain(group_norm, torch.randn(2, 8), None, num_groups=2)
    assert not BACKENDS.keys() & {candidate.name for candidate in decision.candidates}


@pytest.mark.parametrize('backend', BACKENDS)
def test_off_until_somebody_switches_it_on(package, monkeypatch, backend):
    package(backend)
    monkeypatch.delenv(BACKENDS[backend].env_var)
    decision = explain(rms_norm, **fakes(tensors()))
    assert decision.winner == 'default'
    assert decision[backend].verdict == 'disabled'


@pytest.mark.gpu
@pytest.mark.parametrize('shape', [(3, 5, 128), (40_000, 128), (64, 4096), (7, 1000), (2, 65536)], ids=str)
@pytest.mark.parametrize(('dtype', 'wide'), [(BF16, ()), (BF16, ('weight', 'bias')), (FP16, ()), (FP32, ())])
def test_liger_itself(monkeypatch, dtype, wide, shape):
    """Forward and backward of the real package, within our bounds."""
    pytest.importorskip('liger_kernel')
    monkeypatch.setenv('FLA_LIGER', '1')
    check('rms', given('rms', shape, dtype, ('weight',), wide, device='cuda'), 'liger')
    check('layer', given('layer', shape, dtype, ('weight', 'bias'), wide, device='cuda'), 'liger')


@pytest.mark.gpu
@pytest.mark.parametrize('backend', ['flashinfer', 'flag_gems'])
@pytest.mark.parametrize('shape', [(3, 5, 128), (40_000, 128), (64, 4096)], ids=str)
def test_inference_of_others(monkeypatch, backend, shape):
    if not installed(PACKAGES[backend][0][0]):
        pytest.skip(f'{backend} is not installed')
    monkeypatch.setenv(BACKENDS[backend].env_var, '1')
    for function in (rms_norm, layer_norm):
        layer = function is layer_norm
        arguments = tensors(D=shape[-1], layer=layer, **(LAYER[backend] if layer else {}))
        arguments['x'] = torch.randn(shape).to(BF16)
        arguments = {name: x.cuda() for name, x in arguments.items()}
        with torch.no_grad():
            served, y = ran(function, 'modules', arguments)
        assert served == backend
        right = exact(arguments['x'], arguments['weight'], arguments.get('bias'), 1e-5)[0].detach()
        assert bounds.relative_rms(right, y) <= bounds.of_norm(BF16)
