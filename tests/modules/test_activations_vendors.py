"""Activations and the rotary embedding of Liger-Kernel and FlashInfer with stand-ins for the packages: what is accepted,
what a package gets, and what comes back. On a GPU the packages themselves, where they are installed."""

import inspect
import sys
import types

import pytest
import torch

from fla.backends import default_dispatcher, explain, on_error
from fla.modules.activations import silu_and_mul, swiglu, swiglu_linear
from fla.modules.backends.flashinfer import FlashInferBackend
from fla.modules.backends.flashinfer import activations as flashinfer_activations
from fla.modules.backends.flashinfer import rotary as flashinfer_rotary
from fla.modules.backends.liger import LigerBackend
from fla.modules.backends.liger import activations as liger_activations
from fla.modules.backends.liger import rotary as liger_rotary
from fla.modules.rotary import rotary_embedding, rotary_embedding_ref
from tests import bounds
from tests.ops.vendors import BF16, FP32, H100, fakes, install, odd, on_16, pretend, ran, trust
from tests.vendor_signatures import SIGNATURES, installed

from .oracle import differentiating, error, opcheck, tensor
from .rotary import rotated


def gated(x, y):
    return x * torch.sigmoid(x) * y


def swiglu_forward(a, b):
    assert a.dim() == 2
    assert a.is_contiguous()
    assert b.is_contiguous()
    return a, b, gated(a, b)


def swiglu_backward(a, b, dc):
    """Overwrites its arguments, as the package does."""
    assert dc.is_contiguous()
    exact = [one.detach().double().requires_grad_() for one in (a, b)]
    with differentiating():
        da, db = torch.autograd.grad(gated(*exact), exact, dc.double())
    return a.copy_(da), b.copy_(db)


def rope_forward(q, k, cos, sin):
    """Rotates a transposed view in place."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert q.is_contiguous()
    assert k.shape == (*q.shape[:2], 1, q.shape[3])
    assert cos.shape == sin.shape == (1, q.shape[1], q.shape[3])
    assert cos.dtype == torch.float32
    half = q.shape[3] // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    q.copy_(rotary_embedding_ref(q, cos[0, :, :half], sin[0, :, :half]))
    return q.transpose(1, 2), k.transpose(1, 2), cos, sin


def rope_backward(dq, dk, cos, sin):
    return rope_forward(dq, dk, cos, -sin)[:2]


def flashinfer_silu_and_mul(input):
    assert input.dim() == 2
    assert input.is_contiguous()
    assert on_16(input)
    return gated(*input.float().chunk(2, -1)).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox):
    assert query.is_contiguous()
    assert on_16(query, key, cos_sin_cache)
    assert positions.shape == query.shape[:1]
    assert key.shape == (query.shape[0], head_size)
    assert cos_sin_cache.dtype == torch.float32
    cos, sin = (table[positions] for table in cos_sin_cache.chunk(2, -1))
    heads = query.view(1, query.shape[0], -1, head_size)
    heads.copy_(rotary_embedding_ref(heads, cos, sin, not is_neox))


PACKAGES = {
    'liger': (
        ('liger_kernel', 'liger-kernel', '0.8.5'),
        {
            'ops.swiglu': (swiglu_forward, swiglu_backward),
            'ops.rope': (rope_forward, rope_backward),
        },
    ),
    'flashinfer': (
        ('flashinfer', 'flashinfer-python', '0.7.4'),
        {'activation': (flashinfer_silu_and_mul,), 'rope': (apply_rope_with_cos_sin_cache_inplace,)},
    ),
}
BACKENDS = {'liger': LigerBackend, 'flashinfer': FlashInferBackend}


def module_of(monkeypatch, name):
    made = types.ModuleType(name)
    made.__path__ = []
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Installs the stand-in for a backend's package and enables the backend; the machine seems to have an H100."""

    def make(backend):
        (module, distribution, version), contents = PACKAGES[backend]
        stub = install(monkeypatch, tmp_path, module, distribution, version, __path__=[])
        for path, functions in contents.items():
            parent = stub
            for depth, part in enumerate(path.split('.'), 1):
                name = '.'.join([module, *path.split('.')[:depth]])
                made = sys.modules[name] if depth == 1 and part in vars(stub) else module_of(monkeypatch, name)
                setattr(parent, part, made)
                parent = made
            for function in functions:
                name = function.__name__.removeprefix('flashinfer_')
                assert tuple(inspect.signature(function).parameters) == SIGNATURES[f'{module}.{path}.{name}']
                setattr(parent, name, function)
        monkeypatch.setenv(BACKENDS[backend].env_var, '1')
        pretend(monkeypatch, H100)
        trust(monkeypatch, BACKENDS[backend])
        default_dispatcher().reset()

    yield make
    default_dispatcher().reset()


def rotary(dtype=BF16, shape=(2, 5, 3, 64), half=None, table=FP32, rows=9, **changes):
    """Arguments that both packages take, with changes."""
    half = shape[3] // 2 if half is None else half
    made = {'x': tensor(*shape, dtype=dtype), 'cos': tensor(rows, half, dtype=table), 'sin': tensor(rows, half, dtype=table)}
    return {**made, **changes}


def reason(backend, function, arguments):
    """The reason why a backend does not serve a call; another one does."""
    decision = explain(function, **fakes(arguments))
    assert decision.winner != backend
    assert decision[backend].verdict == 'rejected'
    return decision[backend].reason


def served_by(package, backend, function, arguments):
    package(backend)
    with torch.no_grad():
        served, out = ran(function, 'modules', fakes(arguments))
    assert served == backend
    return out


def test_served(package):
    x = tensor(2, 3, 32, dtype=FP32)
    out = served_by(package, 'liger', swiglu, {'x': x, 'y': x})
    assert (out.shape, out.dtype) == (x.shape, FP32)


def test_silu_and_mul_served(package):
    out = served_by(package, 'flashinfer', silu_and_mul, {'x': tensor(2, 3, 32, dtype=BF16)})
    assert (out.shape, out.dtype) == ((2, 3, 16), BF16)


@pytest.mark.parametrize('inplace', [False, True])
@pytest.mark.parametrize('backend', BACKENDS)
def test_rotary_served(package, backend, inplace):
    package(backend)
    arguments = fakes(rotary(inplace=inplace, seqlen_offsets=2))
    with torch.no_grad():
        served, out = ran(rotary_embedding, 'modules', arguments)
    assert served == backend
    assert (out is arguments['x']) == inplace
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 5, 3, 64), BF16, True)


def test_numbers_of_swiglu(package):
    """Strided arguments, and two backward passes: the package overwrites only copies."""
    package('liger')
    x, y = tensor(6, 2, 5, dtype=FP32).permute(1, 2, 0), tensor(2, 5, 12, dtype=FP32)[..., ::2]
    dz = torch.ones(1, 1, 1).expand(2, 5, 6)
    exact = [one.double().requires_grad_() for one in (x, y)]
    z = gated(*exact)
    assert error(z, liger_activations._forward(x, y)) <= bounds.elementwise(FP32)
    wanted = torch.autograd.grad(z, exact, dz.double())
    for _ in range(2):
        for a, b in zip(wanted, liger_activations._backward(x, y, dz), strict=True):
            assert error(a, b) <= bounds.elementwise(FP32)


def test_numbers_of_silu_and_mul(package):
    package('flashinfer')
    for x in (tensor(4, 3, 32, dtype=BF16).transpose(0, 1), odd(tensor(4, 3, 32, dtype=BF16))):
        assert error(gated(*x.double().chunk(2, -1)), flashinfer_activations._forward(x)) <= bounds.elementwise(BF16)


def test_numbers_of_liger_rotary(package):
    package('liger')
    x, cos, sin = rotary().values()
    before = x.clone()
    y = liger_rotary._forward(x, cos, sin, 3)
    assert torch.equal(x, before)
    assert error(rotated(x.double(), cos.double(), sin.double(), seqlen_offsets=3), y) <= bounds.elementwise(BF16)
    assert error(y, liger_rotary._forward(x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin, 3)) == 0
    dy = before.clone()
    back = liger_rotary._backward(cos, sin, 3, dy)
    assert torch.equal(dy, before)
    assert error(rotated(dy.double(), cos.double(), -sin.double(), seqlen_offsets=3), back) <= bounds.elementwise(BF16)
    liger_rotary._in_place(x, cos, sin, 3)
    assert torch.equal(x, y)


@pytest.mark.parametrize('interleaved', [False, True])
@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('offsets', [2, torch.tensor([1, 3])], ids=['int', 'tensor'])
def test_numbers_of_flashinfer_rotary(package, offsets, packed, interleaved):
    package('flashinfer')
    cu = torch.tensor([0, 2, 5]) if packed else None
    made = rotary(shape=(1 if packed else 2, 5, 3, 64), half=16)
    exact = {name: one.double() for name, one in made.items()}
    wanted = rotated(**exact, seqlen_offsets=offsets, cu_seqlens=cu, interleaved=interleaved)
    given = (offsets, cu, 0) if isinstance(offsets, torch.Tensor) else (None, cu, offsets)
    y = flashinfer_rotary._forward(*made.values(), *given, interleaved)
    assert torch.equal(made['x'].double(), exact['x'])
    assert error(wanted, y) <= bounds.elementwise(BF16)
    for x in (made['x'], odd(made['x'])):
        flashinfer_rotary._in_place(x, made['cos'], made['sin'], *given, interleaved)
        assert torch.equal(x, y)


@pytest.mark.parametrize('inplace', [False, True])
def test_gradients_of_the_operators_of_liger(inplace):
    """Called through the backend, as in compiled code."""
    x, y = (tensor(2, 6, dtype=FP32).to('meta').requires_grad_() for _ in range(2))
    for one in torch.autograd.grad(LigerBackend().swiglu(x, y).sum(), (x, y)):
        assert (one.shape, one.dtype) == (x.shape, x.dtype)
    made = {name: one.to('meta') for name, one in rotary().items()}
    leaf = made.pop('x').requires_grad_()
    out = LigerBackend().rotary_embedding(leaf * 1, **made, inplace=inplace)
    assert torch.autograd.grad(out.sum(), leaf)[0].shape == leaf.shape


def test_operators_of_liger_keep_the_rules(package):
    package('liger')
    opcheck(liger_activations._swiglu, *(tensor(2, 6, dtype=FP32, grad=True) for _ in range(2)))
    x, cos, sin = rotary().values()
    opcheck(liger_rotary._rotary, x.requires_grad_(), cos, sin, 3)
    opcheck(liger_rotary._rotary_in_place, x.detach(), cos, sin, 3)


@pytest.mark.parametrize('offsets', [None, torch.tensor([1, 3])], ids=['int', 'tensor'])
def test_operators_of_flashinfer_keep_the_rules(package, offsets):
    package('flashinfer')
    opcheck(flashinfer_activations._silu_and_mul, tensor(2, 3, 32, dtype=BF16))
    arguments = (*rotary().values(), offsets, None, 2 if offsets is None else 0, False)
    opcheck(flashinfer_rotary._rotary, *arguments)
    opcheck(flashinfer_rotary._rotary_in_place, *arguments)


def test_liger_is_differentiable_and_flashinfer_is_not(package):
    for backend in BACKENDS:
        package(backend)
        arguments = fakes(rotary())
        arguments['x'].requires_grad_()
        decision = explain(rotary_embedding, **arguments)
        assert (decision.winner == backend) == (backend == 'liger')
        if backend == 'flashinfer':
            assert 'inference only' in decision[backend].reason
            arguments = fakes({'x': tensor(2, 32, dtype=BF16)})
            arguments['x'].requires_grad_()
            assert 'inference only' in explain(silu_and_mul, **arguments)[backend].reason


NOTHING = 'cannot be launched on nothing'
HUGE = torch.empty(1, 1).expand(2**15, 2**16)


@pytest.mark.parametrize(
    ('x', 'why'),
    [
        (torch.ones(2, 8, dtype=BF16), 'x must be float32, got torch.bfloat16'),
        (torch.ones(2, 8, dtype=torch.float64), "dtype of 'x' must be"),
        (torch.ones(1, 65537), 'at most 65536 elements, got 65537'),
        (torch.ones(0, 8), NOTHING),
        (HUGE, 'fewer than 2^31 elements, got 2147483648'),
    ],
)
def test_swiglu_refused_by_liger(package, x, why):
    package('liger')
    assert why in reason('liger', swiglu, {'x': x, 'y': x})


@pytest.mark.parametrize(
    ('x', 'why'),
    [
        (torch.ones(2, 24, dtype=BF16), '2D must be a multiple of 16, got 24'),
        (torch.ones(0, 32, dtype=BF16), NOTHING),
        (torch.empty(1, 1, dtype=BF16).expand(2**15, 2**16), 'fewer than 2^31 elements'),
        (torch.ones(2, 32), "dtype of 'x' must be torch.float16, torch.bfloat16"),
    ],
)
def test_silu_and_mul_refused_by_flashinfer(package, x, why):
    package('flashinfer')
    assert why in reason('flashinfer', silu_and_mul, {'x': x})


BOTH = tuple(BACKENDS)
STRIDED = tensor(2, 3, 5, 64, dtype=BF16).transpose(1, 2)


@pytest.mark.parametrize(
    ('backends', 'changes', 'why'),
    [
        (BOTH, {'shape': (0, 5, 3, 64)}, NOTHING),
        (BOTH, {'table': BF16}, 'cos and sin must be float32'),
        (BOTH, {'sin': tensor(9, 32, dtype=BF16)}, 'cos and sin must be float32'),
        (('liger',), {'dtype': torch.float64}, "dtype of 'x' must be"),
        (BOTH, {'x': torch.empty(1, 1, 1, 1, dtype=BF16).expand(2**12, 8, 2**10, 64)}, 'fewer than 2^31 elements'),
        (BOTH, {'x': STRIDED, 'inplace': True}, 'x must be contiguous with inplace=True'),
        (('liger',), {'interleaved': True}, 'argument interleaved is not supported'),
        (('liger',), {'seqlen_offsets': torch.tensor([1, 2])}, 'seqlen_offsets must be an int'),
        (
            ('liger',),
            {'shape': (1, 5, 3, 64), 'cu_seqlens': torch.tensor([0, 2, 5])},
            'argument cu_seqlens is not supported',
        ),
        (('liger',), {'half': 16}, 'R must be D, got 32 and 64'),
        (('flashinfer',), {'shape': (2, 5, 3, 80)}, 'the head dim must be 64, 128, 256 or 512, got 80'),
        (('flashinfer',), {'half': 12}, 'R / 2 must be a multiple of 8, got 12'),
        (('flashinfer',), {'half': 0}, 'R / 2 must be a multiple of 8, got 0'),
        (('flashinfer',), {'dtype': FP32}, "dtype of 'x' must be torch.float16, torch.bfloat16"),
    ],
)
def test_rotary_refused(package, backends, changes, why):
    for backend in backends:
        package(backend)
        assert why in reason(backend, rotary_embedding, rotary(**changes))


def test_tables_with_gradients_are_not_for_liger(package):
    package('liger')
    for name in ('cos', 'sin'):
        arguments = fakes(rotary())
        arguments[name].requires_grad_()
        decision = explain(rotary_embedding, **arguments)
        assert decision.winner == 'reference'
        assert 'no gradient of cos and sin' in decision['liger'].reason


def test_what_is_nobodys():
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    assert not BACKENDS.keys() & {candidate.name for candidate in explain(swiglu_linear, x, x, weight, None).candidates}


@pytest.mark.gpu
def test_liger_itself(monkeypatch):
    """Forward and backward of the real package, within our bounds."""
    pytest.importorskip('liger_kernel')
    monkeypatch.setenv('FLA_LIGER', '1')
    x, y, dz = (tensor(33, 1000, dtype=FP32).cuda() for _ in range(3))
    leaves, exact = [one.clone().requires_grad_() for one in (x, y)], [one.double().requires_grad_() for one in (x, y)]
    served, z = ran(swiglu, 'modules', {'x': leaves[0], 'y': leaves[1]})
    assert served == 'liger'
    assert error(gated(*exact), z) <= bounds.elementwise(FP32)
    found, wanted = torch.autograd.grad(z, leaves, dz), torch.autograd.grad(gated(*exact), exact, dz.double())
    for a, b in zip(wanted, found, strict=True):
        assert error(a, b) <= bounds.elementwise(FP32)
    rotary_itself('liger', True)


@pytest.mark.gpu
def test_flashinfer_itself(monkeypatch):
    if not installed('flashinfer'):
        pytest.skip('flashinfer is not installed')
    monkeypatch.setenv('FLA_FLASHINFER', '1')
    x = tensor(33, 2048, dtype=BF16).cuda()
    with torch.no_grad():
        served, z = ran(silu_and_mul, 'modules', {'x': x})
    assert served == 'flashinfer'
    assert error(gated(*x.double().chunk(2, -1)), z) <= bounds.elementwise(BF16)
    rotary_itself('flashinfer', False)


def rotary_itself(backend, backward):
    made = {name: one.cuda() for name, one in rotary(shape=(2, 77, 8, 128), rows=90).items()}
    exact = {name: one.double() for name, one in made.items()}
    leaf, wide = made['x'].clone().requires_grad_(backward), exact['x'].requires_grad_(backward)
    served, y = ran(rotary_embedding, 'modules', {**made, 'x': leaf, 'seqlen_offsets': 5})
    assert served == backend
    wanted = rotated(**exact, seqlen_offsets=5)
    assert error(wanted, y) <= bounds.elementwise(BF16)
    if backward:
        (found,), (right,) = (torch.autograd.grad(out.sum(), one) for out, one in ((y, leaf), (wanted, wide)))
        assert error(right, found) <= bounds.elementwise(BF16)
    with torch.no_grad():
        assert ran(rotary_embedding, 'modules', {**made, 'seqlen_offsets': 5, 'inplace': True})[0] == backend
    assert torch.equal(made['x'], y)


def test_a_failure_in_place_is_not_tried_elsewhere(package, monkeypatch):
    """x may be partly rotated already."""
    package('liger')

    def fails(q, k, cos, sin):
        q.neg_()
        raise NotImplementedError('half way')

    monkeypatch.setattr(sys.modules['liger_kernel.ops.rope'], 'rope_forward', fails)
    monkeypatch.setattr(LigerBackend, 'devices', ('cpu',))
    monkeypatch.setattr(LigerBackend, 'retryable', (NotImplementedError,))
    monkeypatch.setattr(liger_rotary, '_rotary_in_place', liger_rotary._in_place)
    default_dispatcher().reset()
    made = rotary()
    before = made['x'].clone()
    with on_error('fallback'), pytest.raises(NotImplementedError, match='half way'):
        rotary_embedding(**made, inplace=True)
    assert torch.equal(made['x'], -before)
